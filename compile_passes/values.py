"""What the recogniser knows of a node: the abstract values of its interpreter.

Masks are handled as functions of one binary variable. Such a function is known wholly by its values at M = 0 and
M = 1, so `1 - M`, `~M`, `M == 0`, `M < 0.5`, `-(M - 1)` are all proved to be the complement in the same way: by
evaluating them at both points, `at == (1, 0)`. `slope` is the derivative with respect to M at both points, which is
what decides whether a straight-through gradient passes as the operator passes it.

Most values may also be those of a *stack*, all masks of a layer at once in one tensor with a dimension for them:
`W * M` with M `[n_masks, d, h]`, and the products, activations and terms that follow. `at_index` gives one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.fx import Node

from . import formulas
from .formulas import Formula
from .symbols import tensor_example

Pair = tuple[float, float]


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

    `bits` is a node whose values are the mask's (bool, or a real tensor); with `index` the mask is that slice of it.
    `key` is equal for masks of equal value. `proof` says why it is binary; None where nothing proves it, and then
    `doubt` may say what speaks against it.
    """

    bits: Node
    key: Hashable
    proof: str | None
    carrier: Carrier | None = None
    index: int | None = None
    doubt: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the mask, or of the stack; empty where tracing recorded none."""
        example = tensor_example(self.bits)
        shape = () if example is None else tuple(example.shape)
        return shape if self.index is None else shape[1:]

    @property
    def stack(self) -> int | None:
        """How many masks this is a stack of; None for one mask."""
        return self.shape[0] if len(self.shape) == 3 else None


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
    """`weight * factor`; factor None is 1. `transposed`: its transpose. Of a stack of masks, a stack."""

    weight: Node
    factor: Binary | None
    transposed: bool = False


@dataclass(frozen=True)
class Projection:
    """`x (weight * factor)^T`, or with `transposed` `x (weight * factor)` of a weight `[in_features, out_features]`.

    `stack_dim`: the dimension of the masks in a stack, and of length 1 in a projection that is to be broadcast to one.
    `problem`: why it may not be fused, although it looks as if it should.
    """

    x: Node
    weight: Node | Product
    factor: Binary | None
    dtype: torch.dtype
    transposed: bool = False
    stack_dim: int | None = None
    problem: str | None = None


@dataclass(frozen=True)
class Route:
    """A weight a token: a node `[..., 1]`, or one of a stack, whose masks lie along `stack_dim` of the node."""

    node: Node
    stack_dim: int | None = None
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

    @property
    def activation(self) -> str | None:
        """The operator's name of the function; None if it has none."""
        return formulas.activation(self.formula, formulas.EXACT if self.gate.dtype is torch.float64 else 6)


@dataclass(frozen=True)
class Gated:
    """A sum of terms over one x, weight and activation: a layer, or a part of one.

    `rest`: what is added to it and is none of it, where a residual stands inside the sum; then `whole` is the node of
    the terms alone where the graph has one.
    """

    terms: tuple[Term, ...]
    rest: Node | None = None
    whole: Node | None = None


@dataclass(frozen=True)
class Stacked:
    """Sums of terms in one tensor, along a dimension of their own."""

    items: tuple[Gated, ...]
    stack_dim: int


Value: TypeAlias = Scalar | Levels | Binary | Product | Weighted | Projection | Activated | Gated | Stacked | None


def stack_of(value: Value) -> int | None:
    """The length of a stack; None where a value is none."""
    if isinstance(value, Binary):
        return value.mask.stack
    if isinstance(value, (Weighted, Projection)):
        return None if value.factor is None else value.factor.mask.stack
    if isinstance(value, Activated):
        return stack_of(value.projection)
    return len(value.items) if isinstance(value, Stacked) else None


def stack_dim_of(value: Value) -> int | None:
    """The dimension of the masks in a stack; None where a value is none."""
    if isinstance(value, Activated):
        value = value.projection
    if isinstance(value, (Projection, Stacked)):
        return value.stack_dim
    return None if stack_of(value) is None else 0


def slice_key(key: Hashable, index: int) -> Hashable:
    """The key of `tensor[index]` of a tensor with a key."""
    return ("at", key, index)


def at_index(value: Value, index: int) -> Value:
    """One of a stack, `value[index]` along the dimension of the masks; any other value is the same for all."""
    if isinstance(value, Binary) and value.mask.stack is not None:
        mask = value.mask
        carrier = mask.carrier and replace(mask.carrier, key=slice_key(mask.carrier.key, index), index=index)
        return replace(value, mask=replace(mask, key=slice_key(mask.key, index), carrier=carrier, index=index))
    if isinstance(value, (Weighted, Projection)):
        factor = at_index(value.factor, index)
        assert factor is None or isinstance(factor, Binary)
        value = replace(value, factor=factor)
        return replace(value, stack_dim=None) if isinstance(value, Projection) else value
    if isinstance(value, Activated):
        projection = at_index(value.projection, index)
        assert isinstance(projection, Projection)
        route = value.route and replace(value.route, index=index)
        return replace(value, projection=projection, route=route)
    return value.items[index] if isinstance(value, Stacked) else value
