"""A token sequence with the KV pages that hold a prefix of it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec.lm.batch import slot
from specdec.lm.pages import PAGE_SIZE, PagePool, pages_for
from specdec.lm.tree import Tree, tree_of
from specdec.trees import chain


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
        self.tree: Tree | None = None
        """How the drafts branch; None if they are a chain. It begins at `committed_length`."""
        self._moves: list[tuple[int, int]] = []
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

    def append(self, token_ids: Sequence[int], parents: Sequence[int] | None = None) -> None:
        """Adds drafted tokens at the end. They stay pending.

        Args:
            token_ids: the tokens.
            parents: of each, as in `specdec.trees`; they count all tokens that were drafted since
                the last commit. Without any, each follows the one before it.

        Raises:
            ValueError: there are not as many parents, or one does not come before its child.
        """
        if parents is not None or self.tree is not None:
            drafted = len(self.tokens) - self.committed_length
            if parents is None:
                parents = range(drafted, drafted + len(token_ids))
            if len(parents) != len(token_ids):
                raise ValueError(f"{len(token_ids)} tokens with {len(parents)} parents")
            self.tree = tree_of(self.committed_length, [*self._parents, *parents])
        self.tokens.extend(token_ids)

    def keep(self, places: Sequence[int]) -> None:
        """Drops all drafted tokens but those at these places, which become a chain.

        What of them is cached stays cached: its keys and values are to be moved (`take_moves`)
        before any page changes hands. So it may be called in `Work.consume` only.

        Args:
            places: counted from 1 as parents are; a path from the root on.

        Raises:
            ValueError: they are no path.
        """
        parents, begin = self._parents, self.committed_length
        for parent, place in zip([0, *places], places, strict=False):
            if not 0 < place <= len(parents) or parents[place - 1] != parent:
                raise ValueError(f"no path of the tree: {list(places)}")
        self.tokens[begin:] = [self.tokens[begin + place - 1] for place in places]
        self.tree = None
        kept = [place for place in places if begin + place <= self.cached_length]
        self._moves += [
            (slot(self.pages, begin + place - 1), slot(self.pages, begin + index))
            for index, place in enumerate(kept)
            if place != index + 1
        ]
        self.truncate(begin + len(kept))

    def take_moves(self) -> list[tuple[int, int]]:
        """Slots of keys and values with the slots that they must be moved to, all at once."""
        moves, self._moves = self._moves, []
        return moves

    def commit(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Makes the sequence its first `base_length` tokens and then `token_ids`.

        What follows `base_length` now (a draft, verified or not) is kept in the cache as far as it
        agrees with `token_ids`, and rolled back from there on. `token_ids` must not be empty.
        Of a tree only the tokens that it begins with as a chain can be kept.
        """
        if self.tree is not None:
            straight = self.tree.begin + self.tree.straight
            self.tree = None
            self.truncate(straight)
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
    def _parents(self) -> Sequence[int]:
        """Of all drafted tokens."""
        if self.tree is not None:
            return self.tree.parents
        return chain(len(self.tokens) - self.committed_length)

    @property
    def stable_length(self) -> int:
        """How many of its cached tokens will never be rolled back."""
        return min(self.cached_length, self.committed_length)
