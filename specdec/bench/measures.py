"""What a set of calls amounts to: latencies, throughput and how speculation went."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import grpc

from specdec.bench.load import Call
from specdec.errors import describe, reason_of


def percentile(values: Iterable[float], percent: float) -> float | None:
    """Between the two nearest values, by distance. None of no values."""
    ordered = sorted(values)
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def median(values: Iterable[float | None]) -> float | None:
    """Of those that are known. None of no values."""
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


@dataclass
class Speculation:
    """How speculation went over some calls. Times are means a round, in milliseconds."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    acceptance_rate: float | None = None
    mean_acceptance_length: float | None = None
    fallback_rounds: int = 0
    fallback_reasons: dict[str, int] = field(default_factory=dict)
    stale_proposals: int = 0
    draft_ms: float | None = None
    verify_ms: float | None = None
    wire_ms: float | None = None
    queue_ms: float | None = None


def speculation(calls: Sequence[Call]) -> Speculation:
    """Adds up the statistics that the completions carry."""
    found = [call.completion.speculation for call in calls if call.completion is not None]
    total = Speculation(
        rounds=sum(one.rounds for one in found),
        drafted=sum(one.num_draft_tokens for one in found),
        accepted=sum(one.num_accepted_tokens for one in found),
        fallback_rounds=sum(one.fallback_rounds for one in found),
        fallback_reasons=dict(Counter(one.fallback_reason for one in found if one.fallback_reason)),
        stale_proposals=sum(one.stale_proposals for one in found),
    )
    if total.drafted:
        total.acceptance_rate = total.accepted / total.drafted
    if total.rounds:
        total.mean_acceptance_length = 1 + total.accepted / total.rounds

        def a_round(microseconds: Iterable[int]) -> float:
            return sum(microseconds) / total.rounds / 1000

        total.draft_ms = a_round(one.draft_us for one in found)
        total.verify_ms = a_round(one.verify_us for one in found)
        total.wire_ms = a_round(one.wire_us for one in found)
        total.queue_ms = a_round(one.queue_us for one in found)
    return total


@dataclass
class Summary:
    """Some calls in numbers. Times are in milliseconds, of complete answers only."""

    requests: int
    failed: int
    errors: dict[str, int]
    seconds: float
    tokens: int
    tokens_per_second: float | None
    ttft_ms_p50: float | None
    ttft_ms_p95: float | None
    inter_token_ms_p50: float | None
    inter_token_ms_p95: float | None
    latency_ms_p50: float | None
    latency_ms_p95: float | None
    prompt_tokens: int
    cached_tokens: int
    speculation: Speculation
    kinds: dict[str, Speculation]


def summarise(calls: Sequence[Call], seconds: float) -> Summary:
    """Sums up calls that were made within so many seconds.

    Tokens of failed calls do not count as throughput.
    """
    good = [call for call in calls if call.ok]
    errors = Counter(_name(call) for call in calls if not call.ok)
    tokens = sum(call.num_tokens for call in good)
    by_kind: dict[str, list[Call]] = defaultdict(list)
    for call in good:
        by_kind[call.kind].append(call)
    ttft = [1000 * call.ttft for call in good if call.ttft is not None]
    inter_token = [1000 * one for call in good for one in call.inter_token]
    latency = [1000 * call.latency for call in good]
    usages = [call.completion.usage for call in good if call.completion is not None]
    return Summary(
        requests=len(calls),
        failed=sum(errors.values()),
        errors=dict(errors),
        seconds=seconds,
        tokens=tokens,
        tokens_per_second=tokens / seconds if tokens and seconds else None,
        ttft_ms_p50=percentile(ttft, 50),
        ttft_ms_p95=percentile(ttft, 95),
        inter_token_ms_p50=percentile(inter_token, 50),
        inter_token_ms_p95=percentile(inter_token, 95),
        latency_ms_p50=percentile(latency, 50),
        latency_ms_p95=percentile(latency, 95),
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        cached_tokens=sum(usage.cached_tokens for usage in usages),
        speculation=speculation(good),
        kinds={kind: speculation(found) for kind, found in sorted(by_kind.items())},
    )


def _name(call: Call) -> str:
    if call.error is None:
        return "the answer ended early"
    # Who notices first, client or server, words it differently.
    if call.error.code() == grpc.StatusCode.DEADLINE_EXCEEDED and reason_of(call.error) is None:
        return "no end within the timeout"
    return describe(call.error)
