"""Generations while verifiers and drafts are killed, frozen and cut off at random."""

from __future__ import annotations

import asyncio
import statistics
import time
from pathlib import Path

import pytest

from specdec.services import DRAFT, VERIFIER
from specdec.v1 import gateway_pb2, gateway_pb2_grpc
from tests.faults.disturbance import FAULTS, Disturbance, addresses, victims
from tests.faults.storm import LONG
from tests.stack import Gateway, Result, drafts_are_used, gateway

CONCURRENCY = 16 if LONG else 8
GENERATIONS = 200 if LONG else 24
"""At the least: they go on until all faults were inflicted."""
INFLICTED = FAULTS if LONG else [fault for fault in FAULTS if fault[0] in ("killed", "cut off")]
ROUNDS_OF_FAULTS = 6 if LONG else 1
"""In each, every kind of fault hits a verifier once, and a draft once."""
LENGTHS = (60, 150, 330)


def make_requests(running: Gateway) -> list[gateway_pb2.GenerateRequest]:
    """Different ones, whose output is the same whatever is drafted and where it runs."""
    ways = (
        {"temperature": 0.0},
        {"rule": "coupled", "temperature": 1.0},
        {"rule": "coupled", "temperature": 0.7, "top_p": 0.9, "presence_penalty": 0.5},
    )
    topk = (1, 3, 1, 2)
    return [
        running.request(
            [3 + index % 7, 5, *range(20, 30 + index % 12)],
            k=4,
            topk=topk[index % len(topk)],
            run_ahead=3 if index % 5 == 0 else 0,
            seed=index,
            max_new_tokens=LENGTHS[index % len(LENGTHS)],
            ignore_eos=True,
            **ways[index % len(ways)],  # type: ignore[arg-type]
        )
        for index in range(12)
    ]


async def followed(
    running: Gateway, request: gateway_pb2.GenerateRequest, pauses: list[float]
) -> Result:
    """What the client gets, checked as it comes. Adds the longest pause between two chunks."""
    result, longest, last = Result(), 0.0, time.monotonic()
    call = gateway_pb2_grpc.GenerationServiceStub(running.channel).Generate(request)
    async for response in call:
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        result.token_ids += response.chunk.token_ids
        result.text += response.chunk.text
        if response.HasField("completion"):
            result.completion = response.completion
    pauses.append(longest)
    return result


@pytest.mark.slow
@pytest.mark.timeout(3600 if LONG else 240)
async def test_nothing_is_lost_or_repeated_whatever_happens_to_the_model_services(
    target_folder: Path, draft_folder: Path
) -> None:
    async with (
        victims(target_folder, draft_folder) as found,
        gateway(
            addresses(found, VERIFIER),
            addresses(found, DRAFT),
            draft_wait_seconds=0.5,
            draft_patience_seconds=2.0,
            peer_silence_seconds=1.0,
            failover_seconds=120.0,
        ) as running,
    ):
        await drafts_are_used(running)
        requests = make_requests(running)
        undisturbed = [await running.send(request) for request in requests]
        disturbance = Disturbance(found, INFLICTED, seed=1)
        inflicting = asyncio.create_task(disturbance.go_on(ROUNDS_OF_FAULTS))
        finished: list[Result] = []
        pauses: list[float] = []
        started = 0

        async def client() -> None:
            nonlocal started
            while started < GENERATIONS or not inflicting.done():
                which, started = started % len(requests), started + 1
                result = await followed(running, requests[which], pauses)
                assert result.token_ids == undisturbed[which].token_ids
                assert result.text == undisturbed[which].text
                assert result.completion.usage == undisturbed[which].completion.usage or (
                    # Only what was cached differs.
                    result.completion.usage.completion_tokens == len(result.token_ids)
                )
                finished.append(result)

        try:
            await asyncio.gather(*(client() for _ in range(CONCURRENCY)))
        finally:
            inflicting.cancel()
    assert len(finished) == started >= GENERATIONS
    resumed = sum(r.speculation.verifier_resumptions for r in finished)
    rejoined = sum(r.speculation.draft_resumptions for r in finished)
    pauses.sort()
    print(
        f"\n{len(finished)} generations of {sum(len(r.token_ids) for r in finished)} tokens; "
        f"{sum(disturbance.done.values())} faults ({dict(disturbance.done)}); verifier sessions "
        f"resumed {resumed} times, drafts {rejoined}; longest pause of a generation: median "
        f"{statistics.median(pauses):.2f} s, p99 {pauses[int(0.99 * (len(pauses) - 1))]:.2f} s"
    )
    assert resumed > 0
    assert rejoined > 0
    assert sum(r.speculation.num_accepted_tokens for r in finished) > 0


@pytest.mark.skipif(not LONG, reason="it is timed, and so for a quiet machine")
async def test_a_verifier_that_is_back_is_used_within_two_seconds(
    target_folder: Path, draft_folder: Path
) -> None:
    async with (
        victims(target_folder, draft_folder, each=1) as found,
        gateway(addresses(found, VERIFIER), addresses(found, DRAFT)) as running,
    ):
        await drafts_are_used(running)
        request = make_requests(running)[2]
        undisturbed = await running.send(request)
        verifier = next(victim for victim in found if victim.service is VERIFIER)
        call = asyncio.create_task(running.send(request))
        await asyncio.sleep(0.1)
        await verifier.killed(3.0)
        begun = time.monotonic()
        again = await running.generate([5, 6], max_new_tokens=4, ignore_eos=True)
        seconds = time.monotonic() - begun
        resumed = await call
        print(f"\na generation of {len(again.token_ids)} tokens after the restart: {seconds:.2f} s")
        assert resumed.token_ids == undisturbed.token_ids
        assert resumed.speculation.verifier_resumptions == 1
        assert seconds < 2.0
