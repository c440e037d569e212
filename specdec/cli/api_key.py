"""The flag of the commands that call a gateway which asks for an API key."""

from __future__ import annotations

from typing import Annotated

import typer

from specdec.cli.form import text_or_file

ApiKey = Annotated[
    str | None,
    typer.Option(
        metavar="KEY|@FILE",
        envvar="SPECDEC_API_KEY",
        help="API key for the gateway. Others on this machine see what is on a command line, but "
        "neither a file nor the environment.",
    ),
]


def read_api_key(given: str | None) -> str | None:
    """The key that the flag or its environment variable says. It is never repeated in messages.

    Raises:
        typer.BadParameter: a file cannot be read, or what is in it or was given is no key.
    """
    if given is None:
        return None
    key = text_or_file(given, "--api-key").strip()
    # What else a header may not hold would be quoted by gRPC.
    if not key or not key.isascii() or not key.isprintable() or " " in key:
        raise typer.BadParameter("this is no API key", param_hint="--api-key")
    return key
