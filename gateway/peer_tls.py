"""How the gateway speaks TLS with the model services."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from gateway.replicas import DNS
from gateway.settings import GatewaySettings
from specdec.channels import ClientTls
from specdec.serving import StartError
from specdec.tls import TlsError, TlsFiles, Watched

ForAddress = Callable[[str], ClientTls | None]


def peer_tls(config: GatewaySettings) -> ClientTls | None:
    """With all of them, as it is set. None is plaintext.

    Raises:
        StartError: a file cannot be used.
    """
    if config.peer_tls_ca is None:
        return None
    files = TlsFiles(config.peer_tls_ca, config.peer_tls_cert, config.peer_tls_key)
    try:
        return ClientTls(Watched(files), config.peer_tls_name)
    except TlsError as error:
        raise StartError(str(error)) from error


def by_address(tls: ClientTls | None, addresses: Sequence[str]) -> ForAddress:
    """With each replica of a service, which is connected to by number if its name was looked up.

    Args:
        tls: with all services.
        addresses: of the replicas, as they were given.

    Raises:
        StartError: it cannot be said which name a replica's certificate must be for.
    """
    hosts = {a.removeprefix(DNS).rpartition(":")[0] for a in addresses if a.startswith(DNS)}
    if tls is None or tls.name is not None or not hosts:
        return lambda _: tls
    if len(hosts) > 1:
        names = ", ".join(sorted(hosts))
        raise StartError(f"give --peer-tls-name: certificates may be for any of {names}")
    looked_up = replace(tls, name=hosts.pop())
    return lambda address: tls if address in addresses else looked_up
