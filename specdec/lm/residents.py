"""Who lives in the pool: the open sessions and the prefix cache, and who has to move."""

from __future__ import annotations

import time

from specdec.lm.pages import PagePool
from specdec.lm.prefix_cache import PrefixCache
from specdec.lm.sequence import CachedSequence

IDLE_SECONDS = 1.0
"""A session without work for so long yields its pages to whoever needs them."""
_EVICTED_AT_ONCE = 32
"""Pages. A full cache is the steady state, and need not be searched for every page."""


class Residents:
    """All who hold pages of one pool."""

    def __init__(self, num_pages: int) -> None:
        self.pool = PagePool(num_pages)
        self.prefixes = PrefixCache(self.pool)
        self.sequences: list[CachedSequence] = []
        """Of the open sessions, the oldest first."""
        self.num_preemptions = 0
        self._num_opened = 0

    def open(self, sequence: CachedSequence) -> None:
        """Adds a session, the youngest so far."""
        self._num_opened += 1
        sequence.number = self._num_opened
        self.sequences.append(sequence)

    def close(self, sequence: CachedSequence) -> None:
        """Removes a session: its pages go to the prefix cache or the pool."""
        self.sequences.remove(sequence)
        self._release(sequence)

    def adopt(self, sequence: CachedSequence, limit: int) -> None:
        """Lends a sequence without pages what is cached of its first `limit` tokens."""
        sequence.adopt(self.prefixes.match(sequence.tokens[:limit], sequence.salt))

    def publish(self, sequence: CachedSequence) -> None:
        """Puts what will not be rolled back into the prefix cache, if the sequence shares it."""
        if sequence.shared:
            length = sequence.stable_length
            known = self.prefixes.insert(sequence.tokens[:length], sequence.pages, sequence.salt)
            # Who holds a page in the cache holds all that it continues: whatever no session holds
            # can then be evicted.
            sequence.replace(known)

    def distrust(self, sequence: CachedSequence) -> None:
        """Has nobody take over what a session cached whose logits were no numbers: what it was
        computed from may be none either."""
        sequence.shared = False
        self.prefixes.forget(sequence.tokens, sequence.salt)

    def provide(
        self, sequence: CachedSequence, count: int, in_all: int, busy: set[int]
    ) -> list[int]:
        """Gives a sequence `count` more pages: free ones, then of the prefix cache, then of others.

        Args:
            sequence: of an open session.
            count: at least one.
            in_all: how many it will need until its work is done. If they cannot be had it gets
                none: it would only keep others waiting.
            busy: ids of sequences whose pages are not to be taken now.

        Returns:
            The pages, which are the sequence's now; empty if there are not enough.
        """
        if in_all > self.pool.num_free:
            victims, kept = self._victims(sequence, busy)
            if in_all > self.pool.num_pages - len(kept):
                return []
            while self.pool.num_free < count:
                at_once = min(_EVICTED_AT_ONCE, self.pool.num_pages // 64)
                if not self.prefixes.evict(max(count - self.pool.num_free, at_once)):
                    self.preempt(victims.pop())
        fresh = self.pool.allocate(count, sequence.pages[-1] if sequence.pages else None)
        sequence.pages += fresh
        return fresh

    def preempt(self, victim: CachedSequence) -> None:
        """Takes a session's pages. Its tokens stay, and are fed again when their turn comes."""
        self.num_preemptions += 1
        victim.num_losses += 1
        self._release(victim)

    def check_integrity(self) -> None:
        """Compares the pool's books with all who hold pages.

        Raises:
            IntegrityError: they differ.
        """
        holders = [sequence.pages for sequence in self.sequences]
        self.pool.check_integrity([*holders, self.prefixes.pages])

    def _victims(
        self, sequence: CachedSequence, busy: set[int]
    ) -> tuple[list[CachedSequence], set[int]]:
        """Whose pages a sequence may have, the first to lose theirs last; and the pages of others.

        These are the younger sessions, the youngest of them first, but before them sessions of any
        age that rest: they may wait for just this one, or for a client that does not read.
        """
        younger: list[CachedSequence] = []
        resting: list[CachedSequence] = []
        kept: set[int] = set()
        latest = time.monotonic() - IDLE_SECONDS
        is_younger = False
        for other in self.sequences:
            if id(other) not in busy and other.idle_since < latest:
                resting.append(other)
            elif id(other) not in busy and is_younger:
                younger.append(other)
            else:
                kept.update(other.pages)
            is_younger = is_younger or other is sequence
        return [each for each in (*younger, *resting) if each.pages], kept

    def _release(self, sequence: CachedSequence) -> None:
        try:
            self.publish(sequence)
        finally:
            sequence.truncate(0)
