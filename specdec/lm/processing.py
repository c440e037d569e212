"""From logits to the distribution that is sampled, for draft, target and plain decoding alike.

Processors run in one order, which is that of transformers' `generate` where it has them: logit
bias, repetition penalty, presence and frequency penalty, masks (minimum length, allowed and
suppressed tokens, grammar), temperature, top-k, top-p, min-p. Every row is processed by its own
settings and as of its own history, so that rows of one block and of different sessions go through
together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from specdec.lm.randomness import CACHED_NUMBERS
from specdec.v1 import common_pb2

_TOP_P_FIRST_LOOK = 1024


def is_greedy(sampling: common_pb2.Sampling) -> bool:
    """Whether the session decodes greedily. Temperature 0 is true argmax, not a small number."""
    return sampling.temperature == 0.0


@dataclass(frozen=True)
class Rows:
    """How each of R rows of logits is processed. An attribute that is None does nothing."""

    temperature: torch.Tensor
    """float64 [R, 1]. 0 leaves the scores as they are; the caller takes their argmax."""
    top_k: torch.Tensor
    """int64 [R, 1]; 0 keeps all."""
    top_p: torch.Tensor
    """float64 [R, 1]; 1 keeps all."""
    min_p: torch.Tensor
    """float64 [R, 1]; 0 keeps all."""
    repetition_penalty: torch.Tensor
    """float64 [R, 1]; 1 does nothing."""
    presence_penalty: torch.Tensor
    """float64 [R, 1]."""
    frequency_penalty: torch.Tensor
    """float64 [R, 1]."""
    bias: torch.Tensor | None = None
    """float64 [R, V], added to the logits."""
    seen: torch.Tensor | None = None
    """bool [R, V]: the tokens of prompt and output, for the repetition penalty."""
    counts: torch.Tensor | None = None
    """float64 [R, V]: how often each token occurs in the output, for the other two."""
    forbidden: torch.Tensor | None = None
    """bool [R, V]: the tokens that must not be sampled."""

    def part(self, begin: int, end: int) -> Rows:
        """Those from `begin` up to `end`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        parts: dict[str, Any] = {k: None if v is None else v[begin:end] for k, v in values.items()}
        return Rows(**parts)


_NEUTRAL = {"bias": torch.float64, "seen": torch.bool, "counts": torch.float64}


def join(parts: Sequence[Rows]) -> Rows:
    """The rows of several blocks, one after the other."""

    def column(name: str) -> torch.Tensor | None:
        values = [getattr(part, name) for part in parts]
        if all(value is None for value in values):
            return None
        width = next(value.shape[-1] for value in values if value is not None)
        dtype = _NEUTRAL.get(name, torch.bool)
        return torch.cat(
            [
                part.temperature.new_zeros((len(part.temperature), width), dtype=dtype)
                if value is None
                else value
                for part, value in zip(parts, values, strict=True)
            ]
        )

    return Rows(**{field.name: column(field.name) for field in fields(Rows)})  # type: ignore[arg-type]


def process(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    """Processed scores; a token that is filtered out or forbidden has −inf.

    Args:
        logits: [R, V], any float dtype, padding of the vocabulary already cut off.
        rows: how to process each row.

    Returns:
        float64 [R, V]. `softmax` of it is the distribution p (or q) of the acceptance rules. A
        row in which everything is forbidden is −inf throughout, and one whose logits are not
        finite numbers is NaN throughout: its first score tells.
    """
    block = CACHED_NUMBERS // logits.shape[-1] or 1
    if logits.device.type != "cpu" or len(logits) <= block:
        return _process(logits, rows)
    parts = [
        _process(logits[begin : begin + block], rows.part(begin, begin + block))
        for begin in range(0, len(logits), block)
    ]
    return torch.cat(parts)


def _process(logits: torch.Tensor, rows: Rows) -> torch.Tensor:
    scores = logits.to(torch.float64)
    if rows.bias is not None:
        scores = scores + rows.bias
    if rows.seen is not None:
        penalized = torch.where(
            scores > 0, scores / rows.repetition_penalty, scores * rows.repetition_penalty
        )
        scores = torch.where(rows.seen, penalized, scores)
    if rows.counts is not None:
        scores = scores - rows.frequency_penalty * rows.counts
        scores = scores - rows.presence_penalty * (rows.counts > 0)
    if rows.forbidden is not None:
        scores = scores.masked_fill(rows.forbidden, -torch.inf)
    # Differences to the best: however small the temperature, that one does not overflow.
    best = scores.amax(dim=-1, keepdim=True)
    best = best.masked_fill(best.isposinf(), torch.nan).masked_fill(best.isneginf(), 0.0)
    scores = (scores - best) / torch.where(rows.temperature > 0.0, rows.temperature, 1.0)
    if bool((rows.top_k > 0).any()):
        scores = _top_k(scores, rows.top_k)
    if bool((rows.top_p < 1.0).any()):
        scores = _top_p(scores, rows.top_p)
    if bool((rows.min_p > 0.0).any()):
        # p(x) < min_p · p(best), said in logs: no normaliser is needed.
        limit = scores.max(dim=-1, keepdim=True).values + rows.min_p.log()
        scores = scores.masked_fill(scores < limit, -torch.inf)
    return scores


def _top_k(scores: torch.Tensor, top_k: torch.Tensor) -> torch.Tensor:
    """Keeps the top_k most likely tokens, and those that equal the last of them."""
    size = scores.shape[-1]
    limit = torch.where(top_k > 0, top_k, size).clamp(max=size)
    kept_in_any = limit.masked_fill(limit == size, 1).max()
    top = torch.topk(scores, int(kept_in_any), dim=-1).values
    kth = top.gather(-1, limit.clamp(max=top.shape[-1]) - 1)
    return scores.masked_fill((scores < kth) & (limit < size), -torch.inf)


def _top_p(scores: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the smallest set of most likely tokens whose probability reaches top_p."""
    log_total = scores.logsumexp(dim=-1, keepdim=True)
    # Those that keep all, and those that are no distributions.
    exempt = (top_p >= 1.0) | ~log_total.isfinite()
    size = scores.shape[-1]
    # The set is nearly always small, and to find the likeliest is much cheaper than to sort all.
    for count in (min(_TOP_P_FIRST_LOOK, size), size):
        if count < size:
            top = torch.topk(scores, count, dim=-1).values
        else:
            top = scores.sort(dim=-1, descending=True).values
        probabilities = (top - log_total).exp()
        dropped = probabilities.cumsum(dim=-1) - probabilities >= top_p
        if bool((dropped[..., -1:] | exempt).all()):
            break
    num_kept = (~dropped).sum(dim=-1, keepdim=True)
    least = top.gather(-1, num_kept - 1)
    # Of equal scores at the edge the lowest ids stay. How the sort orders them would depend on the
    # neighbouring rows, which decide how far it looks.
    above, ties = scores > least, scores == least
    room = num_kept - above.sum(dim=-1, keepdim=True)
    kept = above | (ties & (ties.cumsum(dim=-1) <= room)) | exempt
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
