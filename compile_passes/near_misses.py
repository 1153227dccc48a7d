"""Finds near misses: one input x is multiplied by two masked forms of one weight, but no layer was found.

A site needs a gated product that the rules know. Without one, the report would be silent about the program. So this
module reports a near miss, which names the nodes that read a masked weight, or a value computed from it, in a way that
no rule knows.

A *form* of a weight is the weight itself or a masked version of it. One pass over the graph follows each form for at
most `_FARTHEST` nodes, so the time is linear in the length of the graph. What is computed after more nodes counts as an
activation, not as a weight.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch.fx import Node

from .recognise import Recogniser
from .report import SiteReport, missed_at
from .shapes import dims, dtype_of, is_like, repeated, submodule, tensor_example
from .symbols import READS_NO_VALUES, symbol_of, value_users
from .values import Activated, Binary, Bundle, Gated, Levels, Product, Value, Weighted, projection_of
from .view import opaque, overwritten

_FARTHEST = 8  # the most nodes between a masked weight and the product with x: casts, transposes, stacks, ...

_Form = tuple[Hashable, Hashable]  # the key of a weight, and the key of one of its forms

_ITSELF = "itself"  # the key of the form that is the weight itself

_Path = tuple[Node, ...]
"""The nodes that compute a tensor from a form. The node that holds the form comes first if no rule knows that node."""


@dataclass
class _Weight:
    """The forms of one weight, and the products that they reach."""

    forms: dict[Node, set[Hashable]] = field(default_factory=dict)  # for each node that holds forms, their keys
    by_x: dict[Hashable, set[Hashable]] = field(default_factory=dict)  # for each x (its key), the forms that multiply x
    reached: set[Node] = field(default_factory=set)  # the nodes from the forms to the products, including the products


def find_near_misses(recogniser: Recogniser, found: set[Node]) -> dict[Hashable, SiteReport]:
    """The near misses of a graph, by the key of the weight. `found` has the nodes of the layers, which are skipped."""
    misses = {}
    for key, weight in _weights(recogniser, found).items():
        is_multiplied = any(len(forms) > 1 for forms in weight.by_x.values())
        miss = _miss(recogniser, weight.reached, found) if is_multiplied else _given_away(weight)
        if miss is not None:
            misses[key] = miss
    return misses


def _weights(recogniser: Recogniser, found: set[Node]) -> dict[Hashable, _Weight]:
    """Follow the forms of all masked weights to the products that they reach."""
    nodes = recogniser.view.graph.nodes
    masked = recogniser.masked_weights.union(*(_masked_by_any_call(recogniser, node) for node in nodes))
    weights: dict[Hashable, _Weight] = {}
    carried: dict[Node, dict[_Form, _Path]] = {}
    noted = set(found)
    for node in nodes:
        for key, form, others in _masked_in_a_product(recogniser, node) if node not in found else ():
            weight = weights.setdefault(key, _Weight())
            weight.reached.add(node)
            noted.add(node)
            for x in others:
                weight.by_x.setdefault(x, set()).add(form)
    for node in nodes if masked else ():
        made = [] if node in found else list(_forms_at(recogniser, node, masked))
        for key, form in made:
            weights.setdefault(key, _Weight()).forms.setdefault(node, set()).add(form)
        arriving = _carried_on(recogniser, node, carried, weights, noted)
        own = {key for key, _ in made}
        carried[node] = {form: path for form, path in arriving.items() if form[0] not in own}
        is_unknown = recogniser.value(node) is None
        carried[node].update({form: (node,) if is_unknown and form[1] != _ITSELF else () for form in made})
    return weights


def _carried_on(
    recogniser: Recogniser,
    node: Node,
    carried: Mapping[Node, dict[_Form, _Path]],
    weights: Mapping[Hashable, _Weight],
    noted: set[Node],
) -> dict[_Form, _Path]:
    """The forms that a node passes on to its users.

    A form is not passed on by a product with x. Such a product is recorded in `weights`, unless it is in `noted`: the
    nodes of layers, and the products that are already recorded.
    """
    passed: dict[_Form, _Path] = {}
    if symbol_of(node) in READS_NO_VALUES or _has_a_body(node):
        return passed
    for item in node.all_input_nodes:
        forms = carried.get(item)
        if not forms:
            continue
        factors = _multiplied(recogniser, node, item)
        for (key, form), path in forms.items():
            if not factors:
                passed[key, form] = (*path, node)
            elif node not in noted:
                for x in factors:
                    weights[key].by_x.setdefault(x, set()).add(form)
                weights[key].reached.update((*path, node))
    is_weight = dims(node) >= 2 or tensor_example(node) is None
    return {form: path for form, path in passed.items() if len(path) <= _FARTHEST and is_weight}


# --- Forms of a weight -----------------------------------------------------------------------------------------------


def _masked_by_any_call(recogniser: Recogniser, node: Node) -> Iterator[Hashable]:
    """The keys of weights that an unknown call combines with a mask (or a tensor of few values) of the same shape."""
    if recogniser.value(node) is not None or dims(node) not in (2, 3):
        return
    values = {item: recogniser.value(item) for item in node.all_input_nodes}
    if any(isinstance(value, (Binary, Levels)) and is_like(node, item) for item, value in values.items()):
        weights = [item for item, value in values.items() if value is None and is_like(node, item)]
        yield from (recogniser.key(item) for item in weights if _is_real(item))


def _masked_in_a_product(recogniser: Recogniser, node: Node) -> Iterator[tuple[Hashable, Hashable, list[Hashable]]]:
    """`(weight, form, other operands)` for weights that are masked inside of a product: `einsum` of x, W and M."""
    operands = node.all_input_nodes
    if recogniser.value(node) is not None or len(operands) < 3 or not recogniser.view.effect(node).multiplies:
        return
    masks = [item for item in operands if isinstance(recogniser.value(item), (Binary, Levels))]
    for weight in (item for item in operands if recogniser.value(item) is None and _is_real(item)):
        for mask in (item for item in masks if is_like(item, weight)):
            others = [recogniser.key(item) for item in operands if item not in (weight, mask) and dims(item) >= 1]
            yield recogniser.key(weight), recogniser.key(mask), others


def _is_real(node: Node) -> bool:
    dtype = dtype_of(node)
    return dtype is not None and dtype.is_floating_point


def _forms_at(recogniser: Recogniser, node: Node, masked: frozenset[Hashable]) -> Iterator[_Form]:
    """The forms that a node holds: a masked weight, the weight itself, or another function of it with its shape."""
    known = list(_known_forms(recogniser, recogniser.value(node)))
    if known:
        yield from known
        return
    if recogniser.key(node) in masked:
        yield recogniser.key(node), _ITSELF
    if not recogniser.view.effect(node).multiplies:
        for item in (_weight_itself(recogniser, item) for item in node.all_input_nodes):
            if recogniser.key(item) in masked and is_like(node, item) and len(node.all_input_nodes) > 1:
                yield recogniser.key(item), recogniser.key(node)


def _known_forms(recogniser: Recogniser, value: Value) -> Iterator[_Form]:
    for item in value.items if isinstance(value, Bundle) else (value,):
        if isinstance(item, Weighted) and item.factor is not None and item.factor.at[0] != item.factor.at[1]:
            yield recogniser.key(item.weight), (item.factor.mask.key, item.factor.at)


def _weight_itself(recogniser: Recogniser, node: Node) -> Node:
    """The weight that a node copies, or repeats for a stack of masks; any other node unchanged."""
    base, _ = repeated(node)
    node = base if isinstance(base, Node) else node
    value = recogniser.value(node)
    return value.weight if isinstance(value, Weighted) and value.factor is None and not value.transposed else node


def _multiplied(recogniser: Recogniser, node: Node, weight: Node) -> list[Hashable]:
    """The keys of the other operands, if a node is a product of x and the weight; otherwise an empty list."""
    is_broadcast = symbol_of(node) == "mul" and dims(node) > dims(weight)  # `x[:, None] * W`, which is summed later
    if not is_broadcast and not recogniser.view.effect(node).multiplies:
        return []
    others = [item for item in node.all_input_nodes if item is not weight and dims(item) >= 1]
    return [recogniser.key(_weight_itself(recogniser, other)) for other in others]


def _miss(recogniser: Recogniser, reached: set[Node], found: set[Node]) -> SiteReport | None:
    """The near miss of a weight. `reached` has the nodes from its forms to products with x, products included.

    The near miss is at the first node that no rule knows, among `reached` and the nodes computed from them. If rules
    know all of these nodes, the near miss is at the last product, or None if nothing uses the products.
    """
    pending, seen = list(reached), reached | set(recogniser.imagined)
    unknown = [node for node in reached if not _is_known(recogniser, node)]
    is_used = False
    while pending:
        node = pending.pop()
        for user in value_users(node) if _is_known(recogniser, node) else ():
            is_used |= user.op == "output" or user in found
            if user in seen or user in found or user.op == "output":
                continue
            seen.add(user)
            pending.append(user)
            if not _is_known(recogniser, user):
                unknown.append(user)
    order = recogniser.view.order
    if unknown:
        unknown = sorted(dict.fromkeys(unknown), key=order.__getitem__)
        return missed_at(unknown[0], _reason(recogniser, unknown))
    reason = "one x is multiplied by two masked forms of one weight, but no gate is multiplied by a value"
    return missed_at(max(reached, key=order.__getitem__), reason) if is_used else None


_BOTH = ((0, 1), (1, 0))  # the values of a mask and of its complement at M = 0 and M = 1


def _given_away(weight: _Weight) -> SiteReport | None:
    """A miss for a masked weight that leaves the graph, if the weight under the complementary mask is used too.

    A weight leaves the graph as an output (before a graph break), or as an input of the body of a higher-order operator
    such as `checkpoint`.
    """
    leaving = [node for node in weight.forms if any(user.op == "output" or _has_a_body(user) for user in node.users)]
    gone = {key for node in leaving for key in weight.forms[node] if isinstance(key, tuple)}
    read = gone.union(*weight.by_x.values())
    if not any(at in _BOTH and (mask, at[::-1]) in read for mask, at in gone):
        return None
    reason = (
        "one weight is masked by a mask and by its complement, and another graph reads one or both of them (after a "
        "graph break, or in the body of a higher-order operator such as checkpoint); the pass sees one graph at a "
        "time, so mask the weight where x is multiplied by it"
    )
    return missed_at(leaving[-1], reason)


def _has_a_body(node: Node) -> bool:
    """True if a node calls a higher-order operator, whose body is a graph of its own."""
    return any(submodule(node.graph, item) is not None for item in node.all_input_nodes)


def _is_known(recogniser: Recogniser, node: Node) -> bool:
    value = recogniser.value(node)
    if node.target is overwritten:  # this node holds a tensor after a write; the report names the node that writes
        return True
    return (value is not None and not isinstance(value, Product)) or symbol_of(node) in ("split", "unbind")


def _reason(recogniser: Recogniser, nodes: Sequence[Node]) -> str:
    reads = [_reading(recogniser, node) for node in nodes[:_MOST_NAMED]]
    count = len(nodes) - len(reads)
    more = f", and {count} more" if count else ""
    return (
        f"one x is multiplied by two masked forms of one weight, but {', '.join(reads)}{more} in a way that the pass "
        "does not know; write act(F.linear(x, W * M)) * F.linear(x, W * (1 - M))"
    )


_MOST_NAMED = 4  # the most nodes that a reason names


def _reading(recogniser: Recogniser, node: Node) -> str:
    """A phrase of the reason: what an unknown node reads, and by which operation."""
    operation = symbol_of(node) or str(getattr(node.target, "__name__", node.target))
    values = [recogniser.value(item) for item in node.all_input_nodes]
    what = "a masked weight"
    if any(projection_of(value) is not None for value in values):
        what = "a product with a masked weight"
    if any(isinstance(value, Gated) for value in values):
        what = "a gated product"
    functions = [str(value.formula) for value in values if isinstance(value, Activated)]
    if len(functions) > 1:
        what = f"{' and '.join(functions)} of the products g, one of which must be g itself (the value),"
    dtype = dtype_of(node)
    kind = f" ({str(dtype).removeprefix('torch.')})" if dtype is not None else ""
    return f"`{node.name}`{kind} reads {what} by `{node.name if node.target is opaque else operation}`"
