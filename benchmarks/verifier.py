"""The verifier's forward pass alone, on one core, beside a step of transformers' own model.

Milliseconds of a pass over several rows of one session, and over one row each of several sessions.
Both models take turns in one process, so that what slows the machine down slows both.
"""

from __future__ import annotations

import argparse
import inspect
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache

from benchmarks import common
from specdec.lm.batch import Segment
from specdec.lm.loading import load
from specdec.lm.model import CausalLM
from specdec.lm.pages import pages_for

ROWS = (1, 2, 4, 6, 8, 16, 32)
SESSIONS = (1, 2, 4, 8, 16, 32)
EAGER = "transformers, 1 row"


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = common.parser(__doc__, repeats=5)
    parser.add_argument("--context", type=common.positive, default=64, help="tokens before")
    parser.add_argument("--passes", type=common.positive, default=10, help="in each repeat")
    parser.add_argument("--core", type=int, help="the core to run on; the last allowed if left out")
    options = parser.parse_args(arguments)
    folder = str(common.target_folder(options))
    allowed = os.sched_getaffinity(0)
    core = max(allowed) if options.core is None else options.core
    threads = torch.get_num_threads()
    os.sched_setaffinity(0, {core})
    torch.set_num_threads(1)
    try:
        points = _passes(load(folder, dtype=options.dtype).model, options.context)
        points[EAGER] = _eager_step(folder, options.dtype, options.context)
        samples = _measure(points, options)
    finally:
        os.sched_setaffinity(0, allowed)
        torch.set_num_threads(threads)
    _finish(options, samples)


def _passes(model: CausalLM, context: int) -> dict[str, Callable[[], Any]]:
    each = pages_for(context + max(ROWS))
    model.allocate(each * max(SESSIONS))
    pages = [range(1 + each * index, 1 + each * (index + 1)) for index in range(max(SESSIONS))]
    tokens = [10 + index % 200 for index in range(context + max(ROWS))]
    for of_session in pages:
        model.forward([Segment(tokens[:context], 0, of_session, 1)])
    points: dict[str, Callable[[], Any]] = {}
    for rows in ROWS:
        one = [Segment(tokens[context : context + rows], context, pages[0], rows)]
        points[_rows(rows)] = lambda one=one: model.forward(one)  # type: ignore[misc]
    for count in SESSIONS:
        many = [Segment([tokens[context]], context, pages[index], 1) for index in range(count)]
        points[f"{count} session{'s' if count > 1 else ''} of 1 row"] = lambda many=many: (
            model.forward(many)
        )  # type: ignore[misc]
    return points


def _rows(count: int) -> str:
    return f"1 session, {count} row{'s' if count > 1 else ''}"


def _eager_step(folder: str, dtype: str, context: int) -> Callable[[], Any]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    # The argument was renamed in the course of transformers 5.
    parameters = inspect.signature(type(model).forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"
    cache = DynamicCache()
    prompt = torch.tensor([[10 + index % 200 for index in range(context)]])
    with torch.inference_mode():
        model(input_ids=prompt, use_cache=True, **{name: cache})

    @torch.inference_mode()
    def step() -> None:
        model(input_ids=prompt[:, :1], use_cache=True, **{name: cache})
        cache.crop(-1)

    return step


def _measure(
    points: dict[str, Callable[[], Any]], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Milliseconds of each point in each repeat: the median of its passes, all points by turns."""
    for run in points.values():
        run()
    samples: dict[str, list[float]] = {name: [] for name in points}
    for repeat in range(options.repeats):
        common.progress(f"repeat {repeat + 1} of {options.repeats}")
        times: dict[str, list[float]] = {name: [] for name in points}
        for _ in range(options.passes):
            for name, run in points.items():
                times[name].append(_timed(run))
        for name, found in times.items():
            samples[name].append(statistics.median(found))
    return samples


def _timed(run: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    run()
    return 1000 * (time.perf_counter() - begun)


def _finish(options: argparse.Namespace, samples: dict[str, list[float]]) -> None:
    def ratio(above: str, below: str) -> float:
        return statistics.median(a / b for a, b in zip(samples[above], samples[below], strict=True))

    rows = [
        (name, statistics.median(times), ratio(name, _rows(1)), ratio(name, EAGER))
        for name, times in samples.items()
    ]
    common.finish(
        options,
        ("pass", "ms", "× 1 row", "× transformers"),
        rows,
        {
            "milliseconds": samples,
            "pass_8_over_pass_1": ratio(_rows(8), _rows(1)),
            "pass_8_over_eager_1": ratio(_rows(8), EAGER),
        },
    )
    print(f"\npass(8) / pass(1) = {ratio(_rows(8), _rows(1)):.2f}")
    print(f"pass(8) / transformers' step = {ratio(_rows(8), EAGER):.2f}")


if __name__ == "__main__":
    main()
