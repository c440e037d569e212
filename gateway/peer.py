"""A connection to a model service, and the handshake with it.

Connecting goes on in the background for as long as the gateway lives: a service may start later,
and when one of its streams breaks the handshake is made anew, because what comes back may be
another process with another model.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from enum import Enum, auto
from typing import Protocol
from weakref import WeakSet

import grpc
import structlog
import tenacity

from gateway.breaker import Breaker
from specdec.channels import ClientTls, RenewedChannel, tls_trouble
from specdec.errors import describe
from specdec.serving import MAX_MESSAGE_BYTES

_log = structlog.get_logger()

_PAUSE_SECONDS = 0.05
_QUIET_SECONDS = 10.0
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that restarts is found again within a second, not after minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    # This one is also how long a connection may take to come about.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    # A round may wait for a long time in silence: pings go on all the same.
    ("grpc.http2.max_pings_without_data", 0),
)


class PeerState(Enum):
    """Where the handshake with a peer stands."""

    CONNECTING = auto()
    READY = auto()
    REFUSED = auto()
    """The peer answers but does not fit."""


class Refused(Exception):
    """A peer does not fit. The message says why."""


class Stream(Protocol):
    """A session's stream to a peer."""

    def abandon(self) -> None:
        """Breaks the stream: nothing more will come."""


class Peer(ABC):
    """One model service: its channel, and the state of the handshake."""

    name = "peer"

    def __init__(
        self,
        address: str,
        silence: float,
        on_change: Callable[[], None],
        tls: ClientTls | None = None,
    ) -> None:
        """
        Args:
            address: host:port.
            silence: seconds without a sign of life after which the peer is asked for one, and as
                many again until it is taken for lost.
            on_change: called whenever the state changes.
            tls: how to speak TLS. None is plaintext.
        """
        self.state = PeerState.CONNECTING
        self.reason = f"not connected to {address} yet"
        """Why the peer is not ready, for people."""
        self.address = address
        self.sessions = 0
        """How many are open there."""
        self.streams: WeakSet[Stream] = WeakSet()
        """To be broken if the peer falls silent."""
        self.connection = 0
        """Counts the handshakes that were made because one before was lost."""
        self.breaker = Breaker()
        self._silence = silence
        milliseconds = int(silence * 1000)
        keepalive = (
            ("grpc.keepalive_time_ms", milliseconds),
            ("grpc.keepalive_timeout_ms", milliseconds),
        )
        self._channel = RenewedChannel(address, tls, (*_CHANNEL_OPTIONS, *keepalive))
        self._on_change = on_change
        self._lost = asyncio.Event()
        self._complained = False

    @abstractmethod
    async def _handshake(self) -> None:
        """One attempt. Raises AioRpcError to be tried again, Refused if the peer does not fit."""

    async def stay_connected(self) -> None:
        """Makes the handshake, and makes it anew whenever `lost` was called, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._channel.stay_renewed())
            await self._keep_shaking_hands()

    async def _keep_shaking_hands(self) -> None:
        while True:
            await self._shake_hands()
            self._lost.clear()
            try:
                # Again now and then: it may not fit any more, or fit now, or answer pings and
                # nothing else.
                await asyncio.wait_for(self._until_lost(), 2 * self._silence)
            except TimeoutError:
                continue
            self.connection += 1
            # A connection that ends at once, again and again, is not to keep this process busy.
            await asyncio.sleep(_PAUSE_SECONDS)

    async def close(self) -> None:
        """Closes the channel, and with it every stream."""
        await self._channel.close()

    async def _until_lost(self) -> None:
        """Waits until `lost` is called or the connection ends: what answers then may be new.

        It may end in good order, because of its age. Nobody is to notice that: the peer is ready
        until an attempt to reach it again has failed.
        """
        told = asyncio.create_task(self._lost.wait())
        broken = asyncio.create_task(self._channel.until_broken())
        try:
            await asyncio.wait({told, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            broken.cancel()

    def lost(self) -> None:
        """Says that a call failed in a way that a restart of the peer would explain."""
        self._set(PeerState.CONNECTING, f"lost {self.address}, reconnecting")
        self.doubted()

    def doubted(self) -> None:
        """Has the handshake made anew. Until that fails the peer is as ready as it was: what failed
        may have been the fault of one session."""
        self._lost.set()

    async def _shake_hands(self) -> None:
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(grpc.aio.AioRpcError),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=0.5),
            before_sleep=self._explain,
        )
        try:
            await attempts(self._attempt)
        except Refused as refusal:
            self._set(PeerState.REFUSED, str(refusal))
        except Exception as error:
            # What it sent cannot be used, for example a tokenizer of a newer format.
            _log.exception("handshake failed", peer=self.name)
            self._set(PeerState.REFUSED, f"{type(error).__name__}: {error}")
        else:
            self._set(PeerState.READY, "")

    async def _attempt(self) -> None:
        try:
            await self._handshake()
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                for stream in list(self.streams):
                    stream.abandon()
            raise

    def _explain(self, retry: tenacity.RetryCallState) -> None:
        error = retry.outcome.exception() if retry.outcome else None
        if not isinstance(error, grpc.aio.AioRpcError):
            return
        reason = f"{self.address}: {tls_trouble(error) or describe(error)}"
        if self.state is not PeerState.CONNECTING:
            self._set(PeerState.CONNECTING, reason)
        # Services start in any order: the first seconds without a peer are nothing to report.
        if (retry.seconds_since_start or 0.0) > _QUIET_SECONDS and not self._complained:
            self._complained = True
            _log.warning("still connecting", peer=self.name, error=reason)
        self.reason = reason

    def _set(self, state: PeerState, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason, self._complained = state, reason, False
        log = _log.warning if state is PeerState.REFUSED else _log.info
        log("peer", peer=self.name, address=self.address, state=state.name, reason=reason)
        self._on_change()
