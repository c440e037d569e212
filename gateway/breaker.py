"""A circuit breaker: what fails is left alone for a while, the longer the more often it does."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

_FIRST_SECONDS = 0.5
_LAST_SECONDS = 30.0
_MOST_DOUBLINGS = 16
_TRIAL_SECONDS = 2.0
"""For which others wait for the session that tries an endpoint again."""


class Breaker:
    """The circuit breaker of one endpoint.

    It opens at a failure, for a pause that doubles with each failure in a row. Then one session
    tries the endpoint: if that succeeds it is closed. Pauses are jittered, so that several gateways
    do not come back together.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        """
        Args:
            clock: seconds.
            jitter: numbers of [0, 1).
        """
        self.reason = ""
        """Why it is not closed, for people."""
        self._clock, self._jitter = clock, jitter
        self._failures = 0
        self._open_until = 0.0

    @property
    def lets_in(self) -> bool:
        """Whether a session may use the endpoint now."""
        return self._clock() >= self._open_until

    def tries(self) -> None:
        """A session uses the endpoint."""
        if self._failures:
            self._open_until = max(self._open_until, self._clock() + _TRIAL_SECONDS)

    def failed(self, reason: str) -> None:
        """The endpoint failed a session."""
        self.reason = reason
        pause = min(_FIRST_SECONDS * 2.0 ** min(self._failures, _MOST_DOUBLINGS), _LAST_SECONDS)
        self._failures += 1
        self._open_until = self._clock() + pause * (0.5 + self._jitter() / 2)

    def succeeded(self) -> None:
        """The endpoint did what it was asked for."""
        self.reason, self._failures, self._open_until = "", 0, 0.0
