"""The cells of the network sweep: what is asked for, what came, what the closed forms say."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks import closed_forms
from benchmarks.closed_forms import Costs
from specdec.bench.load import Call
from specdec.bench.prompts import Prompt
from specdec.v1 import common_pb2, gateway_pb2

RULES = {
    "coupled": common_pb2.ACCEPTANCE_RULE_COUPLED,
    "rejection": common_pb2.ACCEPTANCE_RULE_REJECTION,
    "block": common_pb2.ACCEPTANCE_RULE_BLOCK,
}
_PLAIN_RULE = "plain"
_GREEDY_RULE = "greedy"


@dataclass(frozen=True, order=True)
class Cell:
    """One setting that is measured."""

    temperature: float
    rule: str
    k: int
    """Drafted tokens a round, always so many; with 0 it is plain decoding."""
    draft_topk: int
    run_ahead: int
    rtt: float
    """Milliseconds, of each link that is impaired."""

    def __str__(self) -> str:
        return (
            f"T {self.temperature:g}, {self.rule}, K {self.k}, topk {self.draft_topk}, "
            f"run-ahead {self.run_ahead}, RTT {self.rtt:g}"
        )

    def request(
        self, prompt: Prompt, max_new_tokens: int, seed: int, salt: str
    ) -> gateway_pb2.GenerateRequest:
        """The request for a prompt. What it computes is shared only with those of one salt."""
        message = gateway_pb2.ChatMessage(role="user", content=prompt.text)
        speculation = gateway_pb2.SpeculationParams(enabled=False)
        if self.k:
            speculation = gateway_pb2.SpeculationParams(
                enabled=True,
                num_draft_tokens=self.k,
                # At temperature 0 all rules are one.
                acceptance_rule=RULES.get(self.rule, common_pb2.ACCEPTANCE_RULE_COUPLED),
                draft_topk=self.draft_topk,
                adaptive=False,
                run_ahead=self.run_ahead,
            )
        return gateway_pb2.GenerateRequest(
            chat=gateway_pb2.ChatInput(messages=[message]),
            sampling=gateway_pb2.SamplingParams(temperature=self.temperature, seed=seed),
            stopping=gateway_pb2.StoppingParams(max_new_tokens=max_new_tokens),
            speculation=speculation,
            prefix_cache=common_pb2.PrefixCacheParams(salt=salt),
        )


def cells(
    *,
    temperatures: Iterable[float],
    rules: Sequence[str],
    ks: Iterable[int],
    topks: Iterable[int],
    run_aheads: Iterable[int],
    rtts: Sequence[float],
) -> Iterator[Cell]:
    """Every combination that differs from the others, the smallest RTT first.

    Plain decoding has no rule, and is always among them: it is what the others are compared with.
    """
    found = set()
    for temperature, rtt in itertools.product(temperatures, rtts):
        found.add(Cell(temperature, _PLAIN_RULE, 0, 1, 0, rtt))
        for rule, k, topk, run_ahead in itertools.product(rules, ks, topks, run_aheads):
            sampled = temperature > 0 and rule != "coupled"
            if k and not (sampled and topk > 1):
                name = rule if temperature > 0 else _GREEDY_RULE
                found.add(Cell(temperature, name, k, topk, run_ahead, rtt))
    yield from sorted(found, key=lambda cell: (cell.rtt, cell))


@dataclass(frozen=True)
class Sample:
    """What a cell came to in one repeat, or in all together. Times are milliseconds a round."""

    tokens_per_second: float
    round_ms: float
    draft_ms: float
    verify_ms: float
    wire_ms: float
    queue_ms: float
    tau: float
    alpha: float | None
    """As if it were one for all positions."""
    hits: int
    misses: int
    rounds: int
    fallback_rounds: int

    @property
    def hit_rate(self) -> float | None:
        """h: the share of the rounds with a proposal made ahead that it was the right one in."""
        known = self.hits + self.misses
        return self.hits / known if known else None


def sample(calls: Sequence[Call]) -> Sample:
    """Of the requests of a cell in one repeat. The rate is that after the first chunk: decoding.

    Raises:
        SystemExit: no request decoded for more than one round.
    """
    seconds = sum(call.arrivals[-1][0] - call.arrivals[0][0] for call in calls if call.arrivals)
    tokens = sum(call.num_tokens - call.arrivals[0][1] for call in calls if call.arrivals)
    after_first = sum(max(0, len(call.arrivals) - 1) for call in calls)
    if not after_first or not seconds:
        raise SystemExit("error: the answers are too short to be timed: raise --tokens")
    found = [call.completion.speculation for call in calls if call.completion is not None]

    def total(name: str) -> int:
        return sum(getattr(one, name) for one in found)

    def by_position(name: str) -> list[int]:
        every = (getattr(one, name) for one in found)
        return [sum(column) for column in itertools.zip_longest(*every, fillvalue=0)]

    rounds = total("rounds")
    return Sample(
        tokens_per_second=tokens / seconds,
        round_ms=1000 * seconds / after_first,
        draft_ms=total("draft_us") / rounds / 1000,
        verify_ms=total("verify_us") / rounds / 1000,
        wire_ms=total("wire_us") / rounds / 1000,
        queue_ms=total("queue_us") / rounds / 1000,
        tau=1 + total("num_accepted_tokens") / rounds,
        alpha=closed_forms.mean_alpha(
            by_position("accepted_per_position"), by_position("drafted_per_position")
        ),
        hits=total("run_ahead_hits"),
        misses=total("run_ahead_misses"),
        rounds=rounds,
        fallback_rounds=total("fallback_rounds"),
    )


def together(samples: Sequence[Sample]) -> Sample:
    """Medians of times, rates and lengths over the repeats, and sums of counts."""
    counts = ("hits", "misses", "rounds", "fallback_rounds")
    found: dict[str, Any] = {}
    for name in Sample.__dataclass_fields__:
        values = [getattr(one, name) for one in samples if getattr(one, name) is not None]
        if name in counts:
            found[name] = sum(values)
        else:
            found[name] = statistics.median(values) if values else None
    return Sample(**found)


@dataclass(frozen=True)
class Prediction:
    """Tokens a second of the closed forms."""

    from_tau: float
    """With E = τ, as it was in the cell itself."""
    from_alpha: float
    """With E(γ) of the cell's α."""


def predictions(
    measured: Mapping[Cell, Sample], round_trips: Mapping[float, tuple[float, float]]
) -> dict[Cell, Prediction]:
    """What the closed forms make of the costs at the smallest RTT, for every cell.

    The costs of the models and the overhead are those of the cell with the same settings at the
    smallest RTT without run-ahead; E and the hit rate are the cell's own. Nothing that was timed at
    an RTT is used to predict that RTT, but the smallest.

    Args:
        measured: all cells.
        round_trips: of the draft's and the verifier's link at each RTT, milliseconds.
    """
    least = min(round_trips)
    found = {}
    for cell, of_cell in measured.items():
        base = measured[Cell(cell.temperature, _PLAIN_RULE, 0, 1, 0, least)]
        step = 1000 / base.tokens_per_second - round_trips[least][1]
        draft_rtt, verify_rtt = round_trips[cell.rtt]
        if not cell.k:
            speed = closed_forms.plain_speed(step, verify_rtt)
            found[cell] = Prediction(1000 * speed / step, 1000 * speed / step)
            continue
        waiting = replace(cell, rtt=least, run_ahead=0)
        reference = measured.get(waiting) or measured[replace(cell, rtt=least)]
        costs = Costs(
            step,
            reference.draft_ms,
            reference.verify_ms,
            draft_rtt,
            verify_rtt,
            max(0.0, reference.wire_ms + reference.queue_ms - sum(round_trips[least])),
        )
        hit_rate = of_cell.hit_rate or 0.0
        alpha_length = closed_forms.expected_length(of_cell.alpha or 0.0, cell.k)
        from_tau, from_alpha = (
            1000 * closed_forms.overlapped_speed(length, costs, hit_rate) / step
            for length in (of_cell.tau, alpha_length)
        )
        found[cell] = Prediction(from_tau, from_alpha)
    return found


def table(
    measured: Mapping[Cell, Sample], predicted: Mapping[Cell, Prediction]
) -> list[tuple[object, ...]]:
    """A row for each cell, those that differ in RTT alone below each other."""
    rows: list[tuple[object, ...]] = []
    for cell, one in sorted(measured.items()):
        least = min(other.rtt for other in measured)
        base = measured[Cell(cell.temperature, _PLAIN_RULE, 0, 1, 0, least)].tokens_per_second
        said = predicted[cell]
        rows.append(
            (
                *(f"{cell.temperature:g} {cell.rule}", cell.k, cell.draft_topk, cell.run_ahead),
                *(f"{cell.rtt:g}", one.tokens_per_second, one.tokens_per_second / base),
                *(one.tau, one.alpha, one.hit_rate, one.draft_ms, one.verify_ms, one.wire_ms),
                *(one.round_ms, said.from_tau / base, said.from_alpha / base),
                one.tokens_per_second / said.from_tau,
            )
        )
    return rows


COLUMNS = (
    *("T rule", "K", "topk", "ahead", "RTT", "tokens/s", "× plain", "τ", "α", "hits"),
    *("draft ms", "verify ms", "wire ms", "round ms", "× by τ", "× by α", "measured/by τ"),
)
