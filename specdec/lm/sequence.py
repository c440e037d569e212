"""A token sequence with the KV cache that holds a prefix of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from specdec.lm.model import CausalLM


class CachedSequence:
    """What a session holds: its tokens, and how many of them the model's cache has seen.

    Invariant between calls: the cache holds the first `cached_length` tokens of `tokens`, and at
    least one token is pending, so that the next forward pass yields logits.
    """

    def __init__(self, model: CausalLM, token_ids: Sequence[int]) -> None:
        """Starts with nothing in the cache. `token_ids` must not be empty."""
        self._model = model
        self._cache = model.new_cache()
        self._intact = True
        """False while a pass runs, and for good if it failed: layers may differ in length then."""
        self.tokens = list(token_ids)

    @property
    def cached_length(self) -> int:
        """How many of the tokens are in the cache."""
        return self._cache.length

    @property
    def prefilled(self) -> bool:
        """Whether only the last token is pending."""
        return self.cached_length >= len(self.tokens) - 1

    def prefill(self, max_tokens: int, *, all_logits: bool = False) -> torch.Tensor:
        """Feeds up to `max_tokens` pending tokens, but never the last one.

        To be called only while not `prefilled`.

        Returns:
            [fed, effective vocabulary] if `all_logits`: the logits that follow each of the tokens
            that were fed. Otherwise the last row of it.
        """
        end = min(self.cached_length + max_tokens, len(self.tokens) - 1)
        fed = self.tokens[self.cached_length : end]
        return self._feed(fed, len(fed) if all_logits else 1)

    def adopt(self, others: Iterable[CachedSequence]) -> int:
        """Copies the longest beginning that another sequence of this model has in its cache.

        To be called while nothing is cached.

        Returns:
            How many tokens are cached now.
        """
        best = max(others, key=self._shared_length, default=None)
        if best is not None and (length := self._shared_length(best)) > 0:
            self._cache = best._cache.copy(length)
        return self.cached_length

    def _shared_length(self, other: CachedSequence) -> int:
        """How much of `other`'s cache is a beginning of this sequence, its last token excluded."""
        limit = min(other.cached_length, len(self.tokens) - 1) if other._intact else 0
        mine, theirs = self.tokens[:limit], other.tokens[:limit]
        if mine == theirs:
            return limit
        return next(i for i, (a, b) in enumerate(zip(mine, theirs, strict=True)) if a != b)

    def append(self, token_ids: Sequence[int]) -> None:
        """Adds tokens at the end. They stay pending."""
        self.tokens.extend(token_ids)

    def forward(self, num_logits: int = 1) -> torch.Tensor:
        """Feeds all pending tokens in one pass.

        Returns:
            [num_logits, effective vocabulary]: the logits that follow the last `num_logits` tokens.
        """
        return self._feed(self.tokens[self.cached_length :], num_logits)

    def _feed(self, token_ids: list[int], num_logits: int) -> torch.Tensor:
        self._intact = False
        logits = self._model.forward(self._cache, token_ids, num_logits)
        self._intact = True
        return logits

    def commit(self, base_length: int, token_ids: Sequence[int]) -> None:
        """Makes the sequence its first `base_length` tokens and then `token_ids`.

        What follows `base_length` now (a draft, verified or not) is kept in the cache as far as it
        agrees with `token_ids`, and rolled back from there on. `token_ids` must not be empty.
        """
        held = self.tokens[base_length:]
        agreeing = 0
        while agreeing < min(len(held), len(token_ids)) and held[agreeing] == token_ids[agreeing]:
            agreeing += 1
        self.tokens[base_length:] = token_ids
        # The last token stays pending: its logits are what comes next.
        self._cache.truncate(min(base_length + agreeing, len(self.tokens) - 1))
