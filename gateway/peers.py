"""The two kinds of model services that the gateway is connected to."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable

from tokenizers import Tokenizer

from gateway.chat_template import ChatTemplate
from gateway.peer import Peer, PeerState, Refused
from gateway.target import Target
from specdec.channels import ClientTls
from specdec.sessions import PROTOCOL_VERSION
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    verifier_pb2,
    verifier_pb2_grpc,
)

_TOKENIZER_SECONDS = 60.0


class VerifierPeer(Peer):
    """A verifier service. `target` is set once it was ready for the first time."""

    name = "verifier"

    def __init__(
        self,
        address: str,
        silence: float,
        on_change: Callable[[], None],
        tokenizers: dict[str, Target],
        tls: ClientTls | None = None,
    ) -> None:
        """`tokenizers`: the targets that are known by the SHA-256 of their token tables."""
        super().__init__(address, silence, on_change, tls)
        self.target: Target | None = None
        self._tokenizers = tokenizers

    def serves(self, target: Target) -> bool:
        """Whether this is the target that it has: a session can then be taken up by it."""
        return self.target is not None and self.target.serves(target)

    @property
    def stub(self) -> verifier_pb2_grpc.VerifierServiceStub:
        """A stub on the peer's channel."""
        return verifier_pb2_grpc.VerifierServiceStub(self._channel.current)

    async def _handshake(self) -> None:
        response = await self.stub.GetModelInfo(
            verifier_pb2.VerifierServiceGetModelInfoRequest(), timeout=2 * self._silence
        )
        info = response.model_info
        _check_protocol(info)
        known = self._tokenizers.get(info.tokenizer_sha256)
        if known is None:
            tokenizer, template = await self._fetch_tokenizer()
            self.target = Target(info, tokenizer, template)
            self._tokenizers[info.tokenizer_sha256] = self.target
        else:
            self.target = Target(info, known.tokenizer, known.chat_template)

    async def _fetch_tokenizer(self) -> tuple[Tokenizer, ChatTemplate]:
        header, content = verifier_pb2.TokenizerHeader(), bytearray()
        call = self.stub.GetTokenizer(
            verifier_pb2.GetTokenizerRequest(), timeout=_TOKENIZER_SECONDS
        )
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
    """A draft service, which is compared with the target before it is used."""

    name = "draft"
    info = common_pb2.ModelInfo()

    @property
    def stub(self) -> draft_pb2_grpc.DraftServiceStub:
        """A stub on the peer's channel."""
        return draft_pb2_grpc.DraftServiceStub(self._channel.current)

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
            draft_pb2.DraftServiceGetModelInfoRequest(), timeout=2 * self._silence
        )
        _check_protocol(response.model_info)
        self.info = response.model_info


def _check_protocol(info: common_pb2.ModelInfo) -> None:
    if info.protocol_version != PROTOCOL_VERSION:
        raise Refused(
            f"it speaks version {info.protocol_version} of the protocol, this gateway speaks "
            f"version {PROTOCOL_VERSION}"
        )
