"""The abstract values of nodes: what the recogniser can know about a node.

A factor of a weight is a function of one binary variable, the mask M. Such a function is determined by its values at
M = 0 and M = 1. So `1 - M`, `~M`, `M == 0`, `M < 0.5` and `-(M - 1)` are proved to be the complement in the same way:
each is evaluated at both points, and its values there are `at == (1, 0)`. `slope` holds the derivatives with respect to
M at both points. They tell if the gradient of a straight-through mask is the one that the operator passes.

One tensor may hold several values. Examples are the stacked masks of a layer, the products that are computed from such
a stack, and masked weights that are concatenated along their rows. A stack of masks that are all computed in the same
way is one `Binary`. All other tensors with several values are a `Bundle`.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch
from torch.fx import Node

from .formulas import VARIABLE, Formula
from .shapes import requires_grad, tensor_example

Number = bool | int | float  # integers are not converted to float, which would round above 53 bits

Pair = tuple[Number, Number]
Slice = tuple[Node, "int | None"]  # a stack and the index of one of its slices; or a node and None, for the whole node


@dataclass(frozen=True)
class Carrier:
    """The float tensor through which a mask's gradient flows. Equal keys mean equal values and gradients."""

    node: Node  # the tensor itself: a straight-through mask
    key: Hashable  # the key of the node, or of its slice
    logits: Node | None = None  # the node that receives the gradient, if the mask is `logits > 0`
    index: int | None = None  # if not None, `node` and `logits` are stacks, and the mask is at this index


@dataclass(frozen=True)
class Mask:
    """A binary tensor `[out_features, in_features]`, or a stack `[n_masks, out_features, in_features]` of them.

    `rounding` is the machine epsilon of the rounding errors with which the program computes the mask, or 0 if there are
    none. A straight-through sum `hard + soft - soft` is almost 1 where `hard` is 1, and exactly 0 where `hard` is 0.
    """

    bits: Node  # the node that holds the mask, or the complement of the mask if `inverted`; of any dtype
    key: Hashable  # equal for masks with equal values
    proof: str | None  # why the mask is binary; None if nothing proves it
    carrier: Carrier | None = None  # the tensor through which the mask's gradient flows, if it has one
    index: int | None = None  # if not None, `bits` and `logits` are stacks, and the mask is at this index
    doubt: str = ""  # why an unproved mask may not be binary, for the report
    inverted: bool = False  # True if `bits` holds the complement of the mask
    logits: Node | None = None  # a node such that the mask is `logits > 0`, if there is one
    rounding: float = 0.0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the mask or of the stack; empty if tracing recorded none."""
        example = tensor_example(self.bits)
        shape = () if example is None else tuple(example.shape)
        return shape[1:] if self.index is not None else shape

    @property
    def stack(self) -> int | None:
        """The number of masks in a stack; None for a single mask, or if the number is symbolic."""
        example = tensor_example(self.bits)
        if example is None or self.index is not None or example.dim() != 3:
            return None
        return example.shape[0] if isinstance(example.shape[0], int) else None


@dataclass(frozen=True)
class Scalar:
    """A number, or a tensor filled with one number."""

    value: Number


@dataclass(frozen=True)
class Levels:
    """A tensor that holds only the listed values. For example, `sign(x)` holds -1, 0 and 1."""

    values: tuple[Number, ...]


@dataclass(frozen=True)
class Binary:
    """An elementwise function f of a mask."""

    mask: Mask
    at: Pair = (0, 1)  # f(0) and f(1)
    slope: Pair = (0, 0)  # f'(0) and f'(1)

    def is_gate(self, sign: int) -> bool:
        """True if f is M itself (`sign` 1) or its complement (`sign` -1)."""
        return self.at == _VALUES[sign]

    @property
    def is_mask(self) -> bool:
        """True if f is M itself or its complement."""
        return self.is_gate(1) or self.is_gate(-1)

    def passes_gradient(self, sign: int) -> bool:
        """True if f has the slope of M (`sign` 1) or of its complement (`sign` -1) at both points."""
        return self.slope == (sign, sign)


_VALUES: Mapping[int, Pair] = {1: (0, 1), -1: (1, 0)}  # `at` of a mask (1) and of its complement (-1)


@dataclass(frozen=True)
class Product:
    """The elementwise product `a * b` at `node`, or its transpose. It is not known which factor is the mask."""

    node: Node
    a: Node
    b: Node
    transposed: bool = False

    @property
    def weights(self) -> tuple[Node, ...]:
        """The factors that may be the weight: both, or the only factor that requires a gradient.

        If only one factor requires a gradient, the other factor is a mask, such as the buffer of
        `torch.nn.utils.prune`, which several weights may share.
        """
        trained = tuple(node for node in (self.a, self.b) if requires_grad(node))
        return trained or (self.a, self.b)


@dataclass(frozen=True)
class Weighted:
    """`weight * factor`, or its transpose.

    The weights of experts are one weight `[experts, out_features, in_features]`, and the mask has the same shape.
    """

    weight: Node
    factor: Binary | None  # None stands for 1
    transposed: bool = False


@dataclass(frozen=True)
class Projection:
    """The product `x (weight * factor)^T`.

    If the weight has three dimensions, each expert e multiplies its own rows. These are `x[e]` of x
    `[experts, tokens, in_features]`. With `offs`, they are the rows from `offs[e - 1]` to `offs[e]` of x
    `[rows, in_features]`, as in `torch.nn.functional.grouped_mm`.
    """

    x: Node
    weight: Node | Product
    factor: Binary | None  # None stands for 1
    dtype: torch.dtype
    transposed: bool = False  # True for a weight `[in_features, out_features]`: the product is `x (weight * factor)`
    problem: str | None = None  # why a site with this projection must be refused, as the user reads it
    offs: Node | None = None  # where each expert's rows of x end
    swapped: bool = False  # True if the node holds the transpose of the product, as `(weight * factor) @ x.T` does
    row_scaled: bool = False  # True if `weight` includes a scale that the program applies to the product


@dataclass(frozen=True)
class MaskWeight:
    """The mask weight of a term: one per token (a node `[..., 1]`), or one number (a node with one element)."""

    node: Node
    is_number: bool = False
    dim: int = 0
    index: int | None = None  # if not None, the mask weight is the slice of `node` at this index of `dim`


@dataclass(frozen=True)
class Activated:
    """An elementwise function of a projection, times a mask weight if it has one."""

    formula: Formula
    projection: Projection
    mask_weight: MaskWeight | None = None


@dataclass(frozen=True)
class Term:
    """`mask_weight * formula(gate) * value`: what one mask contributes to a layer."""

    formula: Formula
    gate: Projection
    value: Projection
    mask_weight: MaskWeight | None = None  # None stands for 1
    moved: bool = False  # True if the program multiplies the gate or the value by the mask weight, not their product


@dataclass(frozen=True)
class Gated:
    """A sum of terms with the same x, weight and activation: a layer or a part of one."""

    terms: tuple[Term, ...]
    rest: Node | None = None  # the residual: a tensor that the sum contains besides the terms
    whole: Node | None = None  # with a residual, the node that holds the sum of the terms alone, if the graph has one
    rest_first: bool = False  # True if the residual is the first operand, which may decide the strides of the sum


MOST_ITEMS = 64
"""The most items of a bundle.

The largest layer has 32 items: 16 masks and their complements. The limit is higher, so that the pass recognises layers
with a few more masks and reports why it refuses them.
"""


@dataclass(frozen=True)
class Bundle:
    """Several values (the items) in one tensor.

    If `size` is None, the items are stacked: item i is the slice at index i of dimension `dim`. Otherwise they are
    concatenated: each item takes `size` entries of `dim`.
    """

    items: tuple[Part, ...]
    dim: int
    size: int | None = None


@dataclass(frozen=True)
class Interleaved:
    """Several values in one tensor: item i is the slice `i::n` of dimension `dim`, where n is the number of items."""

    items: tuple[Weighted | Projection, ...]
    dim: int


Part: TypeAlias = "Binary | Weighted | Projection | Activated | Gated"
Value: TypeAlias = (
    Scalar | Levels | Binary | Product | Weighted | Projection | Activated | Gated | Bundle | Interleaved | None
)


def first_of(value: Value) -> Value:
    """The first item of a bundle (all items have one type); any other value unchanged."""
    return value.items[0] if isinstance(value, Bundle) else value


def projection_of(value: Value) -> Projection | None:
    """A projection from which a value is computed: for a sum, the first gate; for a bundle, a projection of item 0."""
    value = first_of(value)
    if isinstance(value, Gated):
        return value.terms[0].gate
    return value.projection if isinstance(value, Activated) else value if isinstance(value, Projection) else None


def function_of(value: Value) -> Activated | None:
    """A value as an elementwise function of a projection; None if it is not one, or if it has a mask weight."""
    if isinstance(value, Projection):
        return Activated(VARIABLE, value)
    return value if isinstance(value, Activated) and value.mask_weight is None else None


def slice_key(key: Hashable, index: int) -> Hashable:
    """The key of `tensor[index]`, given the key of the tensor."""
    return ("at", key, index)


def binary_at(value: Binary, index: int) -> Binary:
    """The function of mask `index` alone, given the function of a stack of masks."""
    mask = value.mask
    carrier = mask.carrier and replace(mask.carrier, key=slice_key(mask.carrier.key, index), index=index)
    single = replace(mask, key=slice_key(mask.key, index), carrier=carrier, index=index)
    return replace(value, mask=single)


def opposite(mask: Mask) -> Mask:
    """The complement of a mask as a mask of its own."""
    return replace(mask, key=("not", mask.key), inverted=not mask.inverted, logits=None)


def merge(a: Mask, b: Mask) -> Mask | None:
    """The mask that `a` and `b` describe; None for different masks, or if gradients flow through different tensors."""
    if a.key != b.key:
        return None
    if a.carrier is not None and b.carrier is not None and a.carrier.key != b.carrier.key:
        return None
    return replace(a if a.carrier is not None else b, rounding=max(a.rounding, b.rounding))


def scale_of(factor: Binary) -> Number:
    """The number c, for a factor that is c times a mask or its complement; 1 for other functions of a mask."""
    numbers = [number for number in factor.at if number]
    return numbers[0] if len(numbers) == 1 else 1


def unscaled(factor: Binary) -> Binary:
    """A factor divided by its `scale_of`."""
    scale = scale_of(factor)
    (at_0, at_1), (slope_0, slope_1) = factor.at, factor.slope
    if scale == 1:
        return factor
    return replace(factor, at=(at_0 / scale, at_1 / scale), slope=(slope_0 / scale, slope_1 / scale))


def same_function(a: Binary | None, b: Binary | None) -> bool:
    """True if two functions have the same values and gradients; None stands for the constant 1."""
    if a is None or b is None:
        return a is b
    same_carrier = (a.mask.carrier and a.mask.carrier.key) == (b.mask.carrier and b.mask.carrier.key)
    return a.mask.key == b.mask.key and a.at == b.at and a.slope == b.slope and (same_carrier or not any(a.slope))


def combine(a: Binary | None, b: Binary | None, sign: float) -> Binary | None:
    """`a + sign * b` for functions of one mask; None if the masks differ. An operand `None` is the constant 1."""
    known = a or b
    if known is None:
        return None
    constant = Binary(known.mask, at=(1, 1))
    a, b = a or constant, b or constant
    mask = merge(a.mask, b.mask)
    if mask is None:
        return None
    at = (a.at[0] + sign * b.at[0], a.at[1] + sign * b.at[1])
    slope = (a.slope[0] + sign * b.slope[0], a.slope[1] + sign * b.slope[1])
    return Binary(mask, at, slope)


def multiply(a: Binary, b: Binary) -> Binary | None:
    """`a * b` for functions of one mask; None if the masks differ."""
    mask = merge(a.mask, b.mask)
    if mask is None:
        return None
    at = (a.at[0] * b.at[0], a.at[1] * b.at[1])
    slope = (a.slope[0] * b.at[0] + a.at[0] * b.slope[0], a.slope[1] * b.at[1] + a.at[1] * b.slope[1])
    return Binary(mask, at, slope)
