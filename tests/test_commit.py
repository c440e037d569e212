"""The commit path: when a generation ends, and what text it has given by then."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import product

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from gateway.commit import Output, Stopping
from specdec.v1.gateway_pb2 import (
    FINISH_REASON_LENGTH,
    FINISH_REASON_STOP,
    FINISH_REASON_UNSPECIFIED,
)
from tests.models import EOS, make_tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
# All bytes, and all words of two or three of these letters, so that a text has many splits.
LETTERS = "abc"
WORDS = ["".join(word) for size in (2, 3) for word in product(LETTERS, repeat=size)]
TABLE = [EOS, *sorted(pre_tokenizers.ByteLevel.alphabet()), *WORDS]
EOS_ID = 0


def _tokenizer() -> Tokenizer:
    table = {token: index for index, token in enumerate(TABLE)}
    tokenizer: Tokenizer = make_tokenizer(table).backend_tokenizer
    return tokenizer


TOKENIZER = _tokenizer()


def ids_of(*words: str) -> list[int]:
    """Each word of `WORDS` as one token, anything else byte by byte."""
    ids: list[int] = []
    for word in words:
        ids += [TABLE.index(word)] if word in WORDS else TOKENIZER.encode(word).ids
    return ids


@dataclass
class Given:
    """What committing tokens until the end gave."""

    texts: list[str] = field(default_factory=list)
    reason: int = FINISH_REASON_UNSPECIFIED
    matched: int | str | None = None
    count: int = 0

    @property
    def text(self) -> str:
        return "".join(self.texts)


def commit(
    ids: Iterable[int],
    *,
    limit: int = 1000,
    stop_ids: Iterable[int] = (EOS_ID,),
    stop_strings: Iterable[str] = (),
) -> Given:
    """Commits tokens one by one until the generation ends or they are used up."""
    output = Output(TOKENIZER, Stopping(limit, frozenset(stop_ids), tuple(stop_strings)))
    texts = []
    for token_id in ids:
        texts.append(output.commit(token_id))
        if output.finished:
            break
    return Given(texts, output.finish_reason, output.matched, output.token_count)


def decode(ids: list[int]) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=True)
    return text


def reference(
    ids: list[int], limit: int, stop_ids: Iterable[int], stop_strings: Iterable[str]
) -> tuple[str, int, int | str | None, int]:
    """The text, reason, match and count, each time from the decoding of everything so far."""
    settled = ""
    for count, token_id in enumerate(ids, start=1):
        stopped = token_id in stop_ids
        last = stopped or count == limit
        text = decode(ids[: count - stopped])
        if last or not text.endswith(REPLACEMENT):
            settled = text
        occurring = [stop for stop in stop_strings if stop in settled]
        if occurring:
            first = min(occurring, key=lambda stop: (settled.index(stop), len(stop)))
            return settled[: settled.index(first)], FINISH_REASON_STOP, first, count
        if stopped:
            return settled, FINISH_REASON_STOP, token_id, count
        if last:
            return settled, FINISH_REASON_LENGTH, None, count
    raise AssertionError("the ids end before the limit")


def test_every_token_as_a_stop_ends_the_generation_there() -> None:
    ids = ids_of("ab", "c", "é", "世", "abc", "ca", "😀", "b")
    for token_id in set(ids):
        at = ids.index(token_id)
        result = commit(ids, stop_ids=[EOS_ID, token_id])
        assert result.text == decode(ids[:at])
        assert (result.reason, result.matched) == (FINISH_REASON_STOP, token_id)
        assert result.count == at + 1


def test_the_end_of_sequence_gives_no_text_of_its_own() -> None:
    result = commit([*ids_of("ab", "c"), EOS_ID, *ids_of("a")])
    assert result.texts == ["ab", "c", ""]
    assert (result.reason, result.matched, result.count) == (FINISH_REASON_STOP, EOS_ID, 3)


def test_an_end_of_sequence_that_is_no_stop_is_passed_over() -> None:
    result = commit([*ids_of("ab"), EOS_ID, *ids_of("c")], stop_ids=[], limit=3)
    assert result.texts == ["ab", "", "c"]
    assert (result.reason, result.matched, result.count) == (FINISH_REASON_LENGTH, None, 3)


def test_the_limit_ends_the_generation_with_exactly_so_many_tokens() -> None:
    ids = ids_of("a", "b", "ca", "é", "b")
    for limit in range(1, len(ids) + 1):
        result = commit(ids, limit=limit)
        assert (result.text, result.count) == (decode(ids[:limit]), limit)
        assert (result.reason, result.matched) == (FINISH_REASON_LENGTH, None)


def test_nothing_ends_before_its_time() -> None:
    result = commit(ids_of("a", "b", "c"), limit=4, stop_strings=["ac"])
    assert result.reason == FINISH_REASON_UNSPECIFIED
    assert result.text == "abc"


@pytest.mark.parametrize(
    ("words", "stops", "texts", "matched"),
    [
        pytest.param(["a", "bc", "c"], ["bc"], ["a", ""], "bc", id="one token"),
        pytest.param(["c", "a", "b", "c"], ["abc"], ["c", "", "", ""], "abc", id="spans tokens"),
        pytest.param(["cab", "cc", "b"], ["abc"], ["c", ""], "abc", id="starts inside a token"),
        pytest.param(["cca", "bab", "b"], ["ab"], ["cc", ""], "ab", id="ends inside a token"),
        pytest.param(["abc"], ["b"], ["a"], "b", id="is inside a token"),
        pytest.param(["b", "abc"], ["b"], [""], "b", id="is the first token"),
        pytest.param(["a", "é", "b"], ["é"], ["a", "", ""], "é", id="has several bytes"),
        pytest.param(["c", "b", "bc", "a"], ["bbc"], ["c", "", ""], "bbc", id="repeats itself"),
        pytest.param(["aa", "b"], ["ab"], ["a", ""], "ab", id="begins anew within a beginning"),
        pytest.param(["ab", "ac", "b"], ["abc", "ac"], ["", "ab"], "ac", id="overlap"),
        pytest.param(["abc"], ["bc", "ab"], [""], "ab", id="the first one counts"),
        pytest.param(["abc"], ["abc", "a", "ab"], [""], "a", id="prefixes in one token"),
        pytest.param(["c", "a", "bc"], ["abc", "ab"], ["c", "", ""], "ab", id="prefixes in two"),
        pytest.param(["a", "b"], ["abc", "b"], ["", "a"], "b", id="end of another's beginning"),
    ],
)
def test_a_stop_string_ends_the_text_before_it(
    words: list[str], stops: list[str], texts: list[str], matched: str
) -> None:
    for order in (stops, stops[::-1]):
        result = commit(ids_of(*words), stop_strings=order)
        assert (result.texts, result.matched) == (texts, matched)
        assert result.reason == FINISH_REASON_STOP
        assert result.count == len(texts)


@pytest.mark.parametrize(
    ("words", "stops", "texts"),
    [
        pytest.param(["a", "b", "a"], ["abc"], ["", "", "ab"], id="all of it"),
        pytest.param(["aa", "a", "b"], ["aac"], ["", "a", "aab"], id="as far as it is impossible"),
        pytest.param(["ab", "ab", "b"], ["abc"], ["", "ab", "abb"], id="and the next one kept"),
        pytest.param(["ab", "b"], ["abc", "bbc"], ["", "a"], id="but what another may need"),
    ],
)
def test_withheld_text_is_released_once_no_stop_string_can_come_of_it(
    words: list[str], stops: list[str], texts: list[str]
) -> None:
    result = commit(ids_of(*words), stop_strings=stops)
    assert (result.texts, result.reason) == (texts, FINISH_REASON_UNSPECIFIED)


def test_withheld_text_is_given_out_at_the_limit_and_at_a_stop_token() -> None:
    ids = ids_of("c", "a", "b")
    assert commit(ids, stop_strings=["abc"], limit=3).texts == ["c", "", "ab"]
    assert commit([*ids, EOS_ID], stop_strings=["abc"]).texts == ["c", "", "", "ab"]


def test_an_unfinished_character_is_given_out_at_the_limit_and_at_a_stop_token() -> None:
    ids = ids_of("a", "😀")[:-1]
    assert commit(ids, limit=4).texts == ["a", "", "", REPLACEMENT]
    assert commit([*ids, EOS_ID]).texts == ["a", "", "", "", REPLACEMENT]


@pytest.mark.parametrize("stop", [REPLACEMENT, f"a{REPLACEMENT}"])
def test_a_stop_string_is_found_in_what_only_the_end_makes_text(stop: str) -> None:
    ids = ids_of("b", "a", "😀")[:-1]
    text = "ba".removesuffix(stop[:-1])
    for result in (
        commit(ids, stop_strings=[stop], limit=len(ids)),
        commit([*ids, EOS_ID], stop_strings=[stop]),
    ):
        assert (result.text, result.matched) == (text, stop)
        assert result.reason == FINISH_REASON_STOP


@pytest.mark.parametrize("stop", ["c", "bc", "abc"])
def test_a_stop_string_that_is_completed_at_the_limit_is_a_stop(stop: str) -> None:
    result = commit(ids_of("a", "b", "c"), stop_strings=[stop], limit=3)
    assert (result.reason, result.matched) == (FINISH_REASON_STOP, stop)
    assert result.text == "abc".removesuffix(stop)


def test_a_stop_token_at_the_limit_is_a_stop() -> None:
    result = commit([*ids_of("a", "b"), EOS_ID], limit=3)
    assert (result.reason, result.matched, result.count) == (FINISH_REASON_STOP, EOS_ID, 3)


some_ids = st.lists(
    st.one_of(
        st.sampled_from(range(len(TABLE) - len(WORDS), len(TABLE))),
        st.sampled_from(ids_of(*LETTERS)),
        st.sampled_from(ids_of("é世😀")),
        st.just(EOS_ID),
    ),
    min_size=1,
    max_size=12,
)
some_stops = st.lists(
    st.text([*LETTERS, "é", "世", REPLACEMENT], min_size=1, max_size=4), max_size=4
)


@given(ids=some_ids, stops=some_stops, data=st.data())
@settings(deadline=None, max_examples=1000)
def test_any_generation_ends_as_the_decoding_of_the_whole_says(
    ids: list[int], stops: list[str], data: st.DataObject
) -> None:
    limit = data.draw(st.integers(1, len(ids)))
    stop_ids = data.draw(st.sets(st.sampled_from([EOS_ID, *ids])))
    result = commit(ids, limit=limit, stop_ids=stop_ids, stop_strings=stops)
    expected = reference(ids, limit, stop_ids, stops)
    assert (result.text, result.reason, result.matched, result.count) == expected


@st.composite
def texts_and_splits(draw: st.DrawFn) -> tuple[str, list[list[int]]]:
    """A text, and two ways to split it into tokens."""
    text = draw(st.text([*LETTERS, "é", "😀"], min_size=1, max_size=12))
    splits = []
    for _ in range(2):
        words, at = [], 0
        while at < len(text):
            sizes = [n for n in (1, 2, 3) if n == 1 or text[at : at + n] in WORDS]
            size = draw(st.sampled_from(sizes))
            words.append(text[at : at + size])
            at += size
        splits.append(ids_of(*words))
    return text, splits


@given(texts_and_splits(), st.text([*LETTERS, "é"], min_size=1, max_size=4))
@example(("aab", [ids_of("aa", "b"), ids_of("a", "ab")]), "ab")
@settings(deadline=None, max_examples=500)
def test_how_a_text_is_split_into_tokens_does_not_matter(
    text_and_splits: tuple[str, list[list[int]]], stop: str
) -> None:
    text, splits = text_and_splits
    for ids in splits:
        assert decode(ids) == text
        result = commit([*ids, EOS_ID], stop_strings=[stop])
        assert result.text == text.partition(stop)[0]
        assert result.matched == (stop if stop in text else EOS_ID)
        assert result.reason == FINISH_REASON_STOP


@given(ids=some_ids, stops=some_stops)
@settings(deadline=None, max_examples=300)
def test_only_what_may_become_a_stop_string_or_a_character_is_withheld(
    ids: list[int], stops: list[str]
) -> None:
    output = Output(TOKENIZER, Stopping(1000, frozenset(), tuple(stops)))
    given_out, settled = "", ""
    for count, token_id in enumerate(ids, start=1):
        given_out += output.commit(token_id)
        if output.finished:
            break
        text = decode(ids[:count])
        settled = settled if text.endswith(REPLACEMENT) else text
        assert settled.startswith(given_out)
        withheld = settled.removeprefix(given_out)
        assert not withheld or any(stop.startswith(withheld) for stop in stops)
        # Nothing of it went out: no end of the text that is longer could become one.
        longer = (settled[-n:] for n in range(len(withheld) + 1, len(settled) + 1))
        assert not any(stop.startswith(end) for end in longer for stop in stops)
