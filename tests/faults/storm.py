"""Many strikes at once, again and again, with a look at the damage in between."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from pathlib import Path

CONTEXT = 64
"""The context length of the models."""
LONG = os.environ.get("SPECDEC_CHAOS_LONG") == "1"
TIMEOUT = 3600 if LONG else 120
"""Seconds that a test may take."""


def number(short: int, long: int = 20_000) -> int:
    """How many messages to send: in the short form, or in the long one."""
    return long if LONG else short


async def storm(
    count: int,
    strike: Callable[[random.Random], Awaitable[int]],
    afterwards: Callable[[], Awaitable[None]],
    at_once: int = 12,
) -> None:
    """Strikes until so many messages were sent.

    Args:
        count: of messages.
        strike: returns how many it sent.
        afterwards: awaited when those of a moment are over.
        at_once: how many strikes at a moment.
    """
    sent, seed, warm = 0, 0, 0.0
    while sent < count:
        seeds, seed = range(seed, seed + at_once), seed + at_once
        results = await asyncio.gather(
            *(strike(random.Random(s)) for s in seeds), return_exceptions=True
        )
        for which, result in zip(seeds, results, strict=True):
            assert not isinstance(result, BaseException), (which, result)
            sent += result
        await afterwards()
        if not warm and sent > count / 3:
            warm = _resident_mib()
    growth = _resident_mib() - warm
    assert growth < (64.0 if LONG else 24.0), f"{growth:.0f} MiB more after the first third"


def _resident_mib() -> float:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20
