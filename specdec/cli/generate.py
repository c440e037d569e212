"""`specdec generate`: one prompt, streamed."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated, Any

import grpc
import typer
from google.protobuf import json_format
from rich.console import Console
from rich.text import Text

from specdec import services
from specdec.errors import describe
from specdec.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

_STYLES = {
    gateway_pb2.TOKEN_ORIGIN_ACCEPTED: "green",
    gateway_pb2.TOKEN_ORIGIN_CORRECTION: "yellow",
    gateway_pb2.TOKEN_ORIGIN_BONUS: "cyan",
    gateway_pb2.TOKEN_ORIGIN_PLAIN: "",
}


class Rule(StrEnum):
    """The acceptance rules by the names of the command line."""

    REJECTION = "rejection"
    BLOCK = "block"
    COUPLED = "coupled"


@dataclass
class Result:
    """What a generation gave."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    completion: gateway_pb2.Completion = field(default_factory=gateway_pb2.Completion)
    seconds: float = 0.0

    def add(self, chunk: gateway_pb2.Chunk) -> None:
        """Appends a chunk."""
        self.text += chunk.text
        self.token_ids += chunk.token_ids

    def to_dict(self) -> dict[str, Any]:
        """For machines: enum values as lower-case names, all numbers as numbers."""
        speculation = json_format.MessageToDict(
            self.completion.speculation,
            preserving_proto_field_name=True,
            always_print_fields_with_no_presence=True,
        )
        rule = self.completion.speculation.acceptance_rule
        name = common_pb2.AcceptanceRule.Name(rule).removeprefix("ACCEPTANCE_RULE_")
        speculation["acceptance_rule"] = name.lower()
        for key in ("draft_us", "verify_us", "wire_us", "queue_us"):
            # JSON for protobuf writes 64-bit integers as strings.
            speculation[key] = int(speculation[key])
        usage = self.completion.usage
        reason = gateway_pb2.FinishReason.Name(self.completion.finish_reason)
        matched = self.completion.WhichOneof("matched")
        return {
            "text": self.text,
            "token_ids": self.token_ids,
            "finish_reason": reason.removeprefix("FINISH_REASON_").lower(),
            "matched": getattr(self.completion, matched) if matched else None,
            "usage": {
                "prompt_tokens": usage.prompt_tokens,
                "cached_tokens": usage.cached_tokens,
                "completion_tokens": usage.completion_tokens,
            },
            "seed": self.completion.seed,
            "speculation": speculation,
        }

    def summary(self) -> str:
        """For people: one line of statistics."""
        speculation = self.completion.speculation
        count = len(self.token_ids)
        line = (
            f"{count} tokens in {self.seconds:.1f} s ({count / max(self.seconds, 1e-9):.1f}/s), "
            f"{speculation.rounds} rounds"
        )
        if speculation.num_draft_tokens:
            line += (
                f", accepted {speculation.num_accepted_tokens} of {speculation.num_draft_tokens} "
                f"drafted ({speculation.acceptance_rate:.0%}), "
                f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
            )
        if speculation.fallback_rounds:
            line += (
                f", {speculation.fallback_rounds} rounds without draft: "
                f"{speculation.fallback_reason}"
            )
        return line


async def stream(
    address: str, request: gateway_pb2.GenerateRequest, result: Result
) -> AsyncIterator[gateway_pb2.Chunk]:
    """Calls Generate. Yields the chunks as they come; the result is complete at the end.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    async with grpc.aio.insecure_channel(address) as channel:
        begun = time.monotonic()
        call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        try:
            async for response in call:
                if response.WhichOneof("event") == "chunk":
                    result.add(response.chunk)
                    yield response.chunk
                else:
                    result.completion.CopyFrom(response.completion)
        finally:
            call.cancel()
        result.seconds = time.monotonic() - begun


async def show(address: str, request: gateway_pb2.GenerateRequest, console: Console) -> Result:
    """Streams a generation to the terminal, each token in the colour of its origin."""
    result = Result()
    async for chunk in stream(address, request, result):
        for text, origin in zip(chunk.token_texts, chunk.origins, strict=True):
            console.print(Text(text, _STYLES.get(origin, "")), end="", soft_wrap=True)
    if not result.text.endswith("\n"):
        console.print()
    return result


def legend() -> Text:
    """What the colours mean."""
    return Text.assemble(
        ("accepted", "green"), " · ", ("correction", "yellow"), " · ", ("bonus", "cyan"), " · plain"
    )


def generate(
    prompt: Annotated[str, typer.Argument(help="The prompt; - reads it from standard input.")],
    address: Annotated[
        str, typer.Option(help="Address of the gateway.")
    ] = f"127.0.0.1:{services.GATEWAY.port}",
    chat: Annotated[
        bool, typer.Option("--chat", help="Send the prompt as a user's turn of a conversation.")
    ] = False,
    temperature: Annotated[
        float | None, typer.Option(help="0 decodes greedily; the server's default if left out.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(min=0, help="Keep the k likeliest tokens.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Keep the likeliest tokens up to p.")] = None,
    min_p: Annotated[
        float | None, typer.Option(help="Drop tokens below this share of the likeliest.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Makes the output repeatable.")] = None,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=0, help="Most tokens to generate.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop before this string.")] = None,
    ignore_eos: Annotated[
        bool, typer.Option("--ignore-eos", help="Go on after the end of the sequence.")
    ] = False,
    no_speculation: Annotated[
        bool, typer.Option("--no-speculation", help="Decode with the target alone.")
    ] = False,
    rule: Annotated[Rule | None, typer.Option(help="The acceptance rule.")] = None,
    num_draft_tokens: Annotated[
        int | None, typer.Option("-k", "--num-draft-tokens", min=0, help="Drafted tokens a round.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Generate text from a prompt, and show which tokens the draft model had right."""
    text = sys.stdin.read() if prompt == "-" else prompt
    request = gateway_pb2.GenerateRequest(
        sampling=gateway_pb2.SamplingParams(
            temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed
        ),
        stopping=gateway_pb2.StoppingParams(
            max_new_tokens=max_new_tokens, stop_strings=stop, ignore_eos=ignore_eos
        ),
        speculation=gateway_pb2.SpeculationParams(
            enabled=False if no_speculation else None,
            num_draft_tokens=num_draft_tokens,
            acceptance_rule=(
                common_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.value.upper()}")
                if rule
                else common_pb2.ACCEPTANCE_RULE_UNSPECIFIED
            ),
        ),
    )
    if chat:
        request.chat.messages.add(role="user", content=text)
    else:
        request.text = text
    run(address, request, as_json=as_json)


def run(address: str, request: gateway_pb2.GenerateRequest, *, as_json: bool) -> Result:
    """Generates and prints. Statistics go to standard error, so that a pipe gets the text alone.

    Raises:
        typer.Exit: 1 after one line that says what went wrong, 130 at Ctrl-C.
    """
    aside = Console(stderr=True, highlight=False, soft_wrap=True)

    async def collect() -> Result:
        result = Result()
        async for _ in stream(address, request, result):
            pass
        return result

    try:
        if as_json:
            result = asyncio.run(collect())
            typer.echo(json.dumps(result.to_dict(), ensure_ascii=False))
            return result
        result = asyncio.run(show(address, request, Console(highlight=False)))
    except grpc.aio.AioRpcError as error:
        aside.print(Text(f"error: {explain(error, address)}", "red"))
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        aside.print("\nstopped")
        raise typer.Exit(130) from None
    if aside.is_terminal:
        aside.print(legend())
    aside.print(Text(result.summary(), "dim"))
    return result


def explain(error: grpc.aio.AioRpcError, address: str) -> str:
    text = describe(error)
    if error.code() == grpc.StatusCode.UNAVAILABLE and "failed to connect" in text:
        return f"no gateway at {address}: start one with `specdec up`, or give its --address"
    return text
