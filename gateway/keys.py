"""Who calls: the API key of a call, and whose it is."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import structlog

from gateway.admission import Tenant
from gateway.key_file import Account, KeyFileError, digest_of, parse
from gateway.throttle import Throttle
from specdec.errors import SpecdecError
from specdec.v1 import common_pb2

_log = structlog.get_logger()
_HEADER = "authorization"
_ADVICE = f"send the metadata {_HEADER!r} with the value 'Bearer <API key>'"
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class Caller:
    """Whose call it is, and what it may."""

    tenant: Tenant
    throttle: Throttle


class Keys:
    """The keys of a file, as it was when it was last in order."""

    def __init__(self, path: Path) -> None:
        """
        Raises:
            KeyFileError: the file cannot be read, or is broken.
        """
        self._path = path
        self._content = b""
        self._callers: dict[str, Caller] = {}
        self._digests: list[tuple[bytes, Caller]] = []
        self._take(self._read())

    def caller(self, context: grpc.aio.ServicerContext[Any, Any]) -> Caller:
        """Whose key a call brings.

        Raises:
            SpecdecError: UNAUTHENTICATED, it brings none, or one that is not known.
        """
        presented = digest_of(_key_of(context)).encode()
        found = None
        # All are compared, and each in full: the time tells nothing of the keys that there are.
        for digest, caller in self._digests:
            if hmac.compare_digest(digest, presented):
                found = caller
        if found is None:
            raise _unauthenticated(f"the API key in {_HEADER!r} is not known")
        return found

    async def stay_current(self) -> None:
        """Looks at the file every second, until cancelled. A broken one changes nothing."""
        complaint = ""
        while True:
            await asyncio.sleep(_LOOK_SECONDS)
            try:
                await asyncio.to_thread(self.reload)
                complaint = ""
            except KeyFileError as error:
                if str(error) != complaint:
                    complaint = str(error)
                    _log.warning("old API keys stay in use", error=complaint)

    def reload(self) -> None:
        """Takes in what the file has become.

        Its content is compared, so that it makes no difference how it is replaced: written over,
        moved into place, or by the exchanged symbolic links of a Kubernetes volume.

        Raises:
            KeyFileError: the file cannot be read, or is broken.
        """
        content = self._read()
        if content != self._content:
            self._take(content)
            _log.info("API keys replaced", tenants=len(self._callers))

    def _read(self) -> bytes:
        try:
            return self._path.read_bytes()
        except OSError as error:
            raise KeyFileError(f"cannot read {self._path}: {error.strerror}") from None

    def _take(self, content: bytes) -> None:
        try:
            accounts = parse(content)
        except KeyFileError as error:
            raise KeyFileError(f"{self._path}: {error}") from None
        callers = {name: self._caller(name, account) for name, account in accounts.items()}
        self._content, self._callers = content, callers
        self._digests = [
            (digest.encode(), callers[name])
            for name, account in accounts.items()
            for digest in account.sha256
        ]

    def _caller(self, name: str, account: Account) -> Caller:
        tenant = Tenant(name, account.weight, account.max_sessions)
        rates = (account.requests_per_minute, account.tokens_per_minute)
        known = self._callers.get(name)
        # What a tenant has used up is not forgotten because the file has changed elsewhere.
        if known is not None and known.throttle.rates == rates:
            return Caller(tenant, known.throttle)
        return Caller(tenant, Throttle(*rates))


def tenant_salt(tenant: str, salt: str) -> str:
    """The salt of a tenant's prefix cache, which no other tenant can come to have.

    The lengths keep ("a", "bc") and ("ab", "c") apart.
    """
    parts = (tenant.encode(), salt.encode())
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.sha256(framed).hexdigest()


def _key_of(context: grpc.aio.ServicerContext[Any, Any]) -> str:
    values = [v for name, v in context.invocation_metadata() or () if name == _HEADER]
    if not values:
        raise _unauthenticated(f"there is no API key: {_ADVICE}")
    if len(values) > 1:
        raise _unauthenticated(f"there is more than one {_HEADER!r}: {_ADVICE}")
    value = values[0]
    text = value if isinstance(value, str) else value.decode("latin-1")
    scheme, _, key = text.partition(" ")
    if scheme.lower() != "bearer" or not key.strip():
        raise _unauthenticated(f"{_HEADER!r} has another form: {_ADVICE}")
    return key.strip()


def _unauthenticated(message: str) -> SpecdecError:
    return SpecdecError(common_pb2.ERROR_REASON_UNAUTHENTICATED, message)
