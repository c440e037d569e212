"""`python -m draft_service`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack

import structlog

from draft_service.registry import make_drafter
from draft_service.service import DraftServicer
from draft_service.settings import DraftSettings
from specdec import logs, serving, settings, wire
from specdec.services import DRAFT
from specdec.v1 import draft_pb2

_log = structlog.get_logger()


async def serve(config: DraftSettings, servicer: DraftServicer) -> None:
    """Serves until cancelled. Health answers while a model loads, NOT_SERVING until it is warm.

    Raises:
        StartError: the port or a drafter cannot be had.
    """
    drafter = make_drafter(config)
    listening = serving.listening(
        config,
        DRAFT,
        lambda server: wire.register(
            server, servicer, draft_pb2.DESCRIPTOR.services_by_name["DraftService"]
        ),
        alive=lambda: drafter.fault is None,
        drain=servicer.sessions.drain,
    )
    # Entered by who listens already, it ends after the calls that may finish.
    async with AsyncExitStack() as outlives_the_server, listening as (port, health):
        _log.info("listening", address=f"{config.host}:{port}")
        facts = await outlives_the_server.enter_async_context(drafter.running())
        servicer.drafter = drafter
        health.set(True)
        _log.info("ready", drafters=", ".join(config.drafters), **facts)
        await asyncio.Event().wait()


def main(arguments: Sequence[str]) -> None:
    """Runs the service with the given command line until a signal comes."""
    config = settings.load(DraftSettings, arguments)
    logs.configure("draft", config.log_level, config.log_format)
    serving.run(serve(config, DraftServicer(config.max_sessions)))


if __name__ == "__main__":
    main(sys.argv[1:])
