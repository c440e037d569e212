"""A draft session as its client sees it: which proposal belongs to which round."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum, auto

from specdec.proposals import draft_topk, num_draft_tokens_fault, token_ids_fault
from specdec.trees import parents_fault
from specdec.v1 import common_pb2, draft_pb2


class Timeliness(Enum):
    """When a proposal is of use."""

    CURRENT = auto()
    AHEAD = auto()
    """It is for a round that has not begun."""
    STALE = auto()
    """The session has moved on, or a verdict was presumed that was not given."""


class DraftRounds:
    """The round and the committed tokens of a session that is open at a draft service."""

    def __init__(self, opening: common_pb2.Open, effective_vocab_size: int) -> None:
        """
        Args:
            opening: what the session was opened with.
            effective_vocab_size: that of the target, which drafted ids must be within.
        """
        self.opening = opening
        self._effective_vocab_size = effective_vocab_size
        self._round = opening.round
        self._tokens = [*opening.prompt_token_ids, *opening.committed_token_ids]
        self._told = len(self._tokens)
        """How many of them the draft was told of."""
        self._asked_round = opening.round
        """Of the proposal that was asked for last."""

    @property
    def round(self) -> int:
        """The present one."""
        return self._round

    @property
    def is_asked(self) -> bool:
        """Whether the present round's proposal was asked for."""
        return self._asked_round == self._round

    def commit(self, token_ids: Sequence[int]) -> None:
        """Ends a round by committing tokens."""
        self._round += 1
        self._tokens += token_ids

    def advance(
        self, num_draft_tokens: int, costs: common_pb2.DraftCosts | None = None
    ) -> draft_pb2.DraftRequest:
        """What tells the draft of all that was committed, and asks for this round's proposal."""
        told, self._told = self._told, len(self._tokens)
        self._asked_round = self._round
        advance = draft_pb2.Advance(
            round=self._round,
            base_length=told,
            token_ids=self._tokens[told:],
            num_draft_tokens=num_draft_tokens,
            draft_costs=costs,
        )
        return draft_pb2.DraftRequest(advance=advance)

    def answers(self, proposal: draft_pb2.Proposal) -> bool:
        """Whether a proposal is the one that was asked for last, in time or not."""
        if proposal.round != self._asked_round:
            return False
        presumed = list(proposal.presumed_token_ids)
        begin, end = self._told - len(presumed), self._told
        return not presumed or (proposal.base_length == end and self._tokens[begin:end] == presumed)

    def timeliness(self, proposal: draft_pb2.Proposal) -> Timeliness:
        """When a proposal is of use, if ever."""
        if proposal.round > self._round:
            return Timeliness.AHEAD
        if proposal.round < self._round or self._presumes_wrongly(proposal):
            return Timeliness.STALE
        return Timeliness.CURRENT

    def fault(self, proposal: draft_pb2.Proposal, limit: int) -> str | None:
        """What is wrong with the proposal of this round, which may have `limit` tokens.

        Distributions are not looked at.
        """
        if proposal.base_length != len(self._tokens):
            return (
                f"it starts from base_length {proposal.base_length}, but {len(self._tokens)} "
                f"tokens are committed in round {self._round}"
            )
        if proposal.temperature != self.opening.sampling.temperature:
            return f"it was drafted at temperature {proposal.temperature}"
        fault = num_draft_tokens_fault(len(proposal.token_ids), limit)
        fault = fault or token_ids_fault(proposal.token_ids, self._effective_vocab_size)
        topk = draft_topk(self.opening)
        return fault or parents_fault(proposal.parents, proposal.token_ids, topk)

    def _presumes_wrongly(self, proposal: draft_pb2.Proposal) -> bool:
        """Whether the proposal was pushed ahead for a verdict that was not given."""
        presumed = list(proposal.presumed_token_ids)
        if not presumed:
            return False
        begin = proposal.base_length - len(presumed)
        return proposal.base_length != len(self._tokens) or self._tokens[begin:] != presumed
