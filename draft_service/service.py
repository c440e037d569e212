"""The DraftService servicer: translates messages and guards the contract."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc

from draft_service.drafter import Drafter
from draft_service.rounds import Rounds
from specdec.errors import SpecdecError
from specdec.open_sessions import OpenSessions
from specdec.streams import require, require_parsed, session_stream
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc
from specdec.v1.draft_pb2 import DraftResponse
from specdec.wire import Malformed, parsed


class DraftServicer(draft_pb2_grpc.DraftServiceServicer):
    """Serves drafts once `drafter` is set; until then every call is UNAVAILABLE."""

    def __init__(self, max_sessions: int) -> None:
        """`max_sessions`: how many may be open at once."""
        self.drafter: Drafter | None = None
        """To be set when it runs."""
        self.sessions = OpenSessions(max_sessions)

    async def GetModelInfo(
        self,
        request: draft_pb2.DraftServiceGetModelInfoRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> draft_pb2.DraftServiceGetModelInfoResponse:
        await require_parsed(request, context)
        info = common_pb2.ModelInfo()
        drafter = await require(self.drafter, self.sessions, context)
        info.CopyFrom(drafter.info)
        info.drafters = ", ".join(drafter.settings.drafters)
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=info)

    async def Draft(
        self,
        request_iterator: AsyncIterator[draft_pb2.DraftRequest | Malformed],
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[DraftResponse]:
        drafter = await require(self.drafter, self.sessions, context)
        async with (
            session_stream(request_iterator, context, drafter.info, self.sessions) as contract,
            drafter.session(contract.opening) as session,
        ):
            contract.opened()
            yield DraftResponse(opened=session.opened)
            rounds = Rounds(contract, session)
            yield await rounds.first()
            async with _Reader(request_iterator) as reader:
                while True:
                    for pushed in await rounds.ahead(reader.next):
                        yield pushed
                    request = await reader.take()
                    if request is None:
                        break
                    response = await rounds.advance(_advance_of(request))
                    if response is not None:
                        yield response


class _Reader:
    """Reads a stream one message ahead, so that its coming is noticed while something is done."""

    def __init__(self, requests: AsyncIterator[draft_pb2.DraftRequest | Malformed]) -> None:
        self._requests = requests
        self.next: asyncio.Task[draft_pb2.DraftRequest | None]
        """The message that comes next; None at the end."""

    async def __aenter__(self) -> _Reader:
        self.next = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *_: object) -> None:
        self.next.cancel()
        # A stream that broke while nobody waited for its next message has broken for others, too.
        await asyncio.gather(self.next, return_exceptions=True)

    async def take(self) -> draft_pb2.DraftRequest | None:
        """The next message; None at the end."""
        request = await self.next
        self.next = asyncio.create_task(self._read())
        return request

    async def _read(self) -> draft_pb2.DraftRequest | None:
        return parsed(await anext(self._requests, None))


def _advance_of(request: draft_pb2.DraftRequest) -> draft_pb2.Advance:
    if request.WhichOneof("message") != "advance":
        raise SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION, "only Advance may follow the Open"
        )
    return request.advance
