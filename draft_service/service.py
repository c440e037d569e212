"""The DraftService servicer: translates messages and guards the contract."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc

from draft_service.drafter import Draft, Drafter, DraftSession
from specdec.errors import SpecdecError
from specdec.proposals import needs_distributions
from specdec.sessions import SessionContract
from specdec.streams import require, session_stream
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from specdec.v1.draft_pb2 import DraftResponse


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves drafts once `drafter` is set; until then every call is UNAVAILABLE."""

    def __init__(self) -> None:
        self.drafter: Drafter | None = None
        """To be set when it runs."""

    async def GetModelInfo(
        self,
        request: draft_pb2.DraftServiceGetModelInfoRequest,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        info = common_pb2.ModelInfo()
        drafter = await require(self.drafter, context)
        info.CopyFrom(drafter.info)
        info.drafters = ", ".join(drafter.settings.drafters)
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=info)

    async def Draft(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftRequest],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[DraftResponse]:
        drafter = await require(self.drafter, context)
        async with (
            session_stream(request_iterator, context, drafter.info) as contract,
            drafter.session(contract.opening) as session,
        ):
            contract.opened()
            yield DraftResponse(opened=session.opened)
            rounds = _Rounds(contract, session)
            opening = contract.opening
            yield await rounds.proposal(opening.round, opening.num_draft_tokens)
            contract.end(opening.round, 0)
            async for request in request_iterator:
                advance = _advance_of(request)
                if not contract.begin(advance.round, advance.base_length):
                    continue
                contract.check_advance(advance.token_ids, advance.num_draft_tokens)
                contract.end(advance.round, len(advance.token_ids))
                rounds.commit(advance.token_ids)
                yield await rounds.proposal(advance.round, advance.num_draft_tokens)


class _Rounds:
    """The proposals of a session."""

    def __init__(self, contract: SessionContract, session: DraftSession) -> None:
        self._contract = contract
        self._session = session
        self._committed: list[int] = []
        """What the drafter was not told of yet."""
        opening = contract.opening
        self._needs_distributions = needs_distributions(opening.sampling, opening.acceptance_rule)

    def commit(self, token_ids: Sequence[int]) -> None:
        self._committed += token_ids

    async def proposal(self, round_number: int, num_draft_tokens: int) -> DraftResponse:
        """The proposal of a round, of at most so many tokens."""
        begun = time.monotonic()
        wanted = min(num_draft_tokens, self._contract.room)
        draft = Draft(())
        if wanted > 0:
            committed, self._committed = self._committed, []
            draft = await self._session.propose(committed, wanted)
        distributions = draft.distributions
        if self._needs_distributions and not distributions:
            # Nothing was sampled: q is 1 for the token and 0 for all others.
            distributions = [
                common_pb2.SparseDistribution(token_ids=[token_id], probabilities=[1.0])
                for token_id in draft.token_ids
            ]
        timings = draft.timings
        if timings is None:
            timings = common_pb2.Timings(compute_us=int((time.monotonic() - begun) * 1e6))
        return DraftResponse(
            proposal=draft_pb2.Proposal(
                round=round_number,
                base_length=self._contract.base_length,
                token_ids=draft.token_ids,
                distributions=distributions,
                temperature=self._contract.opening.sampling.temperature,
                timings=timings,
            )
        )


def _advance_of(request: draft_pb2.DraftRequest) -> draft_pb2.Advance:
    if request.WhichOneof("message") != "advance":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "only Advance may follow the Open"
        )
    return request.advance
