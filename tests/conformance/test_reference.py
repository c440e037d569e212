"""Processors against transformers' own, through the gateway and row by row.

Presence and frequency penalties have no counterpart there: an obvious loop is their reference.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from specdec.lm.grammar import GrammarCompiler
from specdec.lm.history import History
from specdec.lm.processing import Rows, join, process
from specdec.lm.tokenizer import TokenizerData
from specdec.v1 import common_pb2
from specdec.v1.common_pb2 import Sampling
from specdec.v1.gateway_pb2 import GenerateRequest
from tests.conformance.capabilities import BASE, REFERENCE_CASES, merge, part
from tests.conformance.reference import load, logits_after, penalized, scores_of
from tests.models import byte_tokens, make_tokenizer
from tests.processing import resolved
from tests.stack import Stack, pair

EOS = 0
VOCABULARY = 300
CPU = torch.device("cpu")


@pytest_asyncio.fixture(scope="module")
async def stack(target_folder: Path, near_folder: Path) -> AsyncIterator[Stack]:
    async with pair(target_folder, near_folder) as running:
        yield running


@pytest.fixture(scope="module")
def model(target_folder: Path) -> PreTrainedModel:
    return load(target_folder)


async def assert_generates(stack: Stack, request: GenerateRequest, expected: Sequence[int]) -> None:
    for k in (0, 5):
        request.speculation.num_draft_tokens = k
        result = await stack.gateway.send(request)
        assert result.token_ids == list(expected), f"k={k}"
        assert result.speculation.fallback_rounds == 0
        assert (result.speculation.num_draft_tokens > 0) == (k > 0 and len(expected) > 1)


@pytest.mark.parametrize("name", REFERENCE_CASES)
async def test_greedy_is_that_of_transformers(
    stack: Stack, model: PreTrainedModel, name: str
) -> None:
    request = merge(BASE, part(sampling={"temperature": 0.0}), REFERENCE_CASES[name])
    sampling, stopping = request.sampling, request.stopping
    options: dict[str, Any] = {}
    if sampling.HasField("repetition_penalty"):
        options["repetition_penalty"] = sampling.repetition_penalty
    if sampling.logit_bias:
        options["sequence_bias"] = [[[i], bias] for i, bias in sampling.logit_bias.items()]
    if sampling.suppressed_token_ids:
        options["suppress_tokens"] = list(sampling.suppressed_token_ids)
    if sampling.allowed_token_ids:
        allowed = list(sampling.allowed_token_ids)
        options["prefix_allowed_tokens_fn"] = lambda batch, sent: allowed
    if stopping.min_new_tokens:
        options["min_new_tokens"] = stopping.min_new_tokens
    ids = torch.tensor([list(request.token_ids.ids)])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=stopping.max_new_tokens,
        eos_token_id=[EOS, *stopping.stop_token_ids],
        pad_token_id=EOS,
        **options,
    )
    await assert_generates(stack, request, found[0, ids.shape[-1] :].tolist())


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"),
    [(2.0, 0.0, 1.0), (0.0, 1.7, 1.0), (-2.0, 0.0, 1.0), (0.0, -1.5, 1.0), (1.2, 0.8, 1.4)],
)
async def test_presence_and_frequency_penalties_are_a_loop(
    stack: Stack, model: PreTrainedModel, presence: float, frequency: float, repetition: float
) -> None:
    values = {
        "presence_penalty": presence,
        "frequency_penalty": frequency,
        "repetition_penalty": repetition,
    }
    request = merge(BASE, part({"temperature": 0.0, **values}, {"max_new_tokens": 40}))
    request.stopping.ignore_eos = True
    prompt, output = list(request.token_ids.ids), list[int]()
    for _ in range(40):
        scores = logits_after(model, prompt + output)[-1].double()
        for token_id in {*prompt, *output}:
            kept = scores[token_id]
            scores[token_id] = kept / repetition if kept > 0 else kept * repetition
        output.append(int(penalized(scores, Sampling(**values), output).argmax()))
    await assert_generates(stack, request, output)


# Row by row.


def random_sampling(choose: random.Random, vocabulary: int) -> Sampling:
    """Settings with about half of all processors on."""

    def sometimes(value: Any, otherwise: Any) -> Any:
        return value if choose.random() < 0.5 else otherwise

    def ids(count: int) -> list[int]:
        return choose.sample(range(vocabulary), count)

    return Sampling(
        temperature=choose.choice([0.0, 0.3, 0.7, 1.0, 1.8]),
        top_k=sometimes(choose.randint(1, vocabulary), 0),
        top_p=sometimes(choose.uniform(0.05, 1.0), 1.0),
        min_p=sometimes(choose.uniform(0.0, 0.5), 0.0),
        repetition_penalty=sometimes(choose.uniform(0.5, 2.5), 1.0),
        presence_penalty=sometimes(choose.uniform(-2.0, 2.0), 0.0),
        frequency_penalty=sometimes(choose.uniform(-2.0, 2.0), 0.0),
        logit_bias=sometimes({i: choose.uniform(-5.0, 5.0) for i in ids(8)}, {}),
        allowed_token_ids=sometimes(ids(vocabulary // 2), []),
        suppressed_token_ids=sometimes(ids(5), []),
        min_new_tokens=sometimes(choose.randint(1, 8), 0),
        stop_token_ids=sorted(ids(3)),
    )


def random_tokens(choose: random.Random, vocabulary: int, least: int, most: int) -> list[int]:
    """From a few different ones, so that some of them repeat."""
    return choose.choices(range(0, vocabulary, 3), k=choose.randint(least, most))


@pytest.mark.parametrize("seed", range(40))
def test_every_row_of_a_block_is_what_transformers_makes_of_it(seed: int) -> None:
    """Blocks of several sessions at once, with random settings and histories."""
    choose, vocabulary = random.Random(seed), 40
    generator = torch.Generator().manual_seed(seed)
    parts, expected, logits = [], [], []
    for _ in range(4):
        sampling = random_sampling(choose, vocabulary)
        prompt = random_tokens(choose, vocabulary, 1, 6)
        committed = random_tokens(choose, vocabulary, 0, 5)
        drafted = random_tokens(choose, vocabulary, 0, 5)
        history = History(sampling, prompt, vocabulary, CPU, None)
        history.commit(committed)
        parts.append(history.rows(drafted))
        block = 3.0 * torch.randn(len(drafted) + 1, vocabulary, generator=generator)
        logits.append(block)
        expected += [
            scores_of(row, sampling, prompt, committed + drafted[:i]) for i, row in enumerate(block)
        ]
    ours, theirs = process(torch.cat(logits), join(parts)), torch.stack(expected)
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=1e-6, atol=1e-9)
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def histories(seed: int) -> list[tuple[History, list[int]]]:
    """Sessions somewhere in their outputs, some with grammars, and what each has drafted."""
    compiler = GrammarCompiler(
        TokenizerData.from_transformers(make_tokenizer(byte_tokens(VOCABULARY))).content,
        VOCABULARY,
        [EOS],
    )
    choose, found = random.Random(seed), []
    for index in range(5):
        prompt = random_tokens(choose, VOCABULARY, 1, 6)
        if index % 2:
            sampling = resolved(Sampling(temperature=0.7, frequency_penalty=0.5))
            # Token 33 is "A", and 257 on are pairs of letters.
            state = compiler.start(common_pb2.Grammar(regex="A{2,9}(B|C)?"))
            committed = [33] * choose.randint(0, 3)
            drafted = [33] * choose.randint(2, 6) + [34, EOS]
        else:
            sampling, state = random_sampling(choose, VOCABULARY), None
            committed = random_tokens(choose, VOCABULARY, 0, 5)
            drafted = random_tokens(choose, VOCABULARY, 0, 6)
        history = History(sampling, prompt, VOCABULARY, CPU, state)
        history.commit(committed)
        found.append((history, drafted))
    return found


@pytest.mark.parametrize("seed", range(6))
def test_rows_of_a_block_are_those_made_by_committing_one_by_one(seed: int) -> None:
    logits = 2.0 * torch.randn(
        1, VOCABULARY, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )
    for history, drafted in histories(seed):
        together = process(logits.expand(len(drafted) + 1, -1), history.rows(drafted))
        # What the draft asks for, one row at a time.
        for first in range(len(drafted) + 1):
            alone = process(logits, history.rows(drafted[:first], first=first))
            assert torch.equal(alone[0], together[first])
        for row, token_id in enumerate([*drafted, None]):
            if row > 0 and drafted[row - 1] == EOS and history._grammar is not None:
                break  # Nothing is sampled after the end.
            committed = process(logits, history.rows([]))[0]
            assert torch.equal(committed, together[row]), row
            if token_id is not None:
                history.commit([token_id])


@pytest.mark.parametrize("seed", range(6))
def test_joined_rows_are_what_each_session_gives_alone(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    parts: list[Rows] = []
    blocks = []
    for history, drafted in histories(seed):
        parts.append(history.rows(drafted))
        blocks.append(2.0 * torch.randn(len(drafted) + 1, VOCABULARY, generator=generator))
    together = process(torch.cat(blocks), join(parts))
    alone = [process(block, rows) for block, rows in zip(blocks, parts, strict=True)]
    assert torch.equal(together, torch.cat(alone))
