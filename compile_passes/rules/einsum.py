"""The rule for `einsum` of x and a weight, or a stack of weights."""

from __future__ import annotations

import re

from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..recognise import Recogniser
from ..shapes import dims, example
from ..symbols import Call
from ..values import Bundle, Value
from .bundles import bundle
from .projections import projection_at, projection_by
from .rule import rule

_EQUATION = re.compile(r"([.\w]+),([.\w]+)->([.\w]+)")


@rule("einsum")
def einsum_projection(recogniser: Recogniser, node: Node, call: Call) -> Value:
    """`einsum("bh,dh->bd", x, W * M)`, also `"bh,ndh->nbd"` for a stack of weights and `"eth,edh->etd"` for experts.

    Letters and order may be any, and `...` stands for dimensions of x.
    """
    equation, operands = call.args
    found = _EQUATION.fullmatch(equation.replace(" ", "")) if isinstance(equation, str) else None
    if found is None or len(operands) != 2:
        return None
    *axes, output = found.groups()
    named = list(zip(axes, operands, strict=True))
    for (x_axes, x), (w_axes, weight) in (named, named[::-1]):
        if not w_axes.isalpha() or dims(weight) != len(w_axes) or not _same_sizes((x_axes, x), (w_axes, weight)):
            continue
        value, stacks = recogniser.value(weight), w_axes[:-2]
        if not isinstance(value, Bundle):
            upright = _layout(x_axes, w_axes, output)
            product = None if upright is None else projection_at(recogniser, node, x, weight, upright=upright)
            if product is not None:
                return product
            continue
        upright = _layout(x_axes, w_axes[-2:], output.replace(stacks, ""))
        if upright is not None and len(stacks) == output.count(stacks) == 1 and value.size is None and value.dim == 0:
            after = len(output) - output.index(stacks)
            dim = output.index(stacks) if "..." not in output[: -after or None] else dims(node) - after
            items = [projection_by(recogniser, node, x, weight, one, upright=upright) for one in value.items]
            return bundle(items, dim)
    return None


def _layout(x: str, weight: str, output: str) -> bool | None:
    """Whether a weight is laid out `[out, in]`; None if the axes are not those of x, a weight and their product."""
    experts, first, second = weight[:-2], weight[-2], weight[-1]
    leading = x[:-1]
    letters = leading.replace("...", "") + first + second
    if len(set(letters)) < len(letters) or (experts and leading not in (experts + leading[-1:],)):
        return None
    layouts = {(leading + second, leading + first): True, (leading + first, leading + second): False}
    return layouts.get((x, output))


def _same_sizes(*operands: tuple[str, Node]) -> bool:
    """Whether no operand is repeated along a letter that both have, as one of size 1 is."""
    sizes: dict[str, object] = {}
    for axes, operand in operands:
        found = zip(reversed(axes.replace("...", "")), reversed(example(operand).shape), strict=False)
        if not all(statically_known_true(sizes.setdefault(letter, n) == n) for letter, n in found):
            return False
    return True
