"""Programs that multiply one input by two masked forms of one weight, and in which no layer was found.

A site needs a gated product that the rules know, so nothing else tells a user why such a program was left alone. The
report names the first node that reads a masked weight, or something made of it, in a way that no rule knows.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

from torch.fx import Graph, Node

from .recognise import Recogniser
from .shapes import dims, dtype_of, equal_sizes, repeated, tensor_example
from .symbols import as_call, symbol_of, value_users
from .values import Activated, Bundle, Gated, Product, Value, Weighted, projection_of

_PRODUCTS = frozenset({"linear", "inner", "matmul", "addmm", "einsum"})
_OTHER_PRODUCTS = ("tensordot", "mm", "bilinear", "multi_dot", "chain_matmul", "mv", "conv")
"""Parts of the names of functions that multiply matrices, and that the rules do not read."""

_ELEMENTWISE = frozenset({"mul", "div", "add", "sub", "rsub", "where", "masked_fill", "index_put", "pow"})


@dataclass(frozen=True)
class NearMiss:
    """Where it happens, and why nothing was fused."""

    node: Node
    reason: str


def find_near_misses(graph: Graph, recogniser: Recogniser, found: set[Node], reported: set[Hashable]) -> list[NearMiss]:
    """A near miss for each weight of which one x is multiplied by two forms, one of them masked.

    Args:
        graph: the graph.
        recogniser: what is known of it.
        found: the nodes of its layers, which do not count.
        reported: the keys of weights of which the report speaks already.
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
        miss = _miss(recogniser, reached, found) if any(len(keys) > 1 for keys in by_x.values()) else None
        if miss is not None:
            misses.append(miss)
    return misses


# --- Forms of a weight -----------------------------------------------------------------------------------------------

_Forms = dict[Hashable, dict[Node, set[Hashable]]]
"""For the key of a weight, the nodes that hold it in some form, and what the forms are."""


def _forms_of_weights(graph: Graph, recogniser: Recogniser, found: set[Node]) -> _Forms:
    forms: _Forms = {}
    for node in graph.nodes if recogniser.masked_weights else ():
        if node in found:
            continue
        for weight, form in _forms_at(recogniser, node):
            forms.setdefault(weight, {}).setdefault(node, set()).add(form)
    return forms


def _forms_at(recogniser: Recogniser, node: Node) -> Iterator[tuple[Hashable, Hashable]]:
    """`(weight, form)`: of masked weights, of a weight itself, and of what is made of it element by element."""
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
    """A weight of which the node is a copy, or which it repeats for a stack of masks."""
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


# --- What is made of them --------------------------------------------------------------------------------------------


_Path = tuple[Node, ...]


def _products_of(recogniser: Recogniser, source: Node, forms: Collection[Node]) -> Iterator[tuple[_Path, Hashable]]:
    """The nodes from a form of a weight, which is left out, to each product that reads it; and the key of the other
    factor, x.
    """
    pending: list[_Path] = [()]
    seen = {source}
    while pending:
        path = pending.pop()
        node = path[-1] if path else source
        for user in node.users:
            is_another_form = user in forms and symbol_of(user) in _ELEMENTWISE
            if user in seen or is_another_form or user.op == "output" or dims(user) < 2:
                continue
            seen.add(user)
            factors = _multiplied(recogniser, user, node)
            yield from (((*path, user), x) for x in factors)
            if not factors:
                pending.append((*path, user))


def _multiplied(recogniser: Recogniser, node: Node, weight: Node) -> list[Hashable]:
    """The keys of what a node multiplies with a weight (and adds to the product); none where it is no product."""
    name = str(getattr(node.target, "__name__", node.target))
    symbol = symbol_of(node)
    is_broadcast = symbol == "mul" and dims(node) > dims(weight)  # to be summed
    if not is_broadcast and symbol not in _PRODUCTS and not any(part in name for part in _OTHER_PRODUCTS):
        return []
    others = [item for item in node.all_input_nodes if item is not weight and dims(item) >= 1]
    return [recogniser.key(_weight_itself(recogniser, other)) for other in others]


def _miss(recogniser: Recogniser, reached: set[Node], found: set[Node]) -> NearMiss | None:
    """The first node that is made of the products, or before them of the masked weights, and is not known.

    None for products that nothing uses in the end.
    """
    pending, seen, strays = list(reached), set(reached), [node for node in reached if not _is_known(recogniser, node)]
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
                strays.append(user)
    order = recogniser.effects.order
    if strays:
        stray = min(strays, key=order.__getitem__)
        return NearMiss(stray, _reason(recogniser, stray))
    reason = "one x is multiplied by two masked forms of one weight, but no gate is multiplied by a value"
    return NearMiss(max(reached, key=order.__getitem__), reason) if is_used else None


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
