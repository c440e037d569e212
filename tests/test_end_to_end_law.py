"""The output's law through real gRPC servers, against the target's own, enumerated.

A tiny target over 16 tokens has 256 continuations of two tokens, whose probabilities are computed
exactly. Thousands of generations with different seeds are compared with them by chi-square and
total variation. The noise floor is measured: 2,000 honest samples of the same size are drawn from
the exact law, and the services must come within the largest total variation among them.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from gateway.controller import Controller, DraftPlan
from gateway.speculation import Speculation
from gateway.workload import Observation
from specdec.proposals import first_tokens
from specdec.v1 import common_pb2, draft_pb2
from tests.models import byte_tokens, make_model
from tests.processing import processed
from tests.stack import Stack, pair

VOCABULARY = 16
# It repeats itself, so that something is copied where drafts are copies.
PROMPT = [3, 1, 4, 3, 1]
DRAWS = 1200
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


async def draw(
    stack: Stack, rule: str, k: int, sampling: common_pb2.Sampling, **speculation: Any
) -> torch.Tensor:
    """[V, V]: how often each continuation came. `speculation`: how else to speculate."""
    counts: Counter[tuple[int, ...]] = Counter()
    adaptive = speculation.get("adaptive", False)
    drafted = 0
    seeds = iter(range(DRAWS))

    async def client() -> None:
        nonlocal drafted
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
                **speculation,
            )
            # Every first round has a draft: where drafts are copies, later ones may have none.
            assert adaptive or result.speculation.drafted_per_position[0] > 0
            drafted += result.speculation.num_draft_tokens > 0
            assert result.speculation.fallback_reason in ("", "the draft proposed nothing")
            counts[tuple(result.token_ids[:2])] += 1

    await asyncio.gather(*(client() for _ in range(8)))
    assert drafted > DRAWS // 2
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


SAMPLING = common_pb2.Sampling(temperature=1.5, top_k=12, top_p=0.97)


@asynccontextmanager
async def running(folder: Path) -> AsyncIterator[tuple[Stack, torch.Tensor]]:
    """The services, and the law of their target."""
    table = byte_tokens(VOCABULARY)
    target = make_model(folder / "target", seed=1, rows=VOCABULARY, table=table)
    draft = make_model(folder / "draft", seed=2, rows=VOCABULARY, table=table, near=target)
    async with pair(target, draft, draft_options={"draft_top_n": 4}) as stack:
        yield stack, exact_law(target, SAMPLING)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "block"])
async def test_a_draft_that_is_cut_short_and_runs_ahead_does_not_change_it(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    observe = Controller.observe

    def as_if_drafts_paid(controller: Controller, observation: Observation) -> None:
        # Both models are tiny, and the machine may be busy. Of real ones the target takes longer.
        times: dict[str, Any] = {"verify_us": 50_000.0, "draft_us": 200.0, "verify_queue_us": 0.0}
        wires: dict[str, Any] = {"draft_wire_us": 100.0, "verify_wire_us": 100.0}
        observe(controller, observation._replace(**times, **wires))

    monkeypatch.setattr(Controller, "observe", as_if_drafts_paid)
    async with running(tmp_path) as (stack, expected):
        observed = await draw(stack, rule, 3, SAMPLING, adaptive=True, run_ahead=8, topk=3)
    assert_law(observed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["block"])
async def test_a_number_that_depends_on_what_was_accepted_does_not_change_it(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that is led by the rounds before to the utmost, and drafts in most."""
    last: dict[Controller, int] = {}

    def observe(controller: Controller, observation: Observation) -> None:
        last[controller] = observation.num_accepted

    def plan(controller: Controller, limit: int) -> DraftPlan:
        # As many as stood, and one more; none after everything stood.
        wanted = last.get(controller, 1) + 1
        return DraftPlan(min(limit, wanted) if wanted <= 2 else 0)

    monkeypatch.setattr(Controller, "observe", observe)
    monkeypatch.setattr(Controller, "plan", plan)
    async with running(tmp_path) as (stack, expected):
        observed = await draw(stack, rule, 3, SAMPLING, adaptive=True, run_ahead=8)
    assert_law(observed, expected)


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection"])
async def test_a_number_that_depended_on_the_drafted_tokens_would_be_noticed(
    tmp_path: Path, rule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A planted bug: unlikely tokens are dropped, and all that follows them, unverified."""
    proposed = Speculation.propose

    async def only_likely(speculation: Speculation) -> draft_pb2.Proposal:
        proposal = await proposed(speculation)
        count = 0
        for token_id, q in zip(proposal.token_ids, proposal.distributions, strict=True):
            if dict(zip(q.token_ids, q.probabilities, strict=True))[token_id] < 0.3:
                break
            count += 1
        return first_tokens(proposal, count)

    async with running(tmp_path) as (stack, expected):
        monkeypatch.setattr(Speculation, "propose", only_likely)
        monkeypatch.setattr(Controller, "plan", lambda controller, limit: DraftPlan(limit))
        observed = await draw(stack, rule, 3, SAMPLING, adaptive=True)
    with pytest.raises(AssertionError):
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
