"""The bootstrap of a service: server, health, reflection, signals. All wiring is in this file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from specdec.services import Service
from specdec.settings import ServiceSettings

_log = structlog.get_logger()

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a received message. A prompt of a million tokens has 3 MB."""

_SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    # Without this a second server takes the port silently and gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping through a long silent prefill without being sent away.
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_LAST_TASKS_SECONDS = 1.0
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class StartError(Exception):
    """The service cannot start. The message is one line that says what to do."""


class Health:
    """The service's answer to health checks: NOT_SERVING until told otherwise."""

    def __init__(self, service: str) -> None:
        self._servicer = health.aio.HealthServicer()
        self._names = ("", service)

    async def set(self, serving: bool) -> None:
        """Sets what the empty name and the service's own name answer."""
        status = health_pb2.HealthCheckResponse.ServingStatus
        for name in self._names:
            await self._servicer.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def end(self) -> None:
        """Answers NOT_SERVING from here on."""
        await self._servicer.enter_graceful_shutdown()

    def register(self, server: grpc.aio.Server) -> None:
        """Adds the health service to a server."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)


def _add_reflection(server: grpc.aio.Server, service: str) -> None:
    """Adds reflection in v1 and in v1alpha, which are the same but for the name."""
    _declare_reflection_v1()
    names = (service, "grpc.health.v1.Health", _REFLECTION_V1, reflection.SERVICE_NAME)
    servicer = reflection.aio.ReflectionServicer(names)
    reflection_pb2_grpc.add_ServerReflectionServicer_to_server(servicer, server)
    handler = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(_REFLECTION_V1, {"ServerReflectionInfo": handler}),)
    )


def _declare_reflection_v1() -> None:
    """Puts a descriptor of v1 into the pool, so that clients can describe what they find listed."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    text = json_format.MessageToJson(file).replace("reflection.v1alpha", "reflection.v1")
    renamed = json_format.Parse(text, descriptor_pb2.FileDescriptorProto())
    renamed.name = "grpc/reflection/v1/reflection.proto"
    descriptor_pool.Default().AddSerializedFile(renamed.SerializeToString())


@asynccontextmanager
async def listening(
    settings: ServiceSettings, service: Service, register: Callable[[grpc.aio.Server], None]
) -> AsyncIterator[tuple[int, Health]]:
    """A server that answers while the block runs, and ends running calls with it.

    Args:
        settings: where to listen.
        service: what is served, for health and reflection.
        register: adds the service's own servicer.

    Yields:
        The port that it listens on, and its health, which is NOT_SERVING to begin with.

    Raises:
        StartError: the port cannot be had.
    """
    server = grpc.aio.server(options=_SERVER_OPTIONS)
    health = Health(service.full_name)
    await health.set(False)
    health.register(server)
    register(server)
    _add_reflection(server, service.full_name)
    address = f"{settings.host}:{settings.port}"
    try:
        _try_to_bind(settings.host, settings.port)
        port = server.add_insecure_port(address)
    except (OSError, RuntimeError) as error:
        raise StartError(
            f"cannot listen on {address}: it is in use or not an address of this machine; "
            "choose another with --port or --host, or stop the process that has it"
        ) from error
    _log.info("settings", **settings.model_dump(mode="json"))
    await server.start()
    try:
        yield port, health
    finally:
        await health.end()
        await server.stop(settings.grace_seconds)


def _try_to_bind(host: str, port: int) -> None:
    """Raises OSError if the address cannot be had: gRPC would also log lines of its own."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, and cancels it at the first SIGTERM or SIGINT."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, task.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    # gRPC's own tasks outlive the calls that they served by a moment, and print a traceback if the
    # loop's end cancels them.
    if remaining := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(remaining, timeout=_LAST_TASKS_SECONDS)


def run(work: Coroutine[Any, Any, None]) -> NoReturn:
    """Runs a service's main coroutine until it ends or a signal comes, and exits.

    The exit status is 0, or 1 after one line on standard error if the service could not start.
    """
    try:
        asyncio.run(_until_signal(work))
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    else:
        _log.info("stopped")
        status = 0
    logging.shutdown()
    sys.stderr.flush()
    # A model that is being loaded cannot be interrupted, and nobody waits for it any more; the
    # interpreter's own exit would join its thread.
    os._exit(status)
