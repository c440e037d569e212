"""Where a session's proposals come from, and how many tokens they are worth."""

from __future__ import annotations

from collections import Counter

import structlog

from gateway.controller import Controller, DraftPlan
from gateway.draft_source import DraftSource
from gateway.draft_stream import DraftFailure, DraftLate, DraftStream
from gateway.free_drafts import FreeDrafts
from gateway.speculation_settings import SpeculationSettings
from gateway.statistics import Exchange, Statistics
from gateway.workload import Observation, Workload
from specdec.trees import depths, parents_of
from specdec.v1 import common_pb2, draft_pb2, verifier_pb2

_log = structlog.get_logger()
_NOTHING = draft_pb2.Proposal()


class Speculation:
    """The speculation of one session. Without a draft every round is plain decoding."""

    def __init__(
        self,
        wanted: SpeculationSettings,
        room: int,
        workload: Workload,
        statistics: Statistics,
        *,
        confident: bool,
    ) -> None:
        """
        Args:
            wanted: as asked for.
            room: how many tokens the output may have.
            workload: of all sessions, by which each round's number of tokens is decided.
            statistics: of the generation.
            confident: whether the draft may leave out tokens by how likely they are to stand.
        """
        self.wanted = wanted
        self.draft: DraftStream | None = None
        self.stale_proposals = 0
        """Those of a draft that was closed."""
        self.cached_tokens = 0
        """How many tokens of the prompt the first draft had cached already."""
        self._source: DraftSource | None = None
        self._unavailable = ""
        """Why there is no draft, if there should be one."""
        self._committed: list[int] = []
        self._rounds = 0
        self._drafts = 0
        """How many drafts have made proposals."""
        self._is_new = False
        """Whether the draft has made none yet."""
        self._most = wanted.num_draft_tokens
        """That the draft can do."""
        self._controller = Controller(workload, confident=confident)
        self._statistics = statistics
        self._confident = confident
        self._free = FreeDrafts()
        self._is_free = False
        """Whether the present round asks for what costs nothing only."""
        self._drafted: Exchange | None = None
        """With the draft, for the present round."""
        self._is_adaptive = wanted.adaptive and wanted.num_draft_tokens > 0
        self.plan = DraftPlan(self._limit(room))
        """Of the present round."""

    async def open(self, source: DraftSource, room: int) -> None:
        """Has drafts made from here on.

        Args:
            source: of the session.
            room: how many tokens the output may have.
        """
        self._source = source
        if self._limit(room):
            await self._open(room)

    @property
    def costs(self) -> common_pb2.DraftCosts:
        """What drafting costs in the present round."""
        return common_pb2.DraftCosts(row=self.plan.row_cost, step=self.plan.step_cost)

    async def propose(self) -> draft_pb2.Proposal:
        """The next proposal, or an empty one: a draft's failure never reaches the client."""
        self._drafted = None
        if self.plan.num_draft_tokens == 0:
            return _NOTHING
        if self.draft is not None:
            try:
                proposal, self._drafted = await self.draft.proposal(self.plan.num_draft_tokens)
            except DraftLate:
                self._unavailable = "the draft was late"
            except DraftFailure as failure:
                self._give_up(failure)
            else:
                self._count_draft()
                self._statistics.add_proposal(self._drafted)
                if self.draft.was_ahead is not None:
                    self._statistics.add_run_ahead(hit=self.draft.was_ahead)
                if self._is_free:
                    self._free.observe(found=bool(proposal.token_ids))
                if not proposal.token_ids and self._is_free:
                    self._statistics.add_undrafted()
                elif not proposal.token_ids:
                    self._statistics.add_fallback("the draft proposed nothing")
                return proposal
        self._statistics.add_fallback(self._unavailable)
        return _NOTHING

    def observe(
        self, proposal: draft_pb2.Proposal, verdict: verifier_pb2.Verdict, verified: Exchange
    ) -> None:
        """Counts a round, and learns from it."""
        at_depth = Counter(depths(parents_of(proposal.parents, len(proposal.token_ids))))
        count, depth = len(proposal.token_ids), len(at_depth)
        self._statistics.add_round(count, depth, verdict)
        if not self._is_adaptive or self.draft is None:
            return
        # What costs nothing says nothing of what a draft is worth that costs something.
        drafted = None if self._is_free else self._drafted
        self._controller.observe(
            Observation(
                depths=[at_depth[d] for d in range(1, depth + 1)] if drafted else [],
                num_accepted=verdict.num_accepted if drafted else 0,
                expected=sum(proposal.probabilities) if drafted else 0.0,
                draft_us=drafted.inside_us if drafted else 0,
                draft_wire_us=drafted.wire_us if drafted else 0,
                verify_us=verified.timings.compute_us,
                verify_wire_us=verified.wire_us,
                pass_rows=verdict.pass_rows,
                pass_sessions=verdict.pass_sessions,
                hidden=bool(proposal.presumed_token_ids),
                verify_queue_us=verified.timings.queue_us,
            )
        )

    async def advance(self, token_ids: list[int], room: int) -> None:
        """Ends a round. Tells the draft what was committed, so that it works on the next proposal.

        Args:
            token_ids: what was committed.
            room: how many tokens the output may still have.
        """
        self._rounds += 1
        self._committed += token_ids
        if self.draft is None:
            # There is nothing to decide. The round counts as one that should have been drafted for.
            self.plan = DraftPlan(self._limit(room))
            if self.plan.num_draft_tokens and self._source is not None:
                await self._open(room)
            return
        if self._source is not None and not self._source.has_room(len(self._committed)):
            self._give_up(DraftFailure("the draft's context is full", innocent=True))
            self.plan = DraftPlan(self._limit(room))
            return
        self.plan = self._decide(room)
        self.draft.commit(token_ids)
        if self.plan.num_draft_tokens == 0 or self.draft.is_late:
            return
        try:
            await self.draft.advance(self.plan.num_draft_tokens, self.costs)
        except DraftFailure as failure:
            self._give_up(failure)

    @property
    def beliefs(self) -> dict[str, object]:
        """What decides how many tokens are drafted, for a log."""
        return self._controller.beliefs if self._is_adaptive else {}

    def close(self) -> None:
        """Ends the session at the draft, if there is one. May be called again."""
        if self.draft is not None:
            self.stale_proposals += self.draft.stale_proposals
            self.cached_tokens = self.cached_tokens or self.draft.cached_tokens
            self.draft.close()
            self.draft = None
        if self._source is not None:
            self._source.close()

    async def _open(self, room: int) -> None:
        """Opens the session at a draft, if there is one to be had now."""
        source = self._source
        assert source is not None
        peer = source.find(len(self._committed))
        if peer is None:
            self._unavailable = source.reason or self._unavailable
            return
        self._most = min(self.wanted.num_draft_tokens, peer.info.max_num_draft_tokens)
        plan = self._decide(room)
        # The draft makes its first proposal of as many tokens as the session may have at most.
        most = self._limit(room)
        self.plan = plan._replace(num_draft_tokens=most if plan.num_draft_tokens else 0)
        try:
            self.draft = await source.open(
                peer,
                self._committed,
                rounds=self._rounds,
                num_draft_tokens=most,
                costs=self.costs,
            )
        except DraftFailure as failure:
            self._give_up(failure)
            return
        self._is_new = True

    def _count_draft(self) -> None:
        """Counts the draft at its first proposal."""
        if self._source is not None:
            self._source.succeeded()
        if self._is_new and self._drafts:
            self._statistics.add_draft_resumption()
        self._drafts += self._is_new
        self._is_new = False

    def _give_up(self, failure: DraftFailure) -> None:
        """Goes on without the draft."""
        self._unavailable = str(failure)
        _log.warning("draft given up", reason=self._unavailable)
        if self._source is not None:
            self._source.failed(failure)
        self.close()

    def _decide(self, room: int) -> DraftPlan:
        """How to draft for a round before which the output may still have `room` tokens."""
        limit = self._limit(room)
        if not self._is_adaptive or limit == 0:
            return DraftPlan(limit)
        plan = self._controller.plan(limit)
        self._is_free = plan.num_draft_tokens == 0 and self._confident and self._free.wanted()
        if self._is_free:
            return self._controller.free(limit)
        if plan.num_draft_tokens == 0:
            self._statistics.add_undrafted()
        return plan

    def _limit(self, room: int) -> int:
        """The most tokens to draft for such a round."""
        # A round commits one token more than it has drafted, and none past the limit.
        return max(0, min(self._most, room - 1))
