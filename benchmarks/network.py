"""Tokens a second over networks of different round trips, beside what the closed forms say.

Gateway, draft and verifier are processes; draft and verifier have one thread on one core each. The
gateway reaches them over links that delay what they pass on by half of the RTT each way. One
request at a time, prompts of `specdec bench`, decoding alone: the prompts are in the prefix cache
before, and a rate counts from the first chunk on. Cells are measured by turns, in another order in
every repeat. × plain is relative to plain decoding at the smallest RTT.
"""

from __future__ import annotations

import argparse
import random
import secrets
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import common, network_cells
from benchmarks.impaired_services import LINKS, Impaired, impaired
from benchmarks.network_cells import Cell, Sample
from specdec.bench import prompts
from specdec.bench.prompts import Prompt

_WARM_UP_TOKENS = 8


@dataclass
class _Sweep:
    """What was measured so far."""

    options: argparse.Namespace
    cells: list[Cell]
    prompts: list[Prompt]
    samples: dict[Cell, list[Sample]] = field(default_factory=dict)
    round_trips: dict[float, tuple[float, float]] = field(default_factory=dict)

    async def measure(self, services: Impaired) -> None:
        """All cells in every repeat."""
        salt = secrets.token_hex(8)
        order = random.Random(self.options.seed)
        await self._warm_up(services, salt)
        for repeat in range(self.options.repeats):
            turn = list(self.cells)
            order.shuffle(turn)
            for number, cell in enumerate(turn, 1):
                links = services.set_round_trip(cell.rtt, self.options.links)
                self.round_trips[cell.rtt] = links
                seed = self.options.seed + repeat
                calls = []
                for prompt in self.prompts:
                    message = cell.request(prompt, self.options.tokens, seed, salt)
                    calls.append(await common.answer(services.channel, message))
                one = network_cells.sample(calls)
                self.samples.setdefault(cell, []).append(one)
                common.progress(
                    f"repeat {repeat + 1}, {number} of {len(turn)}: {cell}: "
                    f"{one.tokens_per_second:.1f} tokens/s"
                )

    async def _warm_up(self, services: Impaired, salt: str) -> None:
        """Fills the prefix cache of both models, and runs every setting once at RTT 0."""
        services.set_round_trip(0.0)
        least = min(cell.rtt for cell in self.cells)
        settings = [cell for cell in self.cells if cell.rtt == least]
        largest = max(settings, key=lambda cell: cell.k)
        calls = [(largest, prompt) for prompt in self.prompts]
        for cell, prompt in (*calls, *((cell, self.prompts[0]) for cell in settings)):
            message = cell.request(prompt, _WARM_UP_TOKENS, self.options.seed, salt)
            await common.answer(services.channel, message)


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    options = _options(arguments)
    sweep = _Sweep(options, list(_cells(options)), _prompts(options))
    common.progress(
        f"{len(sweep.cells)} cells, {options.repeats} repeats, {len(sweep.prompts)} prompts of up "
        f"to {options.tokens} tokens each"
    )
    common.run(_run(sweep))
    measured = {cell: network_cells.together(found) for cell, found in sweep.samples.items()}
    predicted = network_cells.predictions(measured, sweep.round_trips)
    results: list[dict[str, Any]] = [
        {
            "cell": asdict(cell),
            "round_trips_ms": sweep.round_trips[cell.rtt],
            "samples": [asdict(one) for one in sweep.samples[cell]],
            "medians": asdict(one) | {"hit_rate": one.hit_rate},
            "predicted_tokens_per_second": asdict(predicted[cell]),
        }
        for cell, one in sorted(measured.items())
    ]
    common.finish(
        options,
        network_cells.COLUMNS,
        network_cells.table(measured, predicted),
        {"prompts": [prompt.id for prompt in sweep.prompts], "cells": results},
    )
    failed = sum(one.fallback_rounds for one in measured.values())
    if failed:
        print(f"{failed} rounds were plain because no proposal came")
    if options.out is not None:
        from benchmarks import network_plots

        for path in network_plots.draw(measured, predicted, options.out):
            common.progress(f"wrote {path}")


async def _run(sweep: _Sweep) -> None:
    options = sweep.options
    async with impaired(
        target=str(common.target_folder(options)),
        draft=options.draft,
        drafters=options.drafters,
        dtype=options.dtype,
    ) as services:
        await sweep.measure(services)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = common.parser(__doc__, repeats=3)
    parser.add_argument("--rtt", default="0,1,2,5,10,20,50", help="milliseconds, of each link")
    parser.add_argument("--links", choices=LINKS, default="both", help="that have the RTT")
    parser.add_argument("--num-draft-tokens", default="0,1,2,3,5,8", help="K; 0 is always there")
    parser.add_argument("--rules", default="coupled,rejection", help="at temperatures above 0")
    parser.add_argument("--temperature", default="0,1", help="separated by commas")
    parser.add_argument("--run-ahead", default="0,8", help="verdicts to draft for while waiting")
    parser.add_argument("--draft-topk", default="1", help="drafted tokens side by side")
    parser.add_argument("--drafters", default="model", help="as of `specdec draft`")
    parser.add_argument("--prompts", type=common.positive, default=4, help="how many")
    parser.add_argument("--kinds", default="code,reasoning,chat", help="of prompts")
    parser.add_argument("--tokens", type=common.positive, default=64, help="of an answer, at most")
    parser.add_argument("--out", type=Path, metavar="DIR", help="write results and plots there")
    options = parser.parse_args(arguments)
    if unknown := set(options.rules.split(",")) - set(network_cells.RULES):
        parser.error(f"no such rule: {', '.join(sorted(unknown))}")
    if options.target and not options.draft and "model" in options.drafters.split(","):
        parser.error("name the --draft of the --target")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        options.json = options.json or options.out / "network.json"
    return options


def _cells(options: argparse.Namespace) -> Iterator[Cell]:
    def whole(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    return network_cells.cells(
        temperatures=[float(text) for text in options.temperature.split(",")],
        rules=options.rules.split(","),
        ks=whole(options.num_draft_tokens),
        topks=whole(options.draft_topk),
        run_aheads=whole(options.run_ahead),
        rtts=[float(text) for text in options.rtt.split(",")],
    )


def _prompts(options: argparse.Namespace) -> list[Prompt]:
    kinds = options.kinds.split(",")
    if unknown := set(kinds) - set(prompts.KINDS):
        raise SystemExit(f"error: no such kind of prompts: {', '.join(sorted(unknown))}")
    suite = prompts.mixed(kinds, options.seed)
    if options.prompts > len(suite):
        raise SystemExit(f"error: there are only {len(suite)} prompts")
    return suite[: options.prompts]


if __name__ == "__main__":
    main()
