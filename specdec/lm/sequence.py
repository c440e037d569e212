"""A token sequence with the KV pages that hold a prefix of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.lm.pages import PAGE_SIZE, PagePool, pages_for


class CachedSequence:
    """What a session holds: its tokens, and the pages of those that the model has seen.

    Invariant between steps: the pages hold the first `cached_length` tokens of `tokens`, and at
    least one token is pending, so that the next forward pass yields logits.
    """

    def __init__(
        self, pool: PagePool, token_ids: Sequence[int], *, salt: str = "", shared: bool = True
    ) -> None:
        """
        Args:
            pool: where its pages come from and go to.
            token_ids: committed, at least one. Nothing is cached to begin with.
            salt: it shares prefixes only with sequences of the same salt.
            shared: whether it shares any.
        """
        self._pool = pool
        self.tokens = list(token_ids)
        self.pages: list[int] = []
        self.cached_length = 0
        self.committed_length = len(self.tokens)
        """The tokens from here on are drafts."""
        self.num_losses = 0
        """How often its pages were taken away."""
        self.number = 0
        """Its place in the order in which the scheduler's sessions were opened."""
        self.reused_length = 0
        """How many tokens it took over from the prefix cache when it began."""
        self.idle_since = math.inf
        """When its last work ended, by time.monotonic(); infinite while it has work."""
        self.salt = salt
        self.shared = shared

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds drafted tokens at the end. They stay pending."""
        self.tokens.extend(token_ids)

    def commit(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Makes the sequence its first `base_length` tokens and then `token_ids`.

        What follows `base_length` now (a draft, verified or not) is kept in the cache as far as it
        agrees with `token_ids`, and rolled back from there on. `token_ids` must not be empty.
        """
        held = self.tokens[base_length:]
        agreeing = 0
        while agreeing < min(len(held), len(token_ids)) and held[agreeing] == token_ids[agreeing]:
            agreeing += 1
        self.tokens[base_length:] = token_ids
        self.committed_length = len(self.tokens)
        # The last token stays pending: its logits are what comes next.
        self.truncate(min(base_length + agreeing, len(self.tokens) - 1))

    def adopt(self, pages: list[int]) -> None:
        """Takes over references to pages that hold its beginning. Nothing may be cached yet."""
        assert not self.pages
        self.pages = pages
        self.cached_length = len(pages) * PAGE_SIZE

    def replace(self, pages: list[int]) -> None:
        """Holds these pages in place of as many at its beginning, which hold the same."""
        self._pool.retain(pages)
        self._pool.release(self.pages[: len(pages)])
        self.pages[: len(pages)] = pages

    def truncate(self, length: int) -> None:
        """Gives back the pages behind the first `length` tokens."""
        self.cached_length = min(self.cached_length, length)
        count = pages_for(self.cached_length)
        self._pool.release(self.pages[count:])
        del self.pages[count:]

    @property
    def stable_length(self) -> int:
        """How many of its cached tokens will never be rolled back."""
        return min(self.cached_length, self.committed_length)
