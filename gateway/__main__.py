"""`python -m gateway`."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence

import structlog

from gateway.key_file import KeyFileError
from gateway.keys import Keys
from gateway.peer_tls import by_address, peer_tls
from gateway.peers import DraftPeer, VerifierPeer
from gateway.replicas import Replicas
from gateway.service import GenerationServicer, register
from gateway.settings import GatewaySettings
from gateway.target import Target
from specdec import logs, serving, settings
from specdec.health import Health
from specdec.services import GATEWAY

_log = structlog.get_logger()


async def serve(config: GatewaySettings) -> None:
    """Serves until cancelled. Ready while the verifier is; a draft is not waited for.

    Raises:
        StartError: the port cannot be had, or a file for TLS or that of API keys is broken.
    """
    keys = _keys(config)
    changed = asyncio.Event()
    silence = config.peer_silence_seconds
    tokenizers: dict[str, Target] = {}
    tls = peer_tls(config)
    verifier_tls = by_address(tls, config.verifier_address)
    verifiers = Replicas(
        config.verifier_address,
        lambda at: VerifierPeer(at, silence, changed.set, tokenizers, verifier_tls(at)),
        changed.set,
    )
    draft_tls = by_address(tls, config.draft_address)
    drafts = Replicas(
        config.draft_address, lambda at: DraftPeer(at, silence, changed.set, draft_tls(at))
    )
    servicer = GenerationServicer(config, verifiers, drafts, keys)
    try:
        # Calls that are running at SIGTERM go on over these connections, so that they end last.
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(verifiers.stay_connected())
            tasks.create_task(drafts.stay_connected())
            if keys is not None:
                tasks.create_task(keys.stay_current())
            async with serving.listening(
                config,
                GATEWAY,
                lambda server: register(servicer, server),
                drain=servicer.drain,
            ) as (port, health):
                _log.info("listening", address=f"{config.host}:{port}")
                await _follow(verifiers, drafts, changed, health)
    except BaseExceptionGroup as group:
        if (failed := group.subgroup(serving.StartError)) is not None:
            raise failed.exceptions[0] from None
        raise
    finally:
        await verifiers.close()
        await drafts.close()


async def _follow(
    verifiers: Replicas[VerifierPeer],
    drafts: Replicas[DraftPeer],
    changed: asyncio.Event,
    health: Health,
) -> None:
    """Is ready while a verifier is, and says which drafts do not fit."""
    was_ready = False
    while True:
        await changed.wait()
        changed.clear()
        ready = verifiers.ready
        health.set(bool(ready))
        if bool(ready) != was_ready:
            _log.info("ready" if ready else "not ready", reason=verifiers.reason)
        was_ready = bool(ready)
        targets = [verifier.target for verifier in ready if verifier.target is not None]
        for other in targets[1:]:
            if not other.serves(targets[0]):
                _log.warning(
                    "verifiers differ: sessions of one cannot go on at the other",
                    model=targets[0].info.model_id,
                    other_model=other.info.model_id,
                )
        for draft in drafts.ready if targets else []:
            misfit = draft.misfit(targets[0])
            if misfit is not None:
                _log.warning("no speculation", address=draft.address, reason=misfit)


def _keys(config: GatewaySettings) -> Keys | None:
    if config.keys_file is None:
        return None
    try:
        return Keys(config.keys_file)
    except KeyFileError as error:
        raise serving.StartError(f"keys_file: {error}") from None


def main(arguments: Sequence[str]) -> None:
    """Runs the gateway with the given command line until a signal comes."""
    config = settings.load(GatewaySettings, arguments)
    logs.configure("gateway", config.log_level, config.log_format)
    serving.run(serve(config))


if __name__ == "__main__":
    main(sys.argv[1:])
