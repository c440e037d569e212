"""The target model, as the gateway knows it."""

from __future__ import annotations

from dataclasses import dataclass

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate
from specdec.v1 import common_pb2


@dataclass(frozen=True)
class Target:
    """What a verifier says of its model, with the tokenizer."""

    info: common_pb2.ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate

    def is_same_model(self, other: Target) -> bool:
        """Whether both are one model, by what the services say of themselves."""
        mine, theirs = self.info, other.info
        return (
            mine.model_id == theirs.model_id
            and mine.tokenizer_sha256 == theirs.tokenizer_sha256
            and mine.effective_vocab_size == theirs.effective_vocab_size
        )

    def serves(self, other: Target) -> bool:
        """Whether a session of the other can go on here."""
        mine, asked = self.info, other.info
        return (
            self.is_same_model(other)
            and mine.max_context_length >= asked.max_context_length
            and mine.max_num_draft_tokens >= asked.max_num_draft_tokens
            and mine.trees >= asked.trees
            and set(mine.acceptance_rules) >= set(asked.acceptance_rules)
        )
