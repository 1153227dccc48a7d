"""What the recogniser knows of a node: the abstract values of its interpreter.

Masks are handled as functions of one binary variable. Such a function is known wholly by its values at M = 0 and
M = 1, so `1 - M`, `~M`, `M == 0`, `M < 0.5`, `-(M - 1)` are all proved to be the complement in the same way: by
evaluating them at both points, `at == (1, 0)`. `slope` is the derivative with respect to M at both points, which is
what decides whether a straight-through gradient passes as the operator passes it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace

import torch
from torch.fx import Node

Pair = tuple[float, float]


@dataclass(frozen=True)
class Mask:
    """A binary tensor `[out_features, in_features]`.

    `bits` is a node whose values are the mask's (bool, or a real tensor where it is assumed). `key` is equal for
    masks of equal value. A mask that carries a gradient has `straight_through`, the real node it flows through, and,
    where that is `logits > 0`, `logits`.
    """

    bits: Node
    key: Hashable
    proof: str | None
    straight_through: Node | None = None
    logits: Node | None = None


@dataclass(frozen=True)
class Scalar:
    """A number, or a tensor filled with it."""

    value: float


@dataclass(frozen=True)
class Binary:
    """`f(M)` elementwise, as `at = (f(0), f(1))` and `slope = (f'(0), f'(1))`."""

    mask: Mask
    at: Pair
    slope: Pair

    def map(self, function: Callable[[float], float], derivative: Callable[[float], float]) -> Binary:
        """`function(f(M))`."""
        at = (function(self.at[0]), function(self.at[1]))
        slope = (derivative(self.at[0]) * self.slope[0], derivative(self.at[1]) * self.slope[1])
        return replace(self, at=at, slope=slope)

    def is_gate(self, sign: int) -> bool:
        """M itself (`sign` 1) or its complement (-1)."""
        return self.at == ((0, 1) if sign == 1 else (1, 0))

    def passes_gradient(self, sign: int) -> bool:
        """The slope of M (or of 1 - M) everywhere."""
        return self.slope == (sign, sign)


@dataclass(frozen=True)
class Product:
    """The elementwise product of two tensors neither of which is known to be a mask."""

    a: Node
    b: Node
    transposed: bool = False


@dataclass(frozen=True)
class Weighted:
    """`weight * factor`; factor None is 1. `transposed`: its transpose."""

    weight: Node
    factor: Binary | None
    transposed: bool = False


@dataclass(frozen=True)
class Projection:
    """`x (weight * factor)^T`, or with `transposed` `x (weight * factor)` of a weight `[in_features, out_features]`.

    `problem`: why it may not be fused, although it looks as if it should.
    """

    x: Node
    weight: Node | Product
    factor: Binary | None
    dtype: torch.dtype
    transposed: bool = False
    problem: str | None = None


@dataclass(frozen=True)
class Activated:
    """An activation of a projection, times a weight a token (`route`, `[..., 1]`) if there is one."""

    activation: str
    projection: Projection
    route: Node | None = None


@dataclass(frozen=True)
class Term:
    """`route * act(gate) * value`, one mask's part of the layer; route None is 1, else `[..., 1]`."""

    activation: str
    gate: Projection
    value: Projection
    route: Node | None = None


@dataclass(frozen=True)
class Gated:
    """A sum of terms over one x, weight and activation: a layer, or a part of one."""

    terms: tuple[Term, ...]


@dataclass(frozen=True)
class Stacked:
    """Values stacked along a new dimension `dim`."""

    items: tuple[Node, ...]
    dim: int


Value = Scalar | Binary | Product | Weighted | Projection | Activated | Gated | Stacked | None
