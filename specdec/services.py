"""The three services: what each is called, and where it listens unless told otherwise."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Service:
    """One of the three."""

    name: str
    """For people, and for `specdec NAME`."""
    full_name: str
    """Of the gRPC service, for health checks and reflection."""
    port: int
    """The default port."""


GATEWAY = Service("gateway", "specdec.v1.GenerationService", 50051)
DRAFT = Service("draft", "specdec.v1.DraftService", 50052)
VERIFIER = Service("verifier", "specdec.v1.VerifierService", 50053)
ALL = (GATEWAY, DRAFT, VERIFIER)
