"""Health checks: whether a service lives, and whether it is ready.

The empty name says whether the process is worth keeping, the service's full name whether it is to
be sent work. Both are worked out when they are asked for: an answer that was stored would go on
saying that all is well after whoever stored it has died.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

_POLL_SECONDS = 1.0
"""How soon a Watch says what nobody announced, such as the death of a thread."""

_Status = health_pb2.HealthCheckResponse.ServingStatus


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # it has no types
    """The service's answers to health checks: alive from the beginning, ready when told so."""

    def __init__(self, service: str, alive: Callable[[], bool]) -> None:
        """
        Args:
            service: its full name.
            alive: whether the process is worth keeping. That its event loop runs need not be
                looked at: whoever gets an answer knows.
        """
        self._service = service
        self._alive = alive
        self._ready = False
        self._draining = False
        self._ended = False
        self._changed = asyncio.Event()

    def set(self, ready: bool) -> None:
        """Sets whether the service is ready. Once it drains it is not."""
        self._ready = ready
        self._announce()

    def drain(self) -> None:
        """Not ready from here on, but alive."""
        self._draining = True
        self._announce()

    def end(self) -> None:
        """Lets go of those who watch."""
        self._ended = True
        self._announce()

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == _Status.SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"there is no {request.service!r} here")
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        # Each holds nothing but its own place: one that does not read keeps nobody waiting.
        told = None
        while not self._ended:
            changed = self._changed
            status = self._status(request.service)
            if status != told:
                yield health_pb2.HealthCheckResponse(status=status)
                told = status
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await changed.wait()

    def _announce(self) -> None:
        """Wakes those who watch."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _status(self, name: str) -> int:
        status: int = _Status.SERVICE_UNKNOWN
        if name in ("", self._service):
            ready = not name or (self._ready and not self._draining)
            status = _Status.SERVING if ready and self._alive() else _Status.NOT_SERVING
        return status
