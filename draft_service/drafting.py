"""Drafts tokens with a language model."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specdec.lm.history import History
from specdec.lm.processing import draw, is_greedy, process
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform
from specdec.lm.sequence import CachedSequence
from specdec.v1 import common_pb2


class Draft(NamedTuple):
    """The drafted tokens of one round."""

    token_ids: list[int]
    distributions: list[common_pb2.SparseDistribution]
    """What each token was sampled from, where the rule needs it; empty otherwise."""


class Drafter:
    """Drafts for one session, by its own sampling settings and rule."""

    def __init__(
        self,
        sequence: CachedSequence,
        history: History,
        sampling: common_pb2.Sampling,
        rule: common_pb2.AcceptanceRule.ValueType,
        top_n: int,
    ) -> None:
        """`top_n`: how many tokens a sparse q keeps."""
        self._sequence = sequence
        self._history = history
        self._sampling = sampling
        self._rule = rule
        self._top_n = top_n

    def advance(self, base_length: int, token_ids: list[int], num_draft_tokens: int) -> Draft:
        """Commits tokens on top of the first `base_length`, and drafts on top of them."""
        self._sequence.commit(base_length, token_ids)
        self._history.commit(token_ids)
        return self.propose(num_draft_tokens)

    def propose(self, num_draft_tokens: int) -> Draft:
        """Drafts tokens on top of the sequence, one forward pass each.

        The first pass also feeds whatever the model has not seen: committed tokens that it did not
        draft, and its own last drafted token if all were accepted.
        """
        base_length = len(self._sequence.tokens)
        draft = Draft([], [])
        for position in range(base_length, base_length + num_draft_tokens):
            logits = self._sequence.forward()
            rows = self._history.rows(draft.token_ids, first=len(draft.token_ids))
            token_id, q = self._sample(process(logits, rows)[0], position, base_length)
            if q is not None:
                draft.distributions.append(q)
            draft.token_ids.append(token_id)
            self._sequence.append([token_id])
        return draft

    def _sample(
        self, scores: torch.Tensor, position: int, base_length: int
    ) -> tuple[int, common_pb2.SparseDistribution | None]:
        if is_greedy(self._sampling):
            return int(scores.argmax()), None
        seed = seed_tensor(self._sampling.seed, scores.device)
        if self._rule == common_pb2.ACCEPTANCE_RULE_COUPLED:
            vocabulary = torch.arange(scores.shape[-1], device=scores.device)
            noise = gumbel(key(seed, Stream.COUPLED, position), vocabulary)
            return int((scores + noise).argmax()), None
        u = uniform(key(seed, Stream.DRAFT, position, base_length))
        return sample_sparse(scores, self._top_n, u)


def sample_sparse(
    scores: torch.Tensor, top_n: int, u: torch.Tensor
) -> tuple[int, common_pb2.SparseDistribution]:
    """Truncates q to its top entries, rounds it to what the wire carries, and *then* samples.

    Sampling first would make q a lie about what x was drawn from, and the output biased.

    Args:
        scores: [V], processed.
        top_n: how many entries to keep at most.
        u: float64 scalar in [0, 1).

    Returns:
        The token and exactly the distribution that it was drawn from.
    """
    top = torch.topk(scores, min(top_n, scores.shape[-1]))
    q = top.values.softmax(dim=-1).to(torch.float32)
    # Filtered tokens, and those that float32 cannot hold, are not in the support.
    token_ids, q = top.indices[q > 0], q[q > 0]
    token_id = int(token_ids[draw(q, u)])
    return token_id, common_pb2.SparseDistribution(
        token_ids=token_ids.tolist(), probabilities=q.tolist()
    )
