"""What users of such systems have reported as broken: losslessness, seeds, stops, parameters.

Some of it is tested where it belongs, and not here again:

- The output has the target's law under every rule, with drafts that oppose it, and acceptance
  matches its formula: tests/test_acceptance_exact.py, tests/test_acceptance_law.py,
  test_the_output_has_the_law_of_the_target.
- A proposal that says another temperature is not used:
  test_a_lying_draft_is_dropped_and_the_generation_goes_on.
- Models whose state cannot be rewound are refused at the start:
  test_an_unusable_model_ends_the_start_with_one_line_that_says_what_to_do.
- Coins are in [0, 1) for the largest 129 hash values:
  test_the_extreme_bits_map_into_the_half_open_interval.
- Embeddings with padding rows fit each other, tables that are permuted do not:
  test_padding_rows_of_the_embedding_are_no_mismatch_and_never_emitted,
  test_a_draft_with_a_permuted_token_table_is_never_used.
- A limit of 1 to 2K + 1 tokens gives exactly so many: test_exactly_as_many_tokens_as_asked_for.
- A prompt that nearly fills the context: test_a_full_context_ends_with_length_and_k_is_clamped.
- Bad values of every field are refused by its name: tests/test_request.py.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import uuid4

import grpc
import pytest
import pytest_asyncio
import torch
from google.protobuf.descriptor import Descriptor
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.lm.pages import PAGE_SIZE
from specdec.lm.tokenizer import token_table_sha256
from specdec.v1 import common_pb2, draft_pb2, draft_pb2_grpc, gateway_pb2
from specdec.v1.common_pb2 import Grammar, PrefixCacheParams
from specdec.v1.gateway_pb2 import ChatInput, ChatMessage, GenerateRequest, LogprobsParams
from tests.models import EOS, byte_tokens, make_model
from tests.processing import processed
from tests.stack import RULES, Result, Stack, draft, pair

PROMPT = [5, 6, 7, 8, 9]
VOCABULARY = 300
EOS_ID = 0
FEW = list(range(60, 72))
"""Token ids that, if no others are allowed, make an output repeat itself."""

Adjust = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""Makes processed scores of logits [V] and the output before them."""


@dataclass
class Setup:
    """Running services, and the target beside them."""

    stack: Stack
    model: Any
    tokenizer: Any

    async def generate(self, prompt: str | Sequence[int] = PROMPT, **options: Any) -> Result:
        defaults = {"k": 4, "max_new_tokens": 16, "ignore_eos": True}
        return await self.stack.generate(prompt, **{**defaults, **options})

    async def greedy(self, prompt: str | Sequence[int] = PROMPT, **options: Any) -> Result:
        return await self.generate(prompt, **{"temperature": 0.0, **options})

    def logits(self, output: Sequence[int], prompt: Sequence[int] = PROMPT) -> torch.Tensor:
        """[len(output) + 1, V]: those of each position of an output and of the one after it."""
        with torch.inference_mode():
            rows = self.model(torch.tensor([[*prompt, *output]])).logits[0]
        return rows[len(prompt) - 1 :].double()

    def by_hand(self, count: int, adjust: Adjust = lambda scores, _: scores) -> list[int]:
        """The greedy output, token by token."""
        output: list[int] = []
        for _ in range(count):
            output.append(int(adjust(self.logits(output)[-1], output).argmax()))
        return output


def opposite(target: Path, folder: Path) -> Path:
    """A draft whose most likely token is the least likely one of the target."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.neg_()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(target).save_pretrained(folder)
    return folder


@pytest_asyncio.fixture(scope="module")
async def near(
    target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Setup]:
    """A draft that is right now and then."""
    folder = tmp_path_factory.mktemp("near") / "model"
    close = make_model(folder, seed=3, rows=VOCABULARY, near=target_folder, noise=0.05)
    async with pair(target_folder, close) as stack:
        yield _setup(stack, target_folder)


@pytest_asyncio.fixture(scope="module")
async def same(target_folder: Path) -> AsyncIterator[Setup]:
    """A draft that is the target."""
    async with pair(target_folder, target_folder) as stack:
        yield _setup(stack, target_folder)


@pytest_asyncio.fixture(scope="module")
async def opposed(
    target_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Setup]:
    """A draft that is never right."""
    folder = opposite(target_folder, tmp_path_factory.mktemp("opposite") / "model")
    async with pair(target_folder, folder) as stack:
        yield _setup(stack, target_folder)


def _setup(stack: Stack, target: Path) -> Setup:
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    return Setup(stack, model, AutoTokenizer.from_pretrained(target))


# --- Losslessness -------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
async def test_a_draft_that_is_the_target_is_accepted_whatever_the_filters(
    same: Setup, rule: str
) -> None:
    # The nucleus fits in the 64 entries that a sparse q has, so that nothing of it is cut off.
    result = await same.generate(
        k=5, rule=rule, temperature=0.3, top_p=0.9, seed=2, max_new_tokens=150
    )
    assert result.speculation.num_draft_tokens >= 100
    assert result.speculation.acceptance_rate >= 0.99


@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_only_the_truncation_of_q_keeps_a_draft_that_is_the_target_from_acceptance(
    target_folder: Path, rule: str
) -> None:
    options = {"k": 5, "rule": rule, "temperature": 1.0, "seed": 2, "max_new_tokens": 150}
    rates = []
    for top_n in (VOCABULARY, 8):
        async with pair(
            target_folder, target_folder, draft_options={"draft_top_n": top_n}
        ) as stack:
            result = await stack.generate(PROMPT, ignore_eos=True, **options)
            rates.append(result.speculation.acceptance_rate)
    assert rates[0] >= 0.99 > rates[1]


async def test_a_draft_says_its_temperature_and_filters_as_the_target_does(
    target_folder: Path,
) -> None:
    sampling = common_pb2.Sampling(temperature=0.3, top_p=0.9, repetition_penalty=1.0, seed=4)
    opening = common_pb2.Open(
        session_id="s",
        round=1,
        base_length=len(PROMPT),
        prompt_token_ids=PROMPT,
        sampling=sampling,
        acceptance_rule=common_pb2.ACCEPTANCE_RULE_REJECTION,
        num_draft_tokens=5,
        tokenizer_sha256=token_table_sha256(byte_tokens(VOCABULARY)),
    )
    async with draft(target_folder) as (address, _), grpc.aio.insecure_channel(address) as channel:
        call = draft_pb2_grpc.DraftServiceStub(channel).Draft()
        await call.write(draft_pb2.DraftRequest(open=opening))
        responses = [await call.read() for _ in range(2)]
        call.cancel()
    proposal = responses[1].proposal
    assert proposal.temperature == 0.3
    assert len(proposal.distributions) == len(proposal.token_ids) == 5
    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.tensor([[*PROMPT, *proposal.token_ids]])).logits[0, len(PROMPT) - 1 :]
    for row, q in zip(
        processed(logits, sampling).softmax(-1), proposal.distributions, strict=False
    ):
        assert 0 < int((row > 0).sum()) <= 64
        assert set(q.token_ids) == set(row.nonzero().flatten().tolist())
        assert list(q.probabilities) == pytest.approx(row[list(q.token_ids)].tolist(), abs=1e-4)


async def test_rounds_that_accept_nothing_or_everything_equal_plain_decoding(
    same: Setup, opposed: Setup
) -> None:
    plain = same.by_hand(40)
    for k in (1, 4, 8):
        everything = await same.greedy(k=k, max_new_tokens=40)
        nothing = await opposed.greedy(k=k, max_new_tokens=40)
        assert everything.token_ids == nothing.token_ids == plain, f"k={k}"
        assert everything.speculation.num_accepted_tokens == everything.speculation.num_draft_tokens
        assert everything.speculation.num_draft_tokens > 0
        assert nothing.speculation.num_accepted_tokens == 0
        assert nothing.speculation.rounds == 40
        assert nothing.speculation.num_draft_tokens >= 40 * k - k * (k + 1) // 2


async def test_the_number_of_drafted_tokens_never_changes_a_greedy_output(near: Setup) -> None:
    plain = near.by_hand(60)
    for k in (*range(9), 16, 20):
        result = await near.greedy(k=k, max_new_tokens=60)
        assert result.token_ids == plain, f"k={k}"
        # Some of it stands and some does not, so that blocks end at every place.
        if k > 1:
            speculation = result.speculation
            assert 0 < speculation.num_accepted_tokens < speculation.num_draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_that_is_the_target_is_accepted_for_every_k(
    same: Setup, temperature: float
) -> None:
    for k in (1, 3, 8, 20):
        result = await same.generate(
            k=k, rule="coupled", temperature=temperature, seed=5, max_new_tokens=100
        )
        assert result.speculation.acceptance_rate >= 0.99, f"k={k}"
        assert result.speculation.rounds == -(-100 // (k + 1))


@pytest.mark.parametrize(
    ("penalty", "value"),
    [("repetition_penalty", 1.3), ("presence_penalty", 0.9), ("frequency_penalty", 0.7)],
)
async def test_penalties_see_the_drafted_tokens_before_each_place(
    same: Setup, near: Setup, penalty: str, value: float
) -> None:
    options: dict[str, Any] = {"allowed_token_ids": FEW, "max_new_tokens": 40}
    plain = await near.greedy(k=0, **options, **{penalty: value})
    adjust = PROCESSORS[penalty](value)
    assert plain.token_ids == near.by_hand(40, adjust)
    assert plain.token_ids != near.by_hand(40, allowing(FEW))
    for setup in (same, near):
        drafted = await setup.greedy(k=8, **options, **{penalty: value})
        assert drafted.token_ids == plain.token_ids
        assert drafted.speculation.num_accepted_tokens > 0
    # The draft sees them too: it goes as wrong as the target.
    result = await same.greedy(k=8, **options, **{penalty: value})
    assert result.speculation.acceptance_rate >= 0.99


# --- Seeds --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
async def test_a_seed_gives_the_same_tokens_alone_and_among_others(near: Setup, rule: str) -> None:
    wanted = {"rule": rule, "seed": 7, "temperature": 1.0, "max_new_tokens": 30}
    alone = await near.generate(**wanted)
    others = [
        near.generate([*PROMPT, index], seed=index, k=index, rule=tuple(RULES)[index % 3])
        for index in range(5)
    ]
    together = await asyncio.gather(*(near.generate(**wanted) for _ in range(3)), *others)
    for result in together[:3]:
        assert result.token_ids == alone.token_ids
        assert result.completion.seed == 7


async def test_requests_without_a_seed_differ(near: Setup) -> None:
    async def one() -> Result:
        return await near.generate(k=2, temperature=1.0)

    results = await asyncio.gather(*(one() for _ in range(100)))
    assert len({result.completion.seed for result in results}) == 100
    assert len({tuple(result.token_ids) for result in results}) == 100
    again = await near.generate(k=2, temperature=1.0, seed=results[0].completion.seed)
    assert again.token_ids == results[0].token_ids


# --- Stops --------------------------------------------------------------------------------------


async def test_a_stop_token_at_any_place_of_a_block_ends_the_generation_there(
    same: Setup, near: Setup
) -> None:
    for seed in range(100):
        plain = await near.generate(k=0, seed=seed, max_new_tokens=10, temperature=1.0)
        if len(set(plain.token_ids)) == 10:
            break
    else:
        pytest.fail("no output has ten different tokens")
    for setup in (same, near):
        for place, stop in enumerate(plain.token_ids):
            result = await setup.generate(
                k=8, seed=seed, max_new_tokens=10, temperature=1.0, stop_token_ids=[stop]
            )
            assert result.token_ids == plain.token_ids[: place + 1]
            assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP
            assert result.completion.matched_token_id == stop
            assert result.completion.usage.completion_tokens == place + 1


# --- Concurrency --------------------------------------------------------------------------------


async def test_sessions_with_different_numbers_of_drafted_tokens_do_not_disturb_each_other(
    near: Setup,
) -> None:
    prompts = [[*PROMPT, *range(20, 20 + extra)] for extra in (0, 1, 7, 30)]
    expected = [(await near.greedy(prompt, k=0)).token_ids for prompt in prompts]
    results = await asyncio.gather(
        *(near.greedy(prompt, k=k) for k in (0, 1, 5) for prompt in prompts)
    )
    assert [result.token_ids for result in results] == expected * 3
    for result, k in zip(results, (k for k in (0, 1, 5) for _ in prompts), strict=True):
        assert len(result.speculation.drafted_per_position) == k


# --- Every field of a request does what it says -------------------------------------------------


def allowing(ids: Sequence[int]) -> Adjust:
    def adjust(scores: torch.Tensor, _: list[int]) -> torch.Tensor:
        allowed = torch.full_like(scores, -torch.inf)
        allowed[list(ids)] = scores[list(ids)]
        return allowed

    return adjust


def temperature(value: float) -> Adjust:
    return lambda scores, _: scores / value


def top_k(value: int) -> Adjust:
    return lambda scores, _: scores.masked_fill(scores < scores.topk(value).values[-1], -torch.inf)


def top_p(value: float) -> Adjust:
    def adjust(scores: torch.Tensor, _: list[int]) -> torch.Tensor:
        kept, total = [], 0.0
        probabilities = scores.softmax(-1)
        for token_id in probabilities.argsort(descending=True).tolist():
            kept.append(token_id)
            total += float(probabilities[token_id])
            if total >= value:
                break
        return allowing(kept)(scores, [])

    return adjust


def min_p(value: float) -> Adjust:
    def adjust(scores: torch.Tensor, _: list[int]) -> torch.Tensor:
        probabilities = scores.softmax(-1)
        return scores.masked_fill(probabilities < value * probabilities.max(), -torch.inf)

    return adjust


def repetition_penalty(value: float) -> Adjust:
    def adjust(scores: torch.Tensor, output: list[int]) -> torch.Tensor:
        scores = scores.clone()
        for token_id in {*PROMPT, *output}:
            positive = scores[token_id] > 0
            scores[token_id] = scores[token_id] / value if positive else scores[token_id] * value
        return allowing(FEW)(scores, output)

    return adjust


def presence_penalty(value: float) -> Adjust:
    def adjust(scores: torch.Tensor, output: list[int]) -> torch.Tensor:
        scores = scores.clone()
        scores[list(set(output))] -= value
        return allowing(FEW)(scores, output)

    return adjust


def frequency_penalty(value: float) -> Adjust:
    def adjust(scores: torch.Tensor, output: list[int]) -> torch.Tensor:
        scores = scores.clone()
        for token_id in output:
            scores[token_id] -= value
        return allowing(FEW)(scores, output)

    return adjust


def logit_bias(value: dict[int, float]) -> Adjust:
    def adjust(scores: torch.Tensor, _: list[int]) -> torch.Tensor:
        scores = scores.clone()
        for token_id, bias in value.items():
            scores[token_id] += bias
        return scores

    return adjust


def suppressed_token_ids(value: list[int]) -> Adjust:
    return allowing([token_id for token_id in range(VOCABULARY) if token_id not in value])


# The penalties are for outputs of FEW ids.
PROCESSORS: dict[str, Callable[[Any], Adjust]] = {
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
    "repetition_penalty": repetition_penalty,
    "presence_penalty": presence_penalty,
    "frequency_penalty": frequency_penalty,
    "logit_bias": logit_bias,
    "allowed_token_ids": allowing,
    "suppressed_token_ids": suppressed_token_ids,
}
VALUES: dict[str, tuple[Any, ...]] = {
    "temperature": (0.4, 2.5),
    "top_k": (1, 3),
    "top_p": (0.3, 0.8),
    "min_p": (0.1, 0.5),
    "repetition_penalty": (0.6, 1.7),
    "presence_penalty": (-1.5, 1.5),
    "frequency_penalty": (-0.7, 1.1),
    "logit_bias": ({9: 8.0, 85: -100.0, 299: 6.5},),
    "allowed_token_ids": (FEW, [9]),
    "suppressed_token_ids": (list(range(40, 280)),),
}

Case = Callable[[Setup], Awaitable[None]]
CASES: dict[str, Case] = {}


def case(*paths: str) -> Callable[[Case], Case]:
    """Registers what shows that fields work."""

    def register(function: Case) -> Case:
        CASES.update(dict.fromkeys(paths, function))
        return function

    return register


def fields_of(message: Descriptor, path: str = "") -> Iterator[str]:
    """The paths of all fields of a message that hold a value, and not other fields."""
    for field in message.fields:
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry:
            yield path + field.name
        else:
            yield from fields_of(inner, f"{path}{field.name}.")


FIELDS = list(fields_of(GenerateRequest.DESCRIPTOR))


@pytest.mark.parametrize("path", FIELDS)
async def test_a_field_of_the_request_does_what_it_says(near: Setup, path: str) -> None:
    assert path in CASES, f"nothing shows that {path} works"
    await CASES[path](near)


def test_there_are_no_cases_of_fields_that_are_gone() -> None:
    assert set(FIELDS) == CASES.keys()


def processor_case(name: str) -> Case:
    """Every emitted token has the probability that the settings give it by hand."""

    async def run(setup: Setup) -> None:
        unchanged = await setup.generate(seed=1, temperature=1.0)
        for value in VALUES[name]:
            options: dict[str, Any] = {"temperature": 1.0, name: value}
            if name.endswith("_penalty"):
                options["allowed_token_ids"] = FEW
            result = await setup.generate(
                seed=1,
                logprobs=LogprobsParams(num_top=20, mode=common_pb2.LOGPROBS_MODE_PROCESSED),
                **options,
            )
            assert result.token_ids != unchanged.token_ids, value
            adjust = PROCESSORS[name](value)
            rows = setup.logits(result.token_ids)[:-1]
            for place, (row, told) in enumerate(zip(rows, result.logprobs, strict=True)):
                scores = adjust(row, result.token_ids[:place]).log_softmax(-1)
                token_id = result.token_ids[place]
                assert told.logprob == pytest.approx(float(scores[token_id]), abs=1e-3)
                assert len(told.top_token_ids) == min(20, int(scores.isfinite().sum()))
                top = scores.topk(len(told.top_token_ids)).values.tolist()
                assert list(told.top_logprobs) == pytest.approx(top, abs=1e-3)
            greedy = await setup.greedy(**{**options, "temperature": 0.0})
            assert greedy.token_ids == setup.by_hand(16, adjust), value

    return run


for _name in PROCESSORS:
    case(f"sampling.{_name}")(processor_case(_name))


@case("text")
async def _(setup: Setup) -> None:
    ids = setup.tokenizer.encode("once upon")
    result = await setup.greedy("once upon")
    assert result.token_ids == (await setup.greedy(ids)).token_ids
    assert result.completion.usage.prompt_tokens == len(ids)
    assert result.token_ids != (await setup.greedy("twice upon")).token_ids


@case("chat.messages.role", "chat.messages.content")
async def _(setup: Setup) -> None:
    for role, content in (("system", "be brief"), ("user", "be brief"), ("user", "hi")):
        turns = [ChatMessage(role=role, content=content), ChatMessage(role="user", content="why")]
        request = setup.stack.gateway.request("", k=4, temperature=0.0, max_new_tokens=16)
        request.chat.CopyFrom(ChatInput(messages=turns))
        result = await setup.stack.gateway.send(request)
        rendered = await setup.greedy(f"{role}:{content}\nuser:why\nassistant:", ignore_eos=False)
        assert result.token_ids == rendered.token_ids
        usage, expected = result.completion.usage, rendered.completion.usage
        assert usage.prompt_tokens == expected.prompt_tokens
        assert usage.completion_tokens == expected.completion_tokens
        # What the conversation left in the cache serves the text that it was rendered to.
        assert expected.cached_tokens == (usage.prompt_tokens - 1) // PAGE_SIZE * PAGE_SIZE


@case("token_ids.ids")
async def _(setup: Setup) -> None:
    assert (await setup.greedy()).token_ids == setup.by_hand(16)


@case("sampling.seed")
async def _(setup: Setup) -> None:
    first, again, other = [
        await setup.generate(seed=seed, temperature=1.0) for seed in (2**64 - 1, 2**64 - 1, 0)
    ]
    assert first.token_ids == again.token_ids != other.token_ids
    assert (first.completion.seed, other.completion.seed) == (2**64 - 1, 0)


@case("sampling.grammar.json_schema", "sampling.grammar.regex", "sampling.grammar.ebnf")
async def _(setup: Setup) -> None:
    for grammar, form in (
        (Grammar(json_schema='{"enum": ["one", "three"]}'), r'\s*"(one|three)"\s*'),
        (Grammar(regex="[0-9]{3}-[xyz]"), "[0-9]{3}-[xyz]"),
        (Grammar(ebnf='start: "a" ("b" | "c") "d"'), "a[bc]d"),
    ):
        for options in ({"temperature": 0.0}, {"temperature": 2.0, "seed": 3}):
            result = await setup.generate(
                grammar=grammar, ignore_eos=False, max_new_tokens=60, **options
            )
            assert re.fullmatch(form, result.text), (grammar, result.text)
            assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP


@case("stopping.max_new_tokens")
async def _(setup: Setup) -> None:
    for limit in (1, 5, 13):
        result = await setup.greedy(max_new_tokens=limit)
        assert result.token_ids == setup.by_hand(limit)
        assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_LENGTH


@case("stopping.stop_token_ids")
async def _(setup: Setup) -> None:
    plain = setup.by_hand(16)
    result = await setup.greedy(stop_token_ids=[plain[6], plain[9]])
    end = min(plain.index(plain[6]), plain.index(plain[9]))
    assert result.token_ids == plain[: end + 1]
    assert result.completion.matched_token_id == plain[end]
    assert result.text == setup.tokenizer.decode(plain[:end])


@case("stopping.stop_strings", "stopping.include_stop_string")
async def _(setup: Setup) -> None:
    text = (await setup.greedy(allowed_token_ids=FEW)).text
    stop = text[5:8]
    for include in (False, True):
        result = await setup.greedy(
            allowed_token_ids=FEW, stop_strings=["never", stop], include_stop_string=include
        )
        before = text.partition(stop)[0]
        assert result.text == (before + stop if include else before)
        assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP
        assert result.completion.matched_string == stop
        token = await setup.greedy(
            allowed_token_ids=[70], stop_token_ids=[70], include_stop_string=include
        )
        assert token.text == (setup.tokenizer.decode([70]) if include else "")


@case("stopping.ignore_eos", "stopping.skip_special_tokens")
async def _(setup: Setup) -> None:
    always: dict[str, Any] = {"logit_bias": {EOS_ID: 100.0}, "max_new_tokens": 7}
    ended = await setup.greedy(**always, ignore_eos=False)
    assert ended.token_ids == [EOS_ID]
    assert ended.completion.matched_token_id == EOS_ID
    assert ended.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP
    for skip, text in ((None, ""), (True, ""), (False, EOS * 7)):
        result = await setup.greedy(**always, skip_special_tokens=skip)
        assert result.token_ids == [EOS_ID] * 7
        assert result.text == text
        assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_LENGTH


@case("stopping.min_new_tokens")
async def _(setup: Setup) -> None:
    for minimum in (1, 4, 6, 15):
        # They end as soon as they may, and until then they are what they are without ends.
        result = await setup.greedy(
            logit_bias={EOS_ID: 100.0, 70: 100.0},
            min_new_tokens=minimum,
            stop_token_ids=[70],
            ignore_eos=False,
        )
        without = [token_id for token_id in range(VOCABULARY) if token_id not in (EOS_ID, 70)]
        assert result.token_ids[:-1] == setup.by_hand(minimum, allowing(without))
        assert result.token_ids[-1] in (EOS_ID, 70)
        assert result.completion.finish_reason == gateway_pb2.FINISH_REASON_STOP
        found = await setup.greedy(
            allowed_token_ids=[70],
            stop_strings=[setup.tokenizer.decode([70])],
            min_new_tokens=minimum,
        )
        assert len(found.token_ids) == minimum
        assert found.text == setup.tokenizer.decode([70] * (minimum - 1))


@case("speculation.enabled")
async def _(setup: Setup) -> None:
    request = setup.stack.gateway.request(
        PROMPT, k=4, temperature=0.0, max_new_tokens=16, ignore_eos=True
    )
    drafted = [await _with_speculation(setup, request, enabled=on) for on in (True, False)]
    assert [result.speculation.num_draft_tokens > 0 for result in drafted] == [True, False]
    assert drafted[1].speculation.rounds == 16
    assert drafted[0].token_ids == drafted[1].token_ids


async def _with_speculation(setup: Setup, request: GenerateRequest, *, enabled: bool) -> Result:
    request.speculation.enabled = enabled
    return await setup.stack.gateway.send(request)


@case("speculation.num_draft_tokens")
async def _(setup: Setup) -> None:
    for k in (0, 1, 3, 7):
        result = await setup.greedy(k=k)
        assert len(result.speculation.drafted_per_position) == k
        assert result.speculation.fallback_rounds == 0


@case("speculation.draft_topk")
async def _(setup: Setup) -> None:
    plain = (await setup.greedy(k=0, max_new_tokens=60)).token_ids
    rounds = []
    for topk in (1, 4):
        result = await setup.greedy(k=8, topk=topk, max_new_tokens=60)
        assert result.token_ids == plain
        rounds.append(result.speculation.rounds)
        # A tree has more tokens than depths.
        drafted = result.speculation.drafted_per_position
        assert (sum(drafted) < result.speculation.num_draft_tokens) == (topk > 1)
    assert rounds[1] < rounds[0]


@case("speculation.adaptive")
async def _(setup: Setup) -> None:
    plain = (await setup.greedy(k=0, max_new_tokens=60)).token_ids
    undrafted = []
    for adaptive in (False, True):
        result = await setup.greedy(k=4, adaptive=adaptive, max_new_tokens=60)
        assert result.token_ids == plain
        speculation = result.speculation
        undrafted.append(speculation.undrafted_rounds)
        most = sum(min(4, 59 - done) for done in range(60))
        assert speculation.num_draft_tokens <= most
    # Here a draft costs as much as the target: it does not pay in every round.
    assert undrafted[0] == 0 < undrafted[1]


@case("speculation.run_ahead")
async def _(setup: Setup) -> None:
    plain = (await setup.greedy(k=0, max_new_tokens=60)).token_ids
    off = await setup.greedy(k=3, run_ahead=0, max_new_tokens=60)
    assert off.token_ids == plain
    assert off.speculation.run_ahead_hits == 0
    # Whether the draft has the time depends on what else runs here.
    for _ in range(10):
        ahead = await setup.greedy(k=3, run_ahead=8, max_new_tokens=60)
        assert ahead.token_ids == plain
        if ahead.speculation.run_ahead_hits:
            break
    assert ahead.speculation.run_ahead_hits > 0


@case("speculation.acceptance_rule")
async def _(setup: Setup) -> None:
    # What the services list is all there is, and all of it works.
    assert setup.stack.verifier.runtime is not None
    listed = list(setup.stack.verifier.runtime.info.acceptance_rules)
    assert setup.stack.draft is not None
    assert setup.stack.draft.runtime is not None
    assert list(setup.stack.draft.runtime.info.acceptance_rules) == listed
    assert set(listed) == set(common_pb2.AcceptanceRule.values()) - {0} == set(RULES.values())
    outputs = set()
    for name, rule in RULES.items():
        result = await setup.generate(rule=name, seed=3, temperature=1.0)
        assert result.speculation.acceptance_rule == rule
        assert result.speculation.num_draft_tokens > 0
        assert result.speculation.fallback_rounds == 0
        outputs.add(tuple(result.token_ids))
    # COUPLED draws from one noise, the other two from independent streams.
    assert len(outputs) > 1
    default = await setup.generate(seed=3)
    assert default.speculation.acceptance_rule == common_pb2.ACCEPTANCE_RULE_COUPLED


@case("prefix_cache.bypass", "prefix_cache.salt")
async def _(setup: Setup) -> None:
    prompt = [9 + i for i in range(40)]
    request = setup.stack.gateway.request(prompt, k=4, temperature=0.0, max_new_tokens=8)

    async def cached(**params: str | bool) -> int:
        request.prefix_cache.CopyFrom(PrefixCacheParams(**params))  # type: ignore[arg-type]
        return (await setup.stack.gateway.send(request)).completion.usage.cached_tokens

    mine = uuid4().hex
    assert [await cached(salt=mine) for _ in range(2)] == [0, 32]
    assert await cached(salt=uuid4().hex) == 0
    assert await cached(salt=mine, bypass=True) == 0
    request.prefix_cache.salt = "x" * 257
    with pytest.raises(grpc.aio.AioRpcError, match=r"prefix_cache\.salt"):
        await setup.stack.gateway.send(request)


@case("logprobs.num_top", "logprobs.mode")
async def _(setup: Setup) -> None:
    for num_top in (0, 1, 20):
        for mode in common_pb2.LogprobsMode.values():
            result = await setup.generate(
                seed=1, temperature=0.5, logprobs=LogprobsParams(num_top=num_top, mode=mode)
            )
            rows = setup.logits(result.token_ids)[:-1]
            if mode == common_pb2.LOGPROBS_MODE_PROCESSED:
                rows = rows / 0.5
            for row, token_id, told in zip(
                rows.log_softmax(-1), result.token_ids, result.logprobs, strict=True
            ):
                assert told.logprob == pytest.approx(float(row[token_id]), abs=1e-3)
                top = row.topk(num_top)
                assert list(told.top_logprobs) == pytest.approx(top.values.tolist(), abs=1e-3)
                assert list(told.top_token_ids) == top.indices.tolist()
            assert result.prompt_logprobs is None
    assert (await setup.generate()).logprobs == []


@case("logprobs.prompt")
async def _(setup: Setup) -> None:
    result = await setup.greedy(logprobs=LogprobsParams(num_top=2, prompt=True))
    told = result.prompt_logprobs
    assert told is not None
    assert list(told.token_ids) == PROMPT
    rows = setup.logits(PROMPT[1:], PROMPT[:1])[:-1].log_softmax(-1)
    expected = [float(row[token_id]) for row, token_id in zip(rows, PROMPT[1:], strict=True)]
    assert [each.logprob for each in told.logprobs] == pytest.approx(expected, abs=1e-3)
    assert all(len(each.top_token_ids) == 2 for each in told.logprobs)


@case("n")
async def _(setup: Setup) -> None:
    options: dict[str, Any] = {"k": 4, "max_new_tokens": 16, "ignore_eos": True}
    request = setup.stack.gateway.request(PROMPT, n=3, seed=9, temperature=1.0, **options)
    results = await setup.stack.gateway.send_for_samples(request)
    assert len({tuple(result.token_ids) for result in results}) == 3
    assert results[0].completion.seed == 9
    for result in results:
        alone = await setup.generate(seed=result.completion.seed, temperature=1.0)
        assert alone.token_ids == result.token_ids
        assert alone.text == result.text
