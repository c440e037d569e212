"""Runs the three services as child processes on loopback, and keeps them up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from specdec.services import Service

_FIRST_RESTART_SECONDS = 1.0
_MOST_RESTART_SECONDS = 30.0
_STOP_SECONDS = 15.0

Report = Callable[[Service, str], None]
"""Called with a service and a line about it, for people."""


class ServiceDied(Exception):
    """A service ended before it was ready for the first time. The message names it and why."""


@dataclass
class Child:
    """A service to run: `python -m package` on a port of loopback, with further arguments."""

    service: Service
    package: str
    port: int
    arguments: Sequence[str]
    peers: frozenset[str] = frozenset()
    """The services that it must have found before it counts as ready."""
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    process: asyncio.subprocess.Process | None = None

    async def end(self) -> None:
        """Ends the process, in order if it does not take too long."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.process.wait(), _STOP_SECONDS)
        await self.kill()

    async def kill(self) -> None:
        """Ends the process at once. Does nothing if it has ended."""
        if self.process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            self.process.kill()
        await self.process.wait()


async def _start(child: Child) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", child.package, "--port", str(child.port), "--log-format", "json"),
        *child.arguments,
        stdin=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
        # Ctrl-C in the terminal is for the supervisor, which then ends its children in order.
        start_new_session=True,
        # Two services take turns on the same cores: threads that wait must not spin on them.
        env={"OMP_WAIT_POLICY": "PASSIVE", **os.environ},
    )


async def _follow(child: Child, process: asyncio.subprocess.Process, report: Report) -> str:
    """Turns the child's log into lines for people, until it ends. Returns its last words."""
    assert process.stderr is not None
    last_words = ""
    missing = {child.service.name, *child.peers}
    async for line in _lines(process.stderr):
        try:
            event = json.loads(line)
        except ValueError:
            event = None
        if not isinstance(event, dict):
            # Not from the log: why it could not start, or what a library printed.
            last_words = line.removeprefix("error: ")
            continue
        text = _line_for_people(event)
        if text:
            report(child.service, text)
        if event.get("event") == "ready":
            last_words = ""
            missing.discard(child.service.name)
        elif event.get("event") == "peer" and event.get("state") != "CONNECTING":
            missing.discard(event.get("peer", ""))
        if not missing:
            child.ready.set()
    return last_words


async def _lines(stream: asyncio.StreamReader) -> AsyncIterator[str]:
    """Lines of any length, without the empty ones. A progress bar that is redrawn is many."""
    pending = b""
    while read := await stream.read(1 << 16):
        *whole, pending = re.split(rb"[\r\n]+", pending + read)
        for line in filter(None, whole):
            yield line.decode(errors="replace").rstrip()
    if pending:
        yield pending.decode(errors="replace").rstrip()


def _line_for_people(event: dict[str, Any]) -> str:
    match event.get("event"):
        case "loading" if "address" in event:
            return f"listening on {event['address']}, loading {event['model']}"
        case "loading":
            return f"loading {event['model']}"
        case "listening":
            return f"listening on {event['address']}"
        case "ready" if "seconds" in event:
            return f"ready after {event['seconds']} s: {event['dtype']} on {event['device']}"
        case "ready" if "drafters" in event:
            return f"ready: {event['drafters']}"
        case "KV cache":
            size = f"{event['bytes'] / 2**30:.1f} GiB"
            return f"KV cache of {event['tokens']:,} tokens, {event['pages']:,} pages, {size}"
        case "ready":
            return "ready"
        case "peer" if event.get("state") == "READY":
            return f"{event['peer']}: connected"
        case "peer":
            return f"{event['peer']}: {event['reason']}"
        case "no speculation":
            return f"no speculation: {event['reason']}"
        case name if event.get("level") in ("warning", "error"):
            return f"{name}: {event.get('error', '')}".rstrip(": ")
    return ""


async def _keep_up(child: Child, report: Report) -> None:
    """Runs a service, and again whenever it dies after having been ready.

    Raises:
        ServiceDied: it ended before it was ready for the first time.
    """
    pause = _FIRST_RESTART_SECONDS
    while True:
        begun = time.monotonic()
        child.process = process = await _start(child)
        last_words = await _follow(child, process, report)
        status = await process.wait()
        reason = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit {status}"
        # Nobody who is killed by SIGKILL has a last word.
        if last_words and status != -signal.SIGKILL:
            reason += f": {last_words}"
        if not child.ready.is_set():
            raise ServiceDied(f"the {child.service.name} could not start ({reason})")
        if time.monotonic() - begun > _MOST_RESTART_SECONDS:
            pause = _FIRST_RESTART_SECONDS
        report(child.service, f"died ({reason}); starting it again in {pause:.0f} s")
        await asyncio.sleep(pause)
        pause = min(2 * pause, _MOST_RESTART_SECONDS)


@asynccontextmanager
async def running(children: Sequence[Child], report: Report) -> AsyncIterator[asyncio.Task[None]]:
    """Runs the children while the block runs. They are ready when it begins.

    None is left when it has ended. To cancel that again kills those that have not ended yet.

    Args:
        children: in the order in which they are to be ended, each before the next.
        report: told what happens.

    Yields:
        A task that never ends by itself, to be awaited by those who stay.

    Raises:
        ServiceDied: one could not start.
    """

    async def keep_all_up() -> None:
        async with asyncio.TaskGroup() as group:
            for child in children:
                group.create_task(_keep_up(child, report))

    async def all_ready() -> None:
        for child in children:
            await child.ready.wait()

    keeper = asyncio.create_task(keep_all_up())
    starting = asyncio.create_task(all_ready())
    try:
        await asyncio.wait({keeper, starting}, return_when=asyncio.FIRST_COMPLETED)
        if keeper.done():
            await _raise_first(keeper)
        yield keeper
    finally:
        starting.cancel()
        keeper.cancel()
        try:
            await asyncio.gather(keeper, starting, return_exceptions=True)
            for child in children:
                await child.end()
        finally:
            await asyncio.gather(*(child.kill() for child in children))


async def _raise_first(keeper: asyncio.Task[None]) -> None:
    try:
        await keeper
    except* ServiceDied as group:
        raise group.exceptions[0] from None
