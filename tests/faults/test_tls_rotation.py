"""Certificates are replaced while everything runs: nothing is dropped, new ones are used."""

from __future__ import annotations

import asyncio
import gc
import os
import ssl
import weakref
from collections.abc import AsyncIterator, Callable, MutableMapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import structlog
import trustme
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import channels, identities
from specdec.channels import ClientTls, RenewedChannel, open_channel
from specdec.cli.health import check
from specdec.services import GATEWAY
from specdec.tls import TlsFiles, Watched
from tests import stack
from tests.faults.certificates import Authority, peer_options, serial_of, server_options
from tests.faults.tls_server import listening

Logged = list[MutableMapping[str, Any]]
WATCHED = health_pb2.HealthCheckRequest(service=GATEWAY.full_name)
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients look at their files all the time."""
    monkeypatch.setattr(channels, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(channels, "_CONNECT_SECONDS", 1.0)


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it did not come to that")


async def shown_serial(address: str, client: TlsFiles) -> int:
    """The serial number of the certificate that a new connection is shown."""
    assert client.cert is not None
    context = ssl.create_default_context(cafile=client.ca)
    context.load_cert_chain(client.cert, client.key)
    context.set_alpn_protocols(["h2"])
    host, _, port = address.rpartition(":")
    _, writer = await asyncio.open_connection(host, int(port), ssl=context)
    shown: dict[str, Any] = writer.get_extra_info("peercert")
    writer.transport.abort()
    return int(shown["serialNumber"], 16)


# --- The server's side --------------------------------------------------------------------------


async def test_files_that_do_not_fit_change_nothing_and_are_logged_once(
    authority: Authority,
) -> None:
    client = authority.issue("client")
    tls = ClientTls(Watched(client))
    served = authority.issue("server")
    first = serial_of(served)
    with structlog.testing.capture_logs() as logged:
        async with listening(**server_options(served)) as (address, _):
            assert await shown_serial(address, client) == first
            assert served.cert is not None
            assert served.key is not None
            new = authority.ca.issue_cert("127.0.0.1")
            chain, key = new.cert_chain_pems[0].bytes(), new.private_key_pem.bytes()
            for broken, said in (
                (chain[:300], "not a whole certificate"),
                (b"", "not a whole certificate"),
                (chain, "is not that of the certificate"),
            ):
                served.cert.write_bytes(broken)
                for _ in range(3):
                    assert await shown_serial(address, client) == first
                    assert await check(GATEWAY, address, tls) is None
                assert said in _kept(logged)[-1]
            served.cert.unlink()
            assert await shown_serial(address, client) == first
            # Three complaints in all: the first two kinds of broken files are told alike.
            assert len(_kept(logged)) == 3
            served.cert.write_bytes(chain)
            served.key.write_bytes(key)
            assert await shown_serial(address, client) == serial_of(served) != first
            assert await check(GATEWAY, address, tls) is None


def _kept(logged: Logged) -> list[str]:
    return [str(e["error"]) for e in logged if e["event"] == "old certificates stay in use"]


async def test_links_that_are_exchanged_count_as_new_files(authority: Authority) -> None:
    """As Kubernetes does it for mounted secrets: the names stay, a link in their path moves."""
    volume = authority.folder / "volume"
    volume.mkdir()

    def put(version: str) -> int:
        (volume / version).mkdir()
        issued = authority.issue(version)
        assert issued.cert is not None
        assert issued.key is not None
        issued.cert.rename(volume / version / "tls.crt")
        issued.key.rename(volume / version / "tls.key")
        (volume / "..new").symlink_to(version)
        os.rename(volume / "..new", volume / "..data")
        return serial_of(files)

    for name in ("tls.crt", "tls.key"):
        (volume / name).symlink_to(Path("..data") / name)
    files = TlsFiles(authority.ca_file, volume / "tls.crt", volume / "tls.key")
    first, client = put("one"), authority.issue("client")
    async with listening(**server_options(files)) as (address, _):
        assert await shown_serial(address, client) == first
        second = put("two")
        assert await shown_serial(address, client) == second != first


# --- The client's side --------------------------------------------------------------------------


async def test_a_channel_is_replaced_under_its_calls(authority: Authority) -> None:
    files = authority.issue("client")
    async with listening(**server_options(authority.issue("server"))) as (address, health):
        channel = RenewedChannel(address, ClientTls(Watched(files)), ())
        renewing = asyncio.create_task(channel.stay_renewed())
        old = weakref.ref(channel.current)
        call = health_pb2_grpc.HealthStub(channel.current).Watch(WATCHED)
        assert (await call.read()).status == SERVING
        broken = asyncio.create_task(channel.until_broken())
        authority.issue("client")
        await until(lambda: channel.current is not old())
        stub = health_pb2_grpc.HealthStub(channel.current)
        assert (await stub.Check(WATCHED)).status == SERVING
        # The call of before goes on, on the channel of before, which ends with it.
        health.set(False)
        assert (await call.read()).status == NOT_SERVING
        assert not broken.done()
        call.cancel()
        del call
        await until(lambda: gc.collect() >= 0 and old() is None)
        renewing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await renewing
    await asyncio.wait_for(broken, 20)
    await channel.close()


async def test_a_channel_that_gets_no_connection_does_not_replace_one_that_has(
    authority: Authority, tmp_path: Path
) -> None:
    files = authority.issue("client")
    tls = ClientTls(Watched(files))
    with structlog.testing.capture_logs() as logged:
        async with listening(**server_options(authority.issue("server"))) as (address, _):
            channel = RenewedChannel(address, tls, ())
            renewing = asyncio.create_task(channel.stay_renewed())
            working = channel.current
            assert (await health_pb2_grpc.HealthStub(working).Check(WATCHED)).status == SERVING
            other = trustme.CA().issue_cert("127.0.0.1")
            authority.write(
                "client", other.cert_chain_pems[0].bytes(), other.private_key_pem.bytes()
            )
            refused = "no connection with the new certificates"
            await until(lambda: any(event["event"] == refused for event in logged))
            assert channel.current is working
            assert (await health_pb2_grpc.HealthStub(working).Check(WATCHED)).status == SERVING
            authority.issue("client")
            await until(lambda: channel.current is not working)
            current = health_pb2_grpc.HealthStub(channel.current)
            assert (await current.Check(WATCHED)).status == SERVING
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            await channel.close()


# --- All of it ----------------------------------------------------------------------------------

NAMES = ("service", "the-gateway", "a-client")


@asynccontextmanager
async def secured(
    authority: Authority, target_folder: Path, draft_folder: Path
) -> AsyncIterator[str]:
    """The three services with certificates of their own. Yields the gateway's address."""
    service, front, _ = (authority.issue(name) for name in NAMES)
    options = server_options(service, "the-gateway")
    async with (
        stack.verifier(target_folder, health_port=stack.free_port(), **options) as (verifier, _),
        stack.draft(draft_folder, health_port=stack.free_port(), **options) as (draft, _),
        stack.gateway(
            *(verifier, draft),
            **{"health_port": stack.free_port(), **server_options(front), **peer_options(front)},
        ) as gateway,
    ):
        yield gateway.address


@pytest.fixture
def callers(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The serial numbers of the certificates that services were called with."""
    seen: set[int] = set()
    names_of = identities.names_of

    def noted(context: identities.Context) -> list[str]:
        pem = context.auth_context()["x509_pem_cert"][0]
        seen.add(x509.load_pem_x509_certificate(pem).serial_number)
        return names_of(context)

    monkeypatch.setattr(identities, "names_of", noted)
    return seen


@pytest.mark.slow
async def test_replacing_all_certificates_under_load_drops_nothing(
    authority: Authority, target_folder: Path, draft_folder: Path, callers: set[int]
) -> None:
    front, client = authority.files("the-gateway"), authority.files("a-client")
    finished, over = 0, asyncio.Event()

    async def more(count: int) -> None:
        """Waits until so many more calls have ended well."""
        before = finished
        await until(lambda: finished >= before + count)

    async with secured(authority, target_folder, draft_folder) as address:
        tls = ClientTls(Watched(client))

        async def generate() -> list[int]:
            async with open_channel(address, tls) as channel:
                result = await stack.Gateway(address, channel).generate(
                    [7, 8, 9], temperature=0.0, max_new_tokens=60, ignore_eos=True
                )
                assert not result.speculation.fallback_reason
                return result.token_ids

        async def load() -> None:
            nonlocal finished
            while not over.is_set():
                assert await generate() == expected
                finished += 1

        async with open_channel(address, tls) as channel:
            await stack.drafts_are_used(stack.Gateway(address, channel))
        expected = await generate()
        async with asyncio.TaskGroup() as tasks:
            for _ in range(3):
                tasks.create_task(load())
            await more(3)
            shown = {await shown_serial(address, client)}
            for name in NAMES:
                authority.issue(name)
            await until(lambda: serial_of(front) in callers)
            await more(4)
            shown.add(await shown_serial(address, client))
            # Then a new CA: first both are trusted, then it signs, then the old one goes.
            old, authority.ca = authority.ca, trustme.CA()
            authority.ca_file.write_bytes(old.cert_pem.bytes() + authority.ca.cert_pem.bytes())
            await more(6)
            for name in NAMES:
                authority.issue(name)
            await until(lambda: serial_of(front) in callers)
            await more(4)
            authority.ca_file.write_bytes(authority.ca.cert_pem.bytes())
            await more(6)
            shown.add(await shown_serial(address, client))
            over.set()
    assert len(shown) == 3
    assert serial_of(front) in shown
