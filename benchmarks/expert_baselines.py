"""Fast implementations of SwiGLU's experts: torch's batched and grouped products, and Triton kernels.

T is the number of tokens, E the number of experts, and K the number of experts per token (top_k). A pair is a token and
one of its experts: pair t K + k is token t with its k-th expert.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from math import ceil
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.baselines import OPTIONS
from benchmarks.expert_layers import ExpertLayers
from benchmarks.harness import Variant
from benchmarks.quantized import in_fp8_tokens
from mglu_ops.sizes import ceil_div

BATCHED_TOKENS = 8
"""Batched products are measured up to this number of tokens, since they read an expert once for each of its tokens."""
TRITON = "SwiGLU Triton"
CHUNK = 1024
"""Number of pairs that a program of the sorting kernel reads at once."""

# --- Batched products of gathered experts; torch.compile fuses the gathering ------------------------------------------


def _batched(x: Tensor, weight: Tensor, pairs: Tensor, scale: Tensor | None = None) -> Tensor:
    """The products of each row p of x with the matrix of expert `pairs[p]`. `weight` is `[E, d, h]`."""
    y = torch.bmm(x[:, None], weight[pairs].to(x.dtype).mT)[:, 0]
    return y if scale is None else y * scale[pairs].to(x.dtype)


def batched_swiglu(x: Tensor, both: Tensor, scales: Tensor | None, ids: Tensor) -> Tensor:
    """The gated projection, `[T K, d]`. `both` is `[E, 2 d, h]`, and `scales` is None or `[E, 2 d]`."""
    pairs, (gate, up) = ids.flatten(), both.chunk(2, 1)
    gate_scale, up_scale = (None, None) if scales is None else scales.chunk(2, 1)
    rows = x[:, None].expand(-1, ids.shape[1], -1).flatten(0, 1)
    return F.silu(_batched(rows, gate, pairs, gate_scale)) * _batched(rows, up, pairs, up_scale)


def batched_layer(x: Tensor, both: Tensor, down: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
    """The whole layer, `[T, h]`."""
    outputs = _batched(batched_swiglu(x, both, None, ids), down, ids.flatten()).view(*ids.shape, -1)
    return (outputs * expert_weights[..., None]).sum(1)


# --- Grouped products of tokens that are sorted by expert -------------------------------------------------------------


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pairs sorted by expert, and int32 `[E]`: the position in this order at which each expert's pairs end."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=ids.device), right=True)
    return order, ends.to(torch.int32)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def grouped_swiglu(x: Tensor, both: Tensor, scales: Tensor | None, ids: Tensor) -> Tensor:
    """The gated projection, `[T K, d]`, sorted by expert."""
    order, ends = _sorted(ids, both.shape[0])
    return _gated(F.grouped_mm(x[order // ids.shape[1]], both.mT, offs=ends))


def scaled_grouped_swiglu(x: Tensor, both: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """The gated projection, `[T K, d]`, sorted by expert, with x and weights in fp8.

    Weights have `scales` `[E, 2 d]`. x is rounded with one scale per token.
    """
    order, ends = _sorted(ids, both.shape[0])
    stored, x_scale = in_fp8_tokens(x[order // ids.shape[1]])
    operands = stored, both.mT, x_scale[:, 0], scales
    return _gated(torch._scaled_grouped_mm(*operands, offs=ends, out_dtype=x.dtype, use_fast_accum=True))


def grouped_layer(x: Tensor, both: Tensor, down: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
    """The whole layer, `[T, h]`."""
    order, ends = _sorted(ids, both.shape[0])
    y = _gated(F.grouped_mm(x[order // ids.shape[1]], both.mT, offs=ends))
    outputs = F.grouped_mm(y, down.mT, offs=ends)
    places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return (outputs[places].view(*ids.shape, -1) * expert_weights[..., None]).sum(1)


# --- Triton kernels ---------------------------------------------------------------------------------------------------


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


def triton_swiglu(tile: Tile, x: Tensor, both: Tensor, scales: Tensor | None, ids: Tensor) -> Tensor:
    """The gated projection, `[T K, d]`, with weights in x's dtype or in 8 bits."""
    return _product(x, both, scales, None, ids, _align(ids, both.shape[0], tile), tile)


def triton_layer(tile: Tile, x: Tensor, both: Tensor, down: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
    """The whole layer, `[T, h]`."""
    blocks = _align(ids, both.shape[0], tile)
    y = _product(x, both, None, None, ids, blocks, tile)
    wide = tile._replace(columns=2 * tile.columns)  # one product, not gate and value, leaves room for more columns
    return _product(y, down, None, expert_weights, ids, blocks, wide).view(*ids.shape, -1).sum(1)


# --- Variants ---------------------------------------------------------------------------------------------------------


@cache
def _compiled(form: Callable[..., Tensor], tuned: bool) -> Callable[..., Tensor]:
    """Compile a form of the experts.

    With `tuned`, it is compiled for fixed shapes with coordinate descent; otherwise once for all numbers of tokens.
    """
    if tuned:
        return torch.compile(form, fullgraph=True, dynamic=False, options=OPTIONS["coordinate descent"])
    return torch.compile(form, fullgraph=True)


def _tiles_of(layers: ExpertLayers) -> list[Tile]:
    return tiles_for(layers.x.shape[0] * layers.model.top_k * layers.count / sum(layers.used))


def first_half_variants(layers: ExpertLayers) -> Iterator[Variant]:
    """The gated projection in every form, with weights in the layers' format."""

    def variant(name: str, form: Callable[..., Tensor], oracle: Callable[[int], Tensor]) -> Variant:
        def run(i: int) -> Tensor:
            return form(layers.x, layers.both[i], layers.both_scales[i], layers.ids[i])

        return Variant(f"SwiGLU {name}", run, layers.count, oracle)

    by_token = partial(layers.first_half, n_masks=0)
    if layers.x.shape[0] <= BATCHED_TOKENS:
        yield variant("bmm, coordinate descent", _compiled(batched_swiglu, tuned=True), by_token)
    if layers.format.is_dense:
        form = _compiled(grouped_swiglu, tuned=False)
        yield variant("grouped_mm, compiled", form, layers.sorted_first_half)
    else:
        form = _compiled(scaled_grouped_swiglu, tuned=False)
        yield variant("_scaled_grouped_mm, compiled", form, partial(layers.sorted_first_half, rounded=True))
    for tile in _tiles_of(layers):
        yield variant(f"Triton, {tile}", partial(triton_swiglu, tile), by_token)


def layer_variants(layers: ExpertLayers) -> Iterator[Variant]:
    """The whole layer in every form, with dense weights."""

    def variant(name: str, form: Callable[..., Tensor]) -> Variant:
        def run(i: int) -> Tensor:
            return form(layers.x, layers.both[i], layers.down[i], layers.ids[i], layers.expert_weights[i])

        return Variant(f"SwiGLU {name}", run, layers.count, partial(layers.layer, n_masks=0))

    if layers.x.shape[0] <= BATCHED_TOKENS:
        yield variant("bmm, coordinate descent", _compiled(batched_layer, tuned=True))
    yield variant("grouped_mm, compiled", _compiled(grouped_layer, tuned=False))
    for tile in _tiles_of(layers):
        yield variant(f"Triton, {tile}", partial(triton_layer, tile))
