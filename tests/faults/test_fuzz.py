"""20,000 messages a service that no peer should send: what is wrong is refused, and nothing else.

The form that CI runs is shorter, and the same each time. SPECDEC_CHAOS_LONG=1 runs all of it.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec import services
from specdec.cli.health import check
from specdec.lm.runtime import ModelRuntime
from specdec.v1 import common_pb2, draft_pb2, verifier_pb2
from tests.faults.attack import SECONDS, Drafting, Target, Verifying, attack, openings
from tests.faults.storm import TIMEOUT, number, storm
from tests.stack import draft, verifier

pytestmark = [pytest.mark.usefixtures("no_errors_in_the_log"), pytest.mark.timeout(TIMEOUT)]


@asynccontextmanager
async def _sane(
    service: services.Service, address: str, runtime: ModelRuntime, neighbour: Any
) -> AsyncIterator[Callable[[], Awaitable[None]]]:
    """Checks that a service is well, and goes on with a session that has nothing to do with it."""
    expected = [await neighbour() for _ in range(2)]
    assert expected[0] == expected[1]
    beside = asyncio.create_task(neighbour())

    async def afterwards() -> None:
        nonlocal beside
        assert await beside == expected[0]
        assert await neighbour() == expected[0]
        async with asyncio.timeout(SECONDS):
            while runtime.num_sessions:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.001)
        await runtime.thread.run(runtime.scheduler.residents.check_integrity)
        assert runtime.scheduler.residents.sequences == []
        assert await check(service, address) is None
        beside = asyncio.create_task(neighbour())

    yield afterwards
    await beside


def _plain_opening(info: common_pb2.ModelInfo, **fields: Any) -> common_pb2.Open:
    return common_pb2.Open(
        session_id="neighbour",
        round=1,
        base_length=3,
        prompt_token_ids=[5, 6, 7],
        sampling=common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
        acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
        num_draft_tokens=4,
        tokenizer_sha256=info.tokenizer_sha256,
        **fields,
    )


async def _verified(target: Target) -> list[list[int]]:
    """The verdicts of a session in which nothing is wrong."""
    call, tokens = target.call(), list[list[int]]()
    try:
        opening = _plain_opening(target.info)
        await call.write(verifier_pb2.VerifyRequest(open=opening).SerializeToString())
        await call.read()
        for number in range(1, 5):
            candidates = verifier_pb2.Candidates(
                round=number, base_length=3 + sum(map(len, tokens)), token_ids=[9, 10][: number % 3]
            )
            request = verifier_pb2.VerifyRequest(candidates=candidates)
            await call.write(request.SerializeToString())
            response = verifier_pb2.VerifyResponse.FromString(await call.read())
            tokens.append(list(response.verdict.token_ids))
        return tokens
    finally:
        call.cancel()


async def _drafted(target: Target) -> list[list[int]]:
    """The proposals of a session in which nothing is wrong."""
    call, tokens = target.call(), list[list[int]]()
    try:
        opening = _plain_opening(target.info)
        await call.write(draft_pb2.DraftRequest(open=opening).SerializeToString())
        await call.read()
        for number in range(1, 5):
            response = draft_pb2.DraftResponse.FromString(await call.read())
            tokens.append(list(response.proposal.token_ids))
            advance = draft_pb2.Advance(
                round=number + 1,
                base_length=3 + 4 * (number - 1),
                token_ids=[9, 10, 11, 12],
                num_draft_tokens=4,
            )
            await call.write(draft_pb2.DraftRequest(advance=advance).SerializeToString())
        return tokens
    finally:
        call.cancel()


@pytest.mark.slow
async def test_the_verifier_refuses_what_is_wrong_and_nothing_else(
    short_models: tuple[Path, Path],
) -> None:
    async with (
        verifier(short_models[0], kv_memory=2**18) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert servicer.runtime is not None
        target = Verifying(channel, servicer.runtime.info)
        corpus = openings(target.info, random.Random(0))
        async with _sane(
            services.VERIFIER, address, servicer.runtime, lambda: _verified(target)
        ) as afterwards:
            await storm(number(3000), lambda s: attack(target, s, corpus), afterwards)


@pytest.mark.slow
async def test_the_draft_refuses_what_is_wrong_and_nothing_else(
    short_models: tuple[Path, Path],
) -> None:
    async with (
        draft(short_models[1], kv_memory=2**18, drafters=["lookup", "model"]) as (
            address,
            drafting,
        ),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = drafting.runtime
        assert runtime is not None
        target = Drafting(channel, runtime.info)
        corpus = openings(target.info, random.Random(0))
        async with _sane(services.DRAFT, address, runtime, lambda: _drafted(target)) as afterwards:
            await storm(number(1000), lambda s: attack(target, s, corpus), afterwards)
