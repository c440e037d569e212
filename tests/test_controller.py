"""The speculation controller, in simulations of rounds whose costs are like measured ones.

Rates are told by the tokens that a round is expected to commit, given how many it drafted, so that
luck decides about what the controller learns but not about how it is judged.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.controller import Controller, DraftPlan
from gateway.pass_cost import Average, Curve
from gateway.workload import Observation, Workload

LIMIT = 12
USELESS = 0.0
# Milliseconds of passes of the default pair, on a CPU, by their rows.
CPU = [(1, 27.9), (4, 27.2), (6, 27.8), (8, 32.4), (12, 38.9), (16, 44.6), (24, 57.8), (32, 70.0)]
# An accelerator: flat as far as memory bounds it.
GPU = [(1, 10.0), (128, 10.5), (256, 18.0)]
# The draft's step, by the sessions that share it, in parts of the measured one.
STEP = [(1, 2.8), (6, 2.8), (8, 3.3), (16, 4.6)]


def straight(corners: Sequence[tuple[float, float]], size: float) -> float:
    """What a curve of straight lines is at a size; it goes on beyond its ends."""
    for (x0, y0), (x1, y1) in pairwise(corners):
        if size <= x1 or (x1, y1) == corners[-1]:
            return y0 + (y1 - y0) * (size - x0) / (x1 - x0)
    raise AssertionError


class Planner(Protocol):
    """What decides: the controller, or something to compare it with."""

    def plan(self, limit: int) -> DraftPlan: ...

    def observe(self, observation: Observation) -> None: ...


class Fixed:
    """Drafts always the same number of tokens."""

    def __init__(self, num_draft_tokens: int) -> None:
        self._plan = DraftPlan(num_draft_tokens)

    def plan(self, limit: int) -> DraftPlan:
        return self._plan

    def observe(self, observation: Observation) -> None:
        pass


@dataclass
class World:
    """The services: what their passes cost, in milliseconds."""

    corners: Sequence[tuple[float, float]] = field(default_factory=lambda: CPU)
    step: float = 1.0
    """The draft's, in measured ones."""
    wire: float = 0.4
    noise: float = 0.03
    hidden: float = 0.0
    """How often a proposal is there already."""

    def verify(self, rows: float) -> float:
        return straight(self.corners, rows)

    def draft(self, steps: int, sessions: int) -> float:
        return steps * self.step * straight(STEP, sessions) + self.wire if steps else 0.0


@dataclass
class Round:
    """A pass, with all sessions in it."""

    drafted: list[int]
    tokens: float
    """That were expected of it, all sessions together."""
    ms: float


def expected_tokens(alphas: Sequence[float], count: int) -> float:
    return 1.0 + sum(math.prod(alphas[: i + 1]) for i in range(count))


def run_pass(
    world: World,
    planners: Sequence[Planner],
    alphas: Sequence[Sequence[float]],
    chance: random.Random,
) -> Round:
    """One round of sessions that share their passes: each waits for the slowest proposal."""
    drafted = [planner.plan(LIMIT).num_draft_tokens for planner in planners]
    drafting = sum(count > 0 for count in drafted)
    rows = sum(drafted) + len(drafted)
    verify = world.verify(rows) * math.exp(chance.gauss(0.0, world.noise))
    hidden = [chance.random() < world.hidden for _ in planners]
    draft = [world.draft(count, drafting) for count in drafted]
    waited = max(0.0 if hidden[i] else draft[i] for i in range(len(planners)))
    for index, planner in enumerate(planners):
        count, accepted = drafted[index], 0
        while accepted < count and chance.random() < alphas[index][accepted]:
            accepted += 1
        wire = world.wire if count else 0.0
        planner.observe(
            Observation(
                depths=[1] * count,
                num_accepted=accepted,
                draft_us=1e3 * (draft[index] - wire),
                draft_wire_us=1e3 * wire,
                verify_us=1e3 * verify,
                verify_wire_us=1e3 * world.wire,
                pass_rows=rows,
                pass_sessions=len(planners),
                hidden=hidden[index],
                verify_queue_us=1e3 * (waited - (0.0 if hidden[index] else draft[index])),
            )
        )
    tokens = sum(expected_tokens(a, count) for a, count in zip(alphas, drafted, strict=True))
    return Round(drafted, tokens, waited + world.verify(rows) + world.wire)


def run(
    world: World,
    planners: Sequence[Planner],
    alpha: float | Callable[[int], float],
    rounds: int,
    *,
    sessions: Callable[[int], int] | None = None,
    seed: int = 0,
) -> list[Round]:
    """Rounds of chains whose tokens stand with the same chance at each position."""
    chance, done = random.Random(seed), []
    for number in range(rounds):
        a = alpha(number) if callable(alpha) else alpha
        now = planners if sessions is None else planners[: sessions(number)]
        done.append(run_pass(world, now, [[a] * LIMIT] * len(now), chance))
    return done


def rate(rounds: Sequence[Round]) -> float:
    return sum(r.tokens for r in rounds) / sum(r.ms for r in rounds)


def fixed_rate(world: World, alpha: float, sessions: int, count: int) -> float:
    rounds = run(world, [Fixed(count)] * sessions, alpha, 200 if world.hidden else 1)
    return rate(rounds)


def best_fixed_rate(world: World, alpha: float, sessions: int) -> float:
    return max(fixed_rate(world, alpha, sessions, count) for count in range(LIMIT + 1))


def controllers(count: int) -> list[Controller]:
    workload = Workload()
    return [Controller(workload, confident=False) for _ in range(count)]


def mean_rate(world: World, alpha: float, sessions: int, seeds: int = 3) -> float:
    """Of sessions that have learnt: what came first is judged by other tests."""
    rounds = 180 if sessions < 8 else 90
    return sum(
        rate(run(world, controllers(sessions), alpha, rounds, seed=seed)[rounds // 3 :])
        for seed in range(seeds)
    ) / max(seeds, 1)


WORLDS = {"cpu": World(), "gpu": World(corners=GPU, step=0.5), "ahead": World(hidden=0.7)}


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize(
    ("world", "sessions"),
    [("cpu", 1), ("cpu", 4), ("cpu", 32), ("gpu", 1), ("gpu", 8), ("ahead", 1)],
)
def test_finds_the_best_number_of_drafted_tokens(world: str, sessions: int, alpha: float) -> None:
    services = WORLDS[world]
    best = best_fixed_rate(services, alpha, sessions)
    seeds = 3 if sessions == 1 else 1
    assert mean_rate(services, alpha, sessions, seeds) > 0.97 * best


def test_one_that_ignored_costs_would_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        Controller, "_rate", lambda controller, rows, tokens, steps, outlook: tokens
    )
    assert mean_rate(World(), 0.6, 4, 1) < 0.8 * best_fixed_rate(World(), 0.6, 4)


def test_one_that_ignored_the_others_would_not_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    outlook = Controller._outlook

    def alone(controller: Controller) -> object:
        return outlook(controller)._replace(crowd=0.0, window_us=0.0)

    monkeypatch.setattr(Controller, "_outlook", alone)
    assert mean_rate(World(), 0.8, 32, 1) < 0.9 * best_fixed_rate(World(), 0.8, 32)


@pytest.mark.parametrize("sessions", [1, 4, 32])
def test_a_useless_draft_is_given_up(sessions: int) -> None:
    rounds = run(World(), controllers(sessions), USELESS, 300)
    plain = fixed_rate(World(), USELESS, sessions, 0)
    assert rate(rounds) > 0.97 * plain
    # After eight rounds there are only probes, and they cost less than 2%.
    later = rounds[8:]
    assert max(max(r.drafted) for r in later) <= 1
    assert rate(later) > 0.98 * plain


def test_probes_become_fewer() -> None:
    drafted = [r.drafted[0] for r in run(World(), controllers(1), USELESS, 600)]
    tried = [i for i, count in enumerate(drafted) if count]
    gaps = [gap for a, b in pairwise(tried) if (gap := b - a - 1)]
    assert gaps[:4] == [4, 8, 16, 32]
    assert set(gaps[4:]) == {64}


def test_without_fewer_probes_a_useless_draft_would_cost_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gateway.controller._LAST_PROBE", 1)
    monkeypatch.setattr("gateway.controller._FIRST_PROBE", 1)
    monkeypatch.setattr("gateway.controller._RAREST_PROBE", 1.0)
    rounds = run(World(), controllers(1), USELESS, 300)
    assert rate(rounds) < 0.97 * fixed_rate(World(), USELESS, 1, 0)


@pytest.mark.parametrize("seed", range(3))
def test_follows_a_draft_that_becomes_useless_and_good_again(seed: int) -> None:
    def alpha(number: int) -> float:
        return USELESS if 100 <= number < 200 else 0.85

    world = World()
    rounds = run(world, controllers(1), alpha, 500, seed=seed)
    good, plain = best_fixed_rate(world, 0.85, 1), fixed_rate(world, USELESS, 1, 0)
    assert rate(rounds[30:100]) > 0.94 * good
    assert all(r.drafted[0] <= 1 for r in rounds[108:200])
    assert rate(rounds[108:200]) > 0.98 * plain
    # The next probe finds it, up to 64 rounds later.
    assert rate(rounds[360:]) > 0.94 * good


def test_a_draft_that_is_good_again_is_not_found_without_probes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Controller, "_probe_after", lambda controller, outlook: math.inf)
    rounds = run(World(), controllers(1), lambda i: USELESS if i < 100 else 0.85, 400)
    assert not any(r.drafted[0] for r in rounds[300:])


@pytest.mark.parametrize("alpha", [USELESS, 0.5, 0.8])
def test_load_that_goes_up_and_down_does_not_make_it_slower_than_plain(alpha: float) -> None:
    def sessions(number: int) -> int:
        return 1 if number // 20 % 2 == 0 else 32

    world = World()
    rounds = run(world, controllers(32), alpha, 300, sessions=sessions, seed=2)
    # What was committed, in the time that it would have taken without a draft under the same load.
    plain = [r.tokens / fixed_rate(world, alpha, len(r.drafted), 0) for r in rounds]
    speedups = [
        sum(plain[begin : begin + 50]) / sum(r.ms for r in rounds[begin : begin + 50])
        for begin in range(251)
    ]
    assert min(speedups) > 0.95
    alone = [i for i in range(100, 300) if sessions(i) == 1]
    if alpha == 0.8:
        # It drafts whenever the load is low, and not only after a while.
        assert rate([rounds[i] for i in alone]) > 0.9 * best_fixed_rate(world, alpha, 1)


def test_a_new_session_begins_with_what_others_have_learnt() -> None:
    workload = Workload()
    run(World(), [Controller(workload, confident=False)], 0.9, 100)
    assert Controller(workload, confident=False).plan(LIMIT).num_draft_tokens >= 3
    workload = Workload()
    run(World(), [Controller(workload, confident=False)], USELESS, 100)
    assert Controller(workload, confident=False).plan(LIMIT).num_draft_tokens <= 1


def propose(chance: random.Random, plan: DraftPlan, boast: float) -> list[tuple[float, float]]:
    """A draft that knows how likely its tokens stand, and says so to the power of `boast`.

    Seven in ten are easy. Of each: how likely it stands, and what is said of all up to it.
    """
    tokens: list[tuple[float, float]] = []
    said = 1.0
    while len(tokens) < plan.num_draft_tokens:
        p = 0.95 if chance.random() < 0.7 else 0.3
        said *= p**boast
        if said < max(plan.row_cost, plan.step_cost):
            break
        tokens.append((p, said))
    return tokens


def run_confident(
    world: World, planners: Sequence[Planner], rounds: int, boast: float = 1.0
) -> list[Round]:
    """As `run`, with a draft that heeds what rows and steps cost."""
    chance, done = random.Random(1), []
    for _ in range(rounds):
        plans = [planner.plan(LIMIT) for planner in planners]
        proposals = [propose(chance, plan, boast) for plan in plans]
        rows = len(planners) + sum(map(len, proposals))
        # The step that turns out not to be worth it has been made.
        steps = [
            min(len(proposal) + 1, plan.num_draft_tokens)
            for plan, proposal in zip(plans, proposals, strict=True)
        ]
        draft = [world.draft(count, len(planners)) for count in steps]
        tokens, verify = 0.0, world.verify(rows)
        for planner, proposal, ms in zip(planners, proposals, draft, strict=True):
            chances = [p for p, _ in proposal]
            tokens += expected_tokens(chances, len(chances))
            accepted = 0
            while accepted < len(chances) and chance.random() < chances[accepted]:
                accepted += 1
            wire = world.wire if ms else 0.0
            planner.observe(
                Observation(
                    depths=[1] * len(proposal),
                    num_accepted=accepted,
                    expected=sum(said for _, said in proposal),
                    draft_us=1e3 * (ms - wire),
                    draft_wire_us=1e3 * wire,
                    verify_us=1e3 * verify * math.exp(chance.gauss(0.0, world.noise)),
                    verify_wire_us=1e3 * world.wire,
                    pass_rows=rows,
                    pass_sessions=len(planners),
                    verify_queue_us=1e3 * (max(draft) - ms),
                )
            )
        drafted = [len(proposal) for proposal in proposals]
        done.append(Round(drafted, tokens, max(draft) + verify + world.wire))
    return done


@pytest.mark.parametrize("boast", [1.0, 0.4])
@pytest.mark.parametrize(
    ("world", "sessions"), [("cpu", 1), ("cpu", 4), ("cpu", 32), ("gpu", 1), ("gpu", 32)]
)
def test_a_draft_that_heeds_costs_does_not_lose_by_it(
    world: str, sessions: int, boast: float
) -> None:
    services, workload = WORLDS[world], Workload()
    planners = [Controller(workload, confident=True) for _ in range(sessions)]
    found = rate(run_confident(services, planners, 240 if sessions < 8 else 90, boast)[30:])
    best = max(
        rate(run_confident(services, [Fixed(count)] * sessions, 240 // sessions + 10))
        for count in range(7)
    )
    # One number cannot set right what is said of easy and of hard tokens alike.
    assert found > (0.93 if boast == 1.0 else 0.88) * best


def test_a_draft_that_is_told_no_costs_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    drafting = Controller._drafting

    def careless(controller: Controller, *args: Any) -> DraftPlan:
        return drafting(controller, *args)._replace(
            num_draft_tokens=LIMIT, row_cost=0.0, step_cost=0.0
        )

    monkeypatch.setattr(Controller, "_drafting", careless)
    workload = Workload()
    planners = [Controller(workload, confident=True) for _ in range(4)]
    best = rate(run_confident(World(), [Fixed(2)] * 4, 60))
    assert rate(run_confident(World(), planners, 120)) < 0.8 * best


def observed(accepted: int, expected: float, sessions: int = 1) -> Observation:
    """A tree of seven tokens in three steps, among others."""
    rows = sessions + 7
    verify_us = 1e3 * World().verify(rows)
    return Observation(
        [3, 2, 2], accepted, expected, 8400, 400, verify_us, 400, rows, sessions, False
    )


def costs(accepted: int, expected: float, sessions: int = 1, rounds: int = 60) -> DraftPlan:
    workload = Workload()
    # So that rows are known to cost something.
    for rows, ms in CPU:
        workload.verify.add(rows, 1e3 * ms)
    controller = Controller(workload, confident=True)
    for _ in range(rounds):
        controller.plan(LIMIT)
        controller.observe(observed(accepted, expected, sessions))
    return controller.plan(LIMIT)


def test_the_draft_is_told_what_rows_and_steps_cost() -> None:
    plan = costs(2, 2.0)
    assert plan.num_draft_tokens == LIMIT
    # 1.5 ms of a row and 2.8 of a step, at 3 tokens in 44 ms.
    assert 0.05 < plan.row_cost < 0.2
    assert 0.15 < plan.step_cost < 0.25
    assert costs(3, 3.0, sessions=4).row_cost > 1.5 * plan.row_cost


def test_costs_are_those_of_tokens_that_stand() -> None:
    honest, boastful = costs(2, 2.0), costs(2, 4.0)
    assert boastful.row_cost == pytest.approx(2.0 * honest.row_cost, rel=0.1)
    assert boastful.step_cost == pytest.approx(2.0 * honest.step_cost, rel=0.1)
    shy = costs(2, 1e-3)
    assert shy.row_cost == pytest.approx(honest.row_cost / 4.0, rel=0.1)


def test_proposals_that_are_empty_are_soon_not_asked_for() -> None:
    controller = Controller(Workload(), confident=True)
    drafted = []
    for _ in range(100):
        plan = controller.plan(LIMIT)
        drafted.append(plan.num_draft_tokens)
        controller.observe(Observation([], 0, 0.0, 2800, 400, 27_900, 400, 1, 1))
    assert sum(count > 0 for count in drafted[50:]) <= 1
    assert controller.beliefs["why_plain"]


@pytest.mark.parametrize("confident", [False, True])
def test_unless_confident_the_draft_may_not_leave_out_anything(confident: bool) -> None:
    controller = Controller(Workload(), confident=confident)
    for _ in range(50):
        plan = controller.plan(LIMIT)
        assert confident or plan.row_cost == plan.step_cost == 0.0
        controller.observe(observed(3, 3.0))
    assert (controller.plan(LIMIT).step_cost > 0.0) == confident


NUMBERS = st.one_of(
    st.just(0.0), st.floats(allow_nan=True, allow_infinity=True), st.floats(0.0, 1e6)
)
COUNTS = st.one_of(st.integers(-1, 40), st.just(2**32 - 1))
OBSERVATIONS = st.builds(
    Observation,
    depths=st.lists(COUNTS, max_size=70),
    num_accepted=COUNTS,
    expected=NUMBERS,
    draft_us=NUMBERS,
    draft_wire_us=NUMBERS,
    verify_us=NUMBERS,
    verify_wire_us=NUMBERS,
    pass_rows=COUNTS,
    pass_sessions=COUNTS,
    hidden=st.booleans(),
    verify_queue_us=NUMBERS,
)


@given(st.lists(st.tuples(COUNTS, OBSERVATIONS), max_size=30), st.booleans())
def test_whatever_is_observed_plans_are_within_the_limit(
    rounds: list[tuple[int, Observation]], confident: bool
) -> None:
    workload = Workload()
    # The same observations give the same plans: nothing else goes into them.
    one, other = (Controller(w, confident=confident) for w in (workload, Workload()))
    for limit, observation in rounds:
        plan = one.plan(limit)
        assert plan == other.plan(limit)
        assert 0 <= plan.num_draft_tokens <= max(limit, 0)
        for cost in (plan.row_cost, plan.step_cost):
            assert cost >= 0.0
            assert math.isfinite(cost)
        one.observe(observation)
        other.observe(observation)
    assert one.beliefs == other.beliefs


def test_a_curve_is_flat_at_first_and_goes_on_as_it_did() -> None:
    curve = Curve()
    assert curve(5) == 0.0
    for rows, ms in CPU:
        for _ in range(5):
            curve.add(rows, ms)
    times = [curve(rows) for rows in range(1, 65)]
    assert times == sorted(times)
    assert curve(1) == curve(4) == pytest.approx(27.5, abs=0.5)
    assert curve(20) == pytest.approx(51.2, abs=0.5)
    assert curve(48) == pytest.approx(94.6, abs=3.0)
    assert curve(1000) > 1000 / 64 * curve(64) * 0.99


def test_a_single_stall_counts_for_little() -> None:
    curve, average = Curve(), Average()
    for _ in range(20):
        curve.add(4, 30.0)
        average.add(30.0)
    curve.add(4, 30_000.0)
    average.add(30_000.0)
    assert curve(4) < 33.0
    assert average.value < 33.0


def test_a_curve_forgets_what_it_has_not_seen_for_long() -> None:
    curve = Curve()
    curve.add(8, 100.0)
    for _ in range(2000):
        curve.add(1, 10.0)
    assert [size for size, _ in curve.points] == [1.0]
