"""Checks that new nodes may take the place of a layer: no other node may notice the difference.

Fusing must not change anything that nodes around the layer read, write or watch (with gradient hooks). The checks run
after the new nodes are inserted, so they know exactly which tensors the operator reads.

The new nodes also run once on fake tensors, under the modes of the node that they replace. Their result must have the
same shape, dtype, strides and `requires_grad`. Strides matter because they decide if a later `reshape` is a view or a
copy, and so which tensors a later write changes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx import Node
from torch.utils._pytree import tree_map

from .calls import as_function, fake_copy
from .recognise import Recogniser
from .report import line
from .shapes import dtype_of, example, requires_grad
from .sites import Refusal
from .symbols import as_call, value_users
from .values import Activated, Bundle, Gated, Product, Projection, Weighted, first_of
from .view import View, overwritten


def check_interference(
    recogniser: Recogniser, root: Node, interior: Sequence[Node], made: Sequence[Node], x: Node, *, trains: bool
) -> None:
    """Check that the nodes `made` may replace the nodes `interior`, the last of which is `root`.

    Args:
        recogniser: the recogniser of the graph.
        root: the node that holds the layer's result.
        interior: the nodes of the layer, in the order of the graph.
        made: the new nodes.
        x: the node that the layer multiplies.
        trains: True if gradients of the layer are recorded.

    Raises:
        Refusal: a check fails.
    """
    inputs, new = dict.fromkeys(item for node in made for item in node.all_input_nodes), set(made)
    reads = [item for item in inputs if item not in new]
    _check_users(recogniser, root, interior)
    _check_modes(recogniser, root, interior, reads)
    _check_reads(recogniser.view, root, interior, reads)
    if trains:
        is_trained = any(requires_grad(item) for item in reads if item is not x)
        _check_backward(recogniser.view, root, interior, reads, unread=None if is_trained else x)


def _check_users(recogniser: Recogniser, root: Node, interior: Sequence[Node]) -> None:
    """Refuse a layer if nodes outside of it use its gates, values or products, directly or through shared memory."""
    inside = set(interior)
    for node in interior:
        for user in value_users(node):
            if user.target is overwritten and (node is root or user in inside):
                tensor, writer = user.args
                raise Refusal(f"`{writer}` writes in place to the memory of `{tensor}`, which is read later")
            if user not in inside and node is not root and _is_computed(recogniser, node):
                raise Refusal(f"`{node.name}`, which the operator would replace, is also used by `{user.name}`")


def _check_modes(recogniser: Recogniser, root: Node, interior: Sequence[Node], reads: Collection[Node]) -> None:
    """Refuse a layer that is computed under two grad modes or autocasts, or inside of a functorch transform.

    The masks of the layer may be computed under another mode, such as `no_grad`, because their example values tell if
    they have gradients.
    """
    view = recogniser.view
    wanted = view.modes(root)
    for node in (root, *reads):
        if view.modes(node).transforms:
            raise Refusal(
                f"`{node.name}` is computed inside of a functorch transform (torch.func.grad, vmap or jvp), and the "
                "operator would run inside of it too; a layer outside of transforms is fused"
            )
    for node in interior:
        modes = view.modes(node)
        is_part = isinstance(recogniser.value(node), (Weighted, Product, Bundle)) or _is_computed(recogniser, node)
        if (modes.grad, modes.blocks) != (wanted.grad, wanted.blocks) and is_part:
            mode = "grad mode" if modes.grad != wanted.grad else "autocast or inference mode"
            raise Refusal(f"`{node.name}` is computed under another {mode} than `{root.name}`")


def _check_reads(view: View, root: Node, interior: Sequence[Node], reads: Collection[Node]) -> None:
    """Refuse a layer if a tensor that the operator reads is overwritten before the operator runs.

    Writes by nodes that fusing removes do not count.
    """
    removed: set[Node] = set()
    for node in reversed(interior):
        if node is root or removed.issuperset(node.users):
            removed.add(node)
    for node in reads:
        writer = view.overwriter(node, root, without=removed)
        if writer is not None:
            raise Refusal(f"`{line(writer)}` writes in place to `{view.holders[node].name}`, which the layer reads")


def _check_backward(
    view: View, root: Node, interior: Sequence[Node], reads: Collection[Node], unread: Node | None
) -> None:
    """Refuse a layer if a later node writes to a tensor that the backward pass reads, of the operator or of the layer.

    A call with unknown effects counts as a write. So does a gradient hook, because with the operator the hook would see
    another gradient. Writes to the root's memory do not count: backward does not read the operator's result. Nor does
    it read `unread`: x, if no weight and no mask has a gradient.
    """
    inside, storages = view.originals(interior), view.memory.storages
    inputs = {item for node in interior for item in node.all_input_nodes}
    of_unread = frozenset[Hashable]() if unread is None else storages[view.holders[unread]]
    # Memory that x shares with another tensor is read.
    of_unread = of_unread.difference(*(storages[view.holders[node]] for node in reads if node is not unread))
    for node in dict.fromkeys((*reads, *interior, *inputs)):
        is_unread = storages[view.holders[node]] <= of_unread
        for writer in view.later_writers(node, besides=root):
            is_known = view.memory.effects[writer].is_known
            if writer not in inside and not (is_unread and is_known):
                problem = "writes in place to" if is_known else "may change or watch"
                what = "the graph around this one" if writer.op == "output" else f"`{line(writer)}`"
                raise Refusal(f"{what} {problem} `{view.holders[node].name}`, which backward needs")
    if view.memory.is_differentiated_around:
        raise Refusal("a graph around this one takes gradients that may be differentiated again; there are no formulas")
    for call in view.memory.differentiating:
        if view.memory.order[call] > view.memory.order[view.origin[root]]:
            raise Refusal(
                f"`{line(call)}` takes gradients that may be differentiated again, and the operator has no second "
                "derivatives"
            )


def _is_computed(recogniser: Recogniser, node: Node) -> bool:
    """True if a node holds what the operator computes internally: products, activations, terms, or tuples of these."""
    call = as_call(node)
    if call is not None and call.symbol in ("unbind", "split"):
        return isinstance(call.args[0], Node) and _is_computed(recogniser, call.args[0])
    return isinstance(first_of(recogniser.value(node)), (Projection, Activated, Gated))


# --- Trial run of the new nodes --------------------------------------------------------------------------------------


def with_strides_of(view: View, root: Node, nodes: Sequence[Node]) -> Node:
    """Run new nodes on fake tensors in the place of `root`, and give their result the strides of `root`.

    Returns:
        The last of `nodes`, or a new node that copies it if its strides differ from the strides of `root`.

    Raises:
        Refusal: a node raises an error, or the result has another shape, dtype or `requires_grad` than `root`, or its
            copies cannot have the strides of `root`.
    """
    trial, result = _Trial(view, root), nodes[-1]
    found, wanted = trial.run(nodes), trial.fake(root)
    for name in ("shape", "dtype", "requires_grad"):
        got, must_be = getattr(found, name, None), getattr(wanted, name)
        if got != must_be:
            raise Refusal(f"the operator would give `{root.name}` the {name} {got} instead of {must_be}")
    if _strides(found) != _strides(wanted):
        order = sorted(range(wanted.dim()), key=lambda dim: -wanted.stride()[dim])
        copy = [result.graph.call_method("permute", (result, order))]
        copy.append(result.graph.call_method("contiguous", (copy[0],)))
        copy.append(result.graph.call_method("permute", (copy[1], [order.index(dim) for dim in range(wanted.dim())])))
        result, found = copy[-1], trial.run(copy)
        if _strides(found) != _strides(wanted):
            raise Refusal(f"`{root.name}` has strides {wanted.stride()}, which no copy of the operator's result has")
    # A later node may write to the result. Autograd refuses writes to a view that was made under `no_grad`, so the
    # result must be a copy.
    if found._is_view() and torch.is_grad_enabled() and not requires_grad(root):
        result = result.graph.call_method("clone", (result,))
    return result


class _Trial:
    """Runs new nodes on fake tensors, under the modes of `root`."""

    def __init__(self, view: View, root: Node) -> None:
        self._modes, self._root = view.modes(root), root
        self._fake_mode = FakeTensorMode()
        # AOTAutograd traces functional tensors. For these, but not for fake tensors, it is an error if a view of a
        # tensor from outside is made in inference mode. So the trial uses functional tensors to see the error.
        self._functional_mode = FunctionalTensorMode() if self._modes.in_inference_mode else None
        self._values: dict[Node, Any] = {}

    def fake(self, node: Node) -> Any:
        """A fake copy of the example value of a node: a tensor, or a tuple of tensors."""

        def fake(value: Any) -> Any:
            copy = fake_copy(self._fake_mode, value)
            return copy.requires_grad_(requires_grad(node)) if isinstance(copy, Tensor) else copy

        return tree_map(fake, example(node))

    def run(self, nodes: Sequence[Node]) -> Any:
        """Run new nodes in order, and return the value of the last one.

        Raises:
            Refusal: a node raises an error.
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
                    self._check_join(node)
                    args, kwargs = torch.fx.map_arg((node.args, dict(node.kwargs)), self._values.__getitem__)
                    self._values[node] = as_function(node)(*args, **kwargs)
        except Exception as error:  # operators and modes raise errors of many types
            why, *_ = str(error).strip().splitlines() or [""]
            place = f"the operator cannot run in the place of `{self._root.name}`"
            raise Refusal(f"{place}: {type(error).__name__}: {why}") from error
        return self._values[nodes[-1]]

    def _check_join(self, node: Node) -> None:
        """Raise an error where torch would: `stack` or `cat` of float16 under a bfloat16 autocast, or the reverse."""
        dtype = dtype_of(self._root)
        joined = node.all_input_nodes if node.target in (torch.stack, torch.cat) and dtype in _OF_16_BITS else []
        if any(self._values[item].dtype in _OF_16_BITS - {dtype} for item in joined):
            raise TypeError(f"tensors of 16 bits are joined under an autocast to {dtype}, which is another dtype")


_OF_16_BITS = {torch.float16, torch.bfloat16}


def _functional(value: Any) -> Any:
    return FunctionalTensor.to_functional(value) if isinstance(value, Tensor) else value


def _strides(tensor: Tensor) -> list[int]:
    """The strides of the dimensions along which a tensor has more than one element."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1]
