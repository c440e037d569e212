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
        """
        Args:
            modules: of the same input size, device and dtype.
            num_outputs: leaves out what follows so many outputs.
        """
        with torch.inference_mode():
            weight = torch.cat([module.weight[:] for module in modules])[:num_outputs]
            biases = [
                module.weight.new_zeros(module.out_features) if module.bias is None else module.bias
                for module in modules
            ]
            has_bias = any(module.bias is not None for module in modules)
            self._bias = torch.cat(biases)[:num_outputs].contiguous() if has_bias else None
            self._packed = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
            self._weight = weight.contiguous()
            if self._packed:
                self._weight = torch.ops.mkldnn._reorder_linear_weight(self._weight)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, inputs] to [T, outputs]."""
        if self._packed:
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise(
                x, self._weight, self._bias, "none", [], ""
            )
            return y
        return nn.functional.linear(x, self._weight, self._bias)

    def add_to(self, x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        """residual + x Wᵀ + b, in one pass over the result where the device can."""
        return residual.add_(self(x))
