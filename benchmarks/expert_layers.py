"""Random layers of experts with random routings, and their results in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from benchmarks.baselines import swiglu
from benchmarks.layers import mglu
from benchmarks.quantized import in_fp8_tokens
from mglu_ops.formats import FORMATS
from mglu_ops.timer import layers_for

COLD_BYTES = 300_000_000
"""A graph reads at least this many bytes of experts in use, from distinct layers: six times the L2 of an H100 or H200.
More bytes would need too much memory, because experts that are not in use take memory too."""


class Model(NamedTuple):
    """A model's experts: its name, and a layer's number of experts, `out_features`, `in_features` and `top_k`."""

    name: str
    experts: int
    d: int
    h: int
    top_k: int


def route(model: Model, tokens: int, skewed: bool, device: str) -> Tensor:
    """Random expert ids `[tokens, top_k]`, int64. The ids of a token differ.

    Experts have equal probabilities or, with `skewed`, probabilities in proportion to 1 / rank with random ranks.
    """
    ranks = torch.randperm(model.experts, device=device) + 1.0
    probabilities = 1 / ranks if skewed else torch.ones_like(ranks)
    return torch.multinomial(probabilities.expand(tokens, -1), model.top_k)


class ExpertLayers:
    """Distinct layers of experts with the same input: MGLU and SwiGLU of equal width, optionally with down projections.

    Args:
        model: the sizes.
        tokens: number of rows of the input.
        skewed: experts have unequal probabilities, as in `route`.
        weight_format: "dense", or a format with one scale per row.
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
        both_scales: scales `[E, 2 d]` of `both`, or None for dense weights, for each layer.
        weights, scales: MGLU's stored weights `[E, d, h]` and scales `[E, d]`, copies of SwiGLU's gates.
        packed: number of masks -> packed masks `[E, d, h / 8, n_masks]`, for each layer.
        down: dense weights `[E, h, d]` of the down projections, for each layer. Empty unless `whole`.
        used: number of experts in use, for each layer.
    """

    def __init__(
        self,
        model: Model,
        tokens: int,
        skewed: bool = False,
        weight_format: str = "dense",
        masks: tuple[int, ...] = (1, 4),
        whole: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: str = "cuda",
        count: int | None = None,
    ) -> None:
        self.model, self.masks, self.format, self.dtype = model, masks, FORMATS[weight_format], dtype
        _, experts, d, h, top_k = model
        if count is None:
            chosen = route(model, tokens, skewed, device).unique().numel()
            count = layers_for(chosen * d * h * (self.format.dtype or dtype).itemsize, COLD_BYTES)
        self.count = count
        self.x = torch.randn(tokens, h, device=device).to(dtype)
        self.ids = [route(model, tokens, skewed, device) for _ in range(count)]
        shares = (torch.rand(tokens, top_k, device=device) for _ in range(count))
        self.expert_weights = [(one / one.sum(-1, keepdim=True)).to(dtype) for one in shares]
        self.used = [ids.unique().numel() for ids in self.ids]

        def random(out_features: int, in_features: int) -> Tensor:
            return (torch.randn(out_features, in_features, device=device) / in_features**0.5).to(dtype)

        self.both: list[Tensor] = []
        self.both_scales: list[Tensor | None] = []
        for _ in range(count):  # quantizing takes much memory, so it runs expert by expert
            made = [self.format.quantize(random(2 * d, h)) for _ in range(experts)]
            scales = [scale for _, scale in made if scale is not None]
            self.both.append(torch.stack([stored for stored, _ in made]))
            self.both_scales.append(torch.stack(scales) if scales else None)
        self.weights = [both[:, :d].contiguous() for both in self.both]
        self.scales = [None if scales is None else scales[:, :d].contiguous() for scales in self.both_scales]
        octets = experts, d, h // 8
        self.packed = {
            n: [torch.randint(256, (*octets, n), dtype=torch.uint8, device=device) for _ in range(count)] for n in masks
        }
        made_down = (torch.stack([random(h, d) for _ in range(experts)]) for _ in range(count if whole else 0))
        self.down = list(made_down)
        self._known: dict[tuple[int, int, bool], Tensor] = {}

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
            stored, scale = in_fp8_tokens(self.x) if rounded else (self.x, self.x.new_ones(()))
            x, top_k = stored.double() * scale.double(), self.model.top_k

            def result_of(expert: int, rows: Tensor) -> Tensor:
                gate, value = self._decoded(i, expert)
                if n_masks:
                    return mglu(x[rows // top_k], gate, self.packed[n_masks][i][expert])
                return swiglu(x[rows // top_k], gate, value)

            self._known[i, n_masks, rounded] = self._of_experts(i, self.model.d, result_of)
        return self._known[i, n_masks, rounded]

    def sorted_first_half(self, i: int, rounded: bool = False) -> Tensor:
        """SwiGLU's float64 result of the gated projection, with rows sorted by expert."""
        return self.first_half(i, 0, rounded)[self.ids[i].flatten().argsort(stable=True)]

    def layer(self, i: int, n_masks: int) -> Tensor:
        """The float64 result of the whole layer i, `[tokens, h]`. `n_masks` 0 is SwiGLU."""
        y = self.first_half(i, n_masks)
        outputs = self._of_experts(i, self.model.h, lambda expert, rows: y[rows] @ self.down[i][expert].double().T)
        return (outputs.view(*self.ids[i].shape, -1) * self.expert_weights[i].double()[..., None]).sum(1)
