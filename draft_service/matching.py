"""Drafts that are copied from a text, without a model.

Where a text repeats itself, what followed the last time is likely to follow again: code that is
edited, documents that are quoted, tables and lists. Whoever copies names the place to copy from by
the longest match, the most tokens before it that are also the last of the text.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

from draft_service.drafter import Draft, DraftSession
from specdec.v1 import common_pb2

MIN_LENGTH = 2
"""Of a match. After 2 tokens a third of the copies go wrong at once, after a single one most do."""
_FOLLOWS_AGAIN = ((2, 0.36), (3, 0.47), (4, 0.57), (5, 0.67), (6, 0.71), (16, 0.90))
"""After a match of so many tokens, how often what followed the last time follows again: means of
Python sources and English documents."""
PIECE = 2048
"""How many tokens are taken in at a time: some milliseconds, in which nothing else is served."""


class Match(NamedTuple):
    """A place where the last tokens of a text occurred before."""

    length: int
    """How many tokens before the place are the last ones of the text."""
    place: int
    """The index of the token that followed."""


class Index(ABC):
    """A text that finds its own last tokens in what came before them."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    @abstractmethod
    def extend(self, token_ids: Sequence[int]) -> None:
        """Appends tokens."""

    @abstractmethod
    def match(self) -> Match | None:
        """The longest match, the most recent one of these, or None if there is none."""


def copy(tokens: Sequence[int], place: int, count: int) -> list[int]:
    """`count` tokens from `place` on. At the end of the text the copy itself goes on being copied.

    So a text with a period goes on with that period, as in LZ77.
    """
    found = list(tokens[place : place + count])
    period = len(found)
    while len(found) < count:
        found.append(found[-period])
    return found


def _follows_again(length: int) -> float:
    """How probable it is that what followed a match follows again."""
    after = bisect(_FOLLOWS_AGAIN, (length, 1.0))
    (low, at_low), (high, at_high) = (
        _FOLLOWS_AGAIN[max(after - 1, 0)],
        _FOLLOWS_AGAIN[min(after, len(_FOLLOWS_AGAIN) - 1)],
    )
    if high <= low:
        return at_low
    return at_low + (at_high - at_low) * (length - low) / (high - low)


def copied(token_ids: Sequence[int], match_length: int, costs: common_pb2.DraftCosts) -> Draft:
    """The draft of a copy, as far as it is worth its costs."""
    probabilities: list[float] = []
    stands = 1.0
    for length in range(match_length, match_length + len(token_ids)):
        # As long as the copy is right, what it continues grows.
        stands *= _follows_again(length)
        if stands < costs.row:
            break
        probabilities.append(stands)
    return Draft(
        token_ids[: len(probabilities)], probabilities=probabilities, match_length=match_length
    )


class IndexSession(DraftSession):
    """The drafts of one session, copied from its own prompt and output."""

    def __init__(self, opening: common_pb2.Open, index: Index) -> None:
        """`index` is empty: `fill` has it take the context in."""
        super().__init__(common_pb2.Opened(round=opening.round, base_length=opening.base_length))
        self.index = index

    async def fill(self, opening: common_pb2.Open) -> None:
        """Takes the context in, piece by piece, so that the event loop stays responsive."""
        context = [*opening.prompt_token_ids, *opening.committed_token_ids]
        for begin in range(0, len(context), PIECE):
            self.index.extend(context[begin : begin + PIECE])
            await asyncio.sleep(0)

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        self.index.extend(committed)
        match = self.index.match()
        if match is None:
            return Draft(())
        token_ids = copy(self.index.tokens, match.place, num_draft_tokens)
        return copied(token_ids, match.length, self.costs)
