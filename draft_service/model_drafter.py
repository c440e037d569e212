"""Drafts by a small language model."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import structlog

from draft_service.drafter import Draft, Drafter, DraftSession, Prepared
from draft_service.drafting import Proposing
from draft_service.growing import GrowingAhead, GrowingProposal
from draft_service.settings import DEFAULT_DRAFT, DraftSettings
from draft_service.tree import Growth, Node, Tree, draft_of
from specdec.lm.architecture import ModelLoadError
from specdec.lm.runtime import ModelRuntime, Session
from specdec.lm.serve import Start
from specdec.lm.tensor_parallel import world_size
from specdec.lm.thread import ModelThread, Timed
from specdec.proposals import draft_topk, needs_distributions
from specdec.serving import StartError
from specdec.v1 import common_pb2

_log = structlog.get_logger()
_MORE_AHEAD = 4
"""Where verdicts are guessed, so many more tokens are thought of than can be proposed: what is not
among those proposed is what a verdict corrects them to."""


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

    @property
    def fault(self) -> str | None:
        return None if self.runtime is None else self.runtime.fault

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
            start.thread.watch(self.settings.stall_seconds)
            yield start.facts
        except ModelLoadError as error:
            raise StartError(str(error)) from error
        finally:
            start.thread.close()

    @asynccontextmanager
    async def session(self, opening: common_pb2.Open) -> AsyncIterator[DraftSession]:
        runtime = self._loaded
        async with runtime.session(opening) as session:
            yield ModelDraftSession(
                session, runtime.thread, runtime.info, self.settings.draft_top_n
            )

    @property
    def _loaded(self) -> ModelRuntime:
        assert self.runtime is not None, "it is not running"
        return self.runtime


class ModelDraftSession(DraftSession):
    """The drafts of one session: what was committed is fed in the pass that drafts."""

    def __init__(
        self,
        session: Session,
        thread: ModelThread,
        info: common_pb2.ModelInfo,
        top_n: int,
    ) -> None:
        """
        Args:
            session: at the model.
            thread: that runs the model.
            info: of the model.
            top_n: how many tokens a sparse q keeps.
        """
        super().__init__(session.opened)
        self._session = session
        self._thread = thread
        self._top_n = top_n
        self._base_length = session.opening.base_length
        opening = session.opening
        self._branches = info.trees
        """Whether the model can be fed more than one continuation at a time."""
        self._topk = draft_topk(opening) if info.trees else 1
        """How many tokens a proposal may have after one and the same token."""
        self._samples = needs_distributions(opening.sampling, opening.acceptance_rule)
        self._width = self._topk + (_MORE_AHEAD if opening.run_ahead else 0)
        self._uncommitted: list[int] = []
        """What the model was not told of yet."""
        self._num_draft_tokens = 0
        self._max_context_length = info.max_context_length
        self._tree = self._plant()
        self._proposed: list[Node] = []
        """The last proposal, in the tree."""
        self._prepared: dict[tuple[int, ...], Growth] = {}
        """The proposals that follow what may be committed next."""
        self._preparing: GrowingAhead | None = None

    async def propose(self, committed: Sequence[int], num_draft_tokens: int) -> Draft:
        self._base_length += len(committed)
        self._uncommitted += committed
        self._num_draft_tokens = num_draft_tokens
        if self._samples:
            return await self._sample(num_draft_tokens)
        prepared = self._prepared.get(tuple(committed))
        self._prepared = {}
        self._tree = self._plant()
        if prepared is not None:
            nodes = prepared.nodes[:num_draft_tokens]
            self._proposed = self._tree.adopt(prepared.root, nodes)
            return draft_of(self._tree.root, self._proposed)
        work = GrowingProposal(
            *(self._session, self._tree, self._width, self._told()), self._grow(self._tree.root)
        )
        timed: Timed[list[Node]] = await self._thread.work(work)
        self._proposed = timed.value
        return replace(draft_of(self._tree.root, timed.value), timings=timed.timings)

    async def prepare(self, count: int) -> Sequence[Prepared]:
        if self._samples or not self._branches:
            return ()
        work = GrowingAhead(
            *(self._session, self._tree, self._width, self._told()),
            *(self._proposed, count, self._grow),
        )
        self._preparing = work
        timed: Timed[list[Growth]] = await self._thread.work(work)
        self._preparing = None
        found = []
        for growth in timed.value:
            if work.hurried and growth.frontier():
                continue  # It was cut off: what there is of it is not what would be proposed.
            presumed = [node.token_id for node in growth.root.way]
            self._prepared[tuple(presumed)] = growth
            draft = replace(draft_of(growth.root, growth.nodes), timings=common_pb2.Timings())
            found.append(Prepared(presumed, draft))
        return found

    def hurry(self) -> None:
        if self._preparing is not None:
            self._preparing.hurry()

    async def _sample(self, num_draft_tokens: int) -> Draft:
        committed = self._told()
        begun = self._base_length - len(committed)
        work = Proposing(self._session, num_draft_tokens, self._top_n, (begun, committed))
        timed: Timed[Draft] = await self._thread.work(work)
        return replace(timed.value, timings=timed.timings)

    def _plant(self) -> Tree:
        return Tree(self._base_length, self._max_context_length - self._base_length)

    def _grow(self, root: Node) -> Growth:
        return Growth(root, self._num_draft_tokens, self._topk, self.costs)

    def _told(self) -> list[int]:
        """What the model was not told of yet; from here on it was."""
        told, self._uncommitted = self._uncommitted, []
        return told
