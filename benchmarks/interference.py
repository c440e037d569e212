"""Running sessions beside the prefill of others: how much longer their tokens take.

Plain sessions generate for the whole of a repeat. For one part of it they are left alone, for the
other long prompts are sent one after the other. The parts change places from repeat to repeat.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import time
from typing import Any

import grpc

from benchmarks import common
from specdec.bench.load import Call, send
from specdec.bench.measures import percentile

_WARM_TOKENS = 4


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--address", help="of a gateway that runs; services are started if not")
    parser.add_argument("--sessions", type=common.positive, default=8, help="that generate")
    parser.add_argument("--prompt-tokens", type=common.positive, default=32, help="of these")
    parser.add_argument("--max-new-tokens", type=common.positive, default=1500, help="of these")
    parser.add_argument("--prefill-tokens", type=common.positive, default=2000, help="beside them")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each part, at least")
    parser.add_argument("--threads", type=common.positive, default=2, help="of the verifier")
    options = parser.parse_args(arguments)
    repeats = common.run(_measure(options))
    ratio = statistics.median(one["ratio"] for one in repeats)
    common.finish(
        options,
        ("repeat", "alone ms p50", "p95", "beside ms p50", "p95", "ratio of p95", "prefills", "ms"),
        [(index + 1, *one.values()) for index, one in enumerate(repeats)],
        {"repeats": repeats, "median_ratio": ratio},
    )
    print(f"\nmedian of p95 beside a prefill / p95 alone = {ratio:.2f}")


async def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    texts = common.Texts(common.target_folder(options), options.seed)
    async with common.services(
        target=options.target,
        draft=None,
        drafters=None,
        dtype=options.dtype,
        threads=options.threads,
        address=options.address,
    ) as channel:
        await _prefill(channel, texts, options.prefill_tokens)
        repeats = []
        for index in range(options.repeats):
            repeats.append(await _repeat(channel, texts, options, disturbed_first=index % 2 == 1))
            common.progress(f"repeat {index + 1} of {options.repeats}: {repeats[-1]['ratio']:.2f}")
        return repeats


async def _prefill(channel: grpc.aio.Channel, texts: common.Texts, length: int) -> float:
    """Milliseconds to the one token that follows a prompt that nobody has computed."""
    call = await common.answer(channel, common.request(texts.ids(length), 1, speculative=False))
    return 1000 * call.latency


async def _repeat(
    channel: grpc.aio.Channel,
    texts: common.Texts,
    options: argparse.Namespace,
    *,
    disturbed_first: bool,
) -> dict[str, Any]:
    calls = [Call("", "") for _ in range(options.sessions)]
    tasks = []
    for call in calls:
        prompt = texts.ids(options.prompt_tokens)
        message = common.request(prompt, options.max_new_tokens, speculative=False)
        tasks.append(asyncio.create_task(send(channel, message, call)))
    try:
        await common.wait_for_tokens(calls, _WARM_TOKENS)
        prefills: list[float] = []
        times: dict[bool, list[float]] = {}
        for disturbed in (disturbed_first, not disturbed_first):
            begun = time.monotonic()
            if disturbed:
                while time.monotonic() - begun < options.seconds:
                    prefills.append(await _prefill(channel, texts, options.prefill_tokens))
            else:
                await asyncio.sleep(options.seconds)
            times[disturbed] = _between(calls, begun, time.monotonic())
        if any(task.done() for task in tasks):
            raise SystemExit("error: a session ended too early: raise --max-new-tokens")
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    alone, beside = percentile(times[False], 95), percentile(times[True], 95)
    if alone is None or beside is None:
        raise SystemExit("error: no tokens came: raise --seconds")
    return {
        "alone_ms_p50": percentile(times[False], 50),
        "alone_ms_p95": alone,
        "beside_ms_p50": percentile(times[True], 50),
        "beside_ms_p95": beside,
        "ratio": beside / alone,
        "prefills": len(prefills),
        "prefill_ms": statistics.median(prefills),
    }


def _between(calls: list[Call], begun: float, ended: float) -> list[float]:
    """Milliseconds between tokens that both came within a time."""
    found = []
    for call in calls:
        times = [when for when, _ in call.arrivals if begun <= when <= ended]
        found += [1000 * (b - a) for a, b in itertools.pairwise(times)]
    return found


if __name__ == "__main__":
    main()
