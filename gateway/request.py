"""Turns a GenerateRequest into a plan, or refuses it before any work, naming every fault."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from dataclasses import dataclass

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from gateway.chat_template import TemplateError
from gateway.commit import Stopping
from gateway.peers import Target
from gateway.settings import GatewaySettings
from specdec.errors import SpecdecError, Violation
from specdec.proposals import token_ids_fault
from specdec.sessions import sampling_violations
from specdec.v1 import common_pb2, gateway_pb2

_MAX_STOP_STRINGS = 16
_MAX_STOP_STRING_BYTES = 256
_MAX_STOP_TOKEN_IDS = 64


@dataclass(frozen=True)
class Plan:
    """A request with every default applied and every limit checked."""

    prompt_token_ids: list[int]
    sampling: common_pb2.Sampling
    stopping: Stopping
    acceptance_rule: common_pb2.AcceptanceRule.ValueType
    num_draft_tokens: int


def plan(request: gateway_pb2.GenerateRequest, target: Target, settings: GatewaySettings) -> Plan:
    """Checks a request and resolves it. Tokenizes, so it may take a while for a long prompt.

    Raises:
        SpecdecError: INVALID_REQUEST with a violation for every field that is at fault.
    """
    violations = list(_unknown_fields(request))
    sampling = _sampling(request.sampling, settings)
    violations += sampling_violations(sampling, "sampling")
    violations += _stopping_violations(request.stopping, target)
    rule, num_draft_tokens, faults = _speculation(request.speculation, target, settings)
    violations += faults
    prompt_token_ids, field, fault = _prompt(request, target)
    if fault is not None:
        violations.append(Violation(field, fault))
    if violations:
        raise SpecdecError.invalid(violations)

    room = target.info.max_context_length - len(prompt_token_ids)
    wanted = settings.max_new_tokens
    if request.stopping.HasField("max_new_tokens"):
        wanted = request.stopping.max_new_tokens
    eos = () if request.stopping.ignore_eos else target.info.eos_token_ids
    return Plan(
        prompt_token_ids,
        sampling,
        Stopping(
            max_new_tokens=min(wanted, room),
            stop_token_ids=frozenset(eos) | frozenset(request.stopping.stop_token_ids),
            stop_strings=tuple(request.stopping.stop_strings),
        ),
        rule,
        num_draft_tokens,
    )


def _unknown_fields(message: Message, path: str = "") -> Iterator[Violation]:
    """Fields that this version does not know: to ignore them would be to do something else."""
    unknown = UnknownFieldSet(message)
    for number in (unknown[index].field_number for index in range(len(unknown))):
        yield Violation(
            f"{path}#{number}", f"field number {number} is not known to this version of the server"
        )
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        for index, item in enumerate(value if field.is_repeated else [value]):
            label = f"{field.name}[{index}]" if field.is_repeated else field.name
            yield from _unknown_fields(item, f"{path}{label}.")


def _sampling(params: gateway_pb2.SamplingParams, settings: GatewaySettings) -> common_pb2.Sampling:
    return common_pb2.Sampling(
        temperature=(
            params.temperature if params.HasField("temperature") else settings.temperature
        ),
        top_k=params.top_k,
        top_p=params.top_p if params.HasField("top_p") else 1.0,
        min_p=params.min_p,
        seed=params.seed if params.HasField("seed") else secrets.randbits(63),
    )


def _stopping_violations(params: gateway_pb2.StoppingParams, target: Target) -> Iterator[Violation]:
    if params.HasField("max_new_tokens") and params.max_new_tokens < 1:
        yield Violation("stopping.max_new_tokens", "must be at least 1, got 0")
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


def _speculation(
    params: gateway_pb2.SpeculationParams, target: Target, settings: GatewaySettings
) -> tuple[common_pb2.AcceptanceRule.ValueType, int, list[Violation]]:
    """The rule and K, with what is wrong about them."""
    faults = []
    rule = params.acceptance_rule
    if rule == common_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        name = f"ACCEPTANCE_RULE_{settings.acceptance_rule.upper()}"
        rule = common_pb2.AcceptanceRule.Value(name)
    elif rule not in target.info.acceptance_rules:
        allowed = [
            common_pb2.AcceptanceRule.Name(known).removeprefix("ACCEPTANCE_RULE_")
            for known in target.info.acceptance_rules
        ]
        faults.append(
            Violation(
                "speculation.acceptance_rule", f"must be one of {', '.join(allowed)}, got {rule}"
            )
        )
    cap = min(settings.max_num_draft_tokens, target.info.max_num_draft_tokens)
    if not params.HasField("num_draft_tokens"):
        num_draft_tokens = min(settings.num_draft_tokens, cap)
    else:
        num_draft_tokens = params.num_draft_tokens
    if num_draft_tokens > cap:
        faults.append(
            Violation(
                "speculation.num_draft_tokens",
                f"must be within [0, {cap}], got {num_draft_tokens}",
            )
        )
    if params.HasField("enabled") and not params.enabled:
        num_draft_tokens = 0
    return rule, num_draft_tokens, faults


def _prompt(
    request: gateway_pb2.GenerateRequest, target: Target
) -> tuple[list[int], str, str | None]:
    """The prompt's token ids, the field they come from, and what is wrong with it."""
    kind = request.WhichOneof("input")
    limit = target.info.max_context_length - 1
    if kind is None:
        return [], "input", "one of text, chat and token_ids must be set"
    if kind == "token_ids":
        field, ids = "token_ids.ids", list(request.token_ids.ids)
        fault = token_ids_fault(ids, target.info.effective_vocab_size)
        if fault is not None:
            return ids, field, fault
    elif kind == "text":
        field, ids = "text", target.tokenizer.encode(request.text).ids if request.text else []
    else:
        field = "chat.messages"
        if not request.chat.messages:
            return [], field, "must hold at least one message"
        try:
            text = target.chat_template.render(
                [{"role": m.role, "content": m.content} for m in request.chat.messages]
            )
        except TemplateError as error:
            return [], field, f"the model's chat template refuses it: {error}"
        ids = target.tokenizer.encode(text, add_special_tokens=False).ids
    if not ids:
        return ids, field, "must not be empty"
    if len(ids) > limit:
        return ids, field, f"must be at most {limit} tokens, got {len(ids)}"
    return ids, field, None
