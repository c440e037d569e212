"""A causal language model, and the one place that knows transformers' KV cache."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

import torch
from transformers import DynamicCache, PreTrainedModel


class KVCache:
    """The keys and values of one sequence."""

    def __init__(self) -> None:
        # Without a config every layer keeps all positions, also those that a sliding window
        # hides: a window that forgets could not be rolled back.
        self.past = DynamicCache()

    @property
    def length(self) -> int:
        """How many tokens it holds."""
        return int(self.past.get_seq_length())

    def copy(self, length: int) -> KVCache:
        """A cache of its own that holds the first `length` tokens of this one."""
        twin = KVCache()
        for index, layer in enumerate(self.past.layers):
            # `check_architecture` lets only layers of keys and values through.
            keys, values = (getattr(layer, name)[..., :length, :] for name in ("keys", "values"))
            twin.past.update(keys.clone(), values.clone(), index)
        return twin

    def truncate(self, length: int) -> None:
        """Forgets all but the first `length` tokens. A `length` beyond the end changes nothing."""
        surplus = self.length - length
        if surplus > 0:
            self.past.crop(-surplus)


class CausalLM:
    """A loaded model. Not thread-safe: the model thread owns it."""

    def __init__(self, model: PreTrainedModel, effective_vocab_size: int) -> None:
        """`effective_vocab_size`: the logits of ids from here on are padding, and cut off."""
        self._model = model
        # The argument was renamed in the course of transformers 5; both names are supported.
        renamed = "cache" in inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if renamed else "past_key_values"
        self.effective_vocab_size = effective_vocab_size
        self.device = model.device
        self.dtype = model.dtype

    @property
    def vocab_size(self) -> int:
        """The number of rows of the output head, padding included."""
        return int(self._model.config.get_text_config().vocab_size)

    def new_cache(self) -> KVCache:
        """An empty cache for one sequence."""
        return KVCache()

    @torch.inference_mode()
    def forward(self, cache: KVCache, token_ids: Sequence[int], num_logits: int) -> torch.Tensor:
        """Runs `token_ids` after what the cache holds, and adds them to it.

        Args:
            cache: of this model.
            token_ids: at least one.
            num_logits: at least 1, at most as many as there are token ids.

        Returns:
            float [num_logits, effective_vocab_size] in the model's dtype: the logits that follow
            each of the last `num_logits` tokens.
        """
        output = self._model(
            input_ids=torch.tensor([token_ids], device=self.device),
            use_cache=True,
            logits_to_keep=num_logits,
            **{self._cache_argument: cache.past},
        )
        logits: torch.Tensor = output.logits[0, :, : self.effective_vocab_size]
        return logits
