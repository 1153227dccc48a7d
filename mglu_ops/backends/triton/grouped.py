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
TILES_TOGETHER = 8
"""Tiles of rows whose blocks run one after another for the same columns of W, so that these come from L2."""


@triton.jit
def grouped_products_kernel(
    x_ptr,
    w_ptr,
    ends_ptr,
    out_ptr,
    rows,
    column_octets,  # in units of 8, so that the compiler knows that 16-byte loads are aligned
    depth_octets,
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
    columns, depth = column_octets * 8, depth_octets * 8
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
        x: `[rows, in_features]`, contiguous, in float16 or bfloat16; in_features are a multiple of 8.
        weight: `[experts, out_features, in_features]`, contiguous, in x's dtype; out_features are a multiple of 8.
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
            columns // 8,
            depth // 8,
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
