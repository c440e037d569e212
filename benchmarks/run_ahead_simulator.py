"""How often a round that was prepared ahead is the one that comes, from a log, without a model.

    python -m benchmarks.run_ahead_simulator logs/distributions-*.npz --num-draft-tokens 5,8

While the target verifies K drafted tokens, the draft prepares the next proposal for some outcomes
(k, y): k tokens stand, and y follows them. For each k its guesses at y are the first F_k tokens of
log q + g at that place, with the noise that it shares with the target (COUPLED), with noise of its
own, or with none; for k < K without the token that it drafted there, which is known not to stand
then. A round *hits* if its outcome is among them.

F guesses in all are divided as F_k ∝ P_k^(1/(1+r)), P_k the share of rounds in which k tokens
stand: where a further guess at one place misses with a probability that falls as F_k^(−r), that is
the best one can do. `3 each` is three guesses for every k, 3(K + 1) in all.

The rounds are those of the texts in the log, see `benchmarks.coupled_noise`. Speeds are those of
`benchmarks.closed_forms`, for costs that are given.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import common
from benchmarks.closed_forms import Costs, overlapped_speed, synchronous_speed
from benchmarks.coupled_noise import (
    COUPLED,
    GREEDY,
    ORDERS,
    REJECTION,
    Counts,
    Draws,
    Pair,
    draws,
    pair_of,
)
from benchmarks.distribution_log import DistributionLog, Floats


@dataclass(frozen=True)
class Rounds:
    """R rounds."""

    k: int
    accepted: Counts
    """[R]: how many drafted tokens stood."""
    ranks: dict[str, Counts]
    """[R] by order: how many guesses come before the token that followed them."""

    @property
    def length(self) -> float:
        """τ, tokens a round."""
        return 1.0 + float(self.accepted.mean())

    def shares(self) -> Floats:
        """[K + 1], P_k: of all rounds, those in which k tokens stood."""
        found: Floats = np.bincount(self.accepted, minlength=self.k + 1) / len(self.accepted)
        return found

    def by_position(self) -> list[float | None]:
        """α_i: of the rounds that reached position i, the share in which its token stood."""
        counts = np.bincount(self.accepted, minlength=self.k + 1)
        reached = counts[::-1].cumsum()[::-1]
        return [float(stood / of) if of else None for of, stood in itertools.pairwise(reached)]

    def hit_rate(self, order: str, guesses: Counts) -> float:
        """The share of rounds whose outcome is among so many guesses for each k, [K + 1]."""
        return float((self.ranks[order] < guesses[self.accepted]).mean())


def rounds_of(log: DistributionLog, drawn: Sequence[Draws], k: int) -> Rounds:
    """The rounds that the texts take with proposals of k tokens. One that would go beyond the end
    of its text is left out."""
    accepted: list[int] = []
    ranks: dict[str, list[int]] = {order: [] for order in drawn[0].ranks}
    for one in drawn:
        for text in log.texts():
            place = text.start
            while place + k < text.stop:
                stood = 0
                while stood < k and one.stands[place + stood]:
                    stood += 1
                place += stood
                accepted.append(stood)
                for order, found in (one.ranks if stood < k else one.bonus_ranks).items():
                    ranks[order].append(int(found[place]))
                place += 1
    if not accepted:
        raise SystemExit(f"error: no text is longer than {k} tokens")
    return Rounds(k, np.array(accepted), {name: np.array(found) for name, found in ranks.items()})


def allocation(shares: Floats, total: int, r: float) -> Counts:
    """`total` guesses divided as F_k ∝ P_k^(1/(1+r)), by largest remainders.

    Args:
        shares: [K + 1], P_k.
        total: F.
        r: how fast more guesses at one place stop to help.
    """
    exact = shares ** (1 / (1 + r))
    exact = total * exact / exact.sum()
    whole: Counts = np.floor(exact).astype(np.int64)
    rest = np.argsort(-(exact - whole), kind="stable")[: total - int(whole.sum())]
    whole[rest] += 1
    return whole


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+", help="files of the distribution recorder")
    parser.add_argument("--num-draft-tokens", default="5,8", help="K, separated by commas (5,8)")
    parser.add_argument("--guesses", default="1,2,3,4,8,16", help="F (1,2,3,4,8,16)")
    parser.add_argument("--each", default="1,2,3", help="guesses for every k (1,2,3)")
    parser.add_argument("--r", default="0.5,1", help="of the allocation (0.5,1)")
    parser.add_argument("--trials", type=common.positive, default=8, help="of the noise (8)")
    parser.add_argument("--c", type=float, default=0.1, help="a draft's step ÷ a target's (0.1)")
    parser.add_argument("--v", type=float, default=1.1, help="a verification ÷ a step (1.1)")
    parser.add_argument("--rtt", type=float, default=0.0, help="to the draft, in steps (0)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    results = [result for file in options.logs for result in _simulated(file, options)]
    quiet = argparse.Namespace(json=None)
    by_position = max(result["k"] for result in results)
    common.finish(
        quiet,
        ("T", "rule", "K", "rounds", "τ", *(f"α{i + 1}" for i in range(by_position))),
        [
            (
                *(result["temperature"], result["rule"], result["k"], result["rounds"]),
                *(result["length"], *result["by_position"]),
                *[None] * (by_position - result["k"]),
            )
            for result in results
        ],
        {},
    )
    names = list(results[0]["orders"][0]["hit_rates"])
    for title, part in (("hit rates", "hit_rates"), ("× plain, overlapped", "speeds")):
        print(f"\n{title}, by the number of guesses")
        ends = part == "speeds"
        common.finish(
            options if ends else quiet,
            ("T", "rule", "K", "guesses by", "r", *(["synchronous"] if ends else []), *names),
            [
                (
                    *(result["temperature"], result["rule"], result["k"]),
                    *(order["order"], order["r"]),
                    *([result["synchronous"]] if ends else []),
                    *order[part].values(),
                )
                for result in results
                for order in result["orders"]
            ],
            {"results": results},
        )


def _simulated(file: Path, options: argparse.Namespace) -> list[dict[str, Any]]:
    """What a log comes to under each rule of its temperature and at each K."""
    log = DistributionLog.read(file)
    pair = pair_of(log)
    found = []
    for rule in (COUPLED, REJECTION) if log.temperature > 0 else (GREEDY,):
        drawn = _drawn(pair, rule, options)
        for k in map(int, options.num_draft_tokens.split(",")):
            rounds = rounds_of(log, drawn, k)
            costs = Costs(1.0, k * options.c, options.v, draft_rtt=options.rtt)
            found.append(
                {
                    "log": str(file),
                    "temperature": log.temperature,
                    "rule": rule,
                    "k": k,
                    "rounds": len(rounds.accepted),
                    "length": rounds.length,
                    "by_position": rounds.by_position(),
                    "synchronous": synchronous_speed(rounds.length, costs),
                    "orders": _orders(rounds, costs, options),
                }
            )
    return found


def _drawn(pair: Pair, rule: str, options: argparse.Namespace) -> list[Draws]:
    random = np.random.default_rng(options.seed)
    return [draws(pair, rule, random) for _ in range(1 if rule == GREEDY else options.trials)]


def _orders(rounds: Rounds, costs: Costs, options: argparse.Namespace) -> list[dict[str, Any]]:
    found = []
    shares = rounds.shares()
    for order in (name for name in ORDERS if name in rounds.ranks):
        for r in map(float, options.r.split(",")):
            guesses = {
                text: allocation(shares, int(text), r) for text in options.guesses.split(",")
            }
            for text in filter(None, options.each.split(",")):
                guesses[f"{text} each"] = np.full(rounds.k + 1, int(text))
            hits = {name: rounds.hit_rate(order, fan_out) for name, fan_out in guesses.items()}
            found.append(
                {
                    "order": order,
                    "r": r,
                    "fan_out": {name: fan_out.tolist() for name, fan_out in guesses.items()},
                    "hit_rates": hits,
                    "speeds": {
                        name: overlapped_speed(rounds.length, costs, hit)
                        for name, hit in hits.items()
                    },
                }
            )
    return found


if __name__ == "__main__":
    main()
