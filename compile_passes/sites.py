"""The layers of a graph, and the checks that decide whether one may be fused.

The graph before autograd is neither functional nor normalised, so that equal expressions need not hold equal values.
A site is fused only if all of this holds, each refusal having its reason in words:

1. *One x, one weight.* All terms read the same x and the same weight: the same node, or equal expressions, which are
   calls of torch's own functions that draw no random numbers, with equal arguments, dtypes and gradients, of tensors
   that the graph mutates nowhere (`Recogniser.key`). A weight may be any matrix; what it is made of does not matter.
2. *Complementary binary masks.* Gate factor and value factor, as functions of one binary tensor, are M and 1 - M at
   both of its values. Torch itself computes them there, in the dtypes of the graph and with all arguments of each call
   (`pointwise`). The tensor is binary by dtype, as a comparison, by what it is made of (`round(sigmoid(l))`, the lowest
   bit of an integer), as the straight-through form of one of these, as the result of an `autograd.Function` whose
   forward gives one of these and writes to nothing, or by its values where they are constants of the graph; any other
   real tensor only under `assume_binary`, where `mglu::pack_masks` checks it at run time. Of a stack of masks, gate and
   value take the same one: each value of a bundle is known by its place, and what moves it elsewhere is not known.
3. *The same gradient.* Where the mask carries one, both factors have slope +1 and -1 in the same tensor, whose
   gradient the operator returns; autograd then goes on from that tensor as it did before. Slopes are autograd's own,
   and 0 where tracing saw no gradient being recorded, as under `no_grad`. (Two straight-through masks of the same
   logits are the same tensor, for a sum of gradients passes through each as through one. Two calls of an
   `autograd.Function` are not: its backward need not be linear.)
4. *The same shapes and dtype.* Masks have the weight's shape (no broadcast); the result has the dtype of the
   projections, and nothing in between a narrower one. Operands of another dtype (autocast) are cast as the
   projections cast them.
5. *The same activation, and the same derivative.* What the gate goes through has the normal form of one of the
   operator's activations times a number (`formulas`), to six digits of its constants, to eleven in float64. Equal
   formulas have equal derivatives, also at kinks: a relu that is written `clamp(min=0)`, whose derivative at 0 is 1, is
   fused only where no gradient is recorded.
6. *Weights of terms.* A number that all terms share multiplies the result. Other numbers, learned numbers and weights
   a token become the operator's route weights, which have gradients of their own.
7. *No interference.* Between the first node that the layer reads and its result, nothing outside it mutates what it
   reads or computes, by storage, and an in-place node inside it overwrites only what was made inside it and is read
   through that node alone afterwards. All that the operator computes was computed under one grad mode and autocast.
8. *Nothing computed is asked for elsewhere.* Gates, values and products have no other users (masks may), but for
   such as look at their shape alone.
9. *No functorch transform is recorded in the graph.*

All of this rests on how a graph is read:

- *Arguments.* A call is read only if all its arguments fit the signature of its spelling (`symbols`). What a rule does
  not know, the table does not let through.
- *Storages.* A constant of an exported program is what no node writes to by its storage, before or after (`memory`).
- *Guards and exceptions.* No question adds a guard to a symbolic size; one that would raises an error. An error in a
  rule, or while new nodes are made, leaves the graph as it was (`fusion.fuse_graph`).

Three things are taken as given. Logits are numbers: NaN counts as not positive, in `L > 0` and in `L <= 0`. A number
that is not finite may differ: the operator leaves out the elements of the weight that a mask leaves out, where eager
multiplies them by 0 and gets NaN, or the other way round. And a sum may be rounded in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, Node

from mglu_ops.activations import ACTIVATIONS

from . import formulas
from .formulas import GRADIENT_AT_0, Scaled
from .mutation import Effects, is_random, storages
from .recognise import Recogniser
from .report import line
from .shapes import equal_sizes, example, range_of, requires_grad, slice_of, tensor_example
from .symbols import as_call, value_users
from .values import Activated, Bundle, Gated, Mask, Product, Projection, Route, Term, Weighted

MAX_MASKS = 16
_FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Refusal(Exception):  # noqa: N818 (a result, not an error)
    """Why a site is not fused, in words for the user."""


@dataclass(frozen=True)
class Site:
    """A layer as the graph spells it: a node whose value is a sum of gated terms."""

    root: Node
    terms: tuple[Term, ...]
    rest: Node | None = None
    """What the root adds to the layer's result."""

    @property
    def projections(self) -> Iterator[Projection]:
        for term in self.terms:
            yield term.gate
            yield term.value


@dataclass(frozen=True)
class Layer:
    """A site that may be fused, with all that the rewrite needs."""

    site: Site
    x: Node
    weight: Node
    transposed: bool
    masks: tuple[tuple[Mask, bool], ...]
    """Each mask, and whether the gate takes its complement."""
    activation: str
    dtype: torch.dtype
    trains_masks: bool
    routes: tuple[Route | float, ...]
    """A weight of each term, or none at all."""
    scale: float
    """What the sum is multiplied with."""
    interior: tuple[Node, ...]
    """The nodes of the spelling, in the order of the graph: what the fused operator replaces."""


def find_sites(graph: Graph, recogniser: Recogniser) -> list[Site]:
    """The maximal sums of gated terms of a graph, in its order."""
    if not recogniser.masked_weights:
        return []
    roots: dict[Node, Site] = {}
    for node in graph.nodes:
        value = recogniser.value(node)
        if not isinstance(value, Gated) or all(_continues(recogniser, user, node) for user in value_users(node)):
            continue
        if value.rest is not None and value.whole is not None:
            continue  # its terms are a sum of their own, which is met as such
        root = node if value.rest is not None else _without_cast(recogniser, node)
        roots.setdefault(root, Site(root, value.terms, value.rest))
    return list(roots.values())


def _without_cast(recogniser: Recogniser, node: Node) -> Node:
    """The sum itself, where `node` is a copy of it or casts it from the layer's dtype to another."""
    call = as_call(node)
    while call is not None and call.symbol in ("to", "alias"):
        source = call.args[0]
        value, found = recogniser.value(source), tensor_example(source)
        if not isinstance(value, Gated) or found is None or found.dtype != value.terms[0].gate.dtype:
            break
        node, call = source, as_call(source)
    return node


def _continues(recogniser: Recogniser, node: Node, part: Node) -> bool:
    """Whether `node` carries the site on of which `part` is one: a longer sum of it, or a stack that is summed."""
    value = recogniser.value(node)
    if isinstance(value, Bundle):
        return bool(node.users) and all(_continues(recogniser, user, node) for user in node.users)
    if isinstance(value, Gated) and value.rest is not None and value.whole is not None:
        return part is value.whole and bool(node.users) and all(_goes_on(recogniser, user, node) for user in node.users)
    return isinstance(value, Gated) and part is not value.rest


def _goes_on(recogniser: Recogniser, node: Node, part: Node) -> bool:
    """Whether more terms come to `part`, one term and a residual so far."""
    value = recogniser.value(node)
    return isinstance(value, Gated) and value.rest is not part and value.whole is None


def check(graph: Graph, recogniser: Recogniser, site: Site, assume_binary: bool) -> Layer:
    """The layer at a site.

    Raises:
        Refusal: it is not proved to be MGLU, or may not be replaced.
    """
    if recogniser.effects.under_functorch:
        raise Refusal("the graph records a functorch transform (torch.func.grad, vmap or jvp)")
    if len(site.terms) > MAX_MASKS:
        raise Refusal(f"the sum has {len(site.terms)} masks, the operator takes at most {MAX_MASKS}")
    _check_operands(recogniser, site)
    masks = tuple(_check_masks(term, assume_binary) for term in site.terms)
    trained = [_trains(site, term, mask) for term, (mask, _) in zip(site.terms, masks, strict=True)]
    for (mask, _), carries in zip(masks, trained, strict=True):
        if carries and mask.proof is None:
            raise Refusal(f"mask `{mask.bits.name}` requires a gradient but is not a straight-through mask of logits")
    if any(trained):
        if not all(trained):
            raise Refusal("some masks carry a gradient and some do not; a layer must have one kind")
        for term, (_, complement) in zip(site.terms, masks, strict=True):
            _check_slopes(term, -1 if complement else 1)
    first = site.terms[0].gate
    assert isinstance(first.weight, Node)
    activation, scales = _check_activation(site)
    routes, scale = _check_routes(site, scales)
    layer = Layer(
        site=site,
        x=first.x,
        weight=first.weight,
        transposed=first.transposed,
        masks=masks,
        activation=activation,
        dtype=_check_dtypes(site, first),
        trains_masks=any(trained),
        routes=routes,
        scale=scale,
        interior=interior(recogniser, site),
    )
    _check_users(recogniser, layer)
    _check_modes(recogniser, layer)
    _check_mutation(recogniser.effects, layer)
    return layer


def named(term: Term) -> Scaled | None:
    """The operator's activation that a term has, and its coefficient."""
    digits = formulas.EXACT if term.gate.dtype is torch.float64 else formulas.DIGITS
    return formulas.activation(term.formula, digits)


def spelled(term: Term) -> str:
    """The name of a term's activation, or its formula."""
    found = named(term)
    return str(term.formula) if found is None else found.activation


def _check_activation(site: Site) -> tuple[str, list[float]]:
    """The activation of all terms, and the coefficient of each."""
    found = [named(term) for term in site.terms]
    first = found[0]
    if first is None or any(other is None or other.activation != first.activation for other in found):
        formula = str(site.terms[0].formula)
        if "`" in formula:
            raise Refusal(
                f"the gate g goes through {formula}, with a number whose value compiling does not know (a float that "
                "`dynamic=True` makes an input); write it as a literal"
            )
        raise Refusal(
            f"the gate g goes through {formula}, which is none of the operator's activations ({', '.join(ACTIVATIONS)})"
        )
    root = tensor_example(site.root)
    if first.kink is not None and root is not None and root.requires_grad:
        raise Refusal(
            f"the gate goes through a relu written as {_SPELLED[first.kink]}, whose gradient where the gate is 0 is "
            f"{GRADIENT_AT_0[first.kink]} and not 0 as that of relu; write torch.relu"
        )
    return first.activation, [one.scale for one in found if one is not None]


_SPELLED = {formulas.CLAMP: "clamp(min=0)", formulas.MAXIMUM: "maximum(g, 0)"}


def _check_operands(recogniser: Recogniser, site: Site) -> None:
    first = site.terms[0].gate
    for projection in site.projections:
        if projection.problem:
            raise Refusal(projection.problem)
        if not isinstance(projection.weight, Node):
            raise Refusal(
                "gate and value multiply the weight by two tensors that are not recognised as a mask and its "
                "complement; write the second as 1 - mask (or ~mask for a bool mask)"
            )
        if recogniser.key(projection.x) != recogniser.key(first.x):
            raise Refusal(f"gate and value project different inputs, {_difference(recogniser, first.x, projection.x)}")
        assert isinstance(first.weight, Node)
        if recogniser.key(projection.weight) != recogniser.key(first.weight):
            different = _difference(recogniser, first.weight, projection.weight)
            raise Refusal(f"gate and value mask different weights, {different}")
        if projection.transposed != first.transposed:
            raise Refusal("gate and value use the weight in different orientations")


def _difference(recogniser: Recogniser, a: Node, b: Node) -> str:
    """Where two expressions begin to differ: at two nodes that are no equal calls of equal arguments."""
    while True:
        inputs = [node.all_input_nodes for node in (a, b)]
        alike = a.op == b.op and a.target == b.target and len(inputs[0]) == len(inputs[1]) > 0
        pairs = list(zip(*inputs, strict=True)) if alike else []
        unequal = [pair for pair in pairs if recogniser.key(pair[0]) != recogniser.key(pair[1])]
        if len(unequal) != 1 or _is_slice(unequal[0][0]):
            return f"`{line(a)}` and `{line(b)}`{_why_different(recogniser, a, b)}"
        a, b = unequal[0]


def _is_slice(node: Node) -> bool:
    """Whether a node is a slice, which a reader would not know by its name."""
    return slice_of(node) is not None or range_of(node) is not None


def _why_different(recogniser: Recogniser, a: Node, b: Node) -> str:
    """What keeps two nodes from being one, where it can be told."""
    if any(recogniser.is_mutable(node) for node in (a, b)):
        return " (the graph writes to one of them in place)"
    if requires_grad(a) != requires_grad(b):
        return " (only one of them takes a gradient)"
    return " (random numbers are drawn anew)" if is_random(a) and is_random(b) else ""


def _check_masks(term: Term, assume_binary: bool) -> tuple[Mask, bool]:
    """The mask of a term, and whether its gate takes the complement."""
    gate, value = term.gate.factor, term.value.factor
    if gate is None or value is None:
        unmasked = "gate" if gate is None else "value"
        raise Refusal(f"the {unmasked} is not masked: MGLU masks the gate by M and the value by 1 - M")
    if gate.mask.key != value.mask.key:
        raise Refusal("gate and value use two different masks; the value's must be 1 - M of the gate's M")
    if gate.is_gate(1) and value.is_gate(-1):
        complement = False
    elif gate.is_gate(-1) and value.is_gate(1):
        complement = True
    else:
        raise Refusal(
            f"the masks are not complementary: for M = 0 and 1 the gate takes {gate.at} and the value {value.at} "
            "of the weight, must be (0, 1) and (1, 0)"
        )
    mask = gate.mask if gate.mask.carrier is not None else value.mask
    _check_mask_shape(term, mask)
    if mask.proof is None and not assume_binary:
        doubt = f" ({mask.doubt})" if mask.doubt else ""
        raise Refusal(
            f"mask `{mask.bits.name}` is a {_describe(mask.bits)} tensor that nothing proves to be binary{doubt}; make "
            "it bool, derive it by a comparison, or pass assume_binary=True (packing then checks its values)"
        )
    return mask, complement


def _trains(site: Site, term: Term, mask: Mask) -> bool:
    """Whether a gradient reaches a term's mask: not under no_grad, whatever the parameters require."""
    root = tensor_example(site.root)
    slopes = [factor.slope for factor in (term.gate.factor, term.value.factor) if factor is not None]
    return mask.carrier is not None and root is not None and root.requires_grad and any(map(any, slopes))


def _check_slopes(term: Term, sign: int) -> None:
    gate, value = term.gate.factor, term.value.factor
    if gate is None or value is None:
        raise AssertionError("the masks are checked first")
    carriers = [factor.mask.carrier and factor.mask.carrier.key for factor in (gate, value)]
    if carriers[0] != carriers[1]:
        raise Refusal("gate and value take the mask's gradient through different tensors")
    if not gate.passes_gradient(sign) or not value.passes_gradient(-sign):
        raise Refusal(
            "the mask's gradient does not pass straight through both gate and value (a comparison, detach or power "
            "of the mask stands between)"
        )


def _check_mask_shape(term: Term, mask: Mask) -> None:
    weight = tensor_example(term.gate.weight)
    if weight is None or not equal_sizes(weight.shape, mask.shape):
        raise Refusal(
            f"mask `{mask.bits.name}` has shape {list(mask.shape)}, must be the weight's: a per-channel mask is not "
            "MGLU"
        )


def _check_routes(site: Site, scales: list[float]) -> tuple[tuple[Route | float, ...], float]:
    """The weights of the terms, and what their sum is multiplied with.

    A number that all terms share multiplies the sum. Numbers that differ are weights of the terms.
    """
    routes = tuple(term.route for term in site.terms if term.route is not None)
    if routes and len(routes) != len(site.terms):
        raise Refusal("some terms of the sum have route weights and some do not")
    if max(scales) - min(scales) <= 1e-12 * abs(scales[0]):  # (equal but for rounding)
        return routes, scales[0]
    if routes:
        raise Refusal("the terms of the sum have route weights and are multiplied by numbers that differ")
    return tuple(scales), 1.0


def _describe(node: Node) -> str:
    value = tensor_example(node)
    return "unknown" if value is None else f"{value.dtype}".removeprefix("torch.")


def _check_dtypes(site: Site, first: Projection) -> torch.dtype:
    """The dtype of the layer: that of its projections, which its result must have too."""
    x, weight, root = (tensor_example(node) for node in (first.x, first.weight, site.root))
    if x is None or weight is None or root is None:
        raise Refusal("tracing recorded no example of an operand's dtype")
    if root.dtype not in _FLOATING:
        raise Refusal(f"the result is {root.dtype}; the operator takes float16, bfloat16, float32 and float64")
    for projection in site.projections:
        if projection.dtype != root.dtype:
            raise Refusal(f"the projections are {projection.dtype} and the result {root.dtype}; cast it after the sum")
    if weight.dim() != 2 or x.dim() < 1:
        raise Refusal(f"the weight has {weight.dim()} dimensions, must be a matrix")
    return root.dtype


def interior(recogniser: Recogniser, site: Site) -> tuple[Node, ...]:
    """The nodes between a site's leaves and its root, root included: those of which the recogniser knows a value."""
    leaves: set[Any] = {node for projection in site.projections for node in (projection.x, projection.weight)}
    leaves |= {term.route.node for term in site.terms if term.route is not None} | {site.rest}
    seen: set[Node] = set()
    stack = [site.root]
    while stack:
        node = stack.pop()
        if node in seen or node in leaves or as_call(node) is None or not _is_spelling(recogniser, node):
            continue
        seen.add(node)
        stack.extend(node.all_input_nodes)
    return tuple(sorted(seen, key=recogniser.effects.order.__getitem__))


def _is_spelling(recogniser: Recogniser, node: Node) -> bool:
    """Whether a node is a part of how a layer is spelled: its value is known, or it is a tuple of such parts."""
    if recogniser.value(node) is not None:
        return True
    call = as_call(node)
    return call is not None and call.symbol in _IN_BETWEEN


_IN_BETWEEN = frozenset({"unbind", "split", "expand", "unsqueeze", "getitem", "select", "empty", "size"})
"""Symbols of nodes that a spelling passes through, though nothing is known of what they make."""


_COMPUTED = (Projection, Activated, Gated)


def _is_computed(recogniser: Recogniser, node: Node) -> bool:
    """Whether a node is what the operator computes inside: products, activations and terms, or a tuple of these."""
    call = as_call(node)
    if call is not None and call.symbol in ("unbind", "split"):
        return isinstance(call.args[0], Node) and _is_computed(recogniser, call.args[0])
    value = recogniser.value(node)
    return isinstance(value.items[0] if isinstance(value, Bundle) else value, _COMPUTED)


def _check_users(recogniser: Recogniser, layer: Layer) -> None:
    interior = set(layer.interior)
    for node in layer.interior:
        if node is layer.site.root or not _is_computed(recogniser, node):
            continue
        for user in value_users(node):
            if user not in interior:
                raise Refusal(f"`{node.name}`, inside the layer, is also used by `{user.name}`")


def _check_modes(recogniser: Recogniser, layer: Layer) -> None:
    """All that the operator computes is computed under one grad mode and one autocast.

    Masks may be made under others, such as `no_grad`: what gradient they carry is known from their examples.
    """
    modes = recogniser.effects.modes
    for node in layer.interior:
        if modes[node] != modes[layer.site.root] and _is_weight_or_more(recogniser, node):
            mode = "grad mode" if modes[node][0] != modes[layer.site.root][0] else "autocast or inference mode"
            raise Refusal(f"`{node.name}` is computed under another {mode} than `{layer.site.root.name}`")


def _is_weight_or_more(recogniser: Recogniser, node: Node) -> bool:
    return isinstance(recogniser.value(node), (Weighted, Product, Bundle)) or _is_computed(recogniser, node)


def _check_mutation(effects: Effects, layer: Layer) -> None:
    interior, root, order = set(layer.interior), layer.site.root, effects.order
    if not effects.writes:
        return
    leaves = {layer.x, layer.weight, *(node for inner in interior for node in inner.all_input_nodes)} - interior
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


def _check_overwritten(writer: Node, target: Node, interior: set[Node], order: dict[Node, int]) -> None:
    """What an in-place node of the layer overwrites is the layer's own, and read after it through that node only."""
    for node in order:
        if order[node] >= order[writer] or not storages(node) & storages(target):
            continue
        if node not in interior:
            raise Refusal(f"`{writer.name}` writes in place to `{node.name}`, which is not the layer's own")
        if any(order[user] > order[writer] for user in node.users):
            raise Refusal(f"`{node.name}` is read after `{writer.name}` has overwritten it")
