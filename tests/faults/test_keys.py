"""API keys: who is let in, how much each may ask for, and that tenants share nothing."""

from __future__ import annotations

import asyncio
import hmac
import json
import os
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import grpc
import pytest
import pytest_asyncio
import yaml
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from typer.testing import CliRunner

import gateway.keys
from gateway.key_file import KeyFileError, add_key, digest_of, new_key, parse
from gateway.keys import Keys, tenant_salt
from gateway.throttle import Throttle
from specdec import services
from specdec.channels import open_channel
from specdec.cli.health import check
from specdec.cli.main import app
from specdec.errors import SpecdecError
from specdec.v1 import gateway_pb2_grpc
from tests.cli import specdec
from tests.faults.guarded import Guarded, guarded, refused, result, retry_delay, until
from tests.stack import Result, verifier
from verifier_service.service import VerifierServicer

UNAUTHENTICATED = (grpc.StatusCode.UNAUTHENTICATED, "UNAUTHENTICATED")
EXHAUSTED = (grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED")
Target = tuple[str, VerifierServicer]


@pytest_asyncio.fixture(scope="module")
async def target(target_folder: Path) -> AsyncIterator[Target]:
    async with verifier(target_folder) as running:
        yield running


def write(path: Path, tenants: dict[str, dict[str, Any]]) -> dict[str, str]:
    """A file of tenants with these limits, one new key each. Returns the keys."""
    keys = {name: new_key() for name in tenants}
    accounts = {
        name: {"sha256": [digest_of(keys[name])], **account} for name, account in tenants.items()
    }
    path.write_text(yaml.safe_dump({"tenants": accounts}))
    return keys


class Context:
    """As much of a call as is needed to see who calls."""

    def __init__(self, *metadata: tuple[str, str | bytes]) -> None:
        self._metadata = metadata

    def invocation_metadata(self) -> Sequence[tuple[str, str | bytes]]:
        return self._metadata


def bearer(key: str) -> Any:
    return Context(("x-request-id", "1"), ("authorization", f"Bearer {key}"))


# --- The gateway -------------------------------------------------------------------------------


async def test_only_known_keys_are_let_in_and_no_log_has_one(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any, caplog: Any
) -> None:
    keys = write(tmp_path / "keys.yaml", {"alice": {}})
    async with guarded(target, monkeypatch, keys_file=tmp_path / "keys.yaml") as server:
        request = server.gateway.request("a secret prompt", max_new_tokens=3)
        stranger = new_key()
        metadata = (
            None,
            (("authorization", f"Bearer {stranger}"),),
            (("authorization", keys["alice"]),),
            (("authorization", f"Basic {keys['alice']}"),),
            (("authorization", "Bearer"),),
            (("authorization", f"Bearer {keys['alice']}"), ("authorization", "Bearer x")),
        )
        outcomes = [await server.send(request, metadata=each) for each in metadata]
        errors = refused(outcomes, *UNAUTHENTICATED)
        assert len(errors) == len(outcomes)
        for error in errors:
            assert isinstance(error, grpc.aio.AioRpcError)
            assert "'authorization'" in (error.details() or "")
        answer = result(await server.send(request, keys["alice"]))
        assert result(await server.send(request, metadata=(_lower(keys["alice"]),))).token_ids
        # What asks for health or for the contract gets neither prompts nor answers.
        assert await check(services.GATEWAY, server.gateway.address) is None
        assert await _listed(server) >= {services.GATEWAY.full_name}
    said = "".join(capsys.readouterr()) + caplog.text
    assert "tenant=alice" in said
    for secret in (keys["alice"], stranger, "a secret prompt", answer.text):
        assert secret not in said


def _lower(key: str) -> tuple[str, str]:
    """The scheme's name is not case-sensitive."""
    return "authorization", f"bearer {key}"


async def _listed(server: Guarded) -> set[str]:
    stub = reflection_pb2_grpc.ServerReflectionStub(server.gateway.channel)
    asked = [reflection_pb2.ServerReflectionRequest(list_services="")]
    call = stub.ServerReflectionInfo(iter(asked))
    async for response in call:
        return {service.name for service in response.list_services_response.service}
    return set()


async def test_who_asks_too_often_is_told_when_to_come_back(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    limits = {
        "often": {"requests_per_minute": 2},
        "much": {"tokens_per_minute": 30},
        "wide": {"max_sessions": 2},
        "free": {},
    }
    keys = write(tmp_path / "keys.yaml", limits)
    async with guarded(target, monkeypatch, keys_file=tmp_path / "keys.yaml") as server:
        request = server.gateway.request([5, 6, 7], max_new_tokens=40, ignore_eos=True)
        outcomes = [await server.send(request, keys["often"]) for _ in range(3)]
        errors = refused(outcomes, *EXHAUSTED)
        assert errors == outcomes[2:]
        assert 20.0 < retry_delay(errors[0]) <= 30.0
        # 3 + 40 tokens of 30 a minute: 13 are owed, and 3 more are to be there.
        outcomes = [await server.send(request, keys["much"]) for _ in range(2)]
        errors = refused(outcomes, *EXHAUSTED)
        assert errors == outcomes[1:]
        assert 25.0 < retry_delay(errors[0]) <= 32.0
        with server.held():
            running = [server.start(request, keys["wide"]) for _ in range(2)]
            await until(lambda: server.admission.running_sessions == 2)
            refused([error := await server.send(request, keys["wide"])], *EXHAUSTED)
            assert retry_delay(error) > 0.0
            free = server.start(request, keys["free"])
        for call in (*running, free):
            result(await call)
        await server.idle()


async def test_a_call_that_waited_in_vain_is_charged_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.yaml", {"free": {}, "much": {"tokens_per_minute": 30}})
    options = {"keys_file": tmp_path / "keys.yaml", "max_sessions": 1, "queue_seconds": 0.05}
    async with guarded(target, monkeypatch, **options) as server:
        request = server.gateway.request(list(range(5, 25)), max_new_tokens=2)
        with server.held():
            running = server.start(request, keys["free"])
            await until(lambda: server.admission.running_sessions == 1)
            for _ in range(2):
                refused([await server.send(request, keys["much"])], *EXHAUSTED)
        result(await running)
        result(await server.send(request, keys["much"]))


async def test_one_tenants_flood_does_not_hold_up_anothers_request(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.yaml", {"a": {}, "b": {}})
    options = {"keys_file": tmp_path / "keys.yaml", "max_sessions": 1}
    async with guarded(target, monkeypatch, **options) as server:
        request = server.gateway.request([5, 6, 7], max_new_tokens=3, ignore_eos=True)
        order: list[str] = []
        with server.held():
            flood = [server.start(request, keys["a"]) for _ in range(50)]
            await until(lambda: server.admission.num_waiting == 49)
            one = server.start(request, keys["b"])
            await until(lambda: server.admission.num_waiting == 50)
            for call in flood:
                call.add_done_callback(lambda _: order.append("a"))
            one.add_done_callback(lambda _: order.append("b"))
        for outcome in await asyncio.gather(*flood, one):
            result(outcome)
        await until(lambda: len(order) == 51)
        assert order.index("b") <= 2, order


async def test_tenants_share_no_prefix_whatever_salts_they_choose(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.yaml", {"a": {}, "b": {}, "a1": {}})
    prompt = list(range(5, 105))
    async with guarded(target, monkeypatch, keys_file=tmp_path / "keys.yaml") as server:

        async def cached(name: str, salt: str) -> int:
            request = server.gateway.request(prompt, max_new_tokens=2)
            request.prefix_cache.salt = salt
            answer: Result = result(await server.send(request, keys[name]))
            return answer.completion.usage.cached_tokens

        for name, salt in (
            ("a", ""),
            ("b", ""),
            ("a", "1"),
            ("a1", ""),
            ("b", tenant_salt("a", "")),
        ):
            assert await cached(name, salt) == 0
            assert await cached(name, salt) > 0
    # Without keys the salt is as the client gave it.
    async with guarded(target, monkeypatch) as server:
        request = server.gateway.request(prompt, max_new_tokens=2)
        request.prefix_cache.salt = tenant_salt("a", "")
        assert result(await server.send(request)).completion.usage.cached_tokens > 0


async def test_keys_are_replaced_while_it_runs_and_a_broken_file_changes_nothing(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    monkeypatch.setattr(gateway.keys, "_LOOK_SECONDS", 0.01)
    first, second = tmp_path / "1", tmp_path / "2"
    first.mkdir()
    second.mkdir()
    old, new = write(first / "keys.yaml", {"a": {}}), write(second / "keys.yaml", {"a": {}})
    (tmp_path / "now").symlink_to(first)
    path = tmp_path / "now" / "keys.yaml"
    async with guarded(target, monkeypatch, keys_file=path) as server:
        request = server.gateway.request([5, 6], max_new_tokens=2)

        async def works(key: str) -> bool:
            return isinstance(await server.send(request, key), Result)

        assert await works(old["a"])
        assert not await works(new["a"])
        (tmp_path / "next").symlink_to(second)
        os.replace(tmp_path / "next", tmp_path / "now")  # as Kubernetes does
        await _until_said(capsys, "API keys replaced")
        assert await works(new["a"])
        assert not await works(old["a"])
        for content in ("tenants: [", "tenants: {a: {sha256: [abc]}}", "", None):
            if content is None:
                (second / "keys.yaml").unlink()
            else:
                (second / "keys.yaml").write_text(content)
            said = await _until_said(capsys, "old API keys stay in use")
            assert "[abc]" not in said
            assert await works(new["a"])
        added = write(second / "keys.yaml", {"b": {}})
        await _until_said(capsys, "API keys replaced")
        assert await works(added["b"])
        assert not await works(new["a"])


async def _until_said(capsys: Any, text: str) -> str:
    said = ""
    async with asyncio.timeout(20):
        while text not in said:
            await asyncio.sleep(0.005)
            said += capsys.readouterr().out
    return said


@pytest.mark.slow
async def test_the_command_line_sends_its_key_and_never_shows_it(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = write(tmp_path / "keys.yaml", {"a": {}})
    (tmp_path / "key").write_text(f"{keys['a']}\n")
    async with guarded(target, monkeypatch, keys_file=tmp_path / "keys.yaml") as server:
        arguments = ("generate", "x", "--address", server.gateway.address, "--max-new-tokens", "2")
        runs = [
            await specdec(*arguments, SPECDEC_API_KEY=keys["a"]),
            await specdec(*arguments, "--json", "--api-key", f"@{tmp_path / 'key'}"),
            await specdec(*arguments, SPECDEC_API_KEY=new_key()),
            await specdec(*arguments),
        ]
        assert [run.status for run in runs] == [0, 0, 1, 1]
        assert runs[2].error.startswith("UNAUTHENTICATED: the API key")
        assert runs[3].error.startswith("UNAUTHENTICATED: there is no API key")
        bad = await specdec(*arguments, SPECDEC_API_KEY=f"{keys['a']}\n{keys['a']}")
        assert bad.status == 2
        for run in (*runs, bad):
            assert "sd-" not in run.out + run.err
        # Cancelled calls are cancelled at the gateway as well.
        async with open_channel(server.gateway.address, api_key=keys["a"]) as channel:
            request = server.gateway.request([5], max_new_tokens=400, ignore_eos=True)
            call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
            async for _ in call:
                break
            assert server.admission.running_sessions == 1
            call.cancel()
            await server.idle()


# --- The file ----------------------------------------------------------------------------------


def test_every_key_is_compared_in_full_and_in_constant_time(tmp_path: Path) -> None:
    known = write(tmp_path / "keys.yaml", {name: {} for name in "abcdef"})
    keys = Keys(tmp_path / "keys.yaml")
    for key, name in ((known["a"], "a"), (known["f"], "f"), (new_key(), None)):
        with patch.object(hmac, "compare_digest", wraps=hmac.compare_digest) as compare:
            if name is None:
                with pytest.raises(SpecdecError):
                    keys.caller(bearer(key))
            else:
                assert keys.caller(bearer(key)).tenant.name == name
            assert compare.call_count == 6


def test_what_was_used_up_is_remembered_when_the_file_changes_elsewhere(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    known = write(path, {"a": {"requests_per_minute": 1}})
    keys = Keys(path)
    keys.caller(bearer(known["a"])).throttle.begin()
    document = yaml.safe_load(path.read_text())
    document["tenants"]["b"] = {"sha256": [digest_of(new_key())]}
    document["tenants"]["a"]["weight"] = 2.0
    path.write_text(yaml.safe_dump(document))
    keys.reload()
    caller = keys.caller(bearer(known["a"]))
    assert caller.tenant.weight == 2.0
    with pytest.raises(SpecdecError, match="1 requests a minute"):
        caller.throttle.begin()


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        ("tenants: [", "neither YAML nor JSON"),
        ("\x00", "neither YAML nor JSON"),
        ("[" * 400, "neither YAML nor JSON"),
        ("", "file"),
        ("tenants: {a: {}}", r"tenants\.a\.sha256"),
        ("tenants: {a: {sha256: []}}", r"tenants\.a\.sha256"),
        ("tenants: {a: {sha256: [sd-the-key-itself]}}", r"tenants\.a\.sha256"),
        ("tenants: {a b: {sha256: [HASH]}}", "a b"),
        ("tenants: {a: {sha256: [HASH], max_session: 1}}", "max_session"),
        ("tenants: {a: {sha256: [HASH], weight: 0}}", "weight"),
        ("tenants: {a: {sha256: [HASH], tokens_per_minute: .nan}}", "tokens_per_minute"),
        ("tenants: {a: {sha256: [HASH]}, b: {sha256: [HASH]}}", "twice"),
    ],
)
def test_a_broken_file_is_refused_and_not_quoted(content: str, fault: str) -> None:
    with pytest.raises(KeyFileError, match=fault) as error:
        parse(content.replace("HASH", "a" * 64).encode())
    assert "sd-the-key-itself" not in str(error.value)


async def test_a_gateway_does_not_start_open_because_its_file_is_broken(
    target: Target, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match="keys_file: cannot read"):
        async with guarded(target, monkeypatch, keys_file=tmp_path / "absent.yaml"):
            pass


def test_a_new_key_is_printed_once_and_its_hash_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    printed = [
        CliRunner().invoke(app, ["keys", "new", name, "--file", str(path)]).stdout.strip()
        for name in ("a", "b", "a")
    ]
    assert len(set(printed)) == 3
    content = path.read_text()
    for key in printed:
        assert len(key) >= 43  # 256 bits in base 64
        assert key not in content
    keys = Keys(path)
    assert [keys.caller(bearer(key)).tenant.name for key in printed] == ["a", "b", "a"]


def test_a_file_keeps_its_mode_its_link_its_limits_and_its_comments(tmp_path: Path) -> None:
    path = tmp_path / "link.yaml"
    path.symlink_to(tmp_path / "keys.yaml")
    write(path, {"a": {"max_sessions": 3}})
    path.chmod(0o640)
    add_key(path, "a", new_key())
    assert path.is_symlink()
    assert path.stat().st_mode & 0o777 == 0o640
    account = parse(path.read_bytes())["a"]
    assert account.max_sessions == 3
    assert len(account.sha256) == 2
    path.write_text("# whose these are\n" + path.read_text())
    with pytest.raises(KeyFileError, match="comments"):
        add_key(path, "a", new_key())
    as_json = tmp_path / "keys.json"
    as_json.write_text(json.dumps({"tenants": {"c": {"sha256": [digest_of("k")]}}}))
    assert parse(as_json.read_bytes()).keys() == {"c"}


@pytest.mark.parametrize(
    "two", [(("a", "bc"), ("ab", "c")), (("a", ""), ("", "a")), (("a", "b"), ("a", "b\0"))]
)
def test_salts_of_different_parts_are_different(two: Any) -> None:
    assert tenant_salt(*two[0]) != tenant_salt(*two[1])
    assert tenant_salt(*two[0]) == tenant_salt(*two[0])


# --- The buckets -------------------------------------------------------------------------------


def test_what_was_generated_is_waited_for_by_what_comes_next() -> None:
    now = 0.0
    throttle = Throttle(None, 60.0, lambda: now)
    throttle.take_prompt(20)
    throttle.take_generated(100)  # 60 short
    for seconds, left in ((0.0, 70.0), (30.0, 40.0), (69.0, 1.0)):
        now = seconds
        with pytest.raises(SpecdecError) as error:
            throttle.take_prompt(10)
        assert error.value.retry_after == pytest.approx(left)
    now = 70.0
    throttle.take_prompt(10)
    throttle.take_generated(-10)  # it came to nothing
    throttle.take_prompt(10)
    now = 1000.0  # a minute's worth, and no more
    throttle.take_prompt(500)
    with pytest.raises(SpecdecError):
        throttle.take_prompt(1)


def test_over_an_hour_the_rate_is_kept_whatever_is_asked_for() -> None:
    now = 0.0
    throttle = Throttle(30.0, 600.0, lambda: now)
    requests = tokens = 0
    for step in range(36_000):
        now = step * 0.1
        try:
            throttle.begin()
            throttle.take_prompt(50)
        except SpecdecError:
            continue
        throttle.take_generated(step % 90)
        requests += 1
        tokens += 50 + step % 90
    assert requests <= 30 * 61
    assert tokens == pytest.approx(600 * 61, rel=0.02)
