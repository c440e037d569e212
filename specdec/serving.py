"""The bootstrap of a service: server, health, reflection, signals. All wiring is in this file."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn

import grpc
import structlog
from google.protobuf import descriptor_pb2, descriptor_pool, json_format
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2, reflection_pb2_grpc

from specdec.health import Health
from specdec.identities import OnlyNamed
from specdec.services import Service
from specdec.settings import ServiceSettings
from specdec.tls import TlsError, TlsFiles, server_credentials

_log = structlog.get_logger()

MAX_MESSAGE_BYTES = 16 * 1024 * 1024
"""Of a received message. A prompt of a million tokens has 3 MB."""

_SERVER_OPTIONS: Sequence[tuple[str, Any]] = (
    # Without this a second server takes the port silently and gets half of the calls.
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Clients may ping through a long silent prefill without being sent away: gateways do so every
    # second if they are told to.
    ("grpc.http2.min_ping_interval_without_data_ms", 500),
    ("grpc.keepalive_permit_without_calls", 1),
    # Of one connection, so that its client cannot fill the memory with calls that do nothing.
    ("grpc.max_concurrent_streams", 2048),
    # Who connects and does not get through TLS and the greeting of HTTP/2 is sent away.
    ("grpc.server_handshake_timeout_ms", 20_000),
)
_HEALTH_OPTIONS: Sequence[tuple[str, Any]] = (
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", 4096),
    ("grpc.max_concurrent_streams", 64),
    ("grpc.server_handshake_timeout_ms", 20_000),
)
_LAST_CALLS_SECONDS = 0.5
_LAST_TASKS_SECONDS = 1.0
_REFLECTION_V1 = "grpc.reflection.v1.ServerReflection"


class StartError(Exception):
    """The service cannot start. The message is one line that says what to do."""


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
    settings: ServiceSettings,
    service: Service,
    register: Callable[[grpc.aio.Server], None],
    *,
    drain: Callable[[float], Awaitable[None]],
    alive: Callable[[], bool] = lambda: True,
) -> AsyncIterator[tuple[int, Health]]:
    """A server that answers while the block runs, and is drained at its end.

    Args:
        settings: where to listen.
        service: what is served, for health and reflection.
        register: adds the service's own servicer.
        drain: has the service refuse new sessions, which it does better than the library: with a
            reason, and word of when to try again. It waits for the end of those that are open, and
            ends those that are left after the given seconds.
        alive: whether the process is worth keeping.

    Yields:
        The port that it listens on, and its health, which is alive and not ready to begin with.

    Raises:
        StartError: the port, or a file for TLS, cannot be had.
    """
    server = grpc.aio.server(
        interceptors=[OnlyNamed(settings.tls_client_names)] if settings.tls_client_names else None,
        options=[*_SERVER_OPTIONS, *_connection_age(settings)],
    )
    health = Health(service.full_name, alive)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    register(server)
    _add_reflection(server, service.full_name)
    port = _add_port(server, settings.host, settings.port, "port", _credentials(settings))
    _log.info("settings", **settings.model_dump(mode="json"))
    async with _health_port(settings, health):
        await server.start()
        try:
            yield port, health
        finally:
            health.drain()
            _log.info("draining", grace_seconds=settings.grace_seconds)
            await drain(settings.grace_seconds)
            health.end()
            # What is left are calls that have just been ended, and clients that do not read.
            await server.stop(_LAST_CALLS_SECONDS)


def _connection_age(settings: ServiceSettings) -> Iterator[tuple[str, int]]:
    """The library's options for the age of connections, as far as they are set."""
    for name, seconds in (
        ("grpc.max_connection_age_ms", settings.max_connection_age_seconds),
        ("grpc.max_connection_age_grace_ms", settings.max_connection_age_grace_seconds),
    ):
        if seconds is not None:
            yield name, max(1, int(seconds * 1000))


def _credentials(settings: ServiceSettings) -> grpc.ServerCredentials | None:
    """For TLS, or None for plaintext."""
    if settings.tls_cert is None:
        return None
    files = TlsFiles(settings.tls_client_ca, settings.tls_cert, settings.tls_key)
    try:
        return server_credentials(files)
    except TlsError as error:
        raise StartError(str(error)) from error


@asynccontextmanager
async def _health_port(settings: ServiceSettings, health: Health) -> AsyncIterator[None]:
    """Answers health checks, and nothing else, on a port of their own while the block runs."""
    if settings.health_port is None:
        yield
        return
    server = grpc.aio.server(options=_HEALTH_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    _add_port(server, settings.host, settings.health_port, "health-port", None)
    await server.start()
    try:
        yield
    finally:
        await server.stop(None)


def _add_port(
    server: grpc.aio.Server,
    host: str,
    port: int,
    flag: str,
    credentials: grpc.ServerCredentials | None,
) -> int:
    """Has a server listen, in plaintext if there are no credentials. Returns the port.

    Raises:
        StartError: it cannot be had.
    """
    address = f"{host}:{port}"
    try:
        _try_to_bind(host, port)
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except (OSError, RuntimeError) as error:
        raise StartError(
            f"cannot listen on {address}: it is in use or not an address of this machine; "
            f"choose another with --{flag} or --host, or stop the process that has it"
        ) from error


def _try_to_bind(host: str, port: int) -> None:
    """Raises OSError if the address cannot be had: gRPC would also log lines of its own."""
    family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family) as trial:
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        trial.bind(address)


async def _until_signal(work: Coroutine[Any, Any, None]) -> None:
    """Awaits `work`, and cancels it at the first SIGTERM or SIGINT. A second ends the process."""
    task = asyncio.ensure_future(work)
    loop = asyncio.get_running_loop()
    signalled = False

    def stop(number: signal.Signals) -> None:
        nonlocal signalled
        if signalled:
            _log.warning("stopped at once", signal=number.name)
            _exit(128 + number)
        signalled = True
        task.cancel()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop, number)
    with contextlib.suppress(asyncio.CancelledError):
        await task
    # gRPC's own tasks outlive the calls that they served by a moment, and print a traceback if the
    # loop's end cancels them.
    if remaining := asyncio.all_tasks() - {asyncio.current_task()}:
        await asyncio.wait(remaining, timeout=_LAST_TASKS_SECONDS)


def run(work: Coroutine[Any, Any, None]) -> NoReturn:
    """Runs a service's main coroutine until it ends or a signal comes, and exits.

    The exit status is 0, or 1 after one line on standard error if the service could not start. A
    second signal ends the process where it is, with 128 and the signal's number.
    """
    try:
        asyncio.run(_until_signal(work))
    except StartError as error:
        print(f"error: {error}", file=sys.stderr)
        status = 1
    else:
        _log.info("stopped")
        status = 0
    _exit(status)


def _exit(status: int) -> NoReturn:
    logging.shutdown()
    sys.stderr.flush()
    # A model that is being loaded cannot be interrupted, and nobody waits for it any more; the
    # interpreter's own exit would join its thread.
    os._exit(status)
