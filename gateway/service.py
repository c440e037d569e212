"""The GenerationService servicer: the life of one Generate call."""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from gateway.draft_stream import Patience
from gateway.keys import Keys
from gateway.merge import merge
from gateway.peers import DraftPeer, VerifierPeer
from gateway.reception import Reception
from gateway.replicas import Replicas
from gateway.sample import Call, Sample
from gateway.settings import GatewaySettings
from gateway.target import Target
from gateway.workload import Workload
from specdec import wire
from specdec.errors import SpecdecError, abort
from specdec.logs import request_id_of
from specdec.open_sessions import OpenSessions
from specdec.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc
from specdec.wire import Malformed

_log = structlog.get_logger()


class GenerationServicer(gateway_pb2_grpc.GenerationServiceServicer):
    """Generates text with the help of verifiers and drafts."""

    def __init__(
        self,
        settings: GatewaySettings,
        verifiers: Replicas[VerifierPeer],
        drafts: Replicas[DraftPeer],
        keys: Keys | None = None,
    ) -> None:
        """`keys`: of those who may call. None lets everybody."""
        self._settings = settings
        self._verifiers = verifiers
        self._drafts = drafts
        self._target: Target | None = None
        """That was ready last."""
        self.reception = Reception(settings, keys)
        self._workload = Workload()
        self.num_sessions = 0
        self._calls = OpenSessions(sys.maxsize)

    async def drain(self, grace_seconds: float) -> None:
        """Takes no more calls, and ends those that are still open after so many seconds.

        Those that wait in the queue are sent away at once.
        """
        self.reception.admission.drain()
        await self._calls.drain(grace_seconds)

    async def Generate(
        self,
        request: gateway_pb2.GenerateRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        session_id = uuid.uuid4().hex
        request_id = request_id_of(context) or session_id
        structlog.contextvars.bind_contextvars(session_id=session_id, request_id=request_id)
        self.num_sessions += 1
        begun = time.monotonic()
        try:
            call = self._call(session_id, request_id, context.time_remaining())
            async with (
                self._calls.entered(),
                aclosing(self._generate(request, context, call)) as responses,
            ):
                async for response in responses:
                    yield response
            _log.info("generation finished", seconds=round(time.monotonic() - begun, 3))
        except SpecdecError as error:
            _log.warning("generation failed", code=error.code.name, error=str(error))
            await abort(context, error)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            _log.exception("generation broke")
            message = f"session {session_id}: {type(error).__name__}; see the gateway's log"
            await abort(context, SpecdecError(common_pb2.ERROR_REASON_INTERNAL, message))
        finally:
            self.num_sessions -= 1

    def _call(self, session_id: str, request_id: str, deadline: float | None) -> Call:
        settings = self._settings
        return Call(
            session_id=session_id,
            request_id=request_id,
            deadline_at=None if deadline is None else time.monotonic() + deadline,
            verifiers=self._verifiers,
            failover_patience=settings.failover_seconds,
            drafts=self._drafts,
            draft_patience=Patience(
                first=settings.draft_patience_seconds,
                round=min(settings.draft_wait_seconds, settings.draft_patience_seconds),
                session=settings.draft_patience_seconds,
            ),
            workload=self._workload,
        )

    async def _generate(
        self,
        request: gateway_pb2.GenerateRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
        call: Call,
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse]:
        async with self.reception.admitted(request, context, self._present_target) as admitted:
            planned, target, throttle = admitted
            samples = [Sample(i, planned, target, call) for i in range(planned.num_samples)]
            try:
                # One after the other: the later ones find the prompt in the cache of the first.
                for sample in samples:
                    await sample.open()
                async with aclosing(merge([sample.run() for sample in samples])) as responses:
                    async for response in responses:
                        throttle.take_generated(len(response.chunk.token_ids))
                        yield response
            finally:
                for sample in samples:
                    sample.close()

    def _present_target(self) -> Target:
        """The target that new sessions are for: the same model for as long as a verifier has it."""
        found = [each.target for each in self._verifiers.ready if each.target is not None]
        known = self._target
        same = [target for target in found if known is not None and target.is_same_model(known)]
        if found:
            self._target = (same or found)[0]
        if self._target is None:
            raise SpecdecError(
                common_pb2.ERROR_REASON_NOT_READY, f"no verifier: {self._verifiers.reason}"
            )
        # If none is there it may be back in a moment: sessions look for it for as long.
        return self._target


def register(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Adds the servicer to a server, with a parser that can name a malformed field."""
    wire.register(server, servicer, gateway_pb2.DESCRIPTOR.services_by_name["GenerationService"])
