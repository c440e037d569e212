"""A client of the public API."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf import json_format

from specdec.channels import ClientTls, open_channel, tls_trouble
from specdec.errors import describe, reason_of
from specdec.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc


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
            f"{_plural(count, 'token')} in {self.seconds:.1f} s "
            f"({count / max(self.seconds, 1e-9):.1f}/s), {_plural(speculation.rounds, 'round')}"
        )
        if speculation.num_draft_tokens:
            line += (
                f", accepted {speculation.num_accepted_tokens} of {speculation.num_draft_tokens} "
                f"drafted ({speculation.acceptance_rate:.0%}), "
                f"mean acceptance length {speculation.mean_acceptance_length:.2f}"
            )
        if speculation.undrafted_rounds:
            line += f", {_plural(speculation.undrafted_rounds, 'round')} not worth a draft"
        if speculation.fallback_rounds:
            line += (
                f", {_plural(speculation.fallback_rounds, 'round')} without draft: "
                f"{speculation.fallback_reason}"
            )
        return line


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


async def stream(
    address: str,
    request: gateway_pb2.GenerateRequest,
    result: Result,
    tls: ClientTls | None = None,
    api_key: str | None = None,
) -> AsyncIterator[gateway_pb2.Chunk]:
    """Calls Generate. Yields the chunks as they come; the result is complete at the end.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    async with open_channel(address, tls, api_key=api_key) as channel:
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


def explain(error: grpc.aio.AioRpcError, address: str) -> str:
    """One line for people: what went wrong, and what to do where that is known."""
    text = describe(error)
    if reason_of(error) is not None:
        return text
    if error.code() == grpc.StatusCode.UNIMPLEMENTED:
        return f"what listens at {address} is not a gateway"
    if trouble := tls_trouble(error):
        return (
            f"no TLS with the gateway at {address}: {trouble}; see --tls-ca, --tls-cert, --tls-name"
        )
    if error.code() == grpc.StatusCode.UNAVAILABLE:
        if "failed to connect" in text or "resolving" in text:
            return (
                f"no gateway at {address}: start one with `specdec up`, "
                "or give its host:port with --address"
            )
        return f"the gateway at {address} went away ({text})"
    return text
