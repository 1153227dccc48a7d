"""Evaluates elementwise functions of a mask with torch, at the two values that a mask can have.

An elementwise function of a mask is determined by its values at 0 and 1. So this module runs the call of a node, with
all its arguments, on a tensor `[0, 1]` of the mask's dtype. Autograd gives the slopes. Because torch computes the
values, its rules for each dtype hold: `m - 1` of uint8 gives 255, 0.5 is 0 in an integer tensor, 0.999 is 1 in
bfloat16, and True + True is True.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.utils._python_dispatch import _disable_current_modes

from .calls import as_function, call_key
from .values import Number


@dataclass(frozen=True)
class Operand:
    """A tensor that replaces an input of a node."""

    values: tuple[Number, ...]
    dtype: torch.dtype
    is_number: bool = False  # True if the tensor has no dimensions
    has_gradient: bool = False


@dataclass(frozen=True)
class Result:
    """The values of a node, and their derivatives with respect to each operand that has a gradient."""

    values: tuple[Number, ...]
    slopes: tuple[tuple[float, ...], ...]


_results: dict[Hashable, tuple[Result | None]] = {}  # the results of earlier calls

_MOST_RESULTS = 4096


def evaluate(node: Node, operands: Mapping[Node, Operand], dtype: torch.dtype) -> Result | None:
    """Evaluate an elementwise node on `operands`, which all have the same number of values, or only one.

    Returns:
        The values and slopes. None if a value is not finite, if the result does not have `dtype` (the dtype of the
        node), or if the call raises an error, as `7 % M` does at M = 0.
    """
    if node.op == "call_module":  # not cached, because in another graph the same name may be another module
        return _evaluated(node, operands, dtype)
    key = (call_key(node), tuple(operands.values()), dtype)
    found = _results.get(key)
    if found is None:
        if len(_results) >= _MOST_RESULTS:
            _results.clear()
        found = _results[key] = (_evaluated(node, operands, dtype),)
    return found[0]


def _evaluated(node: Node, operands: Mapping[Node, Operand], dtype: torch.dtype) -> Result | None:
    with _disable_current_modes(), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        length = max(len(operand.values) for operand in operands.values())
        tensors = {item: _tensor(operand, length) for item, operand in operands.items()}
        # The call reads copies, because in-place operations may not write to a leaf that requires a gradient.
        args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), lambda item: tensors[item].clone())
        try:
            result = as_function(node)(*args, **kwargs)
        except Exception:  # the program may never run the call on these values, so the call may raise any error
            return None
        if result.dtype != dtype:
            return None
        values = tuple(result.detach().flatten().tolist())
        if not all(map(math.isfinite, values)):
            return None
        leaves = [tensors[item] for item, operand in operands.items() if operand.has_gradient]
        return Result(values, _slopes(result, leaves, length))


def _slopes(result: torch.Tensor, leaves: Sequence[torch.Tensor], length: int) -> tuple[tuple[float, ...], ...]:
    if not leaves or not result.requires_grad:
        return ((0.0,) * length,) * len(leaves)
    gradients = torch.autograd.grad(result.sum(), leaves, materialize_grads=True)
    return tuple(tuple(gradient.tolist()) for gradient in gradients)


def _tensor(operand: Operand, length: int) -> torch.Tensor:
    """An operand as a tensor of `length` elements, or without dimensions for a number.

    A single value is repeated without sharing memory (unlike `expand`), because the call may write to the tensor.
    """
    values = operand.values[0] if operand.is_number else operand.values * (length // len(operand.values))
    tensor = torch.tensor(values, dtype=operand.dtype, device="cpu")
    return tensor.requires_grad_() if operand.has_gradient else tensor


def as_dtype(value: Number, dtype: torch.dtype) -> Number | None:
    """A number rounded to a dtype: 0.5 becomes 0 as an integer. None if the dtype cannot hold it."""
    is_integer = dtype is not torch.bool and not dtype.is_floating_point
    try:
        if is_integer and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
            return None
        with _disable_current_modes():
            exact = torch.float64 if isinstance(value, float) else torch.int64
            return torch.tensor(value, dtype=exact).to(dtype).item()
    except RuntimeError:  # a dtype without conversions, such as float4, or an integer with more than 64 bits
        return None
