"""Drafts by a language model of another family, whose tokenizer is not the target's."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from tokenizers import Tokenizer

from draft_service.drafter import Draft, DraftSession
from draft_service.drafting import Proposing
from draft_service.model_drafter import ModelDrafter
from draft_service.settings import DraftSettings
from draft_service.special_tokens import TokenizerPair, Vocabulary
from draft_service.translation import Translation
from specdec.lm.architecture import ModelLoadError
from specdec.lm.pages import PAGE_SIZE
from specdec.lm.runtime import Session
from specdec.lm.thread import ModelThread, Timed
from specdec.lm.tokenizer import TokenizerData
from specdec.lm.tokenizer_loading import LoadedTokenizer, load_tokenizer
from specdec.serving import StartError
from specdec.v1 import common_pb2

_STEPS_PER_TOKEN = 4
"""Tokens that the draft may take for one of the target: a model of bytes takes about so many."""


class TranslatedDrafter(ModelDrafter):
    """A model that speaks the target's tokens on the wire and its own with itself.

    It drafts greedily at every temperature. What it drafts is then a function of the committed
    tokens alone, independent of the random numbers that decide about it, and the tokens count as
    certain: the likeliest token is the one that is accepted most often. What a session asks for in
    terms of tokens (penalties, biases, masks, a grammar) has no translation, and is left to the
    target.
    """

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self._target: LoadedTokenizer | None = None
        self._pair: TokenizerPair | None = None

    @property
    def info(self) -> common_pb2.ModelInfo:
        info = common_pb2.ModelInfo()
        info.CopyFrom(super().info)
        assert self._target is not None, "it is not running"
        info.MergeFrom(
            common_pb2.ModelInfo(
                tokenizer_sha256=self._target.tokenizer.table_sha256,
                vocab_size=self._target.vocab_size,
                effective_vocab_size=self._target.tokenizer.effective_vocab_size,
                certain_drafts=True,
            )
        )
        info.eos_token_ids[:] = self._target.eos_token_ids
        return info

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, Any]]:
        assert self.settings.target_tokenizer is not None
        try:
            self._target = await asyncio.to_thread(load_tokenizer, self.settings.target_tokenizer)
        except ModelLoadError as error:
            raise StartError(f"--target-tokenizer: {error}") from error
        async with super().running() as facts:
            loaded = self._loaded.loaded
            self._pair = TokenizerPair(
                _vocabulary(self._target.tokenizer, self._target.eos_token_ids),
                _vocabulary(loaded.tokenizer, loaded.eos_token_ids),
            )
            translated = {"target_tokenizer_sha256": self._target.tokenizer.table_sha256}
            yield {**facts, **translated}

    @asynccontextmanager
    async def session(self, opening: common_pb2.Open) -> AsyncIterator[DraftSession]:
        assert self._pair is not None, "it is not running"
        runtime = self._loaded
        translation = Translation(self._pair)
        # A long prompt takes milliseconds, which the event loop has not got.
        await asyncio.to_thread(
            translation.commit, [*opening.prompt_token_ids, *opening.committed_token_ids]
        )
        limit = runtime.info.max_context_length
        if len(translation.ids) >= limit:
            yield _Silence(common_pb2.Opened(round=opening.round, base_length=opening.base_length))
            return
        own = common_pb2.Open(
            session_id=opening.session_id,
            round=opening.round,
            prompt_token_ids=_context(translation),
            sampling=common_pb2.Sampling(top_p=1.0, repetition_penalty=1.0),
            acceptance_rule=opening.acceptance_rule,
            prefix_cache=opening.prefix_cache,
        )
        async with runtime.session(own) as session:
            opened = session.opened
            opened.base_length = opening.base_length
            # The gateway counts in tokens of the target.
            opened.cached_tokens = min(opened.cached_tokens, opening.base_length)
            yield TranslatedDraftSession(session, translation, runtime.thread, limit)


class _Silence(DraftSession):
    """Drafts nothing: the context is too long for the draft."""

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        return Draft(())


class TranslatedDraftSession(DraftSession):
    """The drafts of one session. There are none once the context is too long for the draft."""

    def __init__(
        self, session: Session, translation: Translation, thread: ModelThread, limit: int
    ) -> None:
        """
        Args:
            session: at the model, whose tokens are those of `translation`.
            translation: of what was committed.
            thread: that runs the model.
            limit: the most tokens, of the draft's own, that the model can hold.
        """
        super().__init__(session.opened)
        self._session = session
        self._translation = translation
        self._thread = thread
        self._limit = limit

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        kept = self._translation.commit(committed)
        work = TranslatedProposing(self._session, num_draft_tokens, self._translation, kept)
        if len(self._translation.ids) + work.num_steps > self._limit:
            # No commit makes the context shorter, so that the sequence is not needed again.
            return Draft(())
        drafted: Timed[Draft] = await self._thread.work(work)
        return replace(drafted.value, timings=drafted.timings)


class TranslatedProposing(Proposing):
    """Drafts until there are as many tokens of the target as are wanted."""

    def __init__(
        self, session: Session, num_draft_tokens: int, translation: Translation, kept: int
    ) -> None:
        """
        Args:
            session: at the draft, greedy.
            num_draft_tokens: K, in tokens of the target, at least 1.
            translation: of what is committed.
            kept: how many tokens at the beginning of its ids are as they were in the last round.
        """
        self.num_steps = _STEPS_PER_TOKEN * (num_draft_tokens + 1)
        """The most tokens that are drafted."""
        super().__init__(session, self.num_steps, top_n=1)
        self._translation = translation
        self._kept = kept
        self._num_wanted = num_draft_tokens

    def start(self) -> None:
        ids = _context(self._translation)
        kept = min(self._kept, len(ids) - 1)
        if kept < self.sequence.committed_length:
            # What was committed is encoded in another way. Full pages of committed tokens may be
            # shared: they are given back, not written again.
            self.sequence.truncate(kept // PAGE_SIZE * PAGE_SIZE)
        self.sequence.commit(kept, ids[kept:])

    def _append(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self.sequence.append([token_id])
        found = self._translation.translate(self._token_ids, self._num_wanted)
        if found.is_complete or len(self._token_ids) == self.num_steps:
            self.finish(Draft(found.token_ids))


def _context(translation: Translation) -> list[int]:
    """The draft's tokens, at least one: a model without a BOS is given any."""
    return translation.ids or [0]


def _vocabulary(tokenizer: TokenizerData, eos_token_ids: Sequence[int]) -> Vocabulary:
    made = Tokenizer.from_str(tokenizer.content.decode())
    bos, eos = (
        made.token_to_id(tokenizer.special_tokens[role])
        if role in tokenizer.special_tokens
        else None
        for role in ("bos_token", "eos_token")
    )
    return Vocabulary(made, sorted(eos_token_ids, key=lambda token_id: token_id != eos), bos)
