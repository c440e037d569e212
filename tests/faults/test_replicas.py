"""Which replica a session goes to, and for how long one that failed is left alone."""

from __future__ import annotations

import asyncio
import socket
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from gateway.breaker import Breaker
from gateway.peer import PeerState
from gateway.replicas import Replicas
from tests.stack import free_port, gateway, verifier

ADDRESSES = [f"replica-{n}:50053" for n in range(4)]


class FakePeer:
    """As much of a peer as is looked at."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.sessions = 0
        self.state = PeerState.READY
        self.reason = f"{address} is away"
        self.breaker = Breaker(jitter=lambda: 0.0)
        self.closed = False

    async def stay_connected(self) -> None:
        await asyncio.Event().wait()

    async def close(self) -> None:
        self.closed = True


def replicas(addresses: list[str] = ADDRESSES) -> tuple[Replicas[Any], dict[str, FakePeer]]:
    made: dict[str, FakePeer] = {}

    def connect(address: str) -> Any:
        made[address] = FakePeer(address)
        return made[address]

    return Replicas(addresses, connect), made


def fits(_: Any) -> bool:
    return True


def test_sessions_of_a_key_go_to_the_same_replica_and_keys_are_spread() -> None:
    service, _ = replicas()
    chosen = {n: service.choose(b"%d" % n, fits) for n in range(400)}
    assert all(service.choose(b"%d" % n, fits) is peer for n, peer in chosen.items())
    counts = Counter(peer.address for peer in chosen.values())
    assert all(60 <= counts[address] <= 140 for address in ADDRESSES), counts


def test_a_key_that_all_share_is_spread_once_a_replica_has_its_share() -> None:
    service, made = replicas()
    for _ in range(100):
        service.choose(b"the same system prompt", fits).sessions += 1
    counts = sorted(peer.sessions for peer in made.values())
    assert max(counts) <= 32  # 1.25 of an even share, rounded up
    assert min(counts) > 0


def test_when_a_replica_goes_only_its_keys_move() -> None:
    service, made = replicas()
    before = {n: service.choose(b"%d" % n, fits) for n in range(200)}
    gone = made[ADDRESSES[1]]
    gone.state = PeerState.CONNECTING
    for n, peer in before.items():
        after = service.choose(b"%d" % n, fits)
        assert after is not gone
        assert (after is peer) == (peer is not gone)


def test_what_failed_is_taken_only_if_there_is_nothing_else() -> None:
    service, made = replicas(ADDRESSES[:2])
    first = service.choose(b"key", fits)
    other = next(peer for peer in made.values() if peer is not first)
    first.breaker.failed("out of memory")
    assert service.choose(b"key", fits) is other
    assert service.choose(b"key", fits, tried={other}) is first
    assert service.choose(b"key", fits, tried={first, other}) in (first, other)
    assert service.choose(b"key", lambda peer: peer is first) is first
    assert service.choose(b"key", lambda peer: False) is None
    for peer in made.values():
        peer.state = PeerState.REFUSED
    assert service.choose(b"key", fits) is None
    assert all(address in service.reason for address in ADDRESSES[:2])


def test_the_pause_of_a_breaker_doubles_up_to_half_a_minute_and_a_success_ends_it() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now, jitter=lambda: 1.0)
    pauses = []
    for _ in range(9):
        breaker.failed("out of memory")
        assert breaker.reason == "out of memory"
        began = now
        while not breaker.lets_in:
            now += 0.125
        pauses.append(now - began)
    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    breaker.succeeded()
    assert breaker.reason == ""
    breaker.failed("")
    now += 0.5
    assert breaker.lets_in


def test_one_session_tries_an_endpoint_again_and_the_others_wait_for_it() -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now, jitter=lambda: 1.0)
    breaker.tries()
    assert breaker.lets_in  # It has not failed yet.
    breaker.failed("")
    now = 0.5
    assert breaker.lets_in
    breaker.tries()
    assert not breaker.lets_in
    breaker.succeeded()
    assert breaker.lets_in
    # One that leaves without a word holds up the others for a moment only.
    breaker.failed("")
    now = 1.0
    breaker.tries()
    assert not breaker.lets_in
    now = 3.0
    assert breaker.lets_in


@pytest.mark.parametrize("jitter", [0.0, 0.5])
def test_pauses_are_jittered(jitter: float) -> None:
    now = 0.0
    breaker = Breaker(clock=lambda: now, jitter=lambda: jitter)
    breaker.failed("")
    now = 0.249 + jitter / 4
    assert not breaker.lets_in
    now += 0.001
    assert breaker.lets_in


async def test_replicas_of_a_name_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the pods behind a headless Service do."""
    found: list[str] = ["10.0.0.1", "10.0.0.2"]
    looked = asyncio.Event()

    async def getaddrinfo(host: str, port: int, **_: Any) -> list[Any]:
        looked.set()
        assert host == "verifiers.example"
        if not found:
            raise socket.gaierror
        return [(0, 0, 0, "", (address, port)) for address in found]

    monkeypatch.setattr("gateway.replicas._RESOLVE_SECONDS", 0.001)
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    service, made = replicas(["dns:verifiers.example:50053", "fixed:1"])
    connecting = asyncio.create_task(service.stay_connected())

    async def until_known(*addresses: str) -> None:
        async with asyncio.timeout(10):
            while {peer.address for peer in service.ready} != {"fixed:1", *addresses}:
                looked.clear()
                await looked.wait()
                await asyncio.sleep(0)

    try:
        await until_known("10.0.0.1:50053", "10.0.0.2:50053")
        busy = made["10.0.0.1:50053"]
        busy.sessions = 1
        found[:] = ["10.0.0.2", "fd00::3"]
        await until_known("10.0.0.2:50053", "[fd00::3]:50053")
        # Its sessions go on until they end.
        assert not busy.closed
        busy.sessions = 0
        while not busy.closed:
            looked.clear()
            await looked.wait()
        # A name server that is away takes no replica away.
        found.clear()
        looked.clear()
        await looked.wait()
        looked.clear()
        await looked.wait()
        await until_known("10.0.0.2:50053", "[fd00::3]:50053")
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
    await service.close()
    assert all(peer.closed for peer in made.values())


async def test_a_name_stands_for_its_addresses(target_folder: Path) -> None:
    async with (
        verifier(target_folder, host="127.0.0.1", port=(port := free_port())),
        gateway(f"dns:localhost:{port}, 127.0.0.1:{free_port()}") as running,
    ):
        result = await running.generate([5, 6], max_new_tokens=4, ignore_eos=True)
        assert len(result.token_ids) == 4
