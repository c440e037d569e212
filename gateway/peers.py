"""The gateway's connections to the model services, and the handshake with each.

Connecting goes on in the background for as long as the gateway lives: a service may start later,
and when one of its streams breaks the handshake is made anew, because what comes back may be
another process with another model.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import grpc
import structlog
import tenacity
from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate
from specdec.errors import describe
from specdec.serving import MAX_MESSAGE_BYTES
from specdec.sessions import PROTOCOL_VERSION
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

_log = structlog.get_logger()

_CALL_SECONDS = 10.0
_QUIET_SECONDS = 10.0
_CHANNEL_OPTIONS = (
    # Services are inside one network: a proxy for the web would not know them.
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # A peer that restarts is found again within a second or two, not after minutes of backoff.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 2_000),
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
)


class PeerState(Enum):
    """Where the handshake with a peer stands."""

    CONNECTING = auto()
    READY = auto()
    REFUSED = auto()
    """The peer answers but does not fit."""


class Refused(Exception):
    """A peer does not fit. The message says why."""


@dataclass(frozen=True)
class Target:
    """What the gateway knows of the target model."""

    info: common_pb2.ModelInfo
    tokenizer: Tokenizer
    chat_template: ChatTemplate


class Peer(ABC):
    """One model service: its channel, and the state of the handshake."""

    name = "peer"

    def __init__(self, address: str, on_change: Callable[[], None]) -> None:
        """`on_change` is called whenever the state changes."""
        self.state = PeerState.CONNECTING
        self.reason = f"not connected to {address} yet"
        """Why the peer is not ready, for people."""
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, _CHANNEL_OPTIONS)
        self._on_change = on_change
        self._lost = asyncio.Event()
        self._complained = False

    @abstractmethod
    async def _handshake(self) -> None:
        """One attempt. Raises AioRpcError to be tried again, Refused if the peer does not fit."""

    async def stay_connected(self) -> None:
        """Makes the handshake, and makes it anew whenever `lost` was called, until cancelled."""
        while True:
            await self._shake_hands()
            self._lost.clear()
            with contextlib.suppress(TimeoutError):
                # One that does not fit may be replaced without its connection being seen to break.
                patience = _CALL_SECONDS if self.state is PeerState.REFUSED else None
                await asyncio.wait_for(self._until_lost(), patience)
                self._set(PeerState.CONNECTING, f"lost {self._address}, reconnecting")

    async def close(self) -> None:
        """Closes the channel, and with it every stream."""
        await self._channel.close()

    async def _until_lost(self) -> None:
        """Waits until `lost` is called or the connection breaks: what answers then may be new."""
        told = asyncio.create_task(self._lost.wait())
        broken = asyncio.create_task(
            self._channel.wait_for_state_change(grpc.ChannelConnectivity.READY)
        )
        try:
            await asyncio.wait({told, broken}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            told.cancel()
            broken.cancel()

    def lost(self) -> None:
        """Says that a call failed in a way that a restart of the peer would explain."""
        self._lost.set()

    async def _shake_hands(self) -> None:
        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(grpc.aio.AioRpcError),
            wait=tenacity.wait_random_exponential(multiplier=0.1, max=0.5),
            before_sleep=self._explain,
        )
        try:
            await attempts(self._handshake)
        except Refused as refusal:
            self._set(PeerState.REFUSED, str(refusal))
        except Exception as error:
            # What it sent cannot be used, for example a tokenizer of a newer format.
            _log.exception("handshake failed", peer=self.name)
            self._set(PeerState.REFUSED, f"{type(error).__name__}: {error}")
        else:
            self._set(PeerState.READY, "")

    def _explain(self, retry: tenacity.RetryCallState) -> None:
        error = retry.outcome.exception() if retry.outcome else None
        if not isinstance(error, grpc.aio.AioRpcError):
            return
        reason = f"{self._address}: {describe(error)}"
        # Services start in any order: the first seconds without a peer are nothing to report.
        if (retry.seconds_since_start or 0.0) > _QUIET_SECONDS and not self._complained:
            self._complained = True
            _log.warning("still connecting", peer=self.name, error=reason)
        self.reason = reason

    def _set(self, state: PeerState, reason: str) -> None:
        if (state, reason) == (self.state, self.reason):
            return
        self.state, self.reason, self._complained = state, reason, False
        log = _log.warning if state is PeerState.REFUSED else _log.info
        log("peer", peer=self.name, address=self._address, state=state.name, reason=reason)
        self._on_change()


class VerifierPeer(Peer):
    """The verifier service. `target` is set once it was ready for the first time."""

    name = "verifier"
    target: Target | None = None

    @property
    def stub(self) -> verifier_pb2_grpc.VerifierServiceStub:
        """A stub on the peer's channel."""
        return verifier_pb2_grpc.VerifierServiceStub(self._channel)

    async def _handshake(self) -> None:
        response = await self.stub.GetModelInfo(
            verifier_pb2.VerifierServiceGetModelInfoRequest(), timeout=_CALL_SECONDS
        )
        info = response.model_info
        _check_protocol(info)
        known = self.target
        if known is None or known.info.tokenizer_sha256 != info.tokenizer_sha256:
            tokenizer, template = await self._fetch_tokenizer()
            self.target = Target(info, tokenizer, template)
        else:
            self.target = Target(info, known.tokenizer, known.chat_template)

    async def _fetch_tokenizer(self) -> tuple[Tokenizer, ChatTemplate]:
        header, content = verifier_pb2.TokenizerHeader(), bytearray()
        call = self.stub.GetTokenizer(verifier_pb2.GetTokenizerRequest(), timeout=6 * _CALL_SECONDS)
        try:
            async for part in call:
                header.MergeFrom(part.header)
                content += part.content
        finally:
            call.cancel()
        if hashlib.sha256(content).hexdigest() != header.content_sha256:
            raise Refused("the tokenizer that it sent does not have the SHA-256 that it stated")
        tokenizer = await asyncio.to_thread(Tokenizer.from_str, content.decode())
        return tokenizer, ChatTemplate(header.chat_template, header.special_tokens)


class DraftPeer(Peer):
    """The draft service, which is compared with the target before it is used."""

    name = "draft"

    def __init__(self, address: str, on_change: Callable[[], None]) -> None:
        super().__init__(address, on_change)
        self.info = common_pb2.ModelInfo()

    @property
    def stub(self) -> draft_pb2_grpc.DraftServiceStub:
        """A stub on the peer's channel."""
        return draft_pb2_grpc.DraftServiceStub(self._channel)

    def misfit(self, target: Target) -> str | None:
        """Why the draft cannot be used for `target`, or None if it can."""
        if self.state is not PeerState.READY:
            return self.reason
        if self.info.any_tokenizer:
            return None
        if self.info.tokenizer_sha256 != target.info.tokenizer_sha256:
            return (
                f"TOKENIZER_MISMATCH: the draft's token table is {self.info.tokenizer_sha256}, "
                f"the target's is {target.info.tokenizer_sha256}"
            )
        return None

    async def _handshake(self) -> None:
        response = await self.stub.GetModelInfo(
            draft_pb2.DraftServiceGetModelInfoRequest(), timeout=_CALL_SECONDS
        )
        _check_protocol(response.model_info)
        self.info = response.model_info


def _check_protocol(info: common_pb2.ModelInfo) -> None:
    if info.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            f"it speaks version {info.protocol_version} of the protocol, this gateway speaks "
            f"version {PROTOCOL_VERSION}"
        )
