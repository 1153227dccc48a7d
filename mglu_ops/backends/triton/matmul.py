"""The kernel for several tokens: a program multiplies BLOCK_ROWS rows of W by BLOCK_TOKENS tokens on tensor cores.

Let t = W x and f_i = (F_i * W) x, where F_i is -1 if M_i = 1 and +1 otherwise. Then gate_i = (t - f_i) / 2 and
value_i = (t + f_i) / 2. The matrices F_i * W of all masks are stacked to one operand `[MASKS * BLOCK_ROWS, BLOCK_K]` of
one product. The compiler therefore reads W and the mask bytes from shared memory in the layout of this operand, and
flips the signs in registers. W is read once, and no flipped weight goes through shared memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activate

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def dot(a, b, total, PRECISION: tl.constexpr):
    """`total + a b`. PRECISION is Triton's `input_precision`, which matters for float32 only."""
    if INTERPRETED:  # Triton's interpreter stores bfloat16 as integers, so its products of bfloat16 are wrong
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total)
    return tl.dot(a, b, total, input_precision=PRECISION)


@triton.jit
def _flip(w, mask_bytes, ROWS: tl.constexpr, K: tl.constexpr, MASKS: tl.constexpr):
    """Return `[MASKS * ROWS, K]`: one copy of w `[ROWS, K]` per mask, with flipped signs where the mask's bits are set.

    mask_bytes are `[ROWS, K / 8, MASKS]`. Two weights at a time are the halves of an int32, and are flipped together,
    since the compiler keeps them in one register. `byte * 0x8001` copies bit k to the positions k and k + 15. A shift
    left by 15 - 2 j then moves bit 2 j to position 15 and bit 2 j + 1 to position 31, the signs of the two halves.
    """
    low, high = tl.split(tl.reshape(w.to(tl.int16, bitcast=True), [ROWS, K // 8, 4, 2]))
    pairs = (low.to(tl.int32) & 0xFFFF) | (high.to(tl.int32) << 16)
    spread = tl.permute(mask_bytes, (2, 0, 1)).to(tl.int32) * 0x8001
    shift = 15 - 2 * tl.arange(0, 4)
    signs = (spread[:, :, :, None] << shift[None, None, None, :]) & -0x7FFF8000
    flipped = pairs[None, :, :, :] ^ signs
    halves = tl.join(flipped.to(tl.int16), (flipped >> 16).to(tl.int16))
    return tl.reshape(halves, [MASKS * ROWS, K]).to(w.dtype, bitcast=True)


@triton.jit
def matmul_kernel(
    x_ptr,
    w_ptr,
    m_ptr,
    mask_weight_ptr,
    scale_ptr,
    y_ptr,
    tokens,
    out_features,
    in_features,
    x_token,  # x_token, w_row and m_row are strides divided by X_UNIT, W_UNIT and M_UNIT. The kernel multiplies by the
    # units, so the compiler knows that they divide the strides.
    x_k,
    w_row,
    w_k,
    m_row,
    m_group,
    m_mask,
    mask_weight_token,
    mask_weight_mask,
    N_MASKS: tl.constexpr,
    MASKS: tl.constexpr,  # N_MASKS, rounded up to a power of two
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    X_UNIT: tl.constexpr,
    W_UNIT: tl.constexpr,
    M_UNIT: tl.constexpr,
    DENSE: tl.constexpr,  # the mask bytes of a row are contiguous, and MASKS == N_MASKS
    TAIL: tl.constexpr,  # 0 if BLOCK_K divides in_features, 1 if 8 does, else 2
    BLOCK_ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    """Compute a tile of y."""
    # The programs for the same rows of W run one after another, so all but the first find W in the cache.
    token_blocks = tl.cdiv(tokens, BLOCK_TOKENS)
    token = (tl.program_id(0) % token_blocks) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    row = (tl.program_id(0) // token_blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    # Tokens and rows past the end are clamped to the last ones, so loads need no mask for them. The store has a mask.
    x_ptr += (tl.minimum(token, tokens - 1).to(tl.int64) * x_token * X_UNIT)[None, :]
    last_row = tl.minimum(row, out_features - 1).to(tl.int64)
    w_ptr += (last_row * w_row * W_UNIT)[:, None]
    m_ptr += (last_row * m_row * M_UNIT)[:, None]
    k = tl.arange(0, BLOCK_K)
    mask = tl.arange(0, MASKS)
    # The mask bytes of a row are one dimension of the tile, so that contiguous mask bytes are loaded 16 at a time.
    byte = tl.arange(0, BLOCK_K // 8 * MASKS)

    total = tl.zeros([BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    flipped = tl.zeros([MASKS * BLOCK_ROWS, BLOCK_TOKENS], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        at = start + k
        xs = x_ptr + (at * x_k)[:, None]
        ws = w_ptr + (at * w_k)[None, :]
        # x is loaded twice, because the two products need different layouts, and the compiler pipelines only loads with
        # a single use. Different cache hints keep it from merging the loads.
        if TAIL == 0:
            x = tl.load(xs)
            x_again = tl.load(xs, eviction_policy="evict_last")
            w = tl.load(ws, eviction_policy="evict_first")
        else:
            # If TAIL is 1, a group of 8 columns is wholly inside or outside. `// 8 * 8` shows this to the compiler, so
            # it uses wide loads.
            inside = at < (in_features // 8 * 8 if TAIL == 1 else in_features)
            x = tl.load(xs, mask=inside[:, None], other=0.0)
            x_again = tl.load(xs, mask=inside[:, None], other=0.0, eviction_policy="evict_last")
            w = tl.load(ws, mask=inside[None, :], other=0.0, eviction_policy="evict_first")
        at_byte = start // 8 * MASKS + byte
        if DENSE and TAIL == 0:
            packed = tl.load(m_ptr + at_byte[None, :], eviction_policy="evict_first")
        else:
            group, i = at_byte // MASKS, at_byte % MASKS
            offset = at_byte if DENSE else group * m_group + i * m_mask
            inside = (group * 8 < in_features) & (i < N_MASKS)
            packed = tl.load(m_ptr + offset[None, :], mask=inside[None, :], other=0, eviction_policy="evict_first")
        packed = tl.reshape(packed, [BLOCK_ROWS, BLOCK_K // 8, MASKS])
        w = w.to(tl.float32).to(x.dtype)  # exact for fp8 and int8 in both 16-bit types
        total = dot(w, x_again, total, "ieee")
        flipped = dot(_flip(w, packed, BLOCK_ROWS, BLOCK_K, MASKS), x, flipped, "ieee")

    t = total[None, :, :]
    f = tl.reshape(flipped, [MASKS, BLOCK_ROWS, BLOCK_TOKENS])
    half = tl.load(scale_ptr + last_row)[None, :, None] * 0.5 if SCALED else 0.5
    term = activate((t - f) * half, ACTIVATION) * ((t + f) * half)
    if WEIGHTED:
        term_weights = (
            mask_weight_ptr + token.to(tl.int64)[None, :] * mask_weight_token + (mask * mask_weight_mask)[:, None]
        )
        mask_weight = tl.load(term_weights, mask=(token < tokens)[None, :] & (mask < N_MASKS)[:, None], other=0.0)
        term *= mask_weight.to(tl.float32)[:, None, :]
    if MASKS != N_MASKS:
        term = tl.where((mask < N_MASKS)[:, None, None], term, 0.0)
    y = tl.sum(term, 0)
    ys = y_ptr + token.to(tl.int64)[None, :] * out_features + row[:, None]
    tl.store(ys, y.to(y_ptr.dtype.element_ty), mask=(token < tokens)[None, :] & (row < out_features)[:, None])
