"""The GenerationService servicer: the life of one Generate call."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc
import structlog

from gateway.commit import Output
from gateway.draft_stream import DraftFailure, DraftStream
from gateway.peers import DraftPeer, PeerState, Target, VerifierPeer
from gateway.request import Plan, plan
from gateway.rounds import Speculation, run_rounds
from gateway.settings import GatewaySettings
from gateway.statistics import Statistics
from gateway.verify_stream import VerifyStream
from gateway.wire import Malformed, parse_generate_request
from specdec.errors import SpecdecError, abort
from specdec.services import GATEWAY
from specdec.v1 import common_pb2, gateway_pb2, gateway_pb2_grpc

_log = structlog.get_logger()


class GenerationServicer(gateway_pb2_grpc.GenerationServiceServicer):
    """Generates text with the help of its two peers."""

    def __init__(
        self, settings: GatewaySettings, verifier: VerifierPeer, draft: DraftPeer | None
    ) -> None:
        self._settings = settings
        self._verifier = verifier
        self._draft = draft
        self.num_sessions = 0

    async def Generate(
        self,
        request: gateway_pb2.GenerateRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        session_id = uuid.uuid4().hex
        structlog.contextvars.bind_contextvars(
            session_id=session_id, request_id=_request_id(context) or session_id
        )
        self.num_sessions += 1
        try:
            async for response in self._generate(request, session_id, context.time_remaining()):
                yield response
        except SpecdecError as error:
            if error.reason == common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE:
                self._verifier.lost()
            _log.warning("generation failed", code=error.code.name, error=str(error))
            await abort(context, error)
        finally:
            self.num_sessions -= 1

    async def _generate(
        self,
        request: gateway_pb2.GenerateRequest | Malformed,
        session_id: str,
        deadline: float | None,
    ) -> AsyncIterator[gateway_pb2.GenerateResponse]:
        if isinstance(request, Malformed):
            raise SpecdecError.invalid(request.violations)
        target = self._verifier.target
        if target is None or self._verifier.state is not PeerState.READY:
            raise SpecdecError(
                common_pb2.ERROR_REASON_NOT_READY, f"no verifier: {self._verifier.reason}"
            )
        planned = await asyncio.to_thread(plan, request, target, self._settings)
        output = Output(target.tokenizer, planned.stopping)
        statistics = Statistics(planned.acceptance_rule)
        opening = common_pb2.Open(
            session_id=session_id,
            round=1,
            base_length=len(planned.prompt_token_ids),
            prompt_token_ids=planned.prompt_token_ids,
            sampling=planned.sampling,
            acceptance_rule=planned.acceptance_rule,
            # The last token of a generation is never drafted.
            num_draft_tokens=min(planned.num_draft_tokens, planned.stopping.max_new_tokens - 1),
        )
        verifier = VerifyStream(
            self._verifier.stub, opening, target.info.effective_vocab_size, deadline=deadline
        )
        speculation = Speculation(planned.num_draft_tokens, None)
        try:
            await verifier.open()
            await self._open_draft(speculation, opening, target, deadline)
            async for chunk in run_rounds(verifier, speculation, output, statistics):
                yield gateway_pb2.GenerateResponse(chunk=chunk)
        finally:
            verifier.close()
            if speculation.draft is not None:
                statistics.add_stale(speculation.draft.stale_proposals)
                speculation.draft.close()
        yield gateway_pb2.GenerateResponse(
            completion=_completion(planned, output, verifier, statistics)
        )

    async def _open_draft(
        self,
        speculation: Speculation,
        opening: common_pb2.Open,
        target: Target,
        deadline: float | None,
    ) -> None:
        """Opens the session at the draft, if speculation is on and there is a fitting draft."""
        if opening.num_draft_tokens == 0:
            return
        if self._draft is None:
            speculation.unavailable = "this gateway has no draft"
            return
        misfit = self._draft.misfit(target)
        if misfit is not None:
            speculation.unavailable = misfit
            return
        speculation.draft = DraftStream(
            self._draft.stub,
            opening,
            target.info.effective_vocab_size,
            patience=self._settings.draft_patience_seconds,
            deadline=deadline,
        )
        speculation.on_failure = self._draft.lost
        try:
            await speculation.draft.open()
        except DraftFailure as failure:
            speculation.give_up(str(failure))


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


def _request_id(context: grpc.aio.ServicerContext[Any, Any]) -> str | None:
    """The client's own id for the call, if it sent one in the metadata."""
    for key, value in context.invocation_metadata() or ():
        if key == "x-request-id" and isinstance(value, str):
            return value[:128]
    return None


def _completion(
    planned: Plan, output: Output, verifier: VerifyStream, statistics: Statistics
) -> gateway_pb2.Completion:
    completion = gateway_pb2.Completion(
        finish_reason=output.finish_reason,
        usage=gateway_pb2.Usage(
            prompt_tokens=len(planned.prompt_token_ids),
            cached_tokens=verifier.cached_tokens,
            completion_tokens=output.token_count,
        ),
        seed=planned.sampling.seed,
        speculation=statistics.to_message(),
    )
    if isinstance(output.matched, str):
        completion.matched_string = output.matched
    elif output.matched is not None:
        completion.matched_token_id = output.matched
    return completion
