"""What a model service keeps loaded, and the life of a session on it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch

from specdec.errors import SpecdecError, Violation
from specdec.lm.architecture import ModelLoadError
from specdec.lm.grammar import GrammarCompiler, GrammarState
from specdec.lm.history import History
from specdec.lm.loading import LoadedModel
from specdec.lm.logprobs import token_logprobs
from specdec.lm.pages import PAGE_SIZE
from specdec.lm.scheduler import Scheduler
from specdec.lm.sequence import CachedSequence
from specdec.lm.thread import ModelThread
from specdec.lm.work import NotNumbers, Prefill
from specdec.sessions import ACCEPTANCE_RULES, PROTOCOL_VERSION
from specdec.v1 import common_pb2


@dataclass
class Session:
    """One open session: what it asked for, its tokens, and what its processors know of them."""

    opening: common_pb2.Open
    sequence: CachedSequence
    history: History
    opened: common_pb2.Opened


class ModelRuntime:
    """A loaded model, the thread that runs it, and its open sessions."""

    def __init__(
        self,
        loaded: LoadedModel,
        thread: ModelThread,
        *,
        model_id: str,
        num_pages: int,
        max_num_draft_tokens: int,
        max_rows: int,
    ) -> None:
        """
        To be called on the model thread.

        Args:
            loaded: the model.
            thread: that runs it from here on.
            model_id: its name, for the handshake.
            num_pages: of the KV pool. A session can use all of them, if no older one does.
            max_num_draft_tokens: the most drafted tokens in one round.
            max_rows: the token budget of one pass.

        Raises:
            ModelLoadError: there is no memory for the pool.
        """
        self.loaded = loaded
        self.thread = thread
        self.num_sessions = 0
        self.info = common_pb2.ModelInfo(
            protocol_version=PROTOCOL_VERSION,
            model_id=model_id,
            tokenizer_sha256=loaded.tokenizer.table_sha256,
            vocab_size=loaded.model.vocab_size,
            effective_vocab_size=loaded.model.effective_vocab_size,
            eos_token_ids=loaded.eos_token_ids,
            max_context_length=min(loaded.max_context_length, num_pages * PAGE_SIZE),
            acceptance_rules=ACCEPTANCE_RULES,
            # Deterministic passes have one row of a sequence after the other.
            trees=loaded.model.fixed_rows is None,
            max_num_draft_tokens=max_num_draft_tokens,
        )
        self._grammars = GrammarCompiler(
            loaded.tokenizer.content, loaded.model.effective_vocab_size, loaded.eos_token_ids
        )
        try:
            self.scheduler = Scheduler(loaded.model, num_pages, max_rows)
        except (MemoryError, RuntimeError) as error:
            raise ModelLoadError(
                f"there is no memory for {num_pages} KV pages of {loaded.model.bytes_per_page} "
                f"bytes: give less --kv-memory ({str(error).splitlines()[0][:200]})"
            ) from error
        thread.attach(self.scheduler)

    @property
    def fault(self) -> str | None:
        """Why no session can be served any more, or None if there can be."""
        return self.thread.fault

    @asynccontextmanager
    async def session(self, opening: common_pb2.Open) -> AsyncIterator[Session]:
        """A session whose context is cached, for as long as the block runs.

        Args:
            opening: checked against `info`.

        Raises:
            SpecdecError: INVALID_REQUEST if its grammar cannot be compiled.
        """
        grammar = None
        if opening.sampling.HasField("grammar"):
            # It may take a while, in which other sessions go on.
            grammar = await asyncio.to_thread(self._compiled, opening.sampling.grammar)
        self.num_sessions += 1
        sequence = CachedSequence(
            self.scheduler.residents.pool,
            [*opening.prompt_token_ids, *opening.committed_token_ids],
            salt=opening.prefix_cache.salt,
            shared=not opening.prefix_cache.bypass,
        )
        try:
            # If this is cancelled, it is run all the same: the session is to be closed then.
            history, _ = await self.thread.run(self._begin, opening, sequence, grammar)
            opened = await self._prefill(opening, sequence)
            yield Session(opening, sequence, history, opened)
        finally:
            self.thread.post(partial(self.scheduler.close, sequence))
            self.num_sessions -= 1

    def _compiled(self, grammar: common_pb2.Grammar) -> GrammarState:
        try:
            return self._grammars.start(grammar)
        except ValueError as error:
            raise SpecdecError.invalid([Violation("open.sampling.grammar", str(error))]) from None

    def _begin(
        self, opening: common_pb2.Open, sequence: CachedSequence, grammar: GrammarState | None
    ) -> History:
        """Begins a session. Returns its history."""
        self.scheduler.open(sequence)
        model = self.loaded.model
        history = History(
            opening.sampling,
            opening.prompt_token_ids,
            model.effective_vocab_size,
            model.device,
            grammar,
        )
        history.commit(opening.committed_token_ids)
        return history

    async def _prefill(
        self, opening: common_pb2.Open, sequence: CachedSequence
    ) -> common_pb2.Opened:
        """Feeds a session's context to the model."""
        opened = common_pb2.Opened(round=opening.round, base_length=opening.base_length)
        if len(sequence.tokens) > 1:
            prefill = Prefill(sequence)
            if opening.logprobs.prompt:
                prefill = ScoredPrefill(sequence, opening.logprobs.num_top)
            found, timings = await self.thread.work(prefill)
            opened.prompt_logprobs.extend(found)
            opened.timings.CopyFrom(timings)
            opened.cached_tokens = sequence.reused_length
        return opened


class ScoredPrefill(Prefill):
    """A prefill that yields the log-probabilities of the tokens from the second on."""

    # A row of logits for every token takes memory: few tokens at a time.
    max_rows = 64

    def __init__(self, sequence: CachedSequence, num_top: int) -> None:
        super().__init__(sequence)
        self.num_logits = len(sequence.tokens) - 1
        self._num_top = num_top

    def take(self, logits: torch.Tensor) -> None:
        end = self.sequence.cached_length + 1
        followers = self.sequence.tokens[end - len(logits) : end]
        found = token_logprobs(logits, followers, self._num_top)
        if any(math.isnan(each.logprob) for each in found):
            raise NotNumbers("the model's logits are not finite numbers")
        self.found.extend(found)

    def restart(self) -> None:
        self.found.clear()
