"""`specdec health`: whether the services are ready."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import services
from specdec.channels import ClientTls, open_channel, tls_trouble
from specdec.cli.tls_flags import TlsCa, TlsCert, TlsKey, TlsName, client_tls
from specdec.errors import describe

_CHECK_SECONDS = 2.0
_POLL_SECONDS = 0.2


async def check(
    service: services.Service, address: str, tls: ClientTls | None = None
) -> str | None:
    """Why a service is not ready, or None if it is."""
    async with open_channel(address, tls) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service.full_name)
        try:
            response = await stub.Check(request, timeout=_CHECK_SECONDS)
        except grpc.aio.AioRpcError as error:
            return tls_trouble(error) or _explain(error, service)
    return None if response.status == health_pb2.HealthCheckResponse.SERVING else "not ready yet"


def _explain(error: grpc.aio.AioRpcError, service: services.Service) -> str:
    match error.code():
        case grpc.StatusCode.NOT_FOUND | grpc.StatusCode.UNIMPLEMENTED:
            return f"what listens there is not the {service.name}"
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return f"no answer within {_CHECK_SECONDS:.0f} s"
        case grpc.StatusCode.UNAVAILABLE:
            return "nothing answers there"
        case _:
            return f"not reachable ({describe(error)})"


async def wait_until_ready(
    service: services.Service, address: str, seconds: float, tls: ClientTls | None = None
) -> str | None:
    """Checks until the service is ready or the time is over. The outcome is that of `check`."""
    deadline = time.monotonic() + seconds
    while True:
        fault = await check(service, address, tls)
        if fault is None or time.monotonic() > deadline:
            return fault
        await asyncio.sleep(_POLL_SECONDS)


def health(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="SERVICE", help="gateway, draft, verifier; all if left out."),
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, help="Seconds to wait for them to become ready.")
    ] = 0.0,
    gateway: Annotated[
        str, typer.Option(help="host:port of the gateway.")
    ] = f"127.0.0.1:{services.GATEWAY.port}",
    draft: Annotated[
        str, typer.Option(help="host:port of the draft.")
    ] = f"127.0.0.1:{services.DRAFT.port}",
    verifier: Annotated[
        str, typer.Option(help="host:port of the verifier.")
    ] = f"127.0.0.1:{services.VERIFIER.port}",
    tls_ca: TlsCa = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_name: TlsName = None,
) -> None:
    """Exit with 0 if the services are ready, with 1 if any is not."""
    addresses = {"gateway": gateway, "draft": draft, "verifier": verifier}
    unknown = set(names or ()) - set(addresses)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: must be {', '.join(addresses)}")
    tls = client_tls(tls_ca, tls_cert, tls_key, tls_name)
    chosen = [service for service in services.ALL if not names or service.name in names]

    async def all_checks() -> list[str | None]:
        return await asyncio.gather(
            *(wait_until_ready(service, addresses[service.name], wait, tls) for service in chosen)
        )

    faults = asyncio.run(all_checks())
    for service, fault in zip(chosen, faults, strict=True):
        typer.echo(f"{service.name:9} {addresses[service.name]:21} {fault or 'ready'}")
    if any(faults):
        raise typer.Exit(1)
