"""What both model services hold a session's messages against: the wire contract's invariants."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum, auto

from specdec.errors import SpecdecError, Violation
from specdec.proposals import (
    distributions_fault,
    draft_topk,
    num_draft_tokens_fault,
    token_ids_fault,
)
from specdec.trees import parents_fault
from specdec.v1 import common_pb2

PROTOCOL_VERSION = 1
ACCEPTANCE_RULES = (
    common_pb2.ACCEPTANCE_RULE_REJECTION,
    common_pb2.ACCEPTANCE_RULE_BLOCK,
    common_pb2.ACCEPTANCE_RULE_COUPLED,
)
"""Those that the services implement."""
MAX_SALT_BYTES = 256
"""Of a prefix cache's salt."""
MAX_LOGIT_BIAS = 1024
MAX_TOP_LOGPROBS = 20
MAX_DRAFT_TOPK = 64
MAX_RUN_AHEAD = 64
_END = 2**64 - 1
"""No round has this number: the one after it could not be told."""


class SessionState(Enum):
    """Where a session stands."""

    OPENING = auto()
    """Its context is being taken in."""
    READY = auto()
    """It waits for the next round."""
    WORKING = auto()
    """A round is being computed. A session that fails stays here: its stream has ended."""


class SessionContract:
    """The round and the committed length of a session, and the checks of every message on them.

    A message of an old round is stale: dropped and counted. Anything else that does not fit is a
    contradiction and fails the session.
    """

    def __init__(self, opening: common_pb2.Open, info: common_pb2.ModelInfo) -> None:
        """Checks an Open.

        Raises:
            SpecdecError: TOKENIZER_MISMATCH; INVALID_REQUEST, naming every field that is at fault.
        """
        if not info.any_tokenizer and opening.tokenizer_sha256 != info.tokenizer_sha256:
            raise SpecdecError(
                common_pb2.ERROR_REASON_TOKENIZER_MISMATCH,
                f"this service's token table is {info.tokenizer_sha256}, the session's is "
                f"{opening.tokenizer_sha256}",
            )
        violations = _open_violations(opening, info)
        if violations:
            raise SpecdecError.invalid(violations)
        self.state = SessionState.OPENING
        self.opening = opening
        self.base_length = opening.base_length
        self.next_round = opening.round
        self.stale_messages = 0
        self.topk = draft_topk(opening) if info.trees else 1
        """How many drafted tokens may follow one and the same token."""
        self._info = info

    @property
    def room(self) -> int:
        """How many more tokens the context has room for."""
        return self._info.max_context_length - self.base_length

    def opened(self) -> None:
        """Says that the session's context is known to the service."""
        self.state = SessionState.READY

    def begin(self, round_number: int, base_length: int) -> bool:
        """Takes a message for a round.

        Returns:
            Whether the message is to be worked on; False if it is stale.

        Raises:
            SpecdecError: CONTRACT_VIOLATION if base_length is not what the session holds, or no
                round could follow.
        """
        if round_number < self.next_round:
            self.stale_messages += 1
            return False
        if round_number == _END:
            raise self._violation(f"round {round_number} is more than there can be")
        if base_length != self.base_length:
            raise self._violation(
                f"round {round_number} starts from base_length {base_length}, but the session "
                f"holds {self.base_length} tokens"
            )
        self.state = SessionState.WORKING
        return True

    def end(self, round_number: int, num_committed: int) -> None:
        """Ends a round that committed `num_committed` tokens."""
        self.base_length += num_committed
        self.next_round = round_number + 1
        self.state = SessionState.READY

    def check_advance(self, token_ids: Sequence[int], num_draft_tokens: int) -> None:
        """Checks what an Advance commits and asks for.

        Raises:
            SpecdecError: CONTRACT_VIOLATION.
        """
        self._check(token_ids_fault(token_ids, self._info.effective_vocab_size))
        self._check_room(len(token_ids))
        self._check(num_draft_tokens_fault(num_draft_tokens, self.opening.num_draft_tokens))

    def check_candidates(
        self,
        token_ids: Sequence[int],
        distributions: Sequence[common_pb2.SparseDistribution],
        parents: Sequence[int],
        *,
        need_distributions: bool,
    ) -> None:
        """Checks drafted tokens before they are verified.

        Raises:
            SpecdecError: CONTRACT_VIOLATION.
        """
        self._check(num_draft_tokens_fault(len(token_ids), self.opening.num_draft_tokens))
        self._check_room(len(token_ids) + 1)
        vocab_size = self._info.effective_vocab_size
        self._check(token_ids_fault(token_ids, vocab_size))
        self._check(parents_fault(parents, token_ids, self.topk))
        if need_distributions:
            self._check(distributions_fault(token_ids, distributions, vocab_size))

    def _check_room(self, num_tokens: int) -> None:
        length = self.base_length + num_tokens
        if length > self._info.max_context_length:
            limit = self._info.max_context_length
            self._check(f"{length} tokens are more than the context length of {limit}")

    def _check(self, fault: str | None) -> None:
        if fault is not None:
            raise self._violation(fault)

    def _violation(self, message: str) -> SpecdecError:
        return SpecdecError(
            common_pb2.ERROR_REASON_CONTRACT_VIOLATION,
            f"session {self.opening.session_id}: {message}",
        )


def opened_fault(opened: common_pb2.Opened, opening: common_pb2.Open) -> str | None:
    """What is wrong with the answer to an Open."""
    held, sent = (opened.round, opened.base_length), (opening.round, opening.base_length)
    if held == sent:
        return None
    return (
        f"it was opened with {sent[1]} tokens for round {sent[0]}, and holds {held[1]} tokens for "
        f"round {held[0]}"
    )


def _open_violations(opening: common_pb2.Open, info: common_pb2.ModelInfo) -> list[Violation]:
    found: list[Violation] = []

    def refuse(field: str, description: str) -> None:
        found.append(Violation(f"open.{field}", description))

    length = len(opening.prompt_token_ids) + len(opening.committed_token_ids)
    if not opening.session_id:
        refuse("session_id", "must not be empty")
    if not opening.prompt_token_ids:
        refuse("prompt_token_ids", "must hold at least one id")
    if length != opening.base_length:
        refuse("base_length", f"is {opening.base_length}, but {length} token ids came with it")
    if length >= info.max_context_length:
        refuse(
            "prompt_token_ids",
            f"{length} tokens leave no room in a context of {info.max_context_length}",
        )
    for field in ("prompt_token_ids", "committed_token_ids"):
        fault = token_ids_fault(getattr(opening, field), info.effective_vocab_size)
        if fault is not None:
            refuse(field, fault)
    if opening.acceptance_rule not in info.acceptance_rules:
        refuse("acceptance_rule", f"{opening.acceptance_rule} is not one that the service has")
    for field, value, most in (
        ("round", opening.round, _END - 1),
        ("num_draft_tokens", opening.num_draft_tokens, info.max_num_draft_tokens),
        ("draft_topk", opening.draft_topk, MAX_DRAFT_TOPK),
        ("run_ahead", opening.run_ahead, MAX_RUN_AHEAD),
        ("logprobs.num_top", opening.logprobs.num_top, MAX_TOP_LOGPROBS),
    ):
        if value > most:
            refuse(field, f"must be at most {most}")
    if opening.logprobs.mode not in common_pb2.LogprobsMode.values():
        refuse("logprobs.mode", f"{opening.logprobs.mode} is not one that the service has")
    if len(opening.prefix_cache.salt.encode()) > MAX_SALT_BYTES:
        refuse("prefix_cache.salt", f"must be at most {MAX_SALT_BYTES} bytes")
    found += sampling_violations(opening.sampling, "open.sampling", info.effective_vocab_size)
    found += _mask_violations(opening.sampling, info)
    return found


def _mask_violations(
    sampling: common_pb2.Sampling, info: common_pb2.ModelInfo
) -> Iterator[Violation]:
    """What of a session's masks would only be found out when a token is to be sampled."""
    vocab_size = info.effective_vocab_size
    # A model's own end-of-sequence tokens are never the session's fault.
    stops = set(sampling.stop_token_ids).difference(info.eos_token_ids)
    fault = token_ids_fault(sorted(stops), vocab_size)
    if fault is not None:
        yield Violation("open.sampling.stop_token_ids", fault)
    masks = sampling.allowed_token_ids or sampling.suppressed_token_ids or sampling.min_new_tokens
    if sampling.HasField("grammar") and masks:
        yield Violation(
            "open.sampling.grammar",
            "cannot be combined with allowed_token_ids, suppressed_token_ids and min_new_tokens",
        )
    if _forbids_all(sampling, vocab_size):
        yield Violation(
            "open.sampling",
            "allowed_token_ids, suppressed_token_ids and, with min_new_tokens, stop_token_ids "
            "leave no token",
        )


def _forbids_all(sampling: common_pb2.Sampling, effective_vocab_size: int) -> bool:
    """Whether a session's masks leave nothing to sample, to begin with."""
    forbidden = set(sampling.suppressed_token_ids)
    if sampling.min_new_tokens > 0:
        forbidden.update(sampling.stop_token_ids)
    if sampling.allowed_token_ids:
        return forbidden.issuperset(sampling.allowed_token_ids)
    return sum(token_id < effective_vocab_size for token_id in forbidden) == effective_vocab_size


def sampling_violations(
    sampling: common_pb2.Sampling, path: str, effective_vocab_size: int
) -> list[Violation]:
    """What is wrong with resolved sampling settings; `path` is put before the field names."""
    checks = (
        ("temperature", 0.0 <= sampling.temperature <= 100.0, "within [0, 100]"),
        ("top_p", 0.0 < sampling.top_p <= 1.0, "within (0, 1]"),
        ("min_p", 0.0 <= sampling.min_p <= 1.0, "within [0, 1]"),
        ("repetition_penalty", 0.01 <= sampling.repetition_penalty <= 10.0, "within [0.01, 10]"),
        ("presence_penalty", -2.0 <= sampling.presence_penalty <= 2.0, "within [-2, 2]"),
        ("frequency_penalty", -2.0 <= sampling.frequency_penalty <= 2.0, "within [-2, 2]"),
    )
    found = [
        Violation(f"{path}.{field}", f"must be {allowed}, got {getattr(sampling, field)}")
        for field, fits, allowed in checks
        if not fits
    ]
    for field in ("logit_bias", "allowed_token_ids", "suppressed_token_ids"):
        ids = list(getattr(sampling, field))
        fault = token_ids_fault(ids, effective_vocab_size)
        if len(ids) > effective_vocab_size:
            fault = f"{len(ids)} ids are more than the vocabulary has, {effective_vocab_size}"
        if fault is not None:
            found.append(Violation(f"{path}.{field}", fault))
    for token_id, bias in sampling.logit_bias.items():
        if not -100.0 <= bias <= 100.0:
            found.append(
                Violation(
                    f"{path}.logit_bias[{token_id}]", f"must be within [-100, 100], got {bias}"
                )
            )
    if len(sampling.logit_bias) > MAX_LOGIT_BIAS:
        found.append(
            Violation(
                f"{path}.logit_bias",
                f"must have at most {MAX_LOGIT_BIAS} entries, got {len(sampling.logit_bias)}",
            )
        )
    return found
