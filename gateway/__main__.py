"""`python -m gateway`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from gateway.peers import DraftPeer, PeerState, VerifierPeer
from gateway.service import GenerationServicer, register
from gateway.settings import GatewaySettings
from specdec import logs, serving, settings
from specdec.services import GATEWAY

_log = structlog.get_logger()


async def serve(config: GatewaySettings) -> None:
    """Serves until cancelled. Ready while the verifier is; a draft is not waited for.

    Raises:
        StartError: the port cannot be had.
    """
    changed = asyncio.Event()
    verifier = VerifierPeer(config.verifier_address, changed.set)
    draft = DraftPeer(config.draft_address) if config.draft_address else None
    servicer = GenerationServicer(config, verifier, draft)
    async with (
        serving.listening(config, GATEWAY, lambda s: register(servicer, s)) as (port, health),
        asyncio.TaskGroup() as tasks,
    ):
        _log.info("listening", address=f"{config.host}:{port}")
        for peer in filter(None, (verifier, draft)):
            tasks.create_task(peer.stay_connected())
        while True:
            await changed.wait()
            changed.clear()
            ready = verifier.state is PeerState.READY
            await health.set(ready)
            _log.info("ready" if ready else "not ready", reason=verifier.reason)


def main(arguments: Sequence[str]) -> None:
    """Runs the gateway with the given command line until a signal comes."""
    config = settings.load(GatewaySettings, arguments)
    logs.configure("gateway", config.log_level, config.log_format)
    serving.run(serve(config))


if __name__ == "__main__":
    main(sys.argv[1:])
