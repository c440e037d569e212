"""The DraftService servicer: translates messages and guards the contract."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_service.drafting import Draft, Proposing
from specdec.errors import SpecdecError
from specdec.lm.runtime import ModelRuntime, Session, require
from specdec.lm.thread import Timed
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from specdec.v1.draft_pb2 import DraftResponse


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
    ) -> AsyncIterator[DraftResponse]:
        runtime = await require(self.runtime, context)
        async with runtime.session(request_iterator, context) as session:
            opening = session.opening
            yield DraftResponse(opened=session.opened)
            first = min(opening.num_draft_tokens, _room(runtime, session))
            drafted = await runtime.thread.work(Proposing(session, first, self._top_n))
            yield _response(session, opening.round, drafted)
            session.contract.end(opening.round, 0)
            async for request in request_iterator:
                advance = _advance_of(request)
                if not session.contract.begin(advance.round, advance.base_length):
                    continue
                token_ids = list(advance.token_ids)
                session.contract.check_advance(token_ids, advance.num_draft_tokens)
                session.contract.end(advance.round, len(token_ids))
                wanted = min(advance.num_draft_tokens, _room(runtime, session))
                committed = (advance.base_length, token_ids)
                drafted = await runtime.thread.work(
                    Proposing(session, wanted, self._top_n, committed)
                )
                yield _response(session, advance.round, drafted)


def _room(runtime: ModelRuntime, session: Session) -> int:
    """How many tokens the context has room for."""
    return runtime.info.max_context_length - session.contract.base_length


def _response(session: Session, round_number: int, drafted: Timed[Draft]) -> DraftResponse:
    return DraftResponse(
        proposal=draft_pb2.Proposal(
            round=round_number,
            base_length=session.contract.base_length,
            token_ids=drafted.value.token_ids,
            distributions=drafted.value.distributions,
            temperature=session.opening.sampling.temperature,
            timings=drafted.timings,
        )
    )


def _advance_of(request: draft_pb2.DraftRequest) -> draft_pb2.Advance:
    if request.WhichOneof("message") != "advance":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "only Advance may follow the Open"
        )
    return request.advance
