"""Clients that share no code with specdec: buf, which knows reflection only, and Node.js."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from tests.stack import Gateway, draft, drafts_are_used, gateway, verifier

# Installed beside the interpreter by the development dependencies.
BUF = Path(sys.executable).with_name("buf")
NODE_CLIENT = Path(__file__).parent / "node" / "generate.mjs"
PROMPT = "The quick brown fox"
NAMES = {
    "gateway": "specdec.v1.GenerationService",
    "draft": "specdec.v1.DraftService",
    "verifier": "specdec.v1.VerifierService",
}


@dataclass
class Addresses:
    """A running stack, and where each of its services listens."""

    gateway: Gateway
    of: dict[str, str]


@pytest_asyncio.fixture
async def stack(target_folder: Path, draft_folder: Path) -> AsyncIterator[Addresses]:
    async with (
        verifier(target_folder) as (verifier_address, _),
        draft(draft_folder) as (draft_address, _),
        gateway(verifier_address, draft_address) as running,
    ):
        await drafts_are_used(running)
        yield Addresses(
            running,
            {"gateway": running.address, "draft": draft_address, "verifier": verifier_address},
        )


async def run(*command: str | Path) -> tuple[int | None, str, str]:
    """Runs a program while this loop serves it. Gives its status, output and errors."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), 60)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, output.decode(), errors.decode()


async def buf_curl(url: str, reflection: str, *options: str) -> tuple[int | None, str, str]:
    transport = ("--protocol", "grpc", "--http2-prior-knowledge")
    return await run(
        BUF, "curl", *transport, "--reflect-protocol", reflection, *options, f"http://{url}"
    )


def json_documents(text: str) -> list[dict[str, Any]]:
    """Splits JSON objects that follow each other."""
    decoder, documents, position = json.JSONDecoder(), [], 0
    while text[position:].strip():
        position += len(text[position:]) - len(text[position:].lstrip())
        document, position = decoder.raw_decode(text, position)
        documents.append(document)
    return documents


@pytest.mark.parametrize("reflection", ["grpc-v1", "grpc-v1alpha"])
async def test_reflection_lists_the_services_and_methods_of_all_three(
    stack: Addresses, reflection: str
) -> None:
    methods = {
        "gateway": {"Generate"},
        "draft": {"Draft", "GetModelInfo"},
        "verifier": {"Verify", "GetModelInfo", "GetTokenizer"},
    }
    for service, address in stack.of.items():
        status, output, errors = await buf_curl(address, reflection, "--list-services")
        assert (status, errors) == (0, ""), service
        assert set(output.split()) == {
            NAMES[service],
            "grpc.health.v1.Health",
            "grpc.reflection.v1.ServerReflection",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        # To list methods it has to resolve the descriptor of every service.
        status, output, errors = await buf_curl(address, reflection, "--list-methods")
        assert (status, errors) == (0, ""), service
        own = {line for line in output.split() if line.startswith("specdec.")}
        assert own == {f"{NAMES[service]}/{method}" for method in methods[service]}


@pytest.mark.parametrize("reflection", ["grpc-v1", "grpc-v1alpha"])
async def test_generate_can_be_called_with_what_reflection_tells(
    stack: Addresses, reflection: str
) -> None:
    expected = await stack.gateway.generate(PROMPT, temperature=0.0, max_new_tokens=12)
    request = {"text": PROMPT, "sampling": {"temperature": 0}, "stopping": {"max_new_tokens": 12}}
    status, output, errors = await buf_curl(
        f"{stack.of['gateway']}/{NAMES['gateway']}/Generate",
        reflection,
        *("--data", json.dumps(request)),
    )
    assert (status, errors) == (0, "")
    *chunks, last = json_documents(output)
    assert "".join(event["chunk"].get("text", "") for event in chunks) == expected.text
    token_ids = [i for event in chunks for i in event["chunk"].get("tokenIds", [])]
    assert token_ids == expected.token_ids
    assert len(token_ids) == 12
    assert last["completion"]["finishReason"] == "FINISH_REASON_LENGTH"
    assert last["completion"]["usage"]["completionTokens"] == 12


@pytest.mark.parametrize("reflection", ["grpc-v1", "grpc-v1alpha"])
async def test_reflection_describes_the_fields_of_a_request(
    stack: Addresses, reflection: str
) -> None:
    # It is the client that refuses, by the description that it was given.
    status, output, errors = await buf_curl(
        f"{stack.of['gateway']}/{NAMES['gateway']}/Generate",
        reflection,
        *("--data", '{"text": "a", "sampling": {"heat": 1}}'),
    )
    assert status == 1
    assert output == ""
    assert 'unknown field "heat"' in errors


async def test_a_bad_request_has_details_that_any_client_can_read(stack: Addresses) -> None:
    request = {"text": PROMPT, "sampling": {"temperature": -1}, "stopping": {"max_new_tokens": 0}}
    status, output, errors = await buf_curl(
        f"{stack.of['gateway']}/{NAMES['gateway']}/Generate",
        "grpc-v1",
        *("--data", json.dumps(request)),
    )
    invalid_argument = 3
    assert (status, output) == (invalid_argument << 3, "")
    [error] = json_documents(errors)
    assert error["code"] == "invalid_argument"
    details = {
        detail["type"].removeprefix("google.rpc."): base64.b64decode(detail["value"] + "==")
        for detail in error["details"]
    }
    assert ErrorInfo.FromString(details["ErrorInfo"]).reason == "INVALID_REQUEST"
    violations = BadRequest.FromString(details["BadRequest"]).field_violations
    assert {v.field for v in violations} == {"sampling.temperature", "stopping.max_new_tokens"}


@pytest.mark.parametrize("service", list(NAMES))
async def test_health_can_be_checked_with_what_reflection_tells(
    stack: Addresses, service: str
) -> None:
    status, output, errors = await buf_curl(
        f"{stack.of[service]}/grpc.health.v1.Health/Check",
        "grpc-v1",
        *("--data", json.dumps({"service": NAMES[service]})),
    )
    assert (status, errors) == (0, "")
    assert json_documents(output) == [{"status": "SERVING"}]


@pytest.fixture(scope="module")
def node() -> str:
    """The Node.js interpreter."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("Node.js is not installed")
    if not (NODE_CLIENT.parent / "node_modules" / "@grpc" / "grpc-js").is_dir():
        pytest.skip("the Node.js client is not installed: run `npm ci --prefix tests/node`")
    return path


async def test_node_gets_the_same_tokens_as_python(stack: Addresses, node: str) -> None:
    expected = await stack.gateway.generate(PROMPT, temperature=0.0, max_new_tokens=16)
    status, output, errors = await run(node, NODE_CLIENT, stack.of["gateway"], PROMPT, "16")
    assert (status, errors) == (0, "")
    answer = json.loads(output)
    assert answer["token_ids"] == expected.token_ids
    assert answer["text"] == expected.text
    assert answer["finish_reason"] == "FINISH_REASON_LENGTH"
    assert answer["usage"]["completion_tokens"] == len(expected.token_ids) == 16
    assert answer["speculation"]["num_draft_tokens"] > 0


async def test_node_is_told_which_field_is_bad(stack: Addresses, node: str) -> None:
    status, output, errors = await run(node, NODE_CLIENT, stack.of["gateway"], PROMPT, "0")
    assert (status, output) == (1, "")
    assert errors.startswith("INVALID_ARGUMENT: stopping.max_new_tokens: ")
    assert errors.count("\n") == 1
