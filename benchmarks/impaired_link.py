"""A TCP link on loopback that is as slow, unsteady or broken as it is told to be.

It stands between a client and a server, and passes on what both send. What it delays stays in
order within a connection. It lives in a thread of its own, with timers that are finer than the
millisecond of asyncio's, so that a round trip of 1 ms is one.
"""

from __future__ import annotations

import asyncio
import random
import select
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

_CHUNK_BYTES = 1 << 14
_MOST_CHUNKS = 1024
"""Of a connection on their way in one direction. Then the sender has to wait."""
_RETRY_SECONDS = 0.05
_START_SECONDS = 10.0


@dataclass(frozen=True)
class Conditions:
    """How a link is, in each of its two directions. What is on its way keeps what it met."""

    delay: float = 0.0
    """Seconds from one end to the other."""
    jitter: float = 0.0
    """Up to so many seconds more, evenly distributed. Nothing overtakes in a connection."""
    bandwidth: float | None = None
    """Bytes a second of all connections together; None for no limit."""
    burst: int = _CHUNK_BYTES
    """Bytes that a link which had nothing to do passes on at once."""


class _FineSelector(selectors.DefaultSelector):
    """Waits as long as it is told. The standard one rounds up to milliseconds."""

    def select(self, timeout: float | None = None) -> Any:
        if timeout is not None and timeout > 0:
            select.select([self.fileno()], [], [], timeout)
            timeout = 0
        return super().select(timeout)


def _reset(writer: asyncio.StreamWriter) -> None:
    """Ends a connection so that the other end sees a fault, and not an orderly end."""
    own = writer.get_extra_info("socket")
    if own is not None and own.fileno() >= 0:
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()


@dataclass
class _Lane:
    """One direction of all connections: a token bucket, as the time at which it is paid off."""

    paid_at: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def arrival(self, count: int, now: float, conditions: Conditions) -> float:
        """When so many bytes that are sent now come out at the other end."""
        sent = now
        if conditions.bandwidth is not None:
            saved = conditions.burst / conditions.bandwidth
            self.paid_at = max(self.paid_at, now - saved) + count / conditions.bandwidth
            sent = max(now, self.paid_at)
        return sent + conditions.delay + conditions.jitter * self.random.random()


class ImpairedLink:
    """A port of loopback that leads to another. All methods may be called from any thread."""

    def __init__(self, target_port: int, conditions: Conditions | None = None) -> None:
        """
        Args:
            target_port: of loopback, where it leads to.
            conditions: at first. The attribute may be set at any time.
        """
        self.conditions = conditions or Conditions()
        self.port = 0
        """Where it listens, once it has been entered."""
        self.connections = 0
        """So many have been made since the beginning."""
        self._target_port = target_port
        self._lanes = (_Lane(), _Lane())
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._opening: asyncio.Task[None] | None = None
        self._refused_until = self._stalled_until = 0.0
        self._loop = asyncio.SelectorEventLoop(_FineSelector())
        self._ending = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="impaired link", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(_START_SECONDS):
            raise OSError("the link does not listen")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join()

    def cut(self) -> None:
        """Resets all connections. New ones are taken at once."""
        self._call(self._cut)

    def refuse(self, seconds: float) -> None:
        """Resets all connections, and refuses new ones for a time."""
        self._refused_until = time.monotonic() + seconds
        self._call(self._close)

    def stall(self, seconds: float) -> None:
        """Passes nothing on for a time, as a black hole. What is sent meanwhile is not lost: it
        comes late, and in order, as TCP would send it again."""
        self._stalled_until = time.monotonic() + seconds

    def _call(self, act: Callable[[], object]) -> None:
        done = threading.Event()

        def acted() -> None:
            act()
            done.set()

        self._loop.call_soon_threadsafe(acted)
        done.wait(_START_SECONDS)

    def _cut(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _close(self) -> None:
        self._cut()
        if self._server is not None:
            self._server.close()
            self._server = None
            self._opening = asyncio.create_task(self._open())

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._live())

    async def _live(self) -> None:
        self._opening = asyncio.create_task(self._open())
        await self._ending.wait()
        self._opening.cancel()
        if self._server is not None:
            self._server.close()
        self._cut()
        await asyncio.gather(self._opening, *self._tasks, return_exceptions=True)

    async def _open(self) -> None:
        while self._server is None:
            if (left := self._refused_until - time.monotonic()) > 0:
                await asyncio.sleep(left)
                continue
            try:
                self._server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
            except OSError:
                # The port may be somebody else's for a moment.
                await asyncio.sleep(_RETRY_SECONDS)
        self.port = self._server.sockets[0].getsockname()[1]
        self._listening.set()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        task = asyncio.create_task(self._connection(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers = [writer]
        complete = False
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
            writers.append(far_writer)
            async with asyncio.TaskGroup() as group:
                for source, sink, lane in (
                    (reader, far_writer, self._lanes[0]),
                    (far_reader, writer, self._lanes[1]),
                ):
                    passing: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_MOST_CHUNKS)
                    group.create_task(self._take(source, lane, passing))
                    group.create_task(self._give(sink, passing))
            complete = True
        except* OSError:
            pass  # One end has gone, and so goes the other.
        finally:
            for one in writers:
                if complete:
                    one.close()
                else:
                    _reset(one)

    async def _take(
        self,
        source: asyncio.StreamReader,
        lane: _Lane,
        passing: asyncio.Queue[tuple[float, bytes]],
    ) -> None:
        due = 0.0
        chunk = b"-"
        while chunk:
            chunk = await source.read(_CHUNK_BYTES)
            due = max(due, lane.arrival(len(chunk), time.monotonic(), self.conditions))
            await passing.put((due, chunk))

    async def _give(
        self, sink: asyncio.StreamWriter, passing: asyncio.Queue[tuple[float, bytes]]
    ) -> None:
        while True:
            due, chunk = await passing.get()
            # Again, as it may have been stalled meanwhile.
            while True:
                left = max(due, self._stalled_until) - time.monotonic()
                if left <= 0:
                    break
                await asyncio.sleep(left)
            if not chunk:
                break
            sink.write(chunk)
            await sink.drain()
        sink.write_eof()
