"""Programs that multiply one input by two masked forms of one weight, and in which no layer was found.

Nothing else tells a user why such a program was left alone: a site needs a gated product that the rules know. The report
names the first node that reads a masked weight, or something made of it, in a way that no rule knows.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from .recognise import Recogniser
from .rules.gates import value_users
from .rules.projections import projection_of
from .shapes import dtype_of
from .symbols import as_call, symbol_of
from .values import Binary, Bundle, Gated, Product, Value, Weighted


@dataclass(frozen=True)
class NearMiss:
    """Where it happens, and why nothing was fused."""

    node: Node
    reason: str


def find_near_misses(graph: Graph, recogniser: Recogniser, found: set[Node]) -> list[NearMiss]:
    """A near miss for each weight of which two masked forms are read outside the layers that were `found`."""
    forms: dict[Hashable, dict[Hashable, Node]] = {}
    for node in graph.nodes:
        if node in found or not node.users:
            continue
        for weight, form in _masked_forms(recogniser, recogniser.value(node)):
            forms.setdefault(weight, {}).setdefault(form, node)
    misses = []
    for by_form in forms.values():
        stray = _first_stray(recogniser, list(by_form.values()), found) if len(by_form) > 1 else None
        if stray is not None:
            misses.append(NearMiss(stray, _reason(recogniser, stray)))
    return misses


def _masked_forms(recogniser: Recogniser, value: Value) -> Iterator[tuple[Hashable, Hashable]]:
    """`(weight, form)` of the masked weights at a node."""
    if isinstance(value, Bundle):
        for item in value.items:
            yield from _masked_forms(recogniser, item)
    elif isinstance(value, Weighted) and value.factor is not None and _is_a_weight_mask(value.factor):
        yield recogniser.key(value.weight), (value.factor.mask.key, value.factor.at)


def _is_a_weight_mask(factor: Binary) -> bool:
    return len(factor.mask.shape) == 2 and 1 not in factor.mask.shape


def _first_stray(recogniser: Recogniser, sources: Sequence[Node], found: set[Node]) -> Node | None:
    """The first node that reads what is made of masked weights and of which nothing is known, if it is a product or
    comes after one.
    """
    pending, seen, strays = list(sources), set(sources), []
    while pending:
        node = pending.pop()
        for user in value_users(node):
            if user in seen or user in found or user.op == "output":
                continue
            seen.add(user)
            if _is_known(recogniser, user):
                pending.append(user)
            else:
                strays.append(user)
    order = recogniser.effects.order
    reads_x = [stray for stray in strays if len(stray.all_input_nodes) > 1 or _is_of_a_product(recogniser, stray)]
    return min(reads_x, key=order.__getitem__, default=None)


def _is_known(recogniser: Recogniser, node: Node) -> bool:
    value = recogniser.value(node)
    return (value is not None and not isinstance(value, Product)) or symbol_of(node) in ("chunk", "split", "unbind")


def _is_of_a_product(recogniser: Recogniser, node: Node) -> bool:
    return any(projection_of(recogniser.value(item)) is not None for item in node.all_input_nodes)


def _reason(recogniser: Recogniser, node: Node) -> str:
    call = as_call(node)
    operation = call.symbol if call is not None else str(getattr(node.target, "__name__", node.target))
    what = "a product with a masked weight" if _is_of_a_product(recogniser, node) else "a masked weight"
    if any(isinstance(recogniser.value(item), Gated) for item in node.all_input_nodes):
        what = "a gated product"
    dtype = dtype_of(node)
    kind = f" ({str(dtype).removeprefix('torch.')})" if dtype is not None else ""
    return (
        f"one weight is multiplied by two masks, but `{node.name}`{kind} reads {what} by `{operation}` in a way that the "
        "pass does not know; write act(F.linear(x, W * M)) * F.linear(x, W * (1 - M))"
    )
