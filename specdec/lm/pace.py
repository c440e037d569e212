"""When a pass waits a moment for sessions that are about to come back.

A pass costs nearly the same for one session as for many. Sessions that were served together come
back within milliseconds of each other, after their trip to the gateway. If the first of them
started a pass alone, the others would have to sit it out, and half of all passes would run nearly
empty.
"""

from __future__ import annotations

import time

from specdec.lm.sequence import CachedSequence

_PATIENCE = 0.5
"""A pass waits at most for this part of what passes take."""
_SLACK = 1.25
"""A session is given up as late after its usual time times this."""
_WEIGHT = 0.3
"""Of the newest observation in a moving average."""


class Paces:
    """Learns how soon each session comes back after its work has ended."""

    def __init__(self) -> None:
        self._pass_seconds = 0.0
        self._left: dict[CachedSequence, float] = {}
        """When the work of each session that is away ended."""
        self._usual: dict[CachedSequence, float] = {}
        """After how many seconds each session usually comes back."""
        self._first_arrival = 0.0
        """When the first session came that the next pass will take."""
        self._anybody = False

    def left(self, sequence: CachedSequence) -> None:
        """A session's work ended."""
        self._left[sequence] = time.monotonic()

    def returned(self, sequence: CachedSequence) -> None:
        """A session came with work."""
        now = time.monotonic()
        if not self._anybody:
            self._first_arrival, self._anybody = now, True
        left = self._left.pop(sequence, None)
        if left is not None:
            usual = self._usual.get(sequence, now - left)
            self._usual[sequence] = usual + _WEIGHT * (now - left - usual)

    def closed(self, sequence: CachedSequence) -> None:
        """A session ended."""
        self._left.pop(sequence, None)
        self._usual.pop(sequence, None)

    def passed(self, seconds: float) -> None:
        """A pass took so long."""
        self._anybody = False
        self._pass_seconds += _WEIGHT * (seconds - self._pass_seconds)

    def wait_seconds(self) -> float:
        """Until the last session is back that is expected within the pass's patience, or 0."""
        now = time.monotonic()
        latest = self._first_arrival + _PATIENCE * self._pass_seconds
        expected = [
            left + _SLACK * self._usual[sequence]
            for sequence, left in self._left.items()
            if sequence in self._usual
        ]
        return max((at - now for at in expected if now < at <= latest), default=0.0)
