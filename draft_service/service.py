"""The DraftService servicer: translates messages and guards the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_service.drafting import Drafter
from specdec.errors import SpecdecError
from specdec.lm.runtime import ModelRuntime, Session, require
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves drafts once `runtime` is set; until then every call is UNAVAILABLE."""

    def __init__(self, top_n: int) -> None:
        """`top_n`: how many tokens a sparse q keeps."""
        self.runtime: ModelRuntime | None = None
        self._top_n = top_n

    async def GetModelInfo(
        self,
        request: draft_pb2.DraftServiceGetModelInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        runtime = await require(self.runtime, context)
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=runtime.info)

    async def Draft(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[draft_pb2.DraftResponse]:
        runtime = await require(self.runtime, context)
        async with runtime.session(request_iterator, context) as session:
            opening = session.opening
            drafter = Drafter(
                session.sequence, opening.sampling, opening.acceptance_rule, self._top_n
            )
            yield draft_pb2.DraftResponse(opened=session.opened)
            yield await self._propose(
                runtime, session, drafter, opening.round, opening.num_draft_tokens
            )
            session.contract.end(opening.round, 0)
            async for request in request_iterator:
                advance = _advance_of(request)
                if not session.contract.begin(advance.round, advance.base_length):
                    continue
                token_ids = list(advance.token_ids)
                session.contract.check_advance(token_ids, advance.num_draft_tokens)
                session.sequence.commit(advance.base_length, token_ids)
                session.contract.end(advance.round, len(token_ids))
                yield await self._propose(
                    runtime, session, drafter, advance.round, advance.num_draft_tokens
                )

    async def _propose(
        self,
        runtime: ModelRuntime,
        session: Session,
        drafter: Drafter,
        round_number: int,
        num_draft_tokens: int,
    ) -> draft_pb2.DraftResponse:
        room = runtime.info.max_context_length - session.contract.base_length
        draft, timings = await runtime.thread.run(drafter.propose, min(num_draft_tokens, room))
        return draft_pb2.DraftResponse(
            proposal=draft_pb2.Proposal(
                round=round_number,
                base_length=session.contract.base_length,
                token_ids=draft.token_ids,
                distributions=draft.distributions,
                temperature=session.opening.sampling.temperature,
                timings=timings,
            )
        )


def _advance_of(request: draft_pb2.DraftRequest) -> draft_pb2.Advance:
    if request.WhichOneof("message") != "advance":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "only Advance may follow the Open"
        )
    return request.advance
