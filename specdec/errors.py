"""Every error that crosses the wire: one table, for those who send it and those who receive it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from specdec.v1 import common_pb2

DOMAIN = "specdec.v1"


@dataclass(frozen=True)
class _Row:
    code: grpc.StatusCode
    retryable: bool


_TABLE: dict[int, _Row] = {
    common_pb2.ERROR_REASON_INVALID_REQUEST: _Row(grpc.StatusCode.INVALID_ARGUMENT, False),
    common_pb2.ERROR_REASON_NOT_READY: _Row(grpc.StatusCode.UNAVAILABLE, True),
    common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE: _Row(grpc.StatusCode.UNAVAILABLE, True),
    common_pb2.ERROR_REASON_CONTRACT_VIOLATION: _Row(grpc.StatusCode.FAILED_PRECONDITION, False),
    common_pb2.ERROR_REASON_TOKENIZER_MISMATCH: _Row(grpc.StatusCode.FAILED_PRECONDITION, False),
    common_pb2.ERROR_REASON_MODEL_FAILURE: _Row(grpc.StatusCode.INTERNAL, False),
    common_pb2.ERROR_REASON_DEADLINE_EXCEEDED: _Row(grpc.StatusCode.DEADLINE_EXCEEDED, False),
    common_pb2.ERROR_REASON_INTERNAL: _Row(grpc.StatusCode.INTERNAL, False),
    common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED: _Row(grpc.StatusCode.RESOURCE_EXHAUSTED, True),
    common_pb2.ERROR_REASON_DRAINING: _Row(grpc.StatusCode.UNAVAILABLE, True),
    common_pb2.ERROR_REASON_UNAUTHENTICATED: _Row(grpc.StatusCode.UNAUTHENTICATED, False),
    common_pb2.ERROR_REASON_PERMISSION_DENIED: _Row(grpc.StatusCode.PERMISSION_DENIED, False),
}
_RETRY_SECONDS = 1.0
_MESSAGE_BYTES = 1024
_VIOLATIONS_BYTES = 1536
"""Of all violations of a status together. gRPC drops a status of more than 8 KiB, reason and all,
and has the message in it twice."""


@dataclass(frozen=True)
class Violation:
    """A field of a request that is at fault."""

    field: str
    """The path of the field, for example "sampling.temperature"."""
    description: str
    """What is wrong, and what is allowed."""


class SpecdecError(Exception):
    """An error with a reason of the table. The message is written for the caller."""

    def __init__(
        self,
        reason: common_pb2.ErrorReason.ValueType,
        message: str,
        violations: Sequence[Violation] = (),
        *,
        retry_after: float = _RETRY_SECONDS,
    ) -> None:
        """
        Args:
            reason: of the table.
            message: one line that says what to do. A long one is cut.
            violations: the fields that are at fault, if the request is. The first ones are told.
            retry_after: seconds after which to try again, where the reason is worth it.
        """
        super().__init__(_shortened(message, _MESSAGE_BYTES))
        self.reason = reason
        self.violations = tuple(violations)
        self.retry_after = retry_after

    @classmethod
    def invalid(cls, violations: Sequence[Violation]) -> SpecdecError:
        """The error for a request whose fields are at fault. Its message names them all."""
        text = "; ".join(f"{v.field}: {v.description}" for v in violations)
        return cls(common_pb2.ERROR_REASON_INVALID_REQUEST, text, violations)

    @property
    def code(self) -> grpc.StatusCode:
        """The status code that the reason maps to."""
        return _TABLE[self.reason].code

    def to_status(self) -> status_pb2.Status:
        """The google.rpc.Status: ErrorInfo always, BadRequest and RetryInfo where they apply."""
        name = common_pb2.ErrorReason.Name(self.reason).removeprefix("ERROR_REASON_")
        details: list[message.Message] = [error_details_pb2.ErrorInfo(reason=name, domain=DOMAIN)]
        if self.violations:
            bad_request = error_details_pb2.BadRequest()
            for violation in self.violations:
                bad_request.field_violations.add(
                    field=_shortened(violation.field, _MESSAGE_BYTES // 4),
                    description=_shortened(violation.description, _MESSAGE_BYTES),
                )
                if bad_request.ByteSize() > _VIOLATIONS_BYTES:
                    bad_request.field_violations.pop()
                    break
            details.append(bad_request)
        if _TABLE[self.reason].retryable:
            delay = duration_pb2.Duration()
            delay.FromNanoseconds(int(self.retry_after * 1e9))
            details.append(error_details_pb2.RetryInfo(retry_delay=delay))
        status = status_pb2.Status(code=self.code.value[0], message=str(self))
        for detail in details:
            packed = any_pb2.Any()
            packed.Pack(detail)
            status.details.append(packed)
        return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: SpecdecError) -> NoReturn:
    """Ends a call with the error's status and details."""
    await context.abort_with_status(rpc_status.to_status(error.to_status()))
    raise AssertionError("abort returned")


def _shortened(text: str, most: int) -> str:
    """The text, cut down to so many bytes of UTF-8 if it has more."""
    data = text.encode()
    return text if len(data) <= most else data[: most - 3].decode(errors="ignore") + "…"


def describe(error: grpc.aio.AioRpcError) -> str:
    """One line for people: the reason if the error carries one, and its message."""
    reason = reason_of(error)
    name = error.code().name if reason is None else reason
    return f"{name}: {error.details()}"


def violations_of(error: grpc.aio.AioRpcError) -> list[Violation]:
    """The field violations that an error carries."""
    found = error_details_pb2.BadRequest()
    for detail in _details(error):
        detail.Unpack(found)
    return [Violation(v.field, v.description) for v in found.field_violations]


def reason_of(error: grpc.aio.AioRpcError) -> str | None:
    """The name of the reason that an error of ours carries, or None if it is not of ours."""
    for detail in _details(error):
        info = error_details_pb2.ErrorInfo()
        if detail.Unpack(info) and info.domain == DOMAIN:
            return info.reason
    return None


def _details(error: grpc.aio.AioRpcError) -> Sequence[any_pb2.Any]:
    status = rpc_status.from_call(error)
    return () if status is None else status.details
