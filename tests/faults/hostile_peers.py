"""A draft and a verifier that lie to the gateway: in every field, and in bytes."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any, TypeVar

import grpc
from google.protobuf.message import Message

from specdec.v1 import common_pb2, draft_pb2, verifier_pb2, verifier_pb2_grpc
from tests.faults.attack import VOCABULARY, spoiled

M = TypeVar("M", bound=Message)
_CODES = [
    *(grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL, grpc.StatusCode.RESOURCE_EXHAUSTED),
    *(grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.DATA_LOSS),
    *(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNAUTHENTICATED),
]


class _Liar(ABC):
    """What both have in common: a server that can be started anew on its port.

    How it lies in a session follows from the session's salt, so that it does it again.
    """

    service = ""
    loses_messages = False

    def __init__(self, source: random.Random, info: common_pb2.ModelInfo) -> None:
        self.sent = 0
        """How many messages of sessions."""
        self.lies = True
        self._source = source
        self._sources: dict[str, random.Random] = {}
        self._info = info
        self._server: grpc.aio.Server | None = None
        self._port = 0

    async def restart(self) -> str:
        """Breaks all connections. Returns the address, which stays the same."""
        await self.stop()
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(self.service, self._handlers()),)
        )
        self._port = self._server.add_insecure_port(f"127.0.0.1:{self._port}")
        await self._server.start()
        return f"127.0.0.1:{self._port}"

    async def stop(self) -> None:
        if self._server is not None:
            await self._server.stop(0)

    @abstractmethod
    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        """Its methods."""

    def _of(self, opening: common_pb2.Open) -> random.Random:
        """By what it lies in a session. One that is opened again is lied to in another way."""
        salt = opening.prefix_cache.salt
        return self._sources.setdefault(salt, random.Random(salt))

    async def _said(
        self, source: random.Random, responses: list[Any], context: Any
    ) -> AsyncIterator[bytes]:
        """The responses of a session, some of them spoiled, lost, twice or in another order."""
        if source.random() < 0.1:
            source.shuffle(responses)
        for response in responses:
            fate = source.random() if self.lies else 1.0
            if fate < 0.02:
                await context.abort(source.choice(_CODES), "a reason of its own")
            if fate < 0.04 and self.loses_messages:
                continue
            for _ in range(2 if fate < 0.08 else 1):
                self.sent += 1
                yield self._spoiled(source, response)

    def _spoiled(self, source: random.Random, message: Message) -> bytes:
        others = [self._info.SerializeToString()]
        return spoiled(source, message, others, 0.25 if self.lies else 0.0)


class LyingDraft(_Liar):
    """A draft service."""

    service = "specdec.v1.DraftService"
    loses_messages = True

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(self._get_model_info),
            "Draft": grpc.stream_stream_rpc_method_handler(
                self._draft, request_deserializer=draft_pb2.DraftRequest.FromString
            ),
        }

    async def _get_model_info(self, request: bytes, context: Any) -> bytes:
        response = draft_pb2.DraftServiceGetModelInfoResponse(model_info=self._info)
        return self._spoiled(self._source, response)

    async def _draft(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        opening, length, source = common_pb2.Open(), 0, self._source
        async for request in requests:
            responses = []
            if request.HasField("open"):
                source = self._of(request.open)
                opening, length = request.open, request.open.base_length
                number, limit = opening.round, opening.num_draft_tokens
                opened = common_pb2.Opened(round=number, base_length=length)
                responses.append(draft_pb2.DraftResponse(opened=opened))
            else:
                length += len(request.advance.token_ids)
                number, limit = request.advance.round, request.advance.num_draft_tokens
            for ahead in (0, 1) if source.random() < 0.3 else (0,):
                presumed = source.sample(range(VOCABULARY), ahead)
                proposal = _proposal(source, opening, limit, presumed)
                proposal.round, proposal.base_length = number + ahead, length + ahead
                responses.append(draft_pb2.DraftResponse(proposal=proposal))
            async for data in self._said(source, responses, context):
                yield data


class LyingVerifier(_Liar):
    """A verifier service. Its target says the same whatever came before."""

    service = "specdec.v1.VerifierService"

    def __init__(self, source: random.Random, info: common_pb2.ModelInfo) -> None:
        super().__init__(source, info)
        self.lies_about_itself = False
        self._tokenizer: list[verifier_pb2.GetTokenizerResponse] = []

    async def learn(self, real: verifier_pb2_grpc.VerifierServiceStub) -> None:
        """Takes the tokenizer from a real one."""
        request = verifier_pb2.GetTokenizerRequest()
        self._tokenizer = [part async for part in real.GetTokenizer(request)]

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler[Any, Any]]:
        return {
            "GetModelInfo": grpc.unary_unary_rpc_method_handler(self._get_model_info),
            "GetTokenizer": grpc.unary_stream_rpc_method_handler(self._get_tokenizer),
            "Verify": grpc.stream_stream_rpc_method_handler(
                self._verify, request_deserializer=verifier_pb2.VerifyRequest.FromString
            ),
        }

    async def _get_model_info(self, request: bytes, context: Any) -> bytes:
        response = verifier_pb2.VerifierServiceGetModelInfoResponse(model_info=self._info)
        return self._about_itself(response)

    async def _get_tokenizer(self, request: bytes, context: Any) -> AsyncIterator[bytes]:
        for part in self._tokenizer:
            yield self._about_itself(part)

    def _about_itself(self, message: Message) -> bytes:
        return spoiled(self._source, message, [b"{}"], 0.6 if self.lies_about_itself else 0.0)

    async def _verify(self, requests: Any, context: Any) -> AsyncIterator[bytes]:
        source = self._source
        async for request in requests:
            if request.HasField("open"):
                opening = request.open
                source = self._of(opening)
                opened = common_pb2.Opened(round=opening.round, base_length=opening.base_length)
                response = verifier_pb2.VerifyResponse(opened=opened)
            else:
                asked = request.candidates
                token_id = 1 + asked.base_length % (VOCABULARY - 1)
                stands = list(asked.token_ids[:1]) == [token_id]
                verdict = verifier_pb2.Verdict(
                    round=asked.round,
                    base_length=asked.base_length,
                    num_accepted=int(stands),
                    token_ids=[token_id, token_id % (VOCABULARY - 1) + 1][: 1 + stands],
                    timings=common_pb2.Timings(compute_us=5),
                    pass_rows=len(asked.token_ids) + 1,
                    pass_sessions=1,
                )
                response = verifier_pb2.VerifyResponse(verdict=verdict)
            async for data in self._said(source, [response], context):
                yield data


def _proposal(
    source: random.Random, opening: common_pb2.Open, limit: int, presumed: list[int]
) -> draft_pb2.Proposal:
    token_ids = source.sample(range(VOCABULARY), source.randint(0, limit))
    sampled = opening.sampling.temperature > 0.0 and opening.acceptance_rule in (1, 2)
    topk = 1 if sampled else max(opening.draft_topk, 1)
    parents: list[int] = []
    for place in range(len(token_ids) if topk > 1 else 0):
        free = [p for p in range(place + 1) if parents.count(p) < topk]
        parents.append(source.choice(free))
    return draft_pb2.Proposal(
        token_ids=token_ids,
        parents=parents,
        distributions=[
            common_pb2.SparseDistribution(token_ids=[t, t ^ 1], probabilities=[0.7, 0.3])
            for t in (token_ids if sampled else [])
        ],
        probabilities=[0.5] * len(token_ids),
        temperature=opening.sampling.temperature,
        timings=common_pb2.Timings(queue_us=1, compute_us=1),
        presumed_token_ids=presumed,
    )
