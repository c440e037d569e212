"""What a model service keeps loaded, and the life of a session on it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from specdec.errors import SpecdecError, Violation, abort
from specdec.lm.grammar import GrammarCompiler
from specdec.lm.history import History
from specdec.lm.loading import LoadedModel
from specdec.lm.logprobs import token_logprobs
from specdec.lm.sequence import CachedSequence
from specdec.lm.thread import ModelThread
from specdec.logs import request_id_of
from specdec.sessions import PROTOCOL_VERSION, SessionContract, SessionState
from specdec.v1 import common_pb2

_log = structlog.get_logger()

_LOGPROBS_CHUNK = 64

RULES = (
    common_pb2.ACCEPTANCE_RULE_REJECTION,
    common_pb2.ACCEPTANCE_RULE_BLOCK,
    common_pb2.ACCEPTANCE_RULE_COUPLED,
)


@dataclass
class Session:
    """One open session: what it agreed to, its tokens, and what its processors know of them."""

    opening: common_pb2.Open
    contract: SessionContract
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
        max_num_draft_tokens: int,
        prefill_chunk: int,
    ) -> None:
        """`prefill_chunk`: how many prompt tokens one pass takes before others have a turn."""
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
            max_context_length=loaded.max_context_length,
            acceptance_rules=RULES,
            max_num_draft_tokens=max_num_draft_tokens,
        )
        self._prefill_chunk = prefill_chunk
        self._grammars = GrammarCompiler(
            loaded.tokenizer.content, loaded.model.effective_vocab_size, loaded.eos_token_ids
        )
        self._sequences: list[CachedSequence] = []
        """Of the open sessions."""

    @asynccontextmanager
    async def session(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Session]:
        """The life of one session: its stream's Open, its context's prefill, its end.

        What goes wrong inside ends this stream with the error's status, and nothing else.
        """
        self.num_sessions += 1
        begun = time.monotonic()
        session_id, session = "", None
        try:
            opening = _open_of(await anext(requests, None))
            session_id = opening.session_id
            structlog.contextvars.bind_contextvars(
                session_id=session_id, request_id=request_id_of(context)
            )
            session = await self._open(opening)
            self._sequences.append(session.sequence)
            yield session
        except SpecdecError as error:
            _log.warning("session failed", error=str(error))
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _log.exception("model failed")
            reason = common_pb2.ERROR_REASON_MODEL_FAILURE
            message = f"session {session_id}: {type(error).__name__}; see this service's log"
            await abort(context, SpecdecError(reason, message))
        finally:
            self.num_sessions -= 1
            if session is not None:
                self._sequences.remove(session.sequence)
            _log.info(
                "session closed",
                tokens=session.contract.base_length if session else 0,
                stale_messages=session.contract.stale_messages if session else 0,
                seconds=round(time.monotonic() - begun, 3),
            )

    async def _open(self, opening: common_pb2.Open) -> Session:
        """Feeds a session's context to the model, chunk by chunk."""
        contract = SessionContract(opening, self.info)
        opened = common_pb2.Opened(round=opening.round, base_length=opening.base_length)
        (sequence, history), spent = await self.thread.run(self._begin, opening)
        opened.cached_tokens = sequence.cached_length
        while True:
            opened.timings.queue_us += spent.queue_us
            opened.timings.compute_us += spent.compute_us
            if sequence.prefilled:
                break
            found, spent = await self.thread.run(self._prefill, sequence, opening.logprobs)
            opened.prompt_logprobs.extend(found)
        contract.state = SessionState.READY
        return Session(opening, contract, sequence, history, opened)

    def _begin(self, opening: common_pb2.Open) -> tuple[CachedSequence, History]:
        """A session's sequence, with what others have computed of it already, and its history."""
        grammar = None
        if opening.sampling.HasField("grammar"):
            try:
                grammar = self._grammars.start(opening.sampling.grammar)
            except ValueError as error:
                raise SpecdecError.invalid(
                    [Violation("open.sampling.grammar", str(error))]
                ) from None
        model = self.loaded.model
        history = History(
            opening.sampling,
            opening.prompt_token_ids,
            model.effective_vocab_size,
            model.device,
            grammar,
        )
        history.commit(opening.committed_token_ids)
        sequence = CachedSequence(model, [*opening.prompt_token_ids, *opening.committed_token_ids])
        if not opening.logprobs.prompt:
            sequence.adopt(self._sequences)
        return sequence, history

    def _prefill(
        self, sequence: CachedSequence, wanted: common_pb2.LogprobsRequest
    ) -> list[common_pb2.TokenLogprobs]:
        """Feeds one chunk. Returns the log-probabilities of the tokens that follow, if wanted."""
        if not wanted.prompt:
            sequence.prefill(self._prefill_chunk)
            return []
        # A row of logits for every token: fewer tokens at a time.
        begin = sequence.cached_length
        logits = sequence.prefill(min(self._prefill_chunk, _LOGPROBS_CHUNK), all_logits=True)
        followers = sequence.tokens[begin + 1 : sequence.cached_length + 1]
        return token_logprobs(logits, followers, wanted.num_top)


def _open_of(request: Any) -> common_pb2.Open:
    if request is None or request.WhichOneof("message") != "open":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "the first message must be an Open"
        )
    opening: common_pb2.Open = request.open
    return opening


async def require(
    runtime: ModelRuntime | None, context: grpc.aio.ServicerContext[Any, Any]
) -> ModelRuntime:
    """The runtime, or the end of the call with NOT_READY while there is none yet."""
    if runtime is None:
        message = "the model is still loading"
        await abort(context, SpecdecError(common_pb2.ERROR_REASON_NOT_READY, message))
    return runtime
