"""How a client reaches a service: in plaintext or by TLS, and what to say when it does not."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc
import structlog

from specdec.tls import Pems, Watched, channel_credentials

_log = structlog.get_logger()

# The services are on this machine or in this cluster. Without the option grpc sends even what is
# for 127.0.0.1 to the proxy that http_proxy names.
_OPTIONS = (("grpc.enable_http_proxy", 0),)
_LOOK_SECONDS = 2.0
_CONNECT_SECONDS = 10.0
_NOT_TRUSTED = re.compile(r"CERTIFICATE_VERIFY_FAILED(?:: ([a-z][\w ,-]*))?")


@dataclass(frozen=True)
class ClientTls:
    """How a client speaks TLS."""

    files: Watched
    name: str | None = None
    """What the server's certificate must be for. None is the host that is connected to."""


class _ApiKey(grpc.aio.UnaryStreamClientInterceptor):
    """Sends an API key with every call."""

    def __init__(self, key: str) -> None:
        self._header = ("authorization", f"Bearer {key}")

    async def intercept_unary_stream(
        self, continuation: Any, client_call_details: grpc.aio.ClientCallDetails, request: Any
    ) -> Any:
        asked = client_call_details
        details = grpc.aio.ClientCallDetails(
            method=asked.method,
            timeout=asked.timeout,
            metadata=grpc.aio.Metadata(*(asked.metadata or ()), self._header),
            credentials=asked.credentials,
            wait_for_ready=asked.wait_for_ready,
        )
        return await continuation(details, request)


def open_channel(
    address: str,
    tls: ClientTls | None = None,
    options: Sequence[tuple[str, Any]] = (),
    api_key: str | None = None,
) -> grpc.aio.Channel:
    """A channel to a service, to be closed by the caller.

    Args:
        address: host:port.
        tls: how to speak TLS. None is plaintext.
        options: of the channel, besides those that all have.
        api_key: of the gateway, for calls that stream their answer.
    """
    interceptors = [] if api_key is None else [_ApiKey(api_key)]
    options = (*_OPTIONS, *options)
    if tls is None:
        return grpc.aio.insecure_channel(address, options, interceptors=interceptors)
    if tls.name is not None:
        options = (*options, ("grpc.ssl_target_name_override", tls.name))
    credentials = channel_credentials(tls.files.latest())
    return grpc.aio.secure_channel(address, credentials, options, interceptors=interceptors)


class RenewedChannel:
    """A channel for as long as the process lives, with the certificates that its files hold.

    The library reads a client's certificate once a channel. So there is a new channel when the
    files change, and calls that run on the old one go on there until they end.
    """

    def __init__(
        self, address: str, tls: ClientTls | None, options: Sequence[tuple[str, Any]]
    ) -> None:
        """The arguments are those of `open_channel`."""
        self._address, self._tls, self._options = address, tls, options
        self._used: Pems | None = None if tls is None else tls.files.latest()
        self.current = open_channel(address, tls, options)
        """For new calls. To be asked for anew at every call, and not to be kept."""
        self._replaced = asyncio.Event()

    async def until_broken(self) -> None:
        """Waits until the connection that there is now has ended. A replaced one has not."""
        broken = False
        while not broken:
            self._replaced.clear()
            watch = asyncio.create_task(_until_not_ready(self.current))
            replaced = asyncio.create_task(self._replaced.wait())
            try:
                await asyncio.wait({watch, replaced}, return_when=asyncio.FIRST_COMPLETED)
                broken = not replaced.done()
            finally:
                watch.cancel()
                replaced.cancel()

    async def stay_renewed(self) -> None:
        """Looks at the files every few seconds, and replaces the channel when they change.

        A new one that gets no connection does not replace an old one that has one.
        """
        while self._tls is not None:
            await asyncio.sleep(_LOOK_SECONDS)
            latest = await asyncio.to_thread(self._tls.files.latest)
            if latest is not self._used and await self._renew():
                self._used = latest

    async def close(self) -> None:
        """Closes the channel, and ends the calls on it."""
        await self.current.close()

    async def _renew(self) -> bool:
        """Whether the channel was replaced."""
        channel = open_channel(self._address, self._tls, self._options)
        if not await _connects(channel) and _is_ready(self.current):
            _log.warning("no connection with the new certificates", address=self._address)
            await channel.close()
            return False
        # The old channel is let go and not closed: that ends it as soon as no call is on it.
        self.current = channel
        self._replaced.set()
        _log.info("connected with new certificates", address=self._address)
        return True


def _is_ready(channel: grpc.aio.Channel) -> bool:
    return channel.get_state() is grpc.ChannelConnectivity.READY


async def _until_not_ready(channel: grpc.aio.Channel) -> None:
    await channel.wait_for_state_change(grpc.ChannelConnectivity.READY)


async def _connects(channel: grpc.aio.Channel) -> bool:
    try:
        async with asyncio.timeout(_CONNECT_SECONDS):
            await channel.channel_ready()
    except TimeoutError:
        return False
    return True


def tls_trouble(error: grpc.aio.AioRpcError) -> str | None:
    """What is wrong with TLS between the two sides, if that is why a call failed."""
    if error.code() is not grpc.StatusCode.UNAVAILABLE:
        return None
    details = error.details() or ""
    if found := _NOT_TRUSTED.search(details):
        return f"its certificate is not trusted ({(found[1] or 'not of the CA given').strip()})"
    if "Hostname Verification Check failed" in details or "Peer name" in details:
        return "its certificate is for another name than the one it was called by"
    if "WRONG_VERSION_NUMBER" in details:
        return "it speaks no TLS"
    if "ALERT" in details:
        return "it refused the certificate of this side, or wants one"
    if "failed to connect" in details and re.search("Socket closed|Connection reset", details):
        return "it ends new connections at once: it wants TLS, or another certificate of this side"
    return None
