"""The life of a session's stream at a service: its Open, its errors, its end."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import grpc
import structlog

from specdec.errors import SpecdecError, abort
from specdec.logs import request_id_of
from specdec.open_sessions import OpenSessions
from specdec.sessions import SessionContract
from specdec.v1 import common_pb2
from specdec.wire import parsed


class Serving(Protocol):
    """What a service serves with."""

    @property
    def fault(self) -> str | None:
        """Why it cannot serve any more, or None if it can."""


T = TypeVar("T", bound=Serving)
_log = structlog.get_logger()


@asynccontextmanager
async def session_stream(
    requests: AsyncIterator[Any],
    context: grpc.aio.ServicerContext[Any, Any],
    info: common_pb2.ModelInfo,
    sessions: OpenSessions,
) -> AsyncIterator[SessionContract]:
    """The life of one session, from its stream's Open on.

    What goes wrong inside ends this stream with the error's status, and nothing else.

    Args:
        requests: of the stream. The first is taken.
        context: of the stream.
        info: what the service said of itself, which the Open is held against.
        sessions: of the service; this becomes one of them.

    Yields:
        The session's contract, which has the Open.
    """
    try:
        sessions.require_room()
    except SpecdecError as error:
        await abort(context, error)
    begun = time.monotonic()
    session_id, contract = "", None
    try:
        async with sessions.entered():
            opening = _open_of(parsed(await anext(requests, None)))
            session_id = opening.session_id
            structlog.contextvars.bind_contextvars(
                session_id=session_id, request_id=request_id_of(context)
            )
            contract = SessionContract(opening, info)
            yield contract
    except SpecdecError as error:
        _log.warning("session failed", error=str(error))
        await abort(context, error)
    except grpc.aio.AbortError:
        raise
    except Exception as error:
        _log.exception("session broke")
        reason = common_pb2.ERROR_REASON_MODEL_FAILURE
        message = f"session {session_id}: {type(error).__name__}; see this service's log"
        await abort(context, SpecdecError(reason, message))
    finally:
        _log.info(
            "session closed",
            tokens=contract.base_length if contract else 0,
            stale_messages=contract.stale_messages if contract else 0,
            seconds=round(time.monotonic() - begun, 3),
        )


async def require(
    loaded: T | None, sessions: OpenSessions, context: grpc.aio.ServicerContext[Any, Any]
) -> T:
    """What a service serves with, or the end of the call if it can take no new work now.

    Args:
        loaded: None if it is loading still.
        sessions: of the service.
        context: of the call.
    """
    try:
        sessions.require_open()
        fault = "the model is still loading" if loaded is None else loaded.fault
        if fault is not None:
            raise SpecdecError(common_pb2.ERROR_REASON_NOT_READY, fault)
    except SpecdecError as error:
        await abort(context, error)
    assert loaded is not None
    return loaded


async def require_parsed(request: object, context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Ends a call with INVALID_REQUEST if its request could not be parsed."""
    try:
        parsed(request)
    except SpecdecError as error:
        await abort(context, error)


def _open_of(request: Any) -> common_pb2.Open:
    if request is None or request.WhichOneof("message") != "open":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "the first message must be an Open"
        )
    opening: common_pb2.Open = request.open
    return opening
