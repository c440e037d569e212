"""Detokenization token by token gives the text that decoding the whole gives."""

from __future__ import annotations

from functools import cache
from itertools import pairwise, product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from gateway.detokenizer import Detokenizer
from specdec.models.cache import default_target_path, is_pulled
from tests.models import byte_tokens, make_tokenizer
from tests.vocabularies import write_words_as_llama

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
WORDS = [*"ab.世界é\u0301▁", "▁▁", "▁a", "▁the", "ing", "▁,", REPLACEMENT]
KINDS = ["byte-level", "default model", "llama", "metaspace"]
TEXTS = [
    "Hello, world.",
    "  leading, trailing and  double spaces  ",
    "line\n\n\tindented\r\n",
    "naïve café, e\u0301 and o\u0308\u0323",
    "世界您好。こんにちは 안녕하세요",
    "العربية עברית हिन्दी ไทย",
    "😀 👍🏽 🇫🇷 ❤️",
    "👨‍👩‍👧‍👦 and 🧑🏿‍🚀",
    f"a {REPLACEMENT} in the text itself {REPLACEMENT}",
    "\x00\x7f\u2028\ufeff\U0010ffff",
]


@cache
def tokenizer_of(kind: str) -> Tokenizer:
    """A tokenizer for each way in which bytes that are not in the vocabulary are spelt."""
    if kind == "byte-level":
        return make_tokenizer(byte_tokens(300)).backend_tokenizer
    if kind == "default model":
        if not is_pulled(default_target_path()):
            pytest.skip("the default model has not been pulled")
        return Tokenizer.from_file(str(default_target_path() / "tokenizer.json"))
    table = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(table)},
            merges=[],
            byte_fallback=True,
            unk_token="<unk>",
            fuse_unk=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    if kind == "llama":
        write_words_as_llama(tokenizer)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def pieces(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
    return [*(detokenizer.add(token_id) for token_id in ids), detokenizer.end()]


def whole(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
    return text


@pytest.mark.parametrize("kind", KINDS)
@given(text=st.one_of(st.sampled_from(TEXTS), st.text(), st.text("a \n\u0301世😀\u200d👍🏽")))
@settings(deadline=None, max_examples=150)
def test_the_pieces_of_a_text_are_the_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text).ids
    expected = whole(tokenizer, ids)
    assert "".join(pieces(tokenizer, ids)) == expected
    if kind == "byte-level":
        # It loses nothing, so that this is no comparison of two equal mistakes.
        assert expected == text


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=400)
def test_the_pieces_of_any_ids_are_their_decoding(kind: str, data: st.DataObject) -> None:
    tokenizer = tokenizer_of(kind)
    size = tokenizer.get_vocab_size()
    # Half of them from the ends of the table, where the special tokens and the words are.
    some = st.one_of(
        st.integers(0, size - 1), st.integers(0, 3), st.integers(size - len(WORDS), size - 1)
    )
    ids = data.draw(st.lists(some, max_size=20))
    for skip in (True, False):
        joined = "".join(pieces(tokenizer, ids, skip_special_tokens=skip))
        assert joined == whole(tokenizer, ids, skip_special_tokens=skip)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_is_cut_anywhere_is_what_its_ids_decode_to(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        ids = tokenizer.encode(text).ids
        for length in range(len(ids) + 1):
            cut = ids[:length]
            assert "".join(pieces(tokenizer, cut)) == whole(tokenizer, cut), cut


@pytest.mark.parametrize("kind", KINDS)
def test_no_half_of_a_character_is_ever_given_out(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    for text in TEXTS:
        if REPLACEMENT not in text:
            assert REPLACEMENT not in "".join(pieces(tokenizer, tokenizer.encode(text).ids)), text


def test_characters_wait_for_their_last_byte_and_no_longer() -> None:
    tokenizer = tokenizer_of("byte-level")
    text = "aé世😀b"
    expected = [piece for c in text for piece in [""] * (len(c.encode()) - 1) + [c]]
    assert pieces(tokenizer, tokenizer.encode(text).ids) == [*expected, ""]


def test_the_end_gives_out_an_unfinished_character_once() -> None:
    tokenizer = tokenizer_of("byte-level")
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("a😀").ids[:-1]
    assert [detokenizer.add(token_id) for token_id in ids] == ["a", "", "", ""]
    assert detokenizer.end() == REPLACEMENT
    assert detokenizer.end() == ""


def test_special_tokens_give_no_text() -> None:
    tokenizer = tokenizer_of("byte-level")
    first, *rest = tokenizer.encode("é").ids
    (eos,) = tokenizer.encode("<eos>").ids
    assert pieces(tokenizer, [eos, first, eos, *rest, eos]) == ["", "", "", "é", "", ""]


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(deadline=None, max_examples=100)
def test_special_tokens_that_are_not_skipped_are_part_of_the_text(
    kind: str, data: st.DataObject
) -> None:
    tokenizer = tokenizer_of(kind)
    special = [i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special]
    text = data.draw(st.sampled_from(TEXTS))
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    for _ in range(data.draw(st.integers(1, 3))):
        # In the middle of a character too.
        ids.insert(data.draw(st.integers(0, len(ids))), data.draw(st.sampled_from(special)))
    joined = "".join(pieces(tokenizer, ids, skip_special_tokens=False))
    assert joined == whole(tokenizer, ids, skip_special_tokens=False)
    assert any(tokenizer.id_to_token(token_id) in joined for token_id in special)


@pytest.mark.parametrize("text", ["🧑\u200d🚀", "世界您", "e\u0301 😀é", "🇫🇷"])
def test_every_split_of_the_bytes_into_tokens_gives_the_same_text(text: str) -> None:
    splitter = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelt = "".join(piece for piece, _ in splitter.pre_tokenize_str(text))
    size = len(spelt)
    assert size == len(text.encode())
    parts = {spelt[a:b] for a in range(size) for b in range(a + 1, size + 1)}
    table = {token: index for index, token in enumerate(["<eos>", *sorted(parts)])}
    tokenizer = Tokenizer(models.BPE(vocab=table, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    for cuts in product((False, True), repeat=size - 1):
        begins = [0, *(at for at, cut in enumerate(cuts, start=1) if cut), size]
        ids = [table[spelt[a:b]] for a, b in pairwise(begins)]
        given_out = pieces(tokenizer, ids)
        assert "".join(given_out) == text, begins
        assert REPLACEMENT not in "".join(given_out)


def test_a_step_decodes_only_the_last_few_ids() -> None:
    tokenizer = tokenizer_of("byte-level")
    lengths: list[int] = []

    class Counting:
        def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
            lengths.append(len(ids))
            text: str = tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
            return text

        def __getattr__(self, name: str) -> Any:
            return getattr(tokenizer, name)

    detokenizer = Detokenizer(Counting())  # type: ignore[arg-type]
    for token_id in tokenizer.encode("many words, 世界 😀. " * 20).ids:
        detokenizer.add(token_id)
    # The longest character before, and the longest that is unfinished.
    assert max(lengths) <= 8
