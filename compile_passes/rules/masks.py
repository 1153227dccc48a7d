"""Rules for masks: tensors that are binary by how they are computed, and elementwise functions of masks and numbers."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import repeat
from typing import Any

import torch
from torch.fx import Node

from .. import shapes
from ..pointwise import Operand, Result, as_dtype, evaluate
from ..recognise import Recogniser
from ..shapes import dimension, dtype_of, has_shape, holds, requires_grad, same_shape, slice_of, tensor_example
from ..symbols import REARRANGES, Call
from ..values import Binary, Levels, Mask, Number, Scalar, Value, binary_at, merge, opposite, slice_key
from ..view import View
from .base import bundle, rule

# --- The straight-through form ---------------------------------------------------------------------------------------

_LONGEST_SUM = 16  # the most nodes to read: a straight-through mask is a short sum, a residual stream may be very long


_Term = tuple[float, float, Node]  # the coefficient in a sum's value, the one in its gradient, and the node


def _linear_terms(recogniser: Recogniser, node: Node, are_shared_whole: bool) -> tuple[list[_Term], float] | None:
    """The terms of a sum, and the largest machine epsilon of its partial sums; None for a long sum.

    With `are_shared_whole`, a node with several users is one term.
    """
    terms: dict[Hashable, tuple[float, float, Node]] = {}
    rounding = 0.0
    pending: list[tuple[Any, float, bool]] = [(node, 1.0, True)]
    for _ in range(_LONGEST_SUM):
        if not pending:
            return list(terms.values()), rounding
        argument, sign, carries = pending.pop()
        if not isinstance(argument, Node):
            return None
        call = recogniser.through(argument)
        symbol, operands = ("", ()) if call is None else (call.symbol, call.args)
        carries = carries and requires_grad(argument) and symbol != "detach"
        is_hard = argument is not node and isinstance(recogniser.value(argument), Binary)
        is_whole = are_shared_whole and argument is not node and len(argument.users) > 1
        if symbol in ("add", "sub") and not is_hard and not is_whole:
            left, right = operands
            dtype = dtype_of(argument)
            rounding = max(rounding, torch.finfo(dtype).eps if dtype is not None and dtype.is_floating_point else 0.0)
            pending += [(left, sign, carries), (right, sign if symbol == "add" else -sign, carries)]
        elif symbol == "detach" or (symbol == "neg" and not is_whole):
            (source,) = operands
            pending.append((source, -sign if symbol == "neg" else sign, carries))
        else:
            value, gradient, first = terms.get(recogniser.key(argument), (0.0, 0.0, argument))
            terms[recogniser.key(argument)] = (value + sign, gradient + sign * carries, first)
    return None


@rule("add", "sub")
def straight_through(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(hard - soft).detach() + soft` in any order, which has the value of `hard` and the gradient of `soft`.

    The program's own sum is not binary where `soft` is not finite, or where |soft| is so large that rounding swallows
    the 1: above 256 in bfloat16, 2048 in float16 and 2^24 in float32. The operator uses `hard` in these cases as well.
    """
    if not recogniser.has_masks:
        return None
    # `soft` may itself be a sum, such as `logits - 0.1`. Then it has several users.
    sums = (_linear_terms(recogniser, node, are_shared_whole) for are_shared_whole in (True, False))
    found = (_of_terms(recogniser, node, *terms) for terms in sums if terms is not None)
    return next((value for value in found if value is not None), None)


def _of_terms(recogniser: Recogniser, node: Node, terms: Sequence[_Term], rounding: float) -> Value:
    """A sum that is a mask with a gradient, from its terms and the machine epsilon of its rounding errors."""
    present = [(value, argument) for value, _, argument in terms if value != 0]
    differentiable = [(gradient, argument) for _, gradient, argument in terms if gradient != 0]
    if len(present) != 1:
        return None
    ((factor, source),) = present
    hard = recogniser.value(source)
    if factor != 1 or not isinstance(hard, Binary) or not hard.is_mask or not same_shape(node, source):
        return None
    if not requires_grad(node):
        return replace(hard, slope=(0, 0), mask=replace(hard.mask, rounding=max(rounding, hard.mask.rounding)))
    # If `hard` is a complement, as `logits >= 0` is of `0 > logits`, make it a mask of its own.
    mask = opposite(hard.mask) if hard.is_gate(-1) else hard.mask
    # The gradient of the sum goes to the logits unchanged if no other term has a gradient.
    slopes, softs = zip(*differentiable, strict=True) if differentiable else ((), ())
    logits = softs[0] if slopes == (1,) and _is_positive(recogniser, mask, softs[0]) else None
    return recogniser.straight_through(mask, node, logits, rounding)


def _is_positive(recogniser: Recogniser, mask: Mask, soft: Node) -> bool:
    """True if a mask is `soft > 0`."""
    if mask.logits is None:
        return False
    key = recogniser.key(mask.logits)
    return recogniser.key(soft) == (key if mask.index is None else slice_key(key, mask.index))


# --- Functions that torch evaluates ----------------------------------------------------------------------------------

COMPARISONS = ("gt", "ge", "lt", "le", "eq", "ne")

_POINTWISE = (
    *("add", "sub", "rsub", "scaled_add", "scaled_sub", "mul", "div", "rounded_div", "neg", "abs", "reciprocal"),
    *("pow", "square", "remainder"),
    *("clamp", "clamp_min", "maximum", "round", "round_to", "sign", "relu", "threshold"),
    *("not", "logical_not", "and", "or", "xor", "logical_and", "logical_or", "logical_xor"),
    *(*COMPARISONS, "where", "masked_fill", "detach"),
)


@rule(*_POINTWISE)
def pointwise(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """An elementwise function of numbers and one mask, such as `1 - M`, `~M`, `M == 0` or `where(M, 0, 1)`.

    Torch computes the function at M = 0 and M = 1 (`pointwise.evaluate`). A function of a tensor of few values, such as
    `(sign(x) + 1) / 2`, is computed at each of these values.
    """
    inputs = node.all_input_nodes
    values = [recogniser.value(item) for item in inputs]
    if not inputs or None in values:
        return None
    if call.symbol in COMPARISONS and any(isinstance(value, Levels) for value in values):
        return None  # `masks.comparison` knows the node, and gives a comparison and its complement the same key
    dtype, operands = dtype_of(node), _operands(inputs, values)
    if not operands or dtype is None or dtype.is_complex:
        return None
    result = evaluate(node, operands, dtype)
    if result is None:
        return None
    functions = {item: value for item, value in zip(inputs, values, strict=True) if isinstance(value, Binary)}
    if functions:
        rounding = max(function.mask.rounding for function in functions.values())
        perturbed = [evaluate(node, _perturbed(operands, error), dtype) for error in _rounding_errors(rounding)]
        for other in perturbed:
            if other is None or not _is_close(other.values, result.values, rounding):
                return None
            if not all(map(_is_close, other.slopes, result.slopes, repeat(rounding))):
                return None
        return _function_of_a_mask(node, functions, operands, result)
    if any(isinstance(value, Levels) for value in values):
        return of_levels(recogniser, node, result.values)
    (value,) = result.values
    return Scalar(value)


def _operands(inputs: Sequence[Node], values: Sequence[Value]) -> dict[Node, Operand]:
    """For each input, its values at M = 0 and M = 1, or all values of `Levels`. Empty if an input is unknown."""
    operands: dict[Node, Operand] = {}
    varying = [value for value in values if not isinstance(value, Scalar)]
    several_levels = any(isinstance(value, Levels) for value in varying) and len(varying) > 1
    for item, value in zip(inputs, values, strict=True):
        example = tensor_example(item)
        if example is None or example.is_complex() or several_levels:
            return {}
        if isinstance(value, Scalar):
            operands[item] = Operand((value.value,), example.dtype, is_number=example.dim() == 0)
        elif isinstance(value, Levels):
            operands[item] = Operand(value.values, example.dtype)
        elif isinstance(value, Binary):
            trained = any(value.slope) and requires_grad(item)
            operands[item] = Operand(value.at, example.dtype, has_gradient=trained)
        else:
            return {}
    return operands


def _function_of_a_mask(
    node: Node, functions: Mapping[Node, Binary], operands: Mapping[Node, Operand], result: Result
) -> Binary | None:
    """The value of a node that computes `result` from functions of one mask; None if there are several masks.

    The chain rule gives the slopes with respect to the mask.
    """
    first, *others = functions.values()
    mask: Mask | None = first.mask
    for function in others:
        mask = mask and merge(mask, function.mask)
    if mask is None or not has_shape(node, mask.shape):
        return None
    total = [0.0, 0.0]
    carrying = [function for item, function in functions.items() if operands[item].has_gradient]
    if requires_grad(node):
        for function, slope in zip(carrying, result.slopes, strict=True):
            total = [t + s * f for t, s, f in zip(total, slope, function.slope, strict=True)]
    return Binary(mask, at=(result.values[0], result.values[-1]), slope=(total[0], total[1]))


def of_levels(recogniser: Recogniser, node: Node, values: Sequence[Number]) -> Value:
    """A tensor of these values: a mask if all are 0 or 1, an unproved mask if all are from 0 to 1, else `Levels`."""
    levels = tuple(sorted(set(values)))
    if not all(0 <= level <= 1 for level in levels):
        return Levels(levels)
    others = [value for value in levels if value not in (0, 1)]
    doubt = f"it may hold {', '.join(f'{value:g}' for value in others)}" if others else ""
    return recogniser.new_mask(node, None if others else "values", rounding=0, doubt=doubt)


# --- Rounding errors -------------------------------------------------------------------------------------------------


def _rounding_errors(rounding: float) -> tuple[float, ...]:
    """The errors to try at M = 1, if the mask is computed with rounding errors of machine epsilon `rounding`."""
    return (2 * rounding, -2 * rounding) if rounding else ()


def _perturbed(operands: dict[Node, Operand], error: float) -> dict[Node, Operand]:
    """The operands with a rounding error in their values at M = 1."""
    return {
        item: replace(operand, values=(operand.values[0], _with_error(operand.values[1], operand.dtype, error)))
        if len(operand.values) == 2
        else operand
        for item, operand in operands.items()
    }


def _with_error(value: Number, dtype: torch.dtype, error: float) -> Number:
    """A number plus a rounding error. A number of an integer dtype has no rounding errors."""
    return value + error * max(1.0, abs(value)) if dtype.is_floating_point else value


def _is_close(perturbed: Sequence[float], exact: Sequence[float], rounding: float) -> bool:
    """True if rounding errors of the mask stay small in the result, or in its slopes.

    A function like `m == 1` turns them into jumps, and the gradient of `clamp(m, 0, 1)` is 0 where m is above 1.
    """
    return all(abs(a - b) <= 16 * rounding * (1 + abs(b)) for a, b in zip(perturbed, exact, strict=True))


# --- Casts and copies ------------------------------------------------------------------------------------------------


@rule("to")
def cast(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A mask, or a number, in another dtype."""
    (source,), dtype = call.args, dtype_of(node)
    value, example = recogniser.value(source), tensor_example(source)
    if dtype is None or dtype.is_complex or example is None or not isinstance(value, (Scalar, Levels, Binary)):
        return None
    points = value.at if isinstance(value, Binary) else value.values if isinstance(value, Levels) else (value.value,)
    values = [point for point in (as_dtype(point, dtype) for point in points) if point is not None]
    if len(values) < len(points):
        return None
    if isinstance(value, Levels):
        return of_levels(recogniser, node, values)
    if isinstance(value, Scalar):
        return Scalar(values[0])
    errors = _rounding_errors(value.mask.rounding)
    perturbed = [as_dtype(_with_error(value.at[1], example.dtype, error), dtype) for error in errors]
    if not all(other is not None and _is_close([other], values[1:], value.mask.rounding) for other in perturbed):
        return None
    slope = value.slope if requires_grad(node) and requires_grad(source) else (0.0, 0.0)
    if any(slope) and _narrows_the_gradient(value.mask, example.dtype, dtype):
        return None
    return replace(value, at=(values[0], values[1]), slope=slope)


def _narrows_the_gradient(mask: Mask, source: torch.dtype, dtype: torch.dtype) -> bool:
    """True if a cast from `source` to `dtype` makes backward round the gradient.

    This happens if an earlier cast narrowed the mask from the carrier's dtype to `source`, and `dtype` is wider again.
    """
    carrier = None if mask.carrier is None else dtype_of(mask.carrier.node)
    return carrier is not None and carrier != source and holds(carrier, source) and not holds(source, dtype)


@rule("alias")
def alias(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A copy of a mask or of a number."""
    (source,) = call.args
    value = recogniser.value(source)
    if isinstance(value, Binary) and not requires_grad(node):
        return replace(value, slope=(0, 0))
    return value if isinstance(value, (Scalar, Levels, Binary)) else None


# --- Numbers ---------------------------------------------------------------------------------------------------------


@rule("zeros", "ones", "full", "tensor")
def filled(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`zeros_like(m)`, `full_like(m, 0.5)` and `torch.tensor(0.5)`: a number, rounded to the tensor's dtype."""
    number = {"zeros": 0, "ones": 1}[call.symbol] if call.symbol in ("zeros", "ones") else call.args[0]
    value, dtype = recogniser.value(number), dtype_of(node)
    if not isinstance(value, Scalar) or dtype is None or dtype.is_complex:
        return None
    rounded = as_dtype(value.value, dtype)
    return None if rounded is None else Scalar(rounded)


# --- Stacks ----------------------------------------------------------------------------------------------------------


@rule("getitem", "select", "squeeze")
def slice_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`masks[i]`: one mask of a stack."""
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
    """`stack([M, 1 - M])` of masks M, and `cat([S, 1 - S])` of stacks S of masks."""
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
    # Without a recorded gradient, for example under `no_grad`, the joint tensor has no slope.
    return bundle(masks if requires_grad(node) else [replace(mask, slope=(0, 0)) for mask in masks], 0)


# --- Comparisons -----------------------------------------------------------------------------------------------------


@rule(*COMPARISONS)
def comparison(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`logits > 0`, which is a mask, and `logits <= 0`, which counts as its complement.

    For a NaN logit both comparisons are False, so they are not complementary. The pass accepts this: in a fused layer,
    a NaN logit counts as not positive.
    """
    if dtype_of(node) is not torch.bool:
        return None
    left, right = call.args
    kind = "eq" if call.symbol in ("eq", "ne") else "gt"
    if call.symbol in ("lt", "ge"):  # `a < b` is `b > a`, and `a >= b` is the complement of `b > a`
        left, right = right, left
    operands = [_compared(recogniser, left, right), _compared(recogniser, right, left)]
    if kind == "eq":
        operands.sort(key=repr)
    is_positive = kind == "gt" and isinstance(left, Node) and recogniser.value(right) == Scalar(0)
    logits = left if is_positive and same_shape(left, node) else None
    inverted = call.symbol in ("le", "ge", "ne")
    return recogniser.new_mask(node, "bool", rounding=0, same_as=(kind, *operands), inverted=inverted, logits=logits)


def _compared(recogniser: Recogniser, argument: Any, other: Any) -> Hashable:
    """The key of an operand of a comparison with `other`. All zeros (`0`, `0.0`, `zeros_like(x)`) have the same key.

    A number is rounded to the dtype in which torch compares the number, if the dtype can hold it.
    """
    if recogniser.value(argument) == Scalar(0):
        return "zero"
    compared = tensor_example(other)
    if isinstance(argument, (bool, int, float)) and compared is not None:
        dtype = torch.result_type(compared, argument)
        rounded = as_dtype(argument, dtype)
        return (str(dtype), argument if rounded is None else rounded)
    return recogniser.key(argument)


@rule("to")
def cast_to_bool(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`m.bool()` of an unknown tensor m, which is `m != 0`."""
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
    """`round(sigmoid(logits))`, `round(clamp(logits, 0, 1))` and `floor(p + 0.5)`, which hold 0 and 1."""
    (source,), dtype = call.args, dtype_of(node)
    bounds = _bounds(recogniser, source)
    ends = bounds and dtype and evaluate(node, {source: Operand(bounds, dtype)}, dtype)
    if not ends:
        return None
    return of_levels(recogniser, node, [0, 1]) if min(ends.values) >= 0 and max(ends.values) <= 1 else None


def _bounds(recogniser: Recogniser, argument: Any) -> tuple[Number, Number] | None:
    """Bounds of a sigmoid or clamped tensor, or of its sum or product with a number; None if unknown."""
    call, dtype = recogniser.through(argument), dtype_of(argument)
    if call is None or dtype is None:
        return None
    if call.symbol in ("sigmoid", "hardsigmoid"):
        return 0, 1
    if call.symbol in ("clamp", "hardtanh"):
        low, high = (as_dtype(n, dtype) if isinstance(n, (int, float)) else None for n in call.args[1:])
        return None if low is None or high is None else (low, high)
    # A function is monotone, so that its values at the bounds are its bounds, if it reads one tensor once. `t * t` and
    # `1 / t` are not.
    tensors = [operand for operand in call.args if isinstance(operand, Node)]
    is_monotone = len(tensors) == 1 and call.symbol in ("add", "sub", "rsub", "mul", "div")
    if not is_monotone or (call.symbol == "div" and tensors[0] is not call.args[0]) or dtype_of(tensors[0]) != dtype:
        return None
    bounds = _bounds(recogniser, tensors[0])
    ends = bounds and evaluate(argument, {tensors[0]: Operand(bounds, dtype)}, dtype)
    return (min(ends.values), max(ends.values)) if ends else None


@rule("one_hot", "bernoulli")
def zeros_and_ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`one_hot(indices)` and random masks."""
    return of_levels(recogniser, node, [0, 1])


@rule("gumbel_softmax")
def one_hot_with_a_gradient(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`F.gumbel_softmax(logits, hard=True)`. Torch adds and subtracts the soft values, which makes rounding errors."""
    dtype = dtype_of(node)
    if dtype is None:
        return None
    return recogniser.new_mask(node, "values", rounding=torch.finfo(dtype).eps)


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
    """A bit of an integer: `(packed >> i) & 1` and `packed % 2` hold 0 and 1, and `packed & 8` holds 0 and 8."""
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
    """The result of a custom `autograd.Function` whose forward computes a mask.

    The call stays in the program: the operator returns the gradient of the mask, and autograd passes this gradient
    through the function's own backward.
    """
    source, index = call.args
    if not isinstance(source, Node) or "autograd_function_apply" not in str(source.target):
        return None
    body = shapes.submodule(source.graph, source.args[0])
    if body is None or not isinstance(index, int):
        return None
    view = View(body.graph)
    returned: Any = view.graph.output_node().args
    ((results, *_),) = returned  # the results, followed by the tensors that are saved for backward
    result = results[index] if isinstance(results, (tuple, list)) else results
    hard = None if view.memory.writes_inputs else type(recogniser)(view).value(result)
    view.discard()
    if not isinstance(hard, Binary) or not hard.is_mask or hard.mask.proof is None:
        return None
    return recogniser.new_mask(node, "autograd.Function", rounding=hard.mask.rounding)


# --- Rearranged masks ------------------------------------------------------------------------------------------------


@rule(*REARRANGES)
def rearranged(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`bits.reshape(d, h)` and `m.t()`: a mask, or the complement of one, with the elements in another order.

    A tensor of few values, such as `zeros_like(logits).view(-1, 4)`, keeps its values.
    """
    source, *how = call.args
    symbol, found = call.symbol, slice_of(node)
    if found is not None:  # all spellings of a slice, including `unbind`, are one symbol
        source, *how = found
        symbol = "select"
    value = recogniser.value(source)
    if dtype_of(node) != dtype_of(source):  # `view(dtype)` reinterprets the bytes
        return None
    if isinstance(value, (Scalar, Levels)):
        return value
    if not isinstance(value, Binary) or not value.is_mask or value.mask.proof is None:
        return None
    inverted, proof, rounding = value.is_gate(-1), value.mask.proof, value.mask.rounding
    if not call.is_whole or (inverted and requires_grad(node)):  # no other node holds the same mask or its complement
        return recogniser.new_mask(node, proof, rounding=rounding)
    moved = (symbol, recogniser.key(how), value.mask.key)
    return recogniser.new_mask(node, proof, rounding=rounding, same_as=moved, inverted=inverted)
