"""What a model service keeps loaded, and the life of a session on it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from specdec.errors import SpecdecError, abort
from specdec.lm.loading import LoadedModel
from specdec.lm.sequence import CachedSequence
from specdec.lm.thread import ModelThread, Timed
from specdec.sessions import PROTOCOL_VERSION, SessionContract, SessionState
from specdec.v1 import common_pb2

_log = structlog.get_logger()

RULES = (
    common_pb2.ACCEPTANCE_RULE_REJECTION,
    common_pb2.ACCEPTANCE_RULE_BLOCK,
    common_pb2.ACCEPTANCE_RULE_COUPLED,
)


@dataclass
class Session:
    """One open session: what it agreed to, and its tokens."""

    opening: common_pb2.Open
    contract: SessionContract
    sequence: CachedSequence
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

    @asynccontextmanager
    async def session(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Session]:
        """The life of one session: its stream's Open, its context's prefill, its end.

        What goes wrong inside ends this stream with the error's status, and nothing else.
        """
        self.num_sessions += 1
        begun = time.monotonic()
        session_id, contract = "", None
        try:
            opening = _open_of(await anext(requests, None))
            session_id = opening.session_id
            session = await self._open(opening)
            contract = session.contract
            yield session
        except SpecdecError as error:
            _log.warning("session failed", session_id=session_id, error=str(error))
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _log.exception("model failed", session_id=session_id)
            reason = common_pb2.ERROR_REASON_MODEL_FAILURE
            message = f"session {session_id}: {type(error).__name__}; see this service's log"
            await abort(context, SpecdecError(reason, message))
        finally:
            self.num_sessions -= 1
            _log.info(
                "session closed",
                session_id=session_id,
                tokens=contract.base_length if contract else 0,
                stale_messages=contract.stale_messages if contract else 0,
                seconds=round(time.monotonic() - begun, 3),
            )

    async def _open(self, opening: common_pb2.Open) -> Session:
        """Feeds a session's context to the model, chunk by chunk."""
        contract = SessionContract(opening, self.info)
        sequence = CachedSequence(
            self.loaded.model, [*opening.prompt_token_ids, *opening.committed_token_ids]
        )
        total = common_pb2.Timings()
        more = True
        while more:
            step: Timed[bool] = await self.thread.run(sequence.prefill, self._prefill_chunk)
            more = step.value
            total.queue_us += step.timings.queue_us
            total.compute_us += step.timings.compute_us
        contract.state = SessionState.READY
        opened = common_pb2.Opened(
            round=opening.round, base_length=opening.base_length, timings=total
        )
        return Session(opening, contract, sequence, opened)


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
