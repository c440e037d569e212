"""Tiny random models and tokenizers, made in the tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<eos>"
TEMPLATE = (
    "{% for m in messages %}{% if m['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('unknown role ' + m['role']) }}{% endif %}"
    "{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokens(size: int) -> dict[str, int]:
    """A byte-level table: an end token, then bytes, then made-up pairs up to `size` entries."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [EOS, *alphabet]
    tokens += [a + b for a in alphabet[40:60] for b in alphabet[40:60]]
    return {token: index for index, token in enumerate(tokens[:size])}


def permuted_tokens(size: int) -> dict[str, int]:
    """The table of `byte_tokens` with two tokens exchanged: of equal size, and another one."""
    names = list(byte_tokens(size))
    names[10], names[20] = names[20], names[10]
    return {name: index for index, name in enumerate(names)}


def make_tokenizer(table: Mapping[str, int]) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer with exactly this token table."""
    merges = [(t[0], t[1]) for t in sorted(table, key=table.__getitem__) if len(t) == 2]
    tokenizer = Tokenizer(models.BPE(vocab=dict(table), merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOS, chat_template=TEMPLATE
    )


def make_model(
    folder: Path,
    *,
    seed: int,
    rows: int,
    table: Mapping[str, int] | None = None,
    context: int = 512,
    near: Path | None = None,
    noise: float = 0.3,
) -> Path:
    """Writes a random two-layer model and its tokenizer to `folder`.

    Args:
        folder: to be created.
        seed: of the weights.
        rows: of the embeddings.
        table: the token table; by default a byte-level one of `rows` entries.
        context: the context length.
        near: a model of the same shape; the new one is it plus `noise`, a draft worth having.
        noise: standard deviation, as a share of that of each weight.
    """
    generator = torch.Generator().manual_seed(seed)
    table = byte_tokens(rows) if table is None else table
    config = LlamaConfig(
        vocab_size=rows,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        bos_token_id=None,
        eos_token_id=table[EOS],
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    base = LlamaForCausalLM.from_pretrained(near).state_dict() if near else None
    with torch.no_grad():
        for name, weight in model.named_parameters():
            fresh = torch.randn(weight.shape, generator=generator)
            if base is not None:
                weight.copy_(base[name] + noise * base[name].std() * fresh)
            elif weight.ndim > 1:
                # Larger than a usual start, so that the distributions are far from flat.
                weight.copy_(fresh * (0.6 if "lm_head" in name else 0.3))
    model.generation_config.eos_token_id = table[EOS]
    model.save_pretrained(folder)
    make_tokenizer(table).save_pretrained(folder)
    return folder
