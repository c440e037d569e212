"""Verifies a block of drafted tokens: one forward pass, then the acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from specdec.lm.processing import is_greedy, process
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform
from specdec.lm.sequence import CachedSequence
from specdec.v1 import common_pb2
from verifier_service import acceptance


class Verifier:
    """Verifies for one session, by its own sampling settings and rule."""

    def __init__(
        self,
        sequence: CachedSequence,
        sampling: common_pb2.Sampling,
        rule: common_pb2.AcceptanceRule.ValueType,
    ) -> None:
        self._sequence = sequence
        self._sampling = sampling
        self._rule = rule

    def verify(
        self, token_ids: list[int], distributions: Sequence[common_pb2.SparseDistribution]
    ) -> tuple[int, int]:
        """Runs K drafted tokens through the target and commits what stands.

        Returns:
            n and y: how many drafted tokens stand, and the token that follows them. The sequence
            then holds both, and the cache no rejected token.
        """
        base_length = len(self._sequence.tokens)
        self._sequence.append(token_ids)
        logits = self._sequence.forward(num_logits=len(token_ids) + 1)
        if bool(logits.isnan().any()):
            raise FloatingPointError("the target's logits are not numbers")
        outcome = self._accept(logits, token_ids, distributions, base_length)
        n, y = int(outcome.num_accepted), int(outcome.next_token)
        self._sequence.commit(base_length, [*token_ids[:n], y])
        return n, y

    def _accept(
        self,
        logits: torch.Tensor,
        token_ids: list[int],
        distributions: Sequence[common_pb2.SparseDistribution],
        base_length: int,
    ) -> acceptance.Outcome:
        device = logits.device
        x = torch.tensor(token_ids, dtype=torch.int64, device=device)
        if is_greedy(self._sampling):
            return acceptance.greedy(logits, x)
        scores = process(logits, self._sampling)
        seed = seed_tensor(self._sampling.seed, device)
        positions = torch.arange(base_length, base_length + len(scores), device=device)
        if self._rule == common_pb2.ACCEPTANCE_RULE_COUPLED:
            vocabulary = torch.arange(scores.shape[-1], device=device)
            noise = gumbel(key(seed, Stream.COUPLED, positions), vocabulary)
            return acceptance.coupled(scores, noise, x)
        rule = _RULES[self._rule]
        coins = uniform(key(seed, Stream.COIN, positions[:-1], base_length))
        # One draw a round: its base length is a position that no other round starts from.
        u = uniform(key(seed, Stream.TARGET, base_length))
        p = scores.softmax(dim=-1)
        return rule(p, densify(distributions, p.shape[-1]).to(device), x, coins, u)


_RULES = {
    common_pb2.ACCEPTANCE_RULE_REJECTION: acceptance.rejection,
    common_pb2.ACCEPTANCE_RULE_BLOCK: acceptance.block,
}


def densify(
    distributions: Sequence[common_pb2.SparseDistribution], vocab_size: int
) -> torch.Tensor:
    """Sparse distributions as float64 [K, V], each normalised by its own sum."""
    q = torch.zeros(len(distributions), vocab_size, dtype=torch.float64)
    for row, sparse in zip(q, distributions, strict=True):
        row[list(sparse.token_ids)] = torch.tensor(list(sparse.probabilities), dtype=torch.float64)
    return q / q.sum(dim=-1, keepdim=True)
