"""Renders a conversation with the chat template that the model brings.

The environment is what model templates are written for (Jinja with `tojson`, `raise_exception`,
`strftime_now`, loop controls), in a sandbox, because a template is code from a model's files.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment


class TemplateError(Exception):
    """The template refuses the conversation, or cannot be used. The message says why."""


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _strftime_now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """
        Args:
            source: the Jinja source. If it is empty, `render` refuses every conversation.
            special_tokens: what the template may name, for example "bos_token".
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._source = source
        self._environment = environment
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The prompt text, up to where the assistant's next turn begins.

        Raises:
            TemplateError: there is no template, or it refuses these messages.
        """
        if not self._source:
            raise TemplateError("the model has no chat template; send text instead")
        try:
            return self._environment.from_string(self._source).render(
                messages=messages, add_generation_prompt=True, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise TemplateError(str(error)) from error
