"""Finds sites: the candidates for fusing. A site is a maximal sum of gated terms, with the nodes that compute it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch.fx import Graph, Node

from mglu_ops.masks import MAX_MASKS

from . import formulas
from .recognise import Recogniser
from .shapes import dtype_of
from .symbols import as_call, symbol_of, value_users
from .values import Bundle, Gated, Projection, Term


class Refusal(Exception):  # noqa: N818 (a result, not an error)
    """Raised when a site cannot be fused, with the reason as the user reads it."""


@dataclass(frozen=True)
class Site:
    """A candidate for fusing: the node `root`, whose value is a sum of gated terms, perhaps plus a residual."""

    root: Node
    value: Gated

    @property
    def terms(self) -> tuple[Term, ...]:
        return self.value.terms

    @property
    def projections(self) -> Iterator[Projection]:
        for term in self.terms:
            yield term.gate
            yield term.value


def find_sites(graph: Graph, recogniser: Recogniser) -> list[Site]:
    """The maximal sums of gated terms, in the order of the graph."""
    if not recogniser.masked_weights:
        return []
    sums = [node for node in graph.nodes if isinstance(recogniser.value(node), Gated)]
    return _sites(recogniser, [n for n in sums if not all(_continues(recogniser, u, n) for u in value_users(n))])


def parts_of(recogniser: Recogniser, site: Site) -> list[Site]:
    """The smaller sums that a site adds, which may be fused if the site is refused.

    The list is empty for a site with more than `MAX_MASKS` terms.
    """
    if len(site.terms) > MAX_MASKS:
        return []
    operands = [site.root]
    for node in operands:
        if node is site.root or isinstance(recogniser.value(node), Bundle):
            operands += node.all_input_nodes
    return _sites(recogniser, [n for n in operands[1:] if isinstance(recogniser.value(n), Gated)])


def _sites(recogniser: Recogniser, sums: list[Node]) -> list[Site]:
    """The site of each sum: the first node that holds all of its terms, before the program scales or copies the sum.

    If the program computes the sum in a dtype other than the layer's and then casts it, the site is at the cast.
    """
    sites: dict[Node, Site] = {}
    for node in sums:
        chain = [node]
        while len(inner := [i for i in chain[-1].all_input_nodes if _has_the_terms(recogniser, i, chain[-1])]) == 1:
            chain += inner
        dtype = _sum_at(recogniser, node).terms[0].gate.dtype
        root = next((part for part in reversed(chain) if dtype_of(part) == dtype), chain[-1])
        for part in chain[: chain.index(root)][::-1]:  # include additions that keep the value, such as `0 + y`
            if symbol_of(part) != "add" or recogniser.value(part) != recogniser.value(root) or dtype_of(part) != dtype:
                break
            root = part
        sites.setdefault(root, Site(root, _sum_at(recogniser, root)))
    return list(sites.values())


def _sum_at(recogniser: Recogniser, node: Node) -> Gated:
    value = recogniser.value(node)
    assert isinstance(value, Gated), "a site is a sum of gated terms"
    return value


def _has_the_terms(recogniser: Recogniser, node: Node, longer: Node) -> bool:
    """True if a node holds the terms of `longer`, each up to a factor, and no residual that `longer` lacks."""
    a, b = recogniser.value(node), recogniser.value(longer)
    if not isinstance(a, Gated) or not isinstance(b, Gated) or a.rest not in (None, b.rest):
        return False
    unscaled = [[replace(t, formula=formulas.unscaled(t.formula)[0]) for t in value.terms] for value in (a, b)]
    return unscaled[0] == unscaled[1]


def _continues(recogniser: Recogniser, node: Node, part: Node) -> bool:
    """True if `node` adds to the sum `part`, or is a stack of terms that is summed later."""
    value = recogniser.value(node)
    if isinstance(value, Bundle):
        return bool(node.users) and all(_continues(recogniser, user, node) for user in node.users)
    if isinstance(value, Gated) and value.rest is not None and value.whole is not None:
        users_add_terms = bool(node.users) and all(_adds_terms(recogniser, user, node) for user in node.users)
        return part is value.whole and users_add_terms
    return isinstance(value, Gated) and part is not value.rest


def _adds_terms(recogniser: Recogniser, node: Node, part: Node) -> bool:
    """True if `node` adds more terms to `part`, which is a sum of terms and a residual."""
    value = recogniser.value(node)
    return isinstance(value, Gated) and value.rest is not part and value.whole is None


def interior(recogniser: Recogniser, site: Site) -> tuple[Node, ...]:
    """The nodes between the operands of a site (x, weight, mask weights) and its root, in the order of the graph.

    The root is included, and the operands are not.
    """
    leaves: set[Any] = {node for p in site.projections for node in (p.x, p.weight, p.offs)}
    leaves |= {term.mask_weight.node for term in site.terms if term.mask_weight is not None} | {site.value.rest}
    keys = {recogniser.key(node) for node in leaves if isinstance(node, Node)}
    seen: set[Node] = set()
    stack = [site.root]
    while stack:
        node = stack.pop()
        if node in seen or as_call(node) is None or recogniser.key(node) in keys:
            continue
        # A node belongs to the site if a rule knows it or has looked through it, or if its symbol is in `_IN_BETWEEN`.
        is_known = recogniser.value(node) is not None or node in recogniser.looked_through
        if not is_known and symbol_of(node) not in _IN_BETWEEN:
            continue
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return tuple(sorted(seen, key=recogniser.view.order.__getitem__))


_IN_BETWEEN = frozenset({"unbind", "split", "expand", "repeat", "unsqueeze", "getitem", "select", "empty", "size"})
"""Symbols of nodes that may belong to a site although they have no value."""
