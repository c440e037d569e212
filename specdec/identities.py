"""Who may call: only clients whose certificate has one of certain names."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import aclosing
from typing import Any

import grpc
import structlog

from specdec.errors import SpecdecError, abort
from specdec.v1 import common_pb2

_log = structlog.get_logger()

_NAMES = ("peer_uri", "peer_dns", "x509_common_name")
"""What the library calls the names in a verified certificate, such as a SPIFFE id or a host."""

Context = grpc.aio.ServicerContext[Any, Any]


def names_of(context: Context) -> list[str]:
    """The names in the client's certificate, each once: URIs, DNS names, the common name."""
    found = context.auth_context()
    names = [name.decode(errors="replace") for key in _NAMES for name in found.get(key, ())]
    return list(dict.fromkeys(names))


class OnlyNamed(grpc.aio.ServerInterceptor):
    """Ends every call of other clients with PERMISSION_DENIED, whatever it is for."""

    def __init__(self, names: Iterable[str]) -> None:
        """`names`: of the clients that may call."""
        self._names = frozenset(names)
        self._refused: set[str] = set()
        """Whom the log has already; there are as many as the CA has signed for."""

    async def intercept_service(
        self,
        continuation: Callable[
            [grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler[Any, Any] | None]
        ],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler[Any, Any] | None:
        """Puts the check before the method."""
        handler: Any = await continuation(handler_call_details)
        if handler is None:  # there is no such method
            return None
        kind = "_".join(
            "stream" if streams else "unary"
            for streams in (handler.request_streaming, handler.response_streaming)
        )
        make = getattr(grpc, f"{kind}_rpc_method_handler")
        checked: grpc.RpcMethodHandler[Any, Any] = make(
            self._checked(getattr(handler, kind)),
            request_deserializer=handler.request_deserializer,
            response_serializer=handler.response_serializer,
        )
        return checked

    def _checked(self, method: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Any]:
        if inspect.isasyncgenfunction(method):

            async def stream(request: Any, context: Context) -> AsyncIterator[Any]:
                await self._check(context)
                async with aclosing(method(request, context)) as responses:
                    async for response in responses:
                        yield response

            return stream

        async def answer(request: Any, context: Context) -> Any:
            await self._check(context)
            return await method(request, context)

        return answer

    async def _check(self, context: Context) -> None:
        names = names_of(context)
        if self._names.isdisjoint(names):
            text = ", ".join(names) or "no name"
            if text not in self._refused:
                self._refused.add(text)
                _log.warning("client refused", names=names, peer=context.peer())
            message = f"this service is for other clients: the certificate that calls is for {text}"
            await abort(context, SpecdecError(common_pb2.ERROR_REASON_PERMISSION_DENIED, message))
