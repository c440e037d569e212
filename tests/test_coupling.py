"""The shared noise's choice is that of all tokens' noise, though hardly any is computed."""

from __future__ import annotations

import pytest
import torch

from specdec.lm import coupling
from specdec.lm.coupling import coupled_choice
from specdec.lm.randomness import Stream, gumbel, gumbel_exceeds, key, seed_tensor

VOCABULARY = torch.arange(5000)


def keys_of(seed: int, count: int) -> torch.Tensor:
    return key(seed_tensor(seed), Stream.COUPLED, torch.arange(count))


@pytest.mark.parametrize("spread", [0.0, 0.5, 2.0, 8.0])
@pytest.mark.parametrize("kept", [1, 3, 60, 64, 65, 5000])
def test_the_choice_is_the_argmax_of_scores_and_noise(spread: float, kept: int) -> None:
    generator = torch.Generator().manual_seed(kept)
    scores = spread * torch.randn(80, 5000, generator=generator, dtype=torch.float64)
    if kept < 5000:
        least = scores.topk(kept, dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    keys = keys_of(7, 80)
    expected = (scores + gumbel(keys, VOCABULARY)).argmax(dim=-1)
    assert torch.equal(coupled_choice(scores, keys), expected)


def test_what_is_rare_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    """Among many equal tokens most choices are not among those that are tried first."""
    scores = torch.zeros(200, 5000, dtype=torch.float64)
    keys = keys_of(3, 200)
    expected = (scores + gumbel(keys, VOCABULARY)).argmax(dim=-1)
    assert torch.equal(coupled_choice(scores, keys), expected)
    monkeypatch.setattr(coupling, "_MARGIN", -100.0)
    assert not torch.equal(coupled_choice(scores, keys), expected)


@pytest.mark.parametrize("least", [-2.0, 0.0, 3.0, 12.0, 30.0, 36.5])
def test_no_token_that_exceeds_the_bound_is_left_out(least: float) -> None:
    one = keys_of(1, 1)[0]
    found = gumbel_exceeds(one, 200_000, torch.tensor(least, dtype=torch.float64))
    expected = (gumbel(one, torch.arange(200_000)) > least).nonzero()[:, 0]
    assert set(expected.tolist()) <= set(found.tolist())
    assert len(found) <= len(expected) + 1


@pytest.mark.parametrize("least", [torch.inf, torch.nan])
def test_nothing_exceeds_infinity(least: float) -> None:
    bound = torch.tensor(least, dtype=torch.float64)
    assert gumbel_exceeds(keys_of(1, 1)[0], 5000, bound).tolist() == []
