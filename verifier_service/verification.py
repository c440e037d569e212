"""Verifies a block of drafted tokens: one forward pass, then the acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.lm.history import History
from specdec.lm.logprobs import token_logprobs
from specdec.lm.processing import is_greedy, process
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform
from specdec.lm.sequence import CachedSequence
from specdec.v1 import common_pb2
from verifier_service import acceptance


class Verified(NamedTuple):
    """The outcome of a block."""

    num_accepted: int
    """n: how many drafted tokens stand."""
    next_token: int
    """y: the token that follows them."""
    logprobs: list[common_pb2.TokenLogprobs]
    """Of the accepted tokens and of y, if they were asked for."""


class Verifier:
    """Verifies for one session, by its own sampling settings and rule."""

    def __init__(
        self,
        sequence: CachedSequence,
        history: History,
        opening: common_pb2.Open,
    ) -> None:
        self._sequence = sequence
        self._history = history
        self._sampling = opening.sampling
        self._rule = opening.acceptance_rule
        self._logprobs = opening.logprobs if opening.HasField("logprobs") else None

    def verify(
        self, token_ids: list[int], distributions: Sequence[common_pb2.SparseDistribution]
    ) -> Verified:
        """Runs K drafted tokens through the target and commits what stands.

        Returns:
            How many drafted tokens stand, and the token that follows them. The sequence then holds
            both, and the cache no rejected token.

        Raises:
            FloatingPointError: the target's logits are not numbers, or everything is forbidden.
        """
        base_length = len(self._sequence.tokens)
        self._sequence.append(token_ids)
        logits = self._sequence.forward(num_logits=len(token_ids) + 1)
        if not bool(logits.amax(dim=-1).isfinite().all()):
            raise FloatingPointError("the target's logits are not finite numbers")
        scores = process(logits, self._history.rows(token_ids))
        outcome = self._accept(scores, token_ids, distributions, base_length)
        n, y = int(outcome.num_accepted), int(outcome.next_token)
        if not bool(scores[n, y].isfinite()):
            raise FloatingPointError("the request's masks leave no token to sample")
        emitted = [*token_ids[:n], y]
        self._sequence.commit(base_length, emitted)
        self._history.commit(emitted)
        found = []
        if self._logprobs is not None:
            processed = self._logprobs.mode == common_pb2.LOGPROBS_MODE_PROCESSED
            found = token_logprobs(
                (scores if processed else logits)[: n + 1], emitted, self._logprobs.num_top
            )
        return Verified(n, y, found)

    def _accept(
        self,
        scores: torch.Tensor,
        token_ids: list[int],
        distributions: Sequence[common_pb2.SparseDistribution],
        base_length: int,
    ) -> acceptance.Outcome:
        device = scores.device
        x = torch.tensor(token_ids, dtype=torch.int64, device=device)
        if is_greedy(self._sampling):
            return acceptance.greedy(scores, x)
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
