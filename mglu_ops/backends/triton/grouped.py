"""Products of rows that are sorted by expert, `x W_e^T`, in float32.

`torch.nn.functional.grouped_mm` rounds its result to 16 bits. Training needs one product wider: the total t, whose
error is in every gate and value (`mglu_ops.backends.cuda.experts_training`).

Importing this module imports Triton.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sizes import ceil_div
from .matmul import dot

BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_K = 128, 256, 64
WARPS, STAGES = 8, 4
GRADIENT_BLOCK = 128, 128, 64
"""Columns of W's rows and of its columns in a tile of gradients, and rows of x in a step."""
GRADIENT_WARPS, GRADIENT_STAGES = 8, 4
TILES_TOGETHER = 8
"""Tiles of rows whose blocks run one after another for the same columns of W, so that these come from L2."""


@triton.jit
def grouped_products_kernel(
    x_ptr,
    w_ptr,
    ends_ptr,
    out_ptr,
    rows,
    columns,
    depth,
    experts,
    row_tiles,
    BLOCK_EXPERTS: tl.constexpr,  # experts, rounded up to a power of two
    WHOLE: tl.constexpr,  # depth is a multiple of BLOCK_K
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
):
    """Compute a tile of out `[rows, columns]` from x `[rows, depth]` and w `[experts, columns, depth]`, contiguous.

    Every expert has its own tiles of rows. The grid holds the most tiles that any loads can need, `row_tiles`, and
    blocks past the last one exit at once.
    """
    column_tiles = tl.cdiv(columns, BLOCK_COLUMNS)
    together = TILES_TOGETHER * column_tiles
    first_tile = tl.program_id(0) // together * TILES_TOGETHER
    tiles = tl.minimum(row_tiles - first_tile, TILES_TOGETHER)
    tile = first_tile + tl.program_id(0) % together % tiles
    column = tl.program_id(0) % together // tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)

    index = tl.arange(0, BLOCK_EXPERTS)
    ends = tl.load(ends_ptr + index, mask=index < experts, other=0)
    starts = tl.load(ends_ptr + index - 1, mask=(index > 0) & (index < experts), other=0)
    starts, ends = tl.minimum(tl.maximum(starts, 0), rows), tl.minimum(tl.maximum(ends, 0), rows)
    count = tl.where(index < experts, tl.cdiv(tl.maximum(ends - starts, 0), BLOCK_ROWS), 0)
    tiles_before = tl.cumsum(count, 0) - count
    if tile >= tl.sum(count, 0):
        return
    is_mine = (tile >= tiles_before) & (tile < tiles_before + count)
    expert = tl.sum(tl.where(is_mine, index, 0), 0)
    first_row = tl.sum(tl.where(is_mine, starts + (tile - tiles_before) * BLOCK_ROWS, 0), 0)
    end = tl.sum(tl.where(is_mine, ends, 0), 0)

    row = first_row + tl.arange(0, BLOCK_ROWS)
    k = tl.arange(0, BLOCK_K)
    # Clamp to the last row and column so that loads need no mask for them; the store masks.
    xs = x_ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * depth + k[None, :]
    of_column = tl.minimum(column, columns - 1) + expert.to(tl.int64) * columns
    ws = w_ptr + of_column[None, :] * depth + k[:, None]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, depth, BLOCK_K):
        if WHOLE:
            x = tl.load(xs)
            w = tl.load(ws)
        else:
            inside = k < depth - start
            x = tl.load(xs, mask=inside[None, :], other=0.0)
            w = tl.load(ws, mask=inside[:, None], other=0.0)
        total = dot(x, w, total)
        xs += BLOCK_K
        ws += BLOCK_K
    out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    tl.store(out, total, mask=(row < end)[:, None] & (column < columns)[None, :])


def grouped_products(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Return `x W_e^T` of each row's expert e in float32, `[rows, out_features]`, on the current device.

    Rows past the last end are not written. Values of `ends` that do not ascend, or lie outside of the rows, give
    unspecified rows and no access outside of the tensors.

    Args:
        x: `[rows, in_features]`, contiguous, in float16 or bfloat16.
        weight: `[experts, out_features, in_features]`, contiguous, in x's dtype.
        ends: int32 `[experts]`, contiguous: the end of each expert's rows, at least one expert.
    """
    (rows, depth), (experts, columns, _) = x.shape, weight.shape
    out = x.new_empty(rows, columns, dtype=torch.float32)
    row_tiles = rows // BLOCK_ROWS + min(experts, rows)
    grid = (row_tiles * ceil_div(columns, BLOCK_COLUMNS),)
    if grid[0]:
        grouped_products_kernel[grid](
            x,
            weight,
            ends,
            out,
            rows,
            columns,
            depth,
            experts,
            row_tiles,
            BLOCK_EXPERTS=1 << (experts - 1).bit_length(),
            WHOLE=depth % BLOCK_K == 0,
            BLOCK_ROWS=BLOCK_ROWS,
            BLOCK_COLUMNS=BLOCK_COLUMNS,
            BLOCK_K=BLOCK_K,
            TILES_TOGETHER=TILES_TOGETHER,
            num_warps=WARPS,
            num_stages=STAGES,
        )
    return out


@triton.jit
def weight_gradients_kernel(
    scaled_ptr,
    x_ptr,
    w_ptr,
    m_ptr,
    ends_ptr,
    grad_weight_ptr,
    grad_logits_ptr,
    rows,
    columns,
    depth,
    NEEDS_WEIGHT: tl.constexpr,
    NEEDS_LOGITS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_DEPTH: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
):
    """Compute a tile of dW and dlogits of one expert with one mask, from both of its products.

    scaled `[rows, 2, columns]` holds dt and b; x is `[rows, depth]`, w `[experts, columns, depth]`, all contiguous.
    """
    expert = tl.program_id(1)
    tiles, depth_tiles = tl.cdiv(columns, BLOCK_COLUMNS), tl.cdiv(depth, BLOCK_DEPTH)
    together = TILES_TOGETHER * depth_tiles
    first_tile = tl.program_id(0) // together * TILES_TOGETHER
    neighbours = tl.minimum(tiles - first_tile, TILES_TOGETHER)
    tile = first_tile + tl.program_id(0) % together % neighbours
    column = tile * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    at = tl.program_id(0) % together // neighbours * BLOCK_DEPTH + tl.arange(0, BLOCK_DEPTH)
    # The left operand has 8 columns of dt, then the same of b, and so on: a thread gets the sums of both products.
    place = tl.arange(0, 2 * BLOCK_COLUMNS)
    of_place = tile * BLOCK_COLUMNS + place // 16 * 8 + place % 8
    left_place = of_place + place // 8 % 2 * columns

    start = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    start, end = tl.maximum(start, 0), tl.minimum(tl.load(ends_ptr + expert), rows)
    k = (start + tl.arange(0, BLOCK_K)).to(tl.int64)[:, None]
    # Masks, since the compiler would lose sight of neighbouring columns that are clamped, and load them one by one.
    left = scaled_ptr + k * 2 * columns + left_place[None, :]
    xs = x_ptr + k * depth + at[None, :]
    sums = tl.zeros([2 * BLOCK_COLUMNS, BLOCK_DEPTH], tl.float32)
    for first in range(start, end, BLOCK_K):
        inside = (first + tl.arange(0, BLOCK_K) < end)[:, None]
        x = tl.load(xs, mask=inside & (at < depth)[None, :], other=0.0)
        both = tl.load(left, mask=inside & (of_place < columns)[None, :], other=0.0)
        sums = dot(tl.trans(both), x, sums)
        xs += BLOCK_K * depth
        left += BLOCK_K * 2 * columns
    sums = tl.permute(tl.reshape(sums, [BLOCK_COLUMNS // 8, 2, 8, BLOCK_DEPTH]), (0, 2, 3, 1))
    by_total, by_mask = tl.split(tl.reshape(sums, [BLOCK_COLUMNS, BLOCK_DEPTH, 2]))

    row = expert.to(tl.int64) * columns + column
    offsets, is_inside = row[:, None] * depth + at[None, :], (column < columns)[:, None] & (at < depth)[None, :]
    if NEEDS_WEIGHT:
        octet = row[:, None] * ((depth + 7) // 8) + (at // 8)[None, :]
        bits = tl.load(m_ptr + octet, mask=is_inside, other=0) >> (at % 8)[None, :].to(tl.uint8)
        grad_weight = by_total + tl.where((bits & 1) != 0, -by_mask, by_mask)
        tl.store(grad_weight_ptr + offsets, grad_weight.to(grad_weight_ptr.dtype.element_ty), mask=is_inside)
    if NEEDS_LOGITS:
        w = tl.load(w_ptr + offsets, mask=is_inside, other=0.0).to(tl.float32)
        grad_logits = -2.0 * w * by_mask
        tl.store(grad_logits_ptr + offsets, grad_logits.to(grad_logits_ptr.dtype.element_ty), mask=is_inside)


def weight_gradients(
    scaled: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    ends: Tensor,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
) -> None:
    """Write dW and dlogits of experts with one mask, or one of them, on the current device.

    The products D_0 and D_1 stay in registers: neither they nor a second pass over them go through memory.

    Args:
        scaled: dt and b `[rows, 2, out_features]`, like all tensors contiguous.
        x: `[rows, in_features]`.
        weight: `[experts, out_features, in_features]`.
        packed_masks: `[experts, out_features, ceil(in_features / 8), 1]`.
        ends: int32 `[experts]`: the end of each expert's rows.
        grad_weight: `[experts, out_features, in_features]`, or None.
        grad_logits: `[experts, 1, out_features, in_features]`, or None.
    """
    (experts, columns, depth), block = weight.shape, GRADIENT_BLOCK
    grid = (ceil_div(columns, block[0]) * ceil_div(depth, block[1]), experts)
    weight_gradients_kernel[grid](
        scaled,
        x,
        weight,
        packed_masks,
        ends,
        grad_weight,
        grad_logits,
        x.shape[0],
        columns,
        depth,
        NEEDS_WEIGHT=grad_weight is not None,
        NEEDS_LOGITS=grad_logits is not None,
        BLOCK_COLUMNS=block[0],
        BLOCK_DEPTH=block[1],
        BLOCK_K=block[2],
        TILES_TOGETHER=TILES_TOGETHER,
        num_warps=GRADIENT_WARPS,
        num_stages=GRADIENT_STAGES,
    )
