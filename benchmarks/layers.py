"""Random layers, and their results in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baselines import swiglu
from mglu_ops.formats import FORMATS
from mglu_ops.given import Given
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
    """Distinct random layers of one shape. An MGLU layer has one weight and masks.

    There are `count` MGLU layers. A SwiGLU layer takes the weights of two of them. By default, the layers and their
    results take more than a gigabyte, so weights do not come from a cache. x and dense weights have `dtype`.

    Attributes:
        x: input `[tokens, h]` of all layers.
        weights: stored weight `[d, h]`, for each layer.
        scales: scales of the weight or None if it is dense, for each layer.
        packed: packed masks `uint8 [d, h / 8, n_masks]`, for each layer.
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
        weight_format: str = "dense",
    ) -> None:
        self.n_masks = n_masks
        self.format = FORMATS[weight_format]
        bytes_of_weight = d * h * (self.format.dtype or dtype).itemsize // self.format.packed
        self.count = count or layers_for(bytes_of_weight + d * h // 8 * n_masks + tokens * d * 2)
        self.x = torch.randn(tokens, h, device=device).to(dtype)
        made = (self.format.quantize((torch.randn(d, h, device=device) / h**0.5).to(dtype)) for _ in range(self.count))
        self.weights, self.scales = map(list, zip(*made, strict=True))
        octets = d, h // 8, n_masks
        self.packed = [torch.randint(0, 256, octets, dtype=torch.uint8, device=device) for _ in range(self.count)]
        self._known: dict[tuple[str, int], Tensor] = {}

    def arguments(self, i: int) -> Given:
        """The arguments of the operator for layer i."""
        scale, name = self.scales[i], self.format.name
        return Given(self.x, self.weights[i], self.packed[i], weight_scale=scale, weight_format=name)

    def weight(self, i: int, dtype: torch.dtype) -> Tensor:
        """The weight `[d, h]` of layer i, decoded to `dtype`."""
        return self.format.dequantize(self.weights[i], self.scales[i], dtype)

    def oracle(self, i: int) -> Tensor:
        """The float64 result of MGLU layer i, cached."""
        if ("mglu", i) not in self._known:
            self._known["mglu", i] = mglu(self.x, self.weight(i, torch.float64), self.packed[i])
        return self._known["mglu", i]

    def swiglu_oracle(self, i: int) -> Tensor:
        """The float64 result of SwiGLU layer i, cached. Its gate is weight 2 i, and its value is weight 2 i + 1."""
        if ("swiglu", i) not in self._known:
            gate, up = (self.weight(j, torch.float64) for j in (2 * i, 2 * i + 1))
            self._known["swiglu", i] = swiglu(self.x.double(), gate, up)
        return self._known["swiglu", i]
