"""The down projection of a layer of experts: the product of each (token, expert) pair, and their weighted sum.

The kernels are csrc/cuda/experts_down.cu and csrc/cuda/combine_experts.cu; csrc/cuda/experts_down.md describes them.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from ....call import Call
from ....formats import FORMATS
from ....sizes import ceil_div, least, round_up
from ..device import RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from ..launch import Plan, Source, Step
from . import decode_weight, group_tokens
from .base import ELEMENTS, weight_is_vectorizable

NAME, COMBINE = "experts_down", "combine_experts"

_COLUMNS = 128
_COMBINE_THREADS = 128
_LEAST_COLUMNS = 4096
"""The least in_features for which split-K of the last wave pays. With fewer, the last wave is short anyway."""
_MOST_ROWS_OF_EXPERT = dict.fromkeys(FORMATS, 320) | {"dense": 64, "fp8_block": 160}
"""The most rows per expert, on average, for which this kernel is faster than `grouped_mm`, by weight format. Weights in
8 or 4 bits are decoded before `grouped_mm` (csrc/cuda/experts_down.md)."""
MOST_ROWS = 2**14
"""The most rows that each block of this kernel, or the only block of `group_tokens`, sorts by expert."""
_LIBRARY_ARCHITECTURES = ((9, 0), (10, 0))
"""The compute capabilities where `grouped_mm` reads no offset on the host."""


@dataclass(frozen=True)
class ExpertsDown:
    """The launch configuration of csrc/cuda/experts_down.cu.

    A block has `teams` teams of `row_warps` warps. Each warp computes `row_tiles` tiles of 16 rows of W. An item is up
    to `block_tokens` (token, expert) pairs of one expert. A work tile is the product of an item and a team's rows of W.
    """

    block_tokens: int
    """The most pairs of an item, which share a read of W: a multiple of 8, or 1 for a call of a single token."""
    row_tiles: int = 1
    row_warps: int = 4
    teams: int = 1
    """Teams of warps, which divide the stages of a single token; 1 for more tokens."""
    stages: int = 4
    """Stages of 128 columns in the ring of each team."""
    blocks_per_sm: int = 1
    parts: int = 1
    """The maximum split-K of the work tiles in the last, incomplete wave; 1 for no split-K."""

    def __str__(self) -> str:
        return f"{NAME}({', '.join(f'{field.name}={getattr(self, field.name)}' for field in fields(self))})"

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.teams

    @property
    def rows(self) -> int:
        """The rows of W in a work tile."""
        return 16 * self.row_tiles * self.row_warps

    def stage_bytes(self, call: Call) -> int:
        """The bytes of one stage of a ring."""
        weight = call.weight
        scales = 0 if weight.format.is_dense else 4 * self.rows
        return round_up(_COLUMNS // 8 * self.rows * weight.bits + 2 * _COLUMNS * self.block_tokens + scales, 256)

    def shared_bytes(self, call: Call) -> int:
        """The dynamic shared memory that a block uses, in bytes."""
        rings = self.teams * self.stages * self.stage_bytes(call)
        sums = 4 * self.teams * self.rows if self.block_tokens == 1 else 0
        counts = 0 if self.block_tokens == 1 else 4 * min(self.threads // 32, 4) * call.routed.experts
        order = 8 * self._most_items(call) + 2 * call.tokens  # the items and the sorted rows
        return rings + sums + counts + 4 + order

    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        """The blocks of the grid in x and in y. For several tokens the kernel is persistent: all blocks reside."""
        blocks = ceil_div(call.out_features, self.rows)
        if self.block_tokens > 1:
            blocks = least(blocks * self.parts * self._most_items(call), gpu.multiprocessors * self.blocks_per_sm)
        return blocks, 1

    def pair_bytes(self, call: Call) -> int:
        """The bytes that the kernel writes per pair: float32 sums for each part, and each tile's number of parts."""
        out_features = call.out_features
        return 4 * self.parts * out_features + (ceil_div(out_features, self.rows) if self.parts > 1 else 0)

    def _most_items(self, call: Call) -> int:
        return least(call.tokens, call.tokens // self.block_tokens + call.routed.experts)

    def violation(self, call: Call, gpu: Gpu) -> str | None:
        """The reason why this configuration cannot run a call; None if it can."""
        if self.block_tokens == 1 and call.tokens != call.routed.top_k:
            return f"block_tokens: got 1 for {call.tokens} rows, must be 8 or a multiple for more than one token"
        if self.rows > call.out_features:
            return f"{self.rows} rows a block, more than out_features {call.out_features}"
        need = self.shared_bytes(call) + RESERVED_SHARED_BYTES_PER_BLOCK
        if need > gpu.shared_bytes_per_sm:
            return f"{need} bytes of shared memory a block, more than {gpu.shared_bytes_per_sm}"
        return None

    def macros(self, call: Call) -> dict[str, int]:
        """The macros of the source."""
        return _common_macros(call) | {
            "MGLU_WEIGHT_FORMAT": call.weight.format.code,
            "MGLU_BLOCK_TOKENS": self.block_tokens,
            "MGLU_ROW_TILES": self.row_tiles,
            "MGLU_ROW_WARPS": self.row_warps,
            "MGLU_TEAMS": self.teams,
            "MGLU_STAGES": self.stages,
            "MGLU_BLOCKS_PER_SM": self.blocks_per_sm,
            "MGLU_PARTS": self.parts,
        }


def _common_macros(call: Call) -> dict[str, int]:
    assert call.routed.expert_weights_dtype is not None
    return {
        "MGLU_ELEMENT": ELEMENTS[call.dtype],
        "MGLU_EXPERT_WEIGHTS": ELEMENTS[call.routed.expert_weights_dtype],
    }


def combine_macros(call: Call, config: ExpertsDown | None) -> dict[str, int]:
    """Return the macros of combine_experts.cu for the products of `config`, or of `grouped_mm` if it is None."""
    assert call.routed.top_k is not None
    return _common_macros(call) | {
        "MGLU_PRODUCTS": ELEMENTS[call.dtype if config is None else torch.float32],
        "MGLU_PARTS": 1 if config is None else config.parts,
        "MGLU_PART_ROWS": 1 if config is None or config.parts == 1 else config.rows,
        "MGLU_TOP_K": call.routed.top_k,
        "MGLU_VECTOR": _vector(call),
    }


def _vector(call: Call) -> int:
    return 4 if call.out_features % 4 == 0 else 1


def unsupported_reason(call: Call, gpu: Gpu) -> str | None:
    """The reason why neither these kernels nor `grouped_mm` take a call; None if one of them does."""
    layer = call.one
    if layer.dtype not in (torch.float16, torch.bfloat16):
        return f"no kernel for y {layer.dtype}"
    if call.routed.expert_weights_dtype not in ELEMENTS:
        return f"no kernel for expert_weights {call.routed.expert_weights_dtype}"
    if gpu.arch < (8, 0):
        return f"compute capability {gpu.arch} is below 8.0"
    if layer.in_features == 0 or not weight_is_vectorizable(layer):
        return "the rows of weight are not whole aligned vectors of 16 bytes"
    if layer.out_features < 16:
        return f"out_features {layer.out_features} is below 16"
    if call.tokens == 0 or call.routed.experts == 0:
        return "there are no products"
    if uses_library(call, gpu):
        return None
    if call.tokens > MOST_ROWS or choose(call, gpu) is None:
        return f"the order of {call.tokens} rows of {call.routed.experts} experts does not fit into shared memory"
    return None


def uses_library(call: Call, gpu: Gpu) -> bool:
    """True if `torch.nn.functional.grouped_mm` can multiply for a call, and is faster than this kernel."""
    layer = call.one
    stored, row_stride = layer.weight.format, layer.weight.layout.strides[0]
    # `decode_weight` takes the weights of all experts as one matrix. Rows of two experts must not share a scale.
    is_decodable = (
        call.routed.weight_stride == layer.out_features * row_stride and layer.out_features % stored.rows == 0
    )
    return (
        (call.tokens > MOST_ROWS or call.tokens > _MOST_ROWS_OF_EXPERT[stored.name] * call.routed.experts)
        and (stored.is_dense or is_decodable)
        and layer.dtype is torch.bfloat16
        and layer.out_features % 8 == 0
        and not layer.batch_invariant
        and gpu.arch in _LIBRARY_ARCHITECTURES
    )


def launch_for(call: Call, gpu: Gpu) -> ExpertsDown | None:
    """Choose the launch of a supported call; None if `grouped_mm` multiplies."""
    return None if uses_library(call, gpu) else choose(call, gpu)


def choose(call: Call, gpu: Gpu) -> ExpertsDown | None:
    """Choose the launch of a call; None if no launch fits into shared memory.

    Batch-invariant calls use neither the launch for a single token nor split-K, because these two sum in other orders
    than all other launches.
    """
    tiles = call.out_features // 16
    most_warps = 1 << tiles.bit_length() - 1
    if call.tokens == call.routed.top_k and not call.batch_invariant:
        row_warps = next(warps for warps in (1, 2, 4) if warps == 4 or tiles <= 2 * warps * gpu.multiprocessors)
        row_warps = min(row_warps, most_warps)
        return _fit(ExpertsDown(1, row_warps=row_warps, teams=16 // row_warps), call, gpu)
    rows = call.tokens / min(call.tokens, call.routed.experts)
    tokens = next(tokens for tokens in (8, 16, 24, 32, 48, 64, 96) if tokens == 96 or 3 * rows <= 2 * tokens)
    row_warps = min(4 if tokens <= 16 else 8, most_warps)
    if tokens <= 16:
        row_tiles, blocks = 1, 2
    elif tokens <= 64:
        row_tiles, blocks = 1, 1 if tokens <= 32 else 2
    else:
        row_tiles, blocks = 2 if tiles >= 16 and call.weight.format.columns is None else 1, 1
    parts = 1 if call.batch_invariant or call.in_features < _LEAST_COLUMNS else 4
    return _fit(ExpertsDown(tokens, row_tiles, row_warps, blocks_per_sm=blocks, parts=parts), call, gpu)


def _fit(config: ExpertsDown, call: Call, gpu: Gpu) -> ExpertsDown | None:
    """Return the nearest configuration that fits into shared memory, with as many stages as fit, or None."""
    while True:
        need = replace(config, stages=0).shared_bytes(call) + RESERVED_SHARED_BYTES_PER_BLOCK
        ring = config.teams * config.stage_bytes(call)
        stages = (gpu.shared_bytes_per_sm // config.blocks_per_sm - need) // ring
        if stages >= 2:
            return replace(config, stages=min(stages, 4 if config.block_tokens == 1 else 12))
        if config.blocks_per_sm > 1:
            config = replace(config, blocks_per_sm=1)
        elif config.teams > 1:
            config = replace(config, teams=config.teams // 2)
        elif config.row_tiles > 1:
            config = replace(config, row_tiles=1)
        elif config.block_tokens > 8:
            config = replace(config, block_tokens=8)
        elif config.row_warps > 1:
            config = replace(config, row_warps=config.row_warps // 2)
        else:
            return None


def plan(config: ExpertsDown, call: Call, gpu: Gpu) -> Plan:
    """Return the launches of a call: one multiplies, and unless there is a single token, one adds the products."""
    products = Step(
        NAME,
        gpu.target,
        config.macros(call),
        config.grid(call, gpu),
        config.threads,
        config.shared_bytes(call),
        gpu.overlaps,
        {
            "weight_stride": call.routed.weight_stride,
            "weight_row_stride": call.weight.layout.strides[0],
            "scale_stride": call.routed.scale_stride,
            "id_bytes": call.routed.index_dtype.itemsize,
            "pairs": call.tokens,
            "experts": call.routed.experts,
            "out_features": call.out_features,
            "in_features": call.in_features,
        },
        struct="DownParams",
    )
    if config.block_tokens == 1:
        return (products,)
    products = replace(products, writes="products", nbytes=config.pair_bytes(call) * call.tokens)
    return products, combine_step(call, config, gpu)


def combine_step(call: Call, config: ExpertsDown | None, gpu: Gpu) -> Step:
    """Return the step that adds the products of `config`, or of `grouped_mm` if it is None."""
    return Step(
        COMBINE,
        gpu.target,
        combine_macros(call, config),
        (call.rows_of_x, ceil_div(call.out_features, _COMBINE_THREADS * _vector(call))),
        _COMBINE_THREADS,
        0,
        gpu.overlaps,
        {
            "id_bytes": call.routed.index_dtype.itemsize,
            "experts": call.routed.experts,
            "out_features": call.out_features,
        },
        struct="CombineParams",
    )


class LibrarySteps(NamedTuple):
    """The steps before and after `grouped_mm`."""

    decode: Step | None
    """Copies a weight in 8 or 4 bits to y's dtype; None for a dense weight."""
    order: Step | None
    """Sorts the rows by expert; None if torch sorts them."""
    combine: Step
    """Adds the products of each token."""


def library_steps(call: Call, gpu: Gpu) -> LibrarySteps:
    """Return the steps of a call for which `uses_library` is true."""
    decode = None
    if not call.weight.format.is_dense:
        stack = replace(call.one, out_features=call.routed.experts * call.out_features)
        decode = decode_weight.step(stack, gpu, gpu.target)
    # `group_tokens` has one block, so torch sorts many rows faster.
    orders = call.tokens <= MOST_ROWS and call.routed.experts <= group_tokens.MOST_EXPERTS
    order = group_tokens.order_step(call, gpu, gpu.target) if orders else None
    return LibrarySteps(decode, order, combine_step(call, None, gpu))


def sources(config: ExpertsDown | None, call: Call, gpu: Gpu) -> list[Source]:
    """Return the kernels that are compiled for a call. `config` is None if `grouped_mm` multiplies."""
    steps = library_steps(call, gpu) if config is None else plan(config, call, gpu)
    return [step.source for step in steps if step is not None]
