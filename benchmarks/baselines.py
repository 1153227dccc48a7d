"""What MGLU is compared with: the naive layer, the complement trick, and SwiGLU in all its forms.

Layers of experts have SwiGLU in torch's batched and grouped products, and in Triton kernels. T is the number of tokens,
E the number of experts, and K the number of experts per token (top_k). A pair is a token and one of its experts: pair
t K + k is token t with its k-th expert.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import cache, partial, reduce
from math import ceil
from operator import add
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.layers import ExpertLayers, Layers, all_masks, in_fp8_tokens, swiglu
from benchmarks.timing import Variant
from mglu_ops.formats import WeightFormat
from mglu_ops.nn import NaiveMGLU
from mglu_ops.sizes import ceil_div
from mglu_ops.timer import layers_for

Mode = Literal["eager", "compiled", "coordinate descent", "max-autotune"]
OPTIONS: dict[Mode, dict[str, str | int | bool | Callable[..., object]]] = {
    "compiled": {},
    "coordinate descent": {"coordinate_descent_tuning": True},
    "max-autotune": {"coordinate_descent_tuning": True, "max_autotune": True},
}
"""Options of torch.compile in each mode except "eager"."""
MAX_AUTOTUNED_MASKS = 4
"""max-autotune is measured for one token and up to this number of masks. With more masks it compiles for minutes. With
many tokens it chooses torch's GEMMs, as the default mode does."""
BATCHED_TOKENS = 8
"""Batched products of experts are measured up to this number of tokens, since they read an expert once for each of its
tokens."""
TRITON = "SwiGLU Triton"
CHUNK = 1024
"""Number of pairs that a program of the sorting kernel reads at once."""

Product = Callable[[Tensor, Tensor], Tensor]
"""A product of x with the transpose of a weight: `F.linear`, or grouped products of experts."""


def naive(x: Tensor, weight: Tensor, masks: Iterable[Tensor], product: Product = F.linear) -> Tensor:
    """The layer as a user writes it. Masks `[n_masks, d, h]` are bool or have the weight's dtype."""
    terms = [
        F.silu(product(x, weight * mask)) * product(x, weight * (~mask if mask.dtype is torch.bool else 1 - mask))
        for mask in masks
    ]
    return reduce(add, terms)


def by_complement(x: Tensor, weight: Tensor, masks: Iterable[Tensor], product: Product = F.linear) -> Tensor:
    """MGLU with n_masks + 1 products: `value = x W^T - gate`, where all masks share the product x W^T."""
    total = product(x, weight)
    gates = (product(x, weight * mask) for mask in masks)
    return reduce(add, (F.silu(gate) * (total - gate) for gate in gates))


def gated(both: Tensor) -> Tensor:
    """The result of SwiGLU from one product `[..., 2 d]`, in which the gate's columns come first."""
    gate, up = both.chunk(2, dim=-1)
    return F.silu(gate) * up


def swiglu_stacked(x: Tensor, both: Tensor) -> Tensor:
    """SwiGLU's projection with one weight `[2 d, h]`, in which the gate's rows come first."""
    return gated(F.linear(x, both))


class ComplementTrick(NaiveMGLU):
    """`by_complement` with learned masks."""

    def forward(self, x: Tensor) -> Tensor:
        return by_complement(x, self.weight, [self._straight_through(i) for i in range(self.n_masks)])


class Baseline(NamedTuple):
    """A function that computes a layer, and the mode in which it is compiled."""

    name: str
    function: Callable[..., Tensor]
    mode: Mode

    @property
    def has_bool_masks(self) -> bool:
        return self.name.endswith("bool masks")

    def build(self) -> Callable[..., Tensor]:
        """The function to call. Unless the mode is "eager", its first call compiles it, for fixed shapes."""
        if self.mode == "eager":
            return self.function
        return torch.compile(self.function, fullgraph=True, dynamic=False, options=OPTIONS[self.mode] or None)


NAIVE = (
    Baseline("naive eager", naive, "eager"),
    Baseline("naive compiled, coordinate descent", naive, "coordinate descent"),
    Baseline("naive compiled, bool masks", naive, "compiled"),
    Baseline("naive compiled, coordinate descent, bool masks", naive, "coordinate descent"),
    Baseline("naive compiled, max-autotune, bool masks", naive, "max-autotune"),
)
NAIVE_ON_CPU = Baseline("naive compiled", naive, "compiled")
SWIGLU = (
    Baseline("SwiGLU eager", swiglu, "eager"),
    Baseline("SwiGLU compiled", swiglu, "compiled"),
    Baseline("SwiGLU stacked, compiled", swiglu_stacked, "compiled"),
    Baseline("SwiGLU compiled, coordinate descent", swiglu, "coordinate descent"),
    Baseline("SwiGLU stacked, coordinate descent", swiglu_stacked, "coordinate descent"),
    Baseline("SwiGLU compiled, max-autotune", swiglu, "max-autotune"),
)


def in_modes(baselines: Collection[Baseline], tuned: bool, autotuned: bool) -> list[Baseline]:
    """The baselines to measure. Coordinate descent needs `tuned`, and max-autotune needs `tuned` and `autotuned`."""
    left_out = {"coordinate descent": not tuned, "max-autotune": not (tuned and autotuned)}
    return [baseline for baseline in baselines if not left_out.get(baseline.mode)]


def naive_variants(layers: Layers, tuned: bool) -> list[Variant]:
    """The naive layer. `tuned` adds the modes of torch.compile that take long to compile.

    Unpacked masks are larger than packed ones, so fewer layers are measured: just enough to exceed a gigabyte.
    """

    def run(form: Callable[..., Tensor], masks: list[Tensor], i: int) -> Tensor:
        return form(layers.x, layers.weights[i], masks[i])

    variants = []
    autotuned = layers.x.shape[0] == 1 and layers.n_masks <= MAX_AUTOTUNED_MASKS
    masks_by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for baseline in in_modes(NAIVE, tuned, autotuned):
        dtype = torch.bool if baseline.has_bool_masks else layers.x.dtype
        count = layers_for(layers.weights[0].numel() * (2 + dtype.itemsize * layers.n_masks))
        if dtype not in masks_by_dtype:
            masks_by_dtype[dtype] = [all_masks(packed, dtype) for packed in layers.packed[:count]]
        masks = masks_by_dtype[dtype]
        variants.append(Variant(baseline.name, partial(run, baseline.build(), masks), len(masks), layers.oracle))
    return variants


def swiglu_variants(layers: Layers, tuned: bool) -> list[Variant]:
    """SwiGLU. `tuned` adds the modes of torch.compile that take long to compile.

    A SwiGLU layer takes the weights of two MGLU layers.
    """
    gates, ups = layers.weights[0::2], layers.weights[1::2]
    pairs: list[tuple[Tensor, ...]] = list(zip(gates, ups, strict=False))
    stacks: list[tuple[Tensor, ...]] = [(torch.cat(pair),) for pair in pairs]

    def run(form: Callable[..., Tensor], weights: list[tuple[Tensor, ...]], i: int) -> Tensor:
        return form(layers.x, *weights[i])

    return [
        Variant(
            baseline.name,
            partial(run, baseline.build(), stacks if baseline.function is swiglu_stacked else pairs),
            len(stacks),
            layers.swiglu_oracle,
        )
        for baseline in in_modes(SWIGLU, tuned, autotuned=layers.x.shape[0] == 1)
    ]


# --- Weights in 8 and 4 bits, in the ways that plain torch offers -----------------------------------------------------

Weights = tuple[Tensor, ...]
"""The weights and scales of one layer."""


def decoded_swiglu(
    format: WeightFormat, x: Tensor, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor
) -> Tensor:
    """SwiGLU that decodes each weight just before its product. torch.compile fuses the decoding."""
    return swiglu(x, format.dequantize(gate, gate_scale, x.dtype), format.dequantize(up, up_scale, x.dtype))


def row_scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A product with a weight that has one scale per row."""
    return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


def row_scaled_swiglu(x: Tensor, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor) -> Tensor:
    """SwiGLU with one scale per row. The scales multiply the products instead of the weights."""
    return F.silu(row_scaled(x, gate, gate_scale)) * row_scaled(x, up, up_scale)


def scaled_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A product with torch._scaled_mm and x in fp8."""
    stored, x_scale = in_fp8_tokens(x)
    return torch._scaled_mm(stored, weight.t(), x_scale, scale[None], out_dtype=x.dtype, use_fast_accum=True)


def scaled_mm_swiglu(x: Tensor, both: Tensor, scale: Tensor) -> Tensor:
    """SwiGLU with torch._scaled_mm, x in fp8, and one weight `[2 d, h]`."""
    return gated(scaled_mm(x, both, scale))


def int4_swiglu(x: Tensor, both: Tensor, scales: Tensor) -> Tensor:
    """SwiGLU with torch's kernel for int4, and one weight `[2 d, h]`."""
    return gated(torch._weight_int4pack_mm(x, both, 128, scales))


def int4_packed(weight: Tensor, scale: Tensor) -> Weights:
    """Convert the weight and scales of `int4_group` to the layout of torch's kernel for int4."""
    swapped = (weight << 4) | (weight >> 4)  # torch stores even columns in the upper four bits
    zeros = torch.zeros_like(scale)  # `int4_group` and torch store w + 8; torch also adds a zero point
    return torch._convert_weight_to_int4pack(swapped, 8), torch.stack((scale, zeros), -1).transpose(0, 1).contiguous()


def quantized_swiglu_variants(layers: Layers) -> list[Variant]:
    """SwiGLU in the layers' format. A SwiGLU layer takes the weights of two MGLU layers."""
    format, weights, scales = layers.format, layers.weights, layers.scales
    found: list[Variant] = []
    pairs: list[Weights] = [
        (weights[i], scales[i], weights[i + 1], scales[i + 1]) for i in range(0, len(weights) - 1, 2)
    ]
    stacks = [(torch.cat((one[0], one[2])), torch.cat((one[1], one[3]))) for one in pairs]

    def add(
        name: str,
        form: Callable[..., Tensor],
        tensors: Sequence[Weights],
        oracle: Callable[[int], Tensor] = layers.swiglu_oracle,
    ) -> None:
        compiled = torch.compile(form, fullgraph=True, dynamic=False, options=OPTIONS["coordinate descent"])
        found.append(Variant(f"SwiGLU {name}", lambda i: compiled(layers.x, *tensors[i]), len(tensors), oracle))

    add("decoded, coordinate descent", partial(decoded_swiglu, format), pairs)
    if format.columns is None:
        add("scaled, coordinate descent", row_scaled_swiglu, pairs)
    if format.name == "fp8_row":
        add("torch._scaled_mm, compiled", scaled_mm_swiglu, stacks, partial(layers.swiglu_oracle, rounded=True))
    if format.name == "int4_group" and layers.x.dtype is torch.bfloat16:
        add("int4pack_mm, compiled", int4_swiglu, [int4_packed(*one) for one in stacks])
    return found


# --- Experts ----------------------------------------------------------------------------------------------------------


class Experts(NamedTuple):
    """The arguments beside x `[T, h]` of all forms of SwiGLU's experts.

    The forms return the gated projections `[T K, d]` or, with down projections, the whole layer `[T, h]`.
    """

    both: Tensor
    """`[E, 2 d, h]`, with gates above values."""
    scales: Tensor | None
    """`[E, 2 d]`, the scales of `both`, or None."""
    ids: Tensor
    """`[T, K]`, the chosen experts."""
    down: Tensor | None
    """`[E, h, d]`, the weights of down projections, or None."""
    down_scales: Tensor | None
    """`[E, h]`, the scales of `down`, or None."""
    weights: Tensor
    """`[T, K]`, the weights of the chosen experts."""


def _batched(x: Tensor, weight: Tensor, pairs: Tensor, scale: Tensor | None = None) -> Tensor:
    """The products of each row p of x with the matrix of expert `pairs[p]`. `weight` is `[E, d, h]`."""
    y = torch.bmm(x[:, None], weight[pairs].to(x.dtype).mT)[:, 0]
    return y if scale is None else y * scale[pairs].to(x.dtype)


def batched_swiglu(x: Tensor, experts: Experts) -> Tensor:
    """SwiGLU's experts as products of gathered weights; torch.compile fuses the gathering."""
    both, scales, ids, down, down_scales, expert_weights = experts
    pairs, (gate, up) = ids.flatten(), both.chunk(2, 1)
    gate_scale, up_scale = (None, None) if scales is None else scales.chunk(2, 1)
    rows = x[:, None].expand(-1, ids.shape[1], -1).flatten(0, 1)
    y = F.silu(_batched(rows, gate, pairs, gate_scale)) * _batched(rows, up, pairs, up_scale)
    if down is None:
        return y
    return (_batched(y, down, pairs, down_scales).view(*ids.shape, -1) * expert_weights[..., None]).sum(1)


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pairs sorted by expert, and int32 `[E]`: the position in this order at which each expert's pairs end."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=ids.device), right=True)
    return order, ends.to(torch.int32)


def _grouped(rows: Tensor, weight: Tensor, scales: Tensor | None, ends: Tensor) -> Tensor:
    """The products of sorted rows with the matrices of their experts. With scales, rows are rounded to fp8."""
    if scales is None:
        return F.grouped_mm(rows, weight.mT, offs=ends)
    stored, row_scale = in_fp8_tokens(rows)
    operands = stored, weight.mT, row_scale[:, 0], scales
    return torch._scaled_grouped_mm(*operands, offs=ends, out_dtype=rows.dtype, use_fast_accum=True)


def grouped_swiglu(x: Tensor, experts: Experts) -> Tensor:
    """SwiGLU's experts as grouped products of sorted tokens. Without down projections, the result stays sorted.

    For weights in fp8, the input of each product is rounded to fp8 with one scale per row.
    """
    both, scales, ids, down, down_scales, expert_weights = experts
    order, ends = _sorted(ids, both.shape[0])
    rows = x[order // ids.shape[1]]
    y = gated(_grouped(rows, both, scales, ends))
    if down is None:
        return y
    outputs = _grouped(y, down, down_scales, ends)
    places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return (outputs[places].view(*ids.shape, -1) * expert_weights[..., None]).sum(1)


class Tile(NamedTuple):
    """A launch of `experts_kernel`: pairs, columns and depth of a tile, warps, and pipeline stages."""

    pairs: int
    columns: int
    depth: int
    warps: int
    stages: int

    def __str__(self) -> str:
        return f"{self.pairs} x {self.columns} x {self.depth}, {self.warps} warps, {self.stages} stages"


TILES = (
    Tile(16, 32, 128, 4, 4),
    Tile(16, 32, 256, 4, 3),
    Tile(16, 64, 128, 4, 4),
    Tile(16, 64, 64, 4, 5),
    Tile(32, 32, 128, 4, 4),
    Tile(32, 64, 128, 4, 4),
    Tile(32, 128, 64, 4, 4),
    Tile(64, 64, 64, 4, 4),
    Tile(64, 64, 128, 4, 3),
    Tile(64, 128, 64, 8, 4),
    Tile(128, 64, 64, 8, 4),
    Tile(128, 128, 64, 8, 3),
)
"""Tiles of the gated projection. `tiles_for` selects the tiles to measure, and the fastest of them counts."""


def tiles_for(pairs: float) -> list[Tile]:
    """The tiles to measure. `pairs` is the mean number of pairs of the experts in use."""
    near = 2 ** (ceil(pairs) - 1).bit_length()
    return [tile for tile in TILES if tile.pairs in {min(max(one, 16), 128) for one in (near // 2, near, 2 * near)}]


class _Blocks(NamedTuple):
    """The arguments of `experts_kernel` that describe the blocks of pairs, and the largest number of blocks."""

    pairs: Tensor
    experts: Tensor
    used: Tensor
    most: int


def _kernels() -> Any:
    # Triton reads TRITON_INTERPRET when it is imported, so this module must not import it at once.
    return importlib.import_module("benchmarks.expert_kernels")


def _align(ids: Tensor, experts: int, tile: Tile) -> _Blocks:
    """Sort pairs into blocks on the device. The experts of a single token differ, so its pairs stay as they are."""
    if ids.shape[0] == 1:
        return _Blocks(ids, ids, ids, ids.numel())
    pairs, filled = ids.numel(), min(ids.numel(), experts)
    most = (pairs + filled * (tile.pairs - 1)) // tile.pairs
    places, block_experts, used = (ids.new_empty(size, dtype=torch.int32) for size in (most * tile.pairs, most, 1))
    blocks = _Blocks(places, block_experts, used, most)
    bins = 2 ** (experts - 1).bit_length()
    _kernels().align_kernel[(experts,)](ids, *blocks[:3], pairs, bins, tile.pairs, CHUNK)
    return blocks


def _product(
    x: Tensor,
    weight: Tensor,
    scale: Tensor | None,
    expert_weights: Tensor | None,
    ids: Tensor,
    blocks: _Blocks,
    tile: Tile,
) -> Tensor:
    """The gated projection of all pairs, or the down projection if `expert_weights` are given."""
    gated, pairs, h = expert_weights is None, ids.numel(), x.shape[1]
    d = weight.shape[1] // (2 if gated else 1)
    out = x.new_empty(pairs, d)
    _kernels().experts_kernel[(blocks.most, ceil_div(d, tile.columns))](
        *(x, weight, scale, expert_weights, out, *blocks[:3], pairs, d, h),
        TOP_K=pairs // x.shape[0],
        GATED=gated,
        SCALED=scale is not None,
        ALIGNED=ids.shape[0] > 1,
        WHOLE_STEPS=h % tile.depth == 0,
        BLOCK_M=tile.pairs,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out


def triton_swiglu(tile: Tile, x: Tensor, experts: Experts) -> Tensor:
    """SwiGLU's experts in Triton kernels, with weights in x's dtype or in 8 bits."""
    both, scales, ids, down, down_scales, expert_weights = experts
    blocks = _align(ids, both.shape[0], tile)
    y = _product(x, both, scales, None, ids, blocks, tile)
    if down is None:
        return y
    wide = tile._replace(columns=2 * tile.columns)  # one product, not gate and value, leaves room for more columns
    return _product(y, down, down_scales, expert_weights, ids, blocks, wide).view(*ids.shape, -1).sum(1)


@cache
def _compiled(form: Callable[..., Tensor], tuned: bool) -> Callable[..., Tensor]:
    """Compile a form of the experts.

    With `tuned`, it is compiled for fixed shapes with coordinate descent; otherwise once for all numbers of tokens.
    """
    if tuned:
        return torch.compile(form, fullgraph=True, dynamic=False, options=OPTIONS["coordinate descent"])
    return torch.compile(form, fullgraph=True)


def expert_swiglu_variants(layers: ExpertLayers) -> Iterator[Variant]:
    """SwiGLU's experts in every form that torch and `expert_kernels` offer, with weights in the layers' format.

    There is none for weights of which two share a byte.
    """
    if layers.format.packed > 1:
        return

    def variant(name: str, form: Callable[..., Tensor], oracle: Callable[[int], Tensor]) -> Variant:
        def run(i: int) -> Tensor:
            both, down = (layers.both[i], layers.both_scales[i]), (layers.down[i], layers.down_scales[i])
            return form(layers.x, Experts(*both, layers.ids[i], *down, layers.expert_weights[i]))

        return Variant(f"SwiGLU {name}", run, layers.count, oracle)

    oracle = partial(layers.oracle, n_masks=0)
    if layers.x.shape[0] <= BATCHED_TOKENS:
        yield variant("bmm, coordinate descent", _compiled(batched_swiglu, tuned=True), oracle)
    name = "grouped_mm" if layers.format.is_dense else "_scaled_grouped_mm"
    yield variant(f"{name}, compiled", _compiled(grouped_swiglu, tuned=False), layers.grouped_oracle)
    for tile in tiles_for(layers.pairs_of_expert):
        yield variant(f"Triton, {tile}", partial(triton_swiglu, tile), oracle)


class NaiveExperts(nn.Module):
    """Experts of MGLU to train, in plain torch: two grouped products for each mask.

    Attributes:
        weight: `[experts, out_features, in_features]`.
        mask_logits: `[experts, n_masks, out_features, in_features]`.
        offs: int32 `[experts]`, the end of each expert's rows.
    """

    def __init__(self, weight: nn.Parameter, mask_logits: nn.Parameter, offs: Tensor) -> None:
        super().__init__()
        self.weight, self.mask_logits, self.offs = weight, mask_logits, offs
        self.n_masks = mask_logits.shape[1]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=self.offs)

    def masks(self) -> list[Tensor]:
        """All masks: 0 or 1 in the forward pass. In the backward pass, their gradient goes to the logits unchanged."""
        logits = self.mask_logits.unbind(1)
        return [((soft > 0).to(soft.dtype) - soft).detach() + soft for soft in logits]

    def forward(self, x: Tensor) -> Tensor:
        return naive(x, self.weight, self.masks(), self.product)


class ExpertsByComplement(NaiveExperts):
    """Experts with n_masks + 1 products, as in `by_complement`."""

    def forward(self, x: Tensor) -> Tensor:
        return by_complement(x, self.weight, self.masks(), self.product)


class SwigluExperts(nn.Module):
    """Experts of SwiGLU with one weight `[experts, 2 out_features, in_features]`."""

    def __init__(self, experts: NaiveExperts) -> None:
        super().__init__()
        self.weight, self.offs = nn.Parameter(torch.cat([experts.weight.detach()] * 2, 1)), experts.offs

    def forward(self, x: Tensor) -> Tensor:
        return gated(F.grouped_mm(x, self.weight.transpose(1, 2), offs=self.offs))
