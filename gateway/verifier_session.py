"""A session of the target that outlives the replica that it runs on."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import tenacity

from gateway.peers import VerifierPeer
from gateway.replicas import Replicas
from gateway.statistics import Exchange
from gateway.target import Target
from gateway.verify_stream import VerifyStream
from specdec.errors import SpecdecError
from specdec.v1 import common_pb2, draft_pb2, verifier_pb2

T = TypeVar("T")
_log = structlog.get_logger()

_OPENING_SECONDS = 2.0
"""For which a session that has not begun looks for a verifier: it may be just restarting."""
_MOST_BREAKS = 3
"""Streams that may break between two verdicts once they were open: the session may be the cause."""
_FAULTS = (
    common_pb2.ERROR_REASON_MODEL_FAILURE,
    common_pb2.ERROR_REASON_CONTRACT_VIOLATION,
    common_pb2.ERROR_REASON_TOKENIZER_MISMATCH,
)
"""What a replica does wrong, and another or a new one may do right."""


class VerifierSession:
    """A session at the verifiers.

    When its stream breaks it is opened again, there or at another replica, with the prompt and what
    was committed. The verdict that was under way is asked for again: nobody has seen it, and the
    same candidates give the same verdict, as noise is a function of seed and position.
    """

    def __init__(
        self,
        replicas: Replicas[VerifierPeer],
        target: Target,
        opening: common_pb2.Open,
        *,
        key: bytes,
        patience: float,
        deadline_at: float | None,
        request_id: str,
    ) -> None:
        """
        Args:
            replicas: of the verifier service.
            target: that its replica must have.
            opening: the session, with nothing committed.
            key: of what it may find cached.
            patience: seconds to look for a replica once a stream has broken.
            deadline_at: when the client's call ends, by time.monotonic, or None.
            request_id: for the verifier service's log.
        """
        self.cached_tokens = 0
        self.prompt_logprobs: list[common_pb2.TokenLogprobs] = []
        self.resumptions = 0
        """How often it was opened again."""
        self._replicas, self._target, self._key = replicas, target, key
        self._patience = patience
        self._deadline_at = deadline_at
        self._request_id = request_id
        # As it is now: it grows with what is committed.
        self._opening = common_pb2.Open()
        self._opening.CopyFrom(opening)
        self._peer: VerifierPeer | None = None
        self._connection = 0
        """Of the peer, that the stream was opened on."""
        self._stream: VerifyStream | None = None
        self._is_open = False
        """Whether the stream has the context in its cache."""
        self._has_begun = False
        """Whether any stream had."""
        self._prefilled: list[Exchange] = []
        """That opened streams and are not counted yet."""
        self._failing_since: float | None = None
        self._breaks = 0
        self._tried: set[VerifierPeer] = set()
        """Those that failed since the last verdict, as all of these."""

    async def begin(self) -> None:
        """Has a verifier begin with the prompt. What fails is seen to by `open`."""
        with contextlib.suppress(SpecdecError):
            await self._begin()

    async def open(self) -> Exchange:
        """Waits until the prompt is in a verifier's cache.

        Raises:
            SpecdecError: no verifier can have the session.
        """

        async def nothing(_: VerifyStream) -> None:
            return None

        await self._surely(nothing, _OPENING_SECONDS)
        return self._prefilled.pop()

    async def verdict(self, proposal: draft_pb2.Proposal) -> tuple[verifier_pb2.Verdict, Exchange]:
        """Has a proposal verified, and moves on to the next round.

        Raises:
            SpecdecError: no verifier can go on with the session.
        """

        async def verify(stream: VerifyStream) -> tuple[verifier_pb2.Verdict, Exchange]:
            return await stream.verdict(proposal)

        verdict, exchange = await self._surely(verify, self._patience)
        assert self._peer is not None
        self._peer.breaker.succeeded()
        self._opening.round += 1
        self._opening.base_length += len(verdict.token_ids)
        self._opening.committed_token_ids.extend(verdict.token_ids)
        while self._prefilled:
            exchange += self._prefilled.pop()
        return verdict, exchange

    def close(self) -> None:
        """Ends the session, at once and without waiting. May be called again."""
        if self._stream is not None:
            self._stream.close()
        if self._peer is not None:
            self._peer.sessions -= 1
        self._stream = self._peer = None

    async def _surely(self, step: Callable[[VerifyStream], Awaitable[T]], patience: float) -> T:
        """Does a step on the stream, or on the one that replaces it if it breaks."""

        def is_enough(_: tenacity.RetryCallState) -> bool:
            assert self._failing_since is not None
            return not self._untried and time.monotonic() - self._failing_since >= patience

        attempts = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(self._can_go_on),
            wait=tenacity.wait_random_exponential(multiplier=0.05, max=1.0),
            stop=is_enough,
            reraise=True,
        )
        async for attempt in attempts:
            with attempt:
                try:
                    result = await step(await self._opened_stream())
                except SpecdecError as error:
                    self._lose(error)
                    raise
        self._failing_since, self._breaks = None, 0
        self._tried.clear()
        return result

    async def _opened_stream(self) -> VerifyStream:
        """The stream, with the session's context in the verifier's cache."""
        if self._stream is None:
            await self._begin()
        stream = self._stream
        assert stream is not None
        if self._is_open:
            return stream
        self._prefilled.append(await stream.opened())
        self._is_open = True
        if self._has_begun:
            self.resumptions += 1
            _log.info("session resumed", round=self._opening.round)
            return stream
        self._has_begun = True
        self.cached_tokens = stream.cached_tokens
        self.prompt_logprobs = stream.prompt_logprobs
        if self._opening.HasField("logprobs"):
            # They are told once.
            self._opening.logprobs.prompt = False
        return stream

    async def _begin(self) -> None:
        """Opens a stream at a replica."""
        peer = self._replicas.choose(self._key, self._serves, self._tried)
        if peer is None:
            raise SpecdecError(
                common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE,
                f"no verifier: {self._replicas.reason or 'none has the model any more'}",
            )
        deadline = None
        if self._deadline_at is not None:
            deadline = self._deadline_at - time.monotonic()
        peer.breaker.tries()
        peer.sessions += 1
        self._peer, self._connection, self._is_open = peer, peer.connection, False
        opening = common_pb2.Open()
        opening.CopyFrom(self._opening)
        self._stream = VerifyStream(
            peer.stub,
            opening,
            effective_vocab_size=self._target.info.effective_vocab_size,
            deadline=deadline,
            request_id=self._request_id,
        )
        peer.streams.add(self._stream)
        await self._stream.open()

    def _lose(self, error: SpecdecError) -> None:
        """Ends the stream that failed, and says so to those who choose replicas."""
        peer, was_open = self._peer, self._is_open
        self.close()
        self._is_open = False
        if self._failing_since is None:
            self._failing_since = time.monotonic()
        is_full = error.reason == common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED
        is_lost = error.reason == common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE
        is_at_fault = error.reason in _FAULTS
        if peer is None or not (is_full or is_lost or is_at_fault):
            return
        self._breaks += is_at_fault or (is_lost and was_open)
        self._tried.add(peer)
        _log.warning("verifier failed", address=peer.address, error=str(error))
        # Others may have noticed before, and it may be well again.
        if not is_full and peer.connection == self._connection:
            peer.breaker.failed(str(error))
            if is_lost:
                peer.lost()
            else:
                peer.doubted()

    def _can_go_on(self, error: BaseException) -> bool:
        """Whether the session is worth another attempt."""
        if not isinstance(error, SpecdecError) or self._breaks >= _MOST_BREAKS:
            return False
        if error.reason == common_pb2.ERROR_REASON_RESOURCE_EXHAUSTED:
            # A session that has begun waits until there is room for it again.
            return self._has_begun or self._untried
        if error.reason == common_pb2.ERROR_REASON_INVALID_REQUEST:
            # A replica that was started with other limits.
            return self._has_begun and self._untried
        return error.reason in (common_pb2.ERROR_REASON_VERIFIER_UNAVAILABLE, *_FAULTS)

    @property
    def _untried(self) -> bool:
        """Whether there is a replica that has not failed yet."""
        return any(p not in self._tried and self._serves(p) for p in self._replicas.ready)

    def _serves(self, peer: VerifierPeer) -> bool:
        return peer.serves(self._target)
