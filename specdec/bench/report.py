"""The results of a sweep: medians over the repeats, and the document for machines."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from specdec.bench.load import Call
from specdec.bench.measures import Speculation, median, speculation
from specdec.bench.sweep import PLAIN, SPECULATIVE, Measurement

_MEDIANS = (
    "tokens_per_second",
    *("ttft_ms_p50", "ttft_ms_p95"),
    *("inter_token_ms_p50", "inter_token_ms_p95"),
    *("latency_ms_p50", "latency_ms_p95"),
)
_SPECULATION_MEDIANS = (
    *("acceptance_rate", "mean_acceptance_length"),
    *("draft_ms", "verify_ms", "wire_ms", "queue_ms"),
)


@dataclass(frozen=True)
class Level:
    """One number of clients in one mode: medians over the repeats, and sums of what is counted."""

    concurrency: int
    mode: str
    repeats: int
    requests: int
    failed: int
    fallback_rounds: int
    prompt_tokens: int
    cached_tokens: int
    medians: dict[str, float | None]


@dataclass(frozen=True)
class Speedup:
    """Tokens a second with speculation over those without, in pairs of one repeat."""

    concurrency: int
    pairs: int
    median: float
    lowest: float
    highest: float


def levels(measurements: Sequence[Measurement]) -> list[Level]:
    """By number of clients, each in the order of its modes."""
    found: dict[tuple[int, str], list[Measurement]] = {}
    for one in measurements:
        found.setdefault((one.concurrency, one.mode), []).append(one)
    return [
        _level(concurrency, mode, found[concurrency, mode]) for concurrency, mode in sorted(found)
    ]


def _level(concurrency: int, mode: str, repeats: Sequence[Measurement]) -> Level:
    summaries = [one.summary for one in repeats]
    medians = {name: median(getattr(s, name) for s in summaries) for name in _MEDIANS}
    medians |= {
        name: median(getattr(s.speculation, name) for s in summaries)
        for name in _SPECULATION_MEDIANS
    }
    return Level(
        concurrency=concurrency,
        mode=mode,
        repeats=len(repeats),
        requests=sum(s.requests for s in summaries),
        failed=sum(s.failed for s in summaries),
        fallback_rounds=sum(s.speculation.fallback_rounds for s in summaries),
        prompt_tokens=sum(s.prompt_tokens for s in summaries),
        cached_tokens=sum(s.cached_tokens for s in summaries),
        medians=medians,
    )


def speedups(measurements: Sequence[Measurement]) -> list[Speedup]:
    """Of each number of clients that was measured in both modes in one repeat at least."""
    rates: dict[int, dict[int, dict[str, float]]] = {}
    for one in measurements:
        rate = one.summary.tokens_per_second
        if rate is not None:
            rates.setdefault(one.concurrency, {}).setdefault(one.repeat, {})[one.mode] = rate
    results = []
    for concurrency, repeats in sorted(rates.items()):
        ratios = [
            pair[SPECULATIVE] / pair[PLAIN]
            for pair in repeats.values()
            if PLAIN in pair and SPECULATIVE in pair
        ]
        middle = median(ratios)
        if middle is not None:
            results.append(Speedup(concurrency, len(ratios), middle, min(ratios), max(ratios)))
    return results


def errors(measurements: Sequence[Measurement]) -> dict[str, int]:
    """How often each error occurred in all measurements."""
    total: dict[str, int] = {}
    for one in measurements:
        for name, count in one.summary.errors.items():
            total[name] = total.get(name, 0) + count
    return total


def kinds(measurements: Sequence[Measurement]) -> dict[str, Speculation]:
    """How speculation went over all repeats and levels, by kind of prompt."""
    calls: dict[str, list[Call]] = {}
    for one in measurements:
        if one.mode == SPECULATIVE:
            for call in one.calls:
                if call.ok:
                    calls.setdefault(call.kind, []).append(call)
    return {kind: speculation(found) for kind, found in sorted(calls.items())}


def machine() -> dict[str, Any]:
    """Where the measurement was made. The load says whether the machine had other work."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "system": platform.system(),
        "processor": platform.machine(),
        "cores": cores,
        "python": platform.python_version(),
        "load_average": os.getloadavg() if hasattr(os, "getloadavg") else None,
    }


def heading(settings: dict[str, Any], *, interrupted: bool) -> dict[str, Any]:
    """What every JSON file says first: when, where and how."""
    return {
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
        "interrupted": interrupted,
        "machine": machine(),
        "settings": settings,
    }


def document(
    measurements: Sequence[Measurement], settings: dict[str, Any], *, interrupted: bool
) -> dict[str, Any]:
    """Everything, for a JSON file."""
    return {
        **heading(settings, interrupted=interrupted),
        "levels": [asdict(level) for level in levels(measurements)],
        "speedups": [asdict(speedup) for speedup in speedups(measurements)],
        "kinds": {kind: asdict(found) for kind, found in kinds(measurements).items()},
        "errors": errors(measurements),
        "measurements": [
            {
                "repeat": one.repeat,
                "concurrency": one.concurrency,
                "mode": one.mode,
                "planned_requests": one.planned_requests,
                **asdict(one.summary),
                "calls": [_call(call) for call in one.calls],
            }
            for one in measurements
        ],
    }


def _call(call: Call) -> dict[str, Any]:
    return {
        "prompt": call.prompt_id,
        "ok": call.ok,
        "tokens": call.num_tokens,
        "ttft_ms": None if call.ttft is None else 1000 * call.ttft,
        "latency_ms": 1000 * call.latency,
    }
