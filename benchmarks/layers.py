"""Random, distinct layers, and their results in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baselines import swiglu
from mglu_ops.timer import layers_for


def masks_of(packed: Tensor, i: int) -> Tensor:
    """Mask i of a packed tensor as bool `[d, h]`."""
    d, octets, _ = packed.shape
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, :, i, None] >> bits) & 1).reshape(d, octets * 8).bool()


def all_masks(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """All masks of a packed tensor, `[n_masks, d, h]`."""
    return torch.stack([masks_of(packed, i) for i in range(packed.shape[2])]).to(dtype)


def mglu(x: Tensor, weight: Tensor, packed: Tensor) -> Tensor:
    """MGLU in float64."""
    x, weight = x.double(), weight.double()
    total = x @ weight.T
    result = torch.zeros_like(total)
    for i in range(packed.shape[2]):
        gate = x @ (weight * masks_of(packed, i)).T
        result += F.silu(gate) * (total - gate)
    return result


class Layers:
    """Distinct layers of one shape: MGLU has a weight and masks, SwiGLU has the weights of two MGLU layers.

    Args:
        d: out_features.
        h: in_features.
        n_masks: number of masks.
        tokens: rows of x.
        dtype: of x and the weights.
        device: where the layers are.
        count: number of MGLU layers; by default as many as take more than a gigabyte together with their results.

    Attributes:
        x: the input `[tokens, h]`, the same for all layers.
        weights: a weight `[d, h]` for each layer.
        packed: packed masks `uint8 [d, h / 8, n_masks]` for each layer.
    """

    def __init__(
        self,
        d: int,
        h: int,
        n_masks: int,
        tokens: int,
        dtype: torch.dtype,
        device: str = "cuda",
        count: int | None = None,
    ) -> None:
        self.n_masks = n_masks
        self.count = count or layers_for(d * h * 2 + d * h // 8 * n_masks + tokens * d * 2)
        self.x = torch.randn(tokens, h, device=device).to(dtype)
        self.weights = [(torch.randn(d, h, device=device) / h**0.5).to(dtype) for _ in range(self.count)]
        octets = d, h // 8, n_masks
        self.packed = [torch.randint(0, 256, octets, dtype=torch.uint8, device=device) for _ in range(self.count)]
        self._known: dict[tuple[str, int], Tensor] = {}

    def oracle(self, i: int) -> Tensor:
        """MGLU of layer i in float64; cached."""
        if ("mglu", i) not in self._known:
            self._known["mglu", i] = mglu(self.x, self.weights[i], self.packed[i])
        return self._known["mglu", i]

    def swiglu_oracle(self, i: int) -> Tensor:
        """SwiGLU in float64 with the weights 2 i (gate) and 2 i + 1 (value); cached."""
        if ("swiglu", i) not in self._known:
            x, gate, up = (one.double() for one in (self.x, *self.weights[2 * i : 2 * i + 2]))
            self._known["swiglu", i] = swiglu(x, gate, up)
        return self._known["swiglu", i]
