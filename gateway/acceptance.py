"""How likely drafted tokens are to stand, learnt from verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gateway.pass_cost import usable

# Positions that are told apart. Deeper ones are taken to be like the last.
_POSITIONS = 32
# Before anything is known. High, so that a draft is tried; it takes few verdicts to learn better.
_FIRST_GUESS = 0.7
# How many tokens a prior counts for: that of a session, which is what others have seen; that of all
# sessions, which is the guess; and that of a further position, which is the one before it.
_SESSION_PRIOR = 4.0
_WORKLOAD_PRIOR = 2.0
_POSITION_PRIOR = 6.0
# How much of the counts is left after a round: of a position that was tried in it, and of one that
# was not. The latter fade too, or else a position given up for a bad stretch would never be tried
# again. A session's own counts reach 25 rounds back: texts change from paragraph to paragraph.
_SESSION_FADING = (0.96, 0.97)
_WORKLOAD_FADING = (0.99, 0.98)
# By how many standard deviations a first token is presumed to be better than it was: a draft that
# was given up after bad luck is hardly tried again, while one that is tried is soon known. What
# others have seen makes it surer, as so many tokens of its own would at most.
_OPTIMISM = 1.0
_OPTIMISM_ENDS = 10.0
_NEGLIGIBLE = 1e-3
# How often, a priori, a draft is useless for the text at hand, and how often its first token stands
# then. Counts alone would take dozens of rounds to give up what was good before.
_USELESS = 0.005
_USELESS_ACCEPTANCE = 0.05
# How far predictions may be wrong, and how many tokens' worth of being right is presumed.
_CALIBRATION = (0.25, 4.0)
_CALIBRATION_PRIOR = 4.0
_CALIBRATION_FADING = 0.95


class _Beta:
    """What is known of a probability: how often it was so, of how many times. Old ones fade."""

    def __init__(self) -> None:
        self.hits = 0.0
        self.trials = 0.0

    def fade(self, factor: float) -> None:
        self.hits *= factor
        self.trials *= factor

    def add(self, hit: bool) -> None:
        self.hits += hit
        self.trials += 1.0

    def mean(self, prior: float, strength: float) -> float:
        return (self.hits + strength * prior) / (self.trials + strength)


class _Counts:
    """Of each position, how often its token stood when those before it did."""

    def __init__(self, fading: tuple[float, float]) -> None:
        self.positions = [_Beta() for _ in range(_POSITIONS)]
        self.offered = _Beta()
        """How often there was a proposal when one was asked for."""
        self.deepest = 0
        """Position that was ever tried."""
        self._fading = fading

    def add(self, depth: int, num_accepted: int, offered: bool) -> None:
        """Counts a proposal so deep, of which so many tokens stood."""
        depth = min(depth, _POSITIONS)
        tried, untried = self._fading
        self.offered.fade(tried)
        self.offered.add(offered)
        self.deepest = max(self.deepest, depth)
        for position, beta in enumerate(self.positions[: self.deepest]):
            if position < depth and position <= num_accepted:
                beta.fade(tried)
                beta.add(position < num_accepted)
            elif beta.trials > 0.0:
                beta.fade(untried)


class SharedAcceptance:
    """What the sessions of a workload have in common: the prior of each."""

    def __init__(self) -> None:
        self.counts = _Counts(_WORKLOAD_FADING)
        self.calibration = _Ratio(1.0)

    def means(self, count: int) -> list[float]:
        """Of each position, how likely its token stands if those before it do."""
        means, prior, strength = [], _FIRST_GUESS, _WORKLOAD_PRIOR
        for beta in self.counts.positions[:count]:
            prior, strength = beta.mean(prior, strength), _POSITION_PRIOR
            means.append(prior)
        return means


class Acceptance:
    """What one session has seen, on top of what all have."""

    def __init__(self, shared: SharedAcceptance) -> None:
        self._shared = shared
        self._counts = _Counts(_SESSION_FADING)
        self._calibration = _Ratio(0.0)
        self._failures = 0
        """How many proposals in a row, up to the last, were in vain."""
        self._expected_before = _FIRST_GUESS
        """What was thought of a first token before these."""

    def add(
        self, depth: int, num_accepted: int, expected: float, *, cut_short: bool = False
    ) -> None:
        """Counts what became of a round that was to have a proposal.

        Args:
            depth: how many tokens followed each other in it; 0 if it was empty.
            num_accepted: how many tokens stood.
            expected: how many the draft expected to, or 0 if it did not say.
            cut_short: whether it could have been deeper, and the draft thought that this would not
                pay: the next token was not there to stand.
        """
        if depth > 0 and num_accepted > 0:
            self._failures = 0
        elif depth > 0:
            if self._failures == 0:
                self._expected_before = self.means(1)[0]
            self._failures = min(self._failures + 1, _POSITIONS)
        for counts in (self._counts, self._shared.counts):
            counts.add(depth + 1 if cut_short and depth else depth, num_accepted, depth > 0)
        expected = usable(expected, float(_POSITIONS))
        if expected > 0.0:
            for ratio in (self._calibration, self._shared.calibration):
                ratio.add(num_accepted, expected)

    def means(self, count: int) -> list[float]:
        """Of each position, how likely its token stands if those before it do.

        A position that the session has not seen is like it is for others, made better or worse by
        what the session is better or worse at the position before.
        """
        means, odds_ratio = [], 1.0
        shared = self._shared.means(count)
        for beta, common in zip(self._counts.positions, shared, strict=False):
            odds = odds_ratio * common / (1.0 - common) if common < 1.0 else float(_POSITIONS)
            mean = beta.mean(odds / (1.0 + odds), _SESSION_PRIOR)
            means.append(mean)
            odds_ratio = _odds(mean) / _odds(common)
        return means

    def survivals(self, count: int) -> list[float]:
        """Of each position, how likely its token is proposed and stands, as far as that
        is worth a thought."""
        survival = self.offered * (1.0 - self.uselessness)
        found = []
        means = self.means(count)
        own = self._counts.positions[0].trials
        others = max(self._shared.counts.positions[0].trials - own, 0.0)
        trials = own + min(others, _OPTIMISM_ENDS) + _SESSION_PRIOR
        means[0] = min(means[0] + _OPTIMISM * math.sqrt(means[0] * (1 - means[0]) / trials), 1.0)
        for mean in means:
            survival *= mean
            if survival < _NEGLIGIBLE:
                break
            found.append(survival)
        return found

    @property
    def offered(self) -> float:
        """How likely there is a proposal if one is asked for."""
        prior = self._shared.counts.offered.mean(1.0, _WORKLOAD_PRIOR)
        return self._counts.offered.mean(prior, _SESSION_PRIOR)

    @property
    def uselessness(self) -> float:
        """How likely the draft is of no use at present, seeing how often in a row it was not."""
        useless = _USELESS * (1.0 - _USELESS_ACCEPTANCE) ** self._failures
        # What was thought before was perhaps too much, and what is thought now knows of them.
        expected = (self._expected_before + self.means(1)[0]) / 2.0
        useful = (1.0 - _USELESS) * (1.0 - min(expected, 0.99)) ** self._failures
        return useless / (useless + useful)

    @property
    def calibration(self) -> float:
        """How many tokens stand for each that the draft expects to."""
        prior = self._shared.calibration.mean(1.0)
        low, high = _CALIBRATION
        return min(max(self._calibration.mean(prior), low), high)


class _Ratio:
    """How much came of what was expected. Old rounds fade."""

    def __init__(self, expected: float) -> None:
        self._found = expected
        self._expected = expected

    def add(self, found: float, expected: float) -> None:
        self._found = self._found * _CALIBRATION_FADING + found
        self._expected = self._expected * _CALIBRATION_FADING + expected

    def mean(self, prior: float) -> float:
        strength = _CALIBRATION_PRIOR
        return (self._found + strength * prior) / (self._expected + strength)


def _odds(probability: float) -> float:
    bounded = min(max(probability, 1e-3), 1.0 - 1e-3)
    return bounded / (1.0 - bounded)


def rounded(values: Sequence[float], digits: int = 2) -> list[float]:
    """For a log."""
    return [round(value, digits) for value in values]
