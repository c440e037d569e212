"""The open sessions of a model service: how many there may be, and how they end with it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import structlog

from specdec.errors import SpecdecError
from specdec.v1 import common_pb2

_log = structlog.get_logger()


class OpenSessions:
    """Counts the sessions that are open. Belongs to the event loop."""

    def __init__(self, max_sessions: int) -> None:
        """`max_sessions`: how many there may be at once."""
        self._max_sessions = max_sessions
        self._limits: set[asyncio.Timeout] = set()
        """By which each can be ended from outside."""
        self._draining = False
        self._was_full = False
        """Whether the last that came was refused."""
        self._none_open = asyncio.Event()
        self._none_open.set()

    def require_open(self) -> None:
        """
        Raises:
            SpecdecError: DRAINING, the service takes no more sessions.
        """
        if self._draining:
            raise SpecdecError(
                common_pb2.ERROR_REASON_DRAINING, "this service is shutting down; use another one"
            )

    def require_room(self) -> None:
        """
        Raises:
            SpecdecError: as of `entered`.
        """
        self.require_open()
        if len(self._limits) < self._max_sessions:
            self._was_full = False
            return
        if not self._was_full:
            # Once: those who are refused come again, and there may be many.
            _log.warning("sessions are refused", max_sessions=self._max_sessions)
            self._was_full = True
        raise SpecdecError(
            common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED,
            f"{self._max_sessions} sessions are open, as many as --max-sessions allows",
        )

    @asynccontextmanager
    async def entered(self) -> AsyncIterator[None]:
        """A session is open for as long as the block runs, which is one task.

        Raises:
            SpecdecError: RESOURCE_EXHAUSTED, too many are open; DRAINING, the service takes no
                more, or could not wait for the end of this one.
        """
        self.require_room()
        limit = asyncio.timeout(None)
        try:
            async with limit:
                self._limits.add(limit)
                self._none_open.clear()
                try:
                    yield
                finally:
                    self._limits.remove(limit)
                    if not self._limits:
                        self._none_open.set()
        except TimeoutError:
            if limit.expired():
                self.require_open()
            raise

    async def drain(self, grace_seconds: float) -> None:
        """Takes no more sessions, and waits for the end of those that are open.

        Those that are still open after so many seconds are ended.
        """
        self._draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(grace_seconds):
                await self._none_open.wait()
        for limit in self._limits:
            limit.reschedule(0.0)
