"""From logits to what is sampled: the tokens that transformers keeps, and draws from them."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.lm.processing import draw, is_greedy
from specdec.v1.common_pb2 import Sampling
from tests.processing import processed

ROWS, VOCABULARY = 64, 50
BELOW_ONE = math.nextafter(1.0, 0.0)


def sampling(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Sampling:
    return Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


def reference(logits: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """What transformers' own warpers make of the logits, in the order of its `generate`."""
    warpers = LogitsProcessorList([TemperatureLogitsWarper(settings.temperature)])
    if settings.top_k:
        warpers.append(TopKLogitsWarper(settings.top_k))
    if settings.top_p < 1.0:
        warpers.append(TopPLogitsWarper(settings.top_p))
    if settings.min_p:
        warpers.append(MinPLogitsWarper(settings.min_p))
    # They look at the scores only. In float64: a threshold that float32 rounds to the other side
    # is no difference of meaning.
    return warpers(torch.zeros(len(logits), 1, dtype=torch.int64), logits.double())


def random_logits(scale: float = 2.5) -> torch.Tensor:
    """Rows from almost flat to peaked, no two entries equal."""
    generator = torch.Generator().manual_seed(20)
    rows = torch.randn(ROWS, VOCABULARY, generator=generator, dtype=torch.float64)
    return rows * torch.linspace(0.1, scale, ROWS).unsqueeze(-1)


def assert_same(logits: torch.Tensor, settings: Sampling) -> None:
    ours, theirs = processed(logits, settings), reference(logits, settings)
    assert torch.equal(ours > -torch.inf, theirs > -torch.inf)
    torch.testing.assert_close(ours.softmax(-1), theirs.softmax(-1), rtol=0.0, atol=1e-6)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
@pytest.mark.parametrize("top_k", [0, 1, 5, VOCABULARY, 10 * VOCABULARY])
@pytest.mark.parametrize("top_p", [1.0, 0.95, 0.4, 1e-9])
@pytest.mark.parametrize("min_p", [0.0, 0.02, 0.3, 1.0])
def test_the_tokens_kept_are_those_that_transformers_keeps(
    temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    assert_same(random_logits(), sampling(temperature, top_k, top_p, min_p))


@pytest.mark.parametrize("scale", [0.5, 4.0])
@pytest.mark.parametrize("top_p", [0.999, 0.9, 0.3])
def test_the_tokens_kept_of_a_large_vocabulary_are_those_that_transformers_keeps(
    top_p: float, scale: float
) -> None:
    """Flat rows, which keep thousands of tokens, and peaked ones, which keep a few."""
    generator = torch.Generator().manual_seed(21)
    logits = scale * torch.randn(8, 5_000, generator=generator, dtype=torch.float64)
    assert_same(logits, sampling(top_p=top_p))


@pytest.mark.parametrize(
    "settings", [sampling(0.7, top_k=30), sampling(top_p=0.9), sampling(min_p=0.1), sampling(1.3)]
)
def test_tokens_that_are_already_excluded_stay_excluded(settings: Sampling) -> None:
    logits = random_logits()
    excluded = torch.rand(ROWS, VOCABULARY, generator=torch.Generator().manual_seed(3)) < 0.6
    logits = logits.masked_fill(excluded, -torch.inf)
    assert not (processed(logits, settings) > -torch.inf)[excluded].any()
    assert_same(logits, settings)


def test_top_k_keeps_all_finite_tokens_when_fewer_than_k_are_left() -> None:
    logits = torch.full((1, 10), -torch.inf)
    logits[0, [2, 7]] = torch.tensor([1.0, -3.0])
    assert (processed(logits, sampling(top_k=5)) > -torch.inf).nonzero()[:, 1].tolist() == [2, 7]


def test_top_k_keeps_every_token_that_ties_with_the_kth() -> None:
    logits = torch.tensor([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0]])
    kept = processed(logits, sampling(top_k=2)) > -torch.inf
    assert kept.tolist() == [[True, False, True, True, True, False]]
    assert torch.equal(kept, reference(logits, sampling(top_k=2)) > -torch.inf)


def test_a_tiny_top_p_keeps_exactly_the_most_likely_token() -> None:
    logits = random_logits()
    kept = processed(logits, sampling(top_p=1e-30)) > -torch.inf
    assert kept.sum(dim=-1).tolist() == [1] * ROWS
    assert torch.equal(kept.long().argmax(dim=-1), logits.argmax(dim=-1))


def test_top_p_keeps_one_token_of_a_row_of_equals() -> None:
    kept = processed(torch.zeros(3, 8), sampling(top_p=0.1)) > -torch.inf
    assert kept.sum(dim=-1).tolist() == [1, 1, 1]


def test_top_p_keeps_the_token_that_reaches_it_and_no_further_one() -> None:
    # Powers of two: the sums are exact.
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125], dtype=torch.float64).log()
    for top_p, kept in [(0.5, 1), (0.500001, 2), (0.75, 2), (0.750001, 3), (0.99, 4)]:
        assert int((processed(logits, sampling(top_p=top_p)) > -torch.inf).sum()) == kept, top_p


def test_min_p_keeps_the_tokens_from_the_limit_on() -> None:
    for factor, kept in [(1.0 - 1e-9, 1), (1.0 + 1e-9, 2)]:
        logits = torch.tensor([1.0, 0.1 * factor], dtype=torch.float64).log()
        assert int((processed(logits, sampling(min_p=0.1)) > -torch.inf).sum()) == kept


def test_filters_apply_after_the_temperature() -> None:
    logits = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    kept = [
        int((processed(logits, sampling(t, top_p=0.65)) > -torch.inf).sum())
        for t in (0.5, 1.0, 8.0)
    ]
    assert kept == [1, 2, 2]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_logits_of_any_dtype_are_processed_in_float64(dtype: torch.dtype) -> None:
    logits = random_logits().to(dtype)
    settings = sampling(0.7, top_k=20, top_p=0.9, min_p=0.01)
    scores = processed(logits, settings)
    assert scores.dtype == torch.float64
    assert torch.equal(scores, processed(logits.double(), settings))


def test_rows_are_processed_independently_of_their_neighbours() -> None:
    logits, settings = random_logits(), sampling(0.7, top_k=20, top_p=0.9, min_p=0.01)
    together = processed(logits.reshape(4, 16, VOCABULARY), settings).reshape(ROWS, VOCABULARY)
    for row in range(ROWS):
        assert torch.equal(processed(logits[row], settings), together[row])


@pytest.mark.parametrize("settings", [sampling(top_p=0.8), sampling(top_p=0.95, top_k=200)])
def test_ties_are_resolved_independently_of_the_neighbours(settings: Sampling) -> None:
    """A 16-bit model gives many equal logits; whether K rows or one are processed must not show."""
    generator = torch.Generator().manual_seed(22)
    scales = torch.tensor([4.0, 2.0, 1.0, 0.1]).unsqueeze(-1)
    logits = (scales * torch.randn(4, 5_000, generator=generator)).to(torch.bfloat16)
    together = processed(logits, settings)
    for row in range(4):
        assert torch.equal(processed(logits[row], settings), together[row]), row


def test_only_temperature_zero_is_greedy() -> None:
    assert is_greedy(sampling(0.0))
    assert not is_greedy(sampling(1e-6))


def test_draw_skips_leading_zeros_at_zero() -> None:
    assert draw(torch.tensor([0.0, 0.0, 0.3, 0.7]), torch.tensor(0.0)).item() == 2


def test_draw_skips_trailing_zeros_just_below_one() -> None:
    u = torch.tensor(BELOW_ONE, dtype=torch.float64)
    assert draw(torch.tensor([0.3, 0.7, 0.0, 0.0]), u).item() == 1


def test_draw_stays_on_the_weights_when_u_times_the_total_rounds_up_to_it() -> None:
    smallest = math.nextafter(0.0, 1.0)
    weights = torch.tensor([0.0, smallest, 0.0], dtype=torch.float64)
    assert BELOW_ONE * smallest == smallest
    assert draw(weights, torch.tensor(BELOW_ONE, dtype=torch.float64)).item() == 1


@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(0.0, 1e6), st.floats(0.0, 1e-300)), min_size=1
    ).filter(any),
    u=st.one_of(st.sampled_from([0.0, BELOW_ONE]), st.floats(0.0, BELOW_ONE)),
)
def test_draw_never_returns_an_index_of_zero_weight(weights: list[float], u: float) -> None:
    index = draw(torch.tensor(weights, dtype=torch.float64), torch.tensor(u, dtype=torch.float64))
    assert weights[int(index)] > 0.0


def test_draw_inverts_the_cumulative_sum_at_its_steps() -> None:
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0])
    u = torch.tensor([0.0, 0.2499, 0.25, 0.7499, 0.75, 0.9999], dtype=torch.float64)
    assert draw(weights.expand(6, 4), u).tolist() == [0, 0, 2, 2, 3, 3]


def test_draw_follows_its_weights() -> None:
    generator = torch.Generator().manual_seed(8)
    weights = torch.rand(20, generator=generator, dtype=torch.float64) ** 3
    weights[[0, 4, 19]] = 0.0
    u = torch.rand(200_000, generator=generator, dtype=torch.float64)
    counts = torch.bincount(draw(weights.expand(len(u), -1), u), minlength=20).double()
    kept = weights > 0.0
    assert counts[~kept].sum() == 0
    expected = weights[kept] / weights.sum() * len(u)
    assert stats.chisquare(counts[kept].numpy(), expected.numpy()).pvalue > 1e-3


def test_draw_of_a_row_does_not_depend_on_its_neighbours() -> None:
    generator = torch.Generator().manual_seed(9)
    weights = torch.rand(4, 5, 12, generator=generator, dtype=torch.float64)
    u = torch.rand(4, 5, generator=generator, dtype=torch.float64)
    together = draw(weights, u)
    assert together.shape == u.shape
    for i in range(4):
        for j in range(5):
            assert draw(weights[i, j], u[i, j]) == together[i, j]
