"""What a round costs and yields, as formulas: with a network, and with drafts made ahead.

E(γ) = (1 − α^(γ+1)) ÷ (1 − α) tokens a round if every drafted token stands with probability α.

Speeds S are relative to plain decoding at RTT 0, where a token takes t₁. All that follows is
read so:

- The verifier's link has a round trip of RTT_v, the draft's of RTT_d. A round over RTT 0 has an
  overhead o of its own: gRPC and the gateway, shared by both links.
- **Plain** decoding waits for the verifier's link at every token: S = t₁ ÷ (t₁ + RTT_v).
- **Synchronous**: draft and verifier wait for each other, so that the round trips of both count:
  S = E ÷ (γc + v + ρ), with c = t_d ÷ t₁, v = t_v ÷ t₁, ρ = (RTT_d + RTT_v + o) ÷ t₁.
- **Overlapped**: with probability h the next proposal was prepared for the outcome, and is at the
  gateway when it has been made and has come over, or when the verdict has, whichever is later.
  With T_v = t_v + RTT_v + o/2 and T_d = γt_d + RTT_d + o/2:
  S = E·t₁ ÷ [h·max(T_v, T_d) + (1 − h)(T_v + T_d)].
  With the verifier beside the gateway, RTT_v = o = 0, this is
  E·t₁ ÷ [h·max(t_v, γt_d + RTT) + (1 − h)(t_v + γt_d + RTT)]. With h = 0 it is the synchronous one.

t_v is a pass over γ + 1 rows, t_d one step of the draft, all in milliseconds here. Preparing for
several outcomes is taken to cost the draft no more than preparing for one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Costs:
    """Milliseconds of the parts of a round."""

    step: float
    """t₁: a token of plain decoding at RTT 0."""
    draft: float
    """γt_d: a proposal."""
    verify: float
    """t_v: the pass that verifies it."""
    draft_rtt: float = 0.0
    verify_rtt: float = 0.0
    overhead: float = 0.0
    """o: what a round costs at RTT 0 beside the models."""


def expected_length(alpha: float, k: int) -> float:
    """E(k), tokens a round."""
    return k + 1.0 if alpha >= 1 else (1 - alpha ** (k + 1)) / (1 - alpha)


def mean_alpha(accepted: Sequence[int], drafted: Sequence[int]) -> float | None:
    """The α of all positions together, as it is most likely: accepted ÷ reached.

    Args:
        accepted: rounds whose token at each position of the proposal stood.
        drafted: rounds that had one there. It was reached if the one before it stood.
    """
    reached = sum(
        min(count, before)
        for count, before in zip(drafted, [*drafted[:1], *accepted], strict=False)
    )
    return sum(accepted) / reached if reached else None


def plain_speed(step: float, verify_rtt: float) -> float:
    """S of plain decoding over a link. Milliseconds."""
    return step / (step + verify_rtt)


def synchronous_speed(length: float, costs: Costs) -> float:
    """S of rounds in which draft and verifier wait for each other, `length` = E."""
    return overlapped_speed(length, costs, hit_rate=0.0)


def overlapped_speed(length: float, costs: Costs, hit_rate: float) -> float:
    """S of rounds that were prepared ahead with probability `hit_rate`, `length` = E."""
    verdict = costs.verify + costs.verify_rtt + costs.overhead / 2
    proposal = costs.draft + costs.draft_rtt + costs.overhead / 2
    hit, miss = max(verdict, proposal), verdict + proposal
    return length * costs.step / (hit_rate * hit + (1 - hit_rate) * miss)
