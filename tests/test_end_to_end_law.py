"""The output's law through real gRPC servers, against the target's own, enumerated.

A tiny target over 16 tokens has 256 continuations of two tokens, whose probabilities are computed
exactly. Thousands of generations with different seeds are compared with them by chi-square and
total variation. The noise floor is measured: 2,000 honest samples of the same size are drawn from
the exact law, and the services must come within the largest total variation among them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from specdec.v1 import common_pb2
from tests.models import byte_tokens, make_model
from tests.processing import processed
from tests.stack import Stack, pair

VOCABULARY = 16
# It repeats itself, so that something is copied where drafts are copies.
PROMPT = [3, 1, 4, 3, 1]
DRAWS = 2000
HONEST_SAMPLES = 2000


def exact_law(folder: Path, sampling: common_pb2.Sampling) -> torch.Tensor:
    """[V, V]: the probability of each continuation of two tokens."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        first = model(torch.tensor([PROMPT])).logits[0, -1]
        batch = torch.tensor([[*PROMPT, token] for token in range(VOCABULARY)])
        second = model(batch).logits[:, -1]
    first, second = (processed(rows, sampling).softmax(-1) for rows in (first, second))
    return first[:, None] * second


async def draw(stack: Stack, rule: str, k: int, sampling: common_pb2.Sampling) -> torch.Tensor:
    """[V, V]: how often each continuation came."""
    counts: Counter[tuple[int, ...]] = Counter()
    seeds = iter(range(DRAWS))

    async def client() -> None:
        for seed in seeds:
            # More tokens than are looked at, so that the limit clamps no block that matters.
            result = await stack.generate(
                PROMPT,
                k=k,
                rule=rule,
                seed=seed,
                max_new_tokens=4,
                ignore_eos=True,
                temperature=sampling.temperature,
                top_k=sampling.top_k,
                top_p=sampling.top_p,
            )
            # Every first round has a draft: where drafts are copies, later ones may have none.
            assert result.speculation.drafted_per_position[0] > 0
            assert result.speculation.fallback_reason in ("", "the draft proposed nothing")
            counts[tuple(result.token_ids[:2])] += 1

    await asyncio.gather(*(client() for _ in range(8)))
    table = torch.zeros(VOCABULARY, VOCABULARY, dtype=torch.float64)
    for pair_of_tokens, count in counts.items():
        table[pair_of_tokens] = count
    return table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "drafters"),
    [
        ("rejection", ["model"]),
        ("block", ["model"]),
        ("coupled", ["model"]),
        ("rejection", ["lookup", "model"]),
        ("block", ["suffix"]),
    ],
)
async def test_the_output_has_the_law_of_the_target(
    tmp_path: Path, rule: str, drafters: list[str]
) -> None:
    table = byte_tokens(VOCABULARY)
    target = make_model(tmp_path / "target", seed=1, rows=VOCABULARY, table=table)
    draft = make_model(tmp_path / "draft", seed=2, rows=VOCABULARY, table=table, near=target)
    sampling = common_pb2.Sampling(temperature=1.5, top_k=12, top_p=0.97)
    expected = exact_law(target, sampling)
    # A sparse q of 4 entries: truncated well within the support of p.
    options = {"draft_top_n": 4, "drafters": drafters, "min_match": 2}
    async with pair(target, draft if "model" in drafters else None, draft_options=options) as stack:
        observed = await draw(stack, rule, 3, sampling)
    assert_law(observed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_a_draft_with_another_tokenizer_does_not_change_it(tmp_path: Path, rule: str) -> None:
    target = make_model(tmp_path / "target", seed=1, rows=VOCABULARY)
    # The same characters, so that what is drafted can be said, with other ids.
    table = {name: index for index, name in enumerate(reversed(byte_tokens(VOCABULARY)))}
    draft = make_model(tmp_path / "draft", seed=2, rows=VOCABULARY, table=table)
    sampling = common_pb2.Sampling(temperature=1.5, top_k=12, top_p=0.97)
    expected = exact_law(target, sampling)
    async with pair(target, draft, draft_options={"target_tokenizer": str(target)}) as stack:
        observed = await draw(stack, rule, 3, sampling)
    assert_law(observed, expected)


def assert_law(observed: torch.Tensor, expected: torch.Tensor) -> None:
    """Compares counts [V, V] with probabilities [V, V]."""
    assert observed[expected == 0].sum() == 0
    variation = float((observed / DRAWS - expected).abs().sum() / 2)
    honest = np.random.default_rng(0).multinomial(
        DRAWS, expected.flatten().numpy(), size=HONEST_SAMPLES
    )
    floor = np.abs(honest / DRAWS - expected.flatten().numpy()).sum(axis=1).max() / 2
    assert variation <= floor

    often = expected * DRAWS >= 5
    pooled_observed = [*observed[often].tolist(), float(observed[~often].sum())]
    pooled_expected = [*(expected[often] * DRAWS).tolist(), float(expected[~often].sum() * DRAWS)]
    assert stats.chisquare(pooled_observed, pooled_expected).pvalue > 1e-4
