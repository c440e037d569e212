"""From logits to the distribution that is sampled, for draft, target and plain decoding alike.

Processors run in one order: mask the vocabulary's padding, temperature, top-k, top-p, min-p. It is
the order of transformers' `generate`, and each processor keeps the tokens that the one there keeps.
"""

from __future__ import annotations

import torch

from specdec.v1 import common_pb2

_TOP_P_FIRST_LOOK = 1024


def is_greedy(sampling: common_pb2.Sampling) -> bool:
    """Whether the session decodes greedily. Temperature 0 is true argmax, not a small number."""
    return sampling.temperature == 0.0


def process(logits: torch.Tensor, sampling: common_pb2.Sampling) -> torch.Tensor:
    """Processed scores at a temperature above 0; a token that is filtered out has −inf.

    Args:
        logits: [..., V], any float dtype, padding of the vocabulary already cut off.
        sampling: the session's settings.

    Returns:
        float64 [..., V]. `softmax` of it is the distribution p (or q) of the acceptance rules.
    """
    scores = logits.to(torch.float64) / sampling.temperature
    if 0 < sampling.top_k < scores.shape[-1]:
        kth = torch.topk(scores, sampling.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < kth, -torch.inf)
    if sampling.top_p < 1.0:
        scores = _top_p(scores, sampling.top_p)
    if sampling.min_p > 0.0:
        best = scores.max(dim=-1, keepdim=True).values
        # p(x) < min_p · p(best), said in logs: no normaliser is needed.
        limit = best + torch.log(torch.tensor(sampling.min_p, dtype=torch.float64))
        scores = scores.masked_fill(scores < limit, -torch.inf)
    return scores


def _top_p(scores: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keeps the smallest set of most likely tokens whose probability reaches top_p."""
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    size = scores.shape[-1]
    # The set is nearly always small, and to find the likeliest is much cheaper than to sort all.
    for count in (min(_TOP_P_FIRST_LOOK, size), size):
        top = (
            torch.topk(scores, count, dim=-1).values
            if count < size
            else scores.sort(dim=-1, descending=True).values
        )
        probabilities = (top - log_total).exp()
        dropped = probabilities.cumsum(dim=-1) - probabilities >= top_p
        if bool(dropped[..., -1].all()):
            break
    num_kept = (~dropped).sum(dim=-1, keepdim=True)
    least = top.gather(-1, num_kept - 1)
    # Of equal scores at the edge the lowest ids stay. How the sort orders them would depend on the
    # neighbouring rows, which decide how far it looks.
    above, ties = scores > least, scores == least
    room = num_kept - above.sum(dim=-1, keepdim=True)
    kept = above | (ties & (ties.cumsum(dim=-1) <= room))
    return scores.masked_fill(~kept, -torch.inf)


def draw(weights: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """Samples an index by inverting the cumulative sum.

    Args:
        weights: [..., N], non-negative, not all zero; they need not sum to 1.
        u: float64 [...] in [0, 1).

    Returns:
        int64 [...]. An index of weight zero is never returned.
    """
    cumulative = weights.to(torch.float64).cumsum(dim=-1)
    target = (u * cumulative[..., -1]).unsqueeze(-1)
    index = torch.searchsorted(cumulative, target, right=True).squeeze(-1)
    # u · total can round up to the total: then the last index that carries weight is meant.
    last = torch.searchsorted(cumulative, cumulative[..., -1:].contiguous()).squeeze(-1)
    return torch.minimum(index, last)
