"""Parses requests from the wire so that a malformed one is refused by the name of its field.

gRPC answers a request that does not parse with INTERNAL and no reason. The only part of a
well-formed message that a parser refuses is a string that is not UTF-8, so that the message is
parsed again with every string declared as bytes, which finds the culprit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

from specdec.errors import Violation
from specdec.v1 import gateway_pb2


@dataclass(frozen=True)
class Malformed:
    """A request that could not be parsed."""

    violations: tuple[Violation, ...]


def parse_generate_request(data: bytes) -> gateway_pb2.GenerateRequest | Malformed:
    """Parses a GenerateRequest. Never raises: gRPC would hide why."""
    try:
        return gateway_pb2.GenerateRequest.FromString(data)
    except DecodeError as error:
        return Malformed(tuple(_culprits(data)) or (Violation("request", f"not valid: {error}"),))


def _culprits(data: bytes) -> Iterator[Violation]:
    try:
        message = _lenient_request_class().FromString(data)
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


@cache
def _lenient_request_class() -> type[Message]:
    """GenerateRequest with every string field declared as bytes."""
    pool = descriptor_pool.DescriptorPool()
    request = gateway_pb2.GenerateRequest.DESCRIPTOR
    for descriptor in (*request.file.dependencies, request.file):
        file = descriptor_pb2.FileDescriptorProto()
        descriptor.CopyToProto(file)
        for message in file.message_type:
            for field in message.field:
                if field.type == field.TYPE_STRING:
                    field.type = field.TYPE_BYTES
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(request.full_name))
