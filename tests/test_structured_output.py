"""Output that has to have a form: it always has it, whatever the draft does."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import grpc
import jsonschema
import pytest
import pytest_asyncio
import torch
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draft_service.settings import DEFAULT_DRAFT
from gateway.grammar_check import grammar_fault
from specdec import grammar
from specdec.errors import SpecdecError
from specdec.lm.grammar import GrammarCompiler, GrammarState
from specdec.lm.tokenizer import token_table_sha256
from specdec.models.cache import default_target_path
from specdec.models.pull import pull_default_target
from specdec.v1 import (
    common_pb2,
    draft_pb2,
    draft_pb2_grpc,
    gateway_pb2,
    verifier_pb2,
    verifier_pb2_grpc,
)
from tests.faults.storm import LONG
from tests.models import byte_tokens, make_tokenizer
from tests.stack import RULES, Result, Stack, drafts_are_used, gateway, pair, verifier

PROMPT = [5, 6, 7, 8, 9]
VOCABULARY = 300
EOS = 0
TABLE = byte_tokens(VOCABULARY)
LENGTH = gateway_pb2.FINISH_REASON_LENGTH
STOP = gateway_pb2.FINISH_REASON_STOP


def regex(pattern: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(regex=pattern)


def ebnf(text: str) -> common_pb2.Grammar:
    return common_pb2.Grammar(ebnf=text)


def schema(value: Any) -> common_pb2.Grammar:
    return common_pb2.Grammar(json_schema=json.dumps(value))


@pytest_asyncio.fixture(scope="module")
async def stack(target_folder: Path, draft_folder: Path) -> AsyncIterator[Stack]:
    """One stack for all tests. What nobody awaited on its event loop fails the last of them."""
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with pair(target_folder, draft_folder) as running:
        yield running
    assert not reported, reported


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer(TABLE)


@pytest.fixture(scope="module")
def compiler(tokenizer: Any) -> GrammarCompiler:
    content = tokenizer.backend_tokenizer.to_str().encode()
    return GrammarCompiler(content, VOCABULARY, [EOS])


# --- The form is kept ---------------------------------------------------------------------------

ARITHMETIC = """
start: sum
sum: term ("+" term){1,3}
term: NUMBER | "(" NUMBER "-" NUMBER ")"
NUMBER: /[1-9][0-9]{0,2}/
"""
ARITHMETIC_PATTERN = r"T(\+T){1,3}".replace("T", r"([1-9]\d{0,2}|\([1-9]\d{0,2}-[1-9]\d{0,2}\))")


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        (regex(r"(yes|no), [a-f]{3,9}/x\."), r"(yes|no), [a-f]{3,9}/x\."),
        (regex("[א-ת]{2,4}"), "[א-ת]{2,4}"),
        (regex("^a{0,3}$"), "a{0,3}"),
        (ebnf(ARITHMETIC), ARITHMETIC_PATTERN),
    ],
    ids=["regex", "unicode", "may be empty", "ebnf"],
)
async def test_the_whole_output_matches(
    stack: Stack, form: common_pb2.Grammar, pattern: str, rule: str
) -> None:
    drafted = 0
    for seed in range(8):
        result = await stack.generate(
            PROMPT, grammar=form, k=4, rule=rule, seed=seed, temperature=1.0, max_new_tokens=80
        )
        assert re.fullmatch(pattern, result.text), result.text
        assert result.completion.finish_reason == STOP
        # It is the end-of-sequence token that ends it, once and last.
        assert result.completion.matched_token_id == EOS
        assert result.token_ids.index(EOS) == len(result.token_ids) - 1
        assert result.speculation.fallback_rounds == 0
        drafted += result.speculation.num_draft_tokens
    assert drafted > 0


async def test_the_output_does_not_depend_on_speculation(stack: Stack) -> None:
    options: dict[str, Any] = {"seed": 4, "rule": "coupled", "max_new_tokens": 60}
    form = regex("[a-z]{20,30}")
    plain = await stack.generate(PROMPT, k=0, grammar=form, **options)
    drafted = await stack.generate(PROMPT, k=4, grammar=form, **options)
    assert drafted.token_ids == plain.token_ids
    assert drafted.speculation.num_accepted_tokens > 0


@pytest.mark.parametrize("k", [0, 1, 4])
async def test_a_grammar_with_nothing_to_follow_ends_by_itself(stack: Stack, k: int) -> None:
    result = await stack.generate(PROMPT, grammar=regex("abc"), k=k, max_new_tokens=20)
    assert (result.text, result.completion.finish_reason) == ("abc", STOP)
    assert result.completion.matched_token_id == EOS


@pytest.mark.parametrize("k", [0, 4])
async def test_a_truncated_output_is_the_beginning_of_one_that_matches(
    stack: Stack, compiler: GrammarCompiler, k: int
) -> None:
    form = regex('"[a-z ]{60,90}"')
    result = await stack.generate(PROMPT, grammar=form, k=k, max_new_tokens=13)
    assert result.completion.finish_reason == LENGTH
    assert len(result.token_ids) == 13
    assert EOS not in result.token_ids
    state = compiler.start(form)
    state.commit(result.token_ids)
    assert not state.allowed([])[0, EOS]


async def test_samples_keep_the_form_each_for_itself(stack: Stack) -> None:
    request = stack.gateway.request(
        PROMPT, grammar=regex("[a-z]{4,20}!"), k=4, n=4, seed=1, max_new_tokens=40
    )
    results = await stack.gateway.send_for_samples(request)
    assert len({result.text for result in results}) > 1
    for result in results:
        assert re.fullmatch("[a-z]{4,20}!", result.text)


async def test_greedy_decoding_keeps_the_form(stack: Stack) -> None:
    value = {"type": "array", "items": {"type": "boolean"}, "minItems": 3, "maxItems": 3}
    # Without white space, of which there could be any amount.
    form = schema({**value, "x-guidance": {"whitespace_flexible": False}})
    for k in (0, 4):
        result = await stack.generate(PROMPT, grammar=form, k=k, temperature=0.0)
        assert result.completion.finish_reason == STOP
        assert len(json.loads(result.text)) == 3


# --- Drafts that do not keep it -----------------------------------------------------------------


class _Formless(draft_pb2_grpc.DraftServiceServicer):
    """A draft service that drafts the same, whatever the grammar."""

    def __init__(self, info: common_pb2.ModelInfo, drafted: Sequence[int]) -> None:
        self._info, self._drafted = info, drafted

    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        return draft_pb2.DraftServiceGetModelInfoResponse(model_info=self._info)

    async def Draft(self, request_iterator: Any, context: Any) -> AsyncIterator[Any]:
        base_length, temperature = 0, 0.0
        async for request in request_iterator:
            if request.HasField("open"):
                opening = request.open
                base_length, temperature = opening.base_length, opening.sampling.temperature
                number, count = opening.round, opening.num_draft_tokens
                yield draft_pb2.DraftResponse(
                    opened=common_pb2.Opened(round=number, base_length=base_length)
                )
            else:
                base_length += len(request.advance.token_ids)
                number, count = request.advance.round, request.advance.num_draft_tokens
            drafted = self._drafted[:count]
            distributions = [
                common_pb2.SparseDistribution(token_ids=[token_id], probabilities=[1.0])
                for token_id in drafted
            ]
            proposal = draft_pb2.Proposal(
                round=number,
                base_length=base_length,
                token_ids=drafted,
                distributions=distributions,
                temperature=temperature,
            )
            yield draft_pb2.DraftResponse(proposal=proposal)


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("drafted", ["zz", "aZ", "<eos>"])
async def test_a_drafted_token_that_the_grammar_forbids_is_never_emitted(
    target_folder: Path, drafted: str, rule: str
) -> None:
    ids = [EOS] * 4 if drafted == "<eos>" else [TABLE[letter] for letter in drafted] * 2
    async with verifier(target_folder) as (verifier_address, servicer):
        assert servicer.runtime is not None
        server = grpc.aio.server()
        liar = _Formless(servicer.runtime.info, ids)
        draft_pb2_grpc.add_DraftServiceServicer_to_server(liar, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with gateway(verifier_address, f"127.0.0.1:{port}") as running:
                await drafts_are_used(running)
                accepted = 0
                for seed in range(4):
                    result = await running.generate(
                        PROMPT,
                        grammar=regex("[ab]{12}"),
                        k=4,
                        rule=rule,
                        seed=seed,
                        max_new_tokens=40,
                    )
                    assert re.fullmatch("[ab]{12}", result.text)
                    assert result.speculation.num_draft_tokens > 0
                    accepted += result.speculation.num_accepted_tokens
                # An end-of-sequence token may be drafted just where the output is complete.
                if drafted != "<eos>":
                    assert (accepted > 0) == (drafted == "aZ")
        finally:
            await server.stop(0)


class _Verify:
    """Speaks the Verify stream."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._call = verifier_pb2_grpc.VerifierServiceStub(channel).Verify()

    async def open(self, form: common_pb2.Grammar, committed: Sequence[int] = ()) -> None:
        opening = common_pb2.Open(
            session_id="s1",
            round=1,
            base_length=len(PROMPT) + len(committed),
            prompt_token_ids=PROMPT,
            committed_token_ids=committed,
            sampling=common_pb2.Sampling(
                temperature=1.0, top_p=1.0, repetition_penalty=1.0, seed=4, grammar=form
            ),
            acceptance_rule=common_pb2.ACCEPTANCE_RULE_COUPLED,
            num_draft_tokens=4,
            tokenizer_sha256=token_table_sha256(TABLE),
        )
        await self._call.write(verifier_pb2.VerifyRequest(open=opening))
        assert await self._call.read() is not grpc.aio.EOF, await self._call.details()

    async def verdict(self, **fields: Any) -> verifier_pb2.Verdict:
        candidates = verifier_pb2.Candidates(**fields)
        await self._call.write(verifier_pb2.VerifyRequest(candidates=candidates))
        response = await self._call.read()
        assert isinstance(response, verifier_pb2.VerifyResponse)
        return response.verdict


async def test_a_resumed_session_goes_on_where_it_was(target_folder: Path, tokenizer: Any) -> None:
    form = regex("abc[x-z]{3}!")
    async with (
        verifier(target_folder) as (address, _),
        grpc.aio.insecure_channel(address) as channel,
    ):
        whole = _Verify(channel)
        await whole.open(form)
        tokens: list[int] = []
        for number in range(1, 30):
            verdict = await whole.verdict(round=number, base_length=len(PROMPT) + len(tokens))
            tokens += verdict.token_ids
            if tokens[-1] == EOS:
                break
        assert re.fullmatch("abc[x-z]{3}!", tokenizer.decode(tokens[:-1]))
        for done in range(1, len(tokens)):
            resumed = _Verify(channel)
            await resumed.open(form, tokens[:done])
            # Letters that the grammar would allow at its start are not accepted here.
            verdict = await resumed.verdict(
                round=1, base_length=len(PROMPT) + done, token_ids=[TABLE["Q"]]
            )
            assert (verdict.num_accepted, list(verdict.token_ids)) == (0, [tokens[done]])


# --- Masks --------------------------------------------------------------------------------------

FORMS = (
    regex("(ab|cd)*e?"),
    regex("[a-c]{2,5}"),
    regex("a?"),
    regex("αβ?.{0,3}"),
    schema({"enum": ["ab", "abc", 1, None]}),
    schema({"type": "array", "items": {"type": "integer"}, "maxItems": 2}),
    ebnf('start: "(" start? ")" | /[a-c]+/'),
)


def walk(state: GrammarState, choices: list[int], wild: list[int]) -> list[int]:
    """Tokens that the grammar allows as far as the choices go, and some that it may not allow."""
    taken: list[int] = []
    for choice in choices:
        allowed = state.allowed(taken)[-1].nonzero().flatten().tolist()
        taken.append(allowed[choice % len(allowed)])
        if taken[-1] == EOS:
            break
    return taken + wild


@settings(max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    form=st.sampled_from(FORMS),
    before=st.lists(st.integers(0, 999), max_size=3),
    choices=st.lists(st.integers(0, 999), max_size=5),
    wild=st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
)
def test_the_masks_of_a_block_are_those_of_single_steps(
    compiler: GrammarCompiler,
    form: common_pb2.Grammar,
    before: list[int],
    choices: list[int],
    wild: list[int],
) -> None:
    committed = [t for t in walk(compiler.start(form), before, []) if t != EOS]
    state = compiler.start(form)
    state.commit(committed)
    drafted = walk(state, choices, wild)
    masks = state.allowed(drafted)
    assert masks.shape == (len(drafted) + 1, VOCABULARY)
    # Looking ahead has moved nothing.
    assert torch.equal(state.allowed(drafted), masks)

    single = compiler.start(form)
    for token_id in committed:
        single.commit([token_id])
    for row, token_id in zip(masks, [*drafted, None], strict=True):
        expected = single.allowed([])[0]
        assert expected.any()
        assert torch.equal(row, expected)
        if token_id is None or token_id == EOS or not expected[token_id]:
            return
        single.commit([token_id])


def test_a_token_that_does_not_fit_is_not_committed(compiler: GrammarCompiler) -> None:
    state = compiler.start(regex("ab"))
    with pytest.raises(SpecdecError, match="do not fit"):
        state.commit([TABLE["b"]])


def test_a_grammar_that_becomes_too_complex_is_an_error_and_not_an_end(
    compiler: GrammarCompiler,
) -> None:
    state = compiler.start(regex("((a{1,1000}){1,1000}){1,1000}"))

    def go_on() -> None:
        for _ in range(400):
            assert state.allowed([])[0].nonzero().flatten().tolist() != [EOS]
            state.commit([TABLE["a"]])

    with pytest.raises((SpecdecError, ValueError), match="too complex"):
        go_on()


# --- Refusals -----------------------------------------------------------------------------------


async def refusal(stack: Stack, **options: Any) -> dict[str, str]:
    """The fields that a refused request is told to be at fault, with their descriptions."""
    opened = stack.verifier.runtime.num_sessions if stack.verifier.runtime else 0
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await stack.generate(PROMPT, **options)
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, caught.value
    assert stack.verifier.runtime is not None
    assert stack.verifier.runtime.num_sessions == opened
    status = rpc_status.from_call(caught.value)
    assert status is not None
    found: dict[str, str] = {}
    for detail in status.details:
        bad = error_details_pb2.BadRequest()
        if detail.Unpack(bad):
            found |= {v.field: v.description for v in bad.field_violations}
    return found


BROKEN: dict[str, tuple[common_pb2.Grammar, str]] = {
    "no kind": (common_pb2.Grammar(), "one of json_schema"),
    "not JSON": (common_pb2.Grammar(json_schema="{nope"), "JSON|key|expected"),
    "unknown type": (schema({"type": "strang"}), "strang"),
    "unknown keyword": (schema({"type": "array", "uniqueItems": True}), "uniqueItems"),
    "nothing valid": (schema({"enum": []}), "nsatisfiable"),
    "refers to itself": (schema({"$ref": "#"}), "nothing matches"),
    "remote": (schema({"$ref": "https://example.com/x.json"}), "example.com"),
    "broken regex": (regex("(a"), "unclosed group"),
    "look-around": (regex("(?=a)b"), "look-around"),
    "regex of nothing": (regex(r"[^\s\S]"), "nothing matches"),
    "broken EBNF": (ebnf('start: "a'), "."),
    "unknown rule": (ebnf("start: other"), "other"),
    "no start": (ebnf('other: "a"'), "start"),
    "not EBNF": (ebnf('{"grammars":[{"json_schema":{}}]}'), "."),
    "special token": (ebnf('start: "a" <|im_end|>'), "special tokens"),
    "token id": (ebnf('start: "a" <[7]>'), "special tokens"),
    "empty schema": (common_pb2.Grammar(json_schema=""), "empty"),
    "empty regex": (regex(""), "empty"),
    "blank EBNF": (ebnf(" \n"), "empty"),
    "too large": (regex("a" * (grammar.MAX_GRAMMAR_BYTES + 1)), "at most 65536 bytes"),
}


@pytest.mark.parametrize("name", list(BROKEN))
async def test_a_broken_grammar_is_refused_before_any_work(stack: Stack, name: str) -> None:
    form, description = BROKEN[name]
    found = await refusal(stack, grammar=form)
    assert list(found) == ["sampling.grammar"]
    assert re.search(description, found["sampling.grammar"])
    assert len(found["sampling.grammar"]) <= 300


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"min_new_tokens": 2}, "stopping.min_new_tokens"),
        ({"ignore_eos": True}, "stopping.ignore_eos"),
        ({"allowed_token_ids": [70, 71]}, "sampling.allowed_token_ids"),
        ({"suppressed_token_ids": [70]}, "sampling.suppressed_token_ids"),
    ],
)
async def test_what_cannot_be_combined_is_named(
    stack: Stack, options: dict[str, Any], field: str
) -> None:
    found = await refusal(stack, grammar=regex("[a-z]+"), **options)
    assert found == {field: "cannot be combined with sampling.grammar"}


def _intersections(count: int) -> str:
    terms = (f"/.*[a-{chr(98 + i % 20)}].{{{i}}}/" for i in range(10, 10 + count))
    return "start: A\nA: " + " & ".join(terms)


def _chain(count: int) -> str:
    rules = "\n".join(f'r{i}:r{i + 1}|"y"' for i in range(count))
    return f'start: r0\n{rules}\nr{count}: "y"'


PATHOLOGICAL = {
    "huge repetition": regex("a{1000000}"),
    "nested repetition": regex("((a{1,1000}){1,1000}){1,1000}"),
    "huge string": schema({"type": "string", "minLength": 100_000_000}),
    "huge array": schema({"items": {"type": "null"}, "minItems": 10**7, "type": "array"}),
    "deep regex": regex("(" * 30_000 + "a" + ")" * 30_000),
    "deep schema": common_pb2.Grammar(
        json_schema='{"type":"array","items":' * 2000 + "{}" + "}" * 2000
    ),
    "exponential automaton": regex("[ab]*a[ab]{500}c"),
    "chain of rules": ebnf(_chain(3300)),
    "intersections": ebnf(_intersections(100)),
    "multiples": schema({"allOf": [{"type": "integer", "multipleOf": m} for m in (7919, 7907)]}),
    "many properties": schema({"properties": {str(i): {} for i in range(3900)}, "type": "object"}),
    "optional rules": ebnf("start: " + "b? " * 8000 + "\nb: /[a-z]/"),
    "ambiguous": ebnf("start: a\na: a a a | a a | /[a-z ]/ | "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PATHOLOGICAL))
async def test_a_pathological_grammar_is_refused_or_answered_within_seconds(
    stack: Stack, name: str
) -> None:
    begun = time.monotonic()
    refused: grpc.aio.AioRpcError | None = None
    try:
        result = await stack.generate(PROMPT, grammar=PATHOLOGICAL[name], k=4, max_new_tokens=12)
    except grpc.aio.AioRpcError as error:
        refused = error
    if refused is None:
        assert result.token_ids
    else:
        assert refused.code() == grpc.StatusCode.INVALID_ARGUMENT, refused
        assert "sampling.grammar" in str(refused.details())
    assert time.monotonic() - begun < 20
    # All services are there, and at work.
    after = await stack.generate(PROMPT, grammar=regex("ok"), k=2, max_new_tokens=8)
    assert after.text == "ok"


def test_grammars_are_checked_without_torch() -> None:
    program = (
        "import sys; sys.modules['torch'] = None; from gateway import grammar_check;"
        "from specdec.v1 import common_pb2;"
        "print(grammar_check.grammar_fault(common_pb2.Grammar(regex='a+')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout == "None\n"


# --- The manual ---------------------------------------------------------------------------------

MANUAL = Path(__file__).parents[1] / "docs" / "structured-output.md"
EXAMPLES = re.findall(r"^```(json|regex|lark)\n(.*?)\n```$", MANUAL.read_text(), re.M | re.S)
SAID = {
    "json": ('{"answer":"no","sure":true}', '{"answer":"perhaps"}'),
    "regex": ("2024-05-31", "2024-5-31"),
    "lark": ("12*(3+x)", "12**3"),
}


@pytest.mark.parametrize("kind", list(SAID))
def test_the_examples_of_the_manual_do_what_it_says(compiler: GrammarCompiler, kind: str) -> None:
    [text] = [text for found, text in EXAMPLES if found == kind]
    field = {"json": "json_schema", "regex": "regex", "lark": "ebnf"}[kind]
    form = common_pb2.Grammar(**{field: text})
    assert grammar_fault(form) is None
    good, bad = SAID[kind]
    state = compiler.start(form)
    state.commit([TABLE[byte] for byte in good])
    assert state.allowed([])[0, EOS]
    with pytest.raises(SpecdecError, match="do not fit"):
        compiler.start(form).commit([TABLE[byte] for byte in bad])


# --- A real pair --------------------------------------------------------------------------------

# White space between the parts costs many tokens and shows little.
COMPACT = {"x-guidance": {"whitespace_flexible": False}}
WORD = {"type": "string", "pattern": "^[A-Za-z]{1,6}$"}
SCHEMAS: dict[str, tuple[str, dict[str, Any]]] = {
    "person": (
        "Describe a person in JSON with name and age.",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": "^[A-Z][a-z]{1,5}$"},
                "age": {"type": "integer", "minimum": 0, "maximum": 120},
            },
            "required": ["name", "age"],
            "additionalProperties": False,
        },
    ),
    "ticket": (
        "Describe a support ticket in JSON with status and priority.",
        {
            **COMPACT,
            "type": "object",
            "properties": {
                "status": {"enum": ["open", "closed", "in progress"]},
                "priority": {"enum": [1, 2, 3, None]},
            },
            "required": ["status"],
            "additionalProperties": False,
        },
    ),
    "grid": (
        "Give a small matrix of digits in JSON.",
        {
            **COMPACT,
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": 9},
                "minItems": 1,
                "maxItems": 2,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    ),
    "product": (
        "Describe a product in JSON with price and tags.",
        {
            **COMPACT,
            "type": "object",
            "properties": {
                "price": {"type": "number", "minimum": 0, "maximum": 100, "multipleOf": 0.5},
                "tags": {"type": "array", "items": WORD, "minItems": 1, "maxItems": 2},
            },
            "required": ["price", "tags"],
            "additionalProperties": False,
        },
    ),
    "weather": (
        "Give a weather forecast in JSON.",
        {
            **COMPACT,
            "type": "array",
            "items": {
                "type": "object",
                "properties": {"rain": {"type": "boolean"}},
                "required": ["rain"],
                "additionalProperties": False,
            },
            "minItems": 1,
            "maxItems": 2,
        },
    ),
}
GENERATIONS = 40 if LONG else 16  # of each schema


def chat_request(
    stack: Stack, prompt: str, form: common_pb2.Grammar, seed: int
) -> gateway_pb2.GenerateRequest:
    rule = list(RULES)[seed % len(RULES)]
    request = stack.gateway.request(
        "", grammar=form, k=4, rule=rule, seed=seed, temperature=1.0, max_new_tokens=200
    )
    request.chat.messages.add(role="user", content=prompt)
    return request


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_every_answer_of_the_default_pair_is_valid(
    record_property: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    pull_default_target(None, lambda stage, done, total: None)
    target = default_target_path()
    options = {"dtype": "bfloat16"}
    drafted = accepted = 0
    async with pair(
        target,
        DEFAULT_DRAFT,
        target_options=options,
        draft_options=options,
        draft_patience_seconds=120.0,
    ) as stack:
        for number, (name, (prompt, value)) in enumerate(SCHEMAS.items()):
            begun = time.monotonic()
            at_once = asyncio.Semaphore(4)
            form = schema(value)

            async def answer(
                seed: int,
                prompt: str = prompt,
                form: common_pb2.Grammar = form,
                at_once: asyncio.Semaphore = at_once,
            ) -> Result:
                async with at_once:
                    return await stack.gateway.send(chat_request(stack, prompt, form, seed))

            seeds = range(1000 * number, 1000 * number + GENERATIONS)
            results = await asyncio.gather(*(answer(seed) for seed in seeds))
            for result in results:
                jsonschema.validate(json.loads(result.text), value)
                assert result.completion.finish_reason == STOP
                # All that the schema allows may be outside of the draft's vocabulary.
                reason = result.speculation.fallback_reason
                assert reason in ("", "the draft proposed nothing")
            of_schema = sum(result.speculation.num_draft_tokens for result in results)
            good = sum(result.speculation.num_accepted_tokens for result in results)
            tokens = sum(len(result.token_ids) for result in results) / len(results)
            line = f"{name}: accepted {good} of {of_schema} drafted ({good / of_schema:.0%})"
            record_property(f"acceptance_{name}", round(good / of_schema, 3))
            with capsys.disabled():
                seconds = time.monotonic() - begun
                print(f"\n{line}, {tokens:.0f} tokens each, {seconds:.0f} s", end="")
            drafted += of_schema
            accepted += good
    assert accepted > 0
    record_property("acceptance", round(accepted / drafted, 3))
