"""Every parameter of a request: what it does, and where the suite shows that it keeps its meaning.

The identity tests are parametrised from this registry, and docs/capabilities.md is written from it:

    python -m tests.conformance.capabilities
"""

from __future__ import annotations

import ast
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from google.protobuf.descriptor import Descriptor

from specdec.v1 import common_pb2
from specdec.v1.common_pb2 import Sampling
from specdec.v1.gateway_pb2 import (
    ChatInput,
    ChatMessage,
    GenerateRequest,
    LogprobsParams,
    SamplingParams,
    StoppingParams,
    TokenIdsInput,
)

FOLDER = Path(__file__).parent
PAGE = FOLDER.parents[1] / "docs" / "capabilities.md"


def part(
    sampling: dict[str, Any] | None = None,
    stopping: dict[str, Any] | None = None,
    logprobs: dict[str, Any] | None = None,
    **fields: Any,
) -> GenerateRequest:
    """A part of a request, with only the messages that are given."""
    return GenerateRequest(
        sampling=None if sampling is None else SamplingParams(**sampling),
        stopping=None if stopping is None else StoppingParams(**stopping),
        logprobs=None if logprobs is None else LogprobsParams(**logprobs),
        **fields,
    )


def merge(*parts: GenerateRequest) -> GenerateRequest:
    """Lays parts over each other. A later input replaces an earlier one."""
    merged = GenerateRequest()
    for each in parts:
        kind = merged.WhichOneof("input")
        if kind is not None and each.WhichOneof("input") is not None:
            merged.ClearField(kind)
        merged.MergeFrom(each)
    return merged


BASE = part(
    sampling={"seed": 11},
    stopping={"max_new_tokens": 24},
    token_ids=TokenIdsInput(ids=range(5, 10)),
)
"""What the examples are laid over, at temperature 0 and at TEMPERATURE with COUPLED."""
TEMPERATURE = 0.9


@dataclass(frozen=True)
class Example:
    """A use of a parameter that shows: with `change` the output is not what it was without."""

    change: GenerateRequest
    given: GenerateRequest = dataclasses.field(default_factory=GenerateRequest)
    """What the parameter needs around it, on both sides."""


class Law(StrEnum):
    """What holds with REJECTION and BLOCK at a temperature above 0."""

    SAMPLED = "equal in law"
    FOLLOWS = "follows¹"
    REPEATABLE = "repeatable²"


@dataclass(frozen=True)
class Capability:
    """One field of a GenerateRequest."""

    field: str
    """Its path, messages joined by dots."""
    summary: str
    range: str
    default: str
    examples: tuple[Example, ...] = ()
    law: Law = Law.SAMPLED
    tests: tuple[str, ...] = ()
    """Tests that are not parametrised from this module."""


def sampling(*changes: dict[str, Any], given: GenerateRequest | None = None) -> tuple[Example, ...]:
    return tuple(Example(part(sampling=c), given or GenerateRequest()) for c in changes)


def stopping(*changes: dict[str, Any], given: GenerateRequest | None = None) -> tuple[Example, ...]:
    return tuple(Example(part(stopping=c), given or GenerateRequest()) for c in changes)


def logprobs(*changes: dict[str, Any], given: GenerateRequest | None = None) -> tuple[Example, ...]:
    return tuple(Example(part(logprobs=c), given or GenerateRequest()) for c in changes)


def grammar(*kinds: dict[str, str]) -> tuple[Example, ...]:
    return sampling(*({"grammar": common_pb2.Grammar(**kind)} for kind in kinds))


def chat(*turns: tuple[str, str]) -> Example:
    messages = [ChatMessage(role=role, content=content) for role, content in turns]
    return Example(GenerateRequest(chat=ChatInput(messages=messages)))


EOS_OFTEN = part(sampling={"logit_bias": {0: 9.0}})
LETTERS = [*"AEIOUaeiou34567"]
OBJECT = """{"type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "yy"]}},
 "required": ["a", "b"], "additionalProperties": false}"""

CAPABILITIES = (
    Capability(
        "text",
        "The prompt as plain text",
        "not empty; less than the context length",
        "one input is required",
        (
            Example(GenerateRequest(text="Once upon a time")),
            Example(GenerateRequest(text="IJK \N{SNOWMAN}\n")),
        ),
        Law.FOLLOWS,
    ),
    Capability(
        "chat.messages.role",
        "Who speaks a turn",
        "roles that the model's template knows",
        "—",
        (chat(("system", "Be brief."), ("user", "Hi")), chat(("assistant", "Hi"))),
        Law.FOLLOWS,
    ),
    Capability(
        "chat.messages.content",
        "What is said in a turn",
        "any text",
        "empty",
        (chat(("user", "Grüße \N{EARTH GLOBE EUROPE-AFRICA}")),),
        Law.FOLLOWS,
    ),
    Capability(
        "token_ids.ids",
        "The prompt as token ids",
        "at least 1, each in the vocabulary",
        "—",
        (
            Example(GenerateRequest(token_ids=TokenIdsInput(ids=[299]))),
            Example(GenerateRequest(token_ids=TokenIdsInput(ids=[7, 0, 7, 256, 258]))),
        ),
        Law.FOLLOWS,
    ),
    Capability(
        "sampling.temperature",
        "Divides the logits; 0 is greedy",
        "[0, 100]",
        "1, or as the server is configured",
        sampling({"temperature": 0.3}, {"temperature": 1.0}, {"temperature": 30.0}),
    ),
    Capability(
        "sampling.top_k",
        "Keeps the k most likely tokens",
        "0 or more; 0 keeps all",
        "0",
        sampling({"top_k": 1}, {"top_k": 3}),
    ),
    Capability(
        "sampling.top_p",
        "Keeps the smallest set of likely tokens that reaches this probability",
        "(0, 1]",
        "1",
        sampling({"top_p": 0.3}, {"top_p": 1e-6}),
    ),
    Capability(
        "sampling.min_p",
        "Drops tokens less likely than this times the most likely one",
        "[0, 1]",
        "0",
        sampling({"min_p": 0.3}, {"min_p": 1.0}),
    ),
    Capability(
        "sampling.seed",
        "Makes the output repeatable",
        "64 bits",
        "drawn, and told",
        sampling({"seed": 12}, {"seed": 2**64 - 1}),
        Law.REPEATABLE,
        ("test_identity.py::test_one_parameter_under_rejection_and_block",),
    ),
    Capability(
        "sampling.repetition_penalty",
        "Weakens tokens of prompt and output, by division",
        "[0.01, 10]",
        "1",
        sampling({"repetition_penalty": 1.8}, {"repetition_penalty": 0.6}),
    ),
    Capability(
        "sampling.presence_penalty",
        "Subtracted from the logits of tokens of the output",
        "[−2, 2]",
        "0",
        sampling({"presence_penalty": 2.0}, {"presence_penalty": -2.0}),
        tests=("test_reference.py::test_presence_and_frequency_penalties_are_a_loop",),
    ),
    Capability(
        "sampling.frequency_penalty",
        "Subtracted for every time that a token occurs in the output",
        "[−2, 2]",
        "0",
        sampling({"frequency_penalty": 2.0}, {"frequency_penalty": -2.0}),
        tests=("test_reference.py::test_presence_and_frequency_penalties_are_a_loop",),
    ),
    Capability(
        "sampling.logit_bias",
        "Added to the logits of single tokens",
        "[−100, 100], at most 1024 ids",
        "none",
        sampling(
            {"logit_bias": {113: -100.0, 287: 3.0}}, {"logit_bias": dict.fromkeys(range(90), 2.5)}
        ),
    ),
    Capability(
        "sampling.allowed_token_ids",
        "No other tokens are sampled",
        "ids of the vocabulary",
        "all",
        sampling({"allowed_token_ids": range(30, 90)}, {"allowed_token_ids": [77]}),
    ),
    Capability(
        "sampling.suppressed_token_ids",
        "These tokens are not sampled",
        "ids of the vocabulary",
        "none",
        sampling(
            {"suppressed_token_ids": [113, 287, 204]}, {"suppressed_token_ids": range(100, 300)}
        ),
    ),
    Capability(
        "sampling.grammar.json_schema",
        "The output is JSON of this schema",
        "JSON schema, at most 64 KiB",
        "none",
        grammar({"json_schema": OBJECT}, {"json_schema": '{"enum": ["yes", "no", 17]}'}),
    ),
    Capability(
        "sampling.grammar.regex",
        "The output matches this regular expression",
        "Rust's syntax, at most 64 KiB",
        "none",
        grammar({"regex": "[I-N]{3,10}"}, {"regex": "(yes|no)"}, {"regex": "(ab?)*c"}),
    ),
    Capability(
        "sampling.grammar.ebnf",
        "The output is derived from this grammar",
        "Lark's syntax, at most 64 KiB",
        "none",
        grammar(
            {"ebnf": 'start: item ("," item)*\nitem: /[I-N]{1,3}/ | "(" start ")"'},
            {"ebnf": 'start: "II" | "IJ" "K"'},
        ),
    ),
    Capability(
        "stopping.max_new_tokens",
        "The most tokens to generate",
        "1 or more, within the context length",
        "256, or as the server is configured",
        stopping({"max_new_tokens": 1}, {"max_new_tokens": 7}, {"max_new_tokens": 33}),
        Law.FOLLOWS,
    ),
    Capability(
        "stopping.stop_token_ids",
        "Tokens that end the generation",
        "at most 64 ids",
        "none; the model's end token always",
        stopping({"stop_token_ids": range(190, 250)}, {"stop_token_ids": range(30, 90)}),
        Law.FOLLOWS,
    ),
    Capability(
        "stopping.stop_strings",
        "Strings before which the text ends",
        "at most 16, of 1 to 256 bytes",
        "none",
        stopping({"stop_strings": LETTERS}, {"stop_strings": ["K", "\N{REPLACEMENT CHARACTER}"]}),
        Law.FOLLOWS,
    ),
    Capability(
        "stopping.ignore_eos",
        "Goes on after the model's end token",
        "true or false",
        "false",
        stopping({"ignore_eos": True}, given=EOS_OFTEN),
        Law.FOLLOWS,
    ),
    Capability(
        "stopping.min_new_tokens",
        "No stop before so many tokens",
        "0 to max_new_tokens",
        "0",
        (
            *stopping({"min_new_tokens": 9}, {"min_new_tokens": 24}, given=EOS_OFTEN),
            *stopping({"min_new_tokens": 12}, given=part(stopping={"stop_strings": LETTERS})),
        ),
    ),
    Capability(
        "stopping.include_stop_string",
        "The text includes what ended it",
        "true or false",
        "false",
        (
            *stopping(
                {"include_stop_string": True}, given=part(stopping={"stop_strings": LETTERS})
            ),
            *stopping(
                {"include_stop_string": True},
                given=part(stopping={"stop_token_ids": range(30, 90)}),
            ),
        ),
        Law.FOLLOWS,
    ),
    Capability(
        "stopping.skip_special_tokens",
        "The text leaves out special tokens",
        "true or false",
        "true",
        stopping(
            {"skip_special_tokens": False},
            given=merge(EOS_OFTEN, part(stopping={"ignore_eos": True})),
        ),
        Law.FOLLOWS,
    ),
    Capability(
        "speculation.enabled",
        "Whether to draft at all",
        "true or false",
        "true, or as the server is configured",
        tests=("test_identity.py::test_speculation_that_is_off_is_plain_decoding",),
    ),
    Capability(
        "speculation.num_draft_tokens",
        "How many tokens to draft a round at most",
        "0 up to the server's cap",
        "5, or as the server is configured",
        tests=(
            "test_identity.py::test_every_k_gives_the_same",
            "test_law.py::test_the_law_is_that_of_plain_decoding",
        ),
    ),
    Capability(
        "speculation.acceptance_rule",
        "How drafted tokens are accepted",
        "REJECTION, BLOCK, COUPLED",
        "COUPLED, or as the server is configured",
        tests=(
            "test_identity.py::test_every_k_gives_the_same",
            "test_law.py::test_the_law_is_that_of_plain_decoding",
        ),
    ),
    Capability(
        "speculation.draft_topk",
        "How many tokens to draft side by side, after the same one, at most",
        "[1, 64]; 1 where REJECTION or BLOCK sample",
        "1, or as the server is configured",
        law=Law.REPEATABLE,
        tests=("test_identity.py::test_every_way_to_speculate_gives_the_same",),
    ),
    Capability(
        "speculation.adaptive",
        "Whether less is drafted, or nothing, where more would not pay",
        "true or false",
        "true, or as the server is configured",
        tests=(
            "test_identity.py::test_every_way_to_speculate_gives_the_same",
            "test_law.py::test_the_law_where_the_rounds_before_decide_how_much_is_drafted",
        ),
    ),
    Capability(
        "speculation.run_ahead",
        "For how many verdicts the next proposal is prepared",
        "[0, 64]",
        "0, or as the server is configured",
        law=Law.REPEATABLE,
        tests=("test_identity.py::test_every_way_to_speculate_gives_the_same",),
    ),
    Capability(
        "logprobs.num_top",
        "How many likely tokens to list beside each",
        "[0, 20]",
        "0",
        logprobs({"num_top": 1}, {"num_top": 20}, given=part(logprobs={})),
        Law.FOLLOWS,
        ("test_logprobs.py::test_raw_logprobs_are_the_targets",),
    ),
    Capability(
        "logprobs.mode",
        "Before or after processing",
        "RAW, PROCESSED",
        "RAW",
        logprobs(
            {"mode": common_pb2.LOGPROBS_MODE_PROCESSED},
            given=part(
                sampling={"top_k": 5, "presence_penalty": 1.0, "logit_bias": {113: 2.0}},
                logprobs={"num_top": 3},
            ),
        ),
        Law.FOLLOWS,
        (
            "test_logprobs.py::test_raw_logprobs_are_the_targets",
            "test_logprobs.py::test_processed_logprobs_are_those_of_what_is_sampled_from",
        ),
    ),
    Capability(
        "logprobs.prompt",
        "Sends those of the prompt's tokens too",
        "true or false",
        "false",
        logprobs({"prompt": True}, {"prompt": True, "num_top": 2}, given=part(logprobs={})),
        Law.FOLLOWS,
        ("test_logprobs.py::test_prompt_logprobs_are_the_targets",),
    ),
    Capability(
        "n",
        "How many independent completions to generate",
        "[1, 16]",
        "1",
        (
            Example(GenerateRequest(n=3)),
            Example(GenerateRequest(n=2), part(logprobs={"num_top": 1})),
        ),
        Law.FOLLOWS,
        ("test_logprobs.py::test_samples_share_the_prompt_and_equal_their_lone_runs",),
    ),
    Capability(
        "prefix_cache.bypass",
        "Whether to share no computation with other requests",
        "true or false",
        "false",
        law=Law.FOLLOWS,
        tests=("test_prefix_cache.py::test_a_bypass_neither_uses_nor_leaves_anything",),
    ),
    Capability(
        "prefix_cache.salt",
        "Shares only with requests of the same salt",
        "at most 256 bytes",
        "empty",
        law=Law.FOLLOWS,
        tests=("test_prefix_cache.py::test_salts_keep_requests_apart",),
    ),
)

REFERENCE_CASES: dict[str, GenerateRequest] = {
    "nothing": part(),
    "repetition penalty": part(sampling={"repetition_penalty": 1.6}),
    "repetition reward": part(sampling={"repetition_penalty": 0.7}),
    "bias": part(sampling={"logit_bias": {113: -100.0, 287: 4.0, 59: 2.5}}),
    "eos": EOS_OFTEN,
    "min_new_tokens": merge(EOS_OFTEN, part(stopping={"min_new_tokens": 6})),
    "suppressed": part(sampling={"suppressed_token_ids": range(150, 300)}),
    "allowed": part(sampling={"allowed_token_ids": [0, *range(30, 90)]}),
    "stop token ids": part(stopping={"stop_token_ids": range(190, 230)}),
    "max_new_tokens": part(stopping={"max_new_tokens": 5}),
    "everything": part(
        sampling={
            "repetition_penalty": 1.3,
            "logit_bias": {0: 8.0, 40: 4.0, 41: 4.0},
            "allowed_token_ids": [0, *range(30, 200)],
            "suppressed_token_ids": [43, 113, 135],
        },
        stopping={"min_new_tokens": 9, "stop_token_ids": [59, 60, 61], "max_new_tokens": 30},
    ),
}
"""Greedy generations that transformers' own `generate` knows."""

LAW_CASES: dict[str, Sampling] = {
    "penalties": Sampling(
        temperature=0.8, repetition_penalty=2.0, presence_penalty=1.0, frequency_penalty=1.5
    ),
    "rewards": Sampling(temperature=1.0, repetition_penalty=0.7, frequency_penalty=-1.0),
    "bias and masks": Sampling(
        temperature=1.2,
        logit_bias={2: 2.0, 5: -3.0},
        allowed_token_ids=[0, 1, 2, 4, 5, 6],
        suppressed_token_ids=[6],
    ),
    "min_new_tokens": Sampling(
        temperature=1.0, logit_bias={0: 2.0}, min_new_tokens=1, stop_token_ids=[0, 3]
    ),
    "filters": Sampling(temperature=1.3, top_k=6, top_p=0.9, min_p=0.05, presence_penalty=1.0),
    "everything": Sampling(
        temperature=0.9,
        top_k=6,
        top_p=0.97,
        min_p=0.01,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=1.0,
        logit_bias={0: 1.5, 2: 1.0},
        suppressed_token_ids=[7],
        min_new_tokens=1,
        stop_token_ids=[0],
    ),
}
"""Over 8 tokens."""
LAW_GRAMMARS: dict[str, common_pb2.Grammar] = {
    "regex": common_pb2.Grammar(regex='(!|!"|##|#!\\$)'),
    "json_schema": common_pb2.Grammar(json_schema='{"enum": ["", "!", "##"]}'),
    "ebnf": common_pb2.Grammar(ebnf='start: "!" | "!\\"" | "##" | "#!$"'),
}


def request_fields(
    message: Descriptor = GenerateRequest.DESCRIPTOR, path: str = ""
) -> Iterator[str]:
    """The paths of all fields that hold a value."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield path + field.name
        else:
            yield from request_fields(inner, f"{path}{field.name}.")


def fields_of(message: Any, path: str = "") -> set[str]:
    """The paths of the fields that a part of a request sets."""
    found = set()
    for field, value in message.ListFields():
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            found.add(path + field.name)
        else:
            for item in value if field.is_repeated else [value]:
                found |= fields_of(item, f"{path}{field.name}.")
    return found


def _law_fields() -> set[str]:
    names = {field.name for case in LAW_CASES.values() for field, _ in case.ListFields()}
    stops = {"min_new_tokens", "stop_token_ids"}
    return {f"{'stopping' if name in stops else 'sampling'}.{name}" for name in names} | {
        f"sampling.grammar.{kind}" for kind in LAW_GRAMMARS
    }


def where_tested(capability: Capability) -> list[str]:
    """The tests that exercise a parameter, as file::function."""
    found = list(capability.tests)
    if capability.examples:
        found.append("test_identity.py::test_one_parameter")
    if any(capability.field in fields_of(case) for case in REFERENCE_CASES.values()):
        found.append("test_reference.py::test_greedy_is_that_of_transformers")
    if capability.field in _law_fields():
        law = "test_the_law_is_that_of_plain_decoding"
        if capability.field.startswith("sampling.grammar."):
            law = "test_the_law_under_a_grammar"
        found.append(f"test_law.py::{law}")
    return sorted(set(found))


def existing_tests() -> set[str]:
    """The tests of this folder, as file::function."""
    return {
        f"{path.name}::{node.name}"
        for path in FOLDER.glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }


HEAD = """\
# Capabilities

<!-- Written by `python -m tests.conformance.capabilities`. Change the registry, not this page. -->

Every parameter means the same with and without speculation. The conformance suite,
`tests/conformance`, shows it for each of them:

- **Greedy**: at temperature 0 the output is *identical* to plain decoding, with every acceptance
  rule, number of drafted tokens and draft: tokens, text, reason of the end and usage.
- **COUPLED**: at any temperature it is *identical* too, for the same seed.
- **REJECTION and BLOCK**: at a temperature above 0 the output is *equal in law* to plain decoding:
  it has the same distribution, not the same draws.

"Identical" takes a target whose logits do not depend on how many tokens a pass verifies. The suite
runs in float32.

| Parameter | What it does | Range | Default | Greedy | COUPLED | REJECTION, BLOCK | Tested in |
|---|---|---|---|---|---|---|---|
"""
FOOT = """
¹ It acts before the first token is drawn, or on each token that the rule has settled, one at a
time, and has no part in the rule itself. The suite checks its effect on the output.

² The same request with the same models and number of drafted tokens gives the same output again;
another number of drafted tokens gives other draws of the same law.

`test_identity.py` also runs random combinations of all parameters.
"""


def page() -> str:
    """The text of docs/capabilities.md."""
    rows = []
    for capability in CAPABILITIES:
        files = sorted({test.split("::")[0] for test in where_tested(capability)})
        cells = (
            f"`{capability.field}`",
            capability.summary,
            capability.range,
            capability.default,
            "identical",
            "identical",
            capability.law.value,
            ", ".join(f"`{file}`" for file in files),
        )
        rows.append("| " + " | ".join(cells) + " |\n")
    return HEAD + "".join(rows) + FOOT


if __name__ == "__main__":
    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(page())
