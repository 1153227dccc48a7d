"""Near misses: one input is multiplied by two masked forms of one weight, but no layer was found.

A site needs a gated product that the rules know, so without this module the user would not learn why such a program was
not fused. The report names the first node that reads a masked weight, or a result of it, in a way that no rule knows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import dataclass

from torch.fx import Graph, Node

from .recognise import Recogniser
from .shapes import dims, dtype_of, equal_sizes, repeated, submodule, tensor_example
from .symbols import as_call, symbol_of, value_users
from .values import Activated, Bundle, Gated, Product, Value, Weighted, projection_of

_PRODUCTS = frozenset({"linear", "inner", "matmul", "addmm", "einsum"})
_OTHER_PRODUCTS = ("tensordot", "mm", "bilinear", "multi_dot", "chain_matmul", "mv", "conv")
"""Parts of the names of functions that multiply matrices but have no rule."""

_ELEMENTWISE = frozenset({"mul", "div", "add", "sub", "rsub", "where", "masked_fill", "index_put", "pow"})


@dataclass(frozen=True)
class NearMiss:
    """The node that the rules do not know, and the reason for the user."""

    node: Node
    reason: str


def find_near_misses(graph: Graph, recogniser: Recogniser, found: set[Node], reported: set[Hashable]) -> list[NearMiss]:
    """One near miss for each weight that multiplies one x in two forms, at least one of them masked.

    Args:
        graph: the graph.
        recogniser: the values of its nodes.
        found: the nodes of the layers that were found, which do not count.
        reported: the keys of weights that the report mentions already.
    """
    misses = []
    for weight, forms in _forms_of_weights(graph, recogniser, found).items():
        if weight in reported:
            continue
        by_x: dict[Hashable, set[Hashable]] = {}
        reached: set[Node] = set()
        for node, keys in forms.items():
            for path, x in _products_of(recogniser, node, forms.keys()):
                if path[-1] not in found:
                    by_x.setdefault(x, set()).update(keys)
                    reached.update(path)
        is_multiplied = any(len(keys) > 1 for keys in by_x.values())
        miss = _miss(recogniser, reached, found) if is_multiplied else _given_away(forms)
        if miss is not None:
            misses.append(miss)
    return misses


# --- Forms of a weight -----------------------------------------------------------------------------------------------

_Forms = dict[Hashable, dict[Node, set[Hashable]]]
"""The nodes that hold a weight in some form, and the keys of these forms, by the key of the weight."""


def _forms_of_weights(graph: Graph, recogniser: Recogniser, found: set[Node]) -> _Forms:
    forms: _Forms = {}
    for node in graph.nodes if recogniser.masked_weights else ():
        if node in found:
            continue
        for weight, form in _forms_at(recogniser, node):
            forms.setdefault(weight, {}).setdefault(node, set()).add(form)
    return forms


def _forms_at(recogniser: Recogniser, node: Node) -> Iterator[tuple[Hashable, Hashable]]:
    """`(weight, form)` for a masked weight, for the weight itself, and for elementwise functions of it."""
    known = list(_known_forms(recogniser, recogniser.value(node)))
    if known:
        yield from known
        return
    if recogniser.key(node) in recogniser.masked_weights:
        yield recogniser.key(node), "itself"
    call = as_call(node)
    name = str(getattr(node.target, "__name__", node.target)).strip("_")
    if (call.symbol if call is not None else name) in _ELEMENTWISE:
        for item in (_weight_itself(recogniser, item) for item in node.all_input_nodes):
            if recogniser.key(item) in recogniser.masked_weights and _is_like(node, item):
                yield recogniser.key(item), recogniser.key(node)


def _known_forms(recogniser: Recogniser, value: Value) -> Iterator[tuple[Hashable, Hashable]]:
    if isinstance(value, Bundle):
        for item in value.items:
            yield from _known_forms(recogniser, item)
    elif isinstance(value, Weighted) and value.factor is not None and value.factor.at[0] != value.factor.at[1]:
        yield recogniser.key(value.weight), (value.factor.mask.key, value.factor.at)


def _weight_itself(recogniser: Recogniser, node: Node) -> Node:
    """The weight that a node copies, or repeats for a stack of masks; otherwise the node."""
    base, _ = repeated(node)
    node = base if isinstance(base, Node) else node
    value = recogniser.value(node)
    return value.weight if isinstance(value, Weighted) and value.factor is None and not value.transposed else node


def _is_like(node: Node, weight: Node) -> bool:
    """Whether a node has the shape of a weight, or of a stack of them."""
    made, held = tensor_example(node), tensor_example(weight)
    if made is None or held is None or made.dim() not in (2, 3):
        return False
    return equal_sizes(made.shape[-2:], held.shape[-2:])


# --- Products of the forms -------------------------------------------------------------------------------------------


_Path = tuple[Node, ...]


def _products_of(recogniser: Recogniser, source: Node, forms: Collection[Node]) -> Iterator[tuple[_Path, Hashable]]:
    """Yield the path of nodes to each product that reads a form of a weight, and the key of the other factor, x.

    The path ends with the product and does not contain the form itself.
    """
    pending: list[_Path] = [()]
    seen = {source}
    while pending:
        path = pending.pop()
        node = path[-1] if path else source
        for user in value_users(node):
            is_another_form = user in forms and symbol_of(user) in _ELEMENTWISE
            if user in seen or is_another_form or user.op == "output":
                continue
            factors = _multiplied(recogniser, user, node)
            if dims(user) < 2 and not factors:
                continue
            seen.add(user)
            yield from (((*path, user), x) for x in factors)
            if not factors:
                pending.append((*path, user))


def _multiplied(recogniser: Recogniser, node: Node, weight: Node) -> list[Hashable]:
    """The keys of the other operands, if a node multiplies the weight by x; empty if it is no such product."""
    name = str(getattr(node.target, "__name__", node.target))
    symbol = symbol_of(node)
    is_broadcast = symbol == "mul" and dims(node) > dims(weight)  # a broadcast product that is summed later
    if not is_broadcast and symbol not in _PRODUCTS and not any(part in name for part in _OTHER_PRODUCTS):
        return []
    others = [item for item in node.all_input_nodes if item is not weight and dims(item) >= 1]
    return [recogniser.key(_weight_itself(recogniser, other)) for other in others]


def _miss(recogniser: Recogniser, reached: set[Node], found: set[Node]) -> NearMiss | None:
    """The first node on the paths to the products, or among their users, that no rule knows.

    None if nothing uses the products.
    """
    pending, seen = list(reached), set(reached)
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
        first = min(unknown, key=order.__getitem__)
        return NearMiss(first, _reason(recogniser, first))
    reason = "one x is multiplied by two masked forms of one weight, but no gate is multiplied by a value"
    return NearMiss(max(reached, key=order.__getitem__), reason) if is_used else None


_BOTH = ((0, 1), (1, 0))
"""The values of a mask and of its complement at M = 0 and M = 1."""


def _given_away(forms: Mapping[Node, set[Hashable]]) -> NearMiss | None:
    """The node that takes a weight under a mask and under its complement out of the graph; None if there is none.

    That is the output, before a graph break, or a higher-order operator, as for the body of `checkpoint`.
    """
    taken: dict[Node, set[Hashable]] = {}
    for node, keys in forms.items():
        for user in node.users:
            if user.op == "output" or any(submodule(user.graph, item) is not None for item in user.all_input_nodes):
                taken.setdefault(user, set()).update(keys)
    for user, keys in taken.items():
        masks, complements = ({key[0] for key in keys if isinstance(key, tuple) and key[1] == at} for at in _BOTH)
        if masks & complements:
            *_, node = (node for node in forms if user in node.users)
            reason = (
                "one weight is masked by a mask and by its complement, and another graph reads both (after a graph "
                "break, or in the body of a higher-order operator such as checkpoint); the pass sees one graph at a "
                "time, so mask the weight where x is multiplied by it"
            )
            return NearMiss(node, reason)
    return None


def _is_known(recogniser: Recogniser, node: Node) -> bool:
    value = recogniser.value(node)
    return (value is not None and not isinstance(value, Product)) or symbol_of(node) in ("split", "unbind")


def _reason(recogniser: Recogniser, node: Node) -> str:
    call = as_call(node)
    operation = call.symbol if call is not None else str(getattr(node.target, "__name__", node.target))
    values = [recogniser.value(item) for item in node.all_input_nodes]
    what = "a masked weight"
    if any(projection_of(value) is not None for value in values):
        what = "a product with a masked weight"
    if any(isinstance(value, Gated) for value in values):
        what = "a gated product"
    functions = [str(value.formula) for value in values if isinstance(value, Activated)]
    if len(functions) > 1:
        what = f"{' and '.join(functions)} of the products g, of which one must be g itself (the value),"
    dtype = dtype_of(node)
    kind = f" ({str(dtype).removeprefix('torch.')})" if dtype is not None else ""
    return (
        f"one x is multiplied by two masked forms of one weight, but `{node.name}`{kind} reads {what} by `{operation}` "
        "in a way that the pass does not know; write act(F.linear(x, W * M)) * F.linear(x, W * (1 - M))"
    )
