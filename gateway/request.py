"""Turns a GenerateRequest into a plan, or refuses it before any work, naming every fault."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from gateway.commit import Stopping
from gateway.grammar_check import grammar_fault
from gateway.prompt import tokenize
from gateway.settings import GatewaySettings
from gateway.speculation_settings import SpeculationSettings, speculation_settings
from gateway.target import Target
from specdec.errors import SpecdecError, Violation
from specdec.proposals import token_ids_fault
from specdec.sessions import MAX_SALT_BYTES, MAX_TOP_LOGPROBS, sampling_violations
from specdec.v1 import common_pb2, gateway_pb2

_MAX_STOP_STRINGS = 16
_MAX_STOP_STRING_BYTES = 256
_MAX_STOP_TOKEN_IDS = 64
_MAX_PROMPT_LOGPROBS = 1_000_000
MAX_SAMPLES = 16


@dataclass(frozen=True)
class Plan:
    """A request with every default applied and every limit checked."""

    prompt_token_ids: list[int]
    sampling: common_pb2.Sampling
    stopping: Stopping
    speculation: SpeculationSettings
    logprobs: common_pb2.LogprobsRequest | None
    num_samples: int
    prefix_cache: common_pb2.PrefixCacheParams


def plan(request: gateway_pb2.GenerateRequest, target: Target, settings: GatewaySettings) -> Plan:
    """Checks a request and resolves it. Tokenizes, so it may take a while for a long prompt.

    Raises:
        SpecdecError: INVALID_REQUEST with a violation for every field that is at fault.
    """
    violations = list(_unknown_fields(request))
    eos = () if request.stopping.ignore_eos else target.info.eos_token_ids
    stop_token_ids = frozenset(eos) | frozenset(request.stopping.stop_token_ids)
    sampling = _sampling(request, settings, stop_token_ids)
    violations += sampling_violations(sampling, "sampling", target.info.effective_vocab_size)
    violations += _mask_violations(
        request.sampling, request.stopping, stop_token_ids, target.info.effective_vocab_size
    )
    wanted = settings.max_new_tokens
    if request.stopping.HasField("max_new_tokens"):
        wanted = request.stopping.max_new_tokens
    violations += _stopping_violations(request.stopping, wanted, target)
    violations += _logprobs_violations(request.logprobs)
    num_samples = request.n if request.HasField("n") else 1
    if not 1 <= num_samples <= MAX_SAMPLES:
        violations.append(Violation("n", f"must be within [1, {MAX_SAMPLES}], got {request.n}"))
    if len(request.prefix_cache.salt.encode()) > MAX_SALT_BYTES:
        violations.append(Violation("prefix_cache.salt", f"must be at most {MAX_SALT_BYTES} bytes"))
    speculation, faults = speculation_settings(request.speculation, target, settings)
    violations += faults
    prompt_token_ids, field, fault = tokenize(request, target, settings.max_prompt_bytes)
    if fault is not None:
        violations.append(Violation(field, fault))
    entries = len(prompt_token_ids) * (request.logprobs.num_top + 1)
    if request.logprobs.prompt and entries > _MAX_PROMPT_LOGPROBS:
        violations.append(
            Violation(
                "logprobs.prompt",
                f"the prompt's length times num_top + 1 must be at most {_MAX_PROMPT_LOGPROBS}, "
                f"got {entries}",
            )
        )
    if violations:
        raise SpecdecError.invalid(violations)

    room = target.info.max_context_length - len(prompt_token_ids)
    logprobs = None
    if request.HasField("logprobs"):
        logprobs = common_pb2.LogprobsRequest(
            num_top=request.logprobs.num_top,
            mode=request.logprobs.mode or common_pb2.LOGPROBS_MODE_RAW,
            prompt=request.logprobs.prompt,
        )
    return Plan(
        prompt_token_ids,
        sampling,
        Stopping(
            max_new_tokens=min(wanted, room),
            min_new_tokens=request.stopping.min_new_tokens,
            stop_token_ids=stop_token_ids,
            stop_strings=tuple(request.stopping.stop_strings),
            include_stop_string=request.stopping.include_stop_string,
            skip_special_tokens=(
                not request.stopping.HasField("skip_special_tokens")
                or request.stopping.skip_special_tokens
            ),
        ),
        speculation,
        logprobs,
        num_samples,
        request.prefix_cache,
    )


def _unknown_fields(message: Message, path: str = "") -> Iterator[Violation]:
    """Fields that this version does not know: to ignore them would be to do something else."""
    unknown = UnknownFieldSet(message)
    for number in (unknown[index].field_number for index in range(len(unknown))):
        yield Violation(
            f"{path}#{number}", f"field number {number} is not known to this version of the server"
        )
    for field, value in message.ListFields():
        if field.message_type is None or field.message_type.GetOptions().map_entry:
            continue
        for index, item in enumerate(value if field.is_repeated else [value]):
            label = f"{field.name}[{index}]" if field.is_repeated else field.name
            yield from _unknown_fields(item, f"{path}{label}.")


def _sampling(
    request: gateway_pb2.GenerateRequest,
    settings: GatewaySettings,
    stop_token_ids: frozenset[int],
) -> common_pb2.Sampling:
    params = request.sampling
    return common_pb2.Sampling(
        temperature=(
            params.temperature if params.HasField("temperature") else settings.temperature
        ),
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
        repetition_penalty=(
            params.repetition_penalty if params.HasField("repetition_penalty") else 1.0
        ),
        presence_penalty=params.presence_penalty,
        frequency_penalty=params.frequency_penalty,
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        suppressed_token_ids=params.suppressed_token_ids,
        min_new_tokens=request.stopping.min_new_tokens,
        stop_token_ids=sorted(stop_token_ids),
        grammar=params.grammar if params.HasField("grammar") else None,
    )


def _mask_violations(
    sampling: gateway_pb2.SamplingParams,
    stopping: gateway_pb2.StoppingParams,
    stop_token_ids: frozenset[int],
    effective_vocab_size: int,
) -> Iterator[Violation]:
    """Masks that contradict each other, so that at some place nothing could be sampled."""
    forbidden = set(sampling.suppressed_token_ids)
    if stopping.min_new_tokens > 0:
        forbidden |= stop_token_ids
    if sampling.allowed_token_ids:
        if forbidden.issuperset(sampling.allowed_token_ids):
            yield Violation(
                "sampling.allowed_token_ids",
                "suppressed_token_ids, and stopping.min_new_tokens for tokens that end the "
                "generation, leave none of them",
            )
    elif sum(token_id < effective_vocab_size for token_id in forbidden) == effective_vocab_size:
        yield Violation(
            "sampling.suppressed_token_ids",
            "with stopping.min_new_tokens for tokens that end the generation, they leave no token",
        )
    if not sampling.HasField("grammar"):
        return
    fault = grammar_fault(sampling.grammar)
    if fault is not None:
        yield Violation("sampling.grammar", fault)
    for field, is_set in (
        ("sampling.allowed_token_ids", bool(sampling.allowed_token_ids)),
        ("sampling.suppressed_token_ids", bool(sampling.suppressed_token_ids)),
        ("stopping.min_new_tokens", stopping.min_new_tokens > 0),
        ("stopping.ignore_eos", stopping.ignore_eos),
    ):
        if is_set:
            yield Violation(field, "cannot be combined with sampling.grammar")


def _logprobs_violations(params: gateway_pb2.LogprobsParams) -> Iterator[Violation]:
    if params.num_top > MAX_TOP_LOGPROBS:
        yield Violation(
            "logprobs.num_top", f"must be within [0, {MAX_TOP_LOGPROBS}], got {params.num_top}"
        )
    if params.mode not in common_pb2.LogprobsMode.values():
        yield Violation("logprobs.mode", f"must be RAW or PROCESSED, got {params.mode}")


def _stopping_violations(
    params: gateway_pb2.StoppingParams, max_new_tokens: int, target: Target
) -> Iterator[Violation]:
    if max_new_tokens < 1:
        yield Violation("stopping.max_new_tokens", "must be at least 1, got 0")
    if params.min_new_tokens > max_new_tokens:
        yield Violation(
            "stopping.min_new_tokens",
            f"must be at most max_new_tokens, {max_new_tokens}, got {params.min_new_tokens}",
        )
    if len(params.stop_token_ids) > _MAX_STOP_TOKEN_IDS:
        yield Violation("stopping.stop_token_ids", f"must be at most {_MAX_STOP_TOKEN_IDS} ids")
    fault = token_ids_fault(params.stop_token_ids, target.info.effective_vocab_size)
    if fault is not None:
        yield Violation("stopping.stop_token_ids", fault)
    if len(params.stop_strings) > _MAX_STOP_STRINGS:
        yield Violation("stopping.stop_strings", f"must be at most {_MAX_STOP_STRINGS} strings")
    for index, stop in enumerate(params.stop_strings):
        if not 1 <= len(stop.encode()) <= _MAX_STOP_STRING_BYTES:
            yield Violation(
                f"stopping.stop_strings[{index}]",
                f"must be 1 to {_MAX_STOP_STRING_BYTES} bytes, got {len(stop.encode())}",
            )
