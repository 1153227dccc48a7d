"""Interference: what surrounds a site must not read, write or switch anything that fusing would change.

These are conditions 7 and 8 of `proof.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from torch.fx import Node

from .memory import storages
from .mutation import Effects
from .recognise import Recogniser
from .shapes import example
from .sites import Refusal
from .symbols import as_call, value_users
from .values import Activated, Bundle, Gated, Product, Projection, Weighted


def check_interference(
    recogniser: Recogniser, root: Node, interior: Sequence[Node], operands: Collection[Node]
) -> None:
    """Check that the nodes `interior`, which end with `root` and read `operands`, may be replaced.

    Raises:
        Refusal: they may not.
    """
    _check_users(recogniser, root, interior)
    _check_modes(recogniser, root, interior)
    _check_writes(recogniser.effects, root, set(interior), operands)


def _check_users(recogniser: Recogniser, root: Node, interior: Sequence[Node]) -> None:
    """Refuse a layer whose gates, values or products have users outside of it."""
    inside = set(interior)
    for node in interior:
        if node is root or not _is_computed(recogniser, node):
            continue
        for user in value_users(node):
            if user not in inside:
                raise Refusal(f"`{node.name}`, which the operator would replace, is also used by `{user.name}`")


def _check_modes(recogniser: Recogniser, root: Node, interior: Sequence[Node]) -> None:
    """Refuse a layer that computes under two grad modes or two autocasts.

    Its masks may be made under another mode, such as `no_grad`: their examples tell which gradient they carry.
    """
    modes = recogniser.effects.modes
    for node in interior:
        if modes[node] != modes[root] and _is_weight_or_more(recogniser, node):
            mode = "grad mode" if modes[node][0] != modes[root][0] else "autocast or inference mode"
            raise Refusal(f"`{node.name}` is computed under another {mode} than `{root.name}`")


def _check_writes(effects: Effects, root: Node, interior: set[Node], operands: Collection[Node]) -> None:
    """Refuse a layer that reads or makes a tensor which is written to while the layer is computed."""
    order = effects.order
    if not effects.writes:
        return
    leaves = {*operands, *(node for inner in interior for node in inner.all_input_nodes)} - interior
    touched = {storage for node in interior | leaves for storage in storages(node)}
    first = min(order[node] for node in interior)
    for node, targets in effects.writes:
        if not first <= order[node] <= order[root]:
            continue
        for target in targets:
            if example(target) is not None and not storages(target) & touched:
                continue
            if node not in interior or target not in interior:
                raise Refusal(f"`{node.name}` writes in place to `{target.name}`, which the layer reads")
            _check_overwritten(node, target, interior, order)


def _check_overwritten(writer: Node, target: Node, interior: set[Node], order: Mapping[Node, int]) -> None:
    """Refuse an in-place node that overwrites a tensor from outside the layer, or one that is read again later."""
    for node in order:
        if order[node] >= order[writer] or not storages(node) & storages(target):
            continue
        if node not in interior:
            raise Refusal(f"`{writer.name}` writes in place to `{node.name}`, which is not the layer's own tensor")
        if any(order[user] > order[writer] for user in node.users):
            raise Refusal(f"`{node.name}` is read after `{writer.name}` has overwritten it")


# --- Kinds of nodes --------------------------------------------------------------------------------------------------

_COMPUTED = (Projection, Activated, Gated)


def _is_computed(recogniser: Recogniser, node: Node) -> bool:
    """Whether a node holds what the operator computes internally: products, activations, terms, or a tuple of them."""
    call = as_call(node)
    if call is not None and call.symbol in ("unbind", "split"):
        return isinstance(call.args[0], Node) and _is_computed(recogniser, call.args[0])
    value = recogniser.value(node)
    return isinstance(value.items[0] if isinstance(value, Bundle) else value, _COMPUTED)


def _is_weight_or_more(recogniser: Recogniser, node: Node) -> bool:
    return isinstance(recogniser.value(node), (Weighted, Product, Bundle)) or _is_computed(recogniser, node)
