"""Several samples in one call: their order, their end, their failures, slow readers, seeds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import grpc
import pytest

from gateway.merge import merge
from gateway.sample import sample_seed
from specdec.lm.randomness import Stream, key, seed_tensor
from specdec.v1 import gateway_pb2_grpc
from tests.stack import pair


class Source:
    """A stream of numbers that knows how far it has come and whether it was closed."""

    def __init__(self, base: int, count: int, fails_at: int | None = None) -> None:
        self.made = 0
        self.closed = False
        self._base, self._count, self._fails_at = base, count, fails_at

    async def items(self) -> AsyncGenerator[int]:
        try:
            for index in range(self._count):
                await asyncio.sleep(0)
                if index == self._fails_at:
                    raise RuntimeError("broken")
                self.made += 1
                yield self._base + index
        finally:
            self.closed = True


async def test_all_items_come_each_streams_in_its_order() -> None:
    for counts in ([5], [0, 0], [3, 0, 7], [1, 1, 1, 1]):
        sources = [Source(100 * i, count) for i, count in enumerate(counts)]
        items = [item async for item in merge([source.items() for source in sources])]
        for i, count in enumerate(counts):
            assert [x for x in items if x // 100 == i] == list(range(100 * i, 100 * i + count))
        assert len(items) == sum(counts)
        assert all(source.closed for source in sources)


async def test_the_failure_of_one_stream_ends_all_and_is_raised() -> None:
    sources = [Source(0, 1000), Source(1000, 5, fails_at=2), Source(2000, 1000)]
    with pytest.raises(RuntimeError, match="broken"):
        async for _ in merge([source.items() for source in sources]):
            pass
    assert all(source.closed for source in sources)
    assert sources[0].made < 1000


async def test_a_reader_that_leaves_closes_all_streams() -> None:
    sources = [Source(0, 1000), Source(1000, 1000)]
    stream = merge([source.items() for source in sources])
    await anext(stream)
    await stream.aclose()
    assert all(source.closed for source in sources)


async def test_a_slow_reader_holds_the_streams_back() -> None:
    sources = [Source(0, 1000), Source(1000, 1000)]
    stream = merge([source.items() for source in sources])
    await anext(stream)
    for _ in range(100):
        await asyncio.sleep(0)
    assert sum(source.made for source in sources) < 10
    await stream.aclose()


async def test_samples_are_gone_after_their_client_left(
    target_folder: Path, draft_folder: Path
) -> None:
    async with pair(target_folder, draft_folder) as stack:
        assert stack.verifier.runtime is not None
        assert stack.draft is not None
        assert stack.draft.runtime is not None
        request = stack.gateway.request([5, 6, 7], k=3, n=4, max_new_tokens=400, ignore_eos=True)
        call = gateway_pb2_grpc.GenerationServiceStub(stack.gateway.channel).Generate(request)
        await call.read()
        assert stack.verifier.runtime.num_sessions == 4
        call.cancel()
        for _ in range(100):
            if stack.verifier.runtime.num_sessions == stack.draft.runtime.num_sessions == 0:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("sessions live on without a client")


async def test_one_failing_sample_fails_the_call_and_leaves_nothing(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with pair(target_folder, None, failover_seconds=0.2) as stack:
        runtime = stack.verifier.runtime
        assert runtime is not None
        forward, passes = runtime.loaded.model.forward, 0

        def fails_at_last(*arguments: Any) -> Any:
            nonlocal passes
            passes += 1
            if passes > 20:
                raise RuntimeError("out of memory")
            return forward(*arguments)

        monkeypatch.setattr(runtime.loaded.model, "forward", fails_at_last)
        request = stack.gateway.request([5, 6, 7], n=3, max_new_tokens=100, ignore_eos=True)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stack.gateway.send_for_samples(request)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        for _ in range(100):
            if runtime.num_sessions == 0:
                break
            await asyncio.sleep(0.02)
        else:
            pytest.fail("sessions live on after the failure")


def test_samples_share_no_random_numbers() -> None:
    """Nor do requests whose seeds differ by any number that the generator itself uses."""
    golden_gamma = 0x9E3779B97F4A7C15
    for seed in (0, 1, 7, 2**64 - 1):
        seeds = [sample_seed(seed, index) for index in range(16)]
        assert seeds[0] == seed
        seeds += [(seed + i * golden_gamma) % 2**64 for i in range(1, 5)]
        keys = [
            int(key(seed_tensor(s), stream, position, 5))
            for s in seeds
            for stream in Stream
            for position in range(20)
        ]
        assert len(set(keys)) == len(keys)
