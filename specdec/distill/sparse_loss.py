"""Forward KL divergence from a sparse teacher, fused with the output head."""

from __future__ import annotations

from typing import Any

import torch

_CHUNK = 512
"""Rows at a time: their logits stay in the cache, and those of all never exist together."""
_LEAST = 1e-6


class _SparseCrossEntropy(torch.autograd.Function):
    """The loss and all of its gradients in one go, chunk by chunk."""

    @staticmethod
    def forward(
        context: Any,
        hidden: torch.Tensor,
        head: torch.Tensor,
        columns: torch.Tensor,
        probabilities: torch.Tensor,
        weights: torch.Tensor,
    ) -> torch.Tensor:
        dtype = hidden.dtype
        matrix = head.to(dtype)
        gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros(head.shape, dtype=torch.float32, device=head.device)
        total = hidden.new_zeros((), dtype=torch.float32)
        for begin in range(0, len(hidden), _CHUNK):
            rows = slice(begin, begin + _CHUNK)
            p, c, w = probabilities[rows], columns[rows], weights[rows, None]
            logits = (hidden[rows] @ matrix.T).float()
            q = logits.softmax(dim=-1)
            top = q.gather(-1, c)
            # A column that stands for a token without one has probability 0 here.
            top = torch.where(p > 0, top, 0.0)
            rest = (1.0 - top.sum(dim=-1, keepdim=True)).clamp_min(_LEAST)
            p_rest = (1.0 - p.sum(dim=-1, keepdim=True)).clamp_min(0.0)
            loss = -(p * top.clamp_min(1e-20).log()).sum(-1, keepdim=True) - p_rest * rest.log()
            total += (loss * w).sum()
            # d loss / d logit: q − p where the teacher is known, q − p_rest · q / q_rest elsewhere.
            share = p_rest / rest
            known = torch.where(p > 0, share * top - p, 0.0)
            q.mul_((1.0 - share) * w).scatter_add_(-1, c, known * w)
            slope = q.to(dtype)
            gradient[rows] = slope @ matrix
            head_gradient += slope.T @ hidden[rows]
        context.save_for_backward(gradient, head_gradient.to(head.dtype))
        return total

    @staticmethod
    def backward(context: Any, *outer: torch.Tensor) -> Any:
        gradient, head_gradient = context.saved_tensors
        return gradient * outer[0], head_gradient * outer[0], None, None, None


def sparse_cross_entropy(
    hidden: torch.Tensor,
    head: torch.Tensor,
    columns: torch.Tensor,
    probabilities: torch.Tensor,
    weights: torch.Tensor,
) -> torch.Tensor:
    """Cross-entropy between what is known of the teacher and the student, summed over rows.

    It is the forward KL divergence but for the teacher's entropy, which has no gradient. The
    probability that the teacher leaves to unlisted tokens is one more outcome: the student must
    leave as much, but may spread it as it likes.

    Args:
        hidden: [N, H], in the dtype of the products.
        head: [V', H].
        columns: int64 [N, top]: the columns of the teacher's likeliest tokens. A token that has
            none may have any column, with probability 0.
        probabilities: float32 [N, top].
        weights: float32 [N]: of the rows.

    Returns:
        float32 scalar.
    """
    found: torch.Tensor = _SparseCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, head, columns, probabilities, weights
    )
    return found
