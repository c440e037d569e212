"""The suffix automaton against a search through the whole text, and what is remembered."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draft_service import memory
from draft_service.automaton import Cursor, SuffixAutomaton
from draft_service.drafter import Draft
from draft_service.matching import MIN_LENGTH, Match
from draft_service.memory import OutputMemory, Reader
from draft_service.settings import DraftSettings
from draft_service.suffix import SuffixDrafter
from specdec.v1 import common_pb2
from tests.test_streams import sampling

TOKENS = st.integers(0, 2)
TEXTS = st.lists(TOKENS, max_size=80)
REJECTION, COUPLED = common_pb2.ACCEPTANCE_RULE_REJECTION, common_pb2.ACCEPTANCE_RULE_COUPLED


def searched(tokens: Sequence[int]) -> Match | None:
    """The most recent occurrence of the longest suffix that occurred before, by trying all."""
    for length in range(len(tokens) - 1, MIN_LENGTH - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                return Match(length, place)
    return None


def nested(tokens: Sequence[int]) -> int:
    """How many suffixes there are that occur at different sets of places."""
    places = []
    for length in range(1, len(tokens)):
        suffix = tokens[-length:]
        places.append(tuple(i for i in range(len(tokens)) if tokens[i : i + length] == suffix)[:-1])
    return len({len(found) for found in places if found})


@settings(max_examples=300, deadline=None)
@given(text=TEXTS)
def test_the_longest_suffix_is_found_where_it_occurred_last(text: list[int]) -> None:
    automaton = SuffixAutomaton()
    for token_id in text:
        automaton.extend([token_id])
        if nested(automaton.tokens) <= 20:
            assert automaton.match() == searched(automaton.tokens)


@settings(max_examples=50, deadline=None)
@given(word=st.lists(TOKENS, min_size=1, max_size=3), count=st.integers(20, 80))
def test_a_text_that_repeats_one_thing_is_matched_in_full(word: list[int], count: int) -> None:
    """Where very many matches are nested, the place need not be the most recent."""
    automaton = SuffixAutomaton()
    automaton.extend(word * count)
    found, expected = automaton.match(), searched(automaton.tokens)
    assert found is not None
    assert expected is not None
    assert found.length == expected.length
    tokens = automaton.tokens
    assert tokens[found.place - found.length : found.place] == tokens[-found.length :]


@settings(max_examples=300, deadline=None)
@given(parts=st.lists(st.tuples(TEXTS, TEXTS), max_size=5))
def test_a_cursor_finds_the_longest_suffix_in_a_text_that_grows(
    parts: list[tuple[list[int], list[int]]],
) -> None:
    automaton = SuffixAutomaton()
    cursor = Cursor(automaton)
    other: list[int] = []
    for number, (more, others) in enumerate(parts, 1):
        automaton.extend([*more, -number])
        for token_id in others:
            cursor.advance(token_id)
            other.append(token_id)
        found = cursor.match()
        if found is not None:
            text = automaton.tokens
            assert text[found.place - found.length : found.place] == other[-found.length :]
            assert text[found.place] >= 0
    # What was added after a cursor had passed it may be matched less far, never wrongly; one that
    # begins anew finds the longest.
    fresh = Cursor(automaton)
    for token_id in other:
        fresh.advance(token_id)
    found = fresh.match()
    text = automaton.tokens
    length, place = max(
        (
            (length, place)
            for place in range(len(text))
            for length in range(MIN_LENGTH, min(place, len(other)) + 1)
            if text[place] >= 0 and text[place - length : place] == other[-length:]
        ),
        default=(0, 0),
    )
    assert (found.length if found else 0) == length
    if found is not None and not any(nested(more) > 20 for more, _ in parts):
        assert found.place == place


def test_the_states_are_at_most_two_for_each_token() -> None:
    for text in ([0, 1] * 500, [0] * 1000, [0, *[1] * 998, 2], list(range(1000))):
        automaton = SuffixAutomaton()
        automaton.extend(text)
        assert len(automaton.lengths) <= 2 * len(text)


# Remembered outputs.


def opening(
    prompt: list[int], *, salt: str = "", seed: int = 4, **changes: object
) -> common_pb2.Open:
    bypass = bool(changes.pop("bypass", False))
    return common_pb2.Open(
        session_id="s",
        round=1,
        base_length=len(prompt),
        prompt_token_ids=prompt,
        sampling=sampling(temperature=1.0, seed=seed),
        acceptance_rule=changes.pop("rule", COUPLED),  # type: ignore[arg-type]
        num_draft_tokens=8,
        prefix_cache=common_pb2.PrefixCacheParams(bypass=bypass, salt=salt),
    )


def drafter(**options: object) -> SuffixDrafter:
    return SuffixDrafter(DraftSettings(remember_outputs=True, **options))  # type: ignore[arg-type]


async def drafted(of: SuffixDrafter, message: common_pb2.Open, output: Sequence[int] = ()) -> Draft:
    """A session that commits an output. Gives the draft of its first round."""
    async with of.session(message) as session:
        draft = await session.propose((), 4)
        await session.propose(output, 4)
    return draft


OUTPUT = [7, 8, 9, 10, 11, 12]


async def test_a_past_output_is_copied_from() -> None:
    suffix = drafter()
    await drafted(suffix, opening([1, 2, 3]), OUTPUT)
    found = await drafted(suffix, opening([5, 8, 9], seed=9))
    assert (found.token_ids, found.match_length) == ([10, 11, 12], 2)


async def test_an_output_is_not_copied_past_its_end() -> None:
    suffix = drafter()
    await drafted(suffix, opening([1]), OUTPUT)
    await drafted(suffix, opening([2]), [20, 21, 22])
    assert (await drafted(suffix, opening([3, 11, 12]))).token_ids == ()
    assert (await drafted(suffix, opening([3, 10, 11]))).token_ids == [12]


async def test_the_prompts_of_others_are_not_remembered() -> None:
    suffix = drafter()
    await drafted(suffix, opening([30, 31, 32, 33]), OUTPUT)
    assert (await drafted(suffix, opening([30, 31]))).token_ids == ()


async def test_nothing_is_remembered_unless_asked_for() -> None:
    suffix = SuffixDrafter(DraftSettings())
    await drafted(suffix, opening([1]), OUTPUT)
    assert (await drafted(suffix, opening([7, 8]))).token_ids == ()


async def test_tenants_do_not_see_each_others_outputs() -> None:
    suffix = drafter()
    await drafted(suffix, opening([1], salt="a"), OUTPUT)
    for salt in ("", "b"):
        assert (await drafted(suffix, opening([7, 8], salt=salt))).token_ids == ()
    assert (await drafted(suffix, opening([7, 8], salt="a"))).token_ids == [9, 10, 11, 12]


async def test_a_session_that_bypasses_neither_reads_nor_leaves_anything() -> None:
    suffix = drafter()
    await drafted(suffix, opening([1], bypass=True), OUTPUT)
    assert (await drafted(suffix, opening([7, 8]))).token_ids == ()
    await drafted(suffix, opening([1]), OUTPUT)
    assert (await drafted(suffix, opening([7, 8], bypass=True))).token_ids == ()
    assert (await drafted(suffix, opening([7, 8]))).token_ids == [9, 10, 11, 12]


async def test_the_output_of_a_session_that_was_resumed_is_remembered_whole() -> None:
    suffix = drafter()
    message = opening([1, 2])
    message.committed_token_ids.extend(OUTPUT[:3])
    await drafted(suffix, message, OUTPUT[3:])
    assert (await drafted(suffix, opening([7, 8]))).token_ids == [9, 10, 11, 12]


async def test_the_own_text_is_preferred_where_both_match_equally_long() -> None:
    suffix = drafter()
    await drafted(suffix, opening([1]), OUTPUT)
    assert (await drafted(suffix, opening([8, 9, 50, 60, 8, 9]))).token_ids == [50, 60, 8, 9]
    assert (await drafted(suffix, opening([8, 9, 50, 60, 7, 8, 9]))).token_ids == [10, 11, 12]


@pytest.mark.parametrize("rule", [REJECTION, common_pb2.ACCEPTANCE_RULE_BLOCK])
async def test_an_output_of_the_same_seed_is_not_used_where_coins_decide(rule: int) -> None:
    """See test_drafts_law.py for what would come of it."""
    suffix = drafter()
    await drafted(suffix, opening([1], seed=4), OUTPUT)
    assert (await drafted(suffix, opening([7, 8], seed=4, rule=rule))).token_ids == ()
    assert (await drafted(suffix, opening([7, 8], seed=5, rule=rule))).token_ids
    assert (await drafted(suffix, opening([7, 8], seed=4, rule=COUPLED))).token_ids


async def test_an_output_is_seen_by_sessions_that_run_already() -> None:
    suffix = drafter()
    async with suffix.session(opening([7, 8])) as running:
        assert (await running.propose((), 4)).token_ids == ()
        await drafted(suffix, opening([1]), OUTPUT)
        # It is taken in when the next session begins.
        await drafted(suffix, opening([1]))
        assert (await running.propose([9], 4)).token_ids == [10, 11, 12]


@settings(max_examples=50, deadline=None)
@given(outputs=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 60)), max_size=40))
def test_no_more_is_remembered_than_the_limit(outputs: list[tuple[str, int]]) -> None:
    limit = 100
    remembered = OutputMemory(limit)
    for number, (salt, length) in enumerate(outputs):
        remembered.remember(salt, [number] * length, number)
        volumes = [each for name in "abc" for each in remembered.volumes(name)]
        assert remembered.num_tokens == sum(each.num_tokens for each in volumes) <= limit
        if length:
            # The newest is always there.
            assert number in remembered.volumes(salt)[-1].seeds


async def test_the_oldest_outputs_are_dropped_first() -> None:
    remembered = OutputMemory(400)
    for number in range(20):
        remembered.remember("", [number, number + 100, *[number + 200] * 38], seed=number)
    seeds = set().union(*(volume.seeds for volume in remembered.volumes("")))
    assert seeds == set(range(min(seeds), 20))
    assert len(seeds) >= 400 * 3 // 4 // 40 - 1
    reader = Reader(remembered, "", None)
    await reader.settle()
    for number in range(20):
        reader.advance([number, number + 100], 2)
        found = reader.match()
        assert (found is not None) == (number in seeds)


async def test_a_session_forgets_what_was_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_VOLUMES", 1)
    suffix = drafter(remembered_tokens=1000)
    await drafted(suffix, opening([1]), OUTPUT)
    async with suffix.session(opening([7, 8])) as running:
        assert (await running.propose((), 4)).token_ids == [9, 10, 11, 12]
        await drafted(suffix, opening([1]), list(range(1000, 2000)))
        assert (await running.propose([9], 4)).token_ids == ()
