"""Trees of drafted tokens in the model runtime: who sees whom, and where each token stands.

The tokens of a tree take adjacent places of their sequence, and so of its pages, but a token's
position is that of its depth: siblings share one.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from specdec.trees import depths, is_chain

_UNSEEN = -1
"""The distance of a token that is not on a row's path."""


class Tree(NamedTuple):
    """How the drafted tokens of a sequence branch."""

    begin: int
    """The place in the sequence of the first drafted token: how many tokens are committed."""
    parents: tuple[int, ...]
    """Of each drafted token, as in `specdec.trees`."""

    def positions(self, start: int, end: int) -> list[int]:
        """The positions of the tokens at these places of the sequence."""
        begin, found = self.begin, _depths(self.parents)
        return [p if p < begin else begin + found[p - begin] - 1 for p in range(start, end)]

    @property
    def straight(self) -> int:
        """How many of the drafted tokens come before the first that does not follow its neighbour:
        these are a chain."""
        return next(i for i, parent in enumerate(self.parents) if parent != i)


def tree_of(begin: int, parents: Sequence[int]) -> Tree | None:
    """The tree with these parents; None if it is a chain.

    Raises:
        ValueError: a parent does not come before its child.
    """
    if is_chain(parents):
        return None
    for place, parent in enumerate(parents, 1):
        if not 0 <= parent < place:
            raise ValueError(f"the parent of drafted token {place} is {parent}")
    return Tree(begin, tuple(parents))


class Branches(NamedTuple):
    """What the rows of a group see of their trees."""

    begins: torch.Tensor
    """int64 [B]: the first key of each tree; the group's number of keys where there is none."""
    distances: torch.Tensor
    """int64 [B, n, W]: how many positions before each row these keys of its tree are, from the
    first on; negative where the row does not see the key."""

    def hide(self, hidden: torch.Tensor, window: int | None) -> torch.Tensor:
        """Says what the rows do not see of their trees.

        Args:
            hidden: bool [B, n, L + W], right for the keys before the trees; written to.
            window: how many of the last positions a row sees; None for all.

        Returns:
            bool [B, n, L].
        """
        rows, width = self.distances.shape[1:]
        unseen = self.distances < 0
        if window is not None:
            unseen |= self.distances >= window
        columns = self.begins.unsqueeze(-1) + torch.arange(width, device=hidden.device)
        # Where there is no tree these are the columns that are cut off.
        hidden.scatter_(2, columns.unsqueeze(1).expand(-1, rows, -1), unseen)
        return hidden[..., : hidden.shape[-1] - width]


class Span(NamedTuple):
    """The rows of one sequence in a pass."""

    start: int
    end: int
    tree: Tree | None

    @property
    def width(self) -> int:
        """How many keys of its tree there are when they are fed."""
        return 0 if self.tree is None else max(0, self.end - self.tree.begin)


def branches(
    spans: Sequence[Span], shape: tuple[int, int, int], num_keys: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`Branches` on the CPU.

    Args:
        spans: at most B.
        shape: B, n and W; what the spans do not fill is padding.
        num_keys: L.
    """
    begins = np.full(shape[0], num_keys, dtype=np.int64)
    distances = np.full(shape, _UNSEEN, dtype=np.int64)
    for index, (start, end, tree) in enumerate(spans):
        if tree is not None and tree.begin < end:
            begins[index] = tree.begin
            # Rows before the tree see nothing of it.
            first, last = max(start, tree.begin), end - tree.begin
            distances[index, first - start : end - start, :last] = _distances(tree.parents)[
                first - tree.begin : last, :last
            ]
    return torch.from_numpy(begins), torch.from_numpy(distances)


@lru_cache(maxsize=256)
def _depths(parents: tuple[int, ...]) -> list[int]:
    return depths(parents)


@lru_cache(maxsize=256)
def _distances(parents: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """[N, N]: how far up from each token its ancestors are; 0 is itself."""
    count = len(parents)
    found = np.full((count, count), _UNSEEN, dtype=np.int64)
    for row, parent in enumerate(parents):
        if parent:
            above = found[parent - 1]
            np.add(above, 1, out=found[row], where=above >= 0)
        found[row, row] = 0
    return found
