"""The activation functions in Triton, in float32."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _tanh(z):
    """Return tanh(z) from `e = exp(-2 |z|)`, but near 0, where `1 - e` loses digits, from a series (error 1e-8)."""
    square = z * z
    near = z * (1.0 + square * (-1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))))
    e = tl.exp(-2.0 * tl.abs(z))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, near, tl.where(z < 0, -far, far))


@triton.jit
def activate(z, ACTIVATION: tl.constexpr):
    """`mglu_ops.activations.ACTIVATIONS[ACTIVATION].forward` of a float32 tensor."""
    if ACTIVATION == "silu":
        z = z * tl.sigmoid(z)
    elif ACTIVATION == "gelu":
        z = 0.5 * z * (1.0 + tl.erf(z * 0.7071067811865476))
    elif ACTIVATION == "gelu_tanh":  # 0.5 (1 + tanh(u)) = sigmoid(2 u)
        z = z * tl.sigmoid(1.5957691216057308 * z * (1.0 + 0.044715 * z * z))
    elif ACTIVATION == "relu":
        z = tl.where(z < 0, 0.0, z)  # `tl.maximum` would drop a NaN
    elif ACTIVATION == "sigmoid":
        z = tl.sigmoid(z)
    elif ACTIVATION == "tanh":
        z = _tanh(z)
    elif ACTIVATION == "relu_squared":
        z = tl.where(z < 0, 0.0, z)
        z = z * z
    else:
        tl.static_assert(ACTIVATION == "identity")
    return z
