"""Continuous batching: which rows of which sessions go into the next forward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

from specdec.lm.model import CausalLM
from specdec.lm.pace import Paces
from specdec.lm.pages import PAGE_SIZE, pages_for
from specdec.lm.quarantine import Quarantine
from specdec.lm.residents import Residents
from specdec.lm.sequence import CachedSequence
from specdec.lm.work import NotNumbers, Prefill, Work, failing


class Scheduler:
    """Packs the works of many sessions into passes. Owned by the model thread."""

    def __init__(self, model: CausalLM, num_pages: int, max_rows: int) -> None:
        """
        Args:
            model: what runs the passes; room for the pages is made here.
            num_pages: of the pool.
            max_rows: the token budget of a pass; deterministic models have their own. Beside
                running sessions prompts get a quarter of it at most, and `Paces` says how much.
        """
        self._model = model
        self._quarantine = Quarantine(model)
        self.max_rows = model.fixed_rows or max_rows
        self.residents = Residents(num_pages)
        model.allocate(num_pages)
        self._works: list[Work] = []
        """In the order of their arrival."""
        self._paces = Paces()
        self._first: Work | None = None
        """The work of the oldest session that the last pass had no pages for."""

    @property
    def has_work(self) -> bool:
        """Whether any work has not ended."""
        return bool(self._works)

    def open(self, sequence: CachedSequence) -> None:
        """Begins a session, the youngest so far. Its sequence must be of the residents' pool."""
        self.residents.open(sequence)

    def close(self, sequence: CachedSequence) -> None:
        """Ends a session: its work is dropped, its pages go to the prefix cache or the pool."""
        self._works = [work for work in self._works if work.sequence is not sequence]
        self._paces.closed(sequence)
        self.residents.close(sequence)

    def add(self, work: Work, ended: Callable[[], None]) -> None:
        """Queues a work.

        `ended` is called when it has ended, unless its session is closed first.
        """
        work.ended = ended
        work.sequence.idle_since = math.inf
        self._paces.returned(work.sequence, work.asked)
        with failing(work):
            work.start()
        self._works.append(work)

    def wait_seconds(self) -> float:
        """How long the next pass should wait for sessions that are about to join it."""
        share = self.max_rows // 4
        for work in self._works:
            # A proposal is not kept waiting between its tokens; a prompt has time.
            if work.done or (work.begun is not None and not _is_prefill(work, share)):
                return 0.0
        return self._paces.wait_seconds()

    def step(self) -> bool:
        """Runs one pass, if there is work.

        Returns:
            Whether anything was done. If not, all works wait for pages of sessions that are idle:
            the next call, or IDLE_SECONDS, may change that.
        """
        chosen = self._choose()
        if chosen:
            begun = time.monotonic()
            for work, _ in chosen:
                work.begun = begun if work.begun is None else work.begun
            share = self.max_rows // 4
            prompt_rows = sum(count for work, count in chosen if _is_prefill(work, share))
            self._quarantine.feed(chosen)
            fed = [work for work, _ in chosen]
            num_rows = sum(count for _, count in chosen)
            for work in fed:
                work.pass_rows, work.pass_sessions = num_rows, len(fed)
            self._consume([w for w in fed if not w.done and w.sequence.cached_length == w.end])
            seconds = time.monotonic() - begun
            for work in fed:
                work.compute_seconds += seconds
            goes_on = any(not work.done for work in self._works)
            self._paces.passed(seconds, num_rows, prompt_rows, goes_on=goes_on)
        return self._dismiss() or bool(chosen)

    def fail_all(self, error: Exception) -> None:
        """Ends all works with an error that is nobody's own."""
        for work in self._works:
            work.fail(error)
        self._dismiss()

    def _dismiss(self) -> bool:
        """Lets go of the works that have ended. Returns whether there were any."""
        ended = [work for work in self._works if work.done]
        if ended:
            self._works = [work for work in self._works if not work.done]
        for work in ended:
            if isinstance(work.error, NotNumbers):
                self.residents.distrust(work.sequence)
            self._paces.left(work.sequence)
            work.sequence.idle_since = time.monotonic()
            work.ended()
        return bool(ended)

    # Who goes next.

    def _choose(self) -> list[tuple[Work, int]]:
        """Works with the number of rows that each feeds in the next pass."""
        works = [work for work in self._works if not work.done]
        share = self.max_rows // 4
        prompts = [work for work in works if _is_prefill(work, share)]
        others = [work for work in works if not _is_prefill(work, share)]
        chosen: list[tuple[Work, int]] = []
        short: list[Work] = []
        budget = self.max_rows - (share if prompts else 0)
        if self._first in works:
            # Before the others it may take the pages of all who are younger.
            budget -= self._admit(self._first, share, chosen, short)
        else:
            self._first = None
        for work in others:
            if work is not self._first:
                budget -= self._admit(work, budget, chosen, short)
        # Sessions that are on their way count as running: they would have to wait for this pass.
        running = len(chosen) + self._paces.num_expected()
        budget = self.max_rows
        if running:
            budget = self._paces.prompt_rows(share, prompts=len(prompts), running=running)
        prompts = [work for work in prompts if work is not self._first]
        self._choose_prompts(prompts, budget, chosen, short)
        self._first = min(short, key=lambda work: work.sequence.number, default=None)
        return chosen

    def _choose_prompts(
        self, prompts: list[Work], budget: int, chosen: list[tuple[Work, int]], short: list[Work]
    ) -> None:
        """Adds rows of prompts. The oldest leaves half of the budget to the others if they need it:
        a short prompt does not wait for all of a long one."""
        started: list[CachedSequence] = []
        waiting = sum(work.missing for work in prompts[1:])
        for index, work in enumerate(prompts):
            if budget <= 0:
                break
            if isinstance(work, Prefill):
                if self._waits_for(work.sequence, started):
                    continue
                started.append(work.sequence)
            limit = budget if index else max(budget // 2, budget - waiting)
            budget -= self._admit(work, limit, chosen, short)

    def _admit(
        self, work: Work, budget: int, chosen: list[tuple[Work, int]], short: list[Work]
    ) -> int:
        """Adds a work's next rows to the pass, as many as the budget allows.

        If the pool has no pages for them, it goes to `short` instead.

        Returns:
            How many rows that are.
        """
        with failing(work):
            return self._prepare(work, budget, chosen, short)
        return 0

    def _prepare(
        self, work: Work, budget: int, chosen: list[tuple[Work, int]], short: list[Work]
    ) -> int:
        sequence = work.sequence
        if budget <= 0:
            return 0
        work.notice_losses()
        if sequence.shared and not sequence.pages:
            # Not of its drafted tokens: these may be rolled back, and shared pages are not written.
            committed = sequence.committed_length
            self.residents.adopt(sequence, min(work.end - work.num_logits, committed))
            if work.begun is None:
                sequence.reused_length = sequence.cached_length
        if work.missing == 0:
            self._quarantine.go_on(type(work), [work])
            return 0
        count = min(work.missing, budget, work.max_rows or budget)
        needed = pages_for(sequence.cached_length + count) - len(sequence.pages)
        if needed > 0:
            busy = {id(chosen_work.sequence) for chosen_work, _ in chosen}
            in_all = pages_for(work.end + work.tail) - len(sequence.pages)
            fresh = self.residents.provide(sequence, needed, in_all, busy)
            if not fresh:
                short.append(work)
                return 0
            self._model.clear(fresh)
        chosen.append((work, count))
        return count

    def _waits_for(self, sequence: CachedSequence, started: Sequence[CachedSequence]) -> bool:
        """Whether another prefill is about to share with this one more than is cached so far."""
        if not sequence.shared or sequence.pages:
            return False
        begin = len(self.residents.prefixes.peek(sequence.tokens[:-1], sequence.salt)) * PAGE_SIZE
        end = begin + PAGE_SIZE
        return end < len(sequence.tokens) and any(
            other.shared
            and other.salt == sequence.salt
            and end < len(other.tokens)
            and other.tokens[:end] == sequence.tokens[:end]
            for other in started
        )

    def _consume(self, works: Sequence[Work]) -> None:
        """Goes on with works that were fed to their end, all of a class together."""
        for work in works:
            if isinstance(work, Prefill):
                with failing(work):
                    self.residents.publish(work.sequence)
        going = [work for work in works if not work.done]
        for kind in dict.fromkeys(type(work) for work in going):
            self._quarantine.go_on(kind, [work for work in going if type(work) is kind])


def _is_prefill(work: Work, share: int) -> bool:
    """Whether it feeds context above all: that of a new session, or of one that was preempted."""
    return isinstance(work, Prefill) or work.missing - work.num_logits > share
