"""What the sessions of a gateway learn together: their rounds, and what the services take."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import NamedTuple
from weakref import WeakSet

from gateway.acceptance import SharedAcceptance
from gateway.pass_cost import Average, Curve

_MEMORY = 64.0
"""Rounds that the mean of what a session commits reaches back."""
_NEGLIGIBLE = 1e-3
"""A token that is less likely to stand is not drafted, whatever it costs."""


class Observation(NamedTuple):
    """What became of a round. It holds no tokens: see the exactness of a plan."""

    depths: Sequence[int]
    """How many tokens were drafted at each depth: 1, 1, 1 is a chain of three. Empty if none."""
    num_accepted: int
    expected: float = 0.0
    """The sum of the proposal's probabilities to stand, or 0 if the draft gave none."""
    draft_us: float = 0.0
    """Of the proposal, in the draft service: computing and waiting to be computed."""
    draft_wire_us: float = 0.0
    """What the exchange with the draft took beyond that."""
    verify_us: float = 0.0
    """Of the pass that verified the round."""
    verify_wire_us: float = 0.0
    """What the exchange with the verifier took beyond the pass and the wait for it."""
    pass_rows: int = 0
    """How many tokens the pass had, those of other sessions included. 0 if it was not said."""
    pass_sessions: int = 0
    hidden: bool = False
    """Whether the proposal was there before it was asked for, so that nothing was waited for."""
    verify_queue_us: float = 0.0
    """How long the round waited for other passes."""


class Workload:
    """What the sessions of a gateway have in common: the two services, and what is drafted."""

    def __init__(self) -> None:
        self.acceptance = SharedAcceptance()
        self.verify = Curve()
        """Of a pass, in µs, by its rows."""
        self.step = Curve()
        """Of one step of the draft, in µs, by the sessions that share it."""
        self.verify_wire = Average()
        self.draft_wire = Average()
        self.tokens = Average(_MEMORY)
        """That a session commits a round."""
        self.survivals: list[float] = []
        """Of each position, how likely its token stands and is proposed: the mean of what the
        sessions expect, whether they draft or not. Counts of verdicts know only those that do."""
        self.drafted = 0.0
        """How many rows a session adds to a pass at present. It follows plans and not passes, so
        that sessions that plan one after the other know of each other: all of them going for rows
        that are cheap as long as few do would make them dear, and the next round all would stop.
        """
        self.planned: WeakSet[object] = WeakSet()
        """Sessions whose round goes on: how many there are is known before any of them has seen a
        pass. One that ends within a round is forgotten with its controller."""
        self.sessions = 1.0
        """That shared the last pass."""

    def add_plan(self, rows: float, survivals: Sequence[float], sessions: float) -> None:
        """Counts the plan and the expectations of one of the sessions that share passes."""
        self.drafted += (rows - self.drafted) / sessions
        share = 1.0 / sessions
        self.survivals = [
            old + (new - old) * share
            for old, new in zip_longest(self.survivals, survivals, fillvalue=0.0)
            if max(old, new) > _NEGLIGIBLE
        ]
