"""A trial of new nodes: what is inserted must be able to stand in the place of what it replaces.

The new nodes run once on fake tensors, under the modes of the node that they replace. They must give a tensor of the
same shape and dtype that has a gradient if the old one had, and its strides: with other strides, a later `reshape`
could copy where it was a view, or the other way round, and a write to it would change other tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
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
    trial, result = _Trial(view, root), nodes[-1]
    found, wanted = trial.run(nodes), trial.fake(root)
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
    if _strides(trial.run(copy)) != _strides(wanted):
        raise Refusal(f"`{root.name}` has the strides {strides}, which no copy of the operator's result has")
    return copy[-1]


class _Trial:
    """Runs new nodes on fake tensors as they would run in the place of `root`."""

    def __init__(self, view: View, root: Node) -> None:
        self._modes, self._root = view.modes(root), root
        self._fake_mode = FakeTensorMode()
        # Functional, as AOTAutograd traces: only then a view of a tensor from outside of inference mode is an error.
        self._functional_mode = FunctionalTensorMode() if self._modes.in_inference_mode else None
        self._values: dict[Node, Any] = {}

    def fake(self, node: Node) -> Any:
        """A fake value like the example of a node."""

        def fake(value: Any) -> Any:
            copy = fake_copy(self._fake_mode, value)
            return copy.requires_grad_(requires_grad(node)) if isinstance(copy, Tensor) else copy

        return tree_map(fake, example(node))

    def run(self, nodes: Sequence[Node]) -> Any:
        """The value of the last one of some new nodes.

        Raises:
            Refusal: one of them raises an error.
        """
        try:
            given = {item for node in nodes for item in node.all_input_nodes} - set(nodes) - self._values.keys()
            self._values.update({item: self.fake(item) for item in given})
            with ExitStack() as stack:
                stack.enter_context(self._fake_mode)
                if self._functional_mode is not None:
                    stack.enter_context(self._functional_mode)
                    functional = {item: tree_map(_functional, self._values[item]) for item in given}
                    self._values.update(functional)
                stack.enter_context(self._modes.entered())
                stack.enter_context(torch.set_grad_enabled(requires_grad(self._root)))
                for node in nodes:
                    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
                    self._values[node] = as_function(node)(*args, **kwargs)
        except Exception as error:  # whatever keeps the operator from running there
            why, *_ = str(error).strip().splitlines() or [""]
            place = f"the operator cannot run in the place of `{self._root.name}`"
            raise Refusal(f"{place}: {type(error).__name__}: {why}") from error
        return self._values[nodes[-1]]


def _functional(value: Any) -> Any:
    return FunctionalTensor.to_functional(value) if isinstance(value, Tensor) else value


def _strides(tensor: Tensor) -> list[int]:
    """The strides of the dimensions along which a tensor has more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
