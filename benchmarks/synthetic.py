"""Works that take what real ones take of a model, with an acceptance that is given."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec.lm.scheduler import Scheduler
from specdec.lm.sequence import CachedSequence
from specdec.lm.work import Work


def record_calls(
    function: Callable[[], torch.Tensor],
) -> tuple[torch.Tensor, Callable[[], None]]:
    """A recording without a GPU: the replay is a call on the same tensors."""
    result = function()

    def replay() -> None:
        result.copy_(function())

    return result, replay


class Block(Work):
    """A verification whose drafted tokens stand at a given rate."""

    def __init__(self, sequence: CachedSequence, drafted: list[int], rate: float) -> None:
        super().__init__(sequence)
        self.num_logits = len(drafted) + 1
        self._drafted = drafted
        self._rate = rate

    def start(self) -> None:
        self._base_length = len(self.sequence.tokens)
        self.sequence.append(self._drafted)

    @classmethod
    def consume(cls, works: Sequence[Block]) -> None:
        best = torch.cat([work.collect() for work in works]).argmax(dim=-1).tolist()
        for work in works:
            n = 0
            while n < len(work._drafted) and random.random() < work._rate:
                n += 1
            emitted = [*work._drafted[:n], best[n]]
            work.sequence.commit(work._base_length, emitted)
            work.finish(emitted)


class Draft(Work):
    """A greedy proposal of K tokens on top of what was committed."""

    def __init__(
        self, sequence: CachedSequence, committed: tuple[int, list[int]] | None, k: int
    ) -> None:
        super().__init__(sequence)
        self._committed = committed
        self._k = k
        self._drafted: list[int] = []

    def start(self) -> None:
        if self._committed is not None:
            self.sequence.commit(*self._committed)

    @classmethod
    def consume(cls, works: Sequence[Draft]) -> None:
        best = torch.cat([work.collect() for work in works]).argmax(dim=-1).tolist()
        for work, token_id in zip(works, best, strict=True):
            work._drafted.append(token_id)
            work.sequence.append([token_id])
            if len(work._drafted) == work._k:
                work.finish(work._drafted)


def do(scheduler: Scheduler, works: Sequence[Work]) -> list[Any]:
    """Runs works to their ends. Returns their results."""
    for work in works:
        scheduler.add(work, lambda: None)
    while scheduler.has_work:
        scheduler.step()
    for work in works:
        if work.error is not None:
            raise work.error
    return [work.result for work in works]
