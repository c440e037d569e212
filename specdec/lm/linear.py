"""Matrix products with constant weights, in whatever form runs fastest on the device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn


class Linear:
    """y = x Wᵀ + b, one or several layers of `nn.Linear` that take the same input side by side.

    On the CPU, weights in half precision are packed once: oneDNN would otherwise repack them at
    every call.
    """

    def __init__(self, modules: Sequence[nn.Linear], num_outputs: int | None = None) -> None:
        """Takes over the weights. If several modules are joined, they are left without theirs.

        Args:
            modules: of the same input size, device and dtype.
            num_outputs: leaves out what follows so many outputs.
        """
        weight: torch.Tensor = modules[0].weight
        bias: torch.Tensor | None = modules[0].bias
        with torch.inference_mode():
            if len(modules) > 1:
                weight = _joined([module.weight for module in modules])
                if any(module.bias is not None for module in modules):
                    bias = _joined([_bias_of(module) for module in modules])
            self._weight = weight[:num_outputs]
            self._bias = None if bias is None else bias[:num_outputs]
            self._packed = (
                weight.device.type == "cpu"
                and weight.dtype == torch.bfloat16
                and torch.backends.mkldnn.is_available()
                and torch.ops.mkldnn._is_mkldnn_bf16_supported()
            )
            if self._packed:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight.contiguous())
        if len(modules) > 1:
            # Without this a model would need twice its memory while it is taken over.
            for module in modules:
                module.weight = nn.Parameter(weight.new_empty(0), requires_grad=False)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] to [T, outputs]."""
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return y
        return nn.functional.linear(x, self._weight, self._bias)


def _bias_of(module: nn.Linear) -> torch.Tensor:
    return module.weight.new_zeros(module.out_features) if module.bias is None else module.bias


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat(list(tensors))
