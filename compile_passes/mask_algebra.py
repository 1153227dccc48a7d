"""Arithmetic of functions of one mask (`values.Binary`)."""

from __future__ import annotations

import torch
from torch.fx import Node

from .symbols import equal_sizes, tensor_example
from .values import Binary, Mask


def constant(mask: Mask, value: float) -> Binary:
    """A number as a function of a mask."""
    return Binary(mask, at=(value, value), slope=(0, 0))


def merge(a: Mask, b: Mask) -> Mask | None:
    """The one mask that both are; None where they are two, or carry two gradients."""
    if a.key != b.key:
        return None
    if a.carrier is not None and b.carrier is not None and a.carrier.key != b.carrier.key:
        return None
    return a if a.carrier is not None else b


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
    a, b = a or constant(known.mask, 1), b or constant(known.mask, 1)
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


def checked(node: Node, value: Binary | None) -> Binary | None:
    """`value` if the node computes it exactly in its dtype and has the mask's own shape.

    Multiples of 1/2 below 128 are exact in every floating dtype, whole numbers within int8; uint8 holds no negative
    one, and bool holds 0 and 1 (True + True is True).
    """
    example = tensor_example(node)
    if value is None or example is None or not equal_sizes(example.shape, value.mask.shape):
        return None
    low, high = {torch.bool: (0, 1), torch.uint8: (0, 127)}.get(example.dtype, (-127, 127))
    step = 0.5 if example.dtype.is_floating_point else 1
    return value if all(low <= v <= high and v % step == 0 for v in value.at) else None
