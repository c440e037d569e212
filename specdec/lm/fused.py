"""The decoder of the Llama family, with as few operations a layer as it takes.

transformers runs each architecture by its own modules, some sixty operations a layer. At one row a
step these cost as much as the weights' way through memory. Here queries, keys and values are one
product, gate and up are one, and rotation and cache write are one operation each for all heads.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from specdec.lm.attention import KVStore, attend
from specdec.lm.batch import Batch
from specdec.lm.linear import Linear

MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
"""The architectures that differ only in what is read from their modules here."""


def can_fuse(model: PreTrainedModel) -> bool:
    """Whether `FusedDecoder` can run this model."""
    return (
        model.config.model_type in MODEL_TYPES
        and model.config.hidden_act == "silu"
        # Quantised layers are of other types: their weights are no matrices to put side by side.
        and all(
            type(module) is nn.Linear
            for name, module in model.named_modules()
            if name.endswith(("_proj", "lm_head"))
        )
        and all(
            not isinstance(parameter, torch.distributed.tensor.DTensor)
            for parameter in model.parameters()
        )
    )


class _Norm:
    """Root-mean-square normalisation over the last dimension.

    torch composes it of eight operations on the CPU. There `layer_norm`, which is a single one, is
    given [x, −x]: its mean is 0, and its variance the mean square of x.
    """

    def __init__(self, module: Any) -> None:
        self._weight: torch.Tensor = module.weight
        self._epsilon = float(module.variance_epsilon)
        self._size = len(self._weight)
        self._mirrored = self._weight.device.type == "cpu"
        if self._mirrored:
            self._weight = torch.cat([self._weight, self._weight])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[..., size], as it is given."""
        if not self._mirrored:
            return nn.functional.rms_norm(x, (self._size,), self._weight, self._epsilon)
        both = torch.cat([x, x.neg()], dim=-1)
        normed = torch.layer_norm(both, (2 * self._size,), self._weight, None, self._epsilon)
        return normed[..., : self._size].contiguous()


class _Layer:
    """The weights of one decoder layer."""

    def __init__(self, module: Any, window: int | None) -> None:
        attention, mlp = module.self_attn, module.mlp
        self.qkv = Linear([attention.q_proj, attention.k_proj, attention.v_proj])
        self.out = Linear([attention.o_proj])
        self.gate_up = Linear([mlp.gate_proj, mlp.up_proj])
        self.down = Linear([mlp.down_proj])
        self.first_norm = _Norm(module.input_layernorm)
        self.second_norm = _Norm(module.post_attention_layernorm)
        # Qwen3 normalises each head of queries and keys.
        self.query_norm = self.key_norm = None
        if hasattr(attention, "q_norm"):
            self.query_norm, self.key_norm = _Norm(attention.q_norm), _Norm(attention.k_norm)
        self.scaling = float(attention.scaling)
        self.window = window


class FusedDecoder:
    """Runs a model of the Llama family on packed rows."""

    def __init__(self, model: Any, windows: list[int | None], effective_vocab_size: int) -> None:
        """
        Args:
            model: a causal language model for which `can_fuse` holds. It is not needed afterwards.
            windows: for each layer how many of the last positions it sees; None for all.
            effective_vocab_size: how many rows of the output head to use.
        """
        decoder, config = model.model, model.config
        self._embedding = decoder.embed_tokens.weight
        self._layers = [
            _Layer(layer, window) for layer, window in zip(decoder.layers, windows, strict=True)
        ]
        self._rotary = decoder.rotary_emb
        self._norm = _Norm(decoder.norm)
        self._head = Linear([model.lm_head], effective_vocab_size)
        self._heads = config.num_attention_heads
        self._key_heads = config.num_key_value_heads
        self._size = decoder.layers[0].self_attn.head_dim

    def __call__(self, store: KVStore, batch: Batch, logit_rows: torch.Tensor) -> torch.Tensor:
        """Runs the batch and adds its keys and values to the store.

        Returns:
            [M, effective vocabulary]: the logits of the rows `logit_rows`.
        """
        hidden = nn.functional.embedding(batch.token_ids, self._embedding)
        cos, sin = self._rotation(hidden, batch.positions)
        rows = len(batch.slots)
        queries = self._heads
        rotated_heads = queries + self._key_heads
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv(layer.first_norm(hidden)).view(len(hidden), -1, self._size)
            if layer.query_norm is not None:
                assert layer.key_norm is not None
                qkv = torch.cat(
                    [
                        layer.query_norm(qkv[:, :queries]),
                        layer.key_norm(qkv[:, queries:rotated_heads]),
                        qkv[:, rotated_heads:],
                    ],
                    dim=1,
                )
            # rotate_half(x) · sin, with the sign in `sin`; values are turned by 0.
            qkv = torch.addcmul(qkv * cos, qkv.roll(self._size // 2, dims=-1), sin)
            store.write(index, batch.slots, qkv[:rows, queries:])
            attended = attend(
                qkv[:, :queries], store.layers[index], batch, layer.scaling, layer.window
            )
            hidden.add_(layer.out(attended.reshape(len(hidden), -1)))
            gate, up = layer.gate_up(layer.second_norm(hidden)).chunk(2, dim=-1)
            hidden.add_(layer.down(nn.functional.silu(gate).mul_(up)))
        return self._head(self._norm(hidden.index_select(0, logit_rows)))

    def _rotation(
        self, hidden: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin for all heads of queries, keys and values, [T, heads, D] each."""
        cos, sin = (x[0].unsqueeze(1) for x in self._rotary(hidden, positions.unsqueeze(0)))
        half = self._size // 2
        sin = torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)
        rotated = self._heads + self._key_heads
        shape = (len(hidden), self._key_heads, self._size)
        return (
            torch.cat([cos.expand(-1, rotated, -1), cos.new_ones(shape)], dim=1),
            torch.cat([sin.expand(-1, rotated, -1), sin.new_zeros(shape)], dim=1),
        )
