"""What the special tokens of two tokenizers are to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tokenizers import Tokenizer


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, and the roles of its special tokens."""

    tokenizer: Tokenizer
    eos_token_ids: Sequence[int] = ()
    """The tokens that end a generation, the usual one first."""
    bos_token_id: int | None = None
    """The token that begins a text, if there is one."""

    @property
    def specials(self) -> Mapping[int, str]:
        """The tokens that have no text, and how they are written."""
        found = {
            token_id: token.content
            for token_id, token in self.tokenizer.get_added_tokens_decoder().items()
            if token.special
        }
        others = (*self.eos_token_ids, *(() if self.bos_token_id is None else (self.bos_token_id,)))
        for token_id in others:
            token = self.tokenizer.id_to_token(token_id)
            if token is not None:
                found[token_id] = token
        return found


@dataclass(frozen=True)
class TokenizerPair:
    """The tokenizers of a target and of a draft.

    A special token is translated into the one that is written in the same way, such as the marker
    of a chat template that both models know, or else into the one with the same role: the end of a
    generation, the beginning of a text. The target's other special tokens are left out of what the
    draft sees: spelt out, a marker would be a rare string to it, and without it the context still
    reads as a text. The draft's other special tokens end a proposal.
    """

    target: Vocabulary
    draft: Vocabulary

    @cached_property
    def to_draft(self) -> Mapping[int, int | None]:
        """The target's special tokens, each with the draft's, or None if it is left out."""
        return _translations(self.target, self.draft)

    @cached_property
    def to_target(self) -> Mapping[int, int | None]:
        """The draft's special tokens, each with the target's, or None if there is none."""
        return _translations(self.draft, self.target)

    @cached_property
    def beginning(self) -> Sequence[int]:
        """What the draft's tokenizer puts before every text, such as a BOS."""
        encoding = self.draft.tokenizer.encode("a", add_special_tokens=True)
        mask = encoding.special_tokens_mask
        length = next((i for i, special in enumerate(mask) if not special), len(mask))
        return tuple(encoding.ids[:length])


def _translations(source: Vocabulary, other: Vocabulary) -> dict[int, int | None]:
    found: dict[int, int | None] = {}
    for token_id, content in source.specials.items():
        same = other.tokenizer.token_to_id(content)
        if same is None and token_id in source.eos_token_ids and other.eos_token_ids:
            same = other.eos_token_ids[0]
        if same is None and token_id == source.bos_token_id:
            same = other.bos_token_id
        found[token_id] = same
    return found
