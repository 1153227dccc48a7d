"""The kernel for one token, and for float32: a program multiplies one row of W by one token with FMAs.

A row is read as `[groups, 8]`. A thread loads 8 neighbouring weights in one 16-byte load, or two in float32. It loads
the `n_masks` bytes with the mask bits of these weights in as few loads as possible. A program has one row and not a
tile of rows, so that the loads that a warp has in flight are adjacent (README.md has the times).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .activations import activate

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def _eight(v, GROUPS: tl.constexpr):
    """Split `[GROUPS, 8]` into its eight columns. Each thread has whole rows in its registers, so no data moves."""
    even, odd = tl.split(tl.reshape(v, [GROUPS, 2, 2, 2]))
    v04, v26 = tl.split(even)
    v15, v37 = tl.split(odd)
    v0, v4 = tl.split(v04)
    v2, v6 = tl.split(v26)
    v1, v5 = tl.split(v15)
    v3, v7 = tl.split(v37)
    return v0, v1, v2, v3, v4, v5, v6, v7


@triton.jit
def _bit(word, BIT: tl.constexpr):
    """True if a bit of a word is set.

    The `and` is inline PTX, because LLVM would gather the bits of all masks in a vector and extract them again with
    shifts. For 4 masks this would take 19 instructions per weight, instead of 12.6.
    """
    if INTERPRETED:
        bits = (word >> BIT) & 1
    else:
        if word.dtype == tl.int64:
            word = (word >> (BIT & 32)).to(tl.int32)
        bits = tl.inline_asm_elementwise(
            f"and.b32 $0, $1, {1 << (BIT % 32)};", "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1
        )
    return bits != 0


@triton.jit
def _load_row(ptr, group, in_features, stride, TAIL: tl.constexpr, EVICTION: tl.constexpr):
    """Load `[GROUPS, 8]` of a row, with zeros past its end.

    TAIL says what may lie past the end: nothing (0), only whole groups of 8 (1), or any number of columns (2).
    """
    k = group[:, None] * 8 + tl.arange(0, 8)[None, :]
    if TAIL == 0:
        row = tl.load(ptr + k * stride, eviction_policy=EVICTION)
    elif TAIL == 1:
        inside = tl.broadcast_to((group * 8 < in_features)[:, None], k.shape)
        row = tl.load(ptr + k * stride, mask=inside, other=0.0, eviction_policy=EVICTION)
    else:
        row = tl.load(ptr + k * stride, mask=k < in_features, other=0.0, eviction_policy=EVICTION)
    return row


@triton.jit
def _load_words(
    m_ptr, start, in_features, m_group, m_mask, WORDS: tl.constexpr, GROUPS: tl.constexpr, TAIL: tl.constexpr
):
    """Load the words with the mask bits of each group of 8 weights. `m_ptr` points to words, and strides count words.

    `max_contiguous` hides from the compiler that groups are neighbours. Otherwise a thread would load the words of
    several groups at once, and send them through shared memory to the threads that have the weights.
    """
    group = tl.max_contiguous(start + tl.arange(0, GROUPS), [1])
    offset = group * m_group
    words = ()
    for i in tl.static_range(WORDS):
        if TAIL == 0:
            word = tl.load(m_ptr + offset + i * m_mask, eviction_policy="evict_first")
        else:
            word = tl.load(
                m_ptr + offset + i * m_mask, mask=group * 8 < in_features, other=0, eviction_policy="evict_first"
            )
        words += (word if word.dtype == tl.int64 else word.to(tl.int32),)
    return words


@triton.jit
def _add(gates, rest, w, x, words, N_MASKS: tl.constexpr, WORD_BYTES: tl.constexpr, GROUPS: tl.constexpr):
    """Add the products of `w` and `x` to the sums `gates` and `rest`.

    If x is float32, `rest` holds the value of each mask; otherwise it holds one sum, of all products.
    `where(on, fma(w, x, sum), sum)` compiles to one predicated FMA.
    """
    ws = _eight(w.to(tl.float32), GROUPS)
    xs = _eight(x.to(tl.float32), GROUPS)
    new_gates = ()
    new_rest = ()
    if x.dtype != tl.float32:
        total = rest[0]
        for k in tl.static_range(8):
            total = tl.fma(ws[k], xs[k], total)
        new_rest += (total,)
    for i in tl.static_range(N_MASKS):
        gate = gates[i]
        value = rest[i % len(rest)]
        for k in tl.static_range(8):
            on = _bit(words[i // WORD_BYTES], 8 * (i % WORD_BYTES) + k)
            gate = tl.where(on, tl.fma(ws[k], xs[k], gate), gate)
            if x.dtype == tl.float32:
                value = tl.where(on, value, tl.fma(ws[k], xs[k], value))
        new_gates += (gate,)
        if x.dtype == tl.float32:
            new_rest += (value,)
    return new_gates, new_rest


@triton.jit
def matvec_kernel(
    x_ptr,
    w_ptr,
    m_ptr,
    mask_weight_ptr,
    scale_ptr,
    y_ptr,
    tokens,
    out_features,
    in_features,
    x_token,
    x_k,
    w_row,  # the stride divided by W_UNIT, which tells the compiler how wide loads may be
    w_k,
    m_row,
    m_group,
    m_mask,
    mask_weight_token,
    mask_weight_mask,
    N_MASKS: tl.constexpr,
    WORD_BYTES: tl.constexpr,
    ACTIVATION: tl.constexpr,
    WEIGHTED: tl.constexpr,
    SCALED: tl.constexpr,
    W_UNIT: tl.constexpr,
    TAIL: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Compute y[token, row]. Mask strides count words of WORD_BYTES bytes. WORD_BYTES divides N_MASKS."""
    # The programs for the same row run one after another, so all but the first find the row in the cache.
    token = (tl.program_id(0) % tokens).to(tl.int64)
    row = (tl.program_id(0) // tokens).to(tl.int64)
    x_ptr += token * x_token
    w_ptr += row * w_row * W_UNIT
    if WORD_BYTES == 2:
        m_ptr = m_ptr.to(tl.pointer_type(tl.int16))
    elif WORD_BYTES == 4:
        m_ptr = m_ptr.to(tl.pointer_type(tl.int32))
    elif WORD_BYTES == 8:
        m_ptr = m_ptr.to(tl.pointer_type(tl.int64))
    m_ptr += row * m_row
    WORDS: tl.constexpr = N_MASKS // WORD_BYTES
    # Products of 16-bit numbers are exact in float32, so a value is the sum of all products minus the gate. Products of
    # float32 numbers are rounded, so a value with few weights would get the rounding error of the whole sum.
    WIDE: tl.constexpr = x_ptr.dtype.element_ty == tl.float32
    gates = (tl.zeros([GROUPS], tl.float32),) * N_MASKS
    rest = (tl.zeros([GROUPS], tl.float32),) * (N_MASKS if WIDE else 1)
    for start in range(0, tl.cdiv(in_features, 8), GROUPS):
        group = start + tl.arange(0, GROUPS)
        w = _load_row(w_ptr, group, in_features, w_k, TAIL, "evict_first")
        words = _load_words(m_ptr, start, in_features, m_group, m_mask, WORDS, GROUPS, TAIL)
        x = _load_row(x_ptr, group, in_features, x_k, TAIL, "")
        gates, rest = _add(gates, rest, w, x, words, N_MASKS, WORD_BYTES, GROUPS)

    y = 0.0
    total = tl.sum(rest[0])
    scale = tl.load(scale_ptr + row) if SCALED else 1.0
    for i in tl.static_range(N_MASKS):
        gate = tl.sum(gates[i])
        value = tl.sum(rest[i]) if WIDE else total - gate
        term = activate(gate * scale, ACTIVATION) * (value * scale)
        if WEIGHTED:
            term *= tl.load(mask_weight_ptr + token * mask_weight_token + i * mask_weight_mask).to(tl.float32)
        y += term
    tl.store(y_ptr + token * out_features + row, y.to(y_ptr.dtype.element_ty))
