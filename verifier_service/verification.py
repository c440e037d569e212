"""Verifies blocks of drafted tokens: one forward pass, then each session's acceptance rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specdec.lm.coupling import coupled_choice
from specdec.lm.logprobs import token_logprobs
from specdec.lm.processing import Rows, is_greedy, join, process
from specdec.lm.randomness import Stream, key, seed_tensor, uniform
from specdec.lm.runtime import Session
from specdec.lm.work import NotNumbers, Work, failing
from specdec.trees import depths, is_chain
from specdec.v1 import common_pb2
from verifier_service import acceptance


class Verified(NamedTuple):
    """The outcome of a block."""

    num_accepted: int
    """n: how many drafted tokens stand."""
    token_ids: list[int]
    """Those, and y, the token that follows them."""
    logprobs: list[common_pb2.TokenLogprobs]
    """Of the accepted tokens and of y, if they were asked for."""


class Verification(Work):
    """The verification of one block of drafted tokens, by its session's settings and rule.

    A block may be a tree where the rule needs no distributions. Row 0 of its logits then follows
    the committed tokens, and row i the token at place i.

    Its result is a `Verified`. The sequence then holds what stands, and the cache no rejected
    token. It fails with FloatingPointError if the target's logits are not numbers, or everything
    is forbidden.
    """

    def __init__(
        self,
        session: Session,
        token_ids: list[int],
        distributions: Sequence[common_pb2.SparseDistribution],
        parents: Sequence[int] = (),
    ) -> None:
        """
        Args:
            session: at the target.
            token_ids: K drafted tokens.
            distributions: what each was sampled from, where the rule needs it.
            parents: of the tokens, if they are a tree; see `specdec.trees`.
        """
        super().__init__(session.sequence)
        self.num_logits = len(token_ids) + 1
        self.token_ids = token_ids
        self.history = session.history
        self._distributions = distributions
        self._parents = [] if is_chain(parents) else list(parents)
        self._sampling = session.opening.sampling
        self._rule = session.opening.acceptance_rule
        self._logprobs = session.opening.logprobs if session.opening.HasField("logprobs") else None

    def start(self) -> None:
        self._base_length = len(self.sequence.tokens)
        self.sequence.append(self.token_ids, self._parents or None)

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
            if work._is_plain and work._parents:
                work._match_tree()
            elif work._is_plain:
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
                work._commit(range(1, n + 1), token_id, logits)

    def _match_tree(self) -> None:
        """A tree whose tokens are the argmax of the logits as they are."""
        with failing(self):
            logits = self.collect()
            best, y = logits.float().max(dim=-1)
            _require_numbers(bool(best.isfinite().all()))
            self._commit(*self._walk(y), logits)

    @classmethod
    def _process(cls, works: Sequence[Verification]) -> None:
        """Blocks with processors or random draws."""
        ready: list[tuple[Verification, torch.Tensor, Rows]] = []
        for work in works:
            with failing(work):
                logits = work.collect()
                rows = work.history.tree_rows(work.token_ids, work._parents)
                ready.append((work, logits, rows))
        if not ready:
            return
        together = process(
            torch.cat([logits for _, logits, _ in ready]), join([rows for _, _, rows in ready])
        )
        lengths = [len(logits) for _, logits, _ in ready]
        numbers = (~together[:, 0].isnan()).cpu().split(lengths)
        for (work, logits, _), scores, are_numbers in zip(
            ready, together.split(lengths), numbers, strict=True
        ):
            with failing(work):
                _require_numbers(bool(are_numbers.all()))
                places, y = work._accept(scores)
                if not bool(scores[places[-1] if places else 0, y].isfinite()):
                    raise FloatingPointError("the request's masks leave no token to sample")
                work._commit(places, y, scores if work._wants_processed else logits)

    def _commit(self, places: Sequence[int], y: int, scored: torch.Tensor) -> None:
        """Commits what stands.

        Args:
            places: of the drafted tokens that stand, from the first on.
            y: the token that follows them.
            scored: [K + 1, V], what log-probabilities are taken from.
        """
        emitted = [*(self.token_ids[place - 1] for place in places), y]
        if self._parents:
            self.sequence.keep(places)
        self.sequence.commit(self._base_length, emitted)
        self.history.commit(emitted)
        found = []
        if self._logprobs is not None:
            found = token_logprobs(scored[[0, *places]], emitted, self._logprobs.num_top)
        self.finish(Verified(len(places), emitted, found))

    def _walk(self, y: torch.Tensor) -> tuple[list[int], int]:
        """Goes through the tree along the target's own tokens y [K + 1].

        Returns:
            The places of the drafted tokens that it agrees with, and its token after the last.
        """
        return acceptance.walk(y.tolist(), self.token_ids, self._parents)

    def _accept(self, scores: torch.Tensor) -> tuple[Sequence[int], int]:
        """Which places stand by the session's rule, and what follows. `scores` [K + 1, V]."""
        if self._parents:
            if is_greedy(self._sampling):
                return self._walk(scores.argmax(dim=-1))
            # Tokens side by side are at the same position, and share its noise.
            return self._walk(self._coupled_choice(scores, [0, *depths(self._parents)]))
        outcome = self._accept_chain(scores)
        return range(1, int(outcome.num_accepted) + 1), int(outcome.next_token)

    def _coupled_choice(self, scores: torch.Tensor, depth: Sequence[int]) -> torch.Tensor:
        """int64 [K + 1]: the target's own tokens, so many places after the committed ones."""
        positions = _tensor(list(depth), scores.device) + self._base_length
        seed = seed_tensor(self._sampling.seed, scores.device)
        return coupled_choice(scores, key(seed, Stream.COUPLED, positions))

    def _accept_chain(self, scores: torch.Tensor) -> acceptance.Outcome:
        device = scores.device
        x = _tensor(self.token_ids, device)
        if is_greedy(self._sampling):
            return acceptance.greedy(scores, x)
        if self._rule == common_pb2.ACCEPTANCE_RULE_COUPLED:
            return acceptance.match(self._coupled_choice(scores, range(len(scores))), x)
        seed = seed_tensor(self._sampling.seed, device)
        base_length = self._base_length
        positions = torch.arange(base_length, base_length + len(scores), device=device)
        rule = _RULES[self._rule]
        coins = uniform(key(seed, Stream.COIN, positions[:-1], base_length))
        # One draw a round: its base length is a position that no other round starts from.
        u = uniform(key(seed, Stream.TARGET, base_length))
        p = scores.softmax(dim=-1)
        return rule(p, densify(self._distributions, p.shape[-1]).to(device), x, coins, u)


def _require_numbers(finite: bool) -> None:
    if not finite:
        raise NotNumbers("the target's logits are not finite numbers")


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
