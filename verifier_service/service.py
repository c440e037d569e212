"""The VerifierService servicer: translates messages and guards the contract."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator
from typing import Any

import grpc

from specdec.errors import SpecdecError
from specdec.lm.runtime import ModelRuntime, Session
from specdec.open_sessions import OpenSessions
from specdec.proposals import needs_distributions
from specdec.sessions import SessionContract
from specdec.streams import require, require_parsed, session_stream
from specdec.v1 import common_pb2, verifier_pb2, verifier_pb2_grpc
from specdec.wire import Malformed, parsed
from verifier_service.verification import Verification

_CONTENT_BYTES = 256 * 1024


class VerifierServicer(verifier_pb2_grpc.VerifierServiceServicer):
    """Serves verdicts once `runtime` is set; until then every call is UNAVAILABLE."""

    def __init__(self, max_sessions: int) -> None:
        """`max_sessions`: how many may be open at once."""
        self.runtime: ModelRuntime | None = None
        self.sessions = OpenSessions(max_sessions)

    async def GetModelInfo(
        self,
        request: verifier_pb2.VerifierServiceGetModelInfoRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> verifier_pb2.VerifierServiceGetModelInfoResponse:
        await require_parsed(request, context)
        runtime = await require(self.runtime, self.sessions, context)
        return verifier_pb2.VerifierServiceGetModelInfoResponse(model_info=runtime.info)

    async def GetTokenizer(
        self,
        request: verifier_pb2.GetTokenizerRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.GetTokenizerResponse]:
        await require_parsed(request, context)
        tokenizer = (await require(self.runtime, self.sessions, context)).loaded.tokenizer
        yield verifier_pb2.GetTokenizerResponse(
            header=verifier_pb2.TokenizerHeader(
                content_sha256=hashlib.sha256(tokenizer.content).hexdigest(),
                size_bytes=len(tokenizer.content),
                chat_template=tokenizer.chat_template,
                special_tokens=tokenizer.special_tokens,
            )
        )
        for start in range(0, len(tokenizer.content), _CONTENT_BYTES):
            yield verifier_pb2.GetTokenizerResponse(
                content=tokenizer.content[start : start + _CONTENT_BYTES]
            )

    async def Verify(
        self,
        request_iterator: AsyncIterator[verifier_pb2.VerifyRequest | Malformed],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[verifier_pb2.VerifyResponse]:
        runtime = await require(self.runtime, self.sessions, context)
        async with (
            session_stream(request_iterator, context, runtime.info, self.sessions) as contract,
            runtime.session(contract.opening) as session,
        ):
            contract.opened()
            yield verifier_pb2.VerifyResponse(opened=session.opened)
            async for request in request_iterator:
                candidates = _candidates_of(parsed(request))
                if not contract.begin(candidates.round, candidates.base_length):
                    continue
                yield await self._verify(runtime, session, contract, candidates)

    async def _verify(
        self,
        runtime: ModelRuntime,
        session: Session,
        contract: SessionContract,
        candidates: verifier_pb2.Candidates,
    ) -> verifier_pb2.VerifyResponse:
        token_ids = list(candidates.token_ids)
        distributions = list(candidates.distributions)
        contract.check_candidates(
            token_ids,
            distributions,
            candidates.parents,
            need_distributions=needs_distributions(
                session.opening.sampling, session.opening.acceptance_rule
            ),
        )
        work = Verification(session, token_ids, distributions, candidates.parents)
        verified, timings = await runtime.thread.work(work)
        contract.end(candidates.round, len(verified.token_ids))
        return verifier_pb2.VerifyResponse(
            verdict=verifier_pb2.Verdict(
                round=candidates.round,
                base_length=candidates.base_length,
                num_accepted=verified.num_accepted,
                token_ids=verified.token_ids,
                timings=timings,
                logprobs=verified.logprobs,
                pass_rows=work.pass_rows,
                pass_sessions=work.pass_sessions,
            )
        )


def _candidates_of(request: verifier_pb2.VerifyRequest) -> verifier_pb2.Candidates:
    if request.WhichOneof("message") != "candidates":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "only Candidates may follow the Open"
        )
    return request.candidates
