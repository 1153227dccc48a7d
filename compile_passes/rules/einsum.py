"""Rules for `einsum`: as a projection, and as the sum over a stack of terms."""

from __future__ import annotations

from dataclasses import replace
from string import digits
from typing import Any

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..recognise import Recogniser
from ..shapes import dims, example
from ..symbols import Call
from ..values import BATCHED, MOST_ITEMS, Binary, Bundle, MaskWeight, Value, binary_at
from .bundles import bundle
from .gates import times, with_mask_weight
from .projections import projection_at, projection_by
from .rule import rule
from .sums import joined

# --- Projections -----------------------------------------------------------------------------------------------------


@rule("einsum")
def einsum_projection(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("bh,ndh->nbd", x, M * W)` with any letters and order, also with M and W as separate operands."""
    parsed = parse_einsum(call)
    if parsed is None:
        return None
    operands, output = parsed
    if len(operands) == 3:
        return _einsum_of_weight_and_mask(recogniser, node, operands, output)
    if len(operands) != 2:
        return None
    for (x_axes, x), (w_axes, weight) in (operands, reversed(operands)):
        upright = _layout_of_experts(x_axes, w_axes, output)
        if upright is not None:
            return projection_at(recogniser, node, x, weight, upright=upright)
        found = _axes_of_projection(x_axes, w_axes, output)
        projection = None if found is None else _einsum_operands(recogniser, node, x, weight, *found)
        if projection is not None:
            return projection
    return None


def _axes_of_projection(x: str, weight: str, output: str) -> tuple[bool, int | None] | None:
    """Whether the weight is laid out `[out, in]`, and the axis of the output that counts the masks, if there is one.

    None if the operands are not the input and the weight of a projection.
    """
    if len(weight) not in (2, 3):
        return None
    stack, first, second = weight[:-2], weight[-2], weight[-1]
    for features, contracted, upright in ((first, second, True), (second, first, False)):
        wanted = x.removesuffix(contracted) + features
        if x.endswith(contracted) and stack in output and output.replace(stack, "") == wanted:
            return upright, output.index(stack) if stack else None
    return None


def _layout_of_experts(x: str, weight: str, output: str) -> bool | None:
    """Whether the weights of experts are laid out `[E, out, in]`; None if the axes are not like `eth,edh->etd`."""
    if not len(x) == len(weight) == len(output) == 3 or not x[0] == weight[0] == output[0]:
        return None
    for features, contracted, upright in ((weight[1], weight[2], True), (weight[2], weight[1], False)):
        if x[2] == contracted and output[1:] == x[1] + features:
            return upright
    return None


def _einsum_operands(
    recogniser: Recogniser, node: Node, x: Node, weight: Node, upright: bool, stack_dim: int | None
) -> Value:
    value = recogniser.value(weight)
    if stack_dim is None:
        return None if isinstance(value, Bundle) else projection_at(recogniser, node, x, weight, upright=upright)
    if not isinstance(value, Bundle) or value.size is not None:
        return None
    items = [projection_by(recogniser, node, x, weight, item, upright=upright) for item in value.items]
    return bundle(items, stack_dim)


def _einsum_of_weight_and_mask(
    recogniser: Recogniser, node: Node, operands: list[tuple[str, Node]], output: str
) -> Value:
    """`einsum("bh,dh,dh->bd", x, W, M)` with one mask or a stack of masks."""
    for i, (mask_axes, mask) in enumerate(operands):
        others = operands[:i] + operands[i + 1 :]
        for (x_axes, x), (w_axes, weight) in (others, others[::-1]):
            found, factor = _axes_of_projection(x_axes, mask_axes, output), recogniser.factor(mask, weight)
            weighted = recogniser.as_weighted(weight)
            if found is None or w_axes != mask_axes[-2:] or weighted is None or not isinstance(factor, Binary):
                continue
            if weighted.factor is not None or weighted.transposed:
                continue
            upright, stack_dim = found
            count = 1 if stack_dim is None else factor.mask.stack
            if count is None or count > MOST_ITEMS:
                return None
            masks = [factor] if stack_dim is None else [binary_at(factor, i) for i in range(count)]
            masked = [replace(weighted, factor=one) for one in masks]
            items = [projection_by(recogniser, node, x, weight, one, upright=upright) for one in masked]
            return items[0] if stack_dim is None else bundle(items, stack_dim)
    return None


# --- Sums of terms ---------------------------------------------------------------------------------------------------


@rule("einsum")
def einsum_of_a_stack(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("nbd,nbd,bn->bd", act(gates), values, weights)`, the product, the weighting and the sum at once."""
    parsed = parse_einsum(call)
    if parsed is None:
        return None
    operands, output = parsed
    parts = [(axes, recogniser.value(operand), operand) for axes, operand in operands]
    stacks = [(axes, value) for axes, value, _ in parts if isinstance(value, Bundle)]
    mask_weights = [(axes, operand) for axes, value, operand in parts if not isinstance(value, Bundle)]
    if not stacks:
        return None
    (axes, first), *others = stacks
    if first.dim == BATCHED or first.size is not None or output != axes[: first.dim] + axes[first.dim + 1 :]:
        return None
    items: list[Value] = list(first.items)
    for other_axes, other in others:
        if (other_axes, other.dim, other.size) != (axes, first.dim, first.size):
            return None
        items = [times(recogniser, a, b) for a, b in zip(items, other.items, strict=True)]
    masks = axes[first.dim]
    for weight_axes, weight in mask_weights:
        if masks not in weight_axes or weight_axes.replace(masks, "") not in ("", output[:-1]):
            return None
        column = MaskWeight(weight, is_number=weight_axes == masks, dim=weight_axes.index(masks))
        items = [with_mask_weight(item, replace(column, index=i)) for i, item in enumerate(items)]
    return joined(recogniser, items)


# --- Equations -------------------------------------------------------------------------------------------------------


def parse_einsum(call: Call) -> tuple[list[tuple[str, Node]], str] | None:
    """`([(axes, operand), ...], output axes)`, in which each dimension of `...` has a digit as its letter."""
    equation, operands = call.args
    if not isinstance(equation, str):
        return None
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:  # the default output: the dimensions of `...`, then the letters that occur once, in sorted order
        single = [letter for letter in sorted(set(inputs) - set(".,")) if inputs.count(letter) == 1]
        output = "..." * ("..." in inputs) + "".join(single)
    expanded = []
    for letters, operand in zip(inputs.split(","), operands, strict=False):  # one node may hold all operands
        hidden = digits[: dims(operand) - len(letters.replace("...", ""))]
        expanded.append((letters.replace("...", hidden), operand))
        output = output.replace("...", hidden) if "..." in letters else output
    if any(len(letters) != dims(operand) or len(set(letters)) != len(letters) for letters, operand in expanded):
        return None
    sizes: dict[str, Any] = {}
    for letters, operand in expanded:
        found = dict(zip(letters, example(operand).shape, strict=True))
        if not all(statically_known_true(sizes.get(letter, n) == n) for letter, n in found.items()):
            return None  # an operand of size 1 is repeated along the letter
        sizes.update(found)
    return expanded, output
