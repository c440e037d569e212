"""Which tokens the target may say next, by what the draft says, and how probable each is.

The draft knows what its own next token is. How probable it is that the target says the same, or the
draft's second or third choice, is estimated from how far apart they are.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from specdec.lm.randomness import gumbel

_SHARPNESS = 1.25
"""The target's choice is surer than the draft makes it: log q is multiplied by this. Fitted to the
default pair, where it makes the first and the first four candidates as probable as they are found
to be, at temperature 0 and 0.6."""
_LIKELY = 64
_LIKELY_WITH_NOISE = 256
"""No tokens but so many, the likeliest, are taken into account: to look at all takes as long as the
draft's pass. Noise can make more of them the target's choice."""


class Candidates(NamedTuple):
    """What may come next."""

    token_ids: list[int]
    """Distinct, the most probable first; none if the draft allows nothing."""
    probabilities: list[float]
    """Of each."""


def sharpness(temperature: float) -> float:
    """What processed scores are multiplied by to be log-probabilities of the target's choice.

    Greedy ones are log q. Sampled ones are log q divided by the temperature, plus the shared noise,
    which from a temperature of 0.8 on hides how much surer the target is.
    """
    return _SHARPNESS if temperature == 0.0 else min(_SHARPNESS * temperature, 1.0)


def candidates(
    scores: torch.Tensor, count: int, sharp: torch.Tensor, keys: torch.Tensor | None
) -> list[Candidates | None]:
    """The likeliest tokens after each of R contexts; None where the scores are no numbers.

    Args:
        scores: [R, V], processed: log-probabilities up to a constant in each row, −inf for what
            is not allowed.
        count: how many tokens of each row.
        sharp: [R, 1], of `sharpness`.
        keys: int64 [R], of the noise that draft and target share; None for greedy decoding.
    """
    most = max(count, _LIKELY if keys is None else _LIKELY_WITH_NOISE)
    likely = scores.topk(min(most, scores.shape[-1]), dim=-1)
    values = likely.values
    if keys is not None:
        values = values + gumbel(keys, likely.indices)
    found = values.topk(min(count, values.shape[-1]), dim=-1)
    token_ids = likely.indices.gather(-1, found.indices)
    total = (values * sharp).logsumexp(dim=-1, keepdim=True)
    total = total.masked_fill(total.isneginf(), 0.0)  # nothing is allowed
    probabilities = (found.values * sharp - total).exp()
    result: list[Candidates | None] = []
    for ids, chances in zip(token_ids.tolist(), probabilities.tolist(), strict=True):
        allowed = sum(chance > 0.0 for chance in chances)
        broken = math.isnan(chances[0])
        result.append(None if broken else Candidates(ids[:allowed], chances[:allowed]))
    return result
