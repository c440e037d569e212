"""How much a tenant may ask for in a time: token buckets of requests and of tokens."""

from __future__ import annotations

import time
from collections.abc import Callable

from specdec.errors import SpecdecError
from specdec.v1 import common_pb2

_MINUTE = 60.0


class Bucket:
    """Fills evenly up to what a minute brings. What is owed makes it negative."""

    def __init__(self, per_minute: float, clock: Callable[[], float]) -> None:
        self.per_minute = self._level = per_minute
        self._clock = clock
        self._seen = clock()

    def seconds_until(self, amount: float) -> float:
        """How long until it holds so much, or all that it can. 0 if it does."""
        now = self._clock()
        self._level += (now - self._seen) * self.per_minute / _MINUTE
        self._level = min(self._level, self.per_minute)
        self._seen = now
        missing = min(amount, self.per_minute) - self._level
        return max(missing, 0.0) * _MINUTE / self.per_minute

    def take(self, amount: float) -> None:
        """Takes so much, whether it is there or not. A negative amount is given back."""
        self._level -= amount


class Throttle:
    """The buckets of one tenant."""

    def __init__(
        self,
        requests_per_minute: float | None = None,
        tokens_per_minute: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """A rate that is None is not limited."""
        self.rates = (requests_per_minute, tokens_per_minute)
        self._requests, self._tokens = (
            None if rate is None else Bucket(rate, clock) for rate in self.rates
        )

    def begin(self) -> None:
        """Counts a request.

        Raises:
            SpecdecError: RESOURCE_EXHAUSTED, there were too many.
        """
        _take(self._requests, 1.0, "requests")

    def take_prompt(self, tokens: int) -> None:
        """Takes the tokens of a prompt. How many follow it is not known yet.

        A prompt of more tokens than there are in a minute is let in when none of them was used.

        Raises:
            SpecdecError: RESOURCE_EXHAUSTED, there are not so many.
        """
        _take(self._tokens, tokens, "tokens")

    def take_generated(self, tokens: int) -> None:
        """Takes tokens that were generated. Those that are not there the next prompt waits for.

        A negative number gives a prompt back that came to nothing.
        """
        if self._tokens is not None:
            self._tokens.take(tokens)


def _take(bucket: Bucket | None, amount: float, what: str) -> None:
    if bucket is None:
        return
    seconds = bucket.seconds_until(amount)
    if seconds > 0.0:
        raise SpecdecError(
            common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED,
            f"this API key may have {bucket.per_minute:g} {what} a minute; "
            f"try again in {seconds:.1f} s",
            retry_after=seconds,
        )
    bucket.take(amount)
