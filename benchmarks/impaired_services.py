"""The three services as processes, with impaired links between the gateway and the models."""

from __future__ import annotations

import contextlib
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc

from benchmarks.impaired_link import Conditions, ImpairedLink
from specdec import services
from specdec.channels import open_channel
from specdec.cli import pair
from specdec.cli.supervisor import Child, running

LINKS = ("both", "draft", "verifier")
"""Which of the links a round trip is set for."""


@dataclass
class Impaired:
    """Services that run."""

    channel: grpc.aio.Channel
    """To the gateway, without a detour."""
    draft: ImpairedLink
    verifier: ImpairedLink

    def set_round_trip(self, milliseconds: float, links: str = "both") -> tuple[float, float]:
        """Half of it each way. Gives the round trips of the draft's and the verifier's link."""
        found = []
        for link, name in ((self.draft, "draft"), (self.verifier, "verifier")):
            rtt = milliseconds if links in ("both", name) else 0.0
            link.conditions = Conditions(delay=rtt / 2000)
            found.append(rtt)
        return found[0], found[1]


@asynccontextmanager
async def impaired(
    *,
    target: str,
    draft: str | None,
    drafters: str,
    dtype: str,
    gateway_options: Sequence[str] = (),
) -> AsyncIterator[Impaired]:
    """Starts the services for the block: draft and verifier with one thread on one core each.

    Args:
        target: model folder.
        draft: likewise; None for the default.
        drafters: as of `specdec draft`.
        dtype: of the models.
        gateway_options: further arguments for the gateway.
    """
    gateway_port, draft_port, verifier_port = pair.free_ports()
    with ImpairedLink(draft_port) as to_draft, ImpairedLink(verifier_port) as to_verifier:
        model_options = ("--dtype", dtype, "--num-threads", "1")
        verifying = Child(
            services.VERIFIER,
            "verifier_service",
            verifier_port,
            ("--model", target, *model_options),
        )
        drafting = Child(
            services.DRAFT,
            "draft_service",
            draft_port,
            (*(("--model", draft) if draft else ()), "--drafters", drafters, *model_options),
        )
        addresses = (
            *("--verifier-address", f"127.0.0.1:{to_verifier.port}"),
            *("--draft-address", f"127.0.0.1:{to_draft.port}"),
        )
        peers = frozenset({services.VERIFIER.name, services.DRAFT.name})
        gateway = Child(
            services.GATEWAY, "gateway", gateway_port, (*addresses, *gateway_options), peers
        )
        async with (
            running((gateway, drafting, verifying), lambda service, line: None),
            open_channel(f"127.0.0.1:{gateway_port}") as channel,
        ):
            _pin(verifying, drafting)
            yield Impaired(channel, to_draft, to_verifier)


def _pin(*children: Child) -> None:
    """A core each, as far as there are as many. Only Linux can."""
    if not hasattr(os, "sched_setaffinity"):
        return
    cores = sorted(os.sched_getaffinity(0), reverse=True)
    for child, core in zip(children, cores, strict=False):
        if child.process is None:
            continue
        for thread in Path(f"/proc/{child.process.pid}/task").iterdir():
            # A thread may have ended by now.
            with contextlib.suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), {core})
