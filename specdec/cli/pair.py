"""The child services that serve a pair of models."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from specdec import services
from specdec.cli.supervisor import Child, Report
from specdec.cli.terminal import tell

_COLOURS = {services.GATEWAY: "cyan", services.DRAFT: "green", services.VERIFIER: "magenta"}


def children(
    *,
    target: str | None,
    draft: str | None,
    drafters: str | None = None,
    ports: Sequence[int],
    target_options: Sequence[str] = (),
    draft_options: Sequence[str] = (),
    gateway_options: Sequence[str] = (),
) -> list[Child]:
    """The services of a pair of models, in the order in which they are to be ended.

    Args:
        target: hub id, folder or GGUF file; None for the embedded default pair.
        draft: likewise; None with a target means no draft model.
        drafters: what drafts, as in --drafters of the draft service; None for its default. Without
            this and a draft model the target decodes plainly.
        ports: of gateway, draft and verifier.
        target_options: further arguments for the verifier.
        draft_options: likewise for the draft.
        gateway_options: likewise for the gateway.
    """
    gateway_port, draft_port, verifier_port = ports
    gateway_arguments = ["--verifier-address", f"127.0.0.1:{verifier_port}", *gateway_options]
    peers = {services.VERIFIER.name}
    models = [
        Child(
            services.VERIFIER,
            "verifier_service",
            verifier_port,
            (*(("--model", target) if target else ()), *target_options),
        )
    ]
    if draft is not None or drafters is not None or target is None:
        gateway_arguments += ["--draft-address", f"127.0.0.1:{draft_port}"]
        peers.add(services.DRAFT.name)
        arguments = (
            *(("--model", draft) if draft else ()),
            *(("--drafters", drafters) if drafters else ()),
            *draft_options,
        )
        models.insert(0, Child(services.DRAFT, "draft_service", draft_port, arguments))
    else:
        gateway_arguments += ["--draft-address", ""]
    gateway = Child(services.GATEWAY, "gateway", gateway_port, gateway_arguments, frozenset(peers))
    return [gateway, *models]


def shared_cores() -> int:
    """How many cores each of the two model services should use on a CPU."""
    # Only Linux tells which cores this process may use.
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return max(1, (allowed or 1) // 2)


def free_ports() -> list[int]:
    """Ports for the three that nobody listens on now, to run beside `specdec up`."""
    sockets = [socket.socket() for _ in services.ALL]
    try:
        for free in sockets:
            free.bind(("127.0.0.1", 0))
        return [free.getsockname()[1] for free in sockets]
    finally:
        for free in sockets:
            free.close()


def reporter(console: Console) -> Report:
    """Prints what happens to a service, one line each."""

    def report(service: services.Service, line: str) -> None:
        tell(console, Text(f"{service.name:9}", _COLOURS[service]), Text(line))

    return report
