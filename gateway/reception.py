"""What a call passes before anything is generated for it: its key, its limits, the queue."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any

import grpc
import structlog

from gateway.admission import Admission, Limits, Place, Tenant
from gateway.keys import Caller, Keys, tenant_salt
from gateway.request import MAX_SAMPLES, Plan, plan
from gateway.settings import GatewaySettings
from gateway.target import Target
from gateway.throttle import Throttle
from specdec.errors import SpecdecError
from specdec.v1 import common_pb2, gateway_pb2
from specdec.wire import Malformed, parsed

_GRAMMAR_CHECKS = 2
"""How many grammars are checked at a time."""


class Reception:
    """Lets calls in, one by one."""

    def __init__(self, settings: GatewaySettings, keys: Keys | None) -> None:
        """`keys`: None lets everybody in, as one tenant without limits of its own."""
        self.admission = Admission(
            Limits(
                settings.max_sessions,
                settings.max_session_tokens,
                settings.max_queued,
                settings.queue_seconds,
            )
        )
        self._settings = settings
        self._keys = keys
        self._anyone = Caller(Tenant(), Throttle())
        self._grammar_checks = ThreadPoolExecutor(_GRAMMAR_CHECKS, "grammar")

    @asynccontextmanager
    async def admitted(
        self,
        request: gateway_pb2.GenerateRequest | Malformed,
        context: grpc.aio.ServicerContext[Any, Any],
        target: Callable[[], Target],
    ) -> AsyncIterator[tuple[Plan, Target, Throttle]]:
        """Holds a place for a call while the block runs.

        Args:
            request: of the call.
            context: of the call.
            target: gives the target, or raises NOT_READY.

        Yields:
            What is to be generated, of which target, and what is to be told of the tokens.

        Raises:
            SpecdecError: UNAUTHENTICATED, DRAINING, RESOURCE_EXHAUSTED, NOT_READY, INVALID_REQUEST
                or DEADLINE_EXCEEDED.
        """
        caller = self._caller(context)
        request = parsed(request)
        model = target()
        # One that is out of range is refused by its name when the request is checked.
        samples = min(request.n, MAX_SAMPLES) if request.HasField("n") else 1
        with self.admission.enter(caller.tenant, max(samples, 1)) as place:
            caller.throttle.begin()
            planned = await self._plan(request, model)
            if self._keys is not None:
                salt = tenant_salt(caller.tenant.name, planned.prefix_cache.salt)
                planned.prefix_cache.salt = salt
            await self._wait(place, planned, caller.throttle, context.time_remaining())
            yield planned, model, caller.throttle

    def _caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        if self._keys is None:
            return self._anyone
        caller = self._keys.caller(context)
        structlog.contextvars.bind_contextvars(tenant=caller.tenant.name)
        return caller

    async def _plan(self, request: gateway_pb2.GenerateRequest, target: Target) -> Plan:
        # A grammar's check may take seconds: those are not to hold up requests without one.
        executor = self._grammar_checks if request.sampling.HasField("grammar") else None
        checking = asyncio.get_running_loop().run_in_executor(
            executor, plan, request, target, self._settings
        )
        try:
            async with asyncio.timeout(self._settings.queue_seconds):
                return await checking
        except TimeoutError:
            raise SpecdecError(
                common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED,
                "too many requests with grammars, or with long prompts, are being checked",
                retry_after=self._settings.queue_seconds,
            ) from None

    async def _wait(
        self, place: Place, planned: Plan, throttle: Throttle, deadline: float | None
    ) -> None:
        prompt = len(planned.prompt_token_ids)
        throttle.take_prompt(prompt)
        try:
            await place.admitted(
                place.sessions * (prompt + planned.stopping.max_new_tokens), deadline
            )
        except BaseException:
            throttle.take_generated(-prompt)
            raise
