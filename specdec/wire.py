"""Parses requests from the wire so that a malformed one is refused by the name of its field.

gRPC answers a request that does not parse with an error that carries no reason, and a stream's
servicer gets an exception for it. The only part of a well-formed message that a parser refuses is a
string that is not UTF-8, so that the message is parsed again with every string declared as bytes,
which finds the culprit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import DecodeError, Message

from specdec.errors import SpecdecError, Violation

T = TypeVar("T")
M = TypeVar("M", bound=Message)


@dataclass(frozen=True)
class Malformed:
    """A request that could not be parsed."""

    violations: tuple[Violation, ...]


def parsed(request: T | Malformed) -> T:
    """The request, if it is one.

    Raises:
        SpecdecError: INVALID_REQUEST, naming the fields that are malformed.
    """
    if isinstance(request, Malformed):
        raise SpecdecError.invalid(request.violations)
    return request


def parser(kind: type[M]) -> Callable[[bytes], M | Malformed]:
    """What parses messages of a kind. It never raises: gRPC would hide why."""
    lenient = cache(lambda: _lenient_class(kind))

    def parse(data: bytes) -> M | Malformed:
        try:
            return kind.FromString(data)
        except DecodeError as error:
            found = tuple(_culprits(lenient(), data))
            return Malformed(found or (Violation("request", f"not valid: {error}"),))

    return parse


def register(server: grpc.aio.Server, servicer: object, service: ServiceDescriptor) -> None:
    """Adds a servicer to a server. What its methods are given may be `Malformed`.

    Args:
        server: to add to.
        servicer: has a method for each of the service's.
        service: by which requests and responses are known.
    """
    handlers = {m.name: _handler(getattr(servicer, m.name), m) for m in service.methods}
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service.full_name, handlers),)
    )


def _handler(behavior: Any, method: MethodDescriptor) -> grpc.RpcMethodHandler[Any, Any]:
    make: Any = {
        (False, False): grpc.unary_unary_rpc_method_handler,
        (False, True): grpc.unary_stream_rpc_method_handler,
        (True, False): grpc.stream_unary_rpc_method_handler,
        (True, True): grpc.stream_stream_rpc_method_handler,
    }[method.client_streaming, method.server_streaming]
    handler: grpc.RpcMethodHandler[Any, Any] = make(
        behavior,
        request_deserializer=parser(message_factory.GetMessageClass(method.input_type)),
        response_serializer=message_factory.GetMessageClass(method.output_type).SerializeToString,
    )
    return handler


def _culprits(lenient: type[Message], data: bytes) -> Iterator[Violation]:
    try:
        message = lenient.FromString(data)
    except DecodeError:
        return
    for path, value in _byte_strings(message):
        try:
            value.decode()
        except UnicodeDecodeError as error:
            yield Violation(path, f"must be valid UTF-8; byte {error.start} is not")


def _byte_strings(message: Message, path: str = "") -> Iterator[tuple[str, bytes]]:
    for field, value in message.ListFields():
        for index, item in enumerate(value if field.is_repeated else [value]):
            label = f"{path}{field.name}" + (f"[{index}]" if field.is_repeated else "")
            if isinstance(item, Message):
                yield from _byte_strings(item, f"{label}.")
            elif isinstance(item, bytes):
                yield label, item


def _lenient_class(kind: type[Message]) -> type[Message]:
    """The class with every string field declared as bytes."""
    descriptor, pool = kind.DESCRIPTOR, descriptor_pool.DescriptorPool()
    for each in (*descriptor.file.dependencies, descriptor.file):
        file = descriptor_pb2.FileDescriptorProto()
        each.CopyToProto(file)
        for message in file.message_type:
            for field in message.field:
                if field.type == field.TYPE_STRING:
                    field.type = field.TYPE_BYTES
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(descriptor.full_name))
