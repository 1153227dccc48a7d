"""Rules for tensors that are masks by how they are made: stacks, comparisons, signs, bits, custom functions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..pointwise import Operand, as_dtype, evaluate
from ..recognise import Recogniser
from ..shapes import dimension, dtype_of, requires_grad, same_shape, slice_of, submodule, tensor_example
from ..symbols import Call
from ..values import Binary, Levels, Number, Scalar, Value, binary_at
from ..view import View
from .bundles import bundle
from .mask_functions import COMPARISONS, of_levels
from .rule import rule

# --- Stacks ----------------------------------------------------------------------------------------------------------


@rule("getitem", "select")
def slice_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`masks[i]`."""
    found = slice_of(node)
    if found is None:
        return None
    stack, dim, index = found
    value = recogniser.value(stack)
    if dim != 0 or not isinstance(value, Binary) or len(value.mask.shape) != 3:
        return None
    return binary_at(value, index)


@rule("stack", "cat")
def joined_masks(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`stack([M, 1 - M])`, and `cat([S, 1 - S])` of stacks of masks."""
    items, dim = call.args
    values = [recogniser.value(item) for item in items] if isinstance(items, (list, tuple)) else []
    masks = [value for value in values if isinstance(value, Binary)]
    if not masks or len(masks) < len(values) or dimension(dim, node) != 0:
        return None
    if call.symbol == "cat":
        if any(value.mask.stack is None for value in masks):
            return None
        masks = [binary_at(value, i) for value in masks for i in range(value.mask.shape[0])]
    elif any(len(value.mask.shape) != 2 for value in masks):
        return None
    # The masks keep their gradients if the joint tensor has one.
    return bundle(masks if requires_grad(node) else [replace(mask, slope=(0, 0)) for mask in masks], 0)


# --- Comparisons -----------------------------------------------------------------------------------------------------


@rule(*COMPARISONS)
def comparison(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`logits > 0`, which is a mask, and `logits <= 0`, which is its complement.

    With NaN both comparisons are False. The rule assumes that logits are numbers, so NaN counts as not positive.
    """
    if dtype_of(node) is not torch.bool:
        return None
    left, right = call.args
    kind = "eq" if call.symbol in ("eq", "ne") else "gt"
    if call.symbol in ("lt", "ge"):  # a < b is b > a, and a >= b is not b > a
        left, right = right, left
    operands = [_compared(recogniser, left, right), _compared(recogniser, right, left)]
    if kind == "eq":
        operands.sort(key=repr)
    is_positive = kind == "gt" and isinstance(left, Node) and recogniser.value(right) == Scalar(0)
    logits = left if is_positive and same_shape(left, node) else None
    inverted = call.symbol in ("le", "ge", "ne")
    return recogniser.new_mask(node, "bool", rounding=0, same_as=(kind, *operands), inverted=inverted, logits=logits)


def _compared(recogniser: Recogniser, argument: Any, other: Any) -> Hashable:
    """The key of an operand of a comparison; all zeros (`0`, `0.0`, `zeros_like(x)`) have the same key.

    A number is compared in the dtype that torch computes with.
    """
    if recogniser.value(argument) == Scalar(0):
        return "zero"
    compared = tensor_example(other)
    if isinstance(argument, (bool, int, float)) and compared is not None:
        dtype = torch.result_type(compared, argument)
        return (str(dtype), as_dtype(argument, dtype))
    return recogniser.key(argument)


@rule("to")
def cast_to_bool(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`m.bool()` of an unknown tensor, which is `m != 0`."""
    (source,) = call.args
    is_known = recogniser.value(source) is not None
    return None if is_known else comparison.function(recogniser, node, Call("ne", (source, 0)))


# --- Tensors of few values -------------------------------------------------------------------------------------------


@rule("sign")
def sign(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`sign(x)`, which holds -1, 0 and 1."""
    example = tensor_example(node)
    return None if example is None or example.is_complex() else Levels((-1, 0, 1))


@rule("heaviside")
def heaviside(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`heaviside(x, v)`, which holds 0, v and 1."""
    _, values = call.args
    at_zero = recogniser.value(values)
    return of_levels(recogniser, node, [0, at_zero.value, 1]) if isinstance(at_zero, Scalar) else None


@rule("round", "floor", "ceil")
def rounded(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`round(sigmoid(logits))`, `round(clamp(logits, 0, 1))` and `floor(p + 0.5)`: whole numbers from 0 to 1."""
    (source,), dtype = call.args, dtype_of(node)
    bounds = _bounds(recogniser, source)
    ends = bounds and dtype and evaluate(node, {source: Operand(bounds, dtype)}, dtype)
    if not ends:
        return None
    return of_levels(recogniser, node, [0, 1]) if min(ends.values) >= 0 and max(ends.values) <= 1 else None


def _bounds(recogniser: Recogniser, argument: Any) -> tuple[Number, Number] | None:
    """The least and the largest value of a sigmoid, of a clamped tensor, or of one of these in a sum or product."""
    call, dtype = recogniser.through(argument), dtype_of(argument)
    if call is None or dtype is None:
        return None
    if call.symbol == "sigmoid":
        return 0, 1
    if call.symbol == "clamp":
        low, high = (as_dtype(n, dtype) if isinstance(n, (int, float)) else None for n in call.args[1:])
        return None if low is None or high is None else (low, high)
    inputs = argument.all_input_nodes
    if call.symbol not in ("add", "sub", "rsub", "mul", "div") or len(inputs) != 1 or dtype_of(inputs[0]) != dtype:
        return None
    bounds = _bounds(recogniser, inputs[0])
    ends = bounds and evaluate(argument, {inputs[0]: Operand(bounds, dtype)}, dtype)
    return (min(ends.values), max(ends.values)) if ends else None


@rule("one_hot", "bernoulli")
def zeros_and_ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`one_hot(indices)` and random masks."""
    return of_levels(recogniser, node, [0, 1])


@rule("gumbel_softmax")
def one_hot_with_a_gradient(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.gumbel_softmax(logits, hard=True)`, which adds and subtracts the soft values."""
    dtype = dtype_of(node)
    if dtype is None:
        return None
    return recogniser.new_mask(node, "values", rounding=torch.finfo(dtype).eps, trained=requires_grad(node))


@rule("scatter", "index_fill", "index_put", "setitem")
def scattered(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`zeros_like(logits).scatter(-1, topk_indices, 1.0)`, `index_fill`, and `flat[indices] = 1`."""
    base, *_, source = call.args
    background, value, dtype = recogniser.value(base), recogniser.value(source), dtype_of(node)
    if not isinstance(background, Scalar) or not isinstance(value, Scalar) or dtype is None:
        return None
    written = as_dtype(value.value, dtype)
    return None if written is None else of_levels(recogniser, node, [background.value, written])


@rule("and", "remainder")
def lowest_bit(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(packed >> i) & 1` and `packed % 2`, which hold 0 and 1, and `packed & 8`, which holds 0 and 8."""
    dtype, (left, right) = dtype_of(node), map(recogniser.value, call.args)
    if dtype is None or dtype.is_floating_point or dtype is torch.bool:
        return None
    if call.symbol == "remainder":
        return of_levels(recogniser, node, [0, 1]) if right == Scalar(2) else None
    numbers = [as_dtype(value.value, dtype) for value in (left, right) if isinstance(value, Scalar)]
    (bit, *others) = numbers or [None]
    if not isinstance(bit, int) or others:
        return None
    return of_levels(recogniser, node, [0, bit]) if bit & (bit - 1) == 0 else None


# --- Custom autograd functions ---------------------------------------------------------------------------------------


@rule("getitem")
def result_of_a_function(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """The result of a custom `autograd.Function` whose forward makes a mask.

    Its backward is the user's own and stays: the operator returns the gradient of the mask, and autograd passes it
    through the user's function as before.
    """
    source, index = call.args
    if not isinstance(source, Node) or "autograd_function_apply" not in str(source.target):
        return None
    body = submodule(source.graph, source.args[0])
    if body is None or not isinstance(index, int):
        return None
    view = View(body.graph)
    returned: Any = view.graph.output_node().args
    ((results, *_),) = returned  # the results, and what is saved for backward
    result = results[index] if isinstance(results, (tuple, list)) else results
    hard = None if view.memory.writes_inputs else type(recogniser)(view).value(result)
    view.discard()
    if not isinstance(hard, Binary) or not hard.is_mask or hard.mask.proof is None:
        return None
    return recogniser.new_mask(node, "autograd.Function", rounding=hard.mask.rounding, trained=requires_grad(node))


# --- The elements of a mask in another order ------------------------------------------------------------------------


@rule(
    *("reshape", "flatten", "unflatten", "unsqueeze", "expand", "repeat", "t", "mT", "transpose", "permute", "getattr"),
    *("getitem", "select", "slice", "narrow"),
)
def rearranged(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`bits.reshape(d, h)` and `m.t()`: a function of M, rearranged, is that function of the rearranged M."""
    source, *how = call.args
    symbol, found = call.symbol, slice_of(node)
    if found is not None:  # one slice in any spelling, also of `unbind`
        source, *how = found
        symbol = "select"
    value = recogniser.value(source)
    if not isinstance(value, Binary) or not value.is_mask or value.mask.proof is None:
        return None
    inverted = value.is_gate(-1)
    carries = requires_grad(node) and any(value.slope)
    # `view(dtype)` reads the bits anew.
    if not call.is_whole or (carries and inverted) or dtype_of(node) != dtype_of(source):
        return None
    moved = (symbol, recogniser.key(how), value.mask.key)
    proof, rounding = value.mask.proof, value.mask.rounding
    made = recogniser.new_mask(node, proof, rounding=rounding, same_as=moved, trained=carries, inverted=inverted)
    return replace(made, slope=value.slope if carries else (0, 0))
