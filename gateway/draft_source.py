"""Where a session's draft streams come from."""

from __future__ import annotations

import time
from collections.abc import Sequence

from gateway.breaker import Breaker
from gateway.draft_stream import DraftFailure, DraftStream, Patience
from gateway.peers import DraftPeer
from gateway.replicas import Replicas
from gateway.target import Target
from specdec.v1 import common_pb2


class DraftSource:
    """Opens a session at the draft service, and again after it has failed."""

    def __init__(
        self,
        replicas: Replicas[DraftPeer],
        target: Target,
        opening: common_pb2.Open,
        *,
        key: bytes,
        patience: Patience,
        deadline_at: float | None,
        request_id: str,
    ) -> None:
        """
        Args:
            replicas: of the draft service.
            target: that its drafts must fit.
            opening: the session, with nothing committed.
            key: of what it may find cached.
            patience: with the draft.
            deadline_at: when the client's call ends, by time.monotonic, or None.
            request_id: for the draft service's log.
        """
        self._replicas, self._target, self._key = replicas, target, key
        self._opening = opening
        self._patience = patience
        self._deadline_at = deadline_at
        self._request_id = request_id
        self._peer: DraftPeer | None = None
        self._connection = 0
        """Of the peer, that the session was opened on."""
        self._refusing: set[DraftPeer] = set()
        """Those that this session is not for."""
        self._pause = Breaker()
        """Of this session: it does not send all that was said again and again."""

    @property
    def reason(self) -> str:
        """Why there is no draft, for people."""
        if not self._replicas:
            return "this gateway has no draft"
        ready = self._replicas.ready
        reasons = [peer.misfit(self._target) or peer.breaker.reason for peer in ready]
        return self._pause.reason or "; ".join(filter(None, reasons)) or self._replicas.reason

    def find(self, num_committed: int) -> DraftPeer | None:
        """The replica that would be opened now, or None if there is none that fits.

        Args:
            num_committed: how many tokens there are besides the prompt.
        """
        if not self._pause.lets_in:
            return None
        length = self._opening.base_length + num_committed
        return self._replicas.choose(self._key, lambda peer: self._fits(peer, length))

    def has_room(self, num_committed: int) -> bool:
        """Whether the draft that is open has room for more than so many committed tokens."""
        length = self._opening.base_length + num_committed
        return self._peer is not None and length < self._peer.info.max_context_length

    async def open(
        self,
        peer: DraftPeer,
        token_ids: Sequence[int],
        *,
        rounds: int,
        num_draft_tokens: int,
        costs: common_pb2.DraftCosts,
    ) -> DraftStream:
        """Opens the session at a replica: the first proposal is on its way.

        Args:
            peer: as found.
            token_ids: that were committed.
            rounds: how many rounds have ended.
            num_draft_tokens: the most of a proposal.
            costs: for the first proposal.

        Raises:
            DraftFailure: the stream broke.
        """
        opening = common_pb2.Open()
        opening.CopyFrom(self._opening)
        opening.round += rounds
        opening.base_length += len(token_ids)
        opening.committed_token_ids.extend(token_ids)
        opening.num_draft_tokens = num_draft_tokens
        opening.draft_costs.CopyFrom(costs)
        peer.breaker.tries()
        peer.sessions += 1
        self._peer, self._connection = peer, peer.connection
        stream = DraftStream(
            peer.stub,
            opening,
            effective_vocab_size=self._target.info.effective_vocab_size,
            # One that is taken up half-way has all to read that was said: no round waits for that.
            patience=self._patience._replace(first=0.0) if rounds else self._patience,
            deadline=None if self._deadline_at is None else self._deadline_at - time.monotonic(),
            request_id=self._request_id,
        )
        try:
            await stream.open()
        except BaseException:
            # A cancelled one, too, would live on.
            stream.close()
            raise
        return stream

    def succeeded(self) -> None:
        """The draft made a proposal."""
        self._pause.succeeded()
        if self._peer is not None:
            self._peer.breaker.succeeded()

    def failed(self, failure: DraftFailure) -> None:
        """The draft failed the session, which is to be closed."""
        peer = self._peer
        if peer is None:
            return
        self._pause.failed(str(failure))
        if failure.innocent:
            self._refusing.add(peer)
        # Others may have noticed before, and it may be well again.
        elif peer.connection == self._connection:
            peer.breaker.failed(str(failure))
            if failure.lost:
                peer.lost()

    def close(self) -> None:
        """The session at the draft has ended."""
        if self._peer is not None:
            self._peer.sessions -= 1
        self._peer = None

    def _fits(self, peer: DraftPeer, length: int) -> bool:
        return (
            peer not in self._refusing
            and peer.breaker.lets_in
            and peer.misfit(self._target) is None
            and length < peer.info.max_context_length
        )
