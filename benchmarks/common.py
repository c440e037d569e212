"""What the benchmarks share: services, texts, options and results."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import grpc
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer

from specdec.bench import prompts, report
from specdec.bench.load import Call, send
from specdec.channels import open_channel
from specdec.cli import foreground, pair
from specdec.cli.supervisor import ServiceDied, running
from specdec.errors import describe
from specdec.models.cache import default_target_path, is_pulled
from specdec.v1 import common_pb2, gateway_pb2

T = TypeVar("T")


def parser(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """Options that every benchmark has."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    options.add_argument("--repeats", type=positive, default=repeats, help="for medians")
    options.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options.add_argument("--target", help="model folder of the target instead of the default")
    options.add_argument("--draft", help="model folder of the draft, with --target")
    options.add_argument("--dtype", default="bfloat16", help="of the models")
    options.add_argument("--seed", type=int, default=0, help="of the texts")
    return options


def positive(text: str) -> int:
    """An option's number, at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def target_folder(options: argparse.Namespace) -> Path:
    """The target's folder.

    Raises:
        SystemExit: the default target has not been pulled.
    """
    folder = Path(options.target) if options.target else default_target_path()
    if not is_pulled(folder):
        raise SystemExit(f"error: there is no model in {folder}: run `specdec models pull` first")
    return folder


@asynccontextmanager
async def services(
    *,
    target: str | None,
    draft: str | None,
    drafters: str | None,
    dtype: str,
    threads: int,
    address: str | None = None,
) -> AsyncIterator[grpc.aio.Channel]:
    """A channel to a gateway: one that runs, or one started as processes for the block.

    Args:
        target: model folder; None for the default.
        draft: model folder; None for the default, if the target is the default one.
        drafters: as of `specdec draft`; None if there is to be no draft service at all.
        dtype: of the models.
        threads: of the target. A draft model has half of them: while it works the target waits.
        address: of a gateway that runs.
    """
    if address is not None:
        async with open_channel(address) as channel:
            yield channel
        return
    # The threads have their cores to themselves here, and lose a quarter of their speed if they
    # sleep between two operations.
    os.environ.setdefault("OMP_WAIT_POLICY", "ACTIVE")
    with_model = "model" in (drafters or "").split(",")
    each = max(1, threads // 2)
    children = pair.children(
        target=target or (None if with_model else str(default_target_path())),
        draft=draft if with_model else None,
        drafters=drafters,
        ports=pair.free_ports(),
        target_options=("--dtype", dtype, "--num-threads", str(threads)),
        draft_options=("--dtype", dtype, "--num-threads", str(each)),
    )
    async with (
        running(children, lambda service, line: None),
        open_channel(f"127.0.0.1:{children[0].port}") as channel,
    ):
        yield channel


_PLAIN = gateway_pb2.SpeculationParams(enabled=False)


def request(
    token_ids: Sequence[int],
    max_new_tokens: int,
    *,
    speculative: bool,
    num_draft_tokens: int | None = None,
    salt: str | None = None,
) -> gateway_pb2.GenerateRequest:
    """Greedy decoding of exactly so many tokens.

    Args:
        token_ids: the prompt.
        max_new_tokens: how many.
        speculative: whether to draft.
        num_draft_tokens: chains of so many tokens in every round; None for the server's choice.
        salt: of the prefix cache, which is bypassed without one.
    """
    return gateway_pb2.GenerateRequest(
        token_ids=gateway_pb2.TokenIdsInput(ids=token_ids),
        sampling=gateway_pb2.SamplingParams(temperature=0.0),
        stopping=gateway_pb2.StoppingParams(max_new_tokens=max_new_tokens, ignore_eos=True),
        speculation=_speculation(num_draft_tokens) if speculative else _PLAIN,
        prefix_cache=common_pb2.PrefixCacheParams(bypass=salt is None, salt=salt or ""),
    )


def _speculation(num_draft_tokens: int | None) -> gateway_pb2.SpeculationParams:
    if num_draft_tokens is None:
        return gateway_pb2.SpeculationParams(enabled=True)
    return gateway_pb2.SpeculationParams(
        enabled=True, num_draft_tokens=num_draft_tokens, draft_topk=1, adaptive=False
    )


async def answer(channel: grpc.aio.Channel, message: gateway_pb2.GenerateRequest) -> Call:
    """Sends a request that must succeed.

    Raises:
        grpc.aio.AioRpcError: it failed.
    """
    call = await send(channel, message, Call("", ""))
    if call.error is not None:
        raise call.error
    return call


class Texts:
    """Endless text of a model's vocabulary: the sentences of the prompts in random order."""

    def __init__(self, folder: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._random = random.Random(seed)
        self._sentences = [
            sentence
            for prompt in prompts.load()
            if prompt.kind in ("summarise", "extraction")
            for sentence in prompt.text.split(". ")
        ]

    def ids(self, length: int) -> list[int]:
        """So many token ids, others at every call."""
        found: list[int] = []
        while len(found) < length:
            sentence = self._random.choice(self._sentences)
            # The number makes the text unlike all others from its beginning on.
            text = f"{self._random.randrange(10**6)}. {sentence}.\n"
            found += self._tokenizer.encode(text, add_special_tokens=False).ids
        return found[:length]


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a benchmark until it ends or a signal ends it, with all processes that it started.

    Raises:
        SystemExit: a signal ended it, or the services failed.
    """
    try:
        return foreground.run(work, lambda: progress("stopping"))
    except foreground.Stopped as stopped:
        raise SystemExit(stopped.exit_code) from None
    except ServiceDied as error:
        raise SystemExit(f"error: {error}") from None
    except grpc.aio.AioRpcError as error:
        raise SystemExit(f"error: {describe(error)}") from None


def progress(line: str) -> None:
    """Tells on standard error how it goes on."""
    print(line, file=sys.stderr, flush=True)


def finish(
    options: argparse.Namespace,
    columns: Sequence[str],
    rows: Sequence[Sequence[object]],
    results: dict[str, Any],
) -> None:
    """Prints a table, and writes the results if they are wanted."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 160
    table = Table(box=None, pad_edge=False, header_style="bold")
    for index, name in enumerate(columns):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*(_cell(value) for value in row))
    console.print(table)
    if options.json is not None:
        document = {
            "created": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": report.machine(),
            "settings": {k: v for k, v in vars(options).items() if k != "json"},
            **results,
        }
        options.json.write_text(json.dumps(document, indent=1, default=str) + "\n", "utf-8")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.2f}"
    return "-" if value is None else str(value)


async def wait_for_tokens(calls: Sequence[Call], count: int) -> None:
    """Waits until each call has so many tokens.

    Raises:
        grpc.aio.AioRpcError: one failed before.
    """
    while any(call.num_tokens < count for call in calls):
        for call in calls:
            if call.error is not None:
                raise call.error
        await asyncio.sleep(0.01)
