"""A trial of new nodes: what is inserted must be able to stand in the place of what it replaces.

The new nodes run once on fake tensors, under the modes of the node that they replace. They must give a tensor of the
same shape and dtype that has a gradient if the old one had, and its strides: with other strides, a later `reshape`
could copy where it was a view, or the other way round, and a write to it would change other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Node
from torch.utils._pytree import tree_map

from .calls import as_function, fake_copy
from .shapes import example, requires_grad
from .sites import Refusal
from .view import View


def with_strides_of(view: View, root: Node, nodes: Sequence[Node]) -> Node:
    """The last of some new nodes, which stand before `root`, or a node after them with a copy in the strides of `root`.

    Raises:
        Refusal: the nodes cannot run there, or their result is another kind of tensor.
    """
    mode = FakeTensorMode()
    with mode:
        wanted = fake_copy(mode, example(root))
    values: dict[Node, Any] = {}
    result = nodes[-1]
    found = _run(view, root, nodes, values, mode)
    wanted.requires_grad_(requires_grad(root))
    for name in ("shape", "dtype", "requires_grad"):
        got, must_be = getattr(found, name, None), getattr(wanted, name)
        if got != must_be:
            raise Refusal(f"the operator would give `{root.name}` the {name} {got} instead of {must_be}")
    if _strides(found) == _strides(wanted):
        return result
    strides = wanted.stride()
    order = sorted(range(wanted.dim()), key=lambda dim: -strides[dim])
    copy = [result.graph.call_method("permute", (result, order))]
    copy.append(result.graph.call_method("contiguous", (copy[0],)))
    copy.append(result.graph.call_method("permute", (copy[1], [order.index(dim) for dim in range(wanted.dim())])))
    if _strides(_run(view, root, copy, values, mode)) != _strides(wanted):
        raise Refusal(f"`{root.name}` has the strides {strides}, which no copy of the operator's result has")
    return copy[-1]


def _run(view: View, root: Node, nodes: Sequence[Node], values: dict[Node, Any], mode: FakeTensorMode) -> Any:
    """Compute new nodes from the examples of their inputs, and return the value of the last one."""
    found = None
    try:
        for node in nodes:
            for item in node.all_input_nodes:
                if item not in values and item not in nodes:
                    values[item] = tree_map(partial(fake_copy, mode), example(item))
                    if requires_grad(item):
                        values[item].requires_grad_()
        with mode, view.modes(root).entered(), torch.set_grad_enabled(requires_grad(root)):
            for node in nodes:
                args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), values.__getitem__)
                found = values[node] = as_function(node)(*args, **kwargs)
    except Exception as error:  # whatever keeps the operator from running there
        why, *_ = str(error).strip().splitlines() or [""]
        raise Refusal(
            f"the operator cannot run in the place of `{root.name}`: {type(error).__name__}: {why}"
        ) from error
    return found


def _strides(tensor: Tensor) -> list[int]:
    """The strides of the dimensions along which a tensor has more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
