"""Health tells the truth: "" is alive, the full name is ready, and neither is a stored answer."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import specdec.lm.serve
from specdec import services
from specdec.lm.model import CausalLM
from specdec.lm.runtime import ModelRuntime
from specdec.v1 import draft_pb2, draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests import stack
from tests.faults.raw_sessions import (
    VerifySession,
    draft_session,
    failure_of,
    health_of,
    nothing_is_left,
    opening,
    told,
    until,
)

INTERNAL, UNAVAILABLE = grpc.StatusCode.INTERNAL, grpc.StatusCode.UNAVAILABLE


@asynccontextmanager
async def verifier(folder: Path, **options: Any) -> AsyncIterator[tuple[Any, ModelRuntime]]:
    async with (
        stack.verifier(folder, **options) as (address, servicer),
        grpc.aio.insecure_channel(address) as channel,
    ):
        assert servicer.runtime is not None
        yield channel, servicer.runtime


@contextmanager
def held(runtime: ModelRuntime) -> Iterator[threading.Event]:
    """Has the next pass wait, and tells when it has begun. Goes on when the block ends."""
    begun, go_on = threading.Event(), threading.Event()
    model = runtime.loaded.model
    forward = model.forward

    def wait(segments: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return forward(segments)

    model.forward = wait  # type: ignore[method-assign]
    try:
        yield begun
    finally:
        model.forward = forward  # type: ignore[method-assign]
        go_on.set()


class Death(BaseException):
    """What nothing on the model thread is prepared for."""


async def test_a_dead_model_thread_ends_its_sessions_and_is_told_by_both_names(
    target_folder: Path,
) -> None:
    async with verifier(target_folder) as (channel, runtime):
        sessions = [VerifySession(channel, opening(f"s{index}")) for index in range(3)]
        for session in sessions:
            await session.open()
        assert await health_of(channel, "") == "SERVING"

        def die() -> bool:
            raise Death

        with held(runtime) as begun:
            # One is in the pass, one is queued, and one is between rounds.
            await sessions[0].ask()
            assert await asyncio.to_thread(begun.wait, 10)
            await sessions[1].ask()
            runtime.scheduler.step = die  # type: ignore[method-assign]
        # That pass was begun by the old `step`, and the next one is the end.
        await sessions[0].verdict()
        assert told(await failure_of(sessions[1].call)) == (INTERNAL, "MODEL_FAILURE", False)
        for name in ("", services.VERIFIER.full_name):
            assert await health_of(channel, name) == "NOT_SERVING"

        await sessions[2].ask()
        error = await failure_of(sessions[2].call)
        assert told(error) == (INTERNAL, "MODEL_FAILURE", False)
        assert "session s2" in (error.details() or "")
        # What is new is better off at another replica.
        late = VerifySession(channel, opening("late"))
        assert told(await failure_of(late.call)) == (UNAVAILABLE, "NOT_READY", True)
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetModelInfo(verifier_pb2.VerifierServiceGetModelInfoRequest())
        assert "died of Death" in (caught.value.details() or "")
        sessions[0].call.cancel()
        await until(lambda: runtime.num_sessions == 0)


async def test_a_draft_tells_of_its_dead_model_thread_behind_other_drafters(
    target_folder: Path,
) -> None:
    async with (
        stack.draft(target_folder, drafters=["lookup", "model"]) as (address, drafting),
        grpc.aio.insecure_channel(address) as channel,
    ):
        runtime = drafting.runtime
        assert runtime is not None
        call, _ = await draft_session(channel, opening("a"))

        def die() -> bool:
            raise Death

        runtime.scheduler.step = die  # type: ignore[method-assign]
        advance = draft_pb2.Advance(round=2, base_length=3, token_ids=[9], num_draft_tokens=4)
        await call.write(draft_pb2.DraftRequest(advance=advance))
        assert told(await failure_of(call)) == (INTERNAL, "MODEL_FAILURE", False)
        for name in ("", services.DRAFT.full_name):
            assert await health_of(channel, name) == "NOT_SERVING"
        late = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        assert told(await failure_of(late)) == (UNAVAILABLE, "NOT_READY", True)


async def test_a_device_that_is_lost_is_a_dead_model_thread(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with verifier(target_folder) as (channel, runtime):
        session = VerifySession(channel, opening("a"))
        await session.open()

        def broken(*_: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        monkeypatch.setattr(CausalLM, "forward", broken)
        await session.ask()
        assert told(await failure_of(session.call)) == (INTERNAL, "MODEL_FAILURE", False)
        # The device itself is well: this is one session's failure.
        assert await health_of(channel, "") == "SERVING"

        monkeypatch.setattr(CausalLM, "check_device", broken)
        second = VerifySession(channel, opening("b"))
        await second.call.write(verifier_pb2.VerifyRequest(open=opening("b", range(1, 40))))
        assert told(await failure_of(second.call)) == (INTERNAL, "MODEL_FAILURE", False)
        await until(lambda: runtime.fault is not None)
        assert await health_of(channel, "") == "NOT_SERVING"


async def test_a_stuck_model_thread_ends_its_sessions_and_may_come_to_again(
    target_folder: Path,
) -> None:
    async with verifier(target_folder, stall_seconds=0.2) as (channel, runtime):
        session = VerifySession(channel, opening("a"))
        await session.open()
        # To have nothing to do is no stall.
        await asyncio.sleep(0.3)
        assert await health_of(channel, "") == "SERVING"
        with held(runtime) as begun:
            await session.ask()
            assert await asyncio.to_thread(begun.wait, 10)
            assert await health_of(channel, services.VERIFIER.full_name) == "SERVING"
            assert told(await failure_of(session.call)) == (INTERNAL, "MODEL_FAILURE", False)
            for name in ("", services.VERIFIER.full_name):
                assert await health_of(channel, name) == "NOT_SERVING"
            refused = VerifySession(channel, opening("b"))
            assert told(await failure_of(refused.call)) == (UNAVAILABLE, "NOT_READY", True)
        await nothing_is_left(runtime)
        for name in ("", services.VERIFIER.full_name):
            assert await health_of(channel, name) == "SERVING"
        after = VerifySession(channel, opening("c"))
        await after.open()
        assert len(await after.verify()) == 1


@pytest.mark.parametrize(
    ("service", "start"),
    [
        pytest.param(services.VERIFIER, stack.verifier, id="verifier"),
        pytest.param(services.DRAFT, stack.draft, id="draft"),
    ],
)
async def test_a_load_takes_what_it_takes(
    service: services.Service,
    start: Callable[..., AbstractAsyncContextManager[Any]],
    target_folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, go_on = threading.Event(), threading.Event()
    load = specdec.lm.serve.load

    def slow(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert go_on.wait(30)
        return load(*arguments, **options)

    monkeypatch.setattr(specdec.lm.serve, "load", slow)
    port = stack.free_port()

    async def serve() -> None:
        async with start(target_folder, port=port, stall_seconds=0.01):
            await asyncio.Event().wait()

    serving = asyncio.create_task(serve())
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            assert await asyncio.to_thread(begun.wait, 30)
            await asyncio.sleep(0.1)
            assert await health_of(channel, "") == "SERVING"
            assert await health_of(channel, service.full_name) == "NOT_SERVING"
    finally:
        go_on.set()
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_watch_hears_of_a_death_that_nobody_announces(target_folder: Path) -> None:
    async with verifier(target_folder) as (channel, runtime):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [
            stub.Watch(health_pb2.HealthCheckRequest(service=name))
            for name in ("", services.VERIFIER.full_name, "nobody")
        ]
        serving, not_serving, unknown = 1, 2, 3
        assert [(await each.read()).status for each in watches] == [serving, serving, unknown]

        def die() -> None:
            raise Death

        runtime.scheduler.wait_seconds = die  # type: ignore[method-assign,assignment]
        runtime.thread.post(lambda: None)
        for each in watches[:2]:
            assert (await asyncio.wait_for(each.read(), 10)).status == not_serving
        for each in watches:
            each.cancel()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "nobody")
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND
