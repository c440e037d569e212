"""The flags of `specdec generate` that shape what is sampled, as fields of a request."""

from __future__ import annotations

import sys
from pathlib import Path

import typer
from google.protobuf.message import Message

from specdec.cli.terminal import fail
from specdec.v1 import common_pb2


def set_fields(message: Message, **values: float | None) -> None:
    """Sets the fields that were given.

    Raises:
        typer.BadParameter: a number does not fit its field. Its name is that of the flag.
    """
    for name, value in values.items():
        if value is not None:
            set_field(message, name, value, f"--{name.replace('_', '-')}")


def set_field(message: Message, name: str, value: float, flag: str) -> None:
    """Sets a field to the value of a flag.

    Raises:
        typer.BadParameter: the number does not fit the field.
    """
    try:
        setattr(message, name, value)
    except ValueError:
        raise typer.BadParameter(f"{value} is out of range", param_hint=flag) from None


def utf8(text: str, hint: str) -> str:
    """The text of a flag or argument.

    Raises:
        typer.BadParameter: it is not UTF-8.
    """
    try:
        text.encode()
    except UnicodeError:
        raise typer.BadParameter("this is not UTF-8 text", param_hint=hint) from None
    return text


def standard_input() -> str:
    """All of it."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeError:
        fail("standard input is not UTF-8 text")


def grammar(
    json_schema: str | None, regex: str | None, ebnf: str | None
) -> common_pb2.Grammar | None:
    """What the flags for the form of the output say, if any.

    Raises:
        typer.BadParameter: there is more than one, or a file cannot be read.
    """
    given = [text for text in (json_schema, regex, ebnf) if text is not None]
    if not given:
        return None
    if len(given) > 1:
        raise typer.BadParameter("only one of --json-schema, --regex and --grammar can be given")
    if json_schema is not None:
        return common_pb2.Grammar(json_schema=text_or_file(json_schema, "--json-schema"))
    if regex is not None:
        return common_pb2.Grammar(regex=utf8(regex, "--regex"))
    assert ebnf is not None
    return common_pb2.Grammar(ebnf=text_or_file(ebnf, "--grammar"))


def text_or_file(value: str, flag: str) -> str:
    """What a flag says itself, or in the file that it names after an @.

    Raises:
        typer.BadParameter: the file cannot be read, or it is not UTF-8.
    """
    if not value.startswith("@"):
        return utf8(value, flag)
    try:
        return Path(value[1:]).read_text("utf-8")
    except OSError as error:
        message = f"cannot read {value[1:]}: {error.strerror}"
        raise typer.BadParameter(message, param_hint=flag) from None
    except UnicodeError:
        raise typer.BadParameter(f"{value[1:]} is not UTF-8 text", param_hint=flag) from None
