from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

import draft_service.translation as module
from draft_service.special_tokens import TokenizerPair, Vocabulary
from draft_service.translation import Translation
from tests.vocabularies import SENTENCES, TEXT, byte_level, unigram, word_piece

SIDES: dict[str, Callable[[], Vocabulary]] = {
    "bytes": byte_level,
    "words": lambda: byte_level(700, "<end>"),
    "unigram": unigram,
    "wordpiece": word_piece,
}
LOSSLESS = ("bytes", "words", "unigram")
both = pytest.mark.parametrize(
    ("target", "draft"),
    [(target, draft) for target in LOSSLESS for draft in SIDES if target != draft],
)
words = st.sampled_from(
    [
        *TEXT.split(" "),
        " ",
        "  ",
        "\n",
        "\n\n    ",
        "é",
        "日本語",
        "😀",
        "👩‍👧",
        "7",
        "123456",
        "\t",
        "xyz",
    ]
)
texts = st.lists(words, min_size=1, max_size=60).map(" ".join)


def pair_of(target: str, draft: str) -> TokenizerPair:
    return TokenizerPair(SIDES[target](), SIDES[draft]())


def encode(side: Vocabulary, text: str) -> list[int]:
    return list(side.tokenizer.encode(text, add_special_tokens=False).ids)


def decode(side: Vocabulary, token_ids: Sequence[int]) -> str:
    return str(side.tokenizer.decode(list(token_ids)))


def split(token_ids: list[int], cuts: list[int]) -> list[list[int]]:
    places = sorted({cut % (len(token_ids) + 1) for cut in cuts})
    return [token_ids[a:b] for a, b in zip([0, *places], [*places, len(token_ids)], strict=True)]


def size_of(side: Vocabulary) -> int:
    return max(side.tokenizer.get_vocab().values()) + 1


@both
@settings(deadline=None, max_examples=40)
@given(text=texts, cuts=st.lists(st.integers(0, 400), max_size=12))
def test_the_draft_sees_the_text_of_what_is_committed_in_whatever_steps(
    target: str, draft: str, text: str, cuts: list[int]
) -> None:
    pair = pair_of(target, draft)
    translation = Translation(pair)
    for part in split(encode(pair.target, text), cuts):
        before = list(translation.ids)
        kept = translation.commit(part)
        assert translation.ids[:kept] == before[:kept]
    from_scratch = encode(pair.draft, decode(pair.target, encode(pair.target, text)))
    assert decode(pair.draft, translation.ids) == decode(pair.draft, from_scratch)


@pytest.mark.parametrize("draft", SIDES)
def test_a_text_of_words_has_the_same_tokens_as_from_scratch(draft: str) -> None:
    pair = pair_of("words" if draft == "bytes" else "bytes", draft)
    translation = Translation(pair)
    text = "".join(SENTENCES) * 3
    for token_id in encode(pair.target, text):
        translation.commit([token_id])
    assert translation.ids == [*pair.beginning, *encode(pair.draft, text)]


@both
@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_any_ids_at_all_are_taken_and_no_id_outside_the_vocabulary_is_proposed(
    target: str, draft: str, data: st.DataObject
) -> None:
    """Invalid UTF-8, special tokens, and drafts that are nonsense among them."""
    pair = pair_of(target, draft)
    target_ids = st.lists(st.integers(0, size_of(pair.target) - 1), max_size=12)
    draft_ids = st.lists(st.integers(0, size_of(pair.draft) - 1), max_size=12)
    translation = Translation(pair)
    for _ in range(data.draw(st.integers(1, 8))):
        before = list(translation.ids)
        kept = translation.commit(data.draw(target_ids))
        assert translation.ids[:kept] == before[:kept]
        limit = data.draw(st.integers(1, 6))
        found = translation.translate(data.draw(draft_ids), limit).token_ids
        assert len(found) <= limit
        assert all(0 <= token_id < size_of(pair.target) for token_id in found)


@pytest.mark.parametrize(
    ("target", "draft"), [(t, d) for t in LOSSLESS for d in LOSSLESS if t != d]
)
@settings(deadline=None, max_examples=40)
@given(text=texts, more=texts, cut=st.integers(0, 400))
def test_a_proposal_continues_the_committed_text_with_what_the_draft_says(
    target: str, draft: str, text: str, more: str, cut: int
) -> None:
    """The cut is anywhere between tokens of the target: in a word, or inside a character."""
    pair = pair_of(target, draft)
    whole = encode(pair.target, text + " " + more)
    committed = whole[: cut % len(whole)]
    translation = Translation(pair)
    translation.commit(committed)
    full = [*pair.beginning, *encode(pair.draft, decode(pair.target, whole))]
    if full[: len(translation.ids)] != translation.ids:
        return  # The cut is inside a token of the draft.
    drafted = full[len(translation.ids) :][:12]
    proposed = translation.translate(drafted, 1000).token_ids
    if proposed:
        said = decode(pair.target, [*committed, *proposed])
        assert decode(pair.target, whole).startswith(said)
        assert said == decode(pair.draft, [*translation.ids, *drafted]).rstrip("\ufffd")


@pytest.mark.parametrize(("target", "draft"), [("bytes", "words"), ("words", "unigram")])
def test_a_draft_that_says_what_the_target_would_say_is_proposed_token_by_token(
    target: str, draft: str
) -> None:
    """At every place of a text, also those inside of words: nearly all of it comes out again."""
    pair = pair_of(target, draft)
    text = SENTENCES[0] + SENTENCES[1] + SENTENCES[3]
    whole, full = encode(pair.target, text), encode(pair.draft, text)
    translation, right, aligned = Translation(pair), 0, 0
    for place, token_id in enumerate(whole[:-20], start=1):
        translation.commit([token_id])
        seen = translation.ids[len(pair.beginning) :]
        if full[: len(seen)] == seen:
            aligned += 1
            proposed = translation.translate(full[len(seen) :][:40], 4).token_ids
            right += proposed == whole[place : place + 4]
    assert aligned > 0.4 * len(whole)
    assert right > 0.9 * aligned


def test_an_unfinished_character_is_held_until_it_is_whole_and_must_be_said_by_the_draft() -> None:
    pair = pair_of("bytes", "words")
    euro = encode(pair.target, "ab€")
    assert len(euro) > 3
    translation = Translation(pair)
    translation.commit(euro[:-1])
    assert decode(pair.draft, translation.ids) == "ab"
    assert translation.translate(encode(pair.draft, "€ and"), 1).token_ids == euro[-1:]
    assert translation.translate(encode(pair.draft, " and"), 1).token_ids == []
    translation.commit(euro[-1:])
    assert decode(pair.draft, translation.ids) == "ab€"


def test_bytes_that_never_become_a_character_do_not_hold_back_what_follows() -> None:
    pair = pair_of("bytes", "words")
    start = encode(pair.target, "😀")[:1]
    translation = Translation(pair)
    translation.commit([*start, *encode(pair.target, " and so on")])
    assert decode(pair.draft, translation.ids).endswith("and so on")


def test_the_ends_of_both_models_are_each_other() -> None:
    pair = pair_of("bytes", "unigram")
    translation = Translation(pair)
    translation.commit([*encode(pair.target, "the end"), *pair.target.eos_token_ids])
    assert translation.ids[-1] == pair.draft.eos_token_ids[0]
    found = translation.translate([*encode(pair.draft, "dog"), *pair.draft.eos_token_ids], 9)
    assert found.token_ids[-1] == pair.target.eos_token_ids[0]
    assert found.is_complete


def test_markers_of_the_same_name_are_kept_and_others_are_left_out() -> None:
    target = byte_level(400, "<eos>", ("<|user|>", "<|tool|>"))
    draft = byte_level(500, "<end>", ("<|user|>",))
    translation = Translation(TokenizerPair(target, draft))
    marks = [target.tokenizer.token_to_id(name) for name in ("<|user|>", "<|tool|>")]
    translation.commit([marks[0], *encode(target, "the fox"), marks[1], *encode(target, " and")])
    mark = draft.tokenizer.token_to_id("<|user|>")
    assert translation.ids == [mark, *encode(draft, "the fox and")]


def test_a_beginning_that_both_models_have_is_not_repeated() -> None:
    target, draft = unigram(), unigram()
    translation = Translation(TokenizerPair(target, draft))
    assert translation.ids == [1]
    translation.commit([1, *encode(target, "the dog")])
    assert translation.ids == [1, *encode(draft, "the dog")]


@pytest.mark.parametrize(
    "text", [TEXT, "naïvecafé😀日本語" * 40, "0123456789" * 60, " " * 500, "\x80" * 9]
)
@pytest.mark.parametrize(("target", "draft"), [("bytes", "unigram"), ("unigram", "words")])
def test_a_commit_costs_as_much_as_its_own_text(
    monkeypatch: pytest.MonkeyPatch, target: str, draft: str, text: str
) -> None:
    lengths: list[int] = []
    original = module._decode

    def counting(tokenizer: Tokenizer, token_ids: Sequence[int]) -> str:
        lengths.append(len(token_ids))
        return original(tokenizer, token_ids)

    pair = pair_of(target, draft)
    translation = Translation(pair)
    translation.commit(encode(pair.target, text * 3))
    monkeypatch.setattr(module, "_decode", counting)
    for token_id in encode(pair.target, text):
        translation.commit([token_id])
    assert max(lengths) <= 2 * module._LONGEST_WINDOW + module._ANCHOR
    monkeypatch.undo()
    committed = [*encode(pair.target, text * 3), *encode(pair.target, text)]
    seen, said = decode(pair.draft, translation.ids), decode(pair.target, committed)
    assert seen.split() == said.split()


def test_drafting_goes_on_until_the_last_word_is_whole_where_the_draft_has_more_tokens() -> None:
    pair = pair_of("words", "unigram")
    translation = Translation(pair)
    translation.commit(encode(pair.target, "the quick brown fox"))
    drafted = encode(pair.draft, "jumps over")
    wanted = encode(pair.target, " jumps")
    found = [translation.translate(drafted[:n], 1) for n in range(1, len(drafted) + 1)]
    first = next(each for each in found if each.is_complete)
    assert first.token_ids == wanted
    assert any(each.token_ids and each.token_ids != wanted for each in found)


def test_drafting_does_not_go_on_for_the_last_token_where_the_draft_has_fewer() -> None:
    pair = pair_of("bytes", "words")
    translation = Translation(pair)
    translation.commit(encode(pair.target, "the quick brown fox"))
    assert translation.translate(encode(pair.draft, " jumps"), 1).is_complete
