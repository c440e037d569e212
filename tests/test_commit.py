"""The commit path: when a generation ends, and what text it has given by then."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from gateway.commit import Output, Stopping
from gateway.rounds import run_rounds
from gateway.speculation import Speculation
from gateway.speculation_settings import SpeculationSettings
from gateway.statistics import Exchange, Statistics
from gateway.workload import Workload
from specdec.v1 import common_pb2, gateway_pb2, verifier_pb2
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
    **options: Any,
) -> Given:
    """Commits tokens one by one until the generation ends or they are used up."""
    stopping = Stopping(limit, frozenset(stop_ids), tuple(stop_strings), **options)
    output = Output(TOKENIZER, stopping)
    texts = []
    for token_id in ids:
        texts.append(output.commit(token_id))
        if output.finished:
            break
    return Given(texts, output.finish_reason, output.matched, output.token_count)


def decode(ids: list[int], *, skip_special_tokens: bool = True) -> str:
    text: str = TOKENIZER.decode(ids, skip_special_tokens=skip_special_tokens)
    return text


def reference(
    ids: list[int],
    limit: int,
    stop_ids: Iterable[int],
    stop_strings: Iterable[str],
    *,
    min_new_tokens: int = 0,
    include_stop_string: bool = False,
    skip_special_tokens: bool = True,
) -> tuple[str, int, int | str | None, int]:
    """The text, reason, match and count, each time from the decoding of everything so far."""
    settled = ""
    for count, token_id in enumerate(ids, start=1):
        stopped = token_id in stop_ids
        if stopped and include_stop_string:
            text = decode(ids[:count], skip_special_tokens=skip_special_tokens)
            return text, FINISH_REASON_STOP, token_id, count
        last = stopped or count == limit
        before = len(settled)
        text = decode(ids[: count - stopped], skip_special_tokens=skip_special_tokens)
        if last or not text.endswith(REPLACEMENT):
            settled = text
        # Where stop strings end in the text that this token has made, and begin.
        occurring = [
            (end - len(stop), end, stop)
            for stop in stop_strings
            for end in range(max(before + 1, len(stop)), len(settled) + 1)
            if settled.endswith(stop, 0, end) and count >= min_new_tokens
        ]
        if occurring:
            begin, end, first = min(occurring)
            text = settled[: end if include_stop_string else begin]
            return text, FINISH_REASON_STOP, first, count
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


@pytest.mark.parametrize(
    ("words", "stop", "min_new_tokens", "text", "count"),
    [
        pytest.param(["a", "b", "c", "b"], "b", 2, "a", 2, id="ends at the minimum"),
        pytest.param(["a", "b", "c", "b"], "ab", 2, "", 2, id="begins before it, ends at it"),
        pytest.param(["a", "b", "c", "a", "b"], "ab", 3, "abc", 5, id="ends before it"),
        pytest.param(["a", "b", "c", "b"], "bc", 2, "a", 3, id="begins at it, ends after it"),
        pytest.param(["b", "b", "b", "b"], "b", 4, "bbb", 4, id="at every token"),
        pytest.param(["a", "a", "a", "c"], "aa", 3, "a", 3, id="overlaps an earlier one"),
        pytest.param(["b", "a", "c", "a"], "b", 1, "", 1, id="minimum of one"),
    ],
)
def test_stop_strings_are_looked_for_from_the_minimum_on(
    words: list[str], stop: str, min_new_tokens: int, text: str, count: int
) -> None:
    result = commit(ids_of(*words), stop_strings=[stop], min_new_tokens=min_new_tokens)
    assert (result.text, result.matched, result.count) == (text, stop, count)


def test_a_stop_string_before_the_minimum_does_not_count_because_it_is_withheld() -> None:
    # "ab" is kept back for the sake of "abca", and is still there when the minimum is reached.
    for last, text, matched in (("b", "abcb", None), ("a", "", "abca")):
        ids = ids_of("a", "b", "c", last)
        result = commit(ids, stop_strings=["ab", "abca"], min_new_tokens=3, limit=4)
        assert (result.text, result.matched, result.count) == (text, matched, 4)


def test_a_character_that_is_completed_at_the_minimum_counts_from_there() -> None:
    ids = ids_of("a", "é", "b")
    assert commit(ids, stop_strings=["é"], min_new_tokens=3).count == 3
    result = commit(ids, stop_strings=["é"], min_new_tokens=4)
    assert (result.text, result.count) == ("aéb", 4)
    assert result.reason == FINISH_REASON_UNSPECIFIED


@pytest.mark.parametrize("stop", ["b", "ab", "abc", "bca", "é"])
@pytest.mark.parametrize("words", [["a", "b", "ca", "é"], ["ca", "bca", "é", "b"], ["abc", "é"]])
def test_the_stop_string_is_the_end_of_the_text_if_it_is_included(
    words: list[str], stop: str
) -> None:
    ids = [*ids_of(*words), EOS_ID]
    without = commit(ids, stop_strings=[stop])
    result = commit(ids, stop_strings=[stop], include_stop_string=True)
    assert (result.reason, result.matched, result.count) == (
        without.reason,
        without.matched,
        without.count,
    )
    found = stop if stop in "".join(words) else ""
    assert result.text == without.text + found


def test_the_text_of_the_stop_token_is_included_if_it_is_asked_for() -> None:
    ids = ids_of("ab", "c", "é", "世", "abc", "ca", "b")
    for at, token_id in enumerate(ids):
        if token_id in ids[:at]:
            continue
        result = commit(ids, stop_ids=[token_id], include_stop_string=True)
        assert result.text == decode(ids[: at + 1])
        assert (result.matched, result.count) == (token_id, at + 1)


def test_special_tokens_have_text_if_they_are_not_skipped() -> None:
    ids = [*ids_of("a"), EOS_ID, *ids_of("b")]
    shown = commit(ids, stop_ids=[], skip_special_tokens=False)
    assert shown.texts == ["a", EOS, "b"]
    for skip in (True, False):
        ended = commit(ids, include_stop_string=True, skip_special_tokens=skip)
        assert ended.texts == ["a", "" if skip else EOS]
        assert commit(ids, skip_special_tokens=skip).texts == ["a", ""]
    found = commit(ids, stop_ids=[], stop_strings=[f"{EOS}b"], skip_special_tokens=False)
    assert (found.text, found.matched, found.count) == ("a", f"{EOS}b", 3)


def test_a_stop_token_counts_before_a_stop_string_in_its_text() -> None:
    for include, text in ((False, "c"), (True, "cabc")):
        result = commit(
            ids_of("c", "abc"),
            stop_ids=ids_of("abc"),
            stop_strings=["b"],
            include_stop_string=include,
        )
        assert (result.text, result.matched, result.count) == (text, *ids_of("abc"), 2)


class Verdicts:
    """A verifier that answers with blocks of tokens, as they were split beforehand."""

    def __init__(self, blocks: Iterable[Sequence[int]]) -> None:
        self._blocks = iter(blocks)

    async def verdict(self, proposal: Any) -> tuple[verifier_pb2.Verdict, Exchange]:
        block = next(self._blocks)
        verdict = verifier_pb2.Verdict(num_accepted=len(block) - 1, token_ids=block)
        return verdict, Exchange(0, common_pb2.Timings())


async def in_blocks(
    blocks: Iterable[Sequence[int]], stopping: Stopping
) -> tuple[list[gateway_pb2.Chunk], Output]:
    """The chunks that rounds with these outcomes give."""
    output = Output(TOKENIZER, stopping)
    verifier: Any = Verdicts(blocks)
    statistics = Statistics(common_pb2.ACCEPTANCE_RULE_COUPLED)
    wanted = SpeculationSettings(
        common_pb2.ACCEPTANCE_RULE_COUPLED,
        num_draft_tokens=0,
        draft_topk=1,
        adaptive=False,
        run_ahead=0,
    )
    speculation = Speculation(wanted, output.room, Workload(), statistics, confident=True)
    rounds = run_rounds(verifier, speculation, output, statistics)
    return [chunk async for chunk in rounds], output


def all_splits(ids: Sequence[int]) -> Iterator[list[list[int]]]:
    """Every way to cut ids into blocks."""
    for cuts in product((False, True), repeat=len(ids) - 1):
        blocks = [[ids[0]]]
        for token_id, cut in zip(ids[1:], cuts, strict=True):
            if cut:
                blocks.append([])
            blocks[-1].append(token_id)
        yield blocks


@pytest.mark.parametrize(
    ("text", "stops", "expected", "matched"),
    [
        pytest.param("🧑\u200d🚀", [], "🧑\u200d🚀", None, id="joined emoji"),
        pytest.param("世界a😀", [], "世界a😀", None, id="CJK"),
        pytest.param("ab世界c", ["界"], "ab世", "界", id="stops at a character"),
        pytest.param("a🧑\u200d🚀", ["\u200d🚀"], "a🧑", "\u200d🚀", id="stops within an emoji"),
        pytest.param("aababcabb", ["abcabc", "abb"], "aababc", "abb", id="two stops"),
        pytest.param("abcabcab", ["cabc"], "ab", "cabc", id="a stop with text after it"),
        pytest.param("aabaabaa", ["aabb"], "aabaabaa", None, id="a stop that never comes"),
    ],
)
async def test_every_split_into_blocks_gives_the_same_text(
    text: str, stops: list[str], expected: str, matched: str | None
) -> None:
    ids = TOKENIZER.encode(text).ids if not text.isascii() else ids_of(*text)
    for include in (False, True):
        stopping = Stopping(len(ids), stop_strings=tuple(stops), include_stop_string=include)
        full = expected + (matched or "") if include else expected
        alone = commit(ids, limit=len(ids), stop_strings=stops, include_stop_string=include)
        for blocks in all_splits(ids):
            chunks, output = await in_blocks(blocks, stopping)
            assert "".join(chunk.text for chunk in chunks) == full, blocks
            assert output.matched == matched
            # The client is sent no more than may stay, chunk by chunk, and no half characters.
            given_out = ""
            for chunk in chunks:
                given_out += chunk.text
                assert full.startswith(given_out), blocks
                assert "".join(chunk.token_texts) == chunk.text
            texts = [piece for chunk in chunks for piece in chunk.token_texts]
            assert texts == alone.texts
            assert sum(len(chunk.token_ids) for chunk in chunks) == alone.count


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
    options = {
        "min_new_tokens": data.draw(st.integers(0, limit)),
        "include_stop_string": data.draw(st.booleans()),
        "skip_special_tokens": data.draw(st.booleans()),
    }
    result = commit(ids, limit=limit, stop_ids=stop_ids, stop_strings=stops, **options)
    expected = reference(ids, limit, stop_ids, stops, **options)
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
