"""The flags of the commands that reach services by TLS."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from specdec.channels import ClientTls
from specdec.cli.terminal import fail
from specdec.tls import TlsError, TlsFiles, Watched, missing

TlsCa = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        envvar="SPECDEC_TLS_CA",
        help="Speak TLS, with who has a certificate of these CAs (PEM).",
    ),
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE", envvar="SPECDEC_TLS_CERT", help="Certificate to show, if one is asked for."
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(metavar="FILE", envvar="SPECDEC_TLS_KEY", help="Private key of --tls-cert."),
]
TlsName = Annotated[
    str | None,
    typer.Option(
        metavar="HOST",
        envvar="SPECDEC_TLS_NAME",
        help="What the other side's certificate must be for. [the host of the address]",
    ),
]


def client_tls(
    ca: Path | None, cert: Path | None, key: Path | None, name: str | None
) -> ClientTls | None:
    """What the flags say, or None for plaintext. A file that cannot be used ends the command.

    Raises:
        typer.BadParameter: one flag is there without another that it needs.
    """
    if fault := missing("--tls-", cert=cert, key=key):
        raise typer.BadParameter(fault)
    if ca is None:
        if cert is not None or name is not None:
            raise typer.BadParameter("name the CAs of the other side too", param_hint="--tls-ca")
        return None
    try:
        return ClientTls(Watched(TlsFiles(ca, cert, key)), name)
    except TlsError as error:
        fail(str(error))
