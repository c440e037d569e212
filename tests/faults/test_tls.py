"""TLS on every link: who belongs gets in, and all others are told what is wrong."""

from __future__ import annotations

import asyncio
import socket
import struct
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from gateway import __main__ as gateway_main
from gateway.peer_tls import by_address
from gateway.peers import VerifierPeer
from gateway.settings import GatewaySettings
from specdec import serving
from specdec.channels import ClientTls, open_channel
from specdec.cli.client import Result, explain, stream
from specdec.cli.health import check
from specdec.errors import reason_of
from specdec.services import GATEWAY
from specdec.settings import load
from specdec.tls import TlsFiles, Watched
from specdec.v1 import gateway_pb2, verifier_pb2, verifier_pb2_grpc
from tests import stack
from tests.cli import specdec
from tests.faults.certificates import Authority, peer_options, server_options
from tests.faults.tls_server import listening

SERVING = health_pb2.HealthCheckResponse.SERVING
REQUEST = gateway_pb2.GenerateRequest(text="Once upon a time")


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ours")


@pytest.fixture
def stranger(tmp_path: Path) -> Authority:
    """Another CA, which nobody trusts."""
    return Authority(tmp_path / "theirs")


async def complaint(address: str, tls: ClientTls | None) -> str:
    """What a client of the gateway is told that cannot call it."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in stream(address, REQUEST, Result(), tls):
            pass
    return explain(caught.value, address)


async def peer_complaint(address: str, tls: ClientTls | None) -> str:
    """What a gateway says of a verifier that it cannot call."""
    peer = VerifierPeer(address, 5.0, lambda: None, {}, tls)
    before = peer.reason
    connecting = asyncio.create_task(peer.stay_connected())
    try:
        for _ in range(1000):
            if peer.reason != before:
                break
            await asyncio.sleep(0.01)
        return peer.reason
    finally:
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)
        await peer.close()


# --- Who belongs --------------------------------------------------------------------------------


@pytest.mark.slow
async def test_generating_over_mutual_tls_gives_what_plaintext_gives(
    authority: Authority, target_folder: Path, draft_folder: Path
) -> None:
    request: dict[str, Any] = {"max_new_tokens": 24, "temperature": 0.0, "ignore_eos": True}
    async with stack.pair(target_folder, draft_folder) as plain:
        expected = await plain.generate("Once upon a time", **request)
    for_gateway = server_options(authority.issue("service"), "the-gateway")
    front = authority.issue("the-gateway")
    client = authority.issue("a-client")
    async with AsyncExitStack() as running:
        options = {**for_gateway, "health_port": stack.free_port()}
        verifier, _ = await running.enter_async_context(stack.verifier(target_folder, **options))
        options = {**for_gateway, "health_port": stack.free_port()}
        draft, _ = await running.enter_async_context(stack.draft(draft_folder, **options))
        address = (
            await running.enter_async_context(
                stack.gateway(
                    verifier,
                    draft,
                    health_port=stack.free_port(),
                    **server_options(front),
                    **peer_options(front),
                )
            )
        ).address
        channel = open_channel(address, ClientTls(Watched(client)))
        secure = stack.Gateway(address, await running.enter_async_context(channel))
        await stack.drafts_are_used(secure)
        got = await secure.generate("Once upon a time", **request)
        assert got.token_ids == expected.token_ids
        assert got.speculation.num_accepted_tokens == expected.speculation.num_accepted_tokens > 0

        flags = ("--tls-ca", authority.ca_file, "--tls-cert", client.cert, "--tls-key", client.key)
        assert client.cert is not None
        assert client.key is not None
        command = ("generate", "Once upon a time", "--address", address, "--temperature", "0")
        limits = ("--max-new-tokens", "24", "--ignore-eos")
        told = await specdec(*command, *limits, *flags)
        assert (told.status, told.out.rstrip("\n")) == (0, expected.text.rstrip("\n"))
        variables = {
            "SPECDEC_TLS_CA": str(authority.ca_file),
            "SPECDEC_TLS_CERT": str(client.cert),
            "SPECDEC_TLS_KEY": str(client.key),
        }
        ready = await specdec("health", "gateway", "--gateway", address, **variables)
        assert (ready.status, ready.err) == (0, "")
        # The services let in the gateway alone.
        refused = await specdec("health", "draft", "--draft", draft, **variables)
        assert refused.status == 1
        assert "PERMISSION_DENIED" in refused.out


@pytest.mark.parametrize("known_by", ["common name", "DNS name", "URI"])
async def test_a_client_is_known_by_any_name_in_its_certificate(
    authority: Authority, known_by: str
) -> None:
    uri = "spiffe://specdec/ns/default/sa/gateway"
    allowed = ("front", "gateway.specdec.svc", uri)
    clients = {
        "common name": lambda: authority.issue("front", "unlisted"),
        "DNS name": lambda: authority.issue("unlisted", "gateway.specdec.svc"),
        "URI": lambda: authority.issue_uri("unlisted", uri),
    }
    options = server_options(authority.issue("server"), *allowed)
    async with listening(**options) as (address, _):
        tls = ClientTls(Watched(clients[known_by]()))
        assert await check(GATEWAY, address, tls) is None


# --- Who does not -------------------------------------------------------------------------------

HANDSHAKE = "ends new connections at once"


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("client of another CA", HANDSHAKE),
        ("expired client", HANDSHAKE),
        ("client without certificate", HANDSHAKE),
        ("plaintext client", HANDSHAKE),
        ("server of another CA", "its certificate is not trusted (unable to get local issuer"),
        ("expired server", "its certificate is not trusted (certificate has expired)"),
        ("server of another name", "its certificate is for another name"),
        ("plaintext server", "it speaks no TLS"),
    ],
)
async def test_who_does_not_belong_is_refused_and_told_why(
    authority: Authority, stranger: Authority, case: str, said: str
) -> None:
    server = server_options(authority.issue("server"))
    tls: ClientTls | None = authority.client("client")
    ours = authority.ca_file
    match case:
        case "client of another CA":
            theirs = stranger.issue("client")
            tls = ClientTls(Watched(TlsFiles(ours, theirs.cert, theirs.key)))
        case "expired client":
            tls = authority.client("client", expired=True)
        case "client without certificate":
            tls = ClientTls(Watched(TlsFiles(ours)))
        case "plaintext client":
            tls = None
        case "server of another CA":
            theirs = stranger.issue("server")
            server = server_options(TlsFiles(ours, theirs.cert, theirs.key))
        case "expired server":
            server = server_options(authority.issue("server", expired=True))
        case "server of another name":
            server = server_options(authority.issue("server", "elsewhere.example"))
        case "plaintext server":
            server = {}
    async with listening(**server) as (address, _):
        told = await complaint(address, tls)
        assert told.startswith(f"no TLS with the gateway at {address}: ")
        assert said in told
        assert said in (await check(GATEWAY, address, tls) or "")
        assert said in await peer_complaint(address, tls)


async def test_a_server_of_another_name_is_trusted_if_that_name_is_given(
    authority: Authority,
) -> None:
    async with listening(**server_options(authority.issue("server", "elsewhere.example"))) as (
        at,
        _,
    ):
        client = Watched(authority.issue("client"))
        assert await check(GATEWAY, at, ClientTls(client, "elsewhere.example")) is None


async def test_the_host_that_is_looked_up_is_the_name_that_its_addresses_must_have(
    authority: Authority,
) -> None:
    tls = authority.client("gateway")
    given = ["127.0.0.1:1", "dns:verifiers.example:1"]
    for_address = by_address(tls, given)
    assert for_address("127.0.0.1:1") == tls
    assert for_address("10.0.0.7:1") == ClientTls(tls.files, "verifiers.example")
    assert by_address(None, given)("10.0.0.7:1") is None
    named = ClientTls(tls.files, "any.example")
    assert by_address(named, given)("10.0.0.7:1") == named
    with pytest.raises(serving.StartError, match="--peer-tls-name"):
        by_address(tls, [*given, "dns:others.example:1"])


async def test_nobody_there_is_not_taken_for_trouble_with_tls(authority: Authority) -> None:
    nowhere = f"127.0.0.1:{stack.free_port()}"
    tls = authority.client("client")
    assert (await complaint(nowhere, tls)).startswith(f"no gateway at {nowhere}: start one")
    assert await check(GATEWAY, nowhere, tls) == "nothing answers there"
    assert "refused" in await peer_complaint(nowhere, tls)


async def test_a_certificate_of_the_right_ca_with_a_wrong_name_may_call_nothing(
    authority: Authority, target_folder: Path
) -> None:
    options = {
        **server_options(authority.issue("server"), "the-gateway"),
        "health_port": stack.free_port(),
    }
    tls = authority.client("somebody", "some.body")
    async with stack.verifier(target_folder, **options) as (address, _):
        assert "for some.body, somebody" in (told := await peer_complaint(address, tls))
        assert "PERMISSION_DENIED" in told
        async with open_channel(address, tls) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            service = verifier_pb2_grpc.VerifierServiceStub(channel)
            calls = (
                health.Check(health_pb2.HealthCheckRequest()),
                health.Watch(health_pb2.HealthCheckRequest()).read(),
                reflection.ServerReflectionInfo(
                    iter([reflection_pb2.ServerReflectionRequest(list_services="")])
                ).read(),
                service.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest()),
                service.GetTokenizer(verifier_pb2.GetTokenizerRequest()).read(),
                service.Verify(iter([verifier_pb2.VerifyRequest()])).read(),
            )
            for call in calls:
                with pytest.raises(grpc.aio.AioRpcError) as caught:
                    await call
                assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
                assert reason_of(caught.value) == "PERMISSION_DENIED"


# --- Probes -------------------------------------------------------------------------------------


async def test_the_health_port_speaks_plaintext_and_of_health_alone(authority: Authority) -> None:
    port = stack.free_port()
    options = server_options(authority.issue("server"), "the-gateway")
    async with listening(**options, health_port=port) as (address, _):
        assert HANDSHAKE in (await check(GATEWAY, address) or "")
        assert await check(GATEWAY, f"127.0.0.1:{port}") is None
        async with open_channel(f"127.0.0.1:{port}") as channel:
            reflection = reflection_pb2_grpc.ServerReflectionStub(channel)
            request = reflection_pb2.ServerReflectionRequest(list_services="")
            call = reflection.ServerReflectionInfo(iter([request]))
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
            watch = health_pb2_grpc.HealthStub(channel).Watch(
                health_pb2.HealthCheckRequest(service=GATEWAY.full_name)
            )
            assert (await watch.read()).status == SERVING
            watch.cancel()


# --- Settings -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--tls-cert=a"], "tls_cert needs tls_key too"),
        (["--tls-key=a"], "tls_key needs tls_cert too"),
        (["--tls-client-ca=a"], "tls_client_ca needs tls_cert and tls_key too"),
        (["--tls-client-names=a"], "tls_client_names needs tls_client_ca too"),
        (["--port=7", "--health-port=7"], "health_port and port are both 7"),
        (["--peer-tls-cert=a", "--peer-tls-ca=a"], "peer_tls_cert needs peer_tls_key too"),
        (["--peer-tls-cert=a", "--peer-tls-key=a"], "peer_tls_ca is needed too"),
        (["--peer-tls-name=a"], "peer_tls_ca is needed too"),
        (
            ["--tls-cert=a", "--tls-key=a", "--tls-client-ca=a", "--tls-client-names=a,"],
            "tls_client_names has an empty name",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(flags: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as caught:
        load(GatewaySettings, flags)
    assert str(caught.value.code).startswith(f"error: {said}")
    assert "\n" not in str(caught.value.code)


@pytest.mark.parametrize("prefix", ["", "peer_"])
@pytest.mark.parametrize(
    ("broken", "said"),
    [
        ("missing", r"cannot read .*service\.crt: No such file or directory"),
        ("mismatched", r"the key in .*service\.key is not that of the certificate in .*\.crt"),
        (
            "cut",
            r".*service\.crt and .*service\.key are not a whole certificate and its key .*",
        ),
        ("no CA", r".*ca\.crt is no PEM file of certificates of CAs, or not a whole one"),
    ],
)
async def test_a_service_does_not_start_with_files_that_cannot_be_used(
    authority: Authority, prefix: str, broken: str, said: str
) -> None:
    files = authority.issue("service")
    assert files.cert is not None
    assert files.key is not None
    match broken:
        case "missing":
            files.cert.unlink()
        case "mismatched":
            files.key.write_bytes(authority.ca.issue_cert("other").private_key_pem.bytes())
        case "cut":
            files.cert.write_bytes(files.cert.read_bytes()[:200])
        case "no CA":
            authority.ca_file.write_text("no certificate")
    options = peer_options(files) if prefix else server_options(files)
    settings = GatewaySettings(port=stack.free_port(), draft_address="", **options)
    with pytest.raises(serving.StartError, match=rf"\A{said}\Z"):
        await gateway_main.serve(settings)


async def test_the_command_line_refuses_half_of_the_flags(authority: Authority) -> None:
    files = authority.issue("client")
    assert files.cert is not None
    told = await specdec("health", "--tls-cert", files.cert)
    assert told.status == 2
    assert "--tls-cert needs --tls-key too" in told.err
    unreadable = await specdec("generate", "x", "--tls-ca", authority.folder / "none.crt")
    assert unreadable.error.startswith("cannot read ")
    ignored = await specdec("bench", "--tls-ca", authority.ca_file)
    assert ignored.status == 2
    assert "--address" in ignored.err


# --- Limits -------------------------------------------------------------------------------------


async def test_a_connection_has_a_limit_of_calls() -> None:
    def announced(port: int) -> int | None:
        """What the server's SETTINGS say of MAX_CONCURRENT_STREAMS (RFC 9113, 6.5.2)."""
        with socket.create_connection(("127.0.0.1", port), 10) as raw:
            raw.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\4\0\0\0\0\0")
            header = raw.recv(9, socket.MSG_WAITALL)
            assert header[3] == 4  # SETTINGS
            content = raw.recv(int.from_bytes(header[:3]), socket.MSG_WAITALL)
        return dict(struct.iter_unpack("!HI", content)).get(3)

    health_port = stack.free_port()
    async with listening(health_port=health_port) as (address, _):
        port = int(address.rpartition(":")[2])
        assert await asyncio.to_thread(announced, port) == 2048
        assert await asyncio.to_thread(announced, health_port) == 64
