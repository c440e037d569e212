"""Picks the next tokens of texts, and keeps what the target thought of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.lm.processing import draw
from specdec.lm.randomness import Stream, key, uniform

_BLOCK = 128
"""Columns that are looked at together where the likeliest tokens are sought."""


class Thought(NamedTuple):
    """What the target thought where it wrote a token, at temperature 1."""

    top_ids: torch.Tensor
    """int32 [top]: the likeliest tokens."""
    top_logprobs: torch.Tensor
    """float16 [top]: theirs, the largest first."""
    logprob: torch.Tensor
    """float32 scalar: that of the token which was picked."""
    weight: float
    """How much it counts in training."""


def pick(
    logits: torch.Tensor,
    temperatures: Sequence[float],
    keys: Sequence[tuple[int, int]],
    seed: torch.Tensor,
    num_top: int,
) -> list[tuple[int, Thought]]:
    """Samples a token from each row.

    Args:
        logits: float32 [R, V].
        temperatures: of each row; 0 takes the likeliest token.
        keys: of each row's random number: the text, and the place in it.
        seed: int64 scalar.
        num_top: how many of the likeliest tokens are kept.
    """
    top = top_of(logits, num_top)
    log_totals = logits.logsumexp(dim=-1, keepdim=True)
    numbers, places = torch.tensor(keys, device=logits.device).unbind(dim=1)
    u = uniform(key(seed, Stream.TARGET, numbers, places))
    temperature = torch.tensor(temperatures, device=logits.device).unsqueeze(1)
    found = top.indices[:, 0].clone()
    warm = (temperature[:, 0] > 0).nonzero()[:, 0]
    if len(warm):
        # Nearly always the draw falls among the likeliest tokens; only the others need all.
        best = top.values[warm, :1]
        scaled = (logits[warm] - best) / temperature[warm]
        total = scaled.exp().sum(dim=-1, dtype=torch.float64)
        likely = ((top.values[warm] - best) / temperature[warm]).exp()
        share = likely.sum(dim=-1, dtype=torch.float64) / total
        inside = u[warm] < share
        chosen = draw(likely[inside], u[warm][inside] / share[inside])
        found[warm[inside]] = top.indices[warm[inside]].gather(-1, chosen[:, None])[:, 0]
        if not bool(inside.all()):
            rest = scaled[~inside].exp().scatter(-1, top.indices[warm[~inside]], 0.0)
            share = share[~inside]
            found[warm[~inside]] = draw(rest, (u[warm][~inside] - share) / (1.0 - share))
    thoughts = zip(
        top.indices.int().cpu(),
        (top.values - log_totals).half().cpu(),
        (logits.gather(-1, found[:, None]) - log_totals)[:, 0].cpu(),
        strict=True,
    )
    return [
        (token_id, Thought(*thought, 1.0))
        for token_id, thought in zip(found.tolist(), thoughts, strict=True)
    ]


def top_of(logits: torch.Tensor, count: int) -> torch.return_types.topk:
    """`torch.topk` over the last dimension, several times faster on a large vocabulary.

    The `count` largest are in the `count` blocks of columns whose maxima are the largest.
    """
    rows, size = logits.shape
    whole = size // _BLOCK * _BLOCK
    if whole // _BLOCK <= 2 * count:
        return torch.topk(logits, min(count, size), dim=-1)
    blocks = logits[:, :whole].view(rows, -1, _BLOCK)
    likely = torch.topk(blocks.amax(dim=-1), count, dim=-1).indices
    every = torch.arange(size, device=logits.device)
    columns = (likely.unsqueeze(-1) * _BLOCK + every[:_BLOCK]).flatten(1)
    columns = torch.cat([columns, every[whole:].expand(rows, -1)], dim=1)
    found = torch.topk(logits.gather(1, columns), count, dim=-1)
    return torch.return_types.topk((found.values, columns.gather(1, found.indices)))
