"""What a distillation tells of how far it has come."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Progress(NamedTuple):
    """How far a stage has come."""

    stage: str
    done: int
    total: int
    """In tokens where texts are written, in steps where something is learned."""
    note: str = ""
    """Loss and acceptance, for people."""


Report = Callable[[Progress], None]
