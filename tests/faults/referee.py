"""What the protos' comments say of a session's messages, written down a second time.

The services' own checks are in `specdec.sessions` and what that uses; none of it is used here, so
that a check which is lost there is missed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from google.protobuf.message import Message

from specdec.v1 import common_pb2, draft_pb2, gateway_pb2, verifier_pb2

ANSWERED = "answered"
"""What comes is an answer, not an error."""
DROPPED = "dropped"
"""Nothing comes: the message is stale."""
INVALID = "INVALID_REQUEST"
CONTRADICTION = "CONTRACT_VIOLATION"
MISMATCH = "TOKENIZER_MISMATCH"

_RANGES = {
    "temperature": (0.0, 100.0),
    "top_p": (5e-324, 1.0),
    "min_p": (0.0, 1.0),
    "repetition_penalty": (0.01, 10.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
}


class Referee:
    """Says what may come of each message of one session."""

    def __init__(self, info: common_pb2.ModelInfo) -> None:
        self._info = info
        self.opening: common_pb2.Open | None = None
        self.base_length = 0
        self.next_round = 0

    @property
    def has_grammar(self) -> bool:
        """Whether what the session says may not fit its grammar, which is not looked into here."""
        return self.opening is not None and self.opening.sampling.HasField("grammar")

    def judge(self, request: Message) -> set[str]:
        """The outcomes that are right."""
        if isinstance(request, draft_pb2.DraftRequest | verifier_pb2.VerifyRequest):
            kind = request.WhichOneof("message")
            if self.opening is None:
                return self._judge_open(request.open) if kind == "open" else {CONTRADICTION}
            if kind == "candidates" and isinstance(request, verifier_pb2.VerifyRequest):
                return self._judge_candidates(request.candidates)
            if kind == "advance" and isinstance(request, draft_pb2.DraftRequest):
                return self._judge_advance(request.advance)
        return {CONTRADICTION}

    def opened(self, opening: common_pb2.Open) -> None:
        """Says that an Open was answered."""
        self.opening = opening
        self.base_length, self.next_round = opening.base_length, opening.round

    def committed(self, round_number: int, count: int) -> None:
        """Says that a round was answered."""
        self.base_length += count
        self.next_round = round_number + 1

    def drafted_fault(
        self,
        drafted: verifier_pb2.Candidates | draft_pb2.Proposal,
        limit: int,
    ) -> str | None:
        """What is wrong with drafted tokens."""
        assert self.opening is not None
        token_ids, parents = list(drafted.token_ids), list(drafted.parents)
        sampling, rule = self.opening.sampling, self.opening.acceptance_rule
        sampled = sampling.temperature > 0.0 and rule in (1, 2)
        if len(token_ids) > limit or not self._all_known(token_ids):
            return "too many, or unknown ids"
        if parents:
            topk = 1 if sampled else max(self.opening.draft_topk, 1)
            siblings = [token_ids[i] for i in range(len(parents)) if i < len(token_ids)]
            if len(parents) != len(token_ids):
                return "parents of nothing"
            if any(parent > place for place, parent in enumerate(parents)):
                return "a parent that comes later"
            for parent in set(parents):
                own = [t for t, p in zip(siblings, parents, strict=True) if p == parent]
                if len(own) > topk or len(own) != len(set(own)):
                    return "too many children, or equal ones"
        if not sampled:
            return None
        if len(drafted.distributions) != len(token_ids):
            return "distributions of nothing"
        for token_id, q in zip(token_ids, drafted.distributions, strict=True):
            ids = list(q.token_ids)
            if len(set(ids)) != len(ids) or len(ids) != len(q.probabilities):
                return "no distribution"
            if not all(0.0 < x < math.inf for x in q.probabilities):
                return "no probabilities"
            if token_id not in ids or not self._all_known(ids):
                return "not the distribution of the token"
        return None

    def _judge_open(self, opening: common_pb2.Open) -> set[str]:
        info, sampling = self._info, opening.sampling
        if opening.tokenizer_sha256 != info.tokenizer_sha256:
            return {MISMATCH}
        tokens = [*opening.prompt_token_ids, *opening.committed_token_ids]
        fits = (
            opening.session_id
            and opening.prompt_token_ids
            and opening.base_length == len(tokens) < info.max_context_length
            and self._all_known(tokens)
            and opening.acceptance_rule in (1, 2, 3)
            and opening.num_draft_tokens <= info.max_num_draft_tokens
            and opening.draft_topk <= 64
            and opening.run_ahead <= 64
            and len(opening.prefix_cache.salt.encode()) <= 256
            and opening.round < 2**64 - 1
            and opening.logprobs.mode in (0, 1, 2)
            and opening.logprobs.num_top <= 20
            and all(low <= getattr(sampling, name) <= high for name, (low, high) in _RANGES.items())
            and len(sampling.logit_bias) <= min(1024, info.effective_vocab_size)
            and len(sampling.allowed_token_ids) <= info.effective_vocab_size
            and len(sampling.suppressed_token_ids) <= info.effective_vocab_size
            and all(-100.0 <= bias <= 100.0 for bias in sampling.logit_bias.values())
            and self._all_known(sampling.logit_bias)
            and self._all_known(sampling.allowed_token_ids)
            and self._all_known(sampling.suppressed_token_ids)
            and self._all_known(set(sampling.stop_token_ids) - set(info.eos_token_ids))
            and self._leaves_a_token(sampling)
            and not (sampling.HasField("grammar") and _has_masks(sampling))
        )
        if not fits:
            return {INVALID}
        return {ANSWERED, INVALID} if sampling.HasField("grammar") else {ANSWERED}

    def _judge_candidates(self, asked: verifier_pb2.Candidates) -> set[str]:
        assert self.opening is not None
        if asked.round < self.next_round:
            return {DROPPED}
        room = self._info.max_context_length - self.base_length
        if (
            asked.base_length != self.base_length
            or asked.round == 2**64 - 1
            or len(asked.token_ids) + 1 > room
            or self.drafted_fault(asked, self.opening.num_draft_tokens)
        ):
            return {CONTRADICTION}
        return {ANSWERED, INVALID} if self.has_grammar else {ANSWERED}

    def _judge_advance(self, advance: draft_pb2.Advance) -> set[str]:
        assert self.opening is not None
        if advance.round < self.next_round:
            return {DROPPED}
        room = self._info.max_context_length - self.base_length
        if (
            advance.base_length != self.base_length
            or advance.round == 2**64 - 1
            or len(advance.token_ids) > room
            or not self._all_known(advance.token_ids)
            or advance.num_draft_tokens > self.opening.num_draft_tokens
        ):
            return {CONTRADICTION}
        return {ANSWERED, INVALID, CONTRADICTION} if self.has_grammar else {ANSWERED}

    def _all_known(self, token_ids: Sequence[int] | object) -> bool:
        return all(t < self._info.effective_vocab_size for t in token_ids)  # type: ignore[attr-defined]

    def _leaves_a_token(self, sampling: common_pb2.Sampling) -> bool:
        left = set(sampling.allowed_token_ids) or set(range(self._info.effective_vocab_size))
        left -= set(sampling.suppressed_token_ids)
        return bool(left - set(sampling.stop_token_ids) if sampling.min_new_tokens else left)


def _has_masks(sampling: common_pb2.Sampling) -> bool:
    masks = sampling.allowed_token_ids or sampling.suppressed_token_ids or sampling.min_new_tokens
    return bool(masks)


def must_be_refused(request: gateway_pb2.GenerateRequest, vocab_size: int, context: int) -> bool:
    """Whether a Generate request has one of the faults that can be told without a tokenizer."""
    sampling, stopping = request.sampling, request.stopping
    ids = [
        *(*request.token_ids.ids, *stopping.stop_token_ids, *sampling.logit_bias),
        *(*sampling.allowed_token_ids, *sampling.suppressed_token_ids),
    ]
    return (
        request.WhichOneof("input") is None
        or any(t >= vocab_size for t in ids)
        or len(request.token_ids.ids) >= context
        or any(
            not low <= getattr(sampling, name) <= high
            for name, (low, high) in _RANGES.items()
            if sampling.HasField(name)  # type: ignore[arg-type]
        )
        or not all(-100.0 <= bias <= 100.0 for bias in sampling.logit_bias.values())
        or (request.HasField("n") and not 1 <= request.n <= 16)
        or request.logprobs.num_top > 20
        or request.logprobs.mode not in (0, 1, 2)
        or request.speculation.acceptance_rule not in (0, 1, 2, 3)
        or (stopping.HasField("max_new_tokens") and stopping.max_new_tokens == 0)
        or len(stopping.stop_token_ids) > 64
        or any(not 1 <= len(stop.encode()) <= 256 for stop in stopping.stop_strings)
        or len(request.prefix_cache.salt.encode()) > 256
    )
