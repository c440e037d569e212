"""Sessions at a model service without a gateway between, and what is known of their ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from specdec.errors import reason_of
from specdec.lm.runtime import ModelRuntime
from specdec.lm.tokenizer import token_table_sha256
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, verifier_pb2, verifier_pb2_grpc
from tests.models import byte_tokens

ROWS = 300


def opening(session_id: str, prompt: Sequence[int] = (5, 6, 7), **fields: Any) -> common_pb2.Open:
    """The Open of a greedy session."""
    sampling = common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0)
    values: dict[str, Any] = {
        "round": 1,
        "sampling": sampling,
        "acceptance_rule": common_pb2.ACCEPTANCE_RULE_COUPLED,
        "num_draft_tokens": 4,
        "tokenizer_sha256": token_table_sha256(byte_tokens(ROWS)),
        **fields,
    }
    return common_pb2.Open(
        session_id=session_id, base_length=len(prompt), prompt_token_ids=prompt, **values
    )


class VerifySession:
    """A session at a verifier."""

    def __init__(self, channel: grpc.aio.Channel, open_: common_pb2.Open) -> None:
        self.call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify()
        self._opening = open_
        self._round = open_.round
        self._length = open_.base_length

    async def open(self) -> None:
        await self.call.write(verifier_pb2.VerifyRequest(open=self._opening))
        assert (await self.call.read()).HasField("opened")

    async def ask(self, token_ids: Sequence[int] = ()) -> None:
        """Sends drafted tokens."""
        await self.call.write(
            verifier_pb2.VerifyRequest(
                candidates=verifier_pb2.Candidates(
                    round=self._round, base_length=self._length, token_ids=token_ids
                )
            )
        )

    async def verdict(self) -> list[int]:
        """The tokens of the verdict on what was sent."""
        verdict = (await self.call.read()).verdict
        self._round += 1
        self._length += len(verdict.token_ids)
        return list(verdict.token_ids)

    async def verify(self, token_ids: Sequence[int] = ()) -> list[int]:
        await self.ask(token_ids)
        return await self.verdict()

    async def generate(self, rounds: int) -> list[int]:
        """The tokens of so many rounds of two drafted tokens each."""
        found: list[int] = []
        for index in range(rounds):
            found += await self.verify([5 + index, 6])
        return found


async def draft_session(
    channel: grpc.aio.Channel, open_: common_pb2.Open
) -> tuple[Any, draft_pb2.Proposal]:
    """A session at a draft, and its first proposal."""
    call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
    await call.write(draft_pb2.DraftRequest(open=open_))
    assert (await call.read()).HasField("opened")
    return call, (await call.read()).proposal


async def failure_of(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    """The error that a stream ends with."""
    try:
        while await asyncio.wait_for(call.read(), 10) is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError(f"it ended with {await call.code()}")


def told(error: grpc.aio.AioRpcError) -> tuple[grpc.StatusCode, str | None, bool]:
    """The code of an error, its reason, and whether it says when to try again."""
    status = rpc_status.from_call(error)
    retry = error_details_pb2.RetryInfo()
    details = [] if status is None else status.details
    return error.code(), reason_of(error), any(detail.Unpack(retry) for detail in details)


async def health_of(channel: grpc.aio.Channel, service: str) -> str:
    """The answer to a health check."""
    request = health_pb2.HealthCheckRequest(service=service)
    response = await health_pb2_grpc.HealthStub(channel).Check(request, timeout=5)
    name: str = health_pb2.HealthCheckResponse.ServingStatus.Name(response.status)
    return name


async def until(holds: Callable[[], bool]) -> None:
    """Waits until something holds."""
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it does not come to that")


async def nothing_is_left(runtime: ModelRuntime) -> None:
    """Waits until no session is open, and checks the books."""

    def gone() -> bool:
        return runtime.num_sessions == 0 and not runtime.scheduler.residents.sequences

    await until(gone)

    def books() -> None:
        residents = runtime.scheduler.residents
        residents.check_integrity()
        assert not runtime.scheduler.has_work
        assert residents.pool.num_free + residents.prefixes.num_pages == residents.pool.num_pages

    await runtime.thread.run(books)
