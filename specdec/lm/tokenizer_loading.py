"""Loads a model's tokenizer without the model."""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerFast

from specdec.lm.architecture import ModelLoadError
from specdec.lm.loading import eos_token_ids_of, silence_transformers, source_of
from specdec.lm.tokenizer import TokenizerData


class LoadedTokenizer(NamedTuple):
    """What a model's handshake says of its tokens, without the model."""

    tokenizer: TokenizerData
    vocab_size: int
    """The number of rows of the model's output head."""
    eos_token_ids: tuple[int, ...]


def load_tokenizer(model_id: str) -> LoadedTokenizer:
    """Loads a model's tokenizer and what belongs to it, but no weights.

    Args:
        model_id: a hub id, a folder with at least config and tokenizer, or a GGUF file.

    Raises:
        ModelLoadError: the files are missing or broken.
    """
    silence_transformers()
    where = source_of(model_id)
    try:
        config = AutoConfig.from_pretrained(**where)
        raw_tokenizer = AutoTokenizer.from_pretrained(**where)
    except Exception as error:
        cause = " ".join(str(error).split()) or type(error).__name__
        raise ModelLoadError(f"cannot load the tokenizer of {model_id!r}: {cause[:400]}") from error
    if not isinstance(raw_tokenizer, PreTrainedTokenizerFast):
        raise ModelLoadError(f"{model_id!r}: its tokenizer has no form that can be served as JSON")
    generation_config = None
    if "gguf_file" not in where:
        # Many models have none, and then the configuration says what ends a generation.
        with suppress(OSError):
            generation_config = GenerationConfig.from_pretrained(
                where["pretrained_model_name_or_path"]
            )
    return LoadedTokenizer(
        TokenizerData.from_transformers(raw_tokenizer),
        config.get_text_config().vocab_size,
        eos_token_ids_of((generation_config, config), raw_tokenizer.eos_token_id),
    )
