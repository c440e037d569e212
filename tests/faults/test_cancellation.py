"""A client that is gone leaves no ghost: within one pass its sessions and pages are free."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from specdec.lm.runtime import ModelRuntime
from specdec.v1 import gateway_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests import stack
from tests.faults.raw_sessions import VerifySession, nothing_is_left, opening, until


class Passes:
    """Lets passes through one by one, and counts them."""

    def __init__(self, runtime: ModelRuntime) -> None:
        self.begun = 0
        self._model: Any = runtime.loaded.model
        self._forward = self._model.forward
        self._free = threading.Semaphore(0)

    def forward(self, segments: Sequence[Any]) -> Any:
        self.begun += 1
        assert self._free.acquire(timeout=30)
        return self._forward(segments)

    def let(self, count: int) -> None:
        """Lets so many passes end."""
        self._free.release(count)


@contextmanager
def passes_of(runtime: ModelRuntime) -> Iterator[Passes]:
    passes = Passes(runtime)
    model: Any = runtime.loaded.model
    model.forward = passes.forward
    try:
        yield passes
    finally:
        model.forward = passes._forward
        passes.let(1000)


@pytest.mark.parametrize("ended_by", ["the client", "the deadline"])
async def test_a_generation_ends_within_one_pass_of_its_client(
    target_folder: Path, draft_folder: Path, ended_by: str
) -> None:
    async with stack.pair(target_folder, draft_folder) as services:
        assert services.draft is not None
        runtimes = services.verifier.runtime, services.draft.runtime
        assert None not in runtimes
        verifying, drafting = runtimes
        assert verifying is not None
        assert drafting is not None
        with passes_of(verifying) as passes:
            passes.let(3)
            request = services.gateway.request("go", k=3, max_new_tokens=400, ignore_eos=True)
            call = gateway_pb2_grpc.GenerationServiceStub(services.gateway.channel).Generate(
                request, timeout=2.0 if ended_by == "the deadline" else None
            )
            assert (await call.read()).chunk.token_ids
            # A verification is in the pass that is held.
            await until(lambda: passes.begun == 4)
            if ended_by == "the client":
                call.cancel()
            await until(lambda: verifying.num_sessions == drafting.num_sessions == 0)
            passes.let(1)
            await nothing_is_left(verifying)
            await nothing_is_left(drafting)
            assert passes.begun == 4


async def test_a_session_that_waits_for_its_turn_is_never_run(target_folder: Path) -> None:
    async with (
        stack.verifier(target_folder) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = servicer.runtime
        assert runtime is not None
        running = VerifySession(channel, opening("running"))
        await running.open()
        with passes_of(runtime) as passes:
            await running.ask()
            await until(lambda: passes.begun == 1)
            # One waits to be opened, and one with a block.
            queued = [VerifySession(channel, opening(f"q{i}", range(1, 60))) for i in range(5)]
            for session in queued:
                await session.call.write(verifier_pb2.VerifyRequest(open=session._opening))
            await until(lambda: runtime.num_sessions == 6)
            for session in queued:
                session.call.cancel()
            await until(lambda: runtime.num_sessions == 1)
            passes.let(1)
            await running.verdict()
            running.call.cancel()
            await nothing_is_left(runtime)
            assert passes.begun == 1


def resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


COUNT = 5000 if os.environ.get("SPECDEC_CHAOS_LONG") == "1" else 600
MOST_BYTES_PER_STREAM = 2000
"""Of growth. A call that is leaked takes ten times as much."""


@pytest.mark.slow
async def test_cancelled_streams_leave_no_memory_behind(target_folder: Path) -> None:
    async with (
        stack.verifier(target_folder) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = servicer.runtime
        assert runtime is not None
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)

        async def cancelled(index: int) -> None:
            call = stub.Verify()
            await call.write(verifier_pb2.VerifyRequest(open=opening(f"s{index}")))
            if index % 2:
                await call.read()
            call.cancel()

        async def batch(count: int) -> int:
            for begin in range(0, count, 20):
                await asyncio.gather(*(cancelled(begin + i) for i in range(20)))
            await nothing_is_left(runtime)
            gc.collect()
            return resident_bytes()

        before = await batch(COUNT // 2)
        tasks = len(asyncio.all_tasks())
        after = await batch(COUNT)
        assert (after - before) / COUNT < MOST_BYTES_PER_STREAM
        assert len(asyncio.all_tasks()) <= tasks
