"""`python -m gateway`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from gateway.peers import DraftPeer, Peer, PeerState, VerifierPeer
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
    draft = DraftPeer(config.draft_address, changed.set) if config.draft_address else None
    servicer = GenerationServicer(config, verifier, draft)
    peers: list[Peer] = [verifier] if draft is None else [verifier, draft]
    try:
        async with serving.listening(config, GATEWAY, lambda s: register(servicer, s)) as started:
            port, health = started
            _log.info("listening", address=f"{config.host}:{port}")
            async with asyncio.TaskGroup() as tasks:
                for peer in peers:
                    tasks.create_task(peer.stay_connected())
                await _follow(verifier, draft, changed, health)
    finally:
        # Only now: calls that were running at SIGTERM went on over these channels.
        for peer in peers:
            await peer.close()


async def _follow(
    verifier: VerifierPeer, draft: DraftPeer | None, changed: asyncio.Event, health: serving.Health
) -> None:
    """Keeps the health the same as the verifier's, and says if the draft does not fit."""
    was_ready = False
    while True:
        await changed.wait()
        changed.clear()
        ready = verifier.state is PeerState.READY
        await health.set(ready)
        if ready != was_ready:
            _log.info("ready" if ready else "not ready", reason=verifier.reason)
        was_ready = ready
        if draft is not None and draft.state is PeerState.READY and verifier.target is not None:
            misfit = draft.misfit(verifier.target)
            if misfit is not None:
                _log.warning("no speculation", reason=misfit)


def main(arguments: Sequence[str]) -> None:
    """Runs the gateway with the given command line until a signal comes."""
    config = settings.load(GatewaySettings, arguments)
    logs.configure("gateway", config.log_level, config.log_format)
    serving.run(serve(config))


if __name__ == "__main__":
    main(sys.argv[1:])
