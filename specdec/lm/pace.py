"""When a pass waits a moment for sessions that are about to come back, and how much it prefills.

A pass costs nearly the same for one session as for many. Sessions that were served together come
back within milliseconds of each other, after their trip to the gateway. If the first of them
started a pass alone, the others would have to sit it out, and half of all passes would run nearly
empty.

That is so as long as a pass is bound by reading the weights. Where many rows are bound by
arithmetic there is little to save by sharing a pass, and a device that waits is idle. Then the
first ones start, the others meet in the next pass, and two groups take turns: while one is verified
the other is drafted for.

The rows of a prompt are not free: on a device that is bound by arithmetic they soon cost more than
the pass itself. What they cost is measured as passes go by.
"""

from __future__ import annotations

import time

from specdec.lm.sequence import CachedSequence

_PATIENCE = 0.5
"""A pass waits at most for this part of what passes take."""
_MEMORY = 0.02
"""Of the newest pass in what is known of passes by their rows. Long enough for small and large ones
to be in it."""
_SPREAD = 0.1
"""By so much of their mean the rows of passes have to vary for their costs to be told apart."""
_SLACK = 2.0
"""A session is given up as late after its usual time times this."""
_WEIGHT = 0.3
"""Of the newest observation in a moving average."""
_STRETCH = 0.8
"""A prompt beside running sessions may add this part of what a pass takes without it."""
_FEWEST_ROWS = 16
"""Of a prompt in a pass, whatever they cost: it is never starved."""


class Paces:
    """Learns how soon each session comes back, and what passes cost."""

    def __init__(self) -> None:
        self._pass_seconds = 0.0
        """Of a pass without prompts."""
        self._row_seconds = 0.0
        """What a row of a prompt adds."""
        self._cost = _LinearCost()
        self._left: dict[CachedSequence, float] = {}
        """When the work of each session that is away ended."""
        self._usual: dict[CachedSequence, float] = {}
        """After how many seconds each session usually comes back."""
        self._waiting_since: float | None = None
        """Since when the next pass could have begun."""

    def left(self, sequence: CachedSequence) -> None:
        """A session's work ended."""
        self._left[sequence] = time.monotonic()

    def returned(self, sequence: CachedSequence, at: float) -> None:
        """A session came with work. `at`: when it came, perhaps during the last pass."""
        self._waiting_since = self._waiting_since or time.monotonic()
        left = self._left.pop(sequence, None)
        if left is not None:
            usual = self._usual.get(sequence, at - left)
            self._usual[sequence] = _average(usual, at - left)

    def closed(self, sequence: CachedSequence) -> None:
        """A session ended."""
        self._left.pop(sequence, None)
        self._usual.pop(sequence, None)

    def passed(self, seconds: float, rows: int, prompt_rows: int, *, goes_on: bool) -> None:
        """A pass took so long.

        Args:
            seconds: how long.
            rows: that it fed.
            prompt_rows: those of prompts among them.
            goes_on: whether there is work for the next already.
        """
        self._waiting_since = time.monotonic() if goes_on else None
        if prompt_rows == 0:
            self._pass_seconds = _average(self._pass_seconds or seconds, seconds)
            self._cost.add(rows, seconds)
        elif prompt_rows >= _FEWEST_ROWS:
            extra = max(0.0, seconds - self._pass_seconds) / prompt_rows
            self._row_seconds = _average(self._row_seconds or extra, extra)

    def wait_seconds(self) -> float:
        """Until the last session is back that is worth waiting for, or 0.

        To wait costs that time; not to wait costs another pass for who comes late.
        """
        now = time.monotonic()
        worth = min(_PATIENCE * self._pass_seconds, self._cost.fixed)
        latest = (self._waiting_since or 0.0) + worth
        return max((at - now for at in self._expected() if now < at <= latest), default=0.0)

    def prompt_rows(self, most: int, *, prompts: int, running: int) -> int:
        """How many rows of prompts the next pass may have beside running sessions.

        Args:
            most: never more.
            prompts: how many sessions wait for theirs. The more they are against those that run,
                the longer these have to wait.
            running: how many sessions run, at least one.
        """
        if self._pass_seconds == 0.0 or self._row_seconds == 0.0:
            return most
        stretch = _STRETCH * max(1.0, prompts / running)
        affordable = int(stretch * self._pass_seconds / self._row_seconds)
        return min(most, max(_FEWEST_ROWS, affordable))

    def num_expected(self) -> int:
        """How many sessions are away that will be back before another pass could have ended."""
        now = time.monotonic()
        return sum(now < at <= now + self._pass_seconds for at in self._expected())

    def _expected(self) -> list[float]:
        """When the sessions that are away will be back at the latest."""
        usual = self._usual
        return [at + _SLACK * usual[one] for one, at in self._left.items() if one in usual]


class _LinearCost:
    """What passes cost beside what each row adds: a line through the latest passes."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = 0.0
        self._seconds = 0.0
        self._rows_squared = 0.0
        self._product = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        keep = 1.0 - _MEMORY
        self._weight = keep * self._weight + 1.0
        self._rows = keep * self._rows + rows
        self._seconds = keep * self._seconds + seconds
        self._rows_squared = keep * self._rows_squared + rows * rows
        self._product = keep * self._product + rows * seconds

    @property
    def fixed(self) -> float:
        """Seconds of a pass without rows; those of a whole pass as long as rows hardly vary."""
        if not self._weight:
            return 0.0
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        variance = self._rows_squared / self._weight - rows * rows
        if variance <= (_SPREAD * rows) ** 2:
            return seconds
        slope = (self._product / self._weight - rows * seconds) / variance
        return min(max(seconds - slope * rows, 0.0), seconds)


def _average(old: float, new: float) -> float:
    return old + _WEIGHT * (new - old)
