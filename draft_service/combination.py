"""Several drafters, of which one proposes in each round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from draft_service.drafter import Draft, Drafter, DraftSession, Prepared
from draft_service.merging import merge
from draft_service.settings import DraftSettings
from specdec.proposals import draft_topk
from specdec.v1 import common_pb2


class Combination(Drafter):
    """Drafters in the order of preference. Only the last may need a tokenizer.

    The first that has a good draft proposes: one from a match of `min_match` tokens, or one that is
    not from a match. Where none is good, the draft from the longest match is made use of. In
    sessions that take trees it is a further branch of a draft that can tell its chances.
    """

    def __init__(self, settings: DraftSettings, drafters: Sequence[Drafter]) -> None:
        super().__init__(settings)
        self.drafters = drafters

    @property
    def info(self) -> common_pb2.ModelInfo:
        # A drafter that is for any tokenizer does with the limits of one that is not.
        return self.drafters[-1].info

    @property
    def fault(self) -> str | None:
        return next(filter(None, (drafter.fault for drafter in self.drafters)), None)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, Any]]:
        facts: dict[str, Any] = {}
        async with AsyncExitStack() as stack:
            for drafter in self.drafters:
                facts |= await stack.enter_async_context(drafter.running())
            yield facts

    @asynccontextmanager
    async def session(self, opening: common_pb2.Open) -> AsyncIterator[DraftSession]:
        async with AsyncExitStack() as stack:
            sessions = [
                await stack.enter_async_context(drafter.session(opening))
                for drafter in self.drafters
            ]
            yield CombinedSession(sessions, self.settings.min_match, draft_topk(opening))


class CombinedSession(DraftSession):
    """A session at each of the drafters. Those that were not asked are told later what they missed.

    Who proposes depends on what was committed alone, so that the proposal is independent of the
    random numbers that decide about it.
    """

    def __init__(self, sessions: Sequence[DraftSession], min_match: int, topk: int = 1) -> None:
        # The last is the one for which opening takes time.
        super().__init__(sessions[-1].opened)
        self._sessions = sessions
        self._min_match = min_match
        self._topk = topk
        self._missed: list[list[int]] = [[] for _ in sessions]
        self._last: DraftSession = sessions[-1]
        """Whose draft the last proposal is."""
        self._prepared: set[tuple[int, ...]] = set()
        """The verdicts for which that session has a draft already."""

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        for tokens in self._missed:
            tokens.extend(committed)
        prepared, self._prepared = self._prepared, set()
        if tuple(committed) in prepared:
            return await self._ask(self._last, num_draft_tokens)
        best = Draft(())
        for session in self._sessions:
            draft = await self._ask(session, num_draft_tokens)
            if not draft.token_ids:
                continue
            if draft.match_length is None or draft.match_length >= self._min_match:
                self._last = session
                if self._topk > 1 and best.probabilities and draft.probabilities:
                    # The copy is not sure enough to stand alone, but may be a branch.
                    return merge(draft, best, num_draft_tokens, self._topk)
                return draft
            if not best.token_ids or draft.match_length > (best.match_length or 0):
                best, self._last = draft, session
        return best

    async def prepare(self, count: int) -> Sequence[Prepared]:
        found = await self._last.prepare(count)
        self._prepared = {tuple(each.token_ids) for each in found}
        return found

    def hurry(self) -> None:
        self._last.hurry()

    async def _ask(self, session: DraftSession, num_draft_tokens: int) -> Draft:
        """What one of the sessions proposes, once it is told what it missed."""
        index = self._sessions.index(session)
        missed, self._missed[index] = self._missed[index], []
        session.costs = self.costs
        return await session.propose(missed, num_draft_tokens)
