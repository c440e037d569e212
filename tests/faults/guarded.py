"""A gateway that is watched from inside, in front of a target that can be held up."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

import gateway.__main__ as gateway_main
from gateway.admission import Admission
from gateway.service import GenerationServicer
from specdec.errors import reason_of
from specdec.v1 import gateway_pb2
from tests.stack import Gateway, Result, gateway
from verifier_service.service import VerifierServicer

Outcome = Result | grpc.aio.AioRpcError


@dataclass
class Guarded:
    """A running gateway without draft, its insides, and its target."""

    gateway: Gateway
    servicer: GenerationServicer
    verifier: VerifierServicer

    @property
    def admission(self) -> Admission:
        return self.servicer.reception.admission

    @contextmanager
    def held(self) -> Iterator[None]:
        """Computes nothing while the block runs."""
        assert self.verifier.runtime is not None
        go_on = threading.Event()
        self.verifier.runtime.thread.post(lambda: _wait(go_on))
        try:
            yield
        finally:
            go_on.set()

    def start(
        self, request: gateway_pb2.GenerateRequest, key: str | None = None, **options: Any
    ) -> asyncio.Task[Outcome]:
        """Sends a request. What becomes of it is the task's result."""
        if key is not None:
            options["metadata"] = (("authorization", f"Bearer {key}"),)
        return asyncio.create_task(_outcome(self.gateway, request, options))

    async def send(
        self, request: gateway_pb2.GenerateRequest, key: str | None = None, **options: Any
    ) -> Outcome:
        return await self.start(request, key, **options)

    async def idle(self) -> None:
        """Waits until nothing runs or waits, and sees that nothing is left over."""
        await until(lambda: not self.admission.running_sessions and not self.admission.num_waiting)
        self.admission.check_integrity()
        assert self.admission.running_tokens == 0


def _wait(event: threading.Event) -> None:
    event.wait(20)


async def _outcome(
    running: Gateway, request: gateway_pb2.GenerateRequest, options: dict[str, Any]
) -> Outcome:
    try:
        return await running.send(request, **options)
    except grpc.aio.AioRpcError as error:
        return error


@asynccontextmanager
async def guarded(
    target: tuple[str, VerifierServicer], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> AsyncIterator[Guarded]:
    """A gateway without draft in front of a verifier."""
    made: list[GenerationServicer] = []

    class Watched(GenerationServicer):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    address, verifier = target
    with monkeypatch.context() as patched:
        patched.setattr(gateway_main, "GenerationServicer", Watched)
        async with gateway(address, **options) as running:
            yield Guarded(running, made[0], verifier)


async def until(condition: Callable[[], bool]) -> None:
    """Waits until something has come about."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.002)


def retry_delay(error: Outcome) -> float:
    """Of a refusal: the seconds of its RetryInfo."""
    assert isinstance(error, grpc.aio.AioRpcError), error
    status = rpc_status.from_call(error)
    assert status is not None
    found = error_details_pb2.RetryInfo()
    assert any(detail.Unpack(found) for detail in status.details), "there is no RetryInfo"
    return found.retry_delay.ToNanoseconds() / 1e9


def refused(outcomes: Sequence[Outcome], code: grpc.StatusCode, reason: str) -> list[Outcome]:
    """Those that failed, all of them for this reason."""
    errors = [outcome for outcome in outcomes if isinstance(outcome, grpc.aio.AioRpcError)]
    for error in errors:
        assert (error.code(), reason_of(error)) == (code, reason), error
    return list(errors)


def result(outcome: Outcome) -> Result:
    """One that did not fail."""
    assert isinstance(outcome, Result), outcome
    return outcome
