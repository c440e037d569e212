"""The rounds of a session at the draft service: what is answered, and what is pushed ahead."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace

from draft_service.drafter import Draft, DraftSession
from specdec.proposals import needs_distributions
from specdec.sessions import SessionContract
from specdec.v1 import common_pb2, draft_pb2
from specdec.v1.draft_pb2 import DraftResponse


class Rounds:
    """The proposals of a session."""

    def __init__(self, contract: SessionContract, session: DraftSession) -> None:
        """
        Args:
            contract: against which messages are held.
            session: that drafts.
        """
        self._contract = contract
        self._session = session
        self._committed: list[int] = []
        """What the drafter was not told of yet."""
        self._round = contract.opening.round
        self._pushed: set[tuple[int, ...]] = set()
        """What the proposals presume that were pushed for the round after this one."""
        self._proposes = False
        """Whether anything was proposed for this round."""
        self._went_ahead = False
        """Whether the next round was prepared for, once."""
        opening = contract.opening
        self._needs_distributions = needs_distributions(opening.sampling, opening.acceptance_rule)

    async def first(self) -> DraftResponse:
        """The proposal that follows the Open."""
        opening = self._contract.opening
        self._session.costs = opening.draft_costs
        draft = await self._draft(opening.num_draft_tokens)
        self._contract.end(self._round, 0)
        return self._response(self._round, draft)

    async def advance(self, advance: draft_pb2.Advance) -> DraftResponse | None:
        """Commits tokens. Returns the next proposal, unless it was pushed already.

        A stale message is left out.

        Raises:
            SpecdecError: CONTRACT_VIOLATION.
        """
        contract = self._contract
        if not contract.begin(advance.round, advance.base_length):
            return None
        contract.check_advance(advance.token_ids, advance.num_draft_tokens)
        contract.end(advance.round, len(advance.token_ids))
        follows = advance.round == self._round + 1
        pushed = follows and tuple(advance.token_ids) in self._pushed
        self._round, self._pushed, self._went_ahead = advance.round, set(), False
        self._committed += advance.token_ids
        self._session.costs = advance.draft_costs
        draft = await self._draft(advance.num_draft_tokens)
        return None if pushed else self._response(advance.round, draft)

    async def ahead(
        self, advance: asyncio.Task[draft_pb2.DraftRequest | None]
    ) -> list[DraftResponse]:
        """Proposals for the verdicts that may be given on this round's, unless one is given first.

        Args:
            advance: the message that says which.
        """
        count = self._contract.opening.run_ahead
        if not count or not self._proposes or self._went_ahead:
            return []
        self._went_ahead = True
        preparing = asyncio.create_task(self._session.prepare(count))
        try:
            await asyncio.wait({preparing, advance}, return_when=asyncio.FIRST_COMPLETED)
            self._session.hurry()
            prepared = await preparing
        finally:
            preparing.cancel()
        if advance.done():
            return []
        self._pushed = {tuple(each.token_ids) for each in prepared}
        return [self._response(self._round + 1, each.draft, each.token_ids) for each in prepared]

    async def _draft(self, num_draft_tokens: int) -> Draft:
        """At most so many tokens."""
        begun = time.monotonic()
        wanted = min(num_draft_tokens, self._contract.room)
        draft = Draft(())
        if wanted > 0:
            committed, self._committed = self._committed, []
            draft = await self._session.propose(committed, wanted)
        self._proposes = bool(draft.token_ids)
        if draft.timings is None:
            spent = common_pb2.Timings(compute_us=int((time.monotonic() - begun) * 1e6))
            draft = replace(draft, timings=spent)
        return draft

    def _response(
        self, round_number: int, draft: Draft, presumed: Sequence[int] = ()
    ) -> DraftResponse:
        distributions = draft.distributions
        if self._needs_distributions and not distributions:
            # Nothing was sampled: q is 1 for the token and 0 for all others.
            distributions = [
                common_pb2.SparseDistribution(token_ids=[token_id], probabilities=[1.0])
                for token_id in draft.token_ids
            ]
        return DraftResponse(
            proposal=draft_pb2.Proposal(
                round=round_number,
                base_length=self._contract.base_length + len(presumed),
                token_ids=draft.token_ids,
                distributions=distributions,
                parents=draft.parents,
                probabilities=draft.probabilities,
                temperature=self._contract.opening.sampling.temperature,
                timings=draft.timings,
                presumed_token_ids=presumed,
            )
        )
