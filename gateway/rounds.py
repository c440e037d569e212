"""The round loop: propose, verify, commit."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

import structlog

from gateway.commit import Output
from gateway.draft_stream import DraftFailure, DraftStream
from gateway.statistics import Statistics
from gateway.verify_stream import VerifyStream
from specdec.v1 import draft_pb2, gateway_pb2, verifier_pb2

_log = structlog.get_logger()
_NOTHING = draft_pb2.Proposal()


@dataclass
class Speculation:
    """Where a session's proposals come from. Without a draft every round is plain decoding."""

    num_draft_tokens: int
    """K, as asked for. 0 turns speculation off."""
    draft: DraftStream | None = None
    unavailable: str = ""
    """Why there is no draft, if there should be one."""
    on_lost: Callable[[], None] = lambda: None
    """Told when the draft service may be gone."""
    stale_proposals: int = 0
    """Those of a draft that was closed."""
    cached_tokens: int = 0
    """How many tokens of the prompt a draft that was closed had cached already."""

    async def propose(self, num_draft_tokens: int, statistics: Statistics) -> draft_pb2.Proposal:
        """The next proposal, or an empty one: a draft's failure never reaches the client."""
        if num_draft_tokens == 0:
            return _NOTHING
        if self.draft is not None:
            try:
                proposal, exchange = await self.draft.proposal(num_draft_tokens)
            except DraftFailure as failure:
                self.give_up(failure)
            else:
                statistics.add_proposal(exchange)
                if not proposal.token_ids:
                    statistics.add_fallback("the draft proposed nothing")
                return proposal
        statistics.add_fallback(self.unavailable)
        return _NOTHING

    async def advance(self, token_ids: list[int], num_draft_tokens: int) -> None:
        """Tells the draft what was committed, so that it works on the next proposal."""
        if self.draft is None or num_draft_tokens == 0:
            return
        try:
            await self.draft.advance(token_ids, num_draft_tokens)
        except DraftFailure as failure:
            self.give_up(failure)

    def give_up(self, failure: DraftFailure) -> None:
        """Goes on without the draft."""
        self.unavailable = str(failure)
        _log.warning("draft given up", reason=self.unavailable)
        self.close()
        if failure.lost:
            self.on_lost()

    def close(self) -> None:
        """Ends the session at the draft, if there is one."""
        if self.draft is not None:
            self.stale_proposals += self.draft.stale_proposals
            self.cached_tokens = self.draft.cached_tokens
            self.draft.close()
            self.draft = None


async def run_rounds(
    verifier: VerifyStream, speculation: Speculation, output: Output, statistics: Statistics
) -> AsyncGenerator[gateway_pb2.Chunk]:
    """Generates until the output is finished. Yields what each round commits.

    The verifier has opened the session already: the target has the prompt before the first proposal
    is waited for, so that a draft is not given up for a long prompt.
    """
    while not output.finished:
        # A round commits one token more than it has drafted, and none past the limit.
        k = _clamp(speculation.num_draft_tokens, output)
        proposal = await speculation.propose(k, statistics)
        verdict, exchange = await verifier.verdict(proposal)
        statistics.add_round(len(proposal.token_ids), verdict.num_accepted, exchange)
        chunk = _commit(output, verdict, len(proposal.token_ids))
        if not output.finished:
            await speculation.advance(
                list(verdict.token_ids), _clamp(speculation.num_draft_tokens, output)
            )
        yield chunk


def _clamp(num_draft_tokens: int, output: Output) -> int:
    return min(num_draft_tokens, output.stopping.max_new_tokens - output.token_count - 1)


def _commit(output: Output, verdict: verifier_pb2.Verdict, num_drafted: int) -> gateway_pb2.Chunk:
    """Commits a verdict's tokens one by one. What follows a stop inside the block is discarded."""
    chunk = gateway_pb2.Chunk()
    for index, token_id in enumerate(verdict.token_ids):
        chunk.token_texts.append(output.commit(token_id))
        chunk.token_ids.append(token_id)
        chunk.logprobs.extend(verdict.logprobs[index : index + 1])
        chunk.origins.append(_origin(index, verdict.num_accepted, num_drafted))
        if output.finished:
            break
    chunk.text = "".join(chunk.token_texts)
    return chunk


def _origin(index: int, num_accepted: int, num_drafted: int) -> gateway_pb2.TokenOrigin.ValueType:
    if num_drafted == 0:
        return gateway_pb2.TOKEN_ORIGIN_PLAIN
    if index < num_accepted:
        return gateway_pb2.TOKEN_ORIGIN_ACCEPTED
    if num_accepted == num_drafted:
        return gateway_pb2.TOKEN_ORIGIN_BONUS
    return gateway_pb2.TOKEN_ORIGIN_CORRECTION
