"""Factors for initial weights, so that the first results of every layer are as large as an MGLU's with four masks.

The size of a result is its second moment. Let `t = x W^T` have the variance s, and let the activation be proportional
to the power p of its argument, on one side of 0 or on both. The second moment of `act(t)` is then `k s^p` with some k.

| layer | result | second moment |
| --- | --- | --- |
| LU | `act(t)` | `k s^p` |
| GLU | `act(t) * u`, where u is another product like t | `k s^(p + 1)` |
| MGLU | the sum over n masks of `act(gate_i) * value_i` | `k (s / 2)^(p + 1) (n^2 + n) / 2` |

A random mask gives each weight to the gate or to the value. Gate and value are therefore independent, each with the
variance s / 2. The terms of two masks are correlated, since all masks share W. For a linear activation the correlation
is 1/2: a term is `(t^2 - f_i^2) / 4`, where f_i is t with the signs of W flipped where mask i is 1. The correlation is
0.47 for relu and 0.44 for relu_squared. The factors assume 1/2 for them too, which changes a factor by less than 2%.
"""

from __future__ import annotations

LINEAR_VARIANCE = 1 / 3
"""The initial variance s of `x W^T`, for x with a mean square of 1 (RMSNorm) and a weight as in `nn.Linear`."""


def level_gain(n_masks: int, activation: str = "silu", top_k: int | None = None) -> float:
    """The factor for the initial weight of an MGLU, so that its first results are as large as with four masks.

    It is `(20 / (n^2 + n))^(1 / (2 p + 2))`, since the result grows with the power p + 1 of W. With a router, each term
    is multiplied by its mask weight r_i, so `(sum_i r_i)^2 + sum_i r_i^2` takes the place of `n^2 + n`. For k equal
    mask weights that is `1 + 1 / k`.

    Args:
        n_masks: number of masks.
        activation: as in `MGLU`.
        top_k: as in `MGLU`; the mask weights are assumed to be equal.
    """
    shared, own = (n_masks**2, n_masks) if top_k is None else (1, 1 / top_k)
    return ((4**2 + 4) / (shared + own)) ** (1 / (2 * degree(activation) + 2))


def glu_level_gain(activation: str = "silu") -> float:
    """The factor for both initial weights of a `GLU`, so that its first results are as large as with four masks.

    The second moments are `10 k (s / 2)^(p + 1)` for an MGLU with four masks and `k s^(p + 1)` for a GLU.
    """
    powers = degree(activation) + 1
    return (10 / 2**powers) ** (1 / (2 * powers))


def lu_level_gain(activation: str = "gelu") -> float:
    """The factor for the initial weight of an `LU`, so that its first results are as large as with four masks.

    The second moments are `10 k (s / 2)^(p + 1)` for an MGLU with four masks and `k s^p` for an LU. The factor
    therefore depends on s, which is assumed to be LINEAR_VARIANCE.

    Raises:
        ValueError: the activation is a sigmoid, whose size does not depend on the weights.
    """
    p = degree(activation)
    if p == 0:
        raise ValueError(f"activation: got {activation!r}, must be one that grows with the weights")
    return (10 / 2 ** (p + 1) * LINEAR_VARIANCE) ** (1 / (2 * p))


def degree(activation: str) -> int:
    """The power p such that an activation is proportional to x^p near 0, with a factor for each side of 0."""
    return {"sigmoid": 0, "relu_squared": 2}.get(activation, 1)
