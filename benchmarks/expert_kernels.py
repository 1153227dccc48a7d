"""SwiGLU's experts in Triton, as in vLLM's fused_moe: one kernel sorts tokens by expert, and another multiplies.

A pair is a token and one of its experts. With K experts per token, pair t K + k is token t with its k-th expert. The
first kernel sorts the pairs by expert into blocks of BLOCK_M, and pads the last block of each expert. Each program of
the second kernel computes a tile of a block. In contrast to vLLM's kernel, the programs of the gated projection compute
gate and value together, and apply the activation.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def align_kernel(ids, pairs, experts, used, n_pairs, BINS: tl.constexpr, BLOCK_M: tl.constexpr, CHUNK: tl.constexpr):
    """Sort pairs by expert into blocks, padded with `n_pairs`. Program e writes the blocks of expert e.

    Every program counts the pairs of all experts, to know where its own blocks begin.

    Args:
        ids: `[n_pairs]`, the expert of each pair.
        pairs: output `[blocks, BLOCK_M]`, the pairs in sorted order.
        experts: output `[blocks]`, the expert of each block.
        used: output, the number of blocks.
        n_pairs: number of pairs.
        BINS: a power of two, at least the number of experts.
        BLOCK_M: number of pairs in a block, a power of two.
        CHUNK: number of pairs that a program reads at once.
    """
    expert = tl.program_id(0)
    lanes, bins = tl.arange(0, CHUNK), tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, n_pairs, CHUNK):
        exists = first + lanes < n_pairs
        counts += tl.histogram(tl.load(ids + first + lanes, mask=exists, other=0).to(tl.int32), BINS, mask=exists)
    blocks = (counts + BLOCK_M - 1) // BLOCK_M
    block = tl.sum(tl.where(bins < expert, blocks, 0))
    own_blocks = tl.sum(tl.where(bins == expert, blocks, 0))
    if expert == 0:
        tl.store(used, tl.sum(blocks))
    for i in range(0, own_blocks):
        tl.store(experts + block + i, expert)
    pairs += block * BLOCK_M
    filled = 0
    for first in range(0, n_pairs, CHUNK):
        exists = first + lanes < n_pairs
        mine = (tl.load(ids + first + lanes, mask=exists, other=-1) == expert).to(tl.int32)
        tl.store(pairs + filled + tl.cumsum(mine, 0) - 1, first + lanes, mask=mine != 0)
        filled += tl.sum(mine)
    empty = filled + tl.arange(0, BLOCK_M)
    tl.store(pairs + empty, n_pairs, mask=empty < own_blocks * BLOCK_M)


@triton.jit
def _load(at, inside, WHOLE_STEPS: tl.constexpr):
    """Load `BLOCK_K` columns of a tile of weights. Columns outside the weight, where `inside` is false, are 0."""
    if WHOLE_STEPS:
        return tl.load(at)
    return tl.load(at, mask=inside[:, None], other=0.0)


@triton.jit
def experts_kernel(
    x,
    weight,
    scale,
    expert_weights,
    out,
    pairs,
    experts,
    used,
    n_pairs,
    D,
    H,
    TOP_K: tl.constexpr,
    GATED: tl.constexpr,
    SCALED: tl.constexpr,
    ALIGNED: tl.constexpr,
    WHOLE_STEPS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Compute a tile of the result: a block of pairs, and `BLOCK_N` of the D columns.

    Args:
        x: rows of H columns. Pair p multiplies row p // TOP_K.
        weight: `[experts, D, H]`, or `[experts, 2 D, H]` with gates above values if GATED.
        scale: a scale for each row of the weights, read if SCALED.
        expert_weights: a factor for each pair, read unless GATED.
        out: `[n_pairs, D]`.
        pairs: output of `align_kernel`, read if ALIGNED.
        experts: expert of each block, output of `align_kernel` if ALIGNED. Otherwise each pair is a block.
        used: output of `align_kernel`, read if ALIGNED.
        n_pairs: number of pairs.
        D: number of columns of the result.
        H: number of columns of x.
        TOP_K: number of pairs that share a row of x.
        GATED: compute silu(gate) * value instead of one product.
        SCALED: weights have scales.
        ALIGNED: pairs are sorted into blocks.
        WHOLE_STEPS: BLOCK_K divides H.
        BLOCK_M: number of pairs in a block.
        BLOCK_N: number of columns of the result in a tile.
        BLOCK_K: number of columns of x in a step.
    """
    block = tl.program_id(0)
    places = tl.arange(0, BLOCK_M)
    if ALIGNED:
        if block >= tl.load(used):
            return
        pair = tl.load(pairs + block * BLOCK_M + places)
    else:
        pair = tl.where(places == 0, block, n_pairs)
    expert = tl.load(experts + block).to(tl.int64)
    exists = pair < n_pairs
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = expert * (2 * D if GATED else D) + columns % D  # columns past D wrap around, so loads need no mask
    steps = tl.arange(0, BLOCK_K)
    x_tile = x + (pair // TOP_K).to(tl.int64)[:, None] * H + steps[None, :]
    weight_tile = weight + rows[None, :] * H + steps[:, None]
    gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first in range(0, H, BLOCK_K):
        inside = steps < H - first
        x_part = tl.load(x_tile + first, mask=exists[:, None] & inside[None, :], other=0.0)
        gate = tl.dot(x_part, _load(weight_tile + first, inside, WHOLE_STEPS).to(x_part.dtype), gate)
        if GATED:
            part = _load(weight_tile + D * H + first, inside, WHOLE_STEPS)
            value = tl.dot(x_part, part.to(x_part.dtype), value)
    if SCALED:
        gate *= tl.load(scale + rows)[None, :]
        if GATED:
            value *= tl.load(scale + rows + D)[None, :]
    if GATED:
        result = gate * tl.sigmoid(gate) * value
    else:
        result = gate * tl.load(expert_weights + pair, mask=exists, other=0.0).to(tl.float32)[:, None]
    to = out + pair.to(tl.int64)[:, None] * D + columns[None, :]
    tl.store(to, result.to(out.dtype.element_ty), mask=exists[:, None] & (columns < D)[None, :])
