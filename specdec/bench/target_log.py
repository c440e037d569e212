"""What the target wrote, kept so that drafts can be scored on it without the target.

A log is a file of JSON lines: a header, then one output a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specdec.proposals import token_ids_fault
from specdec.v1 import common_pb2

_TokenIds = tuple[Annotated[int, Field(ge=0)], ...]


class LogFault(Exception):
    """A log cannot be used. The message is one line that says why."""


class _Line(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Header(_Line):
    """What all outputs of a log have in common."""

    format: Literal["specdec target log 1"] = "specdec target log 1"
    model_id: str
    """The target, for people."""
    tokenizer_sha256: str
    """Of the target's token table, which a draft must have too."""
    effective_vocab_size: int = Field(ge=1)
    temperature: float = Field(ge=0.0)
    """0 for greedy decoding. Above 0 the rule was COUPLED, so that target, prompt and seed alone
    decide what is written."""
    seed: int = Field(ge=0, lt=2**64)
    stop_token_ids: _TokenIds
    """What ended an output before its limit."""

    def sampling(self) -> common_pb2.Sampling:
        """The settings that the gateway opens a session with."""
        return common_pb2.Sampling(
            temperature=self.temperature,
            top_p=1.0,
            seed=self.seed,
            repetition_penalty=1.0,
            stop_token_ids=self.stop_token_ids,
        )


class Output(_Line):
    """A prompt, and what the target alone wrote after it."""

    kind: str
    prompt_id: str
    prompt_token_ids: _TokenIds = Field(min_length=1)
    token_ids: _TokenIds = Field(min_length=1)
    """A stop token included."""
    limit: int
    """How many tokens it could have had: as many as it has, unless it was stopped."""
    step_ms: float | None
    """Mean time between two tokens, as the client saw it. None of a single token."""


@dataclass
class TargetLog:
    """One run of the target alone."""

    header: Header
    outputs: list[Output] = field(default_factory=list)

    @property
    def step_ms(self) -> float | None:
        """A step of the target that serves one client: the mean over all tokens, milliseconds."""
        timed = [(one.step_ms, len(one.token_ids) - 1) for one in self.outputs if one.step_ms]
        steps = sum(count for _, count in timed)
        return sum(step_ms * count for step_ms, count in timed) / steps if steps else None

    @property
    def num_tokens(self) -> int:
        """Tokens of all outputs."""
        return sum(len(output.token_ids) for output in self.outputs)

    def write(self, file: Path) -> None:
        """Writes the log, over what the file held."""
        lines = [line.model_dump_json() for line in (self.header, *self.outputs)]
        file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def read(file: Path) -> TargetLog:
    """Reads a log.

    Raises:
        LogFault: the file cannot be read, is no log, or has no outputs.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise LogFault(f"cannot read {file}: {reason}") from None
    try:
        log = TargetLog(Header.model_validate_json(lines[0] if lines else ""))
    except ValidationError as error:
        raise LogFault(f"{file} is not a log of --save-log: {_first(error)}") from None
    for number, line in enumerate(lines[1:], start=2):
        try:
            output = Output.model_validate_json(line)
        except ValidationError as error:
            raise LogFault(f"{file}, line {number}: {_first(error)}") from None
        fault = _fault(output, log.header.effective_vocab_size)
        if fault is not None:
            raise LogFault(f"{file}, line {number}: {fault}")
        log.outputs.append(output)
    if not log.outputs:
        raise LogFault(f"{file} holds no outputs")
    return log


def _fault(output: Output, effective_vocab_size: int) -> str | None:
    if output.limit < len(output.token_ids):
        return f"{len(output.token_ids)} tokens are more than the limit, {output.limit}"
    if output.step_ms is not None and len(output.token_ids) == 1:
        return "a single token has no time between tokens"
    ids: Sequence[int] = output.prompt_token_ids + output.token_ids
    return token_ids_fault(ids, effective_vocab_size)


def _first(error: ValidationError) -> str:
    found = error.errors()[0]
    return ": ".join((*map(str, found["loc"]), found["msg"]))
