"""Several drafters, of which one proposes in each round."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from draft_service.drafter import Draft, Drafter, DraftSession
from draft_service.settings import DraftSettings
from specdec.v1 import common_pb2


class Combination(Drafter):
    """Drafters in the order of preference. Only the last may need a tokenizer.

    The first that has a good draft proposes: one from a match of `min_match` tokens, or one that is
    not from a match. Where none is good, the draft from the longest match is made use of.
    """

    def __init__(self, settings: DraftSettings, drafters: Sequence[Drafter]) -> None:
        super().__init__(settings)
        self.drafters = drafters

    @property
    def info(self) -> common_pb2.ModelInfo:
        # A drafter that is for any tokenizer does with the limits of one that is not.
        return self.drafters[-1].info

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
            yield CombinedSession(sessions, self.settings.min_match)


class CombinedSession(DraftSession):
    """A session at each of the drafters. Those that were not asked are told later what they missed.

    Who proposes depends on what was committed alone, so that the proposal is independent of the
    random numbers that decide about it.
    """

    def __init__(self, sessions: Sequence[DraftSession], min_match: int) -> None:
        # The last is the one for which opening takes time.
        super().__init__(sessions[-1].opened)
        self._sessions = sessions
        self._min_match = min_match
        self._missed: list[list[int]] = [[] for _ in sessions]

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        for tokens in self._missed:
            tokens.extend(committed)
        best = Draft(())
        for index, session in enumerate(self._sessions):
            missed, self._missed[index] = self._missed[index], []
            draft = await session.propose(missed, num_draft_tokens)
            if not draft.token_ids:
                continue
            if draft.match_length is None or draft.match_length >= self._min_match:
                return draft
            if not best.token_ids or draft.match_length > (best.match_length or 0):
                best = draft
        return best
