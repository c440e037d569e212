"""Real services on loopback, in this process, for tests."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import draft_service.__main__ as draft_main
import gateway.__main__ as gateway_main
from draft_service.combination import Combination
from draft_service.drafter import Drafter
from draft_service.model_drafter import ModelDrafter
from draft_service.service import DraftServicer
from draft_service.settings import DraftSettings
from gateway.settings import GatewaySettings
from specdec import services, wire
from specdec.cli.health import wait_until_ready
from specdec.lm.runtime import ModelRuntime
from specdec.lm.serve import serve
from specdec.settings import ServiceSettings
from specdec.v1 import (
    common_pb2,
    gateway_pb2,
    gateway_pb2_grpc,
    verifier_pb2,
)
from verifier_service.service import VerifierServicer
from verifier_service.settings import VerifierSettings

RULES = {
    "rejection": common_pb2.ACCEPTANCE_RULE_REJECTION,
    "block": common_pb2.ACCEPTANCE_RULE_BLOCK,
    "coupled": common_pb2.ACCEPTANCE_RULE_COUPLED,
}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


@asynccontextmanager
async def _service(
    service: services.Service, settings: ServiceSettings, work: Any
) -> AsyncIterator[str]:
    """Runs a service's main coroutine while the block runs. Yields its address once it is ready."""
    address = f"127.0.0.1:{settings.port}"
    asked = f"127.0.0.1:{settings.health_port or settings.port}"
    task = asyncio.create_task(work)
    try:
        waiting = asyncio.create_task(wait_until_ready(service, asked, 60))
        await asyncio.wait({task, waiting}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            waiting.cancel()
            await task
        assert waiting.result() is None, waiting.result()
        yield address
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def _model_options(model: Path | None, options: dict[str, Any]) -> dict[str, Any]:
    defaults = {"dtype": "float32", "num_threads": 1, "port": free_port(), "grace_seconds": 0.0}
    return {"model": str(model) if model else None, **defaults, **options}


@asynccontextmanager
async def verifier(model: Path, **options: Any) -> AsyncIterator[tuple[str, VerifierServicer]]:
    settings = VerifierSettings(**_model_options(model, options))
    servicer = VerifierServicer(settings.max_sessions)
    work = serve(
        settings,
        service=services.VERIFIER,
        servicer=servicer,
        register=lambda s: wire.register(
            s, servicer, verifier_pb2.DESCRIPTOR.services_by_name["VerifierService"]
        ),
    )
    async with _service(services.VERIFIER, settings, work) as address:
        yield address, servicer


@dataclass
class Drafting:
    """A running draft service."""

    servicer: DraftServicer

    @property
    def runtime(self) -> ModelRuntime | None:
        """That of its model, if it has one."""
        drafter: Drafter | None = self.servicer.drafter
        if isinstance(drafter, Combination):
            drafter = drafter.drafters[-1]
        return drafter.runtime if isinstance(drafter, ModelDrafter) else None


@asynccontextmanager
async def draft(model: Path | None = None, **options: Any) -> AsyncIterator[tuple[str, Drafting]]:
    """A draft service, by default with a model alone."""
    settings = DraftSettings(**_model_options(model, {"drafters": ["model"], **options}))
    servicer = DraftServicer(settings.max_sessions)
    async with _service(services.DRAFT, settings, draft_main.serve(settings, servicer)) as at:
        yield at, Drafting(servicer)


@dataclass
class Result:
    """What a Generate call gave."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    origins: list[int] = field(default_factory=list)
    token_texts: list[str] = field(default_factory=list)
    chunks: list[gateway_pb2.Chunk] = field(default_factory=list)
    logprobs: list[common_pb2.TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: gateway_pb2.PromptLogprobs | None = None
    completion: gateway_pb2.Completion = field(default_factory=gateway_pb2.Completion)

    @property
    def speculation(self) -> gateway_pb2.SpeculationStatistics:
        return self.completion.speculation


@dataclass
class Gateway:
    """A running gateway, and a client of it."""

    address: str
    channel: grpc.aio.Channel

    def request(
        self,
        prompt: str | Sequence[int],
        *,
        k: int | None = None,
        rule: str | None = None,
        topk: int | None = None,
        adaptive: bool | None = None,
        run_ahead: int | None = None,
        stop_token_ids: Sequence[int] = (),
        stop_strings: Sequence[str] = (),
        ignore_eos: bool = False,
        max_new_tokens: int | None = None,
        min_new_tokens: int = 0,
        include_stop_string: bool = False,
        skip_special_tokens: bool | None = None,
        logprobs: gateway_pb2.LogprobsParams | None = None,
        n: int | None = None,
        **sampling: Any,
    ) -> gateway_pb2.GenerateRequest:
        request = gateway_pb2.GenerateRequest(
            sampling=gateway_pb2.SamplingParams(**sampling),
            stopping=gateway_pb2.StoppingParams(
                max_new_tokens=max_new_tokens,
                stop_token_ids=stop_token_ids,
                stop_strings=stop_strings,
                ignore_eos=ignore_eos,
                min_new_tokens=min_new_tokens,
                include_stop_string=include_stop_string,
                skip_special_tokens=skip_special_tokens,
            ),
            logprobs=logprobs,
            n=n,
            speculation=gateway_pb2.SpeculationParams(
                num_draft_tokens=k,
                acceptance_rule=RULES[rule] if rule else None,  # type: ignore[arg-type]
                draft_topk=topk,
                adaptive=adaptive,
                run_ahead=run_ahead,
            ),
        )
        if isinstance(prompt, str):
            request.text = prompt
        else:
            request.token_ids.ids.extend(prompt)
        return request

    async def send(self, request: gateway_pb2.GenerateRequest, **call_options: Any) -> Result:
        """Calls Generate and collects the answer."""
        return (await self.send_for_samples(request, **call_options))[0]

    async def send_for_samples(
        self, request: gateway_pb2.GenerateRequest, **call_options: Any
    ) -> list[Result]:
        """Calls Generate and collects the answers of all samples."""
        results = [Result() for _ in range(request.n or 1)]
        call = gateway_pb2_grpc.GenerationServiceStub(self.channel).Generate(
            request, **call_options
        )
        try:
            async for response in call:
                result = results[response.index]
                if response.WhichOneof("event") == "completion":
                    result.completion = response.completion
                    continue
                if response.WhichOneof("event") == "prompt_logprobs":
                    if result.prompt_logprobs is None:
                        result.prompt_logprobs = gateway_pb2.PromptLogprobs()
                    result.prompt_logprobs.MergeFrom(response.prompt_logprobs)
                    continue
                chunk = response.chunk
                result.chunks.append(chunk)
                result.text += chunk.text
                result.token_ids += chunk.token_ids
                result.origins += chunk.origins
                result.token_texts += chunk.token_texts
                result.logprobs += chunk.logprobs
        finally:
            call.cancel()
        return results

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        return await self.send(self.request(prompt, **options))


@asynccontextmanager
async def gateway(
    verifier_address: str, draft_address: str = "", **options: Any
) -> AsyncIterator[Gateway]:
    """A gateway. It does not wait for the draft: a first request does that, see `pair`.

    Unless the options say otherwise its proposals are chains of a fixed length, one at a time, and
    every round waits for its own, however busy the machine is.
    """
    chains = {"adaptive": False, "draft_topk": 1, "run_ahead": 0, "num_draft_tokens": 5}
    chains["draft_wait_seconds"] = 60.0
    settings = GatewaySettings(
        port=free_port(),
        verifier_address=verifier_address,
        draft_address=draft_address,
        grace_seconds=0.0,
        **{**chains, **options},
    )
    work = gateway_main.serve(settings)
    async with (
        _service(services.GATEWAY, settings, work) as address,
        grpc.aio.insecure_channel(address) as channel,
    ):
        yield Gateway(address, channel)


@dataclass
class Stack:
    """The three services."""

    gateway: Gateway
    verifier: VerifierServicer
    draft: Drafting | None

    async def generate(self, prompt: str | Sequence[int], **options: Any) -> Result:
        return await self.gateway.generate(prompt, **options)


@asynccontextmanager
async def pair(
    target_model: Path,
    draft_model: Path | None,
    *,
    target_options: dict[str, Any] | None = None,
    draft_options: dict[str, Any] | None = None,
    **options: Any,
) -> AsyncIterator[Stack]:
    """The three services for a pair of models, connected with each other."""
    async with AsyncExitStack() as stack:
        verifier_address, verifying = await stack.enter_async_context(
            verifier(target_model, **(target_options or {}))
        )
        draft_address, drafting = "", None
        if draft_model is not None or draft_options:
            draft_address, drafting = await stack.enter_async_context(
                draft(draft_model, **(draft_options or {}))
            )
        running = await stack.enter_async_context(
            gateway(verifier_address, draft_address, **options)
        )
        if drafting is not None:
            await drafts_are_used(running)
        yield Stack(running, verifying, drafting)


async def drafts_are_used(running: Gateway) -> None:
    """Waits until the gateway has shaken hands with its draft."""
    for _ in range(200):
        result = await running.generate([1], max_new_tokens=2, k=1, ignore_eos=True)
        reason = result.speculation.fallback_reason
        # A draft that copies has nothing to say here.
        if not reason or reason.startswith(("TOKENIZER_MISMATCH", "the draft proposed nothing")):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"the draft is not used: {reason}")
