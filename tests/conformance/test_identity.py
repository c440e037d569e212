"""Speculative output is identical to plain output, for every parameter and for combinations.

At temperature 0 and with COUPLED at temperatures above it, with a draft that the target often
agrees with, one that it never agrees with, and the target itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec.v1 import common_pb2, gateway_pb2
from specdec.v1.gateway_pb2 import GenerateRequest
from tests.conformance.capabilities import (
    BASE,
    CAPABILITIES,
    LETTERS,
    OBJECT,
    TEMPERATURE,
    Example,
    chat,
    merge,
    part,
)
from tests.stack import RULES, Gateway, Result, draft, drafts_are_used, gateway, verifier

# Some hundred comparisons of seven ways to speculate each: over a minute.
pytestmark = pytest.mark.slow

EOS = 0
Gateways = dict[str, Gateway]


class Way(NamedTuple):
    """How to speculate."""

    draft: str
    k: int
    topk: int = 1
    run_ahead: int = 0
    adaptive: bool = False


SPECULATIVE = [
    Way("near", 1),
    Way("near", 5),
    Way("near", 8, run_ahead=4),
    Way("near", 8, topk=4),
    Way("near", 12, topk=3, run_ahead=8, adaptive=True),
    Way("stranger", 2),
    Way("target", 8),
]


@pytest_asyncio.fixture(scope="module")
async def gateways(
    target_folder: Path, near_folder: Path, stranger_folder: Path
) -> AsyncIterator[Gateways]:
    """One verifier, and a gateway to it for each draft."""
    drafts = {"near": near_folder, "stranger": stranger_folder, "target": target_folder}
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with AsyncExitStack() as stack:
        address, _ = await stack.enter_async_context(verifier(target_folder))
        running = {}
        for name, folder in drafts.items():
            draft_address, _ = await stack.enter_async_context(draft(folder))
            running[name] = await stack.enter_async_context(gateway(address, draft_address))
            await drafts_are_used(running[name])
        yield running
    assert not reported, reported


def with_speculation(request: GenerateRequest, k: int, rule: str = "coupled") -> GenerateRequest:
    """The request at K drafted tokens."""
    return in_a_way(request, Way("near", k), rule)


def in_a_way(request: GenerateRequest, way: Way, rule: str = "coupled") -> GenerateRequest:
    changed = GenerateRequest()
    changed.CopyFrom(request)
    changed.speculation.num_draft_tokens = way.k
    changed.speculation.acceptance_rule = RULES[rule]
    changed.speculation.draft_topk = way.topk
    changed.speculation.run_ahead = way.run_ahead
    changed.speculation.adaptive = way.adaptive
    return changed


def at_temperature(temperature: float, *parts: GenerateRequest) -> GenerateRequest:
    return merge(BASE, part(sampling={"temperature": temperature}), *parts)


def outcomes(results: list[Result]) -> list[dict[str, Any]]:
    """What must be identical, of every sample."""
    return [
        {
            "token_ids": r.token_ids,
            "text": r.text,
            "finish_reason": r.completion.finish_reason,
            "matched": (
                r.completion.WhichOneof("matched"),
                r.completion.matched_token_id,
                r.completion.matched_string,
            ),
            "completion_tokens": r.completion.usage.completion_tokens,
            "prompt_tokens": r.completion.usage.prompt_tokens,
            "seed": r.completion.seed,
        }
        for r in results
    ]


def assert_same_logprobs(ours: list[Result], theirs: list[Result]) -> None:
    """As close as sums in another order are."""
    for a, b in zip(ours, theirs, strict=True):
        assert (a.prompt_logprobs is None) == (b.prompt_logprobs is None)
        lists = [(a.logprobs, b.logprobs)]
        if a.prompt_logprobs is not None and b.prompt_logprobs is not None:
            assert a.prompt_logprobs.token_ids == b.prompt_logprobs.token_ids
            lists.append((list(a.prompt_logprobs.logprobs), list(b.prompt_logprobs.logprobs)))
        for one, other in lists:
            for x, y in zip(one, other, strict=True):
                assert x.logprob == pytest.approx(y.logprob, abs=1e-4)
                assert list(x.top_token_ids) == list(y.top_token_ids)
                assert list(x.top_logprobs) == pytest.approx(list(y.top_logprobs), abs=1e-4)


def assert_invariants(request: GenerateRequest, result: Result) -> None:
    """What holds for every output, whatever the draws."""
    stopping, sampling = request.stopping, request.sampling
    tokens, completion = result.token_ids, result.completion
    assert "".join(result.token_texts) == result.text
    assert len(result.token_texts) == len(result.origins) == len(tokens)
    assert completion.usage.completion_tokens == len(tokens)
    assert len(result.logprobs) == (len(tokens) if request.HasField("logprobs") else 0)
    for found in result.logprobs:
        assert len(found.top_token_ids) == len(found.top_logprobs) <= request.logprobs.num_top
    assert 1 <= len(tokens) <= stopping.max_new_tokens
    stops = {*stopping.stop_token_ids, *([] if stopping.ignore_eos else [EOS])}
    assert not stops & set(tokens[:-1]), "tokens after a stop"
    if completion.finish_reason == gateway_pb2.FINISH_REASON_LENGTH:
        assert len(tokens) == stopping.max_new_tokens
        assert completion.WhichOneof("matched") is None
        assert tokens[-1] not in stops
    elif completion.WhichOneof("matched") == "matched_token_id":
        assert tokens[-1] == completion.matched_token_id
        assert completion.matched_token_id in stops
        assert len(tokens) > stopping.min_new_tokens
    else:
        assert completion.matched_string in stopping.stop_strings
        assert len(tokens) >= stopping.min_new_tokens
        if stopping.include_stop_string:
            assert result.text.endswith(completion.matched_string)
    if not stopping.include_stop_string and not stopping.min_new_tokens:
        assert not any(stop in result.text for stop in stopping.stop_strings)
    assert not set(tokens) & set(sampling.suppressed_token_ids)
    if sampling.allowed_token_ids:
        assert set(tokens) <= set(sampling.allowed_token_ids)


async def assert_identical(gateways: Gateways, request: GenerateRequest) -> list[Result]:
    """Asserts that speculation changes nothing. Returns the plain results."""
    requests = [("near", with_speculation(request, 0))]
    requests += [(way.draft, in_a_way(request, way)) for way in SPECULATIVE]
    if request.sampling.temperature == 0.0:
        requests += [("near", with_speculation(request, 5, r)) for r in ("rejection", "block")]
    plain, *others = await asyncio.gather(
        *(gateways[name].send_for_samples(each) for name, each in requests)
    )
    for result in plain:
        assert_invariants(request, result)
    for (name, each), results in zip(requests[1:], others, strict=True):
        case = (name, each.speculation)
        assert outcomes(results) == outcomes(plain), case
        assert_same_logprobs(results, plain)
        for result in results:
            assert_invariants(request, result)
            assert result.speculation.fallback_rounds == 0, case
    return plain


EXAMPLES = [
    pytest.param(example, id=f"{capability.field}-{index}")
    for capability in CAPABILITIES
    for index, example in enumerate(capability.examples)
]


@pytest.mark.parametrize("example", EXAMPLES)
async def test_one_parameter(gateways: Gateways, example: Example) -> None:
    effects = []
    for temperature in (0.0, TEMPERATURE):
        request = at_temperature(temperature, example.given, example.change)
        plain = await assert_identical(gateways, request)
        before = await gateways["near"].send_for_samples(
            with_speculation(at_temperature(temperature, example.given), 0)
        )
        effects.append(
            outcomes(plain) != outcomes(before)
            or [r.logprobs for r in plain] != [r.logprobs for r in before]
            or plain[0].prompt_logprobs != before[0].prompt_logprobs
        )
    assert any(effects), "the example shows nothing: the parameter changes no output"


@pytest.mark.parametrize("example", EXAMPLES)
async def test_one_parameter_under_rejection_and_block(
    gateways: Gateways, example: Example
) -> None:
    """Their draws differ from plain ones: what holds for all draws, and that they repeat."""
    for rule in ("rejection", "block"):
        request = at_temperature(TEMPERATURE, example.given, example.change)
        request = with_speculation(request, 5, rule)
        first, again = [await gateways["near"].send_for_samples(request) for _ in range(2)]
        assert outcomes(first) == outcomes(again)
        for result in first:
            assert_invariants(request, result)
            assert result.speculation.fallback_rounds == 0


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
async def test_every_k_gives_the_same(gateways: Gateways, temperature: float) -> None:
    request = at_temperature(temperature)
    plain = await gateways["near"].send_for_samples(with_speculation(request, 0))
    rules = ["coupled"] if temperature else list(RULES)
    for rule in rules:
        for k in range(1, 11):
            found = await gateways["near"].send_for_samples(with_speculation(request, k, rule))
            assert outcomes(found) == outcomes(plain), (rule, k)
            assert found[0].speculation.num_draft_tokens > 0


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
@pytest.mark.parametrize("topk", [1, 2, 4])
async def test_every_way_to_speculate_gives_the_same(
    gateways: Gateways, topk: int, temperature: float
) -> None:
    request = at_temperature(temperature)
    plain = await gateways["near"].send_for_samples(with_speculation(request, 0))
    hits = 0
    for k, run_ahead, adaptive in product((1, 2, 5, 16), (0, 8), (False, True)):
        way = Way("near", k, topk, run_ahead, adaptive)
        found = await gateways["near"].send_for_samples(in_a_way(request, way))
        assert outcomes(found) == outcomes(plain), way
        assert found[0].speculation.fallback_rounds == 0, way
        hits += found[0].speculation.run_ahead_hits
        assert adaptive or found[0].speculation.num_draft_tokens > 0
        assert run_ahead or found[0].speculation.run_ahead_hits == 0
    assert hits > 0


@pytest.mark.parametrize("temperature", [0.0, TEMPERATURE])
async def test_speculation_that_is_off_is_plain_decoding(
    gateways: Gateways, temperature: float
) -> None:
    request = with_speculation(at_temperature(temperature), 5)
    drafted = await gateways["near"].send(request)
    request.speculation.enabled = False
    plain = await gateways["near"].send(request)
    assert plain.speculation.num_draft_tokens == 0 < drafted.speculation.num_draft_tokens
    assert outcomes([plain]) == outcomes([drafted])


async def test_the_drafts_sometimes_agree_and_sometimes_not(gateways: Gateways) -> None:
    """Without both, the tests of this module would show little."""
    request = at_temperature(0.0, part(stopping={"max_new_tokens": 200, "ignore_eos": True}))
    rates = {}
    for name, running in gateways.items():
        result = await running.send(with_speculation(request, 5))
        speculation = result.speculation
        rates[name] = speculation.accepted_per_position[0] / speculation.drafted_per_position[0]
        if name == "near":
            origins = set(result.origins)
    assert 0.3 < rates["near"] < 0.8, rates
    assert rates["stranger"] < 0.1, rates
    assert rates["target"] == 1.0, rates
    assert origins == {
        gateway_pb2.TOKEN_ORIGIN_ACCEPTED,
        gateway_pb2.TOKEN_ORIGIN_CORRECTION,
        gateway_pb2.TOKEN_ORIGIN_BONUS,
    }


# Combinations.

IDS = st.integers(0, 299)
GRAMMARS = [
    common_pb2.Grammar(regex="[I-N]{3,10}"),
    common_pb2.Grammar(regex="(yes|no)+"),
    common_pb2.Grammar(json_schema=OBJECT),
    common_pb2.Grammar(ebnf='start: item ("," item)*\nitem: /[I-N]{1,3}/ | "(" start ")"'),
]


@st.composite
def requests(draw: st.DrawFn) -> GenerateRequest:
    """Requests that are legal, with about half of the parameters each."""

    def some(**strategies: st.SearchStrategy[Any]) -> dict[str, Any]:
        return {
            name: draw(strategy)
            for name, strategy in strategies.items()
            if draw(st.booleans(), label=name)
        }

    sampling = some(
        top_k=st.integers(1, 40),
        top_p=st.floats(0.1, 1.0),
        min_p=st.floats(0.0, 0.3),
        repetition_penalty=st.floats(0.5, 2.0),
        presence_penalty=st.floats(-2.0, 2.0),
        frequency_penalty=st.floats(-2.0, 2.0),
        logit_bias=st.dictionaries(IDS, st.floats(-8.0, 8.0, width=32), max_size=20),
    )
    sampling["temperature"] = draw(st.sampled_from([0.0, 0.6, 0.9, 1.4]))
    sampling["seed"] = draw(st.integers(0, 2**64 - 1))
    stopping = some(
        stop_token_ids=st.lists(IDS, max_size=20),
        stop_strings=st.lists(st.sampled_from(LETTERS), max_size=4),
        include_stop_string=st.just(True),
        skip_special_tokens=st.booleans(),
    )
    stopping["max_new_tokens"] = draw(st.integers(1, 24))
    if draw(st.integers(0, 3), label="form") == 0:
        sampling["grammar"] = draw(st.sampled_from(GRAMMARS))
    else:
        sampling |= some(
            suppressed_token_ids=st.lists(IDS, max_size=20),
            # Enough of them that no other mask can exclude all.
            allowed_token_ids=st.lists(IDS, min_size=60, max_size=120, unique=True),
        )
        stopping |= some(
            ignore_eos=st.just(True),
            min_new_tokens=st.integers(0, stopping["max_new_tokens"]),
        )
        if draw(st.booleans(), label="ends often"):
            sampling["logit_bias"] = {**sampling.get("logit_bias", {}), EOS: 8.0}
    fields: dict[str, Any] = some(n=st.integers(1, 2))
    if draw(st.booleans(), label="with logprobs"):
        fields["logprobs"] = some(
            num_top=st.integers(0, 5), mode=st.integers(0, 2), prompt=st.booleans()
        )
    if draw(st.booleans(), label="as text"):
        fields["text"] = draw(st.text(min_size=1, max_size=12).filter(str.strip))
    request = merge(BASE, part(sampling, stopping, **fields))
    if draw(st.integers(0, 4), label="as chat") == 0:
        request = merge(request, chat(("user", draw(st.text(max_size=8)))).change)
    return request


@pytest.mark.slow
@settings(max_examples=50, derandomize=True, deadline=None, database=None)
@given(request=requests())
async def test_combinations_of_parameters(gateways: Gateways, request: GenerateRequest) -> None:
    await assert_identical(gateways, request)
