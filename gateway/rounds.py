"""The round loop: propose, verify, commit."""

from __future__ import annotations

from collections.abc import AsyncGenerator

from gateway.commit import Output
from gateway.speculation import Speculation
from gateway.statistics import Statistics
from gateway.verifier_session import VerifierSession
from specdec.trees import parents_of, walk
from specdec.v1 import draft_pb2, gateway_pb2, verifier_pb2


async def run_rounds(
    verifier: VerifierSession, speculation: Speculation, output: Output, statistics: Statistics
) -> AsyncGenerator[gateway_pb2.Chunk]:
    """Generates until the output is finished. Yields what each round commits.

    The verifier has opened the session already: the target has the prompt before the first proposal
    is waited for, so that a draft is not given up for a long prompt.
    """
    while not output.finished:
        proposal = await speculation.propose()
        verdict, exchange = await verifier.verdict(proposal)
        statistics.add_verify_time(exchange)
        speculation.observe(proposal, verdict, exchange)
        chunk = _commit(output, verdict, proposal)
        if not output.finished:
            await speculation.advance(list(verdict.token_ids), room=output.room)
        yield chunk


def _commit(
    output: Output, verdict: verifier_pb2.Verdict, proposal: draft_pb2.Proposal
) -> gateway_pb2.Chunk:
    """Commits a verdict's tokens one by one. What follows a stop inside the block is discarded."""
    chunk = gateway_pb2.Chunk()
    last = _last_origin(verdict, proposal)
    for index, token_id in enumerate(verdict.token_ids):
        chunk.token_texts.append(output.commit(token_id))
        chunk.token_ids.append(token_id)
        chunk.logprobs.extend(verdict.logprobs[index : index + 1])
        accepted = index < verdict.num_accepted
        chunk.origins.append(gateway_pb2.TOKEN_ORIGIN_ACCEPTED if accepted else last)
        if output.finished:
            break
    chunk.text = "".join(chunk.token_texts)
    return chunk


def _last_origin(
    verdict: verifier_pb2.Verdict, proposal: draft_pb2.Proposal
) -> gateway_pb2.TokenOrigin.ValueType:
    """Of the token that the target adds: something else may have been drafted in its place."""
    if not proposal.token_ids:
        return gateway_pb2.TOKEN_ORIGIN_PLAIN
    parents = parents_of(proposal.parents, len(proposal.token_ids))
    accepted = walk(parents, proposal.token_ids, verdict.token_ids[: verdict.num_accepted])
    if (accepted[-1] if accepted else 0) in parents:
        return gateway_pb2.TOKEN_ORIGIN_CORRECTION
    return gateway_pb2.TOKEN_ORIGIN_BONUS
