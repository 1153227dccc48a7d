"""SwiGLU's experts in the forms that are fast today: batched and grouped products of torch, and Triton kernels."""

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
"""The most tokens for which batched products are measured. They read an expert once for each of its tokens."""
TRITON = "SwiGLU Triton"
CHUNK = 1024
"""Pairs that a program of the sorting kernel reads at once."""

# --- Batched products of gathered experts, which torch.compile fuses with the gathering -------------------------------


def _batched(x: Tensor, weight: Tensor, pairs: Tensor, scale: Tensor | None = None) -> Tensor:
    """The product of row p of x with the weight of expert `pairs[p]`; weight `[E, d, h]`."""
    y = torch.bmm(x[:, None], weight[pairs].to(x.dtype).mT)[:, 0]
    return y if scale is None else y * scale[pairs].to(x.dtype)


def batched_swiglu(x: Tensor, both: Tensor, scales: Tensor | None, ids: Tensor) -> Tensor:
    """SwiGLU's first half, `[T K, d]`; `both` is `[E, 2 d, h]`, `scales` None or `[E, 2 d]`."""
    pairs, (gate, up) = ids.flatten(), both.chunk(2, 1)
    gate_scale, up_scale = (None, None) if scales is None else scales.chunk(2, 1)
    rows = x[:, None].expand(-1, ids.shape[1], -1).flatten(0, 1)
    return F.silu(_batched(rows, gate, pairs, gate_scale)) * _batched(rows, up, pairs, up_scale)


def batched_layer(x: Tensor, both: Tensor, down: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
    """A whole layer, `[T, h]`."""
    outputs = _batched(batched_swiglu(x, both, None, ids), down, ids.flatten()).view(*ids.shape, -1)
    return (outputs * expert_weights[..., None]).sum(1)


# --- Grouped products of tokens that are sorted by expert -------------------------------------------------------------


def _sorted(ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """The pairs in the order of their experts, and where the pairs of each expert end, int32 `[E]`."""
    sorted_ids, order = ids.flatten().sort(stable=True)
    ends = torch.searchsorted(sorted_ids, torch.arange(experts, device=ids.device), right=True)
    return order, ends.to(torch.int32)


def _gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate) * up


def grouped_swiglu(x: Tensor, both: Tensor, scales: Tensor | None, ids: Tensor) -> Tensor:
    """SwiGLU's first half in the order of experts, `[T K, d]`."""
    order, ends = _sorted(ids, both.shape[0])
    return _gated(F.grouped_mm(x[order // ids.shape[1]], both.mT, offs=ends))


def scaled_grouped_swiglu(x: Tensor, both: Tensor, scales: Tensor, ids: Tensor) -> Tensor:
    """The same with weights in fp8, `scales` `[E, 2 d]`, and x rounded to fp8 token by token."""
    order, ends = _sorted(ids, both.shape[0])
    stored, x_scale = in_fp8_tokens(x[order // ids.shape[1]])
    operands = stored, both.mT, x_scale[:, 0], scales
    return _gated(torch._scaled_grouped_mm(*operands, offs=ends, out_dtype=x.dtype, use_fast_accum=True))


def grouped_layer(x: Tensor, both: Tensor, down: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
    """A whole layer, `[T, h]`."""
    order, ends = _sorted(ids, both.shape[0])
    y = _gated(F.grouped_mm(x[order // ids.shape[1]], both.mT, offs=ends))
    outputs = F.grouped_mm(y, down.mT, offs=ends)
    places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    return (outputs[places].view(*ids.shape, -1) * expert_weights[..., None]).sum(1)


# --- Triton kernels ---------------------------------------------------------------------------------------------------


class Tile(NamedTuple):
    """The launch of `experts_kernel`: pairs, columns and depth of a tile, warps of a program, and stages of loads."""

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
"""Tiles of the first half. Each is tried where an expert has about as many pairs, and the fastest counts."""


def tiles_for(pairs: float) -> list[Tile]:
    """The tiles to try for a mean number of pairs of an expert in use."""
    near = 2 ** (ceil(pairs) - 1).bit_length()
    return [tile for tile in TILES if tile.pairs in {min(max(one, 16), 128) for one in (near // 2, near, 2 * near)}]


class _Blocks(NamedTuple):
    """The arguments of `experts_kernel` that say which pairs a block has, and how many blocks there are at most."""

    pairs: Tensor
    experts: Tensor
    used: Tensor
    most: int


def _kernels() -> Any:
    return importlib.import_module("benchmarks.expert_kernels")  # decides whether Triton is interpreted


def _align(ids: Tensor, experts: int, tile: Tile) -> _Blocks:
    """Sort pairs into blocks on the device. The experts of one token all differ and need no sorting."""
    if ids.shape[0] == 1:
        return _Blocks(ids, ids, ids, ids.numel())
    pairs, filled = ids.numel(), min(ids.numel(), experts)
    most = (pairs + filled * (tile.pairs - 1)) // tile.pairs
    places, of_blocks, used = (ids.new_empty(size, dtype=torch.int32) for size in (most * tile.pairs, most, 1))
    blocks = _Blocks(places, of_blocks, used, most)
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
    """The first half, or the second with `expert_weights`, for all pairs."""
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
    """SwiGLU's first half, `[T K, d]`, with weights in x's dtype or in 8 bits."""
    return _product(x, both, scales, None, ids, _align(ids, both.shape[0], tile), tile)


def triton_layer(tile: Tile, x: Tensor, both: Tensor, down: Tensor, ids: Tensor, expert_weights: Tensor) -> Tensor:
    """A whole layer, `[T, h]`."""
    blocks = _align(ids, both.shape[0], tile)
    y = _product(x, both, None, None, ids, blocks, tile)
    wide = tile._replace(columns=2 * tile.columns)  # as many rows of weights in a tile, without a second product
    return _product(y, down, None, expert_weights, ids, blocks, wide).view(*ids.shape, -1).sum(1)


# --- Variants ---------------------------------------------------------------------------------------------------------


@cache
def _compiled(form: Callable[..., Tensor], tuned: bool) -> Callable[..., Tensor]:
    """The form, compiled for fixed shapes with coordinate descent if `tuned`, else once for all numbers of tokens."""
    if tuned:
        return torch.compile(form, fullgraph=True, dynamic=False, options=OPTIONS["coordinate descent"])
    return torch.compile(form, fullgraph=True)


def _tiles_of(layers: ExpertLayers) -> list[Tile]:
    return tiles_for(layers.x.shape[0] * layers.model.top_k * layers.count / sum(layers.used))


def first_half_variants(layers: ExpertLayers) -> Iterator[Variant]:
    """SwiGLU's first half in every form, in the format of the layers."""

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
    """A whole layer of SwiGLU in every form, with dense weights."""

    def variant(name: str, form: Callable[..., Tensor]) -> Variant:
        def run(i: int) -> Tensor:
            return form(layers.x, layers.both[i], layers.down[i], layers.ids[i], layers.expert_weights[i])

        return Variant(f"SwiGLU {name}", run, layers.count, partial(layers.layer, n_masks=0))

    if layers.x.shape[0] <= BATCHED_TOKENS:
        yield variant("bmm, coordinate descent", _compiled(batched_layer, tuned=True))
    yield variant("grouped_mm, compiled", _compiled(grouped_layer, tuned=False))
    for tile in _tiles_of(layers):
        yield variant(f"Triton, {tile}", partial(triton_layer, tile))
