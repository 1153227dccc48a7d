"""What the recogniser knows of a node: the abstract values of its interpreter.

Masks are handled as functions of one binary variable. Such a function is known wholly by its values at M = 0 and
M = 1, so `1 - M`, `~M`, `M == 0`, `M < 0.5`, `-(M - 1)` are all proved to be the complement in the same way: by
evaluating them at both points, `at == (1, 0)`. `slope` is the derivative with respect to M at both points, which is
what decides whether a straight-through gradient passes as the operator passes it.

A tensor may hold several values: all masks of a layer stacked along a dimension of their own, and the weights, products
and terms made of them; or masked weights concatenated along their rows. `Binary` describes a stack of masks as one,
since masks are computed alike; everything after them is a `Bundle` of values of their own.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.fx import Node

from .formulas import VARIABLE, Formula
from .shapes import tensor_example

Pair = tuple[float, float]
Slice = tuple[Node, "int | None"]
"""A node, or with an index that slice of it along its first dimension."""


@dataclass(frozen=True)
class Carrier:
    """The real node through which a mask's gradient flows; `key` is equal for nodes of equal value and gradient.

    `logits`: the node of which the mask is `logits > 0` and that takes the gradient, where there is one.
    With `index` the mask's are those slices of the nodes.
    """

    node: Node
    key: Hashable
    logits: Node | None = None
    index: int | None = None


@dataclass(frozen=True)
class Mask:
    """A binary tensor `[out_features, in_features]`, or a stack `[n_masks, out_features, in_features]` of them.

    Attributes:
        bits: a node whose values are the mask's, or with `inverted` those of its complement: bool or real.
        key: equal for masks of equal value.
        proof: why the mask is binary; None where nothing proves it.
        carrier: what takes its gradient.
        index: with it, the mask is that slice of `bits` and of `logits`.
        doubt: where nothing proves the mask binary, what speaks against it.
        inverted: whether `bits` holds the complement.
        logits: a node such that the mask is `logits > 0`, where there is one.
        rounding: the machine epsilon of the rounding errors with which the program computes the mask, 0 if it makes
            none: `hard + soft - soft` is almost 1 where `hard` is 1, and exactly 0 where `hard` is 0.
    """

    bits: Node
    key: Hashable
    proof: str | None
    carrier: Carrier | None = None
    index: int | None = None
    doubt: str = ""
    inverted: bool = False
    logits: Node | None = None
    rounding: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the mask, or of the stack; empty where tracing recorded none."""
        example = tensor_example(self.bits)
        shape = () if example is None else tuple(example.shape)
        return shape if self.index is None else shape[1:]

    @property
    def stack(self) -> int | None:
        """How many masks this is a stack of; None for one mask, and for a number that compiling does not know."""
        shape = self.shape
        return shape[0] if len(shape) == 3 and isinstance(shape[0], int) else None


@dataclass(frozen=True)
class Scalar:
    """A number, or a tensor filled with it."""

    value: float


@dataclass(frozen=True)
class Levels:
    """A tensor that is known to hold no other values than these: `sign(x)` holds -1, 0 and 1."""

    values: tuple[float, ...]


@dataclass(frozen=True)
class Binary:
    """`f(M)` elementwise, as `at = (f(0), f(1))` and `slope = (f'(0), f'(1))`."""

    mask: Mask
    at: Pair = (0, 1)
    slope: Pair = (0, 0)

    def is_gate(self, sign: int) -> bool:
        """Whether this is M itself (`sign` 1) or its complement (-1)."""
        return self.at == ((0, 1) if sign == 1 else (1, 0))

    def passes_gradient(self, sign: int) -> bool:
        """Whether the slope is that of M (or of 1 - M) everywhere."""
        return self.slope == (sign, sign)


@dataclass(frozen=True)
class Product:
    """The elementwise product, at `node`, of two tensors of which nothing tells which is the mask, or its transpose."""

    node: Node
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
class Route:
    """A weight of a term: one a token, a node `[..., 1]`, or one number for all, a node of one element.

    With `index` it is that slice of the node along `dim`.
    """

    node: Node
    is_number: bool = False
    dim: int = 0
    index: int | None = None


@dataclass(frozen=True)
class Activated:
    """An elementwise function of a projection, times a route weight if there is one."""

    formula: Formula
    projection: Projection
    route: Route | None = None


@dataclass(frozen=True)
class Term:
    """`route * function(gate) * value`, one mask's part of the layer; route None is 1."""

    formula: Formula
    gate: Projection
    value: Projection
    route: Route | None = None


@dataclass(frozen=True)
class Gated:
    """A sum of terms over one x, weight and activation: a layer, or a part of one.

    `rest`: what is added to it and is none of it, where a residual stands inside the sum; then `whole` is the node of
    the terms alone where the graph has one.
    """

    terms: tuple[Term, ...]
    rest: Node | None = None
    whole: Node | None = None


MOST_ITEMS = 64
"""Values that a bundle may have: 16 masks, their complements, and more, so that a report can say they are too many."""


@dataclass(frozen=True)
class Bundle:
    """Values that one tensor holds side by side.

    Stacked (`size` None), each is the slice at its index along dimension `dim`; concatenated, each takes `size` entries
    of `dim`.
    """

    items: tuple[Part, ...]
    dim: int
    size: int | None = None


Part: TypeAlias = "Binary | Weighted | Projection | Activated | Gated"
Value: TypeAlias = Scalar | Levels | Binary | Product | Weighted | Projection | Activated | Gated | Bundle | None


def projection_of(value: Value) -> Projection | None:
    """A projection that a value is made of; for a bundle, that of its first item."""
    if isinstance(value, Bundle):
        value = value.items[0]
    if isinstance(value, Gated):
        return value.terms[0].gate
    return value.projection if isinstance(value, Activated) else value if isinstance(value, Projection) else None


def function_of(value: Value) -> tuple[Formula, Projection] | None:
    """A value as an elementwise function of a projection."""
    if isinstance(value, Projection):
        return VARIABLE, value
    return (value.formula, value.projection) if isinstance(value, Activated) and value.route is None else None


def slice_key(key: Hashable, index: int) -> Hashable:
    """The key of `tensor[index]` of a tensor with a key."""
    return ("at", key, index)


def binary_at(value: Binary, index: int) -> Binary:
    """One of a stack of masks."""
    mask = value.mask
    carrier = mask.carrier and replace(mask.carrier, key=slice_key(mask.carrier.key, index), index=index)
    return replace(value, mask=replace(mask, key=slice_key(mask.key, index), carrier=carrier, index=index))


def merge(a: Mask, b: Mask) -> Mask | None:
    """The one mask that both are; None where they are two, or carry two gradients."""
    if a.key != b.key:
        return None
    if a.carrier is not None and b.carrier is not None and a.carrier.key != b.carrier.key:
        return None
    return replace(a if a.carrier is not None else b, rounding=max(a.rounding, b.rounding))


def same_function(a: Binary | None, b: Binary | None) -> bool:
    """Whether two functions have one value and one gradient everywhere; None is the constant 1."""
    if a is None or b is None:
        return a is b
    same_carrier = (a.mask.carrier and a.mask.carrier.key) == (b.mask.carrier and b.mask.carrier.key)
    return a.mask.key == b.mask.key and a.at == b.at and a.slope == b.slope and (same_carrier or not any(a.slope))


def combine(a: Binary | None, b: Binary | None, sign: float) -> Binary | None:
    """`a + sign * b` of one mask, where None is the constant 1; None where they are not of one mask."""
    known = a or b
    if known is None:
        return None
    one = Binary(known.mask, at=(1, 1))
    a, b = a or one, b or one
    mask = merge(a.mask, b.mask)
    if mask is None:
        return None
    at = (a.at[0] + sign * b.at[0], a.at[1] + sign * b.at[1])
    slope = (a.slope[0] + sign * b.slope[0], a.slope[1] + sign * b.slope[1])
    return Binary(mask, at, slope)


def multiply(a: Binary, b: Binary) -> Binary | None:
    """`a * b` of one mask."""
    mask = merge(a.mask, b.mask)
    if mask is None:
        return None
    at = (a.at[0] * b.at[0], a.at[1] * b.at[1])
    slope = (
        a.slope[0] * b.at[0] + a.at[0] * b.slope[0],
        a.slope[1] * b.at[1] + a.at[1] * b.slope[1],
    )
    return Binary(mask, at, slope)
