"""The choice that draft and target make with the noise that they share."""

from __future__ import annotations

import torch

from specdec.lm.randomness import gumbel, gumbel_exceeds

_LIKELY = 64
"""Tokens of a row whose noise is looked at in any case."""
_MARGIN = 1e-6
"""By which a bound on the noise is lowered, so that rounding leaves nothing out."""


def coupled_choice(scores: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """argmax of scores + g, where g is the Gumbel noise of each row's key (arXiv 2408.07978).

    The noise of all tokens takes longer than many a pass. Here the likeliest tokens are tried
    first. Any other can only be the choice if its noise exceeds what is missing to the best of
    them, which is seen from its random bits without a logarithm, and is rare.

    Args:
        scores: float64 [R, V]; −inf is never chosen.
        keys: int64 [R], of `randomness.key`.

    Returns:
        int64 [R].
    """
    if scores.device.type != "cpu" or scores.shape[-1] <= _LIKELY:
        # To look at what is rare, a GPU would have to be waited for.
        vocabulary = torch.arange(scores.shape[-1], device=scores.device)
        return (scores + gumbel(keys, vocabulary)).argmax(dim=-1)
    likely = scores.topk(_LIKELY, dim=-1)
    noisy = likely.values + gumbel(keys, likely.indices)
    best = noisy.max(dim=-1)
    choice = likely.indices.gather(-1, best.indices.unsqueeze(-1)).squeeze(-1)
    missing = best.values - likely.values[:, -1] - _MARGIN
    for row, (key, least) in enumerate(zip(keys, missing, strict=True)):
        rare = gumbel_exceeds(key, scores.shape[-1], least)
        if len(rare):
            values = scores[row, rare] + gumbel(key, rare)
            if values.max() > best.values[row]:
                choice[row] = rare[values.argmax()]
    return choice
