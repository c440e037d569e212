"""Drafts by a small language model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog

from draft_service.drafter import Draft, Drafter, DraftSession
from draft_service.drafting import Proposing
from draft_service.settings import DEFAULT_DRAFT, DraftSettings
from specdec.lm.architecture import ModelLoadError
from specdec.lm.runtime import ModelRuntime, Session
from specdec.lm.serve import Start
from specdec.lm.tensor_parallel import world_size
from specdec.lm.thread import ModelThread, Timed
from specdec.serving import StartError
from specdec.v1 import common_pb2

_log = structlog.get_logger()


class ModelDrafter(Drafter):
    """A model that runs as the target does, and shares the target's tokenizer."""

    any_tokenizer = False

    def __init__(self, settings: DraftSettings) -> None:
        super().__init__(settings)
        self.runtime: ModelRuntime | None = None
        """Set once it is loaded."""

    @property
    def info(self) -> common_pb2.ModelInfo:
        return self._loaded.info

    @asynccontextmanager
    async def running(self) -> AsyncIterator[Mapping[str, Any]]:
        if world_size() > 1:
            raise StartError("a draft runs in one process: start it without torchrun")
        model_id = self.settings.model or str(DEFAULT_DRAFT)
        start = Start(
            self.settings, model_id, keep_layers=self.settings.keep_layers, base=self.settings.base
        )
        try:
            _log.info("loading", model=start.model_id)
            self.runtime = await start.runtime(await start.load())
            yield start.facts
        except ModelLoadError as error:
            raise StartError(str(error)) from error
        finally:
            start.thread.close()

    @asynccontextmanager
    async def session(self, opening: common_pb2.Open) -> AsyncIterator[DraftSession]:
        runtime = self._loaded
        async with runtime.session(opening) as session:
            yield ModelDraftSession(session, runtime.thread, self.settings.draft_top_n)

    @property
    def _loaded(self) -> ModelRuntime:
        assert self.runtime is not None, "it is not running"
        return self.runtime


class ModelDraftSession(DraftSession):
    """The drafts of one session: what was committed is fed in the pass that drafts."""

    def __init__(self, session: Session, thread: ModelThread, top_n: int) -> None:
        """
        Args:
            session: at the model.
            thread: that runs the model.
            top_n: how many tokens a sparse q keeps.
        """
        super().__init__(session.opened)
        self._session = session
        self._thread = thread
        self._top_n = top_n
        self._base_length = session.opening.base_length

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        work = Proposing(
            self._session, num_draft_tokens, self._top_n, (self._base_length, list(committed))
        )
        self._base_length += len(committed)
        timed: Timed[Draft] = await self._thread.work(work)
        return replace(timed.value, timings=timed.timings)
