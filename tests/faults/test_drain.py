"""SIGTERM: not ready, no new sessions, an end for those that run, and exit 0 in time."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from specdec import services
from specdec.cli.health import wait_until_ready
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    gateway_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests import stack
from tests.faults.raw_sessions import (
    VerifySession,
    draft_session,
    failure_of,
    health_of,
    opening,
    told,
)
from tests.test_serving import Running, process

UNAVAILABLE = grpc.StatusCode.UNAVAILABLE
REFUSED = (UNAVAILABLE, "DRAINING", True)
MARGIN_SECONDS = 2.0
"""A process may take so long beyond its grace."""


@asynccontextmanager
async def running(
    module: str, service: services.Service, folder: Path, port: int, **settings: Any
) -> AsyncIterator[tuple[Running, grpc.aio.Channel]]:
    """A service in a process of its own, ready."""
    address = f"127.0.0.1:{port}"
    with process(module, folder, port, num_threads=1, **settings) as started:
        assert await wait_until_ready(service, address, 90) is None, started.log.read_text()
        async with grpc.aio.insecure_channel(address) as channel:
            yield started, channel


async def never_read(channel: grpc.aio.Channel, name: str) -> Any:
    """A Watch whose client does not read."""
    return health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(service=name))


SMALL_WINDOW = (("grpc.http2.lookahead_bytes", 1024), ("grpc.http2.bdp_probe", 0))
"""Of a client that takes in hardly more than it reads."""


async def stop_reading(channel: grpc.aio.Channel) -> Any:
    """A session that has more to send than its client, of a small window, takes in unread."""
    logprobs = common_pb2.LogprobsRequest(num_top=20)
    session = VerifySession(channel, opening("unread", logprobs=logprobs))
    await session.open()
    for index in range(100):
        candidates = verifier_pb2.Candidates(round=1 + index, base_length=3 + index)
        await session.call.write(verifier_pb2.VerifyRequest(candidates=candidates))
    return session.call


async def not_ready(channel: grpc.aio.Channel, service: services.Service) -> None:
    watch = health_pb2_grpc.HealthStub(channel).Watch(
        health_pb2.HealthCheckRequest(service=service.full_name)
    )
    while (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING:
        pass
    watch.cancel()


@pytest.mark.slow
async def test_sigterm_drains_a_verifier(target_folder: Path, tmp_path: Path) -> None:
    grace, port = 2.0, stack.free_port()
    async with (
        running(
            *("verifier_service", services.VERIFIER, tmp_path, port),
            model=target_folder,
            grace_seconds=grace,
        ) as (verifier, channel),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", SMALL_WINDOW) as narrow,
    ):
        idle = VerifySession(channel, opening("idle"))
        await idle.open()
        first = await idle.verify([5])
        silent = VerifySession(channel, opening("never opened"))
        unread = await stop_reading(narrow)
        watches = [await never_read(channel, name) for name in ("", services.VERIFIER.full_name)]

        begun = time.monotonic()
        ending = asyncio.create_task(verifier.end(grace + MARGIN_SECONDS))
        await not_ready(channel, services.VERIFIER)
        assert await health_of(channel, "") == "SERVING"
        late = VerifySession(channel, opening("late"))
        assert told(await failure_of(late.call)) == REFUSED
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await verifier_pb2_grpc.VerifierServiceStub(channel).GetModelInfo(
                verifier_pb2.VerifierServiceGetModelInfoRequest()
            )
        assert told(caught.value) == REFUSED
        # Who is between rounds goes on until the grace ends.
        assert len(first) + len(await idle.verify([7])) >= 2
        assert not ending.done()
        for call in (idle.call, silent.call):
            assert told(await failure_of(call)) == REFUSED
        assert time.monotonic() - begun >= grace
        assert await ending == 0
        for call in (unread, *watches):
            call.cancel()
        assert verifier.events()[-1] == "stopped"


@pytest.mark.slow
async def test_sigterm_drains_a_draft_whose_sessions_end_before_the_grace(tmp_path: Path) -> None:
    async with running(
        *("draft_service", services.DRAFT, tmp_path, stack.free_port()),
        drafters="lookup",
        grace_seconds=60,
    ) as (draft, channel):
        call, _ = await draft_session(channel, opening("a", [5, 6, 7, 5, 6]))
        ending = asyncio.create_task(draft.end(20))
        await not_ready(channel, services.DRAFT)
        late = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        assert told(await failure_of(late)) == REFUSED
        advance = draft_pb2.Advance(round=2, base_length=5, token_ids=[7], num_draft_tokens=4)
        await call.write(draft_pb2.DraftRequest(advance=advance))
        assert (await call.read()).proposal.token_ids
        begun = time.monotonic()
        await call.done_writing()
        assert await ending == 0
        assert time.monotonic() - begun < MARGIN_SECONDS


@pytest.mark.slow
async def test_sigterm_drains_a_gateway(target_folder: Path, tmp_path: Path) -> None:
    port = stack.free_port()
    async with (
        stack.verifier(target_folder) as (verifier_address, servicer),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        assert servicer.runtime is not None
        thread = servicer.runtime.thread
        settings = {"grace_seconds": 1.0, "verifier_address": verifier_address}
        with process("gateway", tmp_path, port, **settings) as gateway:
            address = f"127.0.0.1:{port}"
            assert await wait_until_ready(services.GATEWAY, address, 30) is None
            stub = gateway_pb2_grpc.GenerationServiceStub(channel)
            front = stack.Gateway(address, channel)
            request = front.request([5], max_new_tokens=400, ignore_eos=True, k=0)
            cut = stub.Generate(request)
            assert (await cut.read()).chunk.token_ids
            # It cannot end within the grace.
            busy = asyncio.create_task(hold(thread, 2.0))
            watch = await never_read(channel, services.GATEWAY.full_name)
            ending = asyncio.create_task(gateway.end(1.0 + MARGIN_SECONDS))
            await not_ready(channel, services.GATEWAY)
            assert told(await failure_of(stub.Generate(request))) == REFUSED
            error = await failure_of(cut)
            assert error.code() == UNAVAILABLE
            assert await ending == 0
            watch.cancel()
            await busy


async def hold(thread: Any, seconds: float) -> None:
    """Keeps a model thread from running passes."""
    await thread.run(time.sleep, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_a_service_at_once(
    tmp_path: Path, second: signal.Signals
) -> None:
    async with running(
        *("draft_service", services.DRAFT, tmp_path, stack.free_port()),
        drafters="lookup",
        grace_seconds=60,
    ) as (draft, channel):
        call, _ = await draft_session(channel, opening("a"))
        draft.process.send_signal(signal.SIGTERM)
        await not_ready(channel, services.DRAFT)
        draft.process.send_signal(second)
        assert await asyncio.to_thread(draft.process.wait, MARGIN_SECONDS) == 128 + second
        assert (await failure_of(call)).code() == UNAVAILABLE
        assert draft.events()[-1] == "stopped at once"


async def test_a_watch_without_a_reader_keeps_no_other_from_hearing(target_folder: Path) -> None:
    async with (
        stack.verifier(target_folder) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        name = services.VERIFIER.full_name
        unread = [await never_read(channel, name) for _ in range(50)]
        watch = await never_read(channel, name)
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        # The server's end is heard of, and takes no longer for those that do not listen.
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(20):
            await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
        for call in unread:
            call.cancel()


@pytest.mark.slow
async def test_the_age_of_connections_costs_no_token(target_folder: Path) -> None:
    age = {"max_connection_age_seconds": 0.5}
    async with stack.pair(target_folder, target_folder) as calm:
        options = {"ignore_eos": True, "temperature": 0.0}
        request = calm.gateway.request([5, 6], max_new_tokens=120, k=2, **options)
        expected = await calm.gateway.send(request)
    async with stack.pair(
        target_folder, target_folder, target_options=age, draft_options=age, **age
    ) as aging:
        runtime = aging.verifier.runtime
        assert runtime is not None
        forward = runtime.loaded.model.forward

        def slow(segments: Any) -> Any:
            time.sleep(0.04)
            return forward(segments)

        runtime.loaded.model.forward = slow  # type: ignore[method-assign]
        begun = time.monotonic()
        sending = asyncio.create_task(aging.gateway.send(request))
        short = 0
        while not sending.done():
            # New calls find connections of any age.
            result = await aging.gateway.generate([9], max_new_tokens=3, ignore_eos=True, k=0)
            assert len(result.token_ids) == 3
            short += 1
        found = await sending
        # It went through several ages.
        assert time.monotonic() - begun > 1.5
        assert short > 3
        assert found.token_ids == expected.token_ids
        assert found.completion.usage.completion_tokens == 120
