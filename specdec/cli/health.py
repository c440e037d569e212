"""`specdec health`: whether the services are ready."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import grpc
import typer
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import services

_CHECK_SECONDS = 2.0
_POLL_SECONDS = 0.2


async def check(service: services.Service, address: str) -> str | None:
    """Why a service is not ready, or None if it is."""
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service.full_name)
        try:
            response = await stub.Check(request, timeout=_CHECK_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() == grpc.StatusCode.NOT_FOUND:
                return f"what listens there is not the {service.name}"
            return f"unreachable ({error.code().name})"
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return None if name == "SERVING" else name


async def wait_until_ready(service: services.Service, address: str, seconds: float) -> str | None:
    """Checks until the service is ready or the time is over. The outcome is that of `check`."""
    deadline = time.monotonic() + seconds
    while True:
        fault = await check(service, address)
        if fault is None or time.monotonic() > deadline:
            return fault
        await asyncio.sleep(_POLL_SECONDS)


def health(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SERVICE]...", help="gateway, draft, verifier; all if left out"),
    ] = None,
    wait: Annotated[float, typer.Option(help="Seconds to wait for them to become ready.")] = 0.0,
    gateway: Annotated[
        str, typer.Option(help="Address of the gateway.")
    ] = f"127.0.0.1:{services.GATEWAY.port}",
    draft: Annotated[
        str, typer.Option(help="Address of the draft service.")
    ] = f"127.0.0.1:{services.DRAFT.port}",
    verifier: Annotated[
        str, typer.Option(help="Address of the verifier service.")
    ] = f"127.0.0.1:{services.VERIFIER.port}",
) -> None:
    """Exit with 0 if the services are ready, with 1 if any is not."""
    addresses = {"gateway": gateway, "draft": draft, "verifier": verifier}
    unknown = set(names or ()) - set(addresses)
    if unknown:
        raise typer.BadParameter(f"{', '.join(sorted(unknown))}: must be {', '.join(addresses)}")
    chosen = [service for service in services.ALL if not names or service.name in names]

    async def all_checks() -> list[str | None]:
        return await asyncio.gather(
            *(wait_until_ready(service, addresses[service.name], wait) for service in chosen)
        )

    faults = asyncio.run(all_checks())
    for service, fault in zip(chosen, faults, strict=True):
        typer.echo(f"{service.name:9} {addresses[service.name]:21} {fault or 'ready'}")
    if any(faults):
        raise typer.Exit(1)
