"""The prefix cache: time to the first token after a prefix that is cached, over one that is not.

Each pair has a prefix of its own. A first request brings it into the cache, a second one with the
same prefix and another ending is measured, and the same request without the cache must give the
same tokens and the same acceptance.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import grpc

from benchmarks import common
from specdec.bench.load import Call


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--address", help="of a gateway that runs; services are started if not")
    parser.add_argument("--prefix-tokens", type=common.positive, default=1000, help="shared")
    parser.add_argument("--ending-tokens", type=common.positive, default=16, help="not shared")
    parser.add_argument("--max-new-tokens", type=common.positive, default=32, help="compared")
    parser.add_argument("--threads", type=common.positive, default=2, help="of both models")
    options = parser.parse_args(arguments)
    pairs = common.run(_measure(options))
    common.finish(
        options,
        (
            "pair",
            "cold ms",
            "cached ms",
            "ratio",
            "cached tokens",
            "same tokens",
            "same acceptance",
        ),
        [(index + 1, *one.values()) for index, one in enumerate(pairs)],
        {"pairs": pairs, "median_ratio": _ratio(pairs)},
    )
    print(f"\nmedian of cached / cold = {_ratio(pairs):.3f}")


def _ratio(pairs: list[dict[str, Any]]) -> float:
    return float(statistics.median(one["ratio"] for one in pairs))


async def _measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    texts = common.Texts(common.target_folder(options), options.seed)
    async with common.services(
        target=options.target,
        draft=options.draft,
        drafters="model",
        dtype=options.dtype,
        threads=options.threads,
        address=options.address,
    ) as channel:
        await _pair(channel, texts, options)  # warm-up
        pairs = []
        for index in range(options.repeats):
            pairs.append(await _pair(channel, texts, options))
            common.progress(f"pair {index + 1} of {options.repeats}: {pairs[-1]['ratio']:.3f}")
        return pairs


async def _pair(
    channel: grpc.aio.Channel, texts: common.Texts, options: argparse.Namespace
) -> dict[str, Any]:
    prefix = texts.ids(options.prefix_tokens)
    first, second = (prefix + texts.ids(options.ending_tokens) for _ in range(2))
    salt = "benchmark"

    async def ask(prompt: list[int], salt: str | None) -> Call:
        message = common.request(prompt, options.max_new_tokens, speculative=True, salt=salt)
        return await common.answer(channel, message)

    cold = await ask(first, salt)
    cached = await ask(second, salt)
    expected = await ask(second, None)
    assert cold.ttft is not None
    assert cached.ttft is not None
    assert cached.completion is not None
    return {
        "cold_ms": 1000 * cold.ttft,
        "cached_ms": 1000 * cached.ttft,
        "ratio": cached.ttft / cold.ttft,
        "cached_tokens": cached.completion.usage.cached_tokens,
        "same_tokens": cached.token_ids == expected.token_ids,
        "same_acceptance": _acceptance(cached) == _acceptance(expected),
    }


def _acceptance(call: Call) -> tuple[int, ...]:
    assert call.completion is not None
    found = call.completion.speculation
    return (found.rounds, found.num_draft_tokens, found.num_accepted_tokens)


if __name__ == "__main__":
    main()
