"""The replicas of a service: which there are, and which one a session goes to."""

from __future__ import annotations

import asyncio
import hashlib
import math
import socket
from collections.abc import Callable, Container, Sequence
from typing import Generic, TypeVar

import structlog

from gateway.peer import Peer, PeerState

P = TypeVar("P", bound=Peer)
_log = structlog.get_logger()

DNS = "dns:"
"""Before a host name and port: every address of the name is a replica."""
_RESOLVE_SECONDS = 5.0
_SHARE = 1.25
"""How much more than its even share of the sessions a replica gets for having the prefix cached."""


class Replicas(Generic[P]):
    """The replicas of one service, each with its connection."""

    def __init__(
        self,
        addresses: Sequence[str],
        connect: Callable[[str], P],
        on_change: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            addresses: host:port of each, or dns:host:port for every address of a name, which is
                looked up again every few seconds (a headless Service of Kubernetes).
            connect: makes a replica's peer.
            on_change: called whenever replicas have come or gone.
        """
        self._fixed = [a for a in addresses if not a.startswith(DNS)]
        self._names = [a.removeprefix(DNS) for a in addresses if a.startswith(DNS)]
        self._connect, self._on_change = connect, on_change
        self._peers: dict[str, P] = {address: connect(address) for address in self._fixed}
        self._connecting: dict[str, asyncio.Task[None]] = {}
        self._retired: set[P] = set()
        """Whose address is gone, and that still have sessions."""
        self._found: dict[str, set[str]] = {}
        """The addresses of each name."""

    def __bool__(self) -> bool:
        """Whether there is anything to connect to."""
        return bool(self._fixed or self._names)

    @property
    def ready(self) -> list[P]:
        """Those that the handshake was made with."""
        return [peer for peer in self._peers.values() if peer.state is PeerState.READY]

    @property
    def reason(self) -> str:
        """Why none is ready, for people."""
        if not self._peers:
            return f"no address for {', '.join(self._names)}"
        return "; ".join(peer.reason for peer in self._peers.values() if peer.reason)

    def choose(self, key: bytes, fits: Callable[[P], bool], tried: Container[P] = ()) -> P | None:
        """The replica for a session.

        Sessions of the same key go to the same replica, which has their common beginning cached,
        unless it has more than its share of all sessions already: consistent hashing with bounded
        loads (arXiv 1608.01350), by rendezvous.

        Args:
            key: of what the sessions have in common.
            fits: whether a replica is one that can be used.
            tried: replicas to take only if there is no other.

        Returns:
            The replica, or None if none fits.
        """
        fitting = [peer for peer in self.ready if fits(peer)]
        # One that has just failed is still better than none.
        for wanted in (
            [peer for peer in fitting if peer.breaker.lets_in and peer not in tried],
            [peer for peer in fitting if peer not in tried],
            fitting,
        ):
            if wanted:
                return self._share(key, wanted)
        return None

    async def stay_connected(self) -> None:
        """Keeps all connections, and finds replicas that come and go, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for address, peer in self._peers.items():
                self._connecting[address] = tasks.create_task(peer.stay_connected())
            while self._names:
                await self._resolve(tasks)
                await self._retire()
                await asyncio.sleep(_RESOLVE_SECONDS)

    async def close(self) -> None:
        """Closes all channels, and with them every stream."""
        for peer in (*self._peers.values(), *self._retired):
            await peer.close()

    def _share(self, key: bytes, peers: Sequence[P]) -> P:
        sessions = sum(peer.sessions for peer in peers) + 1
        most = math.ceil(_SHARE * sessions / len(peers))
        ranked = sorted(peers, key=lambda peer: _rank(key, peer.address))
        return next(peer for peer in ranked if peer.sessions < most)

    async def _resolve(self, tasks: asyncio.TaskGroup) -> None:
        """Looks the names up, and takes in what has changed."""
        for name in self._names:
            host, _, port = name.rpartition(":")
            try:
                found = await asyncio.get_running_loop().getaddrinfo(
                    host.strip("[]"), int(port), type=socket.SOCK_STREAM
                )
            except (OSError, UnicodeError) as error:
                # A name server that is away takes no replica away.
                _log.debug("name not found", name=host, error=str(error))
                continue
            self._found[name] = {_host_port(entry[4]) for entry in found}
        wanted = {*self._fixed, *(a for addresses in self._found.values() for a in addresses)}
        known = set(self._peers)
        for address in wanted - known:
            peer = self._peers[address] = self._connect(address)
            self._connecting[address] = tasks.create_task(peer.stay_connected())
        for address in known - wanted:
            self._connecting.pop(address).cancel()
            self._retired.add(self._peers.pop(address))
        if wanted != known:
            self._on_change()

    async def _retire(self) -> None:
        """Closes the channels of those that are gone, once their sessions have ended."""
        for peer in [peer for peer in self._retired if not peer.sessions]:
            self._retired.discard(peer)
            await peer.close()


def _rank(key: bytes, address: str) -> bytes:
    return hashlib.blake2b(key + address.encode(), digest_size=8).digest()


def _host_port(address: tuple[object, ...]) -> str:
    host, port = str(address[0]), address[1]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
