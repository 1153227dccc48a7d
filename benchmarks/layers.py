"""Random, distinct layers on a GPU, and their results in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.timer import layers_for


def masks_of(packed: Tensor, i: int) -> Tensor:
    """Mask i of a packed tensor as bool `[d, h]`."""
    d, octets, _ = packed.shape
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, i, None] >> bits) & 1).reshape(d, octets * 8).bool()


class Layers:
    """Distinct layers of one shape: MGLU has a weight and masks, SwiGLU has the weights of two MGLU layers.

    Attributes:
        count: number of MGLU layers; together with their results they take more than a gigabyte.
        x: the input `[tokens, h]`, the same for all layers.
        weights: a weight `[d, h]` for each layer.
        packed: packed masks `uint8 [d, h / 8, n_masks]` for each layer.
    """

    def __init__(self, d: int, h: int, n_masks: int, tokens: int, dtype: torch.dtype) -> None:
        self.n_masks = n_masks
        self.count = layers_for(d * h * 2 + d * h // 8 * n_masks + tokens * d * 2)
        self.x = torch.randn(tokens, h, device="cuda").to(dtype)
        self.weights = [(torch.randn(d, h, device="cuda") / h**0.5).to(dtype) for _ in range(self.count)]
        self.packed = [
            torch.randint(0, 256, (d, h // 8, n_masks), dtype=torch.uint8, device="cuda") for _ in range(self.count)
        ]
        self._known: dict[tuple[str, int], Tensor] = {}

    def oracle(self, i: int, mask_weights: Tensor | None = None) -> Tensor:
        """MGLU of layer i in float64; cached, unless there are mask weights `[tokens, n_masks]`."""
        if mask_weights is not None:
            return self._mglu(i, mask_weights)
        return self._once("mglu", i, self._mglu)

    def swiglu_oracle(self, i: int) -> Tensor:
        """SwiGLU in float64 with the weights 2 i (gate) and 2 i + 1 (value); cached."""
        return self._once("swiglu", i, self._swiglu)

    def _mglu(self, i: int, mask_weights: Tensor | None = None) -> Tensor:
        x, weight = self.x.double(), self.weights[i].double()
        total = x @ weight.T
        result = torch.zeros_like(total)
        for m in range(self.n_masks):
            gate = x @ (weight * masks_of(self.packed[i], m)).T
            mask_weight = 1.0 if mask_weights is None else mask_weights[:, m, None]
            result += mask_weight * F.silu(gate) * (total - gate)
        return result

    def _swiglu(self, i: int) -> Tensor:
        x = self.x.double()
        return F.silu(x @ self.weights[2 * i].double().T) * (x @ self.weights[2 * i + 1].double().T)

    def _once(self, name: str, i: int, compute: Callable[[int], Tensor]) -> Tensor:
        if (name, i) not in self._known:
            self._known[name, i] = compute(i)
        return self._known[name, i]
