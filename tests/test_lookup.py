"""Prompt lookup against a search through the whole text."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service.lookup import NgramIndex
from draft_service.matching import MIN_LENGTH, Match, copy

TEXTS = st.lists(st.integers(0, 3), max_size=60)


def searched(tokens: Sequence[int], max_length: int) -> Match | None:
    """The most recent occurrence of the longest n-gram, by trying all."""
    for n in range(min(max_length, len(tokens) - 1), MIN_LENGTH - 1, -1):
        for place in range(len(tokens) - 1, n - 1, -1):
            if tokens[place - n : place] == tokens[-n:]:
                return Match(n, place)
    return None


@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(TEXTS, max_size=6), max_length=st.integers(MIN_LENGTH, 6))
def test_the_longest_ngram_is_found_where_it_occurred_last(
    pieces: list[list[int]], max_length: int
) -> None:
    index = NgramIndex(max_length)
    for piece in pieces:
        index.extend(piece)
        assert index.match() == searched(index.tokens, max_length)


def test_an_ngram_does_not_find_itself() -> None:
    index = NgramIndex(4)
    index.extend([1, 2, 3, 4])
    assert index.match() is None
    index.extend([1, 2])
    assert index.match() == Match(2, 2)


@settings(max_examples=200, deadline=None)
@given(tokens=st.lists(st.integers(0, 3), min_size=1), data=st.data(), count=st.integers(1, 30))
def test_a_copy_that_reaches_the_end_goes_on_with_itself(
    tokens: list[int], data: st.DataObject, count: int
) -> None:
    place = data.draw(st.integers(0, len(tokens) - 1))
    text = list(tokens)
    for offset in range(count):
        text.append(text[place + offset])
    assert copy(tokens, place, count) == text[len(tokens) :]
