"""Many speculative generations at once, on first-order Markov models.

What draft and verifier service do for one session, `Simulator` does for a batch of seeds: the same
acceptance rules, the same processing, the same keys of the same streams. test_acceptance_law.py
checks that it gives the services' own tokens. Its small methods are where a bug can be planted.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from draft_service.drafting import sample_sparse
from specdec.lm.processing import draw
from specdec.lm.randomness import Stream, gumbel, key, uniform
from specdec.v1.common_pb2 import Sampling
from tests.processing import processed
from verifier_service import acceptance
from verifier_service.verification import densify

START = 0
"""The one token of the prompt."""
CHUNK = 1 << 14
"""How many sequences run together: as many as the processor's cache holds."""


class Result(NamedTuple):
    """What was generated."""

    tokens: torch.Tensor
    """[B, length], the prompt left out."""
    first_accepted: torch.Tensor
    """[B]: how many drafted tokens of the first round stood."""
    rounds: int
    """How many rounds the slowest sequence took."""


class Simulator:
    """Target p(x_t | x_{t−1}) and draft q(x_t | x_{t−1}), given by [V, V] tables of logits."""

    def __init__(
        self,
        rule: str,
        target: torch.Tensor,
        draft: torch.Tensor,
        k: int,
        *,
        sampling: Sampling | None = None,
        top_n: int = 6,
    ) -> None:
        self.rule = rule
        self.k = k
        sampling = sampling or Sampling(temperature=1.0, top_p=1.0)
        self.vocabulary = torch.arange(target.shape[-1])
        self.target_scores = processed(target, sampling)
        self.draft_scores = processed(draft, sampling)
        self.p = self.target_scores.softmax(dim=-1)
        # What the draft sends does not depend on what it draws from it.
        zero = torch.zeros((), dtype=torch.float64)
        sparse = [sample_sparse(row, top_n, zero)[1] for row in self.draft_scores]
        self.q = densify(sparse, len(self.vocabulary))
        # The sparse rows side by side, filled up with weights of zero.
        self.sparse_ids = torch.zeros(len(sparse), top_n, dtype=torch.int64)
        self.sparse_q = torch.zeros(len(sparse), top_n)
        for ids, q, row in zip(self.sparse_ids, self.sparse_q, sparse, strict=True):
            ids[: len(row.token_ids)] = torch.tensor(list(row.token_ids))
            q[: len(row.token_ids)] = torch.tensor(list(row.probabilities))

    # Draft service.

    def draft_uniform(
        self, seeds: torch.Tensor, position: torch.Tensor, base_length: torch.Tensor
    ) -> torch.Tensor:
        return uniform(key(seeds, Stream.DRAFT, position, base_length))

    def draft_noise(self, seeds: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return gumbel(key(seeds, Stream.COUPLED, position), self.vocabulary)

    def sample(self, contexts: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
        """Draws from the sparse q, as `sample_sparse` does."""
        index = draw(self.sparse_q[contexts], u)
        return self.sparse_ids[contexts].gather(-1, index.unsqueeze(-1)).squeeze(-1)

    # Verification.

    def coins(
        self, seeds: torch.Tensor, positions: torch.Tensor, base_length: torch.Tensor
    ) -> torch.Tensor:
        return uniform(key(seeds, Stream.COIN, positions, base_length))

    def target_uniform(
        self, seeds: torch.Tensor, base_length: torch.Tensor, coins: torch.Tensor
    ) -> torch.Tensor:
        return uniform(key(seeds, Stream.TARGET, base_length))

    def target_noise(self, seeds: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return gumbel(key(seeds, Stream.COUPLED, positions), self.vocabulary)

    def target_rows(self, contexts: torch.Tensor) -> torch.Tensor:
        """p_1 … p_{K+1}, [B, K + 1, V]."""
        return self.p[contexts]

    def accept(
        self,
        p: torch.Tensor,
        q: torch.Tensor,
        x: torch.Tensor,
        coins: torch.Tensor,
        u: torch.Tensor,
    ) -> acceptance.Outcome:
        rule = acceptance.rejection if self.rule == "rejection" else acceptance.block
        return rule(p, q, x, coins, u)

    # Both, and the gateway between them.

    def generate(self, seeds: torch.Tensor, length: int) -> Result:
        """Rounds until every sequence has at least `length` tokens; what is more is cut off."""
        parts = [self._generate(chunk, length) for chunk in seeds.split(CHUNK)]
        return Result(
            torch.cat([part.tokens for part in parts]),
            torch.cat([part.first_accepted for part in parts]),
            max(part.rounds for part in parts),
        )

    def _generate(self, seeds: torch.Tensor, length: int) -> Result:
        tokens = torch.full((len(seeds), 1 + length + self.k), START)
        lengths = torch.ones_like(seeds)
        first_accepted = torch.empty_like(seeds)
        offsets = torch.arange(self.k + 1)
        rounds = 0
        while len(unfinished := (lengths <= length).nonzero().squeeze(-1)):
            base_length = lengths[unfinished]
            last = tokens[unfinished, base_length - 1]
            x, outcome = self._round(seeds[unfinished], base_length, last)
            emitted = torch.cat([x, x.new_zeros(len(x), 1)], dim=-1)
            emitted.scatter_(
                -1, outcome.num_accepted.unsqueeze(-1), outcome.next_token.unsqueeze(-1)
            )
            # What lies behind the emitted token is overwritten by the next round.
            tokens[unfinished.unsqueeze(-1), base_length.unsqueeze(-1) + offsets] = emitted
            lengths[unfinished] += outcome.num_accepted + 1
            if rounds == 0:
                first_accepted = outcome.num_accepted
            rounds += 1
        return Result(tokens[:, 1 : 1 + length], first_accepted, rounds)

    def _round(
        self, seeds: torch.Tensor, base_length: torch.Tensor, last: torch.Tensor
    ) -> tuple[torch.Tensor, acceptance.Outcome]:
        contexts = [last]
        for position in (base_length + i for i in range(self.k)):
            if self.rule == "coupled":
                noise = self.draft_noise(seeds, position)
                token = (self.draft_scores[contexts[-1]] + noise).argmax(dim=-1)
            else:
                u = self.draft_uniform(seeds, position, base_length)
                token = self.sample(contexts[-1], u)
            contexts.append(token)
        rows = torch.stack(contexts, dim=-1)
        x = rows[:, 1:]
        seeds, base_length = seeds.unsqueeze(-1), base_length.unsqueeze(-1)
        positions = base_length + torch.arange(self.k + 1)
        if self.rule == "coupled":
            noise = self.target_noise(seeds, positions)
            return x, acceptance.match((self.target_scores[rows] + noise).argmax(dim=-1), x)
        coins = self.coins(seeds, positions[:, :-1], base_length)
        u = self.target_uniform(seeds.squeeze(-1), base_length.squeeze(-1), coins)
        return x, self.accept(self.target_rows(rows), self.q[rows[:, :-1]], x, coins, u)
