"""What drafted tokens that stand are worth: acceptance by position, length and speedup.

Pure functions. α_i is the probability that the i-th drafted token of a round stands, given that
all before it do; i counts from 1. The formulas are those of Leviathan et al. (arXiv 2211.17192,
sections 3.1 to 3.3), for an α that may differ from position to position.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple


class Round(NamedTuple):
    """How one round went."""

    room: int
    """The most drafted tokens that could have stood: K, or fewer at the end of an output."""
    drafted: int
    """Tokens that the draft proposed, at most `room`."""
    accepted: int
    """The first so many of them stood."""


def acceptance_by_position(rounds: Iterable[Round], k: int) -> list[float | None]:
    """α_1 … α_k: of the rounds that reached a position, the share in which its token stood.

    A round reaches position i if its first i − 1 tokens stood and it had room for i. A token that
    the draft did not propose there has not stood, so that the product α_1 ⋯ α_i remains the
    probability that a round accepts i tokens or more.

    Returns:
        k numbers within [0, 1]; None where no round came so far.
    """
    reached, stood = [0] * k, [0] * k
    for one in rounds:
        for position in range(min(one.room, one.accepted + 1, k)):
            reached[position] += 1
            stood[position] += position < one.accepted
    return [yes / of if of else None for yes, of in zip(stood, reached, strict=True)]


def acceptance_rate(rounds: Sequence[Round]) -> float | None:
    """Accepted ÷ drafted. None if nothing was drafted."""
    drafted = sum(one.drafted for one in rounds)
    return sum(one.accepted for one in rounds) / drafted if drafted else None


def measured_acceptance_length(rounds: Sequence[Round]) -> float | None:
    """τ as it was: 1 + accepted ÷ rounds. None of no rounds."""
    return 1 + sum(one.accepted for one in rounds) / len(rounds) if rounds else None


def mean_acceptance_length(alphas: Sequence[float | None], k: int) -> float:
    """τ as it is expected of proposals of k tokens: 1 + α_1 + α_1 α_2 + … + α_1 ⋯ α_k.

    With one α for all positions it is (1 − α^(k+1)) ÷ (1 − α), the paper's equation 1. A position
    that is not known, as no round reached it, counts as never accepted.

    Raises:
        ValueError: k is negative or there are fewer than k positions.
    """
    if not 0 <= k <= len(alphas):
        raise ValueError(f"k = {k} of {len(alphas)} positions")
    standing, tau = 1.0, 1.0
    for alpha in alphas[:k]:
        standing *= alpha or 0.0
        tau += standing
    return tau


def predicted_speedup(tau: float, k: int, c: float) -> float:
    """How much faster than the target alone: τ ÷ (k·c + 1), the paper's theorem 3.8.

    It takes the verification of k + 1 rows to cost one step of the target, and the network and the
    gateway to cost nothing.

    Args:
        tau: mean acceptance length, tokens a round.
        k: drafted tokens a round.
        c: cost of a draft's step ÷ cost of a target's step.

    Raises:
        ValueError: k or c is negative or not a number.
    """
    if k < 0 or not c >= 0:
        raise ValueError(f"k = {k} and c = {c} must not be negative")
    return tau / (k * c + 1)


def recommended_k(alphas: Sequence[float | None], c: float) -> int:
    """The k from 0 to len(alphas) of the largest predicted speedup, the smallest of equals.

    0 says that no proposal pays. Where the answer is len(alphas), a larger one may be better still.
    """
    speedups = [
        predicted_speedup(mean_acceptance_length(alphas, k), k, c) for k in range(len(alphas) + 1)
    ]
    best = max(speedups)
    return next(k for k, one in enumerate(speedups) if math.isclose(one, best, rel_tol=1e-12))
