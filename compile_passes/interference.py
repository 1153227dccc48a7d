"""Interference: what surrounds a layer must not read, write or watch anything that fusing would change.

The checks look at the nodes that replace a layer, so that they know what is read in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch.fx import Node

from .recognise import Recogniser
from .report import line
from .shapes import sources
from .sites import Refusal
from .symbols import as_call, value_users
from .values import Activated, Bundle, Gated, Product, Projection, Weighted, first_of
from .view import View, overwritten


def check_interference(
    recogniser: Recogniser, root: Node, interior: Sequence[Node], made: Sequence[Node], *, trains: bool
) -> None:
    """Check that the nodes `made` may replace the nodes `interior`, which end with `root`.

    `trains` says that gradients of the layer are recorded.

    Raises:
        Refusal: they may not.
    """
    inputs, new = dict.fromkeys(item for node in made for item in node.all_input_nodes), set(made)
    reads = [item for item in inputs if item not in new]
    _check_users(recogniser, root, interior)
    _check_modes(recogniser, root, interior, reads)
    _check_reads(recogniser.view, root, interior, reads)
    if trains:
        _check_backward(recogniser.view, root, interior, reads)


def _check_users(recogniser: Recogniser, root: Node, interior: Sequence[Node]) -> None:
    """Refuse a layer whose gates, values or products have users outside of it, also through shared memory."""
    inside = set(interior)
    for node in interior:
        for user in value_users(node):
            if user.target is overwritten and (node is root or user in inside):
                raise Refusal(f"`{node.name}` writes in place to memory that `{user.name}` shares, which is read later")
            if user not in inside and node is not root and _is_computed(recogniser, node):
                raise Refusal(f"`{node.name}`, which the operator would replace, is also used by `{user.name}`")


def _check_modes(recogniser: Recogniser, root: Node, interior: Sequence[Node], reads: Collection[Node]) -> None:
    """Refuse a layer that computes under two grad modes or autocasts, or whose operator would run under a transform.

    Its masks may be made under another mode, such as `no_grad`: their examples tell which gradient they carry.
    """
    view = recogniser.view
    wanted = view.modes(root)
    for node in (root, *reads):
        if view.modes(node).transforms:
            raise Refusal(
                f"`{node.name}` is computed inside of a functorch transform (torch.func.grad, vmap or jvp), which the "
                "operator would have to know"
            )
    for node in interior:
        modes = view.modes(node)
        is_part = isinstance(recogniser.value(node), (Weighted, Product, Bundle)) or _is_computed(recogniser, node)
        if (modes.grad, modes.blocks) != (wanted.grad, wanted.blocks) and is_part:
            mode = "grad mode" if modes.grad != wanted.grad else "autocast or inference mode"
            raise Refusal(f"`{node.name}` is computed under another {mode} than `{root.name}`")


def _check_reads(view: View, root: Node, interior: Sequence[Node], reads: Collection[Node]) -> None:
    """Refuse a layer whose operator would read a tensor that no longer holds the value which the program read.

    Writes of the layer itself do not count if they go with it.
    """
    removed: set[Node] = set()
    for node in reversed(interior):
        if node is root or removed.issuperset(node.users):
            removed.add(node)
    for node in reads:
        writer = view.overwriter(node, root, without=removed)
        if writer is not None:
            raise Refusal(f"`{line(writer)}` writes in place to `{view.holders[node].name}`, which the layer reads")


def _check_backward(view: View, root: Node, interior: Sequence[Node], reads: Collection[Node]) -> None:
    """Refuse a layer if something later writes to what backward reads: operands of the operator, or of the program.

    A call whose effect is unknown counts as a write, and so does a gradient hook: it would see another gradient. The
    memory of the root does not count: the operator returns a new tensor instead, which backward does not read.
    """
    inside = view.originals(interior)
    inputs = {item for node in interior for item in node.all_input_nodes}
    for node in dict.fromkeys((*reads, *interior, *inputs)):
        for writer in view.later_writers(node, besides=root):
            if writer not in inside:
                problem = "writes in place to" if view.memory.effects[writer].is_known else "may change or watch"
                what = "the graph around this one" if writer.op == "output" else f"`{line(writer)}`"
                raise Refusal(f"{what} {problem} `{view.holders[node].name}`, which backward needs")
    for call in view.memory.differentiating:
        if view.origin[root] in sources(call):
            raise Refusal(
                f"`{line(call)}` takes a gradient of the layer that may be differentiated again, and the operator has "
                "no second derivatives"
            )


def _is_computed(recogniser: Recogniser, node: Node) -> bool:
    """Whether a node holds what the operator computes internally: products, activations, terms, or a tuple of them."""
    call = as_call(node)
    if call is not None and call.symbol in ("unbind", "split"):
        return isinstance(call.args[0], Node) and _is_computed(recogniser, call.args[0])
    return isinstance(first_of(recogniser.value(node)), (Projection, Activated, Gated))
