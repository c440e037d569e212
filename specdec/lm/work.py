"""What sessions want of the model."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec.lm.batch import Segment
from specdec.lm.sequence import CachedSequence
from specdec.v1 import common_pb2


class NotNumbers(FloatingPointError):
    """A model's logits are not finite numbers, and perhaps neither is what it cached."""


class Work(ABC):
    """What a session wants of the model: pending tokens fed, and what follows from the logits.

    It lives for one or several passes, until `result` or `error` is set.
    """

    num_logits = 1
    """For how many of the last pending tokens logits are wanted."""
    max_rows: int | None = None
    """How many rows it may have in one pass; None for no limit of its own."""

    def __init__(self, sequence: CachedSequence) -> None:
        self.sequence = sequence
        self._num_losses = sequence.num_losses
        self.asked = time.monotonic()
        """When it was wanted."""
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False
        self.ended: Callable[[], None] = lambda: None
        self.begun: float | None = None
        """When its first rows went into a pass, by time.monotonic()."""
        self.compute_seconds = 0.0
        """How long the passes took that it had rows in."""
        self.pass_rows = 0
        """How many rows the last pass had that it had rows in, those of all works together."""
        self.pass_sessions = 0
        """How many works had rows in that pass."""
        self.logits: list[torch.Tensor] = []
        """Of the rows that were fed so far and are wanted: [rows, effective vocabulary] each."""

    @property
    def end(self) -> int:
        """How many tokens of the sequence it wants to be cached."""
        return len(self.sequence.tokens)

    @property
    def missing(self) -> int:
        """How many tokens are still to be fed."""
        return self.end - self.sequence.cached_length

    @property
    def tail(self) -> int:
        """How many tokens it will append to those that are pending now."""
        return 0

    def segment(self, count: int) -> Segment:
        """The next `count` rows."""
        start, tree = self.sequence.cached_length, self.sequence.tree
        if tree is not None and start + count <= tree.begin + tree.straight:
            tree = None
        return Segment(
            self.sequence.tokens[start : start + count],
            start,
            self.sequence.pages,
            max(0, min(count, self.num_logits - (self.missing - count))),
            tree,
        )

    def start(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Called once, on the model thread, before its first pass."""

    def take(self, logits: torch.Tensor) -> None:
        """Receives the logits of one pass."""
        self.logits.append(logits)

    def notice_losses(self) -> None:
        """Restarts if the sequence lost its pages meanwhile."""
        if self._num_losses != self.sequence.num_losses:
            self._num_losses = self.sequence.num_losses
            self.restart()

    def restart(self) -> None:
        """Forgets what it received: its sequence lost its pages, and all is fed again."""
        self.logits.clear()

    def collect(self) -> torch.Tensor:
        """[num_logits, effective vocabulary]: what it received, which is then forgotten."""
        logits = self.logits[0] if len(self.logits) == 1 else torch.cat(self.logits)
        self.logits = []
        return logits

    def finish(self, result: Any) -> None:
        """Ends the work."""
        self.result, self.done = result, True

    def fail(self, error: Exception) -> None:
        """Ends the work without a result."""
        self.error, self.done = error, True

    @classmethod
    @abstractmethod
    def consume(cls, works: Sequence[Any]) -> None:
        """Goes on with works of this class that were fed to their end.

        Each then has all of its logits. It is finished, failed, or has new tokens pending.
        """


@contextmanager
def failing(work: Work) -> Iterator[None]:
    """An error in the block ends this work, and no other."""
    try:
        yield
    except Exception as error:
        work.fail(error)


class Prefill(Work):
    """Feeds a sequence up to its last token."""

    num_logits = 0

    def __init__(self, sequence: CachedSequence) -> None:
        super().__init__(sequence)
        self.found: list[common_pb2.TokenLogprobs] = []
        """The log-probabilities of the tokens that were fed, if it is of a kind that keeps them."""

    @property
    def end(self) -> int:
        return len(self.sequence.tokens) - 1

    @classmethod
    def consume(cls, works: Sequence[Prefill]) -> None:
        for work in works:
            work.finish(work.found)
