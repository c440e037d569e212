"""What the flags of `specdec bench` say, and which of them do not go together."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

import typer

from specdec.bench import target_log
from specdec.bench.prompts import Prompt
from specdec.bench.target_log import LogFault, TargetLog
from specdec.cli.draft_names import NamedDraft, parse
from specdec.cli.generate import Rule
from specdec.cli.terminal import fail
from specdec.v1 import common_pb2

_PROMPTS = 20
_OF_LOAD = ("concurrency", "modes", "repeats", "draft", "rule")
_OF_TARGET = (
    *("address", "verifier_address", "target", "kinds", "requests", "duration"),
    *("max_new_tokens", "ignore_eos", "temperature", "seed", "save_log"),
)


def refuse_flags(context: typer.Context, *, recorded: bool) -> None:
    """Fails for flags of the command line that would be ignored.

    Args:
        context: of the command.
        recorded: whether the log is there already.

    Raises:
        typer.BadParameter: one was given.
    """
    for names, why in (
        (_OF_LOAD, "does not go with --drafts and logs: see the documentation"),
        (_OF_TARGET if recorded else (), "is of the target's run, which --from-log has already"),
    ):
        for name in names:
            source = context.get_parameter_source(name)
            if source is not None and source.name == "COMMANDLINE":
                raise typer.BadParameter(why, param_hint="--" + name.replace("_", "-"))


def refuse_tls(context: typer.Context, *, running: bool) -> None:
    """Fails for --tls-ca if no service that runs was named: what is started has no TLS.

    Raises:
        typer.BadParameter: it was given. The environment may have it.
    """
    source = context.get_parameter_source("tls_ca")
    if not running and source is not None and source.name == "COMMANDLINE":
        raise typer.BadParameter("name the --address that speaks TLS", param_hint="--tls-ca")


def named(drafts: str | None, *, needed: bool) -> list[NamedDraft]:
    """Reads `--drafts`.

    Raises:
        typer.BadParameter: it is not there although it is needed, or a name cannot be.
    """
    if drafts is None:
        if needed:
            raise typer.BadParameter("name the --drafts to score on it", param_hint="--from-log")
        return []
    try:
        return parse(drafts)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--drafts") from None


def first(prompts: Sequence[Prompt], count: int | None) -> Sequence[Prompt]:
    """The prompts to be logged: so many, or `_PROMPTS`.

    Raises:
        typer.BadParameter: there are fewer.
    """
    if count is not None and count > len(prompts):
        message = f"each prompt is used once, and there are {len(prompts)}"
        raise typer.BadParameter(message, param_hint="--requests")
    return prompts[: count or _PROMPTS]


def read_log(file: Path) -> TargetLog:
    """Reads a log, or fails in one line."""
    try:
        return target_log.read(file)
    except LogFault as fault:
        fail(str(fault))


def model_options(dtype: str, num_threads: int | None) -> tuple[str, ...]:
    """The arguments of a model service that is started."""
    return ("--dtype", dtype, *(("--num-threads", str(num_threads)) if num_threads else ()))


def rule_value(rule: Rule | None) -> common_pb2.AcceptanceRule.ValueType:
    """As it is on the wire."""
    if rule is None:
        return common_pb2.ACCEPTANCE_RULE_UNSPECIFIED
    return common_pb2.AcceptanceRule.Value(f"ACCEPTANCE_RULE_{rule.name}")


def numbers(text: str, flag: str, what: str, most: int) -> list[int]:
    """Reads numbers from 1 to `most`, separated by commas. Gives them in order, each once.

    Raises:
        typer.BadParameter: it is something else.
    """
    try:
        found = sorted({int(part) for part in text.split(",")})
    except ValueError:
        message = f"{text!r} is no list of numbers such as 1,8"
        raise typer.BadParameter(message, param_hint=flag) from None
    if not 1 <= found[0] <= found[-1] <= most:
        message = f"numbers of {what} are from 1 to {most}"
        raise typer.BadParameter(message, param_hint=flag)
    return found


def choices(text: str, allowed: Sequence[str], flag: str) -> list[str]:
    """Reads names, separated by commas. Gives each once.

    Raises:
        typer.BadParameter: one is not allowed.
    """
    found = list(dict.fromkeys(text.split(",")))
    for name in found:
        if name not in allowed:
            raise typer.BadParameter(f"{name!r} is none of {', '.join(allowed)}", param_hint=flag)
    return found


def refuse_remote(address: str | None, *, remote: bool) -> None:
    """Fails for an address of another machine, unless `remote` allows it."""
    if address is not None and not remote and not _is_loopback(address):
        fail(f"{address} is not on this machine: add --remote if it may be put under load")


def _is_loopback(address: str) -> bool:
    host = address.rpartition(":")[0].strip("[]")
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
