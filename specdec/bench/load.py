"""Requests sent to a gateway by so many clients at once, and when their tokens came."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc

from specdec.v1 import gateway_pb2, gateway_pb2_grpc


@dataclass
class Call:
    """One request and what the client saw of its answer. Times are of the monotonic clock."""

    kind: str
    prompt_id: str
    begun: float = 0.0
    ended: float = 0.0
    arrivals: list[tuple[float, int]] = field(default_factory=list)
    """When each chunk came, and how many tokens it held. Chunks without tokens are left out."""
    token_ids: list[int] = field(default_factory=list)
    completion: gateway_pb2.Completion | None = None
    error: grpc.aio.AioRpcError | None = None

    @property
    def ok(self) -> bool:
        """Whether the answer is complete."""
        return self.completion is not None and self.error is None

    @property
    def num_tokens(self) -> int:
        """Tokens that came."""
        return len(self.token_ids)

    @property
    def latency(self) -> float:
        """Seconds from sending the request to the end of the answer."""
        return self.ended - self.begun

    @property
    def ttft(self) -> float | None:
        """Seconds to the first token. None if none came."""
        return self.arrivals[0][0] - self.begun if self.arrivals else None

    @property
    def inter_token(self) -> list[float]:
        """Seconds of each token after the first chunk.

        A round commits several tokens at once. The time since the chunk before is spread evenly
        over the tokens of a chunk, so that the mean is the time of the generation by its tokens.
        """
        seconds: list[float] = []
        for (before, _), (now, count) in itertools.pairwise(self.arrivals):
            seconds += [(now - before) / count] * count
        return seconds


async def send(
    channel: grpc.aio.Channel,
    request: gateway_pb2.GenerateRequest,
    call: Call,
    timeout: float | None = None,
) -> Call:
    """Sends a request and fills the call. A failed one has an error; nothing is raised for it."""
    call.begun = time.monotonic()
    stream = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request, timeout=timeout)
    try:
        async for response in stream:
            if response.WhichOneof("event") == "completion":
                call.completion = response.completion
            elif response.chunk.token_ids:
                call.arrivals.append((time.monotonic(), len(response.chunk.token_ids)))
                call.token_ids += response.chunk.token_ids
    except grpc.aio.AioRpcError as error:
        call.error = error
    finally:
        stream.cancel()
        call.ended = time.monotonic()
    return call


async def send_all(
    channel: grpc.aio.Channel,
    requests: Sequence[tuple[gateway_pb2.GenerateRequest, Call]],
    concurrency: int,
    *,
    duration: float,
    timeout: float,
    done: Callable[[Call], None] = lambda _: None,
) -> float:
    """Sends requests in order, `concurrency` at once: a client sends its next when one has ended.

    Args:
        channel: to the gateway.
        requests: each with the call that is to be filled.
        concurrency: number of clients.
        duration: seconds after which no further request is sent. Those under way may end.
        timeout: seconds after which a request under way fails.
        done: told of every call that has ended.

    Returns:
        Seconds from the first request to the end of the last answer.
    """
    waiting = iter(requests)
    begun = time.monotonic()

    async def client() -> None:
        for request, call in waiting:
            if time.monotonic() - begun > duration:
                return
            done(await send(channel, request, call, timeout))

    async with asyncio.TaskGroup() as group:
        for _ in range(concurrency):
            group.create_task(client())
    return time.monotonic() - begun
