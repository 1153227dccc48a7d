"""Grouped GEMMs of rows sorted by expert, where `torch.nn.functional.grouped_mm` does not suffice.

On compute capabilities 9.x and 10.x, `grouped_mm` multiplies bfloat16 and rounds its results to bfloat16. For other
dtypes and GPUs it reads the offsets on the host. The kernels of this module read the offsets on the device, and can
return float32. Each element is one sum in float32, in an order that depends only on the sizes.

A float32 product is computed as six products of bfloat16 parts on tensor cores. This is faster than FMAs, and has
smaller errors, since fewer sums are rounded. If torch may use TF32, three products are enough to have smaller errors
than TF32. Triton's own TF32 is not used: it truncates the operands, and is less accurate than torch's, which rounds
them.

Importing this module imports Triton.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...sizes import ceil_div
from ..formula import rounds_to_tf32
from .matmul import dot

TILES_TOGETHER = 8
"""Tiles of rows that run one after another for the same columns of b, so that these columns come from L2."""

_OCTET = 8


class Tile(NamedTuple):
    """The tile of a result that a program computes, and its launch options."""

    rows: int
    columns: int
    k: int
    warps: int
    stages: int


@triton.jit
def grouped_products_kernel(
    a_ptr,
    b_ptr,
    ends_ptr,
    out_ptr,
    rows,
    column_units,  # columns / UNIT; if UNIT is 8, this tells the compiler that 16-byte loads are aligned
    depth_units,
    experts,
    row_tiles,
    BLOCK_EXPERTS: tl.constexpr,  # experts, rounded up to a power of two
    UNIT: tl.constexpr,
    WHOLE: tl.constexpr,  # depth is a multiple of BLOCK_K
    B_TRANSPOSED: tl.constexpr,  # b is `[experts, columns, depth]` in memory
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    TILES_TOGETHER: tl.constexpr,
):
    """Compute a tile of out `[rows, columns]` from a `[rows, depth]` and b `[experts, depth, columns]`.

    Every expert has its own tiles of rows. The grid holds `row_tiles` of them, the most that any routing can need, and
    programs without a tile exit at once.
    """
    columns, depth = column_units * UNIT, depth_units * UNIT
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
    # Rows past the end are clamped to the last row, so loads need no mask for rows. The store has a mask.
    a_at = a_ptr + tl.minimum(row, end - 1).to(tl.int64)[:, None] * depth + k[None, :]
    if B_TRANSPOSED:
        # Columns past the end are clamped to the last column too.
        b_row = tl.minimum(column, columns - 1) + expert.to(tl.int64) * columns
        b_at = b_ptr + b_row[None, :] * depth + k[:, None]
        b_step = BLOCK_K
    else:
        # Columns are neighbours in memory. Clamping them would prevent wide loads.
        b_at = b_ptr + (expert.to(tl.int64) * depth + k)[:, None] * columns + column[None, :]
        b_step = BLOCK_K * columns
    is_column = (column < columns)[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, depth, BLOCK_K):
        inside = k < depth - start
        if WHOLE:
            a = tl.load(a_at)
            b = tl.load(b_at) if B_TRANSPOSED else tl.load(b_at, mask=is_column, other=0.0)
        else:
            a = tl.load(a_at, mask=inside[None, :], other=0.0)
            b = tl.load(b_at, mask=inside[:, None] if B_TRANSPOSED else inside[:, None] & is_column, other=0.0)
        total = dot(a, b, total, PRECISION)
        a_at += BLOCK_K
        b_at += b_step
    out = out_ptr + row.to(tl.int64)[:, None] * columns + column[None, :]
    is_out = (row < end)[:, None] & is_column
    if ADD:
        total += tl.load(out, mask=is_out, other=0.0)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_out)


@triton.jit
def products_over_rows_kernel(
    a_ptr,
    b_ptr,
    ends_ptr,
    out_ptr,
    rows,
    a_column_units,  # a_columns / UNIT, as `column_units` in `grouped_products_kernel`
    b_column_units,
    a_row_units,
    b_row_units,
    UNIT: tl.constexpr,
    ADD: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of out `[experts, a_columns, b_columns]` from a `[rows, a_columns]` and b `[rows, b_columns]`."""
    a_columns, b_columns = a_column_units * UNIT, b_column_units * UNIT
    column_tiles = tl.cdiv(b_columns, BLOCK_COLUMNS)
    tiles = tl.cdiv(a_columns, BLOCK_ROWS) * column_tiles
    expert, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    a_column = tile // column_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    b_column = tile % column_tiles * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    is_a, is_b = (a_column < a_columns)[:, None], (b_column < b_columns)[None, :]

    first = tl.load(ends_ptr + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends_ptr + expert)
    first, end = tl.minimum(tl.maximum(first, 0), rows), tl.minimum(tl.maximum(end, 0), rows)
    k = tl.arange(0, BLOCK_K)
    a_row, b_row = a_row_units * UNIT, b_row_units * UNIT
    row = (first + k).to(tl.int64)
    a_at = a_ptr + row[None, :] * a_row + a_column[:, None]
    b_at = b_ptr + row[:, None] * b_row + b_column[None, :]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(first, end, BLOCK_K):
        inside = k < end - start  # later rows belong to another expert
        a = tl.load(a_at, mask=is_a & inside[None, :], other=0.0)
        b = tl.load(b_at, mask=inside[:, None] & is_b, other=0.0)
        total = dot(a, b, total, PRECISION)
        a_at += BLOCK_K * a_row
        b_at += BLOCK_K * b_row
    out = out_ptr + (expert.to(tl.int64) * a_columns + a_column)[:, None] * b_columns + b_column[None, :]
    if ADD:
        total += tl.load(out, mask=is_a & is_b, other=0.0)
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=is_a & is_b)


def grouped_products(a: Tensor, b: Tensor, ends: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return `a[rows of e] @ b[e]` for each expert e: `[rows, columns]`. Sums are in float32.

    Rows past the last end are not written. If `ends` do not ascend or exceed the number of rows, the results are
    unspecified, but no access is out of bounds.

    Args:
        a: `[rows, depth]` in float16, bfloat16 or float32.
        b: `[experts, depth, columns]` in a's dtype, on a's device. It is copied unless it or `b.mT` is contiguous.
        ends: int32 `[experts]`, contiguous: the end of each expert's rows. There is at least one expert.
        out: receives the result, contiguous, in any floating dtype. The default is a new tensor in a's dtype.
        add: True to add to `out`.
    """
    a = a.contiguous()
    is_transposed = b.mT.is_contiguous()
    b = b if is_transposed else b.contiguous()
    (rows, depth), (experts, _, columns) = a.shape, b.shape
    out = a.new_empty(rows, columns) if out is None else out
    tile = _tile(a)
    row_tiles = rows // tile.rows + min(experts, rows)
    grid = (row_tiles * ceil_div(columns, tile.columns),)
    unit = _unit(columns, depth)
    if grid[0]:
        with torch.cuda.device_of(a):
            grouped_products_kernel[grid](
                a,
                b,
                ends,
                out,
                rows,
                columns // unit,
                depth // unit,
                experts,
                row_tiles,
                BLOCK_EXPERTS=1 << (experts - 1).bit_length(),
                UNIT=unit,
                WHOLE=depth % tile.k == 0,
                B_TRANSPOSED=is_transposed,
                ADD=add,
                TILES_TOGETHER=TILES_TOGETHER,
                **_options(a, tile),
            )
    return out


def products_over_rows(a: Tensor, b: Tensor, ends: Tensor, out: Tensor | None = None, add: bool = False) -> Tensor:
    """Return `a[rows of e]^T @ b[rows of e]` for each expert e: `[experts, a_columns, b_columns]`.

    Sums are in float32. Experts without rows get zeros. Invalid `ends` are treated as in `grouped_products`.

    Args:
        a: `[rows, a_columns]` in float16, bfloat16 or float32. It is copied unless its rows are contiguous.
        b: `[rows, b_columns]` in a's dtype. It is also copied unless its rows are contiguous.
        ends: int32 `[experts]`, contiguous: the end of each expert's rows. There is at least one expert.
        out: receives the result, contiguous, in any floating dtype. The default is a new tensor in a's dtype.
        add: True to add to `out`.
    """
    a, b = (tensor if tensor.stride(1) == 1 else tensor.contiguous() for tensor in (a, b))
    (rows, a_columns), b_columns, experts = a.shape, b.shape[1], ends.shape[0]
    out = a.new_empty(experts, a_columns, b_columns) if out is None else out
    tile = _tile(a)
    grid = (experts * ceil_div(a_columns, tile.rows) * ceil_div(b_columns, tile.columns),)
    unit = _unit(a_columns, b_columns, a.stride(0), b.stride(0))
    if grid[0]:
        with torch.cuda.device_of(a):
            products_over_rows_kernel[grid](
                a,
                b,
                ends,
                out,
                rows,
                a_columns // unit,
                b_columns // unit,
                a.stride(0) // unit,
                b.stride(0) // unit,
                UNIT=unit,
                ADD=add,
                **_options(a, tile),
            )
    return out


def tile_of(dtype: torch.dtype, major: int) -> Tile:
    """The tile for a dtype and a major compute capability. It fits into the shared memory of all such GPUs."""
    has_large_tiles = major in (9, 10)
    if dtype is torch.float32:
        return Tile(128, 128, 32, 8, 3) if has_large_tiles else Tile(128, 64, 32, 8, 3)
    return Tile(128, 256, 64, 8, 4) if has_large_tiles else Tile(128, 128, 64, 8, 3)


def _tile(a: Tensor) -> Tile:
    return tile_of(a.dtype, torch.cuda.get_device_capability(a.device)[0] if a.is_cuda else 0)


def _unit(*sizes: int) -> int:
    return 1 if any(size % _OCTET for size in sizes) else _OCTET


def _options(a: Tensor, tile: Tile) -> dict[str, int | str]:
    return {
        "PRECISION": "bf16x3" if rounds_to_tf32(a) else "bf16x6",
        "BLOCK_ROWS": tile.rows,
        "BLOCK_COLUMNS": tile.columns,
        "BLOCK_K": tile.k,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
    }
