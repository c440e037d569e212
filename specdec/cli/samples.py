"""Collects the answers of one call, of one sample or several, with their log-probabilities."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.text import Text

from specdec.channels import ClientTls, open_channel
from specdec.cli.client import Result
from specdec.cli.terminal import write
from specdec.v1 import gateway_pb2, gateway_pb2_grpc


@dataclass
class Sample(Result):
    """What one of the samples of a call gave."""

    logprobs: list[dict[str, Any]] | None = None
    """Of each token, if they were asked for."""

    def add(self, chunk: gateway_pb2.Chunk) -> None:
        """Appends a chunk."""
        super().add(chunk)
        if self.logprobs is None:
            return
        for token_id, found in zip(chunk.token_ids, chunk.logprobs, strict=True):
            top = zip(found.top_token_ids, found.top_logprobs, strict=True)
            self.logprobs.append(
                {
                    "token_id": token_id,
                    "logprob": found.logprob,
                    "top": [{"token_id": other, "logprob": value} for other, value in top],
                }
            )

    def to_dict(self) -> dict[str, Any]:
        """For machines. `logprobs` is there only if they were asked for."""
        found = super().to_dict()
        if self.logprobs is not None:
            found["logprobs"] = self.logprobs
        return found


async def collect(
    address: str,
    request: gateway_pb2.GenerateRequest,
    tls: ClientTls | None = None,
    api_key: str | None = None,
) -> list[Sample]:
    """Calls Generate and waits for the end of all samples.

    Raises:
        grpc.aio.AioRpcError: the call failed.
    """
    wanted = request.HasField("logprobs")
    count = request.n if request.HasField("n") else 1
    samples = [Sample(logprobs=[] if wanted else None) for _ in range(count)]
    async with open_channel(address, tls, api_key=api_key) as channel:
        begun = time.monotonic()
        call = gateway_pb2_grpc.GenerationServiceStub(channel).Generate(request)
        try:
            async for response in call:
                sample = samples[response.index]
                if response.WhichOneof("event") == "chunk":
                    sample.add(response.chunk)
                elif response.WhichOneof("event") == "completion":
                    sample.completion.CopyFrom(response.completion)
                    sample.seconds = time.monotonic() - begun
        finally:
            call.cancel()
    return samples


def samples_to_dict(samples: list[Sample]) -> dict[str, Any]:
    """For machines: that of the only sample, or `samples`, a list of those of all."""
    if len(samples) == 1:
        return samples[0].to_dict()
    return {"samples": [sample.to_dict() for sample in samples]}


def show_samples(samples: list[Sample], console: Console, aside: Console) -> None:
    """Prints the samples one after the other, each under its number. Statistics go aside."""
    for number, sample in enumerate(samples, 1):
        if number > 1:
            write(console, "\n")
        write(console, f"[{number}/{len(samples)}]\n", "bold")
        write(console, sample.text)
        if sample.text and not sample.text.endswith("\n"):
            write(console, "\n")
    for number, sample in enumerate(samples, 1):
        aside.print(Text(f"[{number}/{len(samples)}] {sample.summary()}", "dim"))
