"""What draft and target do at the positions of a log: noise, drafted tokens, ranks. NumPy alone.

Everything is *given the text*: the target's token at each position is the one that was written, so
that all contexts are those of the log up to the first drafted token that does not stand, and a
round needs no others.

- Greedy: the draft's token is argmax q. No noise.
- COUPLED: target and draft add the same Gumbel noise g to log p and log q. Given that
  argmax log p + g is the written token, its score is a Gumbel Z and every other score is a Gumbel
  that is cut off at Z, so that g is known where p is, and free elsewhere.
- REJECTION: given that y was emitted, y had been drafted and stood with probability
  min(p, q)(y) ÷ p(y). Otherwise another token was drafted, and rejected: one of
  norm(max(q − p, 0)).

Distributions are those of the kept tokens alone, at the log's temperature.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from benchmarks.distribution_log import DistributionLog, Floats, Ids

Counts = npt.NDArray[np.int64]

NEVER = np.iinfo(np.int64).max
"""The rank of a token that the draft has not got."""

GREEDY = "greedy"
COUPLED = "coupled"
REJECTION = "rejection"
RULES = (GREEDY, COUPLED, REJECTION)

SHARED = "shared noise"
FRESH = "fresh noise"
PLAIN = "q alone"
ORDERS = (SHARED, FRESH, PLAIN)
"""What guesses of the next token are ordered by: log q with the noise that target and draft share,
with noise of its own, or without any."""

Noise = Callable[[np.random.Generator, Floats, Counts], Floats]


@dataclass(frozen=True)
class Pair:
    """Target and draft at the M positions, over the draft's N tokens."""

    q_ids: Ids
    """[M, N]."""
    log_q: Floats
    """[M, N], at the log's temperature."""
    log_p: Floats
    """[M, N], of the draft's tokens; −inf where the target has not kept them."""
    place: Counts
    """[M]: where the written token is among the draft's."""
    written_log_p: Floats
    """[M], that of the written token."""


@dataclass(frozen=True)
class Draws:
    """One simulated draft at every position."""

    stands: npt.NDArray[np.bool_]
    """[M]: whether the drafted token is the one that was written."""
    ranks: dict[str, Counts]
    """[M] by order: how many guesses come before the written token. What was drafted is no guess
    for a position where it does not stand, and is left out there."""
    bonus_ranks: dict[str, Counts]
    """[M] by order: likewise where nothing was drafted."""
    scores: Floats
    """[M, N], what the draft took the largest of."""


def pair_of(log: DistributionLog) -> Pair:
    """A log's distributions, matched token by token.

    Raises:
        ValueError: a written token is not among those kept.
    """
    log_p, log_q = _at_temperature(log.p, log.temperature), _at_temperature(log.q, log.temperature)
    found = log.q_ids == log.tokens[:, None]
    if not (found.any(1).all() and (log.p_ids == log.tokens[:, None]).any(1).all()):
        raise ValueError("the written token must be among those that are kept")
    # Tokens of a position, in order: where each of the draft's would be among the target's.
    order = np.argsort(log.p_ids, axis=1)
    at_q = np.full(log.q_ids.shape, -np.inf)
    for row, (ids, wanted) in enumerate(zip(log.p_ids, log.q_ids, strict=True)):
        slots = np.searchsorted(ids, wanted, sorter=order[row]).clip(max=len(ids) - 1)
        slots = order[row][slots]
        at_q[row] = np.where(ids[slots] == wanted, log_p[row, slots], -np.inf)
    place = found.argmax(1)
    return Pair(log.q_ids, log_q, at_q, place, at_q[np.arange(len(place)), place])


def _at_temperature(scores: Floats, temperature: float) -> Floats:
    """Normalised over the kept tokens. At 0 they stay as at 1: only their order matters then."""
    scaled = scores / (temperature or 1.0)
    top = scaled.max(axis=1, keepdims=True)
    normalised: Floats = scaled - top - np.log(np.exp(scaled - top).sum(axis=1, keepdims=True))
    return normalised


def gumbel(random: np.random.Generator, shape: tuple[int, ...]) -> Floats:
    """Standard Gumbel noise."""
    return random.gumbel(size=shape)


def noise_given_text(random: np.random.Generator, log_p: Floats, place: Counts) -> Floats:
    """The shared noise of the draft's tokens, given that the target's token is the one at `place`.

    Args:
        random: the source.
        log_p: [M, N], of the draft's tokens.
        place: [M].
    """
    rows = np.arange(len(place))
    free = gumbel(random, log_p.shape)
    largest = gumbel(random, (len(place),))
    known = np.isfinite(log_p)
    safe = np.where(known, log_p, 0.0)
    # −log(exp(−Z) + exp(−G)) is a Gumbel G that is known to be below Z.
    below = -np.logaddexp(-largest[:, None], -(safe + free)) - safe
    noise = np.where(known, below, free)
    noise[rows, place] = largest - safe[rows, place]
    return noise


def draws(
    pair: Pair, rule: str, random: np.random.Generator, noise: Noise = noise_given_text
) -> Draws:
    """Simulates a draft of one token at every position, under a rule.

    Args:
        pair: what it draws from.
        rule: one of RULES.
        random: the source of noise and coins.
        noise: the shared noise of COUPLED.
    """
    rows = np.arange(len(pair.place))
    scores = pair.log_q
    orders = {PLAIN: scores}
    if rule != GREEDY:
        orders[FRESH] = scores + gumbel(random, scores.shape)
    if rule == COUPLED:
        scores = orders[SHARED] = scores + noise(random, pair.log_p, pair.place)
    drafted = _rejected_or_written(pair, random) if rule == REJECTION else scores.argmax(axis=1)
    stands = drafted == pair.place
    ranks, bonus_ranks = {}, {}
    for name, order in orders.items():
        own = order[rows, pair.place]
        before = (order > own[:, None]).sum(axis=1)
        bonus_ranks[name] = np.where(np.isfinite(own), before, NEVER)
        less = before - (order[rows, drafted] > own)
        ranks[name] = np.where(np.isfinite(own), less, NEVER)
    return Draws(stands, ranks, bonus_ranks, scores)


def _rejected_or_written(pair: Pair, random: np.random.Generator) -> Counts:
    """[M]: the place of what REJECTION drafted, given what it emitted."""
    rows = np.arange(len(pair.place))
    own_q = pair.log_q[rows, pair.place]
    stood = np.log(random.random(len(rows))) < own_q - pair.written_log_p
    excess = np.maximum(np.exp(pair.log_q) - np.exp(pair.log_p), 0.0)
    # Where p = q nothing is rejected but by rounding; then it does not matter what.
    excess[rows, pair.place] = 0.0
    with np.errstate(divide="ignore"):
        other = (np.log(excess + 1e-300) + gumbel(random, excess.shape)).argmax(axis=1)
    return np.where(stood, pair.place, other)
