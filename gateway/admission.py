"""Who may generate now, who waits, and who is to come back later.

A call holds a `Place` from its first moment to its last. What runs is limited by sessions and by
tokens; beyond that calls wait in a queue of bounded length, and beyond the queue they are refused
at once, with an estimate of when to try again.

Between tenants the queue is fair by stride scheduling (Waldspurger and Weihl, 1995): each tenant
has a clock that goes on by the tokens that it is given, divided by its weight, and the one whose
clock is least has the next turn. A tenant that was idle starts at the time of those that were not,
so that it has no credit. Within a tenant the first to come is the first to be served.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from types import TracebackType

from gateway.end_rate import EndRate
from specdec.errors import SpecdecError, Violation
from specdec.v1 import common_pb2


@dataclass(frozen=True)
class Limits:
    """What runs and waits at most. A session is one sample of a call."""

    max_sessions: int
    max_tokens: int | None
    """Of prompts and of what may follow them, over all that runs. None: no limit."""
    max_queued: int
    """Calls that wait."""
    queue_seconds: float
    """How long one waits."""


@dataclass(frozen=True)
class Tenant:
    """Whose call it is."""

    name: str = ""
    """Empty where there are no API keys, and all are one tenant."""
    weight: float = 1.0
    """Its share of what is given, against those of others that wait."""
    max_sessions: int | None = None
    """That run or wait. None: no limit of its own."""


class _State(Enum):
    PLANNING = auto()
    """What it costs is not known yet."""
    WAITING = auto()
    RUNNING = auto()
    ENDED = auto()


@dataclass(eq=False)
class _Share:
    """What is known of one tenant."""

    clock: float = 0.0
    sessions: int = 0
    """Of all its places."""
    queued: int = 0
    """Places that plan or wait."""
    waiting: deque[Place] = field(default_factory=deque)


class Place:
    """A call's place in the gateway. It is a context manager: its end gives everything back."""

    def __init__(self, admission: Admission, tenant: Tenant, sessions: int, number: int) -> None:
        self.tenant = tenant
        self.sessions = sessions
        self.tokens = 0
        self.number = number
        """In the order of arrival."""
        self.state = _State.PLANNING
        self.refusal: SpecdecError | None = None
        self.decided = asyncio.Event()
        self._admission = admission

    async def admitted(self, tokens: int, deadline: float | None) -> None:
        """Waits until the call may run. To be called once.

        Args:
            tokens: of the prompt, and that may follow it, of all its samples.
            deadline: seconds that the client's call still has, or None.

        Raises:
            SpecdecError: INVALID_REQUEST, it is more than ever runs at once; RESOURCE_EXHAUSTED,
                the queue is full or it waited too long; DEADLINE_EXCEEDED; DRAINING.
        """
        await self._admission.wait(self, tokens, deadline)

    def __enter__(self) -> Place:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._admission.leave(self)


class Admission:
    """The places of all calls. What it counts is true between any two steps of the event loop."""

    def __init__(self, limits: Limits, clock: Callable[[], float] = time.monotonic) -> None:
        self.limits = limits
        self.running_sessions = 0
        self.running_tokens = 0
        self.num_waiting = 0
        self.draining = False
        self._now = 0.0
        """The clock of the tenant that was served last."""
        self._arrivals = 0
        self._queued = 0
        self._shares: dict[str, _Share] = {}
        self._ends = EndRate(clock)

    def enter(self, tenant: Tenant, sessions: int) -> Place:
        """A place for a call that has just come, before anything is done for it.

        Args:
            tenant: whose call it is.
            sessions: its samples.

        Raises:
            SpecdecError: RESOURCE_EXHAUSTED, there is none; DRAINING; INVALID_REQUEST, it has more
                samples than ever run at once.
        """
        if self.draining:
            raise _draining()
        self._require_sessions(tenant, sessions)
        # What is being planned has not begun to wait. Counted here, it is bounded all the same.
        if (
            self.running_sessions + self._queued
            >= self.limits.max_sessions + self.limits.max_queued
        ):
            own = self._shares.get(tenant.name)
            self._make_room((own.queued if own else 0) + 1)
        self._arrivals += 1
        place = Place(self, tenant, sessions, self._arrivals)
        share = self._shares.setdefault(tenant.name, _Share(self._now))
        share.sessions += sessions
        self._add_queued(share, 1)
        return place

    async def wait(self, place: Place, tokens: int, deadline: float | None) -> None:
        """See `Place.admitted`."""
        if self.draining:
            raise _draining()
        if self.limits.max_tokens is not None and tokens > self.limits.max_tokens:
            raise SpecdecError.invalid(
                [
                    Violation(
                        "stopping.max_new_tokens",
                        f"prompt and max_new_tokens, times n, come to {tokens} tokens, and this "
                        f"gateway runs at most {self.limits.max_tokens} at once",
                    )
                ]
            )
        place.tokens = tokens
        self._begin_to_wait(place)
        self._dispatch()
        if place.state is _State.WAITING and self.num_waiting > self.limits.max_queued:
            self._make_room(self._shares[place.tenant.name].queued)
        seconds = self.limits.queue_seconds
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds if deadline is None else min(seconds, deadline)):
                await place.decided.wait()
        if place.refusal is not None:
            raise place.refusal
        if place.state is _State.RUNNING:
            return
        if deadline is not None and deadline <= seconds:
            raise SpecdecError(
                common_pb2.ERROR_REASON_DEADLINE_EXCEEDED, "the deadline passed in the queue"
            )
        raise self._exhausted(f"it waited {seconds:g} s for its turn in vain", self.num_waiting)

    def leave(self, place: Place) -> None:
        """Gives back whatever a place holds. May be called again."""
        if place.state is _State.ENDED:
            return
        share = self._shares[place.tenant.name]
        if place.state is _State.RUNNING:
            self.running_sessions -= place.sessions
            self.running_tokens -= place.tokens
            self._ends.add(place.sessions)
        else:
            self._add_queued(share, -1)
        if place.state is _State.WAITING:
            share.waiting.remove(place)
            self.num_waiting -= 1
        share.sessions -= place.sessions
        place.state = _State.ENDED
        if not self._queued and not self.running_sessions:
            # Nobody is owed anything: names are not remembered for ever.
            self._shares.clear()
            self._ends.clear()
            self._now = 0.0
        self._dispatch()

    def drain(self) -> None:
        """Refuses those that wait, and from here on those that come, with DRAINING."""
        self.draining = True
        for place in [place for share in self._shares.values() for place in share.waiting]:
            self._turn_away(place, _draining())

    def check_integrity(self) -> None:
        """Raises AssertionError if what is counted contradicts itself. For tests."""
        shares = self._shares.values()
        assert self.num_waiting == sum(len(share.waiting) for share in shares)
        assert self._queued == sum(share.queued for share in shares)
        assert all(len(share.waiting) <= share.queued for share in shares)
        assert 0 <= self.running_sessions <= self.limits.max_sessions
        assert self.running_tokens >= 0
        assert self.limits.max_tokens is None or self.running_tokens <= self.limits.max_tokens
        assert self.running_sessions <= sum(share.sessions for share in shares)
        assert not self.num_waiting or not self._fits(self._next())

    def _require_sessions(self, tenant: Tenant, sessions: int) -> None:
        own = tenant.max_sessions
        most = self.limits.max_sessions if own is None else min(own, self.limits.max_sessions)
        if sessions > most:
            raise SpecdecError.invalid([Violation("n", f"at most {most} may run at once")])
        share = self._shares.get(tenant.name)
        if own is not None and share is not None and share.sessions + sessions > own:
            excess = share.sessions + sessions - own
            raise self._exhausted(f"this API key may have {own} sessions at once", excess)

    def _begin_to_wait(self, place: Place) -> None:
        share = self._shares[place.tenant.name]
        if not share.waiting:
            share.clock = max(share.clock, self._now)
        share.waiting.append(place)
        place.state = _State.WAITING
        self.num_waiting += 1

    def _dispatch(self) -> None:
        """Lets those run whose turn it is, as far as there is room.

        One that does not fit yet is waited for: to let others pass would starve what is large.
        """
        while self.num_waiting and not self.draining and self._fits(place := self._next()):
            share = self._shares[place.tenant.name]
            share.waiting.popleft()
            self.num_waiting -= 1
            self._add_queued(share, -1)
            self._now = share.clock
            share.clock += place.tokens / place.tenant.weight
            self.running_sessions += place.sessions
            self.running_tokens += place.tokens
            place.state = _State.RUNNING
            place.decided.set()

    def _next(self) -> Place:
        """The first of the tenant whose turn it is."""
        waiting = (share for share in self._shares.values() if share.waiting)
        return min(waiting, key=lambda share: (share.clock, share.waiting[0].number)).waiting[0]

    def _fits(self, place: Place) -> bool:
        limits = self.limits
        return self.running_sessions + place.sessions <= limits.max_sessions and (
            limits.max_tokens is None or self.running_tokens + place.tokens <= limits.max_tokens
        )

    def _make_room(self, own: int) -> None:
        """Turns the newest call away of the tenant that has most of them waiting.

        So that one tenant's flood does not keep the others from the queue.

        Args:
            own: how many the tenant that needs room has in the queue, with this one.

        Raises:
            SpecdecError: RESOURCE_EXHAUSTED, no tenant has more than that.
        """
        refusal = self._exhausted("the queue is full", self.num_waiting + 1)
        longest = max((share.waiting for share in self._shares.values()), key=len)
        if len(longest) <= own:
            raise refusal
        self._turn_away(longest[-1], refusal)

    def _turn_away(self, place: Place, refusal: SpecdecError) -> None:
        place.refusal = refusal
        self.leave(place)
        place.decided.set()

    def _exhausted(self, cause: str, ahead: int) -> SpecdecError:
        seconds = self._ends.seconds_until(ahead)
        return SpecdecError(
            common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED,
            f"{cause}; try again in {seconds:.1f} s",
            retry_after=seconds,
        )

    def _add_queued(self, share: _Share, count: int) -> None:
        share.queued += count
        self._queued += count


def _draining() -> SpecdecError:
    return SpecdecError(
        common_pb2.ERROR_REASON_DRAINING, "this gateway is shutting down; another one may take it"
    )
