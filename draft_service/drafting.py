"""Drafts tokens with a language model."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draft_service.drafter import Draft
from specdec.lm.processing import Rows, draw, is_greedy, join, process
from specdec.lm.randomness import Stream, gumbel, key, seed_tensor, uniform
from specdec.lm.runtime import Session
from specdec.lm.work import NotNumbers, Work, failing
from specdec.v1 import common_pb2


class Proposing(Work):
    """Drafts the next proposal of a session, by its own settings and rule.

    One pass a token. The first also feeds whatever the model has not seen: committed tokens that it
    did not draft, and its own last drafted token if all were accepted. Its result is a `Draft`.
    """

    def __init__(
        self,
        session: Session,
        num_draft_tokens: int,
        top_n: int,
        committed: tuple[int, list[int]] | None = None,
    ) -> None:
        """
        Args:
            session: at the draft.
            num_draft_tokens: K.
            top_n: how many tokens a sparse q keeps.
            committed: a base length, and the tokens that were committed on top of it meanwhile.
        """
        super().__init__(session.sequence)
        self._history = session.history
        self._sampling = session.opening.sampling
        self._rule = session.opening.acceptance_rule
        self._num_draft_tokens = num_draft_tokens
        self._top_n = top_n
        self._committed = committed
        self._token_ids: list[int] = []
        self._distributions: list[common_pb2.SparseDistribution] = []

    def start(self) -> None:
        if self._committed is not None:
            base_length, token_ids = self._committed
            self.sequence.commit(base_length, token_ids)
            self._history.commit(token_ids)
        self._base_length = len(self.sequence.tokens)
        if self._num_draft_tokens == 0:
            self.finish(Draft(()))

    @property
    def tail(self) -> int:
        return self._num_draft_tokens - len(self._token_ids) - 1

    @classmethod
    def consume(cls, works: Sequence[Proposing]) -> None:
        """Samples the next token of many sessions together."""
        plain: list[Proposing] = []
        processed: list[tuple[Proposing, torch.Tensor, Rows]] = []
        for work in works:
            if work._history.is_plain_greedy:
                plain.append(work)
                continue
            with failing(work):
                drafted = work._token_ids
                rows = work._history.rows(drafted, first=len(drafted))
                processed.append((work, work.collect(), rows))
        if plain:
            best, tokens = torch.cat([work.collect() for work in plain]).float().max(dim=-1)
            found = torch.stack([tokens, best.isfinite().long()]).T.tolist()
            for work, (token_id, numbers) in zip(plain, found, strict=True):
                with failing(work):
                    _require_numbers(bool(numbers))
                    work._append(token_id)
        if processed:
            rows = join([rows for _, _, rows in processed])
            together = process(torch.cat([logits for _, logits, _ in processed]), rows)
            numbers = (~together[:, 0].isnan()).tolist()
            for (work, _, _), scores, are_numbers in zip(processed, together, numbers, strict=True):
                with failing(work):
                    _require_numbers(are_numbers)
                    if bool(scores.amax() > -torch.inf):
                        work._append(work._sample(scores))
                    else:
                        # All that is allowed is outside of what the model can propose.
                        work.finish(Draft(work._token_ids, work._distributions))

    def _append(self, token_id: int) -> None:
        self._token_ids.append(token_id)
        self.sequence.append([token_id])
        if len(self._token_ids) == self._num_draft_tokens:
            self.finish(Draft(self._token_ids, self._distributions))

    def _sample(self, scores: torch.Tensor) -> int:
        """Draws a token from the processed scores [V]."""
        if is_greedy(self._sampling):
            return int(scores.argmax())
        position = len(self.sequence.tokens)
        seed = seed_tensor(self._sampling.seed, scores.device)
        if self._rule == common_pb2.ACCEPTANCE_RULE_COUPLED:
            vocabulary = torch.arange(scores.shape[-1], device=scores.device)
            noise = gumbel(key(seed, Stream.COUPLED, position), vocabulary)
            return int((scores + noise).argmax())
        u = uniform(key(seed, Stream.DRAFT, position, self._base_length))
        token_id, q = sample_sparse(scores, self._top_n, u)
        self._distributions.append(q)
        return token_id


def _require_numbers(finite: bool) -> None:
    if not finite:
        raise NotNumbers("the draft's logits are not finite numbers")


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
