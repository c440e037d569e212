"""The acceptance rules: which drafted tokens stand, and which token follows them.

Pure functions. p_i and q_i are the processed distributions of target and draft at position i of
the block, x_i the drafted token, K their number. All tensors may carry leading batch dimensions;
V is the effective vocabulary size. Probabilities are float64. Row K + 1 of p has no drafted token:
there q is taken as 0, so that its residual is p itself and a bonus token needs no case of its own.

Every rule returns an `Outcome`: n tokens stand, then y is emitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.lm.processing import draw


class Outcome(NamedTuple):
    """The outcome of a block."""

    num_accepted: torch.Tensor
    """n, int64 [...]: how many drafted tokens stand."""
    next_token: torch.Tensor
    """y, int64 [...]: the correction if n < K, the bonus if n = K."""


def greedy(scores: torch.Tensor, x: torch.Tensor) -> Outcome:
    """Temperature 0: a drafted token stands while it is the target's argmax.

    Args:
        scores: [..., K + 1, V], processed.
        x: int64 [..., K].
    """
    return match(scores.argmax(dim=-1), x)


def match(y: torch.Tensor, x: torch.Tensor) -> Outcome:
    """Emits the target's own tokens y [..., K + 1] while the previous one equals the draft's.

    With the noise g that draft and target share, y_t = argmax log p_t + g_t, this is the Gumbel
    coupling (Daliri et al., arXiv 2408.07978): y are the tokens that the target alone would emit,
    and the draft only decides how many of them one pass yields.

    Args:
        y: int64 [..., K + 1].
        x: int64 [..., K].
    """
    n = _leading(y[..., :-1] == x)
    return Outcome(n, y.gather(-1, n.unsqueeze(-1)).squeeze(-1))


def walk(
    y: Sequence[int], token_ids: Sequence[int], parents: Sequence[int]
) -> tuple[list[int], int]:
    """`match` for a tree: emits the target's own tokens as long as they are in the tree.

    Args:
        y: [K + 1], the target's token after the root, then after each drafted token.
        token_ids: the K drafted tokens.
        parents: theirs; see `specdec.trees`.

    Returns:
        The places of the drafted tokens that stand, and the token that follows them.
    """
    places = {key: place for place, key in enumerate(zip(parents, token_ids, strict=True), 1)}
    found: list[int] = []
    here = 0
    while (following := places.get((here, y[here]))) is not None:
        found.append(following)
        here = following
    return found, y[here]


def rejection(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, coins: torch.Tensor, u: torch.Tensor
) -> Outcome:
    """Speculative sampling (Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318).

    x_i ~ q_i stands if coin_i < p_i(x_i) / q_i(x_i). The first that falls is replaced by
    y ~ norm(max(p_i − q_i, 0)). If all stand, y ~ p_{K+1}.

    Args:
        p: [..., K + 1, V].
        q: [..., K, V], what x was really sampled from.
        x: int64 [..., K].
        coins: [..., K] in [0, 1), independent of how x was drawn.
        u: [...] in [0, 1), for the draw of y.
    """
    stands = coins < rejection_probabilities(p, q, x)
    n = _leading(stands)
    return Outcome(n, draw(residual(_row(p, n), _row(_pad(q), n)), u))


def rejection_probabilities(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """[..., K]: the probability, given the tokens before it, that x_i stands."""
    return (_at(p[..., :-1, :], x) / _at(q, x)).clamp(max=1.0)


def block(
    p: torch.Tensor, q: torch.Tensor, x: torch.Tensor, coins: torch.Tensor, u: torch.Tensor
) -> Outcome:
    """Block verification (Sun et al., arXiv 2403.10444).

    n is the *last* i with coin_i < h_i (coins are never 1, so that this has probability h_i, and 0
    where h_i is 0): a failure before it does not end the block. Then
    y ~ norm(max(P_n · p_{n+1} − q_{n+1}, 0)), or y ~ p_{K+1} if n = K.

    Args: those of `rejection`.
    """
    prefix = prefix_probabilities(p, q, x)
    stands = coins < block_probabilities(p, q, x)
    positions = torch.arange(1, x.shape[-1] + 1, device=x.device)
    n = torch.where(stands, positions, 0).amax(dim=-1) if x.shape[-1] else _leading(stands)
    scale = prefix.gather(-1, n.unsqueeze(-1))
    return Outcome(n, draw(residual(_row(p, n), _row(_pad(q), n), scale), u))


def prefix_probabilities(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """P_0 … P_K, [..., K + 1]: P_0 = 1, P_i = min(P_{i−1} · p_i(x_i) / q_i(x_i), 1)."""
    ratios = _at(p[..., :-1, :], x) / _at(q, x)
    prefix = [torch.ones_like(ratios.sum(dim=-1))]
    for i in range(x.shape[-1]):
        prefix.append((prefix[-1] * ratios[..., i]).clamp(max=1.0))
    return torch.stack(prefix, dim=-1)


def block_probabilities(p: torch.Tensor, q: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """h_1 … h_K, [..., K]: S_i = Σ_x max(P_i · p_{i+1}(x) − q_{i+1}(x), 0) and
    h_i = S_i / (S_i + 1 − P_i) for i < K; h_K = P_K."""
    prefix = prefix_probabilities(p, q, x)
    inner = prefix[..., 1:-1]
    s = (inner.unsqueeze(-1) * p[..., 1:-1, :] - q[..., 1:, :]).clamp(min=0.0).sum(dim=-1)
    # P_i = 1 makes h_i = S_i / S_i: it stands, also where p and q agree and S_i is 0.
    h = torch.where(inner >= 1.0, 1.0, s / (s + 1.0 - inner))
    return torch.cat([h, prefix[..., -1:]], dim=-1)[..., : x.shape[-1]]


def residual(
    p_row: torch.Tensor, q_row: torch.Tensor, scale: torch.Tensor | float = 1.0
) -> torch.Tensor:
    """max(scale · p − q, 0), not normalised, [..., V].

    Where rounding leaves nothing of it, p and q agree, and p itself is returned.
    """
    rest = (scale * p_row - q_row).clamp(min=0.0)
    return torch.where(rest.sum(dim=-1, keepdim=True) > 0.0, rest, p_row)


def _leading(stands: torch.Tensor) -> torch.Tensor:
    """How many of the leading entries of [..., K] are true."""
    return stands.long().cumprod(dim=-1).sum(dim=-1)


def _at(distributions: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The probability of x_i in row i: [..., K, V] and [..., K] to [..., K]."""
    return distributions.gather(-1, x.unsqueeze(-1)).squeeze(-1)


def _row(distributions: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
    """Row n, counted from 0: [..., K + 1, V] and [...] to [..., V]."""
    index = n[..., None, None].expand(*n.shape, 1, distributions.shape[-1])
    return distributions.gather(-2, index).squeeze(-2)


def _pad(q: torch.Tensor) -> torch.Tensor:
    """Appends the row of zeros that stands for q_{K+1}."""
    return torch.cat([q, q.new_zeros((*q.shape[:-2], 1, q.shape[-1]))], dim=-2)
