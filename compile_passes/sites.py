"""Sites: the candidates for fusing, which are maximal sums of gated terms, and the nodes that spell them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch.fx import Graph, Node

from .recognise import Recogniser
from .shapes import dtype_of
from .symbols import as_call, symbol_of, value_users
from .values import Bundle, Gated, Projection, Term


class Refusal(Exception):  # noqa: N818 (a result, not an error)
    """The reason why a site is not fused, written for the user."""


@dataclass(frozen=True)
class Site:
    """A candidate: a node whose value is a sum of gated terms."""

    root: Node
    terms: tuple[Term, ...]
    rest: Node | None = None
    """A residual that the root adds to the terms."""

    @property
    def projections(self) -> Iterator[Projection]:
        for term in self.terms:
            yield term.gate
            yield term.value


def find_sites(graph: Graph, recogniser: Recogniser) -> list[Site]:
    """The maximal sums of gated terms, in the order of the graph."""
    if not recogniser.masked_weights:
        return []
    roots: dict[Node, Site] = {}
    for node in graph.nodes:
        value = recogniser.value(node)
        if not isinstance(value, Gated) or all(_continues(recogniser, user, node) for user in value_users(node)):
            continue
        if value.rest is not None and value.whole is not None:
            continue  # a node of the graph holds the sum of the terms alone, and is the site
        root = node if value.rest is not None else _without_cast(recogniser, node)
        roots.setdefault(root, Site(root, value.terms, value.rest))
    return list(roots.values())


def _without_cast(recogniser: Recogniser, node: Node) -> Node:
    """The sum itself, where `node` is a copy of it or a cast of it from the layer's dtype to another one."""
    call = as_call(node)
    while call is not None and call.symbol in ("to", "alias"):
        (source,) = call.args
        value = recogniser.value(source)
        if not isinstance(value, Gated) or dtype_of(source) != value.terms[0].gate.dtype:
            break
        node, call = source, as_call(source)
    return node


def _continues(recogniser: Recogniser, node: Node, part: Node) -> bool:
    """Whether `node` makes the sum `part` longer, or is a stack of terms that is summed later."""
    value = recogniser.value(node)
    if isinstance(value, Bundle):
        return bool(node.users) and all(_continues(recogniser, user, node) for user in node.users)
    if isinstance(value, Gated) and value.rest is not None and value.whole is not None:
        users_add_terms = bool(node.users) and all(_adds_terms(recogniser, user, node) for user in node.users)
        return part is value.whole and users_add_terms
    return isinstance(value, Gated) and part is not value.rest


def _adds_terms(recogniser: Recogniser, node: Node, part: Node) -> bool:
    """Whether `node` adds more terms to `part`, which is a sum of terms and a residual."""
    value = recogniser.value(node)
    return isinstance(value, Gated) and value.rest is not part and value.whole is None


def interior(recogniser: Recogniser, site: Site) -> tuple[Node, ...]:
    """The nodes from the leaves of a site (x, weight, mask_weights) to its root, included, in the graph's order."""
    leaves: set[Any] = {node for one in site.projections for node in (one.x, one.weight, one.offs)}
    leaves |= {term.mask_weight.node for term in site.terms if term.mask_weight is not None} | {site.rest}
    keys = {recogniser.key(node) for node in leaves if isinstance(node, Node)}
    seen: set[Node] = set()
    stack = [site.root]
    while stack:
        node = stack.pop()
        if node in seen or as_call(node) is None or recogniser.key(node) in keys:
            continue
        # A rule knows the node or has looked through it, or it is a tuple or the like.
        is_known = recogniser.value(node) is not None or node in recogniser.looked_through
        if not is_known and symbol_of(node) not in _IN_BETWEEN:
            continue
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return tuple(sorted(seen, key=recogniser.view.order.__getitem__))


_IN_BETWEEN = frozenset({"unbind", "split", "expand", "repeat", "unsqueeze", "getitem", "select", "empty", "size"})
"""Symbols of nodes that may belong to a spelling although they have no value."""
