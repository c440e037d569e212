"""A server that has health and reflection and no service, for tests of who gets in."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from gateway.settings import GatewaySettings
from specdec import serving
from specdec.health import Health
from specdec.services import GATEWAY
from tests.stack import free_port


async def _no_sessions(_: float) -> None:
    """How a service without sessions is drained."""


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[tuple[str, Health]]:
    """A gateway that is ready. Yields its address and its health."""
    settings = GatewaySettings(port=free_port(), grace_seconds=0.0, **options)
    async with serving.listening(settings, GATEWAY, lambda _: None, drain=_no_sessions) as found:
        port, health = found
        health.set(True)
        yield f"127.0.0.1:{port}", health
