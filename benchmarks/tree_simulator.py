"""How long rounds are whose proposals are trees, from a log, without a model.

    python -m benchmarks.tree_simulator logs/distributions-*.npz --rows 4,8,16 --width 1,2,4

For greedy decoding and COUPLED. After each token the draft has candidates: its first w tokens by
score, log q at temperature 0 and log q + g with the shared noise above it. It estimates that the
target's token is the candidate i with probability e_i ∝ exp(β · score_i), over all kept tokens; β
is the one under which the texts of the log are most likely. A tree of N nodes holds those with the
largest products of estimates from the root: best first, which is what the draft can know.

An approximation: contexts off the text are not in the log. The nodes on the text's own path have
their actual candidates. Those on other paths, which cannot stand but take a part of the budget, are
taken to have the mean e of the log at every rank.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks import common
from benchmarks.coupled_noise import COUPLED, GREEDY, Counts, Draws, Pair, draws, pair_of
from benchmarks.distribution_log import DistributionLog, Floats

_MOST_BETA = 64.0


def fitted_beta(scores: Floats, place: Counts) -> float:
    """The most likely β, within [0, 64].

    Args:
        scores: [M, N]; −inf for no candidate.
        place: [M], the target's token. Positions where it is no candidate say nothing.
    """
    own = scores[np.arange(len(place)), place]
    known = np.isfinite(own)
    scores, own = scores[known], own[known]
    if not len(own):
        return 1.0
    low, high = 0.0, _MOST_BETA
    # The likelihood is concave: its slope falls through 0 once.
    finite = np.where(np.isfinite(scores), scores, 0.0)
    for _ in range(40):
        middle = (low + high) / 2
        if (own - (estimates(scores, middle) * finite).sum(axis=1)).sum() > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def estimates(scores: Floats, beta: float) -> Floats:
    """[M, N], e: the probabilities that scores stand for."""
    top = scores.max(axis=1, keepdims=True)
    weights = np.exp(beta * np.where(np.isfinite(scores), scores - top, -np.inf))
    found: Floats = weights / weights.sum(axis=1, keepdims=True)
    return found


class Grown(NamedTuple):
    """A round's tree."""

    accepted: int
    """Tokens that stand."""
    steps: int
    """Its depth: steps of the draft that it took, each of as many rows as it is wide there."""


class Contexts:
    """What a tree may branch into after every position's context, most probable first."""

    def __init__(self, pair: Pair, drawn: Draws, beta: float) -> None:
        """
        Args:
            pair: the log.
            drawn: a draft's scores.
            beta: of the estimates.
        """
        every = estimates(drawn.scores, beta)
        order = np.argsort(-drawn.scores, axis=1, kind="stable")
        self.by_rank = np.take_along_axis(every, order, axis=1)
        """[M, N], e of the candidates."""
        self.profile = self.by_rank.mean(axis=0)
        """[N], that of contexts that are not known."""
        self.rank = (order == pair.place[:, None]).argmax(axis=1)
        """[M], of the target's token."""

    def best_tree(self, start: int, end: int, rows: int, width: int) -> Grown:
        """What a round's best tree comes to.

        Args:
            start: the round's first position.
            end: that of the text.
            rows: N, nodes of the tree.
            width: w, candidates after a token.
        """
        accepted = steps = 0
        # (−estimate, on the path, position, rank, estimate of the parent)
        open_nodes = [self._node(1.0, True, start, 0)]
        for _ in range(rows):
            if not open_nodes:
                break
            negative, on_path, position, rank, parent = heapq.heappop(open_nodes)
            if rank + 1 < min(width, len(self.profile)):
                heapq.heappush(open_nodes, self._node(parent, on_path, position, rank + 1))
            stands = on_path and rank == self.rank[position]
            accepted += stands
            steps = max(steps, position + 1 - start)
            if position + 1 < end:
                heapq.heappush(open_nodes, self._node(-negative, bool(stands), position + 1, 0))
        return Grown(accepted, steps)

    def _node(
        self, parent: float, on_path: bool, position: int, rank: int
    ) -> tuple[float, bool, int, int, float]:
        own = self.by_rank[position, rank] if on_path else self.profile[rank]
        return -parent * float(own), on_path, position, rank, parent


def trees_of(log: DistributionLog, contexts: Contexts, rows: int, width: int) -> list[Grown]:
    """Rounds with trees of so many nodes. Those within `rows` of a text's end are left out."""
    found = []
    for text in log.texts():
        place = text.start
        while place + rows < text.stop:
            found.append(contexts.best_tree(place, text.stop, rows, width))
            place += found[-1].accepted + 1
    if not found:
        raise SystemExit(f"error: no text is longer than {rows} tokens")
    return found


def main(arguments: list[str] | None = None) -> None:
    """The entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", type=Path, nargs="+", help="files of the distribution recorder")
    parser.add_argument("--rows", default="2,3,4,6,8,16", help="N (2,3,4,6,8,16)")
    parser.add_argument("--width", default="1,2,3,4", help="w; with 1 it is a chain (1,2,3,4)")
    parser.add_argument("--trials", type=common.positive, default=4, help="of the noise (4)")
    parser.add_argument("--seed", type=int, default=0, help="of the noise (0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    options = parser.parse_args(arguments)
    all_rows = [int(text) for text in options.rows.split(",")]
    widths = [int(text) for text in options.width.split(",")]
    results = [_simulated(file, options, all_rows, widths) for file in options.logs]
    table = []
    for result in results:
        within = [result["within"][str(width)] for width in widths]
        table.append((result["temperature"], "share", None, *within))
        for name in ("τ", "steps"):
            for rows in all_rows:
                values = [result[name][f"{rows}/{width}"] for width in widths]
                table.append((result["temperature"], name, rows, *values))
    print("share: of all positions, those whose token is among the first w candidates")
    print("steps: of the draft in a round, the mean depth of the trees")
    columns = ("T", "", "N", *(f"w = {width}" for width in widths))
    common.finish(options, columns, table, {"results": results})
    for result in results:
        print(f"T = {result['temperature']:g}: β = {result['beta']:.2f}")


def _simulated(
    file: Path, options: argparse.Namespace, all_rows: list[int], widths: list[int]
) -> dict[str, Any]:
    log = DistributionLog.read(file)
    pair = pair_of(log)
    random = np.random.default_rng(options.seed)
    rule = COUPLED if log.temperature > 0 else GREEDY
    drawn = [draws(pair, rule, random) for _ in range(options.trials if rule == COUPLED else 1)]
    beta = fitted_beta(
        np.concatenate([one.scores for one in drawn]), np.tile(pair.place, len(drawn))
    )
    contexts = [Contexts(pair, one, beta) for one in drawn]
    result: dict[str, Any] = {
        "log": str(file),
        "temperature": log.temperature,
        "beta": beta,
        "within": {
            str(width): float(np.mean([(one.rank < width).mean() for one in contexts]))
            for width in widths
        },
        "τ": {},
        "steps": {},
    }
    for rows, width in itertools.product(all_rows, widths):
        trees = [tree for one in contexts for tree in trees_of(log, one, rows, width)]
        accepted, steps = np.mean(trees, axis=0)
        result["τ"][f"{rows}/{width}"] = 1 + float(accepted)
        result["steps"][f"{rows}/{width}"] = float(steps)
    return result


if __name__ == "__main__":
    main()
