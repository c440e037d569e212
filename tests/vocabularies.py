"""Small tokenizers of different families, trained in the tests."""

from __future__ import annotations

from functools import cache

from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from draft_service.special_tokens import Vocabulary

SENTENCES = (
    "the quick brown fox jumps over the lazy dog, again and again. ",
    "speculative decoding drafts tokens cheaply and verifies them together.\n",
    "def merge(intervals):\n    return sorted(intervals, key=lambda pair: pair[0])\n",
    "naïve café, façade: 12,345 über-große Straßen; 日本語のテキスト、😀 emoji 👩‍👩‍👧 and more… ",
)
TEXT = "".join(SENTENCES) * 4


def write_words_as_llama(tokenizer: Tokenizer) -> None:
    """Gives a tokenizer the spaces of Llama 2: "▁" before each word. Bytes stand for the rest."""
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )


@cache
def byte_level(size: int = 400, eos: str = "<eos>", specials: tuple[str, ...] = ()) -> Vocabulary:
    """As of GPT-2: any bytes, and tokens that end inside of characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[eos, *specials],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return Vocabulary(tokenizer, [tokenizer.token_to_id(eos)])


@cache
def unigram() -> Vocabulary:
    """As of SentencePiece: spaces at the beginning of words, bytes for what has no token, a BOS."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=180, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(SENTENCES[:3], trainer)
    pieces = [
        (token, -5.0 - 0.001 * token_id)
        for token, token_id in tokenizer.get_vocab().items()
        if token != "<unk>"
    ]
    byte_tokens = [(f"<0x{byte:02X}>", -20.0) for byte in range(256)]
    specials = [("<unk>", 0.0), ("<s>", 0.0), ("</s>", 0.0)]
    table = [*specials, *byte_tokens, *pieces]
    made = Tokenizer(models.Unigram(table, unk_id=0, byte_fallback=True))
    write_words_as_llama(made)
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return Vocabulary(made, [2], 1)


@cache
def word_piece() -> Vocabulary:
    """As of BERT: lower case, no spaces, and a token for what it does not know."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    trainer = trainers.WordPieceTrainer(
        vocab_size=220, special_tokens=["[UNK]", "[SEP]"], show_progress=False
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return Vocabulary(tokenizer, [1])
