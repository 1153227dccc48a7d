"""Random layers, and layers of experts with random routings, and their results in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.formats import FORMATS, round_activation
from mglu_ops.given import Given
from mglu_ops.timer import layers_for

COLD_BYTES = 300_000_000
"""A graph reads at least this many bytes of experts in use, from distinct layers: six times the L2 of an H100 or H200.
More bytes would need too much memory, because experts that are not in use take memory too."""


class Model(NamedTuple):
    """The sizes of a model's layers of experts."""

    experts: int
    out_features: int
    in_features: int
    top_k: int


MODELS = {
    "Qwen3-30B-A3B": Model(128, 768, 2048, 8),
    "Mixtral 8x7B": Model(8, 14336, 4096, 2),
    "gpt-oss-20b": Model(32, 2880, 2880, 4),
}
ROUTINGS = ("balanced", "skewed")


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


def swiglu(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    """SwiGLU's projection with two weights `[d, h]`."""
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def in_fp8_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to float8_e4m3fn. Return the rounded x and one scale per token, `[tokens, 1]`."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def in_float64(x: Tensor, rounded: bool) -> Tensor:
    """Convert x to float64. With `rounded`, it is first rounded to fp8 with one scale per token."""
    stored, scale = in_fp8_tokens(x) if rounded else (x, x.new_ones(()))
    return stored.double() * scale.double()


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

    def swiglu_oracle(self, i: int, rounded: bool = False) -> Tensor:
        """The float64 result of SwiGLU layer i, cached. Its gate is weight 2 i, and its value is weight 2 i + 1.

        With `rounded`, x is rounded to fp8 with one scale per token.
        """
        name = "swiglu, rounded" if rounded else "swiglu"
        if (name, i) not in self._known:
            gate, up = (self.weight(j, torch.float64) for j in (2 * i, 2 * i + 1))
            self._known[name, i] = swiglu(in_float64(self.x, rounded), gate, up)
        return self._known[name, i]


def route(model: Model, tokens: int, routing: str, device: str) -> Tensor:
    """Random expert ids `[tokens, top_k]`, int64. The ids of a token differ.

    With the routing "balanced", experts have equal probabilities. With "skewed", their probabilities are in proportion
    to 1 / rank with random ranks.
    """
    ranks = torch.randperm(model.experts, device=device) + 1.0
    probabilities = 1 / ranks if routing == "skewed" else torch.ones_like(ranks)
    return torch.multinomial(probabilities.expand(tokens, -1), model.top_k)


class ExpertLayers:
    """Distinct layers of experts with the same input: MGLU and SwiGLU of equal width, optionally with down projections.

    Args:
        model: the sizes: E experts with weights `[d, h]`.
        tokens: number of rows of the input.
        routing: one of `ROUTINGS`, as in `route`.
        weight_format: the format of all weights; each expert has scales of its own.
        masks: numbers of masks.
        whole: the layers have down projections too.
        dtype: dtype of x and dense weights.
        device: device of all tensors.
        count: number of layers. By default, enough for the weights of their experts in use, without masks, to exceed
            `COLD_BYTES` together.

    Attributes:
        x: `[tokens, h]`.
        ids: chosen experts `[tokens, top_k]`, for each layer.
        expert_weights: `[tokens, top_k]`, for each layer.
        both: SwiGLU's stored weights `[E, 2 d, h]` of E experts with gates above values, for each layer.
        both_scales: scales `[E, 2 d, ...]` of `both`, or None for dense weights, for each layer.
        weights, scales: MGLU's stored weights `[E, d, h]` and scales `[E, d, ...]`, copies of SwiGLU's gates.
        packed: number of masks -> packed masks `[E, d, h / 8, n_masks]`, for each layer.
        down: stored weights `[E, h, d]` of the down projections, for each layer; None unless `whole`.
        down_scales: their scales `[E, h, ...]`, or None, for each layer.
        used: number of experts in use, for each layer.
    """

    def __init__(
        self,
        model: Model,
        tokens: int,
        routing: str = "balanced",
        weight_format: str = "dense",
        masks: tuple[int, ...] = (1, 4),
        whole: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        count: int | None = None,
    ) -> None:
        self.model, self.format, self.whole = model, FORMATS[weight_format], whole
        experts, d, h, top_k = model
        if count is None:
            chosen = route(model, tokens, routing, device).unique().numel()
            itemsize = (self.format.dtype or dtype).itemsize
            count = layers_for(chosen * d * h * itemsize // self.format.packed, COLD_BYTES)
        self.count = count
        self.x = torch.randn(tokens, h, device=device).to(dtype)
        self.ids = [route(model, tokens, routing, device) for _ in range(count)]
        shares = (torch.rand(tokens, top_k, device=device) for _ in range(count))
        self.expert_weights = [(one / one.sum(-1, keepdim=True)).to(dtype) for one in shares]
        self.used = [ids.unique().numel() for ids in self.ids]

        def random(out_features: int, in_features: int) -> tuple[Tensor, Tensor | None]:
            """The weights of all experts, and their scales. Quantizing takes much memory, so experts take turns."""
            draws = (torch.randn(out_features, in_features, device=device) / in_features**0.5 for _ in range(experts))
            stored, scales = zip(*(self.format.quantize(one.to(dtype)) for one in draws), strict=True)
            return torch.stack(stored), None if self.format.is_dense else torch.stack(scales)

        self.both, self.both_scales = map(list, zip(*(random(2 * d, h) for _ in range(count)), strict=True))
        self.weights = [both[:, :d].contiguous() for both in self.both]
        self.scales = [None if scales is None else scales[:, :d].contiguous() for scales in self.both_scales]
        octets = experts, d, h // 8
        self.packed = {
            n: [torch.randint(256, (*octets, n), dtype=torch.uint8, device=device) for _ in range(count)] for n in masks
        }
        downs = (random(h, d) if whole else (None, None) for _ in range(count))
        self.down, self.down_scales = map(list, zip(*downs, strict=True))
        self._known: dict[tuple[int, int, bool], Tensor] = {}

    @property
    def pairs_of_expert(self) -> float:
        """The mean number of tokens of an expert in use."""
        return self.x.shape[0] * self.model.top_k * self.count / sum(self.used)

    # --- Results in float64 -------------------------------------------------------------------------------------------

    def _decoded(self, i: int, expert: int) -> tuple[Tensor, Tensor]:
        """The gate and value weights of SwiGLU, each `[d, h]` in float64. The gate is also MGLU's weight."""
        scales = self.both_scales[i]
        scale = None if scales is None else scales[expert]
        gate, value = self.format.dequantize(self.both[i][expert], scale, torch.float64).chunk(2)
        return gate, value

    def _of_experts(self, i: int, width: int, result_of: Callable[[int, Tensor], Tensor]) -> Tensor:
        """The results of all pairs, from `result_of(expert, pairs)`. Pair `t * top_k + k` is token t's k-th expert."""
        pairs = self.ids[i].flatten()
        result = torch.empty(len(pairs), width, dtype=torch.float64, device=pairs.device)
        for expert in pairs.unique().tolist():
            rows = (pairs == expert).nonzero().flatten()
            result[rows] = result_of(expert, rows)
        return result

    def first_half(self, i: int, n_masks: int, rounded: bool = False) -> Tensor:
        """The float64 result of layer i's gated projection, `[tokens * top_k, d]`, cached. `n_masks` 0 is SwiGLU.

        With `rounded`, x is rounded to fp8 with one scale per token.
        """
        if (i, n_masks, rounded) not in self._known:
            x, top_k = in_float64(self.x, rounded), self.model.top_k

            def result_of(expert: int, rows: Tensor) -> Tensor:
                gate, value = self._decoded(i, expert)
                if n_masks:
                    return mglu(x[rows // top_k], gate, self.packed[n_masks][i][expert])
                return swiglu(x[rows // top_k], gate, value)

            self._known[i, n_masks, rounded] = self._of_experts(i, self.model.out_features, result_of)
        return self._known[i, n_masks, rounded]

    def oracle(self, i: int, n_masks: int, rounded: bool = False) -> Tensor:
        """The float64 result of layer i: `[tokens, h]` if it is whole, else `first_half`. `n_masks` 0 is SwiGLU.

        With `rounded`, the inputs of both halves are rounded to fp8 with one scale per row.
        """
        y, down, scales = self.first_half(i, n_masks, rounded), self.down[i], self.down_scales[i]
        if down is None:
            return y
        rows_of_down = in_float64(y, rounded)

        def result_of(expert: int, rows: Tensor) -> Tensor:
            scale = None if scales is None else scales[expert]
            return rows_of_down[rows] @ self.format.dequantize(down[expert], scale, torch.float64).T

        outputs = self._of_experts(i, self.model.in_features, result_of)
        return (outputs.view(*self.ids[i].shape, -1) * self.expert_weights[i].double()[..., None]).sum(1)

    def grouped_oracle(self, i: int) -> Tensor:
        """SwiGLU's float64 result as grouped products leave it: sorted by expert unless the layer is `whole`.

        In fp8, they round their inputs too.
        """
        if self.whole:
            return self.oracle(i, 0, not self.format.is_dense)
        return self.first_half(i, 0, not self.format.is_dense)[self.ids[i].flatten().argsort(stable=True)]


AnyLayers = TypeVar("AnyLayers", Layers, ExpertLayers)


def with_rounded_x(layers: AnyLayers) -> AnyLayers:
    """The same layers, whose x is rounded to the activation format "fp8_token"."""
    rounded = copy.copy(layers)
    rounded.x, rounded._known = round_activation(layers.x), {}
    return rounded
