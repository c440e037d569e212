"""A sweep over numbers of clients, with and without speculation by turns."""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import grpc

from specdec.bench.load import Call, send_all
from specdec.bench.measures import Summary, summarise
from specdec.bench.prompts import Prompt
from specdec.v1 import common_pb2, gateway_pb2

PLAIN = "plain"
SPECULATIVE = "speculative"
MODES = (PLAIN, SPECULATIVE)

_WARM_UP_CLIENTS = 4
_WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Workload:
    """What every request of a sweep asks for."""

    max_new_tokens: int = 64
    temperature: float = 0.0
    seed: int = 0
    num_draft_tokens: int | None = None
    draft_topk: int | None = None
    adaptive: bool | None = None
    run_ahead: int | None = None
    acceptance_rule: common_pb2.AcceptanceRule.ValueType = common_pb2.ACCEPTANCE_RULE_UNSPECIFIED
    ignore_eos: bool = False

    def request(self, prompt: Prompt, mode: str, salt: str) -> gateway_pb2.GenerateRequest:
        """The request for a prompt. What it computes is shared only with those of one salt."""
        message = gateway_pb2.ChatMessage(role="user", content=prompt.text)
        return gateway_pb2.GenerateRequest(
            chat=gateway_pb2.ChatInput(messages=[message]),
            sampling=gateway_pb2.SamplingParams(temperature=self.temperature, seed=self.seed),
            stopping=gateway_pb2.StoppingParams(
                max_new_tokens=self.max_new_tokens, ignore_eos=self.ignore_eos
            ),
            speculation=self._speculation(mode),
            prefix_cache=common_pb2.PrefixCacheParams(salt=salt),
        )

    def _speculation(self, mode: str) -> gateway_pb2.SpeculationParams:
        if mode != SPECULATIVE:
            return gateway_pb2.SpeculationParams(
                enabled=False, acceptance_rule=self.acceptance_rule
            )
        return gateway_pb2.SpeculationParams(
            enabled=True,
            num_draft_tokens=self.num_draft_tokens,
            draft_topk=self.draft_topk,
            adaptive=self.adaptive,
            run_ahead=self.run_ahead,
            acceptance_rule=self.acceptance_rule,
        )


class Point(NamedTuple):
    """One measurement to be made."""

    repeat: int
    concurrency: int
    mode: str
    num_requests: int


@dataclass(frozen=True)
class Plan:
    """What a sweep measures."""

    prompts: Sequence[Prompt]
    concurrency: Sequence[int] = (1, 2, 4, 8, 16, 32)
    modes: Sequence[str] = MODES
    repeats: int = 3
    requests: int | None = None
    """For each measurement; None for twice as many as there are clients, but at least 4."""
    workload: Workload = field(default_factory=Workload)
    duration: float = 60.0
    timeout: float = 120.0

    def __post_init__(self) -> None:
        most = max(self.concurrency)
        if len(self.prompts) < max(most, self.requests or 0):
            raise ValueError(
                f"a measurement uses each prompt once, and there are {len(self.prompts)}: "
                "choose fewer clients, fewer requests or more kinds"
            )
        if self.requests is not None and self.requests < most:
            raise ValueError(f"{self.requests} requests cannot keep {most} clients busy")

    def points(self) -> Iterator[Point]:
        """The measurements in their order: the modes of one level follow each other, by turns."""
        for repeat, concurrency in itertools.product(range(self.repeats), self.concurrency):
            count = self.requests or min(max(4, 2 * concurrency), len(self.prompts))
            for mode in self.modes if repeat % 2 == 0 else reversed(self.modes):
                yield Point(repeat, concurrency, mode, count)

    def prompts_of(self, point: Point) -> list[Prompt]:
        """Distinct ones: the same for both modes, others for the next repeat."""
        begin = point.repeat * point.num_requests
        count = len(self.prompts)
        return [self.prompts[(begin + index) % count] for index in range(point.num_requests)]


@dataclass
class Measurement:
    """What a point came to."""

    repeat: int
    concurrency: int
    mode: str
    planned_requests: int
    summary: Summary
    calls: list[Call]


@dataclass
class Progress:
    """Told how a sweep goes on."""

    begin: Callable[[Point], None] = lambda _: None
    call_ended: Callable[[Call], None] = lambda _: None
    end: Callable[[Measurement], None] = lambda _: None


async def warm_up(channel: grpc.aio.Channel, plan: Plan) -> None:
    """Sends a few short requests in each mode, which are not measured.

    Raises:
        grpc.aio.AioRpcError: none of them got an answer.
    """
    clients = min(_WARM_UP_CLIENTS, max(plan.concurrency))
    short = Workload(
        max_new_tokens=min(_WARM_UP_TOKENS, plan.workload.max_new_tokens),
        num_draft_tokens=plan.workload.num_draft_tokens,
        temperature=plan.workload.temperature,
        acceptance_rule=plan.workload.acceptance_rule,
    )
    for mode in plan.modes:
        salt = secrets.token_hex(8)
        pairs = [
            (short.request(prompt, mode, salt), Call(prompt.kind, prompt.id))
            for prompt in plan.prompts[:clients]
        ]
        await send_all(channel, pairs, clients, duration=plan.duration, timeout=plan.timeout)
        errors = [call.error for _, call in pairs if call.error is not None]
        if len(errors) == len(pairs):
            raise errors[0]


async def sweep(
    channel: grpc.aio.Channel, plan: Plan, results: list[Measurement], progress: Progress
) -> None:
    """Measures every point, one after the other.

    Args:
        channel: to the gateway.
        plan: what to measure.
        results: filled as measurements end, so that what is there survives a cancellation.
        progress: told how it goes on.
    """
    for point in plan.points():
        progress.begin(point)
        # A salt of its own: no measurement finds in the prefix cache what an earlier one computed.
        salt = secrets.token_hex(8)
        pairs = [
            (plan.workload.request(prompt, point.mode, salt), Call(prompt.kind, prompt.id))
            for prompt in plan.prompts_of(point)
        ]
        seconds = await send_all(
            channel,
            pairs,
            point.concurrency,
            duration=plan.duration,
            timeout=plan.timeout,
            done=progress.call_ended,
        )
        calls = [call for _, call in pairs if call.begun]
        measurement = Measurement(
            repeat=point.repeat,
            concurrency=point.concurrency,
            mode=point.mode,
            planned_requests=point.num_requests,
            summary=summarise(calls, seconds),
            calls=calls,
        )
        results.append(measurement)
        progress.end(measurement)
