"""One completion of a call: its two streams, its output, its statistics."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import structlog

from gateway.commit import Output
from gateway.draft_source import DraftSource
from gateway.draft_stream import Patience
from gateway.peers import DraftPeer, VerifierPeer
from gateway.replicas import Replicas
from gateway.request import Plan
from gateway.rounds import run_rounds
from gateway.speculation import Speculation
from gateway.speculation_settings import SpeculationSettings
from gateway.statistics import Statistics
from gateway.target import Target
from gateway.verifier_session import VerifierSession
from gateway.workload import Workload
from specdec.proposals import needs_distributions
from specdec.v1 import common_pb2, gateway_pb2

_log = structlog.get_logger()
_PIECE_TOKENS = 1024
_KEY_TOKENS = 64
"""Prompts with these in common go to the same replica."""


def sample_seed(seed: int, index: int) -> int:
    """The seed of a sample: the request's own for the first, and hashes of it for the others.

    A hash, because what is drawn under seeds that differ by a number could be related.
    """
    if index == 0:
        return seed
    digest = hashlib.blake2b(f"{seed} {index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@dataclass(frozen=True)
class Call:
    """What all samples of one Generate call share."""

    session_id: str
    request_id: str
    deadline_at: float | None
    """When the client's call ends, by time.monotonic."""
    verifiers: Replicas[VerifierPeer]
    failover_patience: float
    """Seconds to look for a verifier when one has failed."""
    drafts: Replicas[DraftPeer]
    draft_patience: Patience
    workload: Workload
    """What is known of the services and of the drafts of all sessions."""


class Sample:
    """One of the completions of a call. Each has a seed and sessions of its own."""

    def __init__(self, index: int, planned: Plan, target: Target, call: Call) -> None:
        self._index = index
        self._planned = planned
        self._target = target
        self._call = call
        self._output = Output(target.tokenizer, planned.stopping)
        wanted = self._wanted()
        self._statistics = Statistics(wanted.acceptance_rule)
        confident = not needs_distributions(planned.sampling, wanted.acceptance_rule)
        self._speculation = Speculation(
            wanted,
            planned.stopping.max_new_tokens,
            call.workload,
            self._statistics,
            confident=confident,
        )
        self._opening = self._open_message()
        self._key = _cache_key(self._opening)
        self._verifier = VerifierSession(
            call.verifiers,
            target,
            self._opening,
            key=self._key,
            patience=call.failover_patience,
            deadline_at=call.deadline_at,
            request_id=call.request_id,
        )

    async def open(self) -> None:
        """Opens the sessions. Returns when the verifier has the prompt in its cache.

        Raises:
            SpecdecError: the verifier failed.
        """
        await self._verifier.begin()
        await self._open_draft()
        self._statistics.add_verify_time(await self._verifier.open())

    async def run(self) -> AsyncGenerator[gateway_pb2.GenerateResponse]:
        """Generates: chunks, then the completion.

        Raises:
            SpecdecError: the verifier failed.
        """
        if self._opening.logprobs.prompt:
            for piece in _pieces(self._planned.prompt_token_ids, self._verifier.prompt_logprobs):
                yield gateway_pb2.GenerateResponse(index=self._index, prompt_logprobs=piece)
        rounds = run_rounds(self._verifier, self._speculation, self._output, self._statistics)
        async with aclosing(rounds) as chunks:
            async for chunk in chunks:
                yield gateway_pb2.GenerateResponse(index=self._index, chunk=chunk)
        self.close()
        yield gateway_pb2.GenerateResponse(index=self._index, completion=self._completion())

    def close(self) -> None:
        """Ends the sessions, at once and without waiting. May be called again."""
        self._verifier.close()
        self._speculation.close()

    def _wanted(self) -> SpeculationSettings:
        """What the request wants, within what the target can do."""
        wanted = self._planned.speculation
        return wanted if self._target.info.trees else replace(wanted, draft_topk=1)

    def _open_message(self) -> common_pb2.Open:
        planned, wanted = self._planned, self._speculation.wanted
        opening = common_pb2.Open(
            session_id=f"{self._call.session_id}-{self._index}",
            round=1,
            base_length=len(planned.prompt_token_ids),
            prompt_token_ids=planned.prompt_token_ids,
            sampling=planned.sampling,
            acceptance_rule=wanted.acceptance_rule,
            # The last token of a generation is never drafted.
            num_draft_tokens=min(wanted.num_draft_tokens, planned.stopping.max_new_tokens - 1),
            draft_topk=wanted.draft_topk,
            run_ahead=wanted.run_ahead,
            logprobs=planned.logprobs,
            tokenizer_sha256=self._target.info.tokenizer_sha256,
            prefix_cache=planned.prefix_cache,
        )
        opening.sampling.seed = sample_seed(planned.sampling.seed, self._index)
        if self._index > 0 and planned.logprobs is not None:
            # They are the same for all samples, and sent once.
            opening.logprobs.prompt = False
        return opening

    async def _open_draft(self) -> None:
        """Opens the session at a draft, if speculation is on and there is a fitting draft."""
        opening = common_pb2.Open()
        opening.CopyFrom(self._opening)
        opening.ClearField("logprobs")
        source = DraftSource(
            self._call.drafts,
            self._target,
            opening,
            key=self._key,
            patience=self._call.draft_patience,
            deadline_at=self._call.deadline_at,
            request_id=self._call.request_id,
        )
        await self._speculation.open(source, self._planned.stopping.max_new_tokens)

    def _completion(self) -> gateway_pb2.Completion:
        output, speculation = self._output, self._speculation
        completion = gateway_pb2.Completion(
            finish_reason=output.finish_reason,
            usage=gateway_pb2.Usage(
                prompt_tokens=len(self._planned.prompt_token_ids),
                cached_tokens=self._verifier.cached_tokens,
                completion_tokens=output.token_count,
            ),
            seed=self._opening.sampling.seed,
            speculation=self._statistics.to_message(speculation.stale_proposals),
        )
        completion.speculation.draft_cached_tokens = speculation.cached_tokens
        completion.speculation.verifier_resumptions = self._verifier.resumptions
        if isinstance(output.matched, str):
            completion.matched_string = output.matched
        elif output.matched is not None:
            completion.matched_token_id = output.matched
        _log.info(
            "completion",
            sample=self._index,
            finish_reason=gateway_pb2.FinishReason.Name(output.finish_reason),
            prompt_tokens=completion.usage.prompt_tokens,
            completion_tokens=output.token_count,
            rounds=completion.speculation.rounds,
            num_draft_tokens=completion.speculation.num_draft_tokens,
            num_accepted_tokens=completion.speculation.num_accepted_tokens,
            fallback_rounds=completion.speculation.fallback_rounds,
            verifier_resumptions=completion.speculation.verifier_resumptions,
            draft_resumptions=completion.speculation.draft_resumptions,
        )
        _log.debug("speculation", sample=self._index, **speculation.beliefs)
        return completion


def _cache_key(opening: common_pb2.Open) -> bytes:
    """Of what the session may find in a replica's cache: the beginning of its prompt."""
    beginning = array("I", opening.prompt_token_ids[:_KEY_TOKENS]).tobytes()
    return opening.prefix_cache.salt.encode() + b"\0" + beginning


def _pieces(
    token_ids: Sequence[int], logprobs: Sequence[common_pb2.TokenLogprobs]
) -> Iterator[gateway_pb2.PromptLogprobs]:
    """The prompt's log-probabilities in messages that any client's limits let through."""
    for begin in range(0, len(token_ids), _PIECE_TOKENS):
        end = begin + _PIECE_TOKENS
        yield gateway_pb2.PromptLogprobs(
            token_ids=token_ids[begin:end],
            # The first token of the prompt has none.
            logprobs=logprobs[max(begin - 1, 0) : end - 1],
        )
