"""How fast sessions have been ending, and so when there will be room."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable

_REMEMBERED = 64
"""Of how many ended calls the rate is taken."""
_UNKNOWN_SECONDS = 1.0
_MIN_SECONDS = 0.1
_MAX_SECONDS = 60.0
_SPREAD = 0.25
"""By up to so much a delay is longer, at random: those refused together are not to return so."""


class EndRate:
    """The rate at which sessions end."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock`: seconds."""
        self._clock = clock
        self._ends: deque[tuple[float, int]] = deque(maxlen=_REMEMBERED)
        """When calls ended, and how many sessions they had."""

    def add(self, sessions: int) -> None:
        """A call with so many sessions ends now."""
        self._ends.append((self._clock(), sessions))

    def clear(self) -> None:
        """Nothing runs any more. The time in which nothing comes says nothing of the rate."""
        self._ends.clear()

    def seconds_until(self, count: int) -> float:
        """How long it takes until so many sessions have ended, within [0.1, 60].

        The time since the last end counts too: while nothing ends the rate falls.
        """
        seconds = _UNKNOWN_SECONDS
        if len(self._ends) > 1:
            begun, _ = self._ends[0]
            ended = sum(sessions for _, sessions in self._ends) - self._ends[0][1]
            seconds = count * (self._clock() - begun) / ended
        seconds *= 1.0 + _SPREAD * random.random()
        return min(max(seconds, _MIN_SECONDS), _MAX_SECONDS)
