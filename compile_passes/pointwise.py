"""Elementwise functions of a mask, evaluated by torch itself at the two values that a mask can have.

A function of a tensor of 0s and 1s is determined by its values at 0 and at 1. So the operation of a node is run with
all its arguments on two numbers of the right dtype in place of the mask, and autograd gives the slopes. The recogniser
therefore knows what torch does: `m - 1` of uint8 gives 255, 0.5 is 0 in an integer tensor, 0.999 is 1 in bfloat16, and
True + True is True.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes


@dataclass(frozen=True)
class Operand:
    """A tensor that replaces an input of a node: its values, and whether it is a tensor without dimensions."""

    values: tuple[float, ...]
    dtype: torch.dtype
    is_number: bool = False
    has_gradient: bool = False


@dataclass(frozen=True)
class Result:
    """The values of a node, and their derivatives with respect to each operand that has a gradient."""

    values: tuple[float, ...]
    slopes: tuple[tuple[float, ...], ...]


@dataclass(frozen=True)
class _Hole:
    """A placeholder for an operand in the arguments of a node."""

    position: int


def evaluate(node: Node, operands: dict[Node, Operand], dtype: torch.dtype) -> Result | None:
    """Evaluate an elementwise node on `operands`, which all have the same length or are numbers.

    Returns None if a result is not finite, or if its dtype is not `dtype`, the dtype of the node.
    """
    positions = {operand: position for position, operand in enumerate(operands)}
    args, kwargs = (_frozen(part, positions) for part in (node.args, dict(node.kwargs)))
    # The cache's key includes the text of the arguments, because `1`, `1.0` and `True` are equal as keys.
    return _evaluated(node.op, node.target, args, kwargs, repr((args, kwargs)), tuple(operands.values()), dtype)


def _frozen(argument: Any, positions: dict[Node, int]) -> Any:
    """An argument as nested tuples, with a `_Hole` for each node, so that it can be the key of a cache."""
    if isinstance(argument, Node):
        return _Hole(positions[argument])
    if isinstance(argument, (list, tuple)):
        return tuple(_frozen(item, positions) for item in argument)
    if isinstance(argument, dict):
        return tuple((name, _frozen(item, positions)) for name, item in argument.items())
    return argument if isinstance(argument, Hashable) else _Unhashable(argument)


@dataclass(frozen=True, eq=False)
class _Unhashable:
    value: Any


@lru_cache(maxsize=4096)
def _evaluated(
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: tuple[tuple[str, Any], ...],
    spelled: str,
    operands: tuple[Operand, ...],
    dtype: torch.dtype,
) -> Result | None:
    with _disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        length = max(len(operand.values) for operand in operands)
        tensors = [_tensor(operand, length) for operand in operands]
        filled = [_filled(argument, tensors) for argument in args]
        named = {name: _filled(argument, tensors) for name, argument in kwargs}
        function = getattr(type(filled[0]), target) if op == "call_method" else target
        result = function(*filled, **named)
        if result.dtype != dtype:
            return None
        values = tuple(float(v) for v in result.detach().flatten().tolist())
        if not all(v == v and abs(v) != float("inf") for v in values):
            return None
        leaves = [t for t, operand in zip(tensors, operands, strict=True) if operand.has_gradient]
        return Result(values, _slopes(result, leaves, length))


def _slopes(result: torch.Tensor, leaves: Sequence[torch.Tensor], length: int) -> tuple[tuple[float, ...], ...]:
    if not leaves or not result.requires_grad:
        return ((0.0,) * length,) * len(leaves)
    gradients = torch.autograd.grad(result.sum(), leaves, materialize_grads=True)
    return tuple(tuple(gradient.tolist()) for gradient in gradients)


def _tensor(operand: Operand, length: int) -> torch.Tensor:
    """An operand as a tensor of `length` elements; a single value is repeated, because a call may write to it."""
    values = operand.values[0] if operand.is_number else operand.values * (length // len(operand.values))
    tensor = torch.tensor(values, dtype=operand.dtype, device="cpu")
    return tensor.requires_grad_() if operand.has_gradient else tensor


def _filled(argument: Any, tensors: Sequence[torch.Tensor]) -> Any:
    if isinstance(argument, _Hole):
        return tensors[argument.position].clone()  # an in-place operation may not write to a leaf with a gradient
    if isinstance(argument, tuple):
        return tuple(_filled(item, tensors) for item in argument)
    return argument.value if isinstance(argument, _Unhashable) else argument


def as_dtype(value: float, dtype: torch.dtype) -> float | None:
    """A number rounded to a dtype: 0.5 is 0 as an integer, 0.999 is 1 in bfloat16. None if the dtype cannot hold it."""
    is_integer = dtype is not torch.bool and not dtype.is_floating_point
    try:
        if is_integer and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
            return None
        with _disable_current_modes():
            return float(torch.tensor(value, dtype=torch.float64).to(dtype).item())
    except RuntimeError:  # a dtype without conversions, such as float4
        return None
