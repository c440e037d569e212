"""What a request may carry: each limit is refused by the name of its field, and holds nobody up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import pytest_asyncio

import gateway.grammar_check
from specdec.errors import violations_of
from specdec.v1 import common_pb2, gateway_pb2
from tests.faults.guarded import Outcome, guarded, refused, result, retry_delay
from tests.stack import verifier
from verifier_service.service import VerifierServicer

Target = tuple[str, VerifierServicer]
DEEP = '{"items":' * 200 + "{}" + "}" * 200


@pytest_asyncio.fixture(scope="module")
async def target(target_folder: Path) -> AsyncIterator[Target]:
    async with verifier(target_folder) as running:
        yield running


def fields(outcome: Outcome) -> list[str]:
    """At fault, of a request that is invalid."""
    assert isinstance(outcome, grpc.aio.AioRpcError), outcome
    assert outcome.code() == grpc.StatusCode.INVALID_ARGUMENT
    return [violation.field for violation in violations_of(outcome)]


def chat(*contents: str) -> gateway_pb2.GenerateRequest:
    messages = [gateway_pb2.ChatMessage(role="user", content=content) for content in contents]
    return gateway_pb2.GenerateRequest(
        chat=gateway_pb2.ChatInput(messages=messages),
        stopping=gateway_pb2.StoppingParams(max_new_tokens=2),
    )


async def test_every_limit_is_refused_by_the_name_of_its_field(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with guarded(target, monkeypatch, max_prompt_bytes=100) as server:
        ask = server.gateway.request
        grammar = common_pb2.Grammar
        cases = [
            (ask("é" * 51), "text"),
            (chat("x" * 90, "x" * 10), "chat.messages"),
            (chat(*[""] * 4097), "chat.messages"),
            (ask([5] * 600), "token_ids.ids"),
            (ask([5], stop_strings=["x"] * 17), "stopping.stop_strings"),
            (ask([5], stop_strings=["x" * 257]), "stopping.stop_strings[0]"),
            (ask([5], stop_token_ids=[7] * 65), "stopping.stop_token_ids"),
            (ask([5], logit_bias=dict.fromkeys(range(1025), 1.0)), "sampling.logit_bias"),
            (ask([5], allowed_token_ids=[7] * 301), "sampling.allowed_token_ids"),
            (ask([5], suppressed_token_ids=[7] * 301), "sampling.suppressed_token_ids"),
            (ask([5], logprobs=gateway_pb2.LogprobsParams(num_top=21)), "logprobs.num_top"),
            (ask([5], n=17), "n"),
            (ask([5], grammar=grammar(regex="x" * 70_000)), "sampling.grammar"),
            (ask([5], grammar=grammar(json_schema=DEEP)), "sampling.grammar"),
        ]
        for request, field in cases:
            assert field in fields(await server.send(request)), field
        for request in (ask("é" * 50, max_new_tokens=2), chat("x" * 46, "x" * 46)):
            result(await server.send(request))
        await server.idle()


async def test_grammars_that_take_for_ever_hold_up_no_other_request_and_are_answered(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    checked: list[bool] = []

    def check(_: str) -> None:
        checked.append(go_on.wait(20))

    monkeypatch.setattr(gateway.grammar_check, "_fault", check)
    async with guarded(target, monkeypatch, queue_seconds=1.5) as server:
        form = common_pb2.Grammar(regex="[a-z]+")
        slow = server.gateway.request([5, 6], max_new_tokens=2, grammar=form)
        calls = [server.start(slow) for _ in range(6)]
        result(await server.send(server.gateway.request([5, 6], max_new_tokens=2)))
        errors = refused(
            await asyncio.gather(*calls), grpc.StatusCode.RESOURCE_EXHAUSTED, "RESOURCE_EXHAUSTED"
        )
        assert len(errors) == 6
        assert all(retry_delay(error) > 0.0 for error in errors)
        go_on.set()
        result(await server.send(slow))
        await server.idle()
    # Those that nobody waited for any more were not begun.
    assert len(checked) == 3
