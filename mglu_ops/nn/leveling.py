"""Factors for initial weights that make an untrained layer's results as large as an MGLU's with four masks.

The size of a result is its second moment. Let `t = x W^T` have the variance s, and let the activation be proportional
to the power p of its argument, on one side of 0 or on both. The second moment of `act(t)` is then `k s^p`, where k is a
constant of the activation.

| layer | result | second moment |
| --- | --- | --- |
| LU | `act(t)` | `k s^p` |
| GLU | `act(t) * u`, where u is another product like t | `k s^(p + 1)` |
| MGLU | the sum over n masks of `act(gate_i) * value_i` | `k (s / 2)^(p + 1) (n^2 + n) / 2` |

A random mask gives each weight to the gate or to the value. Gate and value are therefore independent, each with the
variance s / 2. The terms of two masks are correlated, since all masks share W. For a linear activation the correlation
is 1/2: a term is `(t^2 - f_i^2) / 4`, where f_i is the t that results if the signs of W are flipped where mask i is 1.
The correlation is 0.47 for relu and 0.44 for relu_squared. The factors assume 1/2 for these two activations as well,
which changes a factor by less than 2%.
"""

from __future__ import annotations

LINEAR_VARIANCE = 1 / 3
"""The initial variance s of `x W^T`, for x with a mean square of 1 (RMSNorm) and a weight as in `nn.Linear`."""


def level_gain(n_masks: int, activation: str = "silu", top_k: int | None = None) -> float:
    """The factor for the initial weight of an MGLU that makes its first results as large as with four masks.

    For n masks and an activation of degree p, the factor is `(20 / (n^2 + n))^(1 / (2 p + 2))`, since the result grows
    with the power p + 1 of W. With a router, each term is multiplied by its mask weight r_i, so
    `(sum_i r_i)^2 + sum_i r_i^2` takes the place of `n^2 + n`. For `top_k` equal mask weights, this is `1 + 1 / top_k`.

    Args:
        n_masks: number of masks.
        activation: as in `MGLU`.
        top_k: as in `MGLU`; the mask weights are assumed to be equal.
    """
    shared, own = (n_masks**2, n_masks) if top_k is None else (1, 1 / top_k)
    return ((4**2 + 4) / (shared + own)) ** (1 / (2 * degree(activation) + 2))


def glu_level_gain(activation: str = "silu") -> float:
    """The factor for both initial weights of a `GLU` that makes its first results as large as an MGLU's.

    The second moments are `10 k (s / 2)^(p + 1)` for an MGLU with four masks and `k s^(p + 1)` for a GLU, in the
    symbols of this file's docstring.
    """
    powers = degree(activation) + 1
    return (10 / 2**powers) ** (1 / (2 * powers))


def lu_level_gain(activation: str = "gelu") -> float:
    """The factor for the initial weight of an `LU` that makes its first results as large as an MGLU's.

    The second moments are `10 k (s / 2)^(p + 1)` for an MGLU with four masks and `k s^p` for an LU, in the symbols of
    this file's docstring. The factor therefore depends on s, which is assumed to be LINEAR_VARIANCE.

    Raises:
        ValueError: the activation is a sigmoid, whose size does not depend on the weights.
    """
    p = degree(activation)
    if p == 0:
        raise ValueError(f"activation: got {activation!r}, must be one that grows with the weights")
    return (10 / 2 ** (p + 1) * LINEAR_VARIANCE) ** (1 / (2 * p))


def degree(activation: str) -> int:
    """The power p with which an activation grows near 0: it is about `c x^p`, and c may differ for negative x."""
    return {"sigmoid": 0, "relu_squared": 2}.get(activation, 1)
