"""A model's tokenizer as the services hand it on: bytes, hashes, chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast


@dataclass(frozen=True)
class TokenizerData:
    """Everything that a peer needs to tokenize as this model does."""

    content: bytes
    """The tokenizer in the JSON format of the `tokenizers` library."""
    table_sha256: str
    """The hash of the token table, by which draft and target are compared."""
    effective_vocab_size: int
    """One more than the largest id of the table."""
    chat_template: str
    """The Jinja template, or empty."""
    special_tokens: Mapping[str, str]
    """The special tokens that a template may name."""

    @classmethod
    def from_transformers(cls, tokenizer: PreTrainedTokenizerFast) -> TokenizerData:
        """Takes a tokenizer of transformers apart."""
        table = tokenizer.get_vocab()
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default", "")
        return cls(
            content=tokenizer.backend_tokenizer.to_str().encode(),
            table_sha256=token_table_sha256(table),
            effective_vocab_size=max(table.values()) + 1,
            chat_template=template or "",
            special_tokens={
                name: str(value)
                for name, value in tokenizer.special_tokens_map.items()
                if not isinstance(value, list)
            },
        )


def token_table_sha256(table: Mapping[str, int]) -> str:
    """The SHA-256, in hexadecimal, of the pairs (id, token) in the order of the ids."""
    digest = hashlib.sha256()
    for token, token_id in sorted(table.items(), key=lambda item: item[1]):
        digest.update(json.dumps([token_id, token]).encode() + b"\n")
    return digest.hexdigest()
