"""The law of the output where drafts are copied: exact, if they are independent of the coins."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from specdec.lm.processing import draw
from specdec.lm.randomness import Stream, key, uniform
from verifier_service import acceptance

P = torch.tensor([0.5, 0.25, 0.15, 0.1], dtype=torch.float64)
DRAWS = 40_000
BASE_LENGTH = 3
SEEDS = torch.arange(DRAWS)
RULES = {"rejection": acceptance.rejection, "block": acceptance.block}


def plain(seeds: torch.Tensor) -> torch.Tensor:
    """The tokens of sessions that had no drafts."""
    return draw(P.expand(len(seeds), -1), uniform(key(seeds, Stream.TARGET, BASE_LENGTH)))


def output(rule: str, x: torch.Tensor) -> torch.Tensor:
    """The first tokens of sessions with `SEEDS` that were drafted x [DRAWS], one token each."""
    p = P.expand(DRAWS, 2, -1)
    q = torch.nn.functional.one_hot(x, len(P)).double().unsqueeze(1)
    positions = torch.tensor([BASE_LENGTH])
    coins = uniform(key(SEEDS.unsqueeze(-1), Stream.COIN, positions, BASE_LENGTH))
    u = uniform(key(SEEDS, Stream.TARGET, BASE_LENGTH))
    outcome = RULES[rule](p, q, x.unsqueeze(-1), coins, u)
    return torch.where(outcome.num_accepted > 0, x, outcome.next_token)


def p_value(tokens: torch.Tensor) -> float:
    counts = torch.bincount(tokens, minlength=len(P))
    return float(stats.chisquare(counts.tolist(), (P * DRAWS).tolist()).pvalue)


@pytest.mark.parametrize("rule", RULES)
def test_a_token_that_counts_as_certain_leaves_the_law_as_it_is(rule: str) -> None:
    for token_id in range(len(P)):
        assert p_value(output(rule, torch.full((DRAWS,), token_id))) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_a_past_output_of_another_seed_leaves_the_law_as_it_is(rule: str) -> None:
    assert p_value(plain(SEEDS + DRAWS)) > 1e-4
    assert p_value(output(rule, plain(SEEDS + DRAWS))) > 1e-4


@pytest.mark.parametrize("rule", RULES)
def test_a_past_output_of_the_same_seed_would_change_the_law(rule: str) -> None:
    """Why sessions do not read what came of their own seed: a planted bug, which is caught."""
    assert p_value(output(rule, plain(SEEDS))) < 1e-6
