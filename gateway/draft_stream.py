"""A session's stream to the draft service, from the gateway's side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import grpc

from gateway.statistics import Exchange, Stopwatch, bounded
from specdec.drafting import DraftRounds, Timeliness
from specdec.errors import describe, reason_of
from specdec.proposals import distributions_fault, first_tokens, needs_distributions
from specdec.sessions import opened_fault
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc

_MOST_WAITING = 64


class DraftFailure(Exception):
    """The draft cannot serve this session any more. The message says why."""

    def __init__(self, message: str, *, lost: bool = False, innocent: bool = False) -> None:
        """
        Args:
            message: for people.
            lost: whether the service itself may be gone or another, not only this session.
            innocent: whether it is no fault of the service.
        """
        super().__init__(message)
        self.lost, self.innocent = lost, innocent


def _failure(error: grpc.aio.AioRpcError) -> DraftFailure:
    reason, code = reason_of(error), error.code()
    return DraftFailure(
        describe(error),
        lost=code == grpc.StatusCode.UNAVAILABLE or reason == "TOKENIZER_MISMATCH",
        innocent=reason in ("INVALID_REQUEST", "CONTRACT_VIOLATION")
        or code == grpc.StatusCode.DEADLINE_EXCEEDED,
    )


class DraftLate(Exception):
    """The round is not to wait any longer for its proposal."""


class Patience(NamedTuple):
    """How long a draft is waited for, in seconds."""

    first: float
    """By the first round, for which the draft reads the prompt."""
    round: float
    """By any other. A round that has waited goes on without a proposal."""
    session: float
    """By all rounds together, until the draft is given up."""


class _Arrival(NamedTuple):
    response: draft_pb2.DraftResponse
    at_ns: int


class DraftStream:
    """A session at the draft service.

    Proposals may be pushed ahead: one is used if it starts from what was really committed, and
    dropped and counted if it presumed something else or the session has moved on.
    """

    def __init__(
        self,
        stub: draft_pb2_grpc.DraftServiceStub,
        opening: common_pb2.Open,
        *,
        effective_vocab_size: int,
        patience: Patience,
        deadline: float | None,
        request_id: str,
    ) -> None:
        """
        Args:
            stub: of the draft service.
            opening: the session.
            effective_vocab_size: that of the target, which drafted ids must be within.
            patience: with the draft.
            deadline: seconds that the client's call still has, or None.
            request_id: for the draft service's log.
        """
        self.stale_proposals = 0
        self.cached_tokens = 0
        """How many tokens of the context the draft service had cached already."""
        self.was_ahead: bool | None = None
        """Whether the last proposal had been prepared before its round began. None if none was."""
        self.is_late = False
        """Whether a round has waited in vain for a proposal that is still to come. Until it has no
        other is asked for."""
        self._call = stub.Draft(timeout=deadline, metadata=(("x-request-id", request_id),))
        self._effective_vocab_size = effective_vocab_size
        self._patience = patience
        self._rounds = DraftRounds(opening, effective_vocab_size)
        self._stopwatch = Stopwatch()
        self._wait = patience.first
        self._asked_at: float | None = None
        """When the proposal was asked for that is still to come. None if there is none."""
        self._arrivals: asyncio.Queue[_Arrival | DraftFailure] = asyncio.Queue(_MOST_WAITING)
        self._ahead: list[_Arrival] = []
        """Proposals of rounds that have not begun."""
        self._reading = asyncio.create_task(self._read())

    async def open(self) -> None:
        """Sends the Open; the first proposal is on its way.

        Raises:
            DraftFailure: the stream broke.
        """
        await self._write(draft_pb2.DraftRequest(open=self._rounds.opening))

    async def proposal(self, limit: int) -> tuple[draft_pb2.Proposal, Exchange]:
        """Waits for the proposal of the current round, of at most `limit` tokens.

        Raises:
            DraftLate: the round has waited for long enough.
            DraftFailure: the session has, the stream broke, or the proposal is not to be used.
        """
        wait = self._wait if self._rounds.is_asked else 0.0
        try:
            async with asyncio.timeout(wait):
                proposal, at_ns = await self._current_proposal()
        except TimeoutError:
            self.is_late = self._asked_at is not None
            self._require_patience()
            raise DraftLate from None
        if proposal.presumed_token_ids:
            # When it was prepared nobody knew how many would be asked for.
            proposal = first_tokens(proposal, limit)
            at_ns = None
        fault = self._fault(proposal, limit)
        if fault is not None:
            raise DraftFailure(f"unusable proposal: {fault}")
        if at_ns is None:
            return proposal, Exchange(0, bounded(proposal.timings))
        return proposal, self._stopwatch.stop(proposal.timings, at_ns)

    def commit(self, token_ids: Sequence[int]) -> None:
        """Ends a round. The draft is told when the next proposal is asked for."""
        self._rounds.commit(token_ids)

    async def advance(self, num_draft_tokens: int, costs: common_pb2.DraftCosts) -> None:
        """Says what was committed, and asks for the next proposal.

        Raises:
            DraftFailure: the stream broke.
        """
        await self._write(self._rounds.advance(num_draft_tokens, costs))

    def close(self) -> None:
        """Ends the session, at once and without waiting."""
        self._reading.cancel()
        self._call.cancel()

    async def _write(self, request: draft_pb2.DraftRequest) -> None:
        self._stopwatch.start()
        self._asked_at = time.monotonic()
        try:
            # One that does not read fills the connection up, and then writing waits.
            async with asyncio.timeout(self._patience.session):
                await self._call.write(request)
        except TimeoutError:
            seconds = self._patience.session
            raise DraftFailure(f"it reads nothing for {seconds:g} s", lost=True) from None
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        except asyncio.InvalidStateError as error:
            raise DraftFailure("the stream has ended", lost=True) from error

    async def _read(self) -> None:
        """Takes responses off the wire as they come, so that the time of each is known."""
        try:
            while isinstance(response := await self._call.read(), draft_pb2.DraftResponse):
                if self._rounds.answers(response.proposal):
                    self._asked_at, self._wait = None, self._patience.round
                    self.is_late = False
                await self._arrivals.put(_Arrival(response, time.monotonic_ns()))
            await self._arrivals.put(DraftFailure("the stream has ended", lost=True))
        except grpc.aio.AioRpcError as error:
            await self._arrivals.put(_failure(error))

    async def _current_proposal(self) -> tuple[draft_pb2.Proposal, int | None]:
        waiting, self._ahead = self._ahead, []
        self.was_ahead = None
        while True:
            arrival = waiting.pop(0) if waiting else await self._arrivals.get()
            if isinstance(arrival, DraftFailure):
                raise arrival
            if arrival.response.WhichOneof("message") == "opened":
                self._take(arrival.response.opened)
                continue
            proposal = arrival.response.proposal
            match self._rounds.timeliness(proposal):
                case Timeliness.AHEAD:
                    self._ahead.append(arrival)
                    if len(self._ahead) > _MOST_WAITING:
                        raise DraftFailure("too many proposals for rounds that have not begun")
                case Timeliness.STALE:
                    self.stale_proposals += 1
                    if proposal.presumed_token_ids and proposal.round == self._rounds.round:
                        self.was_ahead = False
                case Timeliness.CURRENT:
                    self._ahead += waiting
                    if proposal.presumed_token_ids:
                        # Pushed before it was asked for: no other answer comes.
                        self.was_ahead, self.is_late, self._asked_at = True, False, None
                    return proposal, arrival.at_ns

    def _require_patience(self) -> None:
        """Raises DraftFailure if the proposal that is to come has been waited for long enough."""
        asked_at, patience = self._asked_at, self._patience.session
        if asked_at is not None and time.monotonic() - asked_at >= patience:
            raise DraftFailure(f"no proposal within {patience:g} s", lost=True)

    def _take(self, opened: common_pb2.Opened) -> None:
        fault = opened_fault(opened, self._rounds.opening)
        if fault is not None:
            raise DraftFailure(f"unusable session: {fault}")
        self.cached_tokens = opened.cached_tokens
        self._stopwatch.include(opened.timings)

    def _fault(self, proposal: draft_pb2.Proposal, limit: int) -> str | None:
        fault = self._rounds.fault(proposal, limit)
        opening = self._rounds.opening
        if fault is None and needs_distributions(opening.sampling, opening.acceptance_rule):
            fault = distributions_fault(
                proposal.token_ids, proposal.distributions, self._effective_vocab_size
            )
        return fault
