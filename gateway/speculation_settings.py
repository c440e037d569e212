"""How a request is sped up: every default applied and every limit checked."""

from __future__ import annotations

from dataclasses import dataclass

from gateway.settings import GatewaySettings
from gateway.target import Target
from specdec.errors import Violation
from specdec.sessions import MAX_DRAFT_TOPK, MAX_RUN_AHEAD
from specdec.v1 import common_pb2, gateway_pb2


@dataclass(frozen=True)
class SpeculationSettings:
    """What a generation asks of its draft."""

    acceptance_rule: common_pb2.AcceptanceRule.ValueType
    num_draft_tokens: int
    """K, the most tokens that a proposal has; 0 is plain decoding."""
    draft_topk: int
    """How many of them may follow one and the same token."""
    adaptive: bool
    """Whether fewer are drafted where more would not pay."""
    run_ahead: int
    """For how many verdicts the next proposal is prepared."""


def speculation_settings(
    params: gateway_pb2.SpeculationParams, target: Target, settings: GatewaySettings
) -> tuple[SpeculationSettings, list[Violation]]:
    """Resolves what a request says of speculation, and tells what is wrong with it."""
    faults: list[Violation] = []

    def within(field: str, default: int, low: int, high: int) -> int:
        if not params.HasField(field):  # type: ignore[arg-type]
            return min(default, high)
        value: int = getattr(params, field)
        if not low <= value <= high:
            faults.append(
                Violation(f"speculation.{field}", f"must be within [{low}, {high}], got {value}")
            )
        return value

    cap = min(settings.max_num_draft_tokens, target.info.max_num_draft_tokens)
    enabled = params.enabled if params.HasField("enabled") else settings.speculation
    num_draft_tokens = within("num_draft_tokens", settings.num_draft_tokens, 0, cap)
    found = SpeculationSettings(
        acceptance_rule=_rule(params, target, settings, faults),
        num_draft_tokens=num_draft_tokens if enabled else 0,
        draft_topk=within("draft_topk", settings.draft_topk, 1, MAX_DRAFT_TOPK),
        adaptive=params.adaptive if params.HasField("adaptive") else settings.adaptive,
        run_ahead=within("run_ahead", settings.run_ahead, 0, MAX_RUN_AHEAD),
    )
    return found, faults


def _rule(
    params: gateway_pb2.SpeculationParams,
    target: Target,
    settings: GatewaySettings,
    faults: list[Violation],
) -> common_pb2.AcceptanceRule.ValueType:
    rule = params.acceptance_rule
    if rule == common_pb2.ACCEPTANCE_RULE_UNSPECIFIED:
        name = f"ACCEPTANCE_RULE_{settings.acceptance_rule.upper()}"
        return common_pb2.AcceptanceRule.Value(name)
    if rule not in target.info.acceptance_rules:
        allowed = [
            common_pb2.AcceptanceRule.Name(known).removeprefix("ACCEPTANCE_RULE_")
            for known in target.info.acceptance_rules
        ]
        faults.append(
            Violation(
                "speculation.acceptance_rule", f"must be one of {', '.join(allowed)}, got {rule}"
            )
        )
    return rule
