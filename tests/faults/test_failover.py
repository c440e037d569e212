"""Verifiers and drafts that die, hang, restart or lie in the middle of a generation."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from gateway.draft_source import DraftSource
from gateway.draft_stream import Patience
from gateway.peer import Peer, PeerState
from gateway.peers import DraftPeer
from gateway.replicas import Replicas
from gateway.settings import GatewaySettings
from specdec.errors import reason_of
from specdec.streams import require
from specdec.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from tests.stack import Gateway, Result, draft, drafts_are_used, free_port, gateway, verifier
from verifier_service.verification import Verification

PROMPT = [5, 6, 7, 8, 9]
LENGTH = 160
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "coupled": {"rule": "coupled", "seed": 3},
    "rejection": {"rule": "rejection", "seed": 3},
    "block": {"rule": "block", "seed": 3},
    "penalties": {
        **{"temperature": 0.0, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
        "logit_bias": {7: 2.0},
    },
    "tree": {"rule": "coupled", "seed": 3, "topk": 3},
    "run-ahead": {"rule": "coupled", "seed": 3, "run_ahead": 4},
    "plain": {"rule": "coupled", "seed": 3, "k": 0},
}


def request_of(running: Gateway, way: str, **options: Any) -> gateway_pb2.GenerateRequest:
    return running.request(
        PROMPT, **{"k": 4, "max_new_tokens": LENGTH, "ignore_eos": True, **WAYS[way], **options}
    )


class Restartable:
    """A service that is stopped and started again at the same port."""

    def __init__(self, start: Callable[..., Any], model: Path) -> None:
        self.address = f"127.0.0.1:{free_port()}"
        self.servicer: Any = None
        self._start, self._model = start, model
        self._running = AsyncExitStack()

    async def start(self) -> None:
        port = int(self.address.rpartition(":")[2])
        service = self._start(self._model, port=port)
        _, self.servicer = await self._running.enter_async_context(service)

    async def stop(self) -> None:
        """Breaks all of its streams at once."""
        await self._running.aclose()


@asynccontextmanager
async def verifiers(model: Path, count: int = 2) -> AsyncIterator[list[Restartable]]:
    found = [Restartable(verifier, model) for _ in range(count)]
    try:
        for each in found:
            await each.start()
        yield found
    finally:
        for each in found:
            await each.stop()


async def interrupted(
    running: Gateway,
    request: gateway_pb2.GenerateRequest,
    interrupt: Callable[[], Awaitable[None]],
    every: int = 40,
    **call_options: Any,
) -> Result:
    """What a client gets while `interrupt` runs after each so many tokens."""
    result, next_at = Result(), every
    stub = gateway_pb2_grpc.GenerationServiceStub(running.channel)
    call = stub.Generate(request, **call_options)
    async for response in call:
        result.token_ids += response.chunk.token_ids
        result.text += response.chunk.text
        result.logprobs += response.chunk.logprobs
        if response.HasField("completion"):
            result.completion = response.completion
        if len(result.token_ids) >= next_at:
            next_at += every
            await interrupt()
    return result


@pytest.mark.parametrize(
    "way",
    [w if w in ("coupled", "rejection") else pytest.param(w, marks=pytest.mark.slow) for w in WAYS],
)
async def test_a_verifier_that_dies_costs_no_token_if_there_is_another(
    target_folder: Path, draft_folder: Path, way: str
) -> None:
    async with (
        verifiers(target_folder) as replicas,
        draft(draft_folder) as (draft_address, _),
        gateway(",".join(r.address for r in replicas), draft_address) as running,
    ):
        await drafts_are_used(running)
        request = request_of(running, way, logprobs=gateway_pb2.LogprobsParams(num_top=1))
        undisturbed = await running.send(request)

        async def kill_the_one_in_use() -> None:
            for replica in replicas:
                if replica.servicer.runtime.num_sessions:
                    await replica.stop()
                    await replica.start()
                    return

        result = await interrupted(running, request, kill_the_one_in_use)
        assert result.token_ids == undisturbed.token_ids
        assert result.text == undisturbed.text
        assert len(result.logprobs) == LENGTH
        assert result.completion.usage.completion_tokens == LENGTH
        assert result.completion.usage.prompt_tokens == len(PROMPT)
        assert result.speculation.verifier_resumptions >= 1
        if way != "plain":
            assert result.speculation.num_accepted_tokens > 0
            assert result.speculation.fallback_rounds == 0  # the draft has seen nothing of it


@pytest.mark.slow
async def test_the_only_verifier_is_waited_for_while_it_restarts(target_folder: Path) -> None:
    async with verifiers(target_folder, 1) as (only,), gateway(only.address) as running:
        request = request_of(running, "greedy", k=0)
        undisturbed = await running.send(request)

        async def restart() -> None:
            await only.stop()
            await asyncio.sleep(0.3)
            await only.start()

        result = await interrupted(running, request, restart, every=50)
        assert result.token_ids == undisturbed.token_ids
        assert result.speculation.verifier_resumptions >= 1
        assert not result.logprobs, "nobody asked for them"
        # And so is a generation that begins just then.
        await only.stop()
        waiting = asyncio.create_task(running.send(request))
        await asyncio.sleep(0.2)
        await only.start()
        assert (await waiting).token_ids == undisturbed.token_ids


async def test_a_verifier_that_stays_away_ends_the_generation_in_time(
    target_folder: Path,
) -> None:
    async with (
        verifiers(target_folder, 1) as (only,),
        gateway(only.address, failover_seconds=0.3) as running,
    ):
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await interrupted(running, request_of(running, "greedy", k=0), only.stop)
        assert failure.value.code() == grpc.StatusCode.UNAVAILABLE
        assert reason_of(failure.value) == "VERIFIER_UNAVAILABLE"


async def test_the_clients_deadline_holds_while_a_verifier_is_looked_for(
    target_folder: Path,
) -> None:
    async with verifiers(target_folder, 1) as (only,), gateway(only.address) as running:
        request = request_of(running, "greedy", k=0, max_new_tokens=400)
        with pytest.raises(grpc.aio.AioRpcError) as failure:
            await interrupted(running, request, only.stop, every=20, timeout=1.0)
        assert failure.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED


@pytest.mark.slow
@pytest.mark.parametrize("way", ["greedy", "coupled", "rejection", "tree", "run-ahead"])
async def test_speculation_is_picked_up_again_when_the_draft_is_back(
    target_folder: Path, draft_folder: Path, way: str
) -> None:
    drafting = Restartable(draft, draft_folder)
    await drafting.start()
    async with (
        verifier(target_folder) as (verifier_address, _),
        gateway(verifier_address, drafting.address, draft_patience_seconds=60.0) as running,
    ):
        await drafts_are_used(running)
        # More than the restart takes, and the breaker's pause.
        request = request_of(running, way, max_new_tokens=480)
        undisturbed = await running.send(request)
        restarts = []

        async def restart() -> None:
            if not restarts:
                restarts.append(asyncio.create_task(drafting.stop()))
                await restarts[0]
                restarts.append(asyncio.create_task(drafting.start()))

        try:
            result = await interrupted(running, request, restart)
            await asyncio.gather(*restarts)
        finally:
            await drafting.stop()
    speculation = result.speculation
    assert speculation.fallback_rounds > 0
    assert speculation.draft_resumptions == 1
    if way != "rejection":
        assert result.token_ids == undisturbed.token_ids
    assert len(result.token_ids) == 480
    assert speculation.num_draft_tokens < undisturbed.speculation.num_draft_tokens


@contextmanager
def held(replica: Restartable) -> Iterator[None]:
    """Its model computes nothing while the block runs."""
    go_on = threading.Event()
    replica.servicer.runtime.thread.post(lambda: _wait(go_on))
    try:
        yield
    finally:
        go_on.set()


def _wait(event: threading.Event) -> None:
    event.wait(20)


async def the_one_in_use(replicas: Sequence[Restartable]) -> Restartable:
    async with asyncio.timeout(20):
        while True:
            for replica in replicas:
                if replica.servicer.runtime.num_sessions:
                    return replica
            await asyncio.sleep(0.002)


@pytest.mark.parametrize("begun", [False, True], ids=["opening", "running"])
async def test_patience_is_counted_from_the_failure_and_not_from_the_wait_before_it(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    monkeypatch.setattr("gateway.verifier_session._OPENING_SECONDS", 0.1)
    async with (
        verifiers(target_folder) as replicas,
        gateway(",".join(r.address for r in replicas), failover_seconds=0.1) as running,
    ):
        request = request_of(running, "greedy", k=0, max_new_tokens=400)
        undisturbed = await running.send(request)
        with ExitStack() as holding:
            if not begun:
                for replica in replicas:
                    holding.enter_context(held(replica))
            call = asyncio.create_task(running.send(request))
            in_use = await the_one_in_use(replicas)
            if begun:
                holding.enter_context(held(in_use))
            await asyncio.sleep(0.5)
            await in_use.stop()
        assert (await call).token_ids == undisturbed.token_ids


@pytest.mark.slow
async def test_pings_through_a_long_silence_end_no_connection(target_folder: Path) -> None:
    async with (
        verifiers(target_folder, 1) as replicas,
        gateway(replicas[0].address, peer_silence_seconds=1.0) as running,
    ):
        with held(replicas[0]):
            call = asyncio.create_task(running.generate(PROMPT, max_new_tokens=8, ignore_eos=True))
            # As long as a server that allows two early pings would take to complain.
            await asyncio.sleep(5)
        result = await call
        assert len(result.token_ids) == 8
        assert result.speculation.verifier_resumptions == 0


@pytest.mark.slow
async def test_a_verifier_that_answers_pings_and_nothing_else_is_left(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        verifiers(target_folder) as replicas,
        gateway(",".join(r.address for r in replicas), peer_silence_seconds=1.0) as running,
    ):
        request = request_of(running, "greedy", k=0, max_new_tokens=400)
        undisturbed = await running.send(request)
        call = asyncio.create_task(running.send(request))
        stuck = await the_one_in_use(replicas)

        async def never_there(runtime: Any, *others: Any) -> Any:
            if runtime is stuck.servicer.runtime:
                await asyncio.Event().wait()
            return await require(runtime, *others)

        monkeypatch.setattr("verifier_service.service.require", never_there)
        with held(stuck):
            async with asyncio.timeout(15):
                result = await call
        assert result.token_ids == undisturbed.token_ids


async def test_an_open_that_is_cancelled_leaves_no_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[Any] = []

    class Hanging:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.closed = False
            made.append(self)

        async def open(self) -> None:
            await asyncio.Event().wait()

        def close(self) -> None:
            self.closed = True

    monkeypatch.setattr("gateway.draft_source.DraftStream", Hanging)
    target: Any = SimpleNamespace(info=common_pb2.ModelInfo())
    source = DraftSource(
        Replicas([], DraftPeer),  # type: ignore[arg-type]
        target,
        common_pb2.Open(),
        key=b"",
        patience=Patience(first=1.0, round=1.0, session=1.0),
        deadline_at=None,
        request_id="",
    )
    peer = DraftPeer("127.0.0.1:1", 5.0, lambda: None)
    costs = common_pb2.DraftCosts()
    opening = asyncio.create_task(source.open(peer, [], rounds=0, num_draft_tokens=1, costs=costs))
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    source.close()
    assert [stream.closed for stream in made] == [True]
    assert peer.sessions == 0
    await peer.close()


async def test_a_session_that_the_draft_has_no_room_for_harms_no_other(
    target_folder: Path, draft_folder: Path
) -> None:
    async with (
        verifier(target_folder) as (verifier_address, _),
        draft(draft_folder, max_context_length=64) as (draft_address, drafting),
        gateway(verifier_address, draft_address) as running,
    ):
        await drafts_are_used(running)
        assert drafting.runtime is not None
        short = {"k": 3, "temperature": 0.0, "max_new_tokens": 20, "ignore_eos": True}
        # One does not fit from the beginning, and one stops to fit.
        too_long = {**short, "max_new_tokens": 300}
        long = [
            asyncio.create_task(running.generate(list(range(5, 5 + count)), **too_long))
            for count in (100, 30)
        ]
        while not all(task.done() for task in long):
            result = await running.generate(PROMPT, **short)
            assert result.speculation.fallback_rounds == 0, result.speculation.fallback_reason
        results = [await task for task in long]
    assert results[0].speculation.num_draft_tokens == 0
    assert results[1].speculation.num_draft_tokens > 0
    for result in results:
        assert result.speculation.fallback_rounds > 0
        assert len(result.token_ids) == 300


async def test_replicas_with_less_room_get_only_sessions_that_fit(target_folder: Path) -> None:
    async with (
        verifier(target_folder, max_num_draft_tokens=8) as (large, _),
        verifier(target_folder, max_num_draft_tokens=3) as (small, servicer),
    ):
        for first, second in ((large, small), (small, large)):
            async with gateway(f"{first},{second}", num_draft_tokens=3) as running:
                for token_id in range(12):
                    options = {"max_new_tokens": 3, "ignore_eos": True}
                    result = await running.generate([token_id], k=3, **options)
                    assert len(result.token_ids) == 3
        assert servicer.runtime is not None


@pytest.mark.parametrize("wrong", ["verifier", "dns:verifier", "a:grpc", "a:0", "a:1,,b:1", ""])
def test_addresses_that_are_none_are_refused_at_the_start(wrong: str) -> None:
    with pytest.raises(ValidationError, match="verifier_address"):
        GatewaySettings(verifier_address=wrong)  # type: ignore[arg-type]


async def test_a_session_that_breaks_by_itself_leaves_its_verifier_ready_for_others(
    target_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with verifier(target_folder) as (address, _), gateway(address) as running:
        states: list[PeerState] = []
        monkeypatch.setattr(Peer, "_set", lambda peer, state, reason: states.append(state))
        with monkeypatch.context() as planted:

            def broken(work: Verification) -> None:
                raise RuntimeError("planted")

            planted.setattr(Verification, "start", broken)
            with pytest.raises(grpc.aio.AioRpcError) as failure:
                await running.send(request_of(running, "greedy", k=0))
        assert reason_of(failure.value) == "MODEL_FAILURE"
        assert PeerState.CONNECTING not in states
        assert len((await running.send(request_of(running, "greedy", k=0))).token_ids) == LENGTH
