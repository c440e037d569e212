"""Log-probabilities are those of the target, whatever a token's origin."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from specdec.lm.pages import PAGE_SIZE
from specdec.v1 import common_pb2, gateway_pb2
from specdec.v1.common_pb2 import Sampling, TokenLogprobs
from specdec.v1.gateway_pb2 import LogprobsParams
from tests.conformance.reference import load, logits_after, scores_of
from tests.processing import resolved
from tests.stack import Stack, pair

PROMPT = [5, 6, 7, 8, 9]
LONG_PROMPT = [3 + i * i % 250 for i in range(150)]
TOP = 4
RAW, PROCESSED = common_pb2.LOGPROBS_MODE_RAW, common_pb2.LOGPROBS_MODE_PROCESSED


@pytest_asyncio.fixture(scope="module")
async def stack(target_folder: Path, near_folder: Path) -> AsyncIterator[Stack]:
    """Prompts are fed in chunks of 17."""
    async with pair(target_folder, near_folder, target_options={"max_rows": 17}) as running:
        yield running


@pytest.fixture(scope="module")
def model(target_folder: Path) -> PreTrainedModel:
    return load(target_folder)


def assert_logprobs(found: TokenLogprobs, scores: torch.Tensor, token_id: int, top: int) -> None:
    """Asserts that they are the log-softmax of a row of scores."""
    expected = scores.double().log_softmax(-1)
    assert found.logprob == pytest.approx(float(expected[token_id]), abs=1e-4)
    best = expected.sort(descending=True)
    top = min(top, int((expected > -torch.inf).sum()))
    assert list(found.top_token_ids) == best.indices[:top].tolist()
    assert list(found.top_logprobs) == pytest.approx(best.values[:top].tolist(), abs=1e-4)
    assert list(found.top_logprobs) == sorted(found.top_logprobs, reverse=True)


def assert_all_origins(origins: Sequence[int]) -> None:
    assert set(origins) >= {
        gateway_pb2.TOKEN_ORIGIN_ACCEPTED,
        gateway_pb2.TOKEN_ORIGIN_CORRECTION,
        gateway_pb2.TOKEN_ORIGIN_BONUS,
    }


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
async def test_raw_logprobs_are_the_targets(
    stack: Stack, model: PreTrainedModel, rule: str, temperature: float
) -> None:
    # Processors change what is sampled, and not what is told.
    result = await stack.generate(
        PROMPT,
        k=3,
        rule=rule,
        temperature=temperature,
        seed=4,
        top_k=30,
        frequency_penalty=0.5,
        max_new_tokens=80,
        ignore_eos=True,
        logprobs=LogprobsParams(num_top=TOP, mode=RAW),
    )
    assert_all_origins(result.origins)
    rows = logits_after(model, PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    for found, scores, token_id in zip(result.logprobs, rows, result.token_ids, strict=True):
        assert_logprobs(found, scores, token_id, TOP)


PROCESSORS: dict[str, dict[str, Any]] = {
    "penalties": {"repetition_penalty": 1.4, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    "filters": {"top_k": 12, "top_p": 0.95, "min_p": 0.01},
    "masks": {"suppressed_token_ids": range(150, 200), "logit_bias": {0: 3.0, 20: 2.0}},
    "few": {"top_k": 2},
}


@pytest.mark.parametrize("processors", PROCESSORS)
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("k", [0, 3])
async def test_processed_logprobs_are_those_of_what_is_sampled_from(
    stack: Stack, model: PreTrainedModel, processors: str, temperature: float, k: int
) -> None:
    params = PROCESSORS[processors]
    result = await stack.generate(
        PROMPT,
        k=k,
        rule="block",
        temperature=temperature,
        seed=5,
        max_new_tokens=60,
        ignore_eos=True,
        logprobs=LogprobsParams(num_top=TOP, mode=PROCESSED),
        **params,
    )
    if k:
        assert_all_origins(result.origins)
    # At temperature 0 the temperature counts as 1, as for the reference.
    sampling = resolved(Sampling(temperature=temperature, **params))
    rows = logits_after(model, PROMPT + result.token_ids)[len(PROMPT) - 1 : -1]
    for i, (found, token_id) in enumerate(zip(result.logprobs, result.token_ids, strict=True)):
        scores = scores_of(rows[i], sampling, PROMPT, result.token_ids[:i])
        assert_logprobs(found, scores, token_id, TOP)


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("prompt", [[7], [7, 8], PROMPT, LONG_PROMPT], ids=len)
async def test_prompt_logprobs_are_the_targets(
    stack: Stack, model: PreTrainedModel, prompt: list[int], k: int
) -> None:
    result = await stack.generate(
        prompt,
        k=k,
        temperature=0.0,
        max_new_tokens=6,
        ignore_eos=True,
        logprobs=LogprobsParams(num_top=TOP, prompt=True),
    )
    told = result.prompt_logprobs
    assert told is not None
    assert list(told.token_ids) == prompt
    rows = logits_after(model, prompt + result.token_ids)
    for found, scores, token_id in zip(
        [*told.logprobs, *result.logprobs], rows[:-1], [*prompt, *result.token_ids][1:], strict=True
    ):
        assert_logprobs(found, scores, token_id, TOP)


@pytest.mark.parametrize("rule", ["rejection", "block", "coupled"])
async def test_samples_share_the_prompt_and_equal_their_lone_runs(stack: Stack, rule: str) -> None:
    options: dict[str, Any] = {
        "k": 3,
        "rule": rule,
        "temperature": 0.9,
        "max_new_tokens": 20,
        "ignore_eos": True,
        "logprobs": LogprobsParams(num_top=TOP),
    }
    request = stack.gateway.request(LONG_PROMPT, n=4, seed=6, **options)
    samples = await stack.gateway.send_for_samples(request)
    assert samples[0].completion.seed == 6
    assert len({tuple(sample.token_ids) for sample in samples}) == 4
    assert len({sample.completion.seed for sample in samples}) == 4
    for index, sample in enumerate(samples):
        usage = sample.completion.usage
        assert usage.prompt_tokens == len(LONG_PROMPT)
        if index > 0:
            assert usage.cached_tokens == (len(LONG_PROMPT) - 1) // PAGE_SIZE * PAGE_SIZE
        alone = await stack.generate(LONG_PROMPT, seed=sample.completion.seed, **options)
        assert sample.token_ids == alone.token_ids
        assert sample.text == alone.text
        assert sample.completion.finish_reason == alone.completion.finish_reason
        for one, other in zip(sample.logprobs, alone.logprobs, strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert one.top_token_ids == other.top_token_ids
