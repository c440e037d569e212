"""Where the turns of a conversation lie in a model's own template."""

from __future__ import annotations

from typing import NamedTuple

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

_MARK = "\ue000turn\ue000"


class Template(NamedTuple):
    """The tokens around a user's turn. Without a chat template the answer goes on from it."""

    opening: list[int]
    """What stands before the user's text."""
    bridge: list[int]
    """What stands between the user's text and the answer; empty without a chat template."""
    ends: frozenset[int]
    """Tokens that end a turn."""


def template_of(tokenizer: PreTrainedTokenizerBase, eos_token_ids: tuple[int, ...]) -> Template:
    """Reads the template off a conversation whose user says something conspicuous.

    Raises:
        ValueError: the template changes what the user says, or refuses a conversation that begins
            with it; or nothing can stand before it.
    """
    if not tokenizer.chat_template:
        bos = tokenizer.bos_token_id
        opening = list(eos_token_ids[:1]) if bos is None else [bos]
        if not opening:
            raise ValueError("the tokenizer has no token that a text could begin with")
        return Template(opening, [], frozenset(eos_token_ids))
    try:
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": _MARK}], tokenize=False, add_generation_prompt=True
        )
    except TemplateError as error:
        raise ValueError(f"the chat template refuses a user's turn: {error}") from error
    before, found, after = str(text).partition(_MARK)
    if not found or _MARK in after:
        raise ValueError("the chat template does not hold what the user says, once and as it is")
    opening, bridge = (tokenizer.encode(part, add_special_tokens=False) for part in (before, after))
    ends = {*eos_token_ids, *bridge[:1]} & {*tokenizer.all_special_ids, *eos_token_ids}
    return Template(opening, bridge, frozenset(ends))
