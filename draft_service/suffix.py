"""Drafts copied from after the longest suffix that occurred before, in the session or in others."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from draft_service.automaton import SuffixAutomaton
from draft_service.drafter import Draft, Drafter, DraftSession
from draft_service.matching import IndexSession, copied
from draft_service.memory import OutputMemory, Reader
from draft_service.settings import DraftSettings
from specdec.proposals import needs_distributions
from specdec.v1 import common_pb2


class SuffixDrafter(Drafter):
    """Copies what followed the most recent occurrence of the longest suffix.

    With --remember-outputs the past outputs of the same tenant are searched too; the session's own
    text is preferred where both match equally long.
    """

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self._memory = OutputMemory(settings.remembered_tokens)

    @asynccontextmanager
    async def session(self, opening: common_pb2.Open) -> AsyncIterator[DraftSession]:
        if not self.settings.remember_outputs or opening.prefix_cache.bypass:
            session = IndexSession(opening, SuffixAutomaton())
            await session.fill(opening)
            yield session
            return
        salt, seed = opening.prefix_cache.salt, opening.sampling.seed
        is_random = needs_distributions(opening.sampling, opening.acceptance_rule)
        reader = Reader(self._memory, salt, seed if is_random else None)
        session = RememberingSession(opening, reader)
        await session.fill(opening)
        try:
            yield session
        finally:
            output = session.index.tokens[len(opening.prompt_token_ids) :]
            self._memory.remember(salt, output, seed)


class RememberingSession(IndexSession):
    """A session that also copies from past outputs."""

    def __init__(self, opening: common_pb2.Open, reader: Reader) -> None:
        super().__init__(opening, SuffixAutomaton())
        self._reader = reader

    async def fill(self, opening: common_pb2.Open) -> None:
        await super().fill(opening)
        await self._reader.settle()
        self._reader.advance(self.index.tokens, 0)

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        own = await super().propose(committed, num_draft_tokens)
        self._reader.advance(self.index.tokens, len(committed))
        found = self._reader.match()
        if found is None or found[0].length <= (own.match_length or 0):
            return own
        match, automaton = found
        token_ids = automaton.tokens[match.place : match.place + num_draft_tokens]
        end = next((i for i, token_id in enumerate(token_ids) if token_id < 0), len(token_ids))
        return copied(token_ids[:end], match.length, self.costs)
