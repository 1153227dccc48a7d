"""Rules for tensors that are masks by how they are made: stacks, comparisons, signs, bits, custom functions."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node

from ..recognise import Recogniser
from ..shapes import dimension, dtype_of, requires_grad, same_shape, slice_of, submodule, tensor_example
from ..symbols import Call
from ..values import Binary, Bundle, Carrier, Levels, Mask, Scalar, Value, binary_at
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
    operands = [_compared(recogniser, left), _compared(recogniser, right)]
    if kind == "eq":
        operands.sort(key=repr)
    inverted = call.symbol in ("le", "ge", "ne")
    is_positive = kind == "gt" and isinstance(left, Node) and recogniser.value(right) == Scalar(0)
    logits = left if is_positive and same_shape(left, node) else None
    mask = Mask(node, (kind, *operands), "bool", inverted=inverted, logits=logits)
    return Binary(mask, at=(1, 0) if inverted else (0, 1))


def _compared(recogniser: Recogniser, argument: Any) -> Hashable:
    """The key of an operand of a comparison; all zeros (`0`, `0.0`, `zeros_like(x)`) have the same key."""
    value = recogniser.value(argument)
    if value == Scalar(0):
        return "zero"
    return ("number", float(argument)) if isinstance(argument, (int, float)) else recogniser.key(argument)


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


@rule("round")
def rounded(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`round(sigmoid(logits))`."""
    (source,) = call.args
    inner = recogniser.through(source)
    return of_levels(recogniser, node, [0, 1]) if inner is not None and inner.symbol == "sigmoid" else None


@rule("one_hot", "bernoulli")
def zeros_and_ones(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`one_hot(indices)` and random masks."""
    return of_levels(recogniser, node, [0, 1])


@rule("scatter")
def scattered(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`zeros_like(logits).scatter(-1, topk_indices, 1.0)`."""
    base, _, _, source = call.args
    background, value = recogniser.value(base), recogniser.value(source)
    if not isinstance(background, Scalar) or not isinstance(value, Scalar):
        return None
    return of_levels(recogniser, node, [background.value, value.value])


@rule("and", "remainder")
def lowest_bit(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`(packed >> i) & 1` and `packed % 2`, which hold 0 and 1, and `packed & 8`, which holds 0 and 8."""
    dtype, (left, right) = dtype_of(node), map(recogniser.value, call.args)
    if dtype is None or dtype.is_floating_point or dtype is torch.bool:
        return None
    if call.symbol == "remainder":
        return of_levels(recogniser, node, [0, 1]) if right == Scalar(2) else None
    numbers = [int(value.value) for value in (left, right) if isinstance(value, Scalar)]
    if len(numbers) != 1:
        return None
    (bit,) = numbers
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
    if not isinstance(hard, Binary) or not hard.is_mask or hard.mask.proof is None:
        return None
    key = recogniser.key(node)
    carrier = Carrier(node, key) if requires_grad(node) else None
    mask = Mask(node, key, proof="autograd.Function", carrier=carrier)
    return Binary(mask, slope=(1, 1)) if carrier else Binary(mask)


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
    value, example = recogniser.value(source), tensor_example(node)
    if not isinstance(value, Binary) or not value.is_mask or value.mask.proof is None or example is None:
        return None
    inverted = value.is_gate(-1)
    carries = requires_grad(node) and any(value.slope)
    if not call.is_whole or (carries and inverted):
        return None
    key = ("rearranged", symbol, recogniser.key(how), value.mask.key)
    carrier = Carrier(node, recogniser.key(node)) if carries else None
    mask = Mask(node, key, value.mask.proof, carrier, inverted=inverted, rounding=value.mask.rounding)
    return replace(value, mask=mask, slope=value.slope if carries else (0, 0))


@rule("add_batch_dim")
def stack_under_vmap(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """A stack of masks that `torch.vmap` gives to its function one by one."""
    source, dim = call.args
    value = recogniser.value(source)
    if isinstance(value, Bundle) and value.dim == 0 and all(map(_is_proved, value.items)):
        value = of_levels(recogniser, source, [0, 1])  # a bundle of masks as one stack of masks
    if not isinstance(value, Binary) or value.mask.stack is None or value.mask.batched or dim != 0:
        return None
    return replace(value, mask=replace(value.mask, batched=True))


def _is_proved(value: Value) -> bool:
    """Whether a value is a mask without a gradient that is proved to be binary."""
    if not isinstance(value, Binary) or any(value.slope):
        return False
    return value.is_mask and value.mask.proof is not None and value.mask.rounding == 0
