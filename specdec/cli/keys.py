"""`specdec keys`: API keys for the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from gateway.key_file import KeyFileError, add_key, digest_of, new_key
from specdec.cli.terminal import fail

app = typer.Typer(help="Make API keys for a gateway.", no_args_is_help=True, rich_markup_mode=None)


@app.command("new")
def new(
    name: Annotated[str, typer.Argument(metavar="NAME", help="Of the tenant that it is for.")],
    file: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Add its hash to this file, the gateway's --keys-file."),
    ] = None,
) -> None:
    """Make a key. It is printed on stdout, once: only its hash is kept.

    A tenant that has a key already has both then, until the old one's hash is taken out.
    """
    key = new_key()
    if file is None:
        typer.echo(f"For the keys file, among its tenants:\n  {name}:", err=True)
        typer.echo(f"    sha256: [{digest_of(key)}]", err=True)
    else:
        try:
            add_key(file, name, key)
        except KeyFileError as error:
            fail(f"{file}: {error}")
        except OSError as error:
            fail(f"cannot write {file}: {error.strerror}")
    typer.echo(key)
