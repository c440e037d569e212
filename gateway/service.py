"""The GenerationService servicer: the life of one Generate call."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from gateway.merge import merge
from gateway.peers import DraftPeer, PeerState, VerifierPeer
from gateway.request import plan
from gateway.sample import Call, Sample
from gateway.settings import GatewaySettings
from gateway.wire import Malformed, parse_generate_request
from gateway.workload import Workload
from specdec.errors import SpecdecError, abort
from specdec.logs import request_id_of
from specdec.services import GATEWAY
from specdec.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

_log = structlog.get_logger()
_GRAMMAR_CHECKS = 2
"""How many grammars are checked at a time."""


class GenerationServicer(gateway_pb2_grpc.GenerationServiceServicer):
    """Generates text with the help of its two peers."""

    def __init__(
        self, settings: GatewaySettings, verifier: VerifierPeer, draft: DraftPeer | None
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        self._draft = draft
        self._grammar_checks = ThreadPoolExecutor(_GRAMMAR_CHECKS, "grammar")
        self._workload = Workload()
        self.num_sessions = 0

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
            async with aclosing(self._generate(request, call)) as responses:
                async for response in responses:
                    yield response
            _log.info("generation finished", seconds=round(time.monotonic() - begun, 3))
        except SpecdecError as error:
            if error.reason == common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE:
                self._verifier.lost()
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
        return Call(
            session_id,
            request_id,
            deadline,
            self._verifier,
            self._draft,
            self._settings.draft_patience_seconds,
            self._workload,
        )

    async def _generate(
        self, request: gateway_pb2.GenerateRequest | Malformed, call: Call
    ) -> AsyncGenerator[gateway_pb2.GenerateResponse]:
        if isinstance(request, Malformed):
            raise SpecdecError.invalid(request.violations)
        target = self._verifier.target
        if target is None or self._verifier.state is not PeerState.READY:
            raise SpecdecError(
                common_pb2.ERROR_REASON_NOT_READY, f"no verifier: {self._verifier.reason}"
            )
        # A grammar's check may take seconds: those are not to hold up requests without one.
        executor = self._grammar_checks if request.sampling.HasField("grammar") else None
        planned = await asyncio.get_running_loop().run_in_executor(
            executor, plan, request, target, self._settings
        )
        samples = [Sample(i, planned, target, call) for i in range(planned.num_samples)]
        try:
            # One after the other: the later ones find the prompt in the cache of the first.
            for sample in samples:
                await sample.open()
            async with aclosing(merge([sample.run() for sample in samples])) as responses:
                async for response in responses:
                    yield response
        finally:
            for sample in samples:
                sample.close()


def register(servicer: GenerationServicer, server: grpc.aio.Server) -> None:
    """Adds the servicer to a server, with a parser that can name a malformed field."""
    handler = grpc.unary_stream_rpc_method_handler(
        servicer.Generate,
        request_deserializer=parse_generate_request,
        response_serializer=gateway_pb2.GenerateResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(GATEWAY.full_name, {"Generate": handler}),)
    )
