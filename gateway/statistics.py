"""How speculation went in one generation, counted round by round."""

from __future__ import annotations

import time
from dataclasses import dataclass

from specdec.v1 import common_pb2, gateway_pb2, verifier_pb2

_MOST_US = 10**12
"""No time that a service tells is counted as longer: sums stay within their fields."""


def bounded(timings: common_pb2.Timings) -> common_pb2.Timings:
    """Timings that can be counted with, whatever a service has sent."""
    return common_pb2.Timings(
        queue_us=min(timings.queue_us, _MOST_US), compute_us=min(timings.compute_us, _MOST_US)
    )


@dataclass(frozen=True)
class Exchange:
    """One request to a model service and its answer."""

    round_trip_us: int
    """From sending the request to having the answer, as the gateway saw it."""
    timings: common_pb2.Timings
    """What of it the service computed and queued."""

    def __add__(self, other: Exchange) -> Exchange:
        """One after the other."""
        return Exchange(
            self.round_trip_us + other.round_trip_us,
            common_pb2.Timings(
                queue_us=self.timings.queue_us + other.timings.queue_us,
                compute_us=self.timings.compute_us + other.timings.compute_us,
            ),
        )

    @property
    def inside_us(self) -> int:
        """All of that."""
        return self.timings.compute_us + self.timings.queue_us

    @property
    def wire_us(self) -> int:
        """The rest."""
        return max(0, self.round_trip_us - self.inside_us)


class Stopwatch:
    """Times exchanges with a model service, one at a time."""

    def __init__(self) -> None:
        self._begun_ns = 0
        self._opened = common_pb2.Timings()

    def start(self) -> None:
        """The request goes out now."""
        self._begun_ns = time.monotonic_ns()

    def include(self, opened: common_pb2.Timings) -> None:
        """The service opened the session before it turned to the request."""
        self._opened = bounded(opened)

    def stop(self, answered: common_pb2.Timings, arrived_ns: int | None = None) -> Exchange:
        """The answer came, now or at `arrived_ns`, with what the service says of its time."""
        timings = bounded(answered)
        timings.queue_us += self._opened.queue_us
        timings.compute_us += self._opened.compute_us
        self._opened = common_pb2.Timings()
        ended_ns = time.monotonic_ns() if arrived_ns is None else arrived_ns
        return Exchange((ended_ns - self._begun_ns) // 1000, timings)


class Statistics:
    """Fills a SpeculationStatistics message."""

    def __init__(self, rule: common_pb2.AcceptanceRule.ValueType) -> None:
        self._message = gateway_pb2.SpeculationStatistics(acceptance_rule=rule)

    def add_round(self, num_draft_tokens: int, depth: int, verdict: verifier_pb2.Verdict) -> None:
        """Counts a verified round, of so many drafted tokens on ways of `depth` tokens at most."""
        message = self._message
        message.rounds += 1
        message.num_draft_tokens += num_draft_tokens
        message.num_accepted_tokens += verdict.num_accepted
        while len(message.drafted_per_position) < depth:
            message.drafted_per_position.append(0)
            message.accepted_per_position.append(0)
        for position in range(depth):
            message.drafted_per_position[position] += 1
            message.accepted_per_position[position] += position < verdict.num_accepted

    def add_verify_time(self, verify: Exchange) -> None:
        """Counts the time of a verdict, or of the opening's prefill."""
        self._message.verify_us += verify.timings.compute_us
        self._add_wire(verify)

    def add_proposal(self, draft: Exchange) -> None:
        """Counts the time of a proposal."""
        self._message.draft_us += draft.timings.compute_us
        self._add_wire(draft)

    def add_undrafted(self) -> None:
        """Counts a round that was not drafted for, as it would not have paid."""
        self._message.undrafted_rounds += 1

    def add_run_ahead(self, *, hit: bool) -> None:
        """Counts a round for which proposals had been prepared ahead: one that fits, or none."""
        if hit:
            self._message.run_ahead_hits += 1
        else:
            self._message.run_ahead_misses += 1

    def add_fallback(self, reason: str) -> None:
        """Counts a round that should have been speculative and was not."""
        self._message.fallback_rounds += 1
        self._message.fallback_reason = reason

    def add_draft_resumption(self) -> None:
        """Counts a draft that took up the session after another had failed."""
        self._message.draft_resumptions += 1

    def to_message(self, stale_proposals: int) -> gateway_pb2.SpeculationStatistics:
        """The statistics of a generation that has ended, with the rates worked out."""
        message = self._message
        message.stale_proposals = stale_proposals
        if message.num_draft_tokens:
            message.acceptance_rate = message.num_accepted_tokens / message.num_draft_tokens
        if message.rounds:
            message.mean_acceptance_length = 1 + message.num_accepted_tokens / message.rounds
        return message

    def _add_wire(self, exchange: Exchange) -> None:
        self._message.wire_us += exchange.wire_us
        self._message.queue_us += exchange.timings.queue_us
