"""Sites: the candidates for fusing, which are maximal sums of gated terms, and the nodes that spell them."""

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
    """The reason why a site is not fused, written for the user."""


@dataclass(frozen=True)
class Site:
    """A candidate: a node whose value is a sum of gated terms, perhaps plus a residual."""

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
    """The smaller sums that a site adds, which may be fused if the whole is refused; none if it has too many terms."""
    if len(site.terms) > MAX_MASKS:
        return []
    operands = [site.root]
    for node in operands:
        if node is site.root or isinstance(recogniser.value(node), Bundle):
            operands += node.all_input_nodes
    return _sites(recogniser, [n for n in operands[1:] if isinstance(recogniser.value(n), Gated)])


def _sites(recogniser: Recogniser, sums: list[Node]) -> list[Site]:
    """Sums as sites: the nodes that first hold all of the terms, before the program scales, casts or copies the sum.

    If the sum is computed in another dtype than the layer and cast at the end, the site is the cast.
    """
    sites: dict[Node, Site] = {}
    for node in sums:
        chain = [node]
        while len(inner := [i for i in chain[-1].all_input_nodes if _has_the_terms(recogniser, i, chain[-1])]) == 1:
            chain += inner
        dtype = _sum_at(recogniser, node).terms[0].gate.dtype
        root = next((one for one in reversed(chain) if dtype_of(one) == dtype), chain[-1])
        for one in chain[: chain.index(root)][::-1]:  # `0 + y`
            if symbol_of(one) != "add" or recogniser.value(one) != recogniser.value(root) or dtype_of(one) != dtype:
                break
            root = one
        sites.setdefault(root, Site(root, _sum_at(recogniser, root)))
    return list(sites.values())


def _sum_at(recogniser: Recogniser, node: Node) -> Gated:
    value = recogniser.value(node)
    assert isinstance(value, Gated), "a site is a sum of gated terms"
    return value


def _has_the_terms(recogniser: Recogniser, node: Node, longer: Node) -> bool:
    """Whether a node holds the terms of `longer`, each up to a number, and no residual that `longer` lacks."""
    one, other = recogniser.value(node), recogniser.value(longer)
    if not isinstance(one, Gated) or not isinstance(other, Gated) or one.rest not in (None, other.rest):
        return False
    unscaled = [[replace(t, formula=formulas.unscaled(t.formula)[0]) for t in value.terms] for value in (one, other)]
    return unscaled[0] == unscaled[1]


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
    leaves |= {term.mask_weight.node for term in site.terms if term.mask_weight is not None} | {site.value.rest}
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
