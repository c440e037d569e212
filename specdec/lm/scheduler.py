"""Continuous batching: which rows of which sessions go into the next forward pass."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from specdec.lm.batch import Segment
from specdec.lm.model import CausalLM
from specdec.lm.pages import PAGE_SIZE, PagePool, pages_for
from specdec.lm.prefix_cache import PrefixCache
from specdec.lm.sequence import CachedSequence
from specdec.v1 import common_pb2


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
        self.result: Any = None
        self.error: Exception | None = None
        self.done = False
        self.ended: Callable[[], None] = lambda: None
        self.begun: float | None = None
        """When its first rows went into a pass, by time.monotonic()."""
        self.compute_seconds = 0.0
        """How long the passes took that it had rows in."""
        self.logits: list[torch.Tensor] = []
        """Of the rows that were fed so far and are wanted: [rows, effective vocabulary] each."""

    @property
    def end(self) -> int:
        """How many tokens of the sequence it wants to be cached."""
        return len(self.sequence.tokens)

    def start(self) -> None:  # noqa: B027 (most kinds have nothing to do)
        """Called once, on the model thread, before its first pass."""

    def take(self, logits: torch.Tensor) -> None:
        """Receives the logits of one pass."""
        self.logits.append(logits)

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


class Scheduler:
    """Packs the works of many sessions into passes. Owned by the model thread."""

    def __init__(self, model: CausalLM, num_pages: int, max_rows: int) -> None:
        """
        Args:
            model: what runs the passes; room for the pages is made here.
            num_pages: of the pool.
            max_rows: the token budget of a pass. Beside running sessions a prefill gets a quarter
                of it, so that they keep their pace.
        """
        self._model = model
        self.max_rows = model.fixed_rows or max_rows
        self.pool = PagePool(num_pages)
        self.prefixes = PrefixCache(self.pool)
        model.allocate(num_pages)
        self._sequences: list[CachedSequence] = []
        """Of the open sessions, the oldest first."""
        self._works: list[Work] = []
        """In the order of their arrival."""
        self.num_preemptions = 0

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._works)

    def open(self, token_ids: Sequence[int], *, salt: str, shared: bool) -> CachedSequence:
        """A new session's sequence; see `CachedSequence`."""
        sequence = CachedSequence(self.pool, token_ids, salt=salt, shared=shared)
        self._sequences.append(sequence)
        return sequence

    def close(self, sequence: CachedSequence) -> None:
        """Ends a session: its work is dropped, its pages go to the prefix cache or the pool."""
        self._works = [work for work in self._works if work.sequence is not sequence]
        self._sequences.remove(sequence)
        self._release(sequence)

    def add(self, work: Work, ended: Callable[[], None]) -> None:
        """Queues a work.

        `ended` is called when it has ended, unless its session is closed first.
        """
        work.ended = ended
        with failing(work):
            work.start()
        self._works.append(work)

    def step(self) -> None:
        """Runs one pass, if there is work."""
        chosen = self._choose()
        if chosen:
            begun = time.monotonic()
            for work, _ in chosen:
                work.begun = begun if work.begun is None else work.begun
            self._run(chosen)
            fed = [work for work, _ in chosen]
            self._consume([w for w in fed if not w.done and w.sequence.cached_length == w.end])
            seconds = time.monotonic() - begun
            for work in fed:
                work.compute_seconds += seconds
        self._dismiss()

    def fail_all(self, error: Exception) -> None:
        """Ends all works with an error that is nobody's own."""
        for work in self._works:
            work.fail(error)
        self._dismiss()

    def _dismiss(self) -> None:
        ended = [work for work in self._works if work.done]
        if ended:
            self._works = [work for work in self._works if not work.done]
        for work in ended:
            work.ended()

    def check_integrity(self) -> None:
        """Compares the pool's books with all who hold pages.

        Raises:
            IntegrityError: they differ.
        """
        self.pool.check_integrity(
            [*(sequence.pages for sequence in self._sequences), self.prefixes.pages]
        )

    # Who goes next.

    def _choose(self) -> list[tuple[Work, int]]:
        """Works with the number of rows that each feeds in the next pass."""
        works = [work for work in self._works if not work.done]
        prefills = [work for work in works if isinstance(work, Prefill)]
        others = [work for work in works if not isinstance(work, Prefill)]
        chosen: list[tuple[Work, int]] = []
        share = self.max_rows // 4
        budget = self.max_rows - (share if prefills else 0)
        for work in others:
            budget -= self._admit(work, budget, chosen)
        budget = share if chosen else self.max_rows
        started: list[CachedSequence] = []
        for work in prefills:
            if self._waits_for(work.sequence, started):
                continue
            started.append(work.sequence)
            budget -= self._admit(work, budget, chosen)
        return chosen

    def _admit(self, work: Work, budget: int, chosen: list[tuple[Work, int]]) -> int:
        """Adds a work's next rows to the pass, as many as budget and pool allow."""
        sequence = work.sequence
        if budget <= 0:
            return 0
        if sequence.shared and not sequence.pages:
            limit = work.end - work.num_logits
            sequence.adopt(self.prefixes.match(sequence.tokens[:limit], sequence.salt))
        missing = work.end - sequence.cached_length
        if missing == 0:
            work.consume([work])
            return 0
        count = min(missing, budget, work.max_rows or missing)
        needed = pages_for(sequence.cached_length + count) - len(sequence.pages)
        if needed and not self._make_room(needed, sequence, {id(w.sequence) for w, _ in chosen}):
            return 0
        after = sequence.pages[-1] if sequence.pages else None
        fresh = self.pool.allocate(needed, after)
        self._model.clear(fresh)
        sequence.pages += fresh
        chosen.append((work, count))
        return count

    def _waits_for(self, sequence: CachedSequence, started: Sequence[CachedSequence]) -> bool:
        """Whether another prefill is about to share with this one more than is cached so far."""
        if not sequence.shared or sequence.pages:
            return False
        begin = len(self.prefixes.peek(sequence.tokens[:-1], sequence.salt)) * PAGE_SIZE
        end = begin + PAGE_SIZE
        return end < len(sequence.tokens) and any(
            other.shared
            and other.salt == sequence.salt
            and end < len(other.tokens)
            and other.tokens[:end] == sequence.tokens[:end]
            for other in started
        )

    def _make_room(self, needed: int, sequence: CachedSequence, busy: set[int]) -> bool:
        """Frees pages for a sequence: from the prefix cache, then from the youngest sessions."""
        while self.pool.num_free < needed:
            if self.prefixes.evict(needed - self.pool.num_free):
                continue
            victim = self._youngest_after(sequence, busy)
            if victim is None:
                return False
            self._preempt(victim)
        return True

    def _youngest_after(self, sequence: CachedSequence, busy: set[int]) -> CachedSequence | None:
        for other in reversed(self._sequences):
            if other is sequence:
                return None
            if other.pages and id(other) not in busy:
                return other
        return None

    def _preempt(self, victim: CachedSequence) -> None:
        """Takes a session's pages. Its tokens stay, and are fed again when their turn comes."""
        self.num_preemptions += 1
        self._release(victim)
        for work in self._works:
            if work.sequence is victim:
                work.restart()

    def _release(self, sequence: CachedSequence) -> None:
        self._publish(sequence)
        sequence.truncate(0)

    def _publish(self, sequence: CachedSequence) -> None:
        if sequence.shared:
            length = sequence.stable_length
            self.prefixes.insert(sequence.tokens[:length], sequence.pages, sequence.salt)

    # The pass.

    def _run(self, chosen: Sequence[tuple[Work, int]]) -> None:
        """Feeds the chosen rows. If the pass fails, each work runs alone, and fails alone."""
        try:
            logits = self._model.forward([_segment(work, count) for work, count in chosen])
        except Exception as error:
            if len(chosen) == 1:
                chosen[0][0].fail(error)
            else:
                for one in chosen:
                    self._run([one])
            return
        row = 0
        for work, count in chosen:
            wanted = _num_logits(work, count)
            work.sequence.cached_length += count
            with failing(work):
                work.take(logits[row : row + wanted])
            row += wanted

    def _consume(self, works: Sequence[Work]) -> None:
        """Goes on with works that were fed to their end, all of a class together."""
        for work in works:
            if isinstance(work, Prefill):
                self._publish(work.sequence)
        for kind in dict.fromkeys(type(work) for work in works):
            members = [work for work in works if type(work) is kind]
            try:
                kind.consume(members)
            except Exception as error:
                for work in members:
                    work.fail(error)


def _segment(work: Work, count: int) -> Segment:
    sequence = work.sequence
    start = sequence.cached_length
    return Segment(
        sequence.tokens[start : start + count], start, sequence.pages, _num_logits(work, count)
    )


def _num_logits(work: Work, count: int) -> int:
    """How many of the next `count` rows are among the last `num_logits` pending ones."""
    behind = work.end - work.sequence.cached_length - count
    return max(0, min(count, work.num_logits - behind))
