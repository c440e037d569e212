"""Many requests at once through the real services, a third of them cancelled, in little memory."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import os
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec.lm.runtime import ModelRuntime
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    gateway_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests.faults.storm import LONG
from tests.processing import resolved
from tests.stack import Stack, draft, pair, verifier

CONCURRENCY = 24
ABORTED = 0.3
PAGE_BYTES = 4096
"""Of the tiny models: 2 layers, 2 key heads of 8 numbers, 16 tokens, keys and values."""
PAGES = 72
"""In each service. The longest request takes 15 of them, 24 at a time more than there are."""
RSS_BOUND = 8 * 2**20
"""How much the process may grow from the middle of a run to its end.

By the middle all buffers are as large as they get, so that only what is kept of requests that have
ended could grow. In the long run these are 500: 16 KiB of each, such as its messages or the logits
of its rounds, would be found. It grows by some 1 MiB; what remains is Python's allocator's noise.
"""

BEGINNINGS = [
    [3 + (i * i + 7 * n) % 290 for i in range(length)]
    for n, length in enumerate((0, 0, 16, 40, 90, 130))
]


def make_requests(count: int) -> list[gateway_pb2.GenerateRequest]:
    """Different requests. Their prompts share beginnings, and every fourth is greedy."""
    generator = random.Random(17)
    requests = []
    for index in range(count):
        prompt = [
            *generator.choice(BEGINNINGS),
            *(generator.randint(1, 299) for _ in range(generator.randint(1, 40))),
        ]
        sampling = gateway_pb2.SamplingParams(temperature=0.0, seed=index)
        if index % 4:
            sampling.temperature = generator.choice([0.5, 0.8, 1.0, 1.2])
            sampling.top_p = generator.choice([1.0, 1.0, 0.9])
            sampling.presence_penalty = generator.choice([0.0, 0.0, 0.7])
        request = gateway_pb2.GenerateRequest(
            token_ids=gateway_pb2.TokenIdsInput(ids=prompt),
            sampling=sampling,
            stopping=gateway_pb2.StoppingParams(
                max_new_tokens=generator.choice([1, 6, 12, 20, 40]), ignore_eos=True
            ),
            n=generator.choice([1, 1, 1, 1, 1, 3]),
        )
        requests.append(request)
    return requests


def varied(request: gateway_pb2.GenerateRequest, generator: random.Random) -> Any:
    """The request with what must not change its output: K, and whom it shares the cache with."""
    changed = gateway_pb2.GenerateRequest()
    changed.CopyFrom(request)
    changed.speculation.CopyFrom(
        gateway_pb2.SpeculationParams(
            num_draft_tokens=generator.randint(0, 8),
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
        )
    )
    changed.prefix_cache.CopyFrom(
        common_pb2.PrefixCacheParams(
            bypass=generator.random() < 0.1, salt=generator.choice(["", "", "", "a", "b"])
        )
    )
    return changed


Outputs = list[list[int]]


def greedy_reference(folder: Path, request: gateway_pb2.GenerateRequest) -> list[int]:
    """What transformers' own greedy decoding gives."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([list(request.token_ids.ids)])
    count = request.stopping.max_new_tokens
    output = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    return output[0, ids.shape[1] :].tolist()


def resident_bytes() -> int:
    """Of this process, without what the C library's allocator keeps for later."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:  # glibc's
        trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass
class Counts:
    finished: int = 0
    aborted: int = 0
    accepted: int = 0
    """Drafted tokens."""
    wrong: list[str] = field(default_factory=list)


class Storm:
    """Sends requests, and compares what comes back with the lone runs."""

    def __init__(self, stack: Stack, requests: Sequence[Any], expected: Sequence[Outputs]) -> None:
        self.counts = Counts()
        self._stack = stack
        self._requests = requests
        self._expected = expected
        self._generator = random.Random(23)

    async def send(self, count: int) -> None:
        """Sends so many requests, CONCURRENCY at a time."""
        numbers = iter(range(count))

        async def worker() -> None:
            for _ in numbers:
                await self._send_one()

        async with asyncio.TaskGroup() as group:
            for _ in range(CONCURRENCY):
                group.create_task(worker())

    async def _send_one(self) -> None:
        index = self._generator.randrange(len(self._requests))
        request = varied(self._requests[index], self._generator)
        sending = asyncio.create_task(self._stack.gateway.send_for_samples(request))
        if self._generator.random() < ABORTED:
            # At a random moment: queued, in a prefill, in a draft, in a verification, or late.
            await asyncio.wait({sending}, timeout=self._generator.choice([0.0, 0.02, 0.2, 0.6]))
            if not sending.done():
                sending.cancel()
                await asyncio.wait({sending})
                self.counts.aborted += 1
                return
        results = await sending
        self.counts.finished += 1
        for result, expected in zip(results, self._expected[index], strict=True):
            self.counts.accepted += result.speculation.num_accepted_tokens
            if result.token_ids != expected:
                self.counts.wrong.append(f"{request}: {result.token_ids} is not {expected}")


async def settled(stack: Stack) -> list[ModelRuntime]:
    """The runtimes of both services, when all sessions have ended in them."""
    assert stack.draft is not None
    runtimes = []
    for servicer in (stack.verifier, stack.draft):
        assert servicer.runtime is not None
        runtimes.append(servicer.runtime)
        async with asyncio.timeout(20):
            while servicer.runtime.num_sessions:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)
    return runtimes


def assert_nothing_is_held(runtime: ModelRuntime) -> None:
    """Runs on the model thread: every page is free or cached, and the cache can be emptied."""
    scheduler, pool = runtime.scheduler, runtime.scheduler.residents.pool
    scheduler.residents.check_integrity()
    assert not scheduler.has_work
    assert scheduler.residents.sequences == []
    assert pool.num_free + scheduler.residents.prefixes.num_pages == pool.num_pages == PAGES
    scheduler.residents.prefixes.evict(pool.num_pages)
    assert pool.num_free == pool.num_pages
    scheduler.residents.check_integrity()


async def run_storm(
    target_folder: Path, draft_folder: Path, num_requests: int, num_kinds: int, record: Any
) -> None:
    requests = make_requests(num_kinds)
    async with pair(target_folder, None) as stack:
        # Alone: one after the other, without speculation, with all the memory.
        expected = [
            [result.token_ids for result in await stack.gateway.send_for_samples(request)]
            for request in requests
        ]
    assert expected[0][0] == greedy_reference(target_folder, requests[0])
    options = {"kv_memory": PAGES * PAGE_BYTES, "max_rows": 64}
    async with pair(
        target_folder, draft_folder, target_options=options, draft_options=options
    ) as stack:
        storm = Storm(stack, requests, expected)
        await storm.send(num_requests // 2)
        middle = resident_bytes()
        await storm.send(num_requests - num_requests // 2)
        growth = resident_bytes() - middle
        runtimes = await settled(stack)
        for runtime in runtimes:
            await runtime.thread.run(assert_nothing_is_held, runtime)
        preemptions = [runtime.scheduler.residents.num_preemptions for runtime in runtimes]
    counts = storm.counts
    told = {
        "finished": counts.finished,
        "aborted": counts.aborted,
        "accepted": counts.accepted,
        "preemptions": preemptions,
        "growth": growth,
    }
    for name, value in told.items():
        record(name, value)
    assert counts.wrong == [], told
    assert counts.finished + counts.aborted == num_requests
    assert counts.aborted > num_requests * ABORTED / 3, told
    assert counts.accepted > num_requests, told
    assert min(preemptions) > 0, told
    if num_requests >= 1000:  # in a short run it is the warm-up that grows
        assert growth < RSS_BOUND, told


@pytest.mark.slow
async def test_a_hundred_requests(
    target_folder: Path, draft_folder: Path, record_property: Any
) -> None:
    await run_storm(target_folder, draft_folder, 100, 16, record_property)


@pytest.mark.slow
async def test_hundreds_of_requests(
    target_folder: Path, draft_folder: Path, record_property: Any
) -> None:
    await run_storm(target_folder, draft_folder, 1000 if LONG else 400, 60, record_property)


def opening(runtime: ModelRuntime, count: int) -> common_pb2.Open:
    """The Open of a session with so many tokens."""
    return common_pb2.Open(
        session_id="early",
        base_length=count,
        prompt_token_ids=[5] * count,
        sampling=resolved(common_pb2.Sampling()),
        acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
        tokenizer_sha256=runtime.info.tokenizer_sha256,
    )


@pytest.mark.parametrize("service", ["verifier", "draft"])
async def test_a_session_that_is_cancelled_while_it_opens_leaves_nothing(
    target_folder: Path, service: str
) -> None:
    """Its sequence is made on the model thread, which is at something else just then."""
    running: Any = {"verifier": verifier, "draft": draft}[service](target_folder)
    async with running as (address, servicer), grpc.aio.insecure_channel(address) as channel:
        runtime = servicer.runtime
        release = threading.Event()
        runtime.thread.post(partial(release.wait, 10))
        if service == "verifier":
            call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify()
            await call.write(verifier_pb2.VerifyRequest(open=opening(runtime, 40)))
        else:
            call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
            await call.write(draft_pb2.DraftRequest(open=opening(runtime, 40)))
        async with asyncio.timeout(10):
            while not runtime.num_sessions:  # noqa: ASYNC110 (nobody tells)
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.1)
            call.cancel()
            while runtime.num_sessions:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        release.set()
        await runtime.thread.run(runtime.scheduler.residents.check_integrity)
        assert runtime.scheduler.residents.sequences == []


async def test_sessions_that_wait_for_each_others_pages_come_to_an_end(
    target_folder: Path, draft_folder: Path
) -> None:
    """The first samples fill the pool, and rest until the second ones have the prompt too."""
    options = {"kv_memory": 20 * PAGE_BYTES}
    async with pair(
        target_folder, draft_folder, target_options=options, draft_options=options
    ) as stack:
        requests = [
            gateway_pb2.GenerateRequest(
                token_ids=gateway_pb2.TokenIdsInput(ids=[beginning, *range(1, 160)]),
                sampling=gateway_pb2.SamplingParams(temperature=0.0),
                stopping=gateway_pb2.StoppingParams(max_new_tokens=20, ignore_eos=True),
                n=2,
            )
            for beginning in (7, 8)
        ]
        expected = [(await stack.gateway.send_for_samples(r))[0].token_ids for r in requests]
        async with asyncio.timeout(30):
            found = await asyncio.gather(*map(stack.gateway.send_for_samples, requests))
        for results, token_ids in zip(found, expected, strict=True):
            assert [result.token_ids for result in results] == [token_ids] * 2
