"""Attention over paged keys and values."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from specdec.lm.batch import Batch
from specdec.lm.pages import PAGE_SIZE

_MANY_ROWS = 36
"""Query rows from which products are faster: heads count as rows here."""


class KVStore:
    """The keys and values of all sequences: for each layer, pages of them.

    A layer's tensor is [num_pages + 2, PAGE_SIZE, 2 · key heads, D]: the keys' heads, then the
    values'. Page 0 is ZERO_PAGE, and padding may store into the last one.
    """

    def __init__(
        self,
        layers: list[tuple[int, int]],
        num_pages: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """`layers`: for each layer the number of key heads and D, the larger of both head sizes."""
        # Layers of one shape share a tensor, so that pages are cleared by one operation.
        counts = Counter(layers)
        self._bases = {
            shape: _zeros((count, num_pages + 2, PAGE_SIZE, 2 * shape[0], shape[1]), dtype, device)
            for shape, count in counts.items()
        }
        unbound = {shape: iter(base.unbind()) for shape, base in self._bases.items()}
        self.layers = [next(unbound[shape]) for shape in layers]

    @staticmethod
    def bytes_per_page(layers: list[tuple[int, int]], dtype: torch.dtype) -> int:
        """How much memory one page takes in all layers together."""
        return PAGE_SIZE * dtype.itemsize * sum(2 * heads * size for heads, size in layers)

    def write(self, layer: int, slots: torch.Tensor, keys_values: torch.Tensor) -> None:
        """Stores [T, 2 · key heads, D] at `slots`, int64 [T]."""
        self.layers[layer].view(-1, *self.layers[layer].shape[2:]).index_copy_(
            0, slots, keys_values
        )

    def move(self, sources: torch.Tensor, destinations: torch.Tensor) -> None:
        """Copies what is at slots, int64 [N], to others. All are read before any is written."""
        for base in self._bases.values():
            slots = base.flatten(1, 2)
            slots.index_copy_(1, destinations, slots.index_select(1, sources))

    def clear(self, pages: list[int]) -> None:
        """Overwrites pages with zeros.

        What attention gathers beyond a sequence's end is masked, but must be finite all the same,
        whatever a failed session left there.
        """
        index = torch.tensor(pages, dtype=torch.int64)
        for base in self._bases.values():
            base.index_fill_(1, index.to(base.device), 0)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros that take memory only as they are written to, where the device can do that."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    buffer = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(buffer).view(dtype).view(shape)


def attend(
    query: torch.Tensor,
    layer: torch.Tensor,
    batch: Batch,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """Attention of each row to its own sequence, as far as it has come.

    Args:
        query: [T, heads, D]; rows beyond the groups' are padding.
        layer: [N, PAGE_SIZE, 2 · key heads, D], the rows' own keys and values already in it.
        batch: how the rows are grouped.
        scaling: of the scores.
        window: how many of the last positions a row sees; None for all.
        softcap: caps the scores at ± softcap by tanh; None for no cap.

    Returns:
        [T, heads, D].
    """
    heads, size = query.shape[1:]
    key_heads = layer.shape[2] // 2
    repeats = heads // key_heads
    # On the CPU the fused kernel is slow in bfloat16: products by oneDNN took half of its time.
    by_products = query.device.type == "cpu" and query.dtype == torch.bfloat16
    outputs = []
    for group in batch.groups:
        found = group.gather(layer).transpose(1, 2)
        keys, values = found[:, :key_heads], found[:, key_heads:]
        # The query heads of one key head become more rows of it: nothing is repeated in memory.
        sequences, count = group.positions.shape
        rows = query[group.rows].view(sequences, count, key_heads, repeats, size)
        rows = rows.permute(0, 2, 3, 1, 4).reshape(sequences, key_heads, repeats * count, size)
        mask = group.mask(window, repeats, query.dtype)
        if group.keys_of_rows is None:
            output = _attention(rows, keys, values, mask, scaling, softcap, by_products=by_products)
        else:
            # Kernels take another path for another number of rows: each row has a call of its own,
            # and its shape is that of the row's position.
            assert mask is not None
            output = torch.cat(
                [
                    _attention(
                        rows[i : i + 1],
                        keys[i : i + 1, :, :count_keys],
                        values[i : i + 1, :, :count_keys],
                        mask[i : i + 1, ..., :count_keys],
                        scaling,
                        softcap,
                    )
                    for i, count_keys in enumerate(group.keys_of_rows)
                ]
            )
        output = output.view(sequences, key_heads, repeats, count, size).permute(0, 3, 1, 2, 4)
        outputs.append(output.reshape(-1, heads, size))
    padding = len(query) - batch.groups[-1].rows.stop
    if padding:
        outputs.append(query.new_zeros(padding, heads, size))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    *,
    by_products: bool = False,
) -> torch.Tensor:
    """[B, key heads, rows, D], with a mask [B, 1, rows, L] or none, to the shape of the query."""
    if softcap is not None:
        return _capped_attention(query, keys, values, mask, scaling, softcap)
    if by_products and mask is not None and query.shape[0] * query.shape[2] >= _MANY_ROWS:
        return _attention_by_products(query, keys, values, mask, scaling)
    return scaled_dot_product_attention(query, keys, values, mask, scale=scaling)


def _attention_by_products(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor,
    scaling: float,
) -> torch.Tensor:
    """Like `scaled_dot_product_attention`."""
    batch, heads = query.shape[:2]
    query, keys, values = (x.reshape(batch * heads, *x.shape[2:]) for x in (query, keys, values))
    mask = mask.expand(-1, heads, -1, -1).reshape(batch * heads, *mask.shape[2:])
    scores = torch.baddbmm(mask, query, keys.transpose(1, 2), alpha=scaling)
    return torch.bmm(scores.softmax(dim=-1), values).view(batch, heads, -1, values.shape[-1])


def _capped_attention(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float,
) -> torch.Tensor:
    scores = torch.matmul(query, keys.transpose(-1, -2)) * scaling
    scores = torch.tanh(scores / softcap) * softcap
    if mask is not None:
        scores = scores + mask
    weights = scores.softmax(dim=-1, dtype=torch.float32).to(query.dtype)
    return torch.matmul(weights, values)
