"""A causal language model that runs packed rows of many sequences over paged keys and values."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.cache_utils import Cache

from specdec.lm.attention import KVStore, attend
from specdec.lm.batch import Batch, Segment, pack
from specdec.lm.fused import FusedDecoder, can_fuse
from specdec.lm.graphs import PassGraphs, Record, record_cuda_graph

_INTERFACE = "specdec_paged"
FIXED_ROWS = 32
"""Rows of every pass in deterministic mode."""


class PagedCache(Cache):
    """What transformers' layers take for a cache: it puts their keys and values into the store."""

    def __init__(self, store: KVStore, batch: Batch) -> None:
        super().__init__(layers=[])
        self._store = store
        self.batch = batch

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores [1, key heads, T, size] each; returns the store's layer in place of the keys."""
        layer, count = self._store.layers[layer_idx], len(self.batch.slots)
        both = [
            _padded(x[0].transpose(0, 1)[:count], layer.shape[-1])
            for x in (key_states, value_states)
        ]
        self._store.write(layer_idx, self.batch.slots, torch.cat(both, dim=1))
        return layer, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given: nobody needs to count from here."""
        return 0


def _padded(heads: torch.Tensor, size: int) -> torch.Tensor:
    """Fills the last dimension with zeros: keys and values need not be of one size."""
    missing = size - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


class _Probe(Cache):
    """Finds out what a model's layers would store."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int]] = {}
        self.windows: list[int | None] = []
        self.keys: torch.Tensor | None = None

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        size = max(key_states.shape[-1], value_states.shape[-1])
        self.shapes[layer_idx] = (key_states.shape[1], size)
        self.keys = key_states
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    paged: PagedCache | _Probe | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: queries [1, heads, T, D] to [1, T, heads, value size]."""
    if paged is None:
        raise NotImplementedError("attention that is not told of the cache")
    if attention_mask is not None or s_aux is not None:
        raise NotImplementedError("attention with position biases or sinks")
    rows = query[0].transpose(0, 1)
    if isinstance(paged, _Probe):
        if key is not paged.keys:
            raise NotImplementedError("attention to other keys than those that it stores")
        paged.windows.append(sliding_window)
        return rows.new_zeros(1, *rows.shape[:2], value.shape[-1]), None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = _padded(rows, key.shape[-1])
    output = attend(rows, key, paged.batch, scaling, sliding_window, softcap)
    # Contiguous, as of transformers' own implementations: some architectures only view it.
    return output[..., : value.shape[-1]].unsqueeze(0).contiguous(), None


AttentionInterface.register(_INTERFACE, _paged_attention)


class CausalLM:
    """A loaded model. Not thread-safe: the model thread owns it."""

    def __init__(
        self,
        model: PreTrainedModel,
        effective_vocab_size: int,
        *,
        vocabulary: torch.Tensor | None = None,
        deterministic: bool = False,
    ) -> None:
        """
        Args:
            model: as transformers loads it. It must not be used otherwise from here on.
            effective_vocab_size: the logits of ids from here on are padding, and cut off.
            vocabulary: int64 [V'], the token that each row of the output head stands for, where
                it has not got all of them; the others' logits are −inf.
            deterministic: whether a row's logits must not depend on the other rows of the pass.
                It runs no trees of drafted tokens then.

        Raises:
            NotImplementedError: its attention does not go through transformers' interface, or
                takes what this runtime has not got.
        """
        self.effective_vocab_size = effective_vocab_size
        embedding: Any = model.get_input_embeddings()
        self.vocab_size = int(embedding.weight.shape[0])
        self.device = model.device
        self.dtype = model.dtype
        self.fixed_rows = FIXED_ROWS if deterministic else None
        # The argument was renamed in the course of transformers 5; both names are supported.
        renamed = "cache" in inspect.signature(type(model).forward).parameters
        self._cache_argument = "cache" if renamed else "past_key_values"
        self._vocabulary = None if vocabulary is None else vocabulary.to(self.device)
        num_outputs = effective_vocab_size if vocabulary is None else len(vocabulary)
        self._num_outputs = num_outputs
        self._model: PreTrainedModel | None = model
        self._fused: FusedDecoder | None = None
        probe = self._probe(model)
        self._layers = [probe.shapes[index] for index in range(len(probe.shapes))]
        if can_fuse(model):
            self._fused = FusedDecoder(model, probe.windows, num_outputs)
            self._model = None
        self.bytes_per_page = KVStore.bytes_per_page(self._layers, self.dtype)
        self._store = KVStore(self._layers, 0, self.dtype, self.device)
        self._graphs: PassGraphs | None = None

    @torch.inference_mode()
    def _probe(self, model: PreTrainedModel) -> _Probe:
        if not model._supports_attention_backend:
            raise NotImplementedError("attention outside of transformers' interface")
        model.set_attn_implementation(_INTERFACE)
        probe = _Probe()
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device),
            position_ids=torch.zeros(1, 1, dtype=torch.int64, device=self.device),
            use_cache=True,
            paged=probe,
            **{self._cache_argument: probe},
        )
        config = model.config.get_text_config()
        types = getattr(config, "layer_types", None) or []
        if not len(probe.shapes) == len(probe.windows) == config.num_hidden_layers:
            raise NotImplementedError("layers that share keys and values")
        if not types and getattr(config, "sliding_window", None):
            types = ["sliding_attention"] * len(probe.windows)
        for kind, window in zip(types, probe.windows, strict=False):
            if kind == "sliding_attention" and window is None:
                raise NotImplementedError("a sliding window that only the mask knows")
        return probe

    def allocate(self, num_pages: int) -> None:
        """Makes room for so many pages; what was stored before is gone."""
        self._store = KVStore(self._layers, num_pages, self.dtype, self.device)
        self._graphs = None

    @torch.inference_mode()
    def record_graphs(
        self,
        num_pages: int,
        record: Record = record_cuda_graph,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> None:
        """Records the passes that recur, if this model can be recorded. To be called once there is
        room for `num_pages`; `PassGraphs` has the arguments."""
        fused = self._fused
        if fused is not None and self.fixed_rows is None:
            self._graphs = PassGraphs(
                lambda batch: fused(self._store, batch, batch.logit_rows),
                scratch_page=num_pages + 1,
                device=self.device,
                max_pages=num_pages,
                record=record,
                progress=progress,
            )

    def free_memory(self) -> None:
        """Gives back to the device what is kept for later."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def check_device(self) -> None:
        """Asks the device for next to nothing.

        Raises:
            RuntimeError: it fails at that too, as after an illegal access for the rest of a
                process's life.
        """
        torch.zeros(1, device=self.device).cpu()

    def clear(self, pages: list[int]) -> None:
        """Overwrites pages that may hold what is no number."""
        self._store.clear(pages)

    @torch.inference_mode()
    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies keys and values from slots to others, all at once: (source, destination) each."""
        sources, destinations = torch.tensor(moves, dtype=torch.int64, device=self.device).T
        self._store.move(sources, destinations)

    @torch.inference_mode()
    def forward(self, segments: Sequence[Segment]) -> torch.Tensor:
        """Runs the segments' tokens in one pass, and stores their keys and values.

        Args:
            segments: at least one, each of another sequence; in deterministic mode `fixed_rows`
                rows together at most, and without trees.

        Raises:
            NotImplementedError: there is a tree in deterministic mode.

        Returns:
            [M, effective_vocab_size] in the model's dtype, M the sum of the segments' num_logits:
            the logits that follow the last num_logits tokens of each.
        """
        if self._graphs is not None:
            logits = self._graphs.run(segments)
            if logits is not None:
                return self._spread(logits)
        deterministic = self.fixed_rows is not None
        batch = pack(segments, self.device, num_rows=self.fixed_rows, deterministic=deterministic)
        rows = batch.logit_rows
        count = len(rows)
        if count == 0:
            rows = rows.new_zeros(1)
        if self.fixed_rows is not None:
            rows = torch.cat([rows, rows.new_zeros(self.fixed_rows - len(rows))])
        return self._spread(self._run(batch, rows)[:count, : self._num_outputs])

    def _spread(self, logits: torch.Tensor) -> torch.Tensor:
        """[M, outputs of the head] to [M, effective_vocab_size]."""
        if self._vocabulary is None:
            return logits
        every = logits.new_full((len(logits), self.effective_vocab_size), -torch.inf)
        return every.index_copy_(1, self._vocabulary, logits)

    def _run(self, batch: Batch, logit_rows: torch.Tensor) -> torch.Tensor:
        if self._fused is not None:
            return self._fused(self._store, batch, logit_rows)
        assert self._model is not None
        cache = PagedCache(self._store, batch)
        output = self._model(
            input_ids=batch.token_ids.unsqueeze(0),
            position_ids=batch.positions.unsqueeze(0),
            use_cache=True,
            logits_to_keep=logit_rows,
            paged=cache,
            **{self._cache_argument: cache},
        )
        logits: torch.Tensor = output.logits[0]
        return logits
