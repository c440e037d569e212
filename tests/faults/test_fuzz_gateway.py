"""The gateway between clients, a draft and a verifier that send what they should not.

The form that CI runs is shorter, and the same each time. SPECDEC_CHAOS_LONG=1 runs all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.message import DecodeError

from specdec import services
from specdec.cli.health import check
from specdec.serving import MAX_MESSAGE_BYTES
from specdec.v1 import common_pb2, gateway_pb2, verifier_pb2_grpc
from tests.faults.attack import SECONDS, VOCABULARY, outcome_of, spoiled
from tests.faults.hostile_peers import LyingDraft, LyingVerifier
from tests.faults.referee import ANSWERED, CONTRADICTION, INVALID, must_be_refused
from tests.faults.storm import CONTEXT, TIMEOUT, number, storm
from tests.stack import Gateway, gateway, pair, verifier

pytestmark = [pytest.mark.usefixtures("no_errors_in_the_log"), pytest.mark.timeout(TIMEOUT)]
_PATH = "/specdec.v1.GenerationService/Generate"
UNAVAILABLE = "VERIFIER_UNAVAILABLE"
_DEFAULTS: dict[str, Any] = {"draft_patience_seconds": 0.1, "max_new_tokens": 8}


def _requests() -> list[gateway_pb2.GenerateRequest]:
    """Requests of every kind, all of them good."""
    prompts: list[dict[str, Any]] = [
        {"text": "once upon"},
        {"token_ids": gateway_pb2.TokenIdsInput(ids=[5, 6, 7, 8, 5, 6, 7])},
        {"chat": gateway_pb2.ChatInput(messages=[{"role": "user", "content": "hi"}])},
    ]
    samplings: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3},
        {"repetition_penalty": 1.2, "presence_penalty": 0.1, "frequency_penalty": 0.1},
        {"logit_bias": {4: 2.5}, "allowed_token_ids": range(2, 90), "suppressed_token_ids": [9]},
        {"grammar": common_pb2.Grammar(regex="[a-z]+")},
    ]
    return [
        gateway_pb2.GenerateRequest(
            **prompt,
            sampling=gateway_pb2.SamplingParams(**sampling),
            stopping=gateway_pb2.StoppingParams(
                max_new_tokens=5 + index, stop_token_ids=[11], stop_strings=["zz", "é"]
            ),
            speculation=gateway_pb2.SpeculationParams(
                num_draft_tokens=3,
                acceptance_rule=1 + index % 3,  # type: ignore[arg-type]
                draft_topk=1 + index % 2,
            ),
            logprobs=gateway_pb2.LogprobsParams(num_top=2, prompt=True) if index == 1 else None,
            n=2 if index == 2 else None,
        )
        for prompt in prompts
        for index, sampling in enumerate(samplings)
    ]


async def _answers(
    channel: grpc.aio.Channel, data: bytes
) -> tuple[str, list[gateway_pb2.GenerateResponse]]:
    """How a Generate call ends, and what came of it."""
    call: Any = channel.unary_stream(
        _PATH, response_deserializer=gateway_pb2.GenerateResponse.FromString
    )(data, timeout=SECONDS)
    try:
        return ANSWERED, [response async for response in call]
    except grpc.aio.AioRpcError as error:
        return outcome_of(error), []
    finally:
        call.cancel()


def _check(request: gateway_pb2.GenerateRequest, found: list[gateway_pb2.GenerateResponse]) -> None:
    """Asserts what holds for every generation."""
    for index in range(request.n or 1):
        mine = [response for response in found if response.index == index]
        assert mine[-1].HasField("completion")
        chunks = [response.chunk for response in mine if response.HasField("chunk")]
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert 1 <= len(token_ids) == mine[-1].completion.usage.completion_tokens < CONTEXT
        assert max(token_ids) < VOCABULARY
        if request.stopping.HasField("max_new_tokens"):
            assert len(token_ids) <= request.stopping.max_new_tokens


async def _strike(
    channel: grpc.aio.Channel, source: random.Random, good: list[gateway_pb2.GenerateRequest]
) -> int:
    others = [request.SerializeToString() for request in source.sample(good, 2)]
    data = spoiled(source, source.choice(good), others, 0.9)
    if len(data) > MAX_MESSAGE_BYTES:
        return 0  # gRPC itself refuses it, and gives no reason.
    right = {ANSWERED, INVALID}
    try:
        request = gateway_pb2.GenerateRequest.FromString(data)
        if must_be_refused(request, VOCABULARY, CONTEXT):
            right = {INVALID}
    except DecodeError:
        request, right = gateway_pb2.GenerateRequest(), {INVALID}
    outcome, found = await _answers(channel, data)
    assert outcome in right, f"{outcome}, not {right}: {str(request)[:2000] or data!r}"
    if outcome == ANSWERED:
        _check(request, found)
    return 1


@pytest.mark.slow
async def test_the_gateway_refuses_what_is_wrong_and_nothing_else(
    short_models: tuple[Path, Path],
) -> None:
    async with pair(*short_models, **_DEFAULTS) as stack:
        running, good = stack.gateway, _requests()
        options: dict[str, Any] = {"k": 2, "rule": "coupled", "seed": 4, "max_new_tokens": 12}
        expected = await running.generate([5, 6, 7], **options)

        async def afterwards() -> None:
            again = await running.generate([5, 6, 7], **options)
            assert again.token_ids == expected.token_ids
            assert await check(services.GATEWAY, running.address) is None

        await storm(number(200), lambda s: _strike(running.channel, s, good), afterwards)
        assert stack.verifier.runtime is not None
        runtime = stack.verifier.runtime
        async with asyncio.timeout(SECONDS):
            while runtime.num_sessions:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)
        await runtime.thread.run(runtime.scheduler.residents.check_integrity)


@pytest.mark.slow
async def test_a_draft_that_lies_in_any_field_never_changes_an_output(
    short_models: tuple[Path, Path],
) -> None:
    async with verifier(short_models[0]) as (verifier_address, servicer):
        assert servicer.runtime is not None
        liar = LyingDraft(random.Random(1), servicer.runtime.info)
        try:
            async with gateway(verifier_address, await liar.restart(), **_DEFAULTS) as running:
                await _never_changes_an_output(running, liar)
        finally:
            await liar.stop()


async def _never_changes_an_output(running: Gateway, liar: LyingDraft) -> None:
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0, "topk": 3},
        {"temperature": 0.9, "rule": "coupled", "topk": 2, "run_ahead": 2},
        {"temperature": 0.9, "rule": "rejection", "seed": 8},
        {"temperature": 0.9, "rule": "block", "adaptive": True},
    ]
    common: dict[str, Any] = {"max_new_tokens": 8, "ignore_eos": True, "seed": 5}
    plain = [await running.generate([5, 6, 7], k=0, **{**common, **kind}) for kind in kinds]

    async def strike(source: random.Random) -> int:
        which, before = source.randrange(len(kinds)), liar.sent
        kind = {**common, **kinds[which]}
        request = running.request([5, 6, 7], k=4, **kind)
        request.prefix_cache.salt = str(source.random())
        result = await running.send(request)
        assert len(result.token_ids) == 8
        if which < 2:
            assert result.token_ids == plain[which].token_ids
        return liar.sent - before

    async def afterwards() -> None:
        await liar.restart()
        assert await check(services.GATEWAY, running.address) is None

    await storm(number(700), strike, afterwards, at_once=4)


@asynccontextmanager
async def _gateway_of_a_lying_verifier(
    target: Path, seed: int
) -> AsyncIterator[tuple[Gateway, LyingVerifier]]:
    async with (
        verifier(target) as (real, servicer),
        grpc.aio.insecure_channel(real) as channel,
    ):
        assert servicer.runtime is not None
        liar = LyingVerifier(random.Random(seed), servicer.runtime.info)
        await liar.learn(verifier_pb2_grpc.VerifierServiceStub(channel))
        try:
            # A session whose verifier has become another one is given up before its deadline.
            address = await liar.restart()
            async with gateway(address, failover_seconds=3.0, **_DEFAULTS) as running:
                yield running, liar
        finally:
            await liar.stop()


@pytest.mark.slow
async def test_a_verifier_that_lies_fails_generations_with_a_reason(
    short_models: tuple[Path, Path],
) -> None:
    right = {ANSWERED, CONTRADICTION, UNAVAILABLE}
    async with _gateway_of_a_lying_verifier(short_models[0], 2) as (running, liar):
        request = running.request([5, 6, 7], k=0, max_new_tokens=12, ignore_eos=True)
        liar.lies = False
        expected = (await running.send(request)).token_ids

        async def strike(source: random.Random) -> int:
            before = liar.sent
            request.prefix_cache.salt = str(source.random())
            outcome, found = await _answers(running.channel, request.SerializeToString())
            assert outcome in right, outcome
            if outcome == ANSWERED:
                _check(request, found)
            return liar.sent - before + 1

        async def afterwards() -> None:
            liar.lies = False
            await _serves_again(running, request, expected)
            assert await check(services.GATEWAY, running.address) is None
            liar.lies = True

        liar.lies = True
        await storm(number(500), strike, afterwards, at_once=4)


@pytest.mark.slow
async def test_a_gateway_outlives_a_verifier_that_lies_about_itself(
    short_models: tuple[Path, Path],
) -> None:
    right = {ANSWERED, INVALID, CONTRADICTION, UNAVAILABLE, "NOT_READY"}
    async with _gateway_of_a_lying_verifier(short_models[0], 3) as (running, liar):
        liar.lies = False
        request = running.request([5, 6, 7], k=0, max_new_tokens=12, ignore_eos=True)
        expected = (await running.send(request)).token_ids
        for _ in range(number(8, 200)):
            liar.lies_about_itself = True
            await liar.restart()
            for _ in range(3):
                outcome, _ = await _answers(running.channel, request.SerializeToString())
                assert outcome in right, outcome
                await asyncio.sleep(0.02)
            liar.lies_about_itself = False
            await liar.restart()
            await _serves_again(running, request, expected)


async def _serves_again(
    running: Gateway, request: gateway_pb2.GenerateRequest, expected: list[int]
) -> None:
    async with asyncio.timeout(SECONDS):
        while True:
            outcome, found = await _answers(running.channel, request.SerializeToString())
            if [t for response in found for t in response.chunk.token_ids] == expected:
                break
            # Another answer, or INVALID, as long as the gateway holds a lie for the truth.
            assert outcome in (ANSWERED, UNAVAILABLE, "NOT_READY", INVALID), outcome
            await asyncio.sleep(0.02)
