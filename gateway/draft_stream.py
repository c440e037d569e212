"""A session's stream to the draft service, from the gateway's side."""

from __future__ import annotations

import asyncio

import grpc

from gateway.statistics import Exchange, Stopwatch
from specdec.errors import describe
from specdec.proposals import (
    distributions_fault,
    needs_distributions,
    num_draft_tokens_fault,
    token_ids_fault,
)
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc


class DraftFailure(Exception):
    """The draft cannot serve this session any more. The message says why."""


class DraftStream:
    """A session at the draft service.

    Proposals may be pushed ahead: one is used if it starts from where the session stands, and
    dropped and counted if the session has moved on.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceStub,
        opening: common_pb2.Open,
        effective_vocab_size: int,
        *,
        patience: float,
        deadline: float | None,
    ) -> None:
        """
        Args:
            stub: of the draft service.
            opening: the session.
            effective_vocab_size: that of the target, which drafted ids must be within.
            patience: seconds to wait for a proposal before the draft is given up.
            deadline: seconds that the client's call still has, or None.
        """
        self.stale_proposals = 0
        self._call = stub.Draft(timeout=deadline)
        self._opening = opening
        self._effective_vocab_size = effective_vocab_size
        self._patience = patience
        self._round = opening.round
        self._base_length = opening.base_length
        self._stopwatch = Stopwatch()

    async def open(self) -> None:
        """Sends the Open; the first proposal is on its way.

        Raises:
            DraftFailure: the stream broke.
        """
        await self._write(draft_pb2.DraftRequest(open=self._opening))

    async def proposal(self, limit: int) -> tuple[draft_pb2.Proposal, Exchange]:
        """Waits for the proposal of the current round, of at most `limit` tokens.

        Raises:
            DraftFailure: none came in time, the stream broke, or the proposal is not to be used.
        """
        try:
            async with asyncio.timeout(self._patience):
                proposal = await self._current_proposal()
        except TimeoutError:
            raise DraftFailure(f"no proposal within {self._patience:g} s") from None
        except grpc.aio.AioRpcError as error:
            raise DraftFailure(describe(error)) from error
        fault = self._fault(proposal, limit)
        if fault is not None:
            raise DraftFailure(f"unusable proposal: {fault}")
        return proposal, self._stopwatch.stop(proposal.timings)

    async def advance(self, token_ids: list[int], num_draft_tokens: int) -> None:
        """Commits tokens and asks for the next proposal.

        Raises:
            DraftFailure: the stream broke.
        """
        self._round += 1
        advance = draft_pb2.Advance(
            round=self._round,
            base_length=self._base_length,
            token_ids=token_ids,
            num_draft_tokens=num_draft_tokens,
        )
        self._base_length += len(token_ids)
        await self._write(draft_pb2.DraftRequest(advance=advance))

    def close(self) -> None:
        """Ends the session, at once and without waiting."""
        self._call.cancel()

    async def _write(self, request: draft_pb2.DraftRequest) -> None:
        self._stopwatch.start()
        try:
            await self._call.write(request)
        except grpc.aio.AioRpcError as error:
            raise DraftFailure(describe(error)) from error
        except asyncio.InvalidStateError as error:
            raise DraftFailure("the stream has ended") from error

    async def _current_proposal(self) -> draft_pb2.Proposal:
        while True:
            response = await self._call.read()
            if not isinstance(response, draft_pb2.DraftResponse):
                raise DraftFailure("the stream has ended")
            if response.WhichOneof("message") == "opened":
                self._stopwatch.include(response.opened.timings)
            elif response.proposal.round < self._round:
                self.stale_proposals += 1
            else:
                return response.proposal

    def _fault(self, proposal: draft_pb2.Proposal, limit: int) -> str | None:
        if (proposal.round, proposal.base_length) != (self._round, self._base_length):
            return (
                f"it is for round {proposal.round} from base_length {proposal.base_length}, not "
                f"for round {self._round} from {self._base_length}"
            )
        if proposal.temperature != self._opening.sampling.temperature:
            return f"it was drafted at temperature {proposal.temperature}"
        fault = num_draft_tokens_fault(len(proposal.token_ids), limit)
        fault = fault or token_ids_fault(proposal.token_ids, self._effective_vocab_size)
        if fault is None and needs_distributions(
            self._opening.sampling, self._opening.acceptance_rule
        ):
            fault = distributions_fault(
                proposal.token_ids, proposal.distributions, self._effective_vocab_size
            )
        return fault
