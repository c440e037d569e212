"""When a pass waits for sessions, and how many rows of prompts it takes, by a clock of our own."""

from __future__ import annotations

import pytest

from specdec.lm import pace
from specdec.lm.pace import Paces
from specdec.lm.pages import PagePool
from specdec.lm.sequence import CachedSequence


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(pace, "time", clock)
    return clock


@pytest.fixture
def pair() -> tuple[CachedSequence, CachedSequence]:
    pool = PagePool(1)
    return CachedSequence(pool, [1]), CachedSequence(pool, [2])


def go_around(
    paces: Paces, clock: Clock, *trips: tuple[CachedSequence, float], seconds: float = 0.04
) -> None:
    """A pass of so many seconds, after which each session is away for its own time."""
    clock.now += seconds
    paces.passed(seconds, 2, 0, goes_on=False)
    ended = clock.now
    for sequence, _ in trips:
        paces.left(sequence)
    for sequence, away in sorted(trips, key=lambda trip: trip[1]):
        clock.now = ended + away
        paces.returned(sequence, clock.now)


def leave_and_return(
    paces: Paces, clock: Clock, first: CachedSequence, second: CachedSequence
) -> None:
    """A pass with both, after which the first is back and the second is still away."""
    clock.now += 0.04
    paces.passed(0.04, 2, 0, goes_on=False)
    paces.left(first)
    paces.left(second)
    clock.now += 0.004
    paces.returned(first, clock.now)


def test_a_pass_waits_for_the_session_that_is_usually_a_little_later(
    clock: Clock, pair: tuple[CachedSequence, CachedSequence]
) -> None:
    first, second = pair
    paces = Paces()
    for _ in range(20):
        go_around(paces, clock, (first, 0.004), (second, 0.008))
    leave_and_return(paces, clock, first, second)
    # Twice its usual time, less what has passed.
    assert paces.wait_seconds() == pytest.approx(0.016 - 0.004, abs=1e-6)
    clock.now += 0.004
    paces.returned(second, clock.now)
    assert paces.wait_seconds() == 0.0


def test_groups_that_take_turns_come_together(
    clock: Clock, pair: tuple[CachedSequence, CachedSequence]
) -> None:
    """While one is in a pass the other comes, and is seen only when that pass has ended."""
    first, second = pair
    paces = Paces()
    for _ in range(20):
        for inside, other in ((first, second), (second, first)):
            came = clock.now + 0.004
            clock.now += 0.04
            paces.passed(0.04, 2, 0, goes_on=False)
            paces.left(inside)
            paces.returned(other, came)
    # The one that has just left is worth waiting for.
    assert paces.wait_seconds() == pytest.approx(0.008, abs=1e-6)


def test_nobody_waits_for_a_session_alone_or_unknown_or_late_or_far_away_or_closed(
    clock: Clock, pair: tuple[CachedSequence, CachedSequence]
) -> None:
    first, second = pair
    paces = Paces()
    paces.returned(first, clock.now)
    assert paces.wait_seconds() == 0.0  # alone
    paces.passed(0.04, 2, 0, goes_on=False)
    paces.left(first)
    paces.left(second)
    paces.returned(first, clock.now)
    assert paces.wait_seconds() == 0.0  # nobody knows yet when the second comes
    for _ in range(20):
        go_around(paces, clock, (first, 0.004), (second, 0.1))
    leave_and_return(paces, clock, first, second)
    assert paces.wait_seconds() == 0.0  # far away: half a pass is 0.02
    assert paces.num_expected() == 0  # further than a pass
    clock.now += 0.18
    assert paces.num_expected() == 1
    clock.now += 1.0
    assert paces.wait_seconds() == 0.0  # late
    assert paces.num_expected() == 0
    paces.closed(second)
    assert paces.num_expected() == 0


def rows(paces: Paces, most: int, prompts: int = 1, running: int = 8) -> int:
    return paces.prompt_rows(most, prompts=prompts, running=running)


def test_prompts_get_rows_that_cost_as_much_as_the_pass_itself(clock: Clock) -> None:
    paces = Paces()
    assert rows(paces, 128) == 128  # nothing is known yet
    for _ in range(20):
        paces.passed(0.04, 2, 0, goes_on=False)
        paces.passed(0.04 + 0.001 * 64, 66, 64, goes_on=True)
    assert rows(paces, 128) in (31, 32)
    assert rows(paces, 24) == 24
    # As many wait as run; three times as many.
    assert rows(paces, 128, prompts=8) == rows(paces, 128)
    assert rows(paces, 128, prompts=24) in (95, 96)
    for _ in range(40):
        paces.passed(0.04 + 0.01 * 16, 18, 16, goes_on=True)
    assert rows(paces, 128) == 16  # never less
    for _ in range(40):
        paces.passed(0.04 + 1e-5 * 128, 130, 128, goes_on=True)
    assert rows(paces, 128) == 128


def test_a_few_rows_say_nothing_of_what_rows_cost(clock: Clock) -> None:
    paces = Paces()
    paces.passed(0.04, 2, 0, goes_on=False)
    paces.passed(0.4, 5, 3, goes_on=False)
    assert rows(paces, 128) == 128


def away(paces: Paces, clock: Clock, trips: list[tuple[CachedSequence, float]]) -> None:
    """Passes of few and of many rows, of which a row costs 2 ms and the rest 4 ms."""
    for index in range(40):
        rows = (10, 20)[index % 2]
        seconds = 0.004 + 0.002 * rows
        clock.now += seconds
        paces.passed(seconds, rows, 0, goes_on=False)
        ended = clock.now
        for sequence, _ in trips:
            paces.left(sequence)
        for sequence, time_away in sorted(trips, key=lambda trip: trip[1]):
            clock.now = ended + time_away
            paces.returned(sequence, clock.now)


@pytest.mark.parametrize(("late", "waits"), [(0.0016, True), (0.003, False)])
def test_nobody_is_waited_for_longer_than_a_pass_of_its_own_would_cost(
    clock: Clock, pair: tuple[CachedSequence, CachedSequence], late: float, waits: bool
) -> None:
    """Half a pass is 17 ms, but of that hardly anything is shared: the session gets a turn."""
    first, second = pair
    paces = Paces()
    away(paces, clock, [(first, 0.0005), (second, late)])
    clock.now += 0.034
    paces.passed(0.034, 15, 0, goes_on=False)
    paces.left(first)
    paces.left(second)
    clock.now += 0.0005
    paces.returned(first, clock.now)
    assert (paces.wait_seconds() > 0.0) == waits
