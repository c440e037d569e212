"""More calls than there is room for: a bounded queue, fair turns, and refusals that say when."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

from gateway.admission import Admission, Limits, Tenant
from specdec import services
from specdec.cli.health import check
from specdec.errors import SpecdecError, violations_of
from tests.faults.guarded import guarded, refused, result, retry_delay, until
from tests.stack import verifier
from verifier_service.service import VerifierServicer

EXHAUSTED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
Target = tuple[str, VerifierServicer]


@pytest_asyncio.fixture(scope="module")
async def target(target_folder: Path) -> AsyncIterator[Target]:
    async with verifier(target_folder) as running:
        yield running


def limits(
    max_sessions: int = 2,
    max_tokens: int | None = None,
    max_queued: int = 100,
    queue_seconds: float = 30.0,
) -> Limits:
    return Limits(max_sessions, max_tokens, max_queued, queue_seconds)


# --- The gateway -------------------------------------------------------------------------------


async def test_two_floods_are_refused_exactly_beyond_the_limit_and_health_answers(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(target, monkeypatch, max_sessions=3, max_queued=2) as server:
        requests = [
            server.gateway.request([5, 6, 7], max_new_tokens=20, ignore_eos=True, seed=seed)
            for seed in range(8)
        ]
        undisturbed = [result(await server.send(request)).token_ids for request in requests]
        answers: list[str | None] = []

        async def watch() -> None:
            while True:
                answers.append(await check(services.GATEWAY, server.gateway.address))
                await asyncio.sleep(0.01)

        watching = asyncio.create_task(watch())
        for _ in range(2):  # a slot that the first time loses is missing the second time
            with server.held():
                floods = [server.start(request) for request in (*requests, *requests)]
                await until(lambda calls=floods: sum(call.done() for call in calls) >= 11)  # type: ignore[misc]
                await until(lambda: len(answers) > 2)
            outcomes = await asyncio.gather(*floods)
            errors = refused(outcomes, *EXHAUSTED)
            assert len(errors) == 16 - 3 - 2
            assert all(0.1 <= retry_delay(error) <= 60.0 for error in errors)
            for outcome, expected in zip(outcomes, undisturbed * 2, strict=True):
                if outcome not in errors:
                    assert result(outcome).token_ids == expected
            await server.idle()
        watching.cancel()
        assert set(answers) == {None}


async def test_a_call_that_is_cancelled_in_the_queue_gives_its_place_up(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(target, monkeypatch, max_sessions=1, max_queued=1) as server:
        request = server.gateway.request([5, 6], max_new_tokens=4, seed=1)
        with server.held():
            running = server.start(request)
            await until(lambda: server.admission.running_sessions == 1)
            waiting = server.start(request)
            await until(lambda: server.admission.num_waiting == 1)
            assert refused([await server.send(request)], *EXHAUSTED)
            waiting.cancel()
            await until(lambda: server.admission.num_waiting == 0)
            after = server.start(request)
            await until(lambda: server.admission.num_waiting == 1)
        assert result(await running).token_ids == result(await after).token_ids
        await server.idle()


async def test_a_deadline_ends_the_wait_and_so_does_the_queues_own(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"max_sessions": 1, "max_queued": 9, "queue_seconds": 0.6}
    async with guarded(target, monkeypatch, **options) as server:
        request = server.gateway.request([5, 6], max_new_tokens=4)
        with server.held():
            running = server.start(request)
            await until(lambda: server.admission.running_sessions == 1)
            hasty, patient = server.start(request, timeout=0.2), server.start(request)
            await until(lambda: server.admission.num_waiting == 2)
            late = await hasty
            assert isinstance(late, grpc.aio.AioRpcError)
            assert late.code() == grpc.StatusCode.DEADLINE_EXCEEDED
            await until(lambda: server.admission.num_waiting == 1)
            errors = refused([await patient], *EXHAUSTED)
            assert retry_delay(errors[0]) > 0.0
        result(await running)
        await server.idle()


async def test_a_call_that_leaves_while_it_runs_gives_its_sessions_back(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(target, monkeypatch, max_sessions=4, max_queued=0) as server:
        long = server.gateway.request([5, 6], max_new_tokens=400, ignore_eos=True, n=4)
        for _ in range(5):
            call = server.start(long)
            await until(lambda: server.admission.running_sessions == 4)
            call.cancel()
            await server.idle()
        broken = server.gateway.request([5, 6], max_new_tokens=4, temperature=-1.0)
        refused([await server.send(broken)], grpc.StatusCode.INVALID_ARGUMENT, "INVALID_REQUEST")
        await server.idle()


async def test_what_can_never_run_is_invalid_and_names_the_field(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(target, monkeypatch, max_sessions=2, max_session_tokens=40) as server:
        many = await server.send(server.gateway.request([5, 6], max_new_tokens=2, n=3))
        large = await server.send(server.gateway.request([5, 6], max_new_tokens=19, n=2))
        for outcome, field in ((many, "n"), (large, "stopping.max_new_tokens")):
            assert isinstance(outcome, grpc.aio.AioRpcError)
            assert outcome.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert [violation.field for violation in violations_of(outcome)] == [field]
        result(await server.send(server.gateway.request([5, 6], max_new_tokens=18, n=2)))


async def test_draining_sends_those_that_wait_away_and_lets_those_that_run_end(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(target, monkeypatch, max_sessions=1) as server:
        request = server.gateway.request([5, 6], max_new_tokens=8, ignore_eos=True)
        with server.held():
            running = server.start(request)
            await until(lambda: server.admission.running_sessions == 1)
            waiting = server.start(request)
            await until(lambda: server.admission.num_waiting == 1)
            draining = asyncio.create_task(server.servicer.drain(20.0))
            # While the one that runs is held: those that wait do not wait for it.
            for outcome in (await waiting, await server.send(request)):
                errors = refused([outcome], grpc.StatusCode.UNAVAILABLE, "DRAINING")
                assert retry_delay(errors[0]) > 0.0
        assert len(result(await running).token_ids) == 8
        await draining


# --- The queue ---------------------------------------------------------------------------------


async def served(admission: Admission, arrivals: list[tuple[Tenant, int]]) -> list[str]:
    """The order in which calls get their turn that arrive while all is taken, one at a time."""
    order: list[str] = []

    async def call(tenant: Tenant, tokens: int) -> None:
        with admission.enter(tenant, 1) as place:
            await place.admitted(tokens, None)
            order.append(tenant.name)
            await asyncio.sleep(0)

    with admission.enter(Tenant("first"), 1) as first:
        await first.admitted(1, None)
        calls = [asyncio.create_task(call(*arrival)) for arrival in arrivals]
        await until(lambda: admission.num_waiting == len(arrivals))
    await asyncio.gather(*calls)
    admission.check_integrity()
    return order


async def test_a_tenants_one_call_does_not_wait_for_anothers_fifty() -> None:
    order = await served(
        Admission(limits(1)), [(Tenant("a"), 10)] * 50 + [(Tenant("b"), 1000), (Tenant("c"), 10)]
    )
    assert {"b", "c"} <= set(order[:4])


async def test_turns_are_by_tokens_and_weight() -> None:
    """a has half the weight, and b asks for half as much each time."""
    a, b = Tenant("a", weight=1.0), Tenant("b", weight=2.0)
    order = await served(Admission(limits(1)), [(a, 20)] * 40 + [(b, 10)] * 40)
    assert order[:40].count("b") == pytest.approx(32, abs=1)


async def test_within_a_tenant_the_first_to_come_is_the_first_served() -> None:
    admission, order = Admission(limits(1)), []

    async def call(number: int) -> None:
        with admission.enter(Tenant(), 1) as place:
            await place.admitted(1 + number % 7, None)
            order.append(number)

    await asyncio.gather(*(call(number) for number in range(30)))
    assert order == sorted(order)


async def test_one_that_was_idle_has_saved_nothing_up() -> None:
    admission = Admission(limits(1))
    a, b = Tenant("a"), Tenant("b")
    with admission.enter(Tenant("c"), 1):  # never idle: clocks stay as they are
        await served(admission, [(a, 10)] * 30 + [(b, 10)])
        order = await served(admission, [(b, 10)] * 20 + [(a, 10)] * 20)
    assert abs(order[:20].count("a") - 10) <= 1


async def test_a_full_queue_makes_room_for_who_has_least_in_it() -> None:
    admission = Admission(limits(1, max_queued=4))

    async def call(tenant: Tenant) -> None:
        with admission.enter(tenant, 1) as place:
            await place.admitted(10, None)

    with admission.enter(Tenant("first"), 1) as first:
        await first.admitted(1, None)
        flood = [asyncio.create_task(call(Tenant("a"))) for _ in range(20)]
        await until(lambda: admission.num_waiting == 4)
        others = [asyncio.create_task(call(Tenant("b"))) for _ in range(20)]
        await until(lambda: sum(task.done() for task in (*flood, *others)) == 36)
    for calls in (flood, others):
        ends = await asyncio.gather(*calls, return_exceptions=True)
        errors = [end for end in ends if isinstance(end, SpecdecError)]
        assert [error.code for error in errors] == [grpc.StatusCode.RESOURCE_EXHAUSTED] * 18


async def test_a_large_call_is_not_starved_by_small_ones() -> None:
    admission, order = Admission(limits(10, max_tokens=100)), []

    async def call(name: str, tokens: int) -> None:
        with admission.enter(Tenant(), 1) as place:
            await place.admitted(tokens, None)
            order.append(name)
            await asyncio.sleep(0.001)

    await asyncio.gather(
        *(call("small", 10) for _ in range(9)),
        call("large", 95),
        *(call("small", 10) for _ in range(30)),
    )
    assert order.index("large") == 9


async def test_the_delay_is_what_the_rate_of_ends_makes_it() -> None:
    now = 0.0
    admission = Admission(limits(1, max_queued=4), lambda: now)
    with admission.enter(Tenant("holds"), 1):
        for _ in range(10):  # two seconds a session
            with admission.enter(Tenant(), 1) as place:
                await place.admitted(1, None)
                now += 2.0
        with admission.enter(Tenant(), 1) as place:
            await place.admitted(1, None)
            delays = []
            waiting = []
            for _ in range(3):
                waiting.append(admission.enter(Tenant(), 1))
            with pytest.raises(SpecdecError) as refusal:
                admission.enter(Tenant(), 1)
            delays.append(refusal.value.retry_after)
            now += 2000.0  # nothing ends any more
            with pytest.raises(SpecdecError) as refusal:
                admission.enter(Tenant(), 1)
            delays.append(refusal.value.retry_after)
            for each in waiting:
                admission.leave(each)
    assert 2.0 <= delays[0] <= 2.0 * 1.25
    assert delays[1] == 60.0


class Schedule:
    """Calls that come, run and go at random, and a count of what runs that is not Admission's."""

    def __init__(self, source: random.Random) -> None:
        self.source = source
        max_tokens = source.choice([None, 40, 100])
        max_queued = source.choice([0, 2, 6, 1000, 1000, 1000])
        self.admission = Admission(limits(source.randint(1, 5), max_tokens, max_queued))
        self.tenants = [
            Tenant("a"),
            Tenant("b", weight=source.choice([0.3, 1.0, 4.0])),
            Tenant("c", max_sessions=source.choice([None, 1, 3])),
        ]
        self.sessions: Counter[str] = Counter()
        """That run, of each tenant."""
        self.tokens = 0

    @property
    def refuses_nobody(self) -> bool:
        return self.admission.limits.max_queued == 1000 and self.tenants[2].max_sessions is None

    async def call(self) -> None:
        source = self.source
        tenant, sessions = source.choice(self.tenants), source.choice([1, 1, 1, 2, 4])
        tokens = source.randint(1, 60)
        with self.admission.enter(tenant, sessions) as place:
            await self.steps()
            await place.admitted(tokens, source.choice([None, None, None, 0.0, 0.001]))
            self.sessions[tenant.name] += sessions
            self.tokens += tokens
            try:
                self.check()
                await self.steps()
                if source.random() < 0.1:
                    raise ZeroDivisionError
            finally:
                self.sessions[tenant.name] -= sessions
                self.tokens -= tokens

    def check(self) -> None:
        most = self.admission.limits
        assert self.sessions.total() <= most.max_sessions
        assert most.max_tokens is None or self.tokens <= most.max_tokens
        assert self.admission.num_waiting <= most.max_queued
        for tenant in self.tenants:
            assert self.sessions[tenant.name] <= (tenant.max_sessions or most.max_sessions)
        self.admission.check_integrity()

    async def steps(self) -> None:
        for _ in range(self.source.choice([0, 0, 1, 2, 5])):
            await asyncio.sleep(0)

    async def run(self) -> list[BaseException | None]:
        calls = []
        for _ in range(60):
            calls.append(asyncio.create_task(self.call()))
            await self.steps()
            if self.source.random() < 0.2:
                self.source.choice(calls).cancel()
        async with asyncio.timeout(10):  # who gets no turn never ends
            return await asyncio.gather(*calls, return_exceptions=True)


@pytest.mark.parametrize("part", range(4))
async def test_limits_hold_nothing_is_lost_and_everyone_gets_a_turn(part: int) -> None:
    """Random schedules: of tenants, sizes, cancellations, errors and deadlines."""
    expected = {"OK", "INVALID_ARGUMENT", "DEADLINE_EXCEEDED", "CancelledError"}
    expected |= {"ZeroDivisionError", "RESOURCE_EXHAUSTED"}
    seen: set[str] = set()
    for seed in range(part * 50, part * 50 + 50):
        schedule = Schedule(random.Random(seed))
        ends = {_name(end) for end in await schedule.run()}
        seen |= ends
        assert ends <= expected - ({"RESOURCE_EXHAUSTED"} if schedule.refuses_nobody else set())
        admission = schedule.admission
        assert admission.running_sessions == admission.running_tokens == admission.num_waiting == 0
        admission.check_integrity()
        # All of it is there again.
        with admission.enter(Tenant(), admission.limits.max_sessions) as place:
            await asyncio.wait_for(place.admitted(admission.limits.max_tokens or 1, None), 1)
    assert seen == expected


def _name(end: BaseException | None) -> str:
    if isinstance(end, SpecdecError):
        return end.code.name
    return "OK" if end is None else type(end).__name__
