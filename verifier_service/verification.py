"""Verifies blocks of drafted tokens: one forward pass, then each session's acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.lm.logprobs import token_logprobs
from specdec.lm.processing import Rows, is_greedy, join, process
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform
from specdec.lm.runtime import Session
from specdec.lm.work import Work, failing
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


class Verification(Work):
    """The verification of one block of drafted tokens, by its session's settings and rule.

    Its result is a `Verified`. The sequence then holds what stands, and the cache no rejected
    token. It fails with FloatingPointError if the target's logits are not numbers, or everything
    is forbidden.
    """

    def __init__(
        self,
        session: Session,
        token_ids: list[int],
        distributions: Sequence[common_pb2.SparseDistribution],
    ) -> None:
        """
        Args:
            session: at the target.
            token_ids: K drafted tokens.
            distributions: what each was sampled from, where the rule needs it.
        """
        super().__init__(session.sequence)
        self.num_logits = len(token_ids) + 1
        self.token_ids = token_ids
        self.history = session.history
        self._distributions = distributions
        self._sampling = session.opening.sampling
        self._rule = session.opening.acceptance_rule
        self._logprobs = session.opening.logprobs if session.opening.HasField("logprobs") else None

    def start(self) -> None:
        self._base_length = len(self.sequence.tokens)
        self.sequence.append(self.token_ids)

    @property
    def _wants_processed(self) -> bool:
        """Whether log-probabilities are those of what is sampled from."""
        wanted = self._logprobs
        return wanted is not None and wanted.mode == common_pb2.LOGPROBS_MODE_PROCESSED

    @property
    def _is_plain(self) -> bool:
        return self.history.is_plain_greedy and not self._wants_processed

    @classmethod
    def consume(cls, works: Sequence[Verification]) -> None:
        """Decides about the blocks of many sessions together."""
        plain: dict[int, list[Verification]] = {}
        processed: list[Verification] = []
        for work in works:
            if work._is_plain:
                plain.setdefault(work.num_logits, []).append(work)
            else:
                processed.append(work)
        for blocks in plain.values():
            cls._match(blocks)
        if processed:
            cls._process(processed)

    @classmethod
    def _match(cls, works: Sequence[Verification]) -> None:
        """Blocks of one size whose tokens are the argmax of the logits as they are.

        There is one look at the device for all of them: on a GPU each look waits for it.
        """
        blocks = [work.collect() for work in works]
        best, y = torch.stack(blocks).float().max(dim=-1)
        x = _tensor([work.token_ids for work in works], y.device).view(len(works), -1)
        outcome = acceptance.match(y, x)
        finite = best.isfinite().all(dim=-1)
        found = torch.stack([outcome.num_accepted, outcome.next_token, finite.long()]).T.tolist()
        for work, logits, (n, token_id, numbers) in zip(works, blocks, found, strict=True):
            with failing(work):
                _require_numbers(bool(numbers))
                work._commit(n, token_id, logits)

    @classmethod
    def _process(cls, works: Sequence[Verification]) -> None:
        """Blocks with processors or random draws."""
        ready: list[tuple[Verification, torch.Tensor, Rows]] = []
        for work in works:
            with failing(work):
                logits = work.collect()
                _require_numbers(bool(logits.amax(dim=-1).isfinite().all()))
                ready.append((work, logits, work.history.rows(work.token_ids)))
        if not ready:
            return
        rows = join([rows for _, _, rows in ready])
        together = process(torch.cat([logits for _, logits, _ in ready]), rows)
        parts = together.split([len(logits) for _, logits, _ in ready])
        for (work, logits, _), scores in zip(ready, parts, strict=True):
            with failing(work):
                outcome = work._accept(scores)
                n, y = int(outcome.num_accepted), int(outcome.next_token)
                if not bool(scores[n, y].isfinite()):
                    raise FloatingPointError("the request's masks leave no token to sample")
                work._commit(n, y, scores if work._wants_processed else logits)

    def _commit(self, n: int, y: int, scored: torch.Tensor) -> None:
        """Commits what stands. `scored` [K + 1, V]: what log-probabilities are taken from."""
        emitted = [*self.token_ids[:n], y]
        self.sequence.commit(self._base_length, emitted)
        self.history.commit(emitted)
        found = []
        if self._logprobs is not None:
            found = token_logprobs(scored[: n + 1], emitted, self._logprobs.num_top)
        self.finish(Verified(n, y, found))

    def _accept(self, scores: torch.Tensor) -> acceptance.Outcome:
        device = scores.device
        x = _tensor(self.token_ids, device)
        if is_greedy(self._sampling):
            return acceptance.greedy(scores, x)
        seed = seed_tensor(self._sampling.seed, device)
        base_length = self._base_length
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
        return rule(p, densify(self._distributions, p.shape[-1]).to(device), x, coins, u)


def _require_numbers(finite: bool) -> None:
    if not finite:
        raise FloatingPointError("the target's logits are not finite numbers")


def _tensor(token_ids: list[int] | list[list[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor(token_ids, dtype=torch.int64, device=device)


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
