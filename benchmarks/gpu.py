"""The runtime on one CUDA device, with random weights in the shapes of real models.

Takes no files: a target of 7B and a draft of 0.5B parameters are made on the device. Which drafted
tokens stand is drawn at a given rate, because random models never agree. On a machine without a GPU
the same code runs in small on the CPU, where its times mean nothing.

    python -m benchmarks.gpu --json gpu.json
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.synthetic import Block, Draft, do, record_calls
from specdec.lm.architecture import runnable
from specdec.lm.batch import Segment
from specdec.lm.graphs import record_cuda_graph
from specdec.lm.model import CausalLM
from specdec.lm.pages import pages_for
from specdec.lm.scheduler import Scheduler
from specdec.lm.sequence import CachedSequence
from specdec.lm.work import Prefill

console = Console()


class Size(NamedTuple):
    """What is run, at full size or in small."""

    target: dict[str, int]
    draft: dict[str, int]
    context: int
    """Tokens that every session begins with."""
    batches: tuple[int, ...]
    rounds: int
    """Of each measurement of a rate."""


FULL = Size(
    target={
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "vocab_size": 152064,
    },
    draft={
        "hidden_size": 896,
        "intermediate_size": 4864,
        "num_hidden_layers": 24,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "vocab_size": 151936,
    },
    context=512,
    batches=(1, 2, 4, 8, 16, 32, 64),
    rounds=24,
)
_SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
SMALL = Size(_SMALL, {**_SMALL, "num_hidden_layers": 1}, 40, (1, 2), 3)


def build(shape: dict[str, int], device: torch.device) -> CausalLM:
    """A model with random weights, tried out against transformers' own forward pass."""
    options: dict[str, Any] = {**shape, "tie_word_embeddings": False}
    config = Qwen2Config(max_position_embeddings=8192, **options)
    torch.manual_seed(0)
    with device:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    return runnable(model, shape["vocab_size"])


class Device:
    """The device, and its clock."""

    def __init__(self) -> None:
        self.cuda = torch.cuda.is_available()
        self.record = record_cuda_graph if self.cuda else record_calls
        self.device = torch.device("cuda" if self.cuda else "cpu")
        self.name = torch.cuda.get_device_name() if self.cuda else "cpu"

    def milliseconds(self, function: Callable[[], Any], repeats: int = 15) -> float:
        """The median time of a call, after a few that do not count."""
        times = []
        for repeat in range(repeats + 3):
            self.wait()
            begun = time.perf_counter()
            function()
            self.wait()
            if repeat >= 3:
                times.append(time.perf_counter() - begun)
        return 1e3 * statistics.median(times)

    def wait(self) -> None:
        """Until all that was launched is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def bandwidth(self) -> float:
        """Bytes a second that a large copy reads and writes."""
        source = torch.empty(2**30 if self.cuda else 2**24, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.numel() / (self.milliseconds(lambda: target.copy_(source)) / 1e3)


class Sessions:
    """As many sequences as the largest batch has, each with its context in the cache."""

    def __init__(self, model: CausalLM, size: Size, num_pages: int) -> None:
        self._model = model
        self._context = size.context
        self._each = pages_for(size.context + 64)
        assert self._each * max(size.batches) <= num_pages
        for index in range(max(size.batches)):
            model.forward([Segment(self._tokens(size.context), 0, self._pages(index), 0)])

    def segments(self, batch: int, rows: int) -> list[Segment]:
        """The next `rows` tokens of the first `batch` sequences."""
        return [
            Segment(self._tokens(rows), self._context, self._pages(index), rows)
            for index in range(batch)
        ]

    def _tokens(self, count: int) -> list[int]:
        return [(7 * index) % self._model.effective_vocab_size for index in range(count)]

    def _pages(self, index: int) -> range:
        return range(1 + index * self._each, 1 + (index + 1) * self._each)


def rate(
    device: Device,
    target: Scheduler,
    draft: Scheduler,
    size: Size,
    batch: int,
    k: int,
    alpha: float,
) -> float:
    """Tokens a second of `batch` sessions, target and draft in turns on the one device."""
    random.seed(0)
    prompt = [index % 200 for index in range(size.context)]
    at_target, at_draft = (
        [CachedSequence(scheduler.residents.pool, prompt, shared=False) for _ in range(batch)]
        for scheduler in (target, draft)
    )
    for scheduler, sequences in ((target, at_target), (draft, at_draft)):
        for sequence in sequences:
            scheduler.open(sequence)
    do(target, [Prefill(sequence) for sequence in at_target])
    do(draft, [Prefill(sequence) for sequence in at_draft] if k else [])
    committed: list[tuple[int, list[int]] | None] = [None] * batch
    tokens, begun = 0, 0.0
    for number in range(size.rounds + 2):
        if number == 2:  # the first two do not count
            device.wait()
            tokens, begun = 0, time.perf_counter()
        drafted: list[list[int]] = [[] for _ in range(batch)]
        if k:
            works = [Draft(s, c, k) for s, c in zip(at_draft, committed, strict=True)]
            drafted = do(draft, works)
        lengths = [len(sequence.tokens) for sequence in at_target]
        blocks = [Block(s, d, alpha) for s, d in zip(at_target, drafted, strict=True)]
        emitted = do(target, blocks)
        committed = list(zip(lengths, emitted, strict=True))
        tokens += sum(map(len, emitted))
    device.wait()
    seconds = time.perf_counter() - begun
    for scheduler, sequences in ((target, at_target), (draft, at_draft)):
        for sequence in sequences:
            scheduler.close(sequence)
    return tokens / seconds


def run(size: Size, k: int, alpha: float) -> dict[str, Any]:
    """All measurements."""
    device = Device()
    result: dict[str, Any] = {"device": device.name, "k": k, "alpha": alpha}
    console.print(f"{device.name}: making the models")
    shapes = {"target": size.target, "draft": size.draft}
    models = {name: build(shape, device.device) for name, shape in shapes.items()}
    num_pages = (max(size.batches) + 1) * pages_for(size.context + 64 + size.rounds * (k + 1))
    result["bandwidth_gb_s"] = bandwidth = device.bandwidth() / 1e9
    for name, model in models.items():
        model.allocate(num_pages)
        sessions = Sessions(model, size, num_pages)
        result[name] = measured = _passes(device, model, sessions, size, k, num_pages)
        weights = _bytes(shapes[name])
        measured["weights_gb"] = weights / 1e9
        measured["share_of_bandwidth"] = weights / 1e6 / measured["passes"]["1"][0] / bandwidth
    schedulers: list[Scheduler] = []
    for model in models.values():
        scheduler = Scheduler(model, num_pages, 8192)
        model.record_graphs(num_pages, device.record)
        schedulers.append(scheduler)
    result["tokens_s"] = {}
    for batch in size.batches:
        plain, speculative = (
            rate(device, schedulers[0], schedulers[1], size, batch, each, alpha) for each in (0, k)
        )
        result["tokens_s"][str(batch)] = [plain, speculative]
    if device.cuda:
        result["peak_memory_gb"] = torch.cuda.max_memory_allocated() / 1e9
    return result


def _passes(
    device: Device, model: CausalLM, sessions: Sessions, size: Size, k: int, num_pages: int
) -> dict[str, Any]:
    """Milliseconds of passes over 1 and over K + 1 rows of every batch, plain and recorded."""
    points = [(batch, rows) for batch in size.batches for rows in (1, k + 1)]
    eager = {p: model.forward(sessions.segments(*p)) for p in points}

    def time_all() -> dict[tuple[int, int], float]:
        return {
            (batch, rows): device.milliseconds(
                partial(model.forward, sessions.segments(batch, rows))
            )
            for batch, rows in points
        }

    plain = time_all()
    measured: dict[str, Any] = {
        "passes_unrecorded": {str(b): [plain[b, 1], plain[b, k + 1]] for b in size.batches}
    }
    begun = time.perf_counter()
    model.record_graphs(num_pages, device.record)
    measured["recording_seconds"] = time.perf_counter() - begun
    recorded = time_all()
    measured["passes"] = {str(b): [recorded[b, 1], recorded[b, k + 1]] for b in size.batches}
    differences = [
        float((model.forward(sessions.segments(*p)).float() - eager[p].float()).abs().max())
        / float(eager[p].float().abs().max())
        for p in points
    ]
    measured["largest_relative_difference"] = max(differences)
    return measured


def _bytes(shape: dict[str, int]) -> float:
    """What a pass reads of the weights: all but the embedding."""
    hidden, size = shape["hidden_size"], shape["hidden_size"] // shape["num_attention_heads"]
    key_values = 2 * shape["num_key_value_heads"] * size
    layer = hidden * (2 * hidden + key_values) + 3 * hidden * shape["intermediate_size"]
    return 2.0 * (shape["num_hidden_layers"] * layer + hidden * shape["vocab_size"])


def show(result: dict[str, Any]) -> None:
    """Prints the tables."""
    k = result["k"]
    for name in ("target", "draft"):
        found = result[name]
        table = Table(title=f"{name}: milliseconds a pass", title_justify="left")
        for column in ("sessions", "1 row", f"{k + 1} rows", "ratio", "unrecorded: 1 row", "ratio"):
            table.add_column(column, justify="right")
        for batch, (one, block) in found["passes"].items():
            plain = found["passes_unrecorded"][batch][0]
            table.add_row(
                batch, f"{one:.2f}", f"{block:.2f}", f"{block / one:.2f}", f"{plain:.2f}",
                f"{plain / one:.2f}",
            )  # fmt: skip
        console.print(table)
        console.print(
            f"{found['weights_gb']:.2f} GB of weights a pass: one row runs at "
            f"{found['share_of_bandwidth']:.0%} of {result['bandwidth_gb_s']:.0f} GB/s; recorded "
            f"passes differ by {found['largest_relative_difference']:.1e} at most"
        )
    title = f"tokens/s, α = {result['alpha']}, K = {k}, both models on this device"
    table = Table(title=title, title_justify="left")
    for column in ("sessions", "plain", "speculative", "ratio"):
        table.add_column(column, justify="right")
    for batch, (plain, speculative) in result["tokens_s"].items():
        table.add_row(batch, f"{plain:.0f}", f"{speculative:.0f}", f"{speculative / plain:.2f}")
    console.print(table)
    if "peak_memory_gb" in result:
        console.print(f"peak memory {result['peak_memory_gb']:.1f} GB")


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--small", action="store_true", help="tiny models, also on a GPU")
    parser.add_argument("--num-draft-tokens", "-k", type=int, default=5)
    parser.add_argument("--alpha", type=float, default=0.7, help="rate at which tokens stand")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    size = SMALL if options.small or not torch.cuda.is_available() else FULL
    with torch.inference_mode():
        result = run(size, options.num_draft_tokens, options.alpha)
    show(result)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
