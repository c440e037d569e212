"""How drafts did on one log of a target, in numbers."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from specdec.bench.acceptance import (
    Round,
    acceptance_by_position,
    acceptance_rate,
    mean_acceptance_length,
    measured_acceptance_length,
    predicted_speedup,
    recommended_k,
)
from specdec.bench.measures import median
from specdec.bench.replay import Replay
from specdec.bench.report import heading
from specdec.bench.target_log import TargetLog


@dataclass
class Trial:
    """A draft that was named, and the replays of the log that it was given."""

    name: str
    replays: dict[int, list[Replay]] = field(default_factory=dict)
    """By K: the outputs that were played to their end."""
    error: str = ""
    """Why it could not be scored, or no further. Empty if all went well."""


@dataclass(frozen=True)
class Acceptance:
    """What the target accepted of some rounds."""

    rounds: int
    drafted: int
    accepted: int
    acceptance_rate: float | None
    mean_acceptance_length: float | None
    """As measured, the last rounds of outputs, which have little room, included."""
    by_position: list[float | None]
    """α_1 … α_K."""


@dataclass(frozen=True)
class Score:
    """A draft at one K. Times are the draft service's own, in milliseconds."""

    k: int
    outputs: int
    total: Acceptance
    kinds: dict[str, Acceptance]
    proposal_ms: float | None
    """The mean time of a proposal that K tokens were asked of, or as many as outputs had room for.
    The mean and not the median, as a draft that copies where it can is quick only at times."""
    proposal_ms_p50: float | None
    token_ms: float | None
    """The median time of a proposal by the tokens that it holds; empty ones are left out."""
    cost_ratio: float | None
    """c: proposal_ms by the tokens asked for ÷ the time of a step of the target alone."""
    predicted_speedup: float | None
    """Of the measured mean acceptance length and cost ratio."""


@dataclass(frozen=True)
class Point:
    """What is expected of proposals of k tokens."""

    k: int
    mean_acceptance_length: float
    predicted_speedup: float | None


@dataclass(frozen=True)
class Verdict:
    """A draft in the report."""

    name: str
    error: str
    scores: list[Score]
    """In the order of K."""
    curve: list[Point]
    """From the replay of the largest K: each shorter proposal taken to be the beginning of one of
    that. That is an estimate, as rounds of another K begin elsewhere."""
    recommended_k: int | None
    """Of the largest predicted speedup on the curve; 0 if no proposal pays. None if unknown."""


def verdict(trial: Trial, log: TargetLog) -> Verdict:
    """Sums a trial up."""
    scores = [
        _score(k, replays, log.step_ms) for k, replays in sorted(trial.replays.items()) if replays
    ]
    curve: list[Point] = []
    best = None
    if scores:
        longest = scores[-1]
        alphas, c = longest.total.by_position, longest.cost_ratio
        for k in range(1, longest.k + 1):
            tau = mean_acceptance_length(alphas, k)
            curve.append(Point(k, tau, None if c is None else predicted_speedup(tau, k, c)))
        best = None if c is None else recommended_k(alphas, c)
    return Verdict(trial.name, trial.error, scores, curve, best)


def _score(k: int, replays: Sequence[Replay], step_ms: float | None) -> Score:
    by_kind: dict[str, list[Round]] = defaultdict(list)
    for one in replays:
        by_kind[one.kind] += one.rounds
    rounds = [found for one in replays for found in one.rounds]
    total = _acceptance(rounds, k)
    drafting = [took for one in replays for took in one.drafting]
    most = max((took.asked for took in drafting), default=k)
    full = [took.compute_us / 1000 for took in drafting if took.asked == most]
    proposal_ms = statistics.fmean(full) if full else None
    tau, c, speedup = total.mean_acceptance_length, None, None
    if proposal_ms is not None and step_ms:
        c = proposal_ms / most / step_ms
    if tau is not None and c is not None:
        speedup = predicted_speedup(tau, k, c)
    return Score(
        k=k,
        outputs=len(replays),
        total=total,
        kinds={kind: _acceptance(found, k) for kind, found in sorted(by_kind.items())},
        proposal_ms=proposal_ms,
        proposal_ms_p50=median(full),
        token_ms=median(took.compute_us / 1000 / took.drafted for took in drafting if took.drafted),
        cost_ratio=c,
        predicted_speedup=speedup,
    )


def _acceptance(rounds: Sequence[Round], k: int) -> Acceptance:
    return Acceptance(
        rounds=len(rounds),
        drafted=sum(one.drafted for one in rounds),
        accepted=sum(one.accepted for one in rounds),
        acceptance_rate=acceptance_rate(rounds),
        mean_acceptance_length=measured_acceptance_length(rounds),
        by_position=acceptance_by_position(rounds, k),
    )


def document(
    log: TargetLog | None,
    verdicts: Sequence[Verdict],
    settings: dict[str, Any],
    *,
    interrupted: bool,
) -> dict[str, Any]:
    """Everything, for a JSON file."""
    return {
        **heading(settings, interrupted=interrupted),
        "target": None
        if log is None
        else {
            **log.header.model_dump(exclude={"format"}),
            "outputs": len(log.outputs),
            "tokens": log.num_tokens,
            "step_ms": log.step_ms,
        },
        "drafts": [asdict(one) for one in verdicts],
    }
