"""Proves that a site is an MGLU layer and may be replaced by the operator. A refusal gives the reason.

README.md, "Why a fused layer is right", lists the conditions and argues for each. `interference.py` checks the
conditions about the nodes around the layer: writes, modes and other users. This module checks all other conditions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.checks import FLOATING, FLOATING_NAMES
from mglu_ops.dispatch import waiting_reason
from mglu_ops.masks import MAX_MASKS

from . import formulas, shapes
from .formulas import LIKE_RELU, Scaled
from .pointwise import as_dtype
from .recognise import Recogniser
from .report import line
from .shapes import dtype_of, equal_sizes, holds_experts, is_given, requires_grad, slice_of, tensor_example
from .sites import Refusal, Site, interior
from .values import Bundle, Interleaved, Mask, MaskWeight, Projection, Term, scale_of, unscaled
from .view import overwritten
from .weight_formats import StoredWeight, is_decoded, stored_weight


@dataclass(frozen=True)
class Layer:
    """A site that may be fused, with all that the rewrite needs to know about it."""

    site: Site
    x: Node
    weight: Node
    weight_scale: float  # the number by which the program multiplies the masked weight
    transposed: bool
    masks: tuple[tuple[Mask, bool], ...]  # for each term, the mask, and True if the gate uses its complement
    activation: str
    dtype: torch.dtype  # the dtype of the projections and of the result
    trains_masks: bool
    mask_weights: tuple[MaskWeight | float, ...]  # one per term, or none at all
    scale: float  # the number that multiplies the sum
    interior: tuple[Node, ...]  # the nodes that the operator replaces, in the order of the graph
    stored: StoredWeight | None = None  # the stored weight, if the program decodes it from a format of the operator
    why_decoded: str = ""  # for a weight decoded from 8 or 4 bits: why the operator cannot read the stored weight
    takes_views: bool = True  # False in inference mode, where torch.compile rejects new views of outside tensors
    offs: Node | None = None  # for experts whose rows are joined in one matrix x: where each expert's rows end

    @property
    def is_of_experts(self) -> bool:
        """True if the layer has experts, and so a weight `[experts, out_features, in_features]`."""
        return holds_experts(self.weight)

    @property
    def operator(self) -> str:
        """The name of the operator that computes the layer."""
        return ("grouped_" if self.is_of_experts else "") + ("forward_ste" if self.trains_masks else "forward")

    @property
    def hides_nan(self) -> bool:
        """True if the program may return NaN for a mask logit that is NaN, where the operator uses a mask of 0.

        A comparison of a NaN logit gives 0 or 1. But a float mask may be NaN, and a straight-through sum of a NaN logit
        is NaN.
        """
        masks = [mask for mask, _ in self.masks if mask.proof not in (None, "constant")]
        return any(mask.rounding or mask.carrier or dtype_of(mask.bits) in FLOATING for mask in masks)


def check(recogniser: Recogniser, site: Site, assume_binary: bool) -> Layer:
    """Prove that a site is MGLU and may be replaced, and describe the layer.

    Raises:
        Refusal: a condition does not hold. The message names the first conditions that fail.
    """
    reasons = _Reasons()
    reasons.of(_check_number, site)
    reasons.of(_check_operands, recogniser, site)
    reasons.of(_check_experts, site)
    masks: list[tuple[Mask, bool]] = []
    dtype, trains, weight_scale = None, False, 1.0
    if all(isinstance(projection.weight, Node) for projection in site.projections):
        found = [reasons.of(_check_mask, site, term, assume_binary) for term in site.terms]
        masks = [mask for mask in found if mask is not None]
        if len(masks) == len(found):
            weight_scale = reasons.of(_check_weight_scale, site) or 1
            trains = bool(reasons.of(_check_gradients, site, masks))
            reasons.of(_check_kinds, site, [mask for mask, _ in masks])
        dtype = reasons.of(_check_dtypes, site)
    activation = reasons.of(_check_activation, site)
    weights = None if activation is None or dtype is None else reasons.of(_check_weights, site, activation[1], dtype)
    reasons.end()
    assert activation is not None, "there was no reason"
    assert dtype is not None, "there was no reason"
    assert weights is not None, "there was no reason"
    first = site.terms[0].gate
    assert isinstance(first.weight, Node)
    layer = Layer(
        site=site,
        x=first.x,
        weight=first.weight,
        weight_scale=weight_scale,
        transposed=first.transposed,
        masks=tuple(masks),
        activation=activation[0],
        dtype=dtype,
        trains_masks=trains,
        mask_weights=weights[0],
        scale=weights[1],
        interior=interior(recogniser, site),
        takes_views=not recogniser.view.modes(site.root).in_inference_mode,
        offs=first.offs,
    )
    return _with_stored_weight(recogniser, layer)


_Result = TypeVar("_Result")
_MOST_REASONS = 4


class _Reasons:
    """Collects all reasons why a site is refused, so that a user sees them at once."""

    def __init__(self) -> None:
        self._found: dict[str, None] = {}

    def of(self, condition: Callable[..., _Result], *arguments: Any) -> _Result | None:
        """The result of a check. If the check refuses the site, keep the reason and return None."""
        try:
            return condition(*arguments)
        except Refusal as refusal:
            self._found[str(refusal)] = None
            return None

    def end(self) -> None:
        """Refuse the site if a check did.

        Raises:
            Refusal: with the first reasons, and the number of further ones.
        """
        named = list(self._found)[:_MOST_REASONS]
        more = len(self._found) - len(named)
        if named:
            raise Refusal(". Also: ".join(named) + (f". Also: {more} more reasons" if more else ""))


def _check_number(site: Site) -> None:
    if len(site.terms) > MAX_MASKS:
        raise Refusal(f"the sum has {len(site.terms)} masks; the operator takes at most {MAX_MASKS}")


def check_products(recogniser: Recogniser, layer: Layer) -> None:
    """Check that the operator computes no more products than the program, whose terms may read the same ones.

    Raises:
        Refusal: it would compute more.
    """
    count = 0
    for node in layer.interior:
        if not any(_projections(recogniser.value(operand)) for operand in node.all_input_nodes):
            count += _projections(recogniser.value(node))
    if count <= len(layer.masks):
        raise Refusal(
            f"several terms read the same products: the program computes {count}, and the operator would compute "
            f"{len(layer.masks) + 1}"
        )


def _projections(value: object) -> int:
    """The number of projections in the value of a node."""
    if isinstance(value, (Bundle, Interleaved)):
        return sum(map(_projections, value.items))
    return int(isinstance(value, Projection))


# --- One x and one weight --------------------------------------------------------------------------------------------


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
        if recogniser.key(projection.offs) != recogniser.key(first.offs):
            raise Refusal("gate and value divide the rows of x among the experts by different offsets")
        if projection.swapped != first.swapped:
            raise Refusal("one of gate and value is the transpose of a projection: `(W * M) @ x.T` next to `x @ ...`")
        if projection.transposed != first.transposed:
            raise Refusal("gate and value use the weight in different orientations: one of them its transpose")


def _check_experts(site: Site) -> None:
    """Refuse experts that the grouped operators do not support."""
    first = site.terms[0].gate
    x, weight = tensor_example(first.x), tensor_example(first.weight)
    if not holds_experts(first.weight) or x is None or weight is None:
        return
    if not statically_known_true(weight.shape[0] >= 1):
        raise Refusal(f"the weight has {weight.shape[0]} experts; the operator takes at least 1")
    of_ranks = [node for node in (first.x, first.weight) if shapes.is_distributed(node)]
    if of_ranks:
        raise Refusal(f"`{of_ranks[0]}` is a DTensor, and the operators of experts take plain tensors here")
    why = waiting_reason("train" if requires_grad(site.root) else "forward", x.device, first.dtype)
    if why is not None:
        raise Refusal(f"the operator of experts of {first.dtype} on {x.device} would be slow: {why}")


def _difference(recogniser: Recogniser, a: Node, b: Node) -> str:
    """The two nodes at which two expressions begin to differ, as text for a message."""
    while True:
        inputs = [node.all_input_nodes for node in (a, b)]
        alike = a.target == b.target and len(inputs[0]) == len(inputs[1])
        pairs = list(zip(*inputs, strict=True)) if alike else []
        unequal = [pair for pair in pairs if recogniser.key(pair[0]) != recogniser.key(pair[1])]
        # Stop at slices: the message would name only the sliced tensor, which tells the user nothing.
        if len(unequal) != 1 or any(slice_of(node) or shapes.range_of(node) for node in unequal[0]):
            return f"`{line(a)}` and `{line(b)}`{_why_different(recogniser, a, b)}"
        a, b = unequal[0]


def _why_different(recogniser: Recogniser, a: Node, b: Node) -> str:
    """Why two expressions that look alike hold different values; empty if the reason is unknown."""
    if any(node.target is overwritten for node in (a, b)):
        return " (the graph writes in place to one of them)"
    if requires_grad(a) != requires_grad(b):
        return " (only one of them takes a gradient)"
    draws = all(recogniser.view.effect(node).draws for node in (a, b))
    return " (each call draws new random numbers)" if draws else ""


# --- Masks -----------------------------------------------------------------------------------------------------------


def _check_weight_scale(site: Site) -> float:
    """The number c that scales all masked weights: the program multiplies by 0 and c instead of by 0 and 1."""
    scales = {scale_of(projection.factor) for projection in site.projections if projection.factor is not None}
    if len(scales) > 1:
        numbers = ", ".join(f"{scale:g}" for scale in scales)
        raise Refusal(f"the masked weights are multiplied by different numbers: {numbers}")
    return next(iter(scales), 1)


def _check_mask(site: Site, term: Term, assume_binary: bool) -> tuple[Mask, bool]:
    """The mask of a term, and True if its gate uses the complement."""
    gate, value = term.gate.factor, term.value.factor
    if gate is None or value is None:
        unmasked = "gate" if gate is None else "value"
        raise Refusal(f"the {unmasked} is not masked: MGLU masks the gate by M and the value by 1 - M")
    if gate.mask.key != value.mask.key:
        if doubtful := [factor.mask for factor in (gate, value) if factor.mask.doubt]:
            raise _unproved(doubtful[0], _trains(site, term))
        written = any(factor.mask.bits.target is overwritten for factor in (gate, value))
        why = " (the graph writes in place to one of them)" if written else ""
        raise Refusal(f"gate and value use two different masks{why}; the value's must be 1 - M of the gate's M")
    if not unscaled(gate).is_mask or value.at != gate.at[::-1]:
        raise Refusal(
            f"the masks are not complementary: at M = 0 and M = 1 the gate multiplies the weight by {gate.at} and the "
            f"value by {value.at}; this must be (0, 1) and (1, 0)"
        )
    complement = unscaled(gate).is_gate(-1)
    mask = replace(gate.mask, rounding=max(gate.mask.rounding, value.mask.rounding))
    dtype = term.gate.dtype
    if mask.rounding and dtype.is_floating_point and mask.rounding > torch.finfo(dtype).eps:
        raise Refusal(f"mask `{mask.bits.name}` has rounding errors of a narrower dtype than the layer's {dtype}")
    _check_mask_shape(term, mask)
    if mask.proof is None and not assume_binary:
        raise _unproved(mask, _trains(site, term))
    return mask, complement


_STRAIGHT_THROUGH = (
    "as ((logits > 0).to(logits.dtype) - logits).detach() + logits, in the graph that computes the layer"
)


def _unproved(mask: Mask, trains: bool) -> Refusal:
    doubt = f" ({mask.doubt})" if mask.doubt else ""
    advice = "make it bool, or derive it by a comparison"
    if trains:
        advice = f"to train it, write it {_STRAIGHT_THROUGH}"
    elif is_given(mask.bits) and not mask.doubt:
        advice += ", or pass assume_binary=True (packing then checks its values)"
    dtype = str(dtype_of(mask.bits)).removeprefix("torch.")
    return Refusal(
        f"mask `{mask.bits.name}` is {'an' if dtype.startswith('int') else 'a'} {dtype} tensor that nothing proves to "
        f"be binary{doubt}; {advice}"
    )


def _check_gradients(site: Site, masks: Sequence[tuple[Mask, bool]]) -> bool:
    """True if the masks are trained.

    Raises:
        Refusal: only some masks are trained, or the masks would receive a different gradient from the operator than
            from the program.
    """
    trained = [_trains(site, term) for term in site.terms]
    for (mask, _), carries in zip(masks, trained, strict=True):
        if carries and mask.proof is None:
            raise Refusal(
                f"mask `{mask.bits.name}` requires a gradient but is not a straight-through mask of logits; write it "
                + _STRAIGHT_THROUGH
            )
    if any(trained) and not all(trained):
        raise Refusal("some masks carry a gradient and some do not; train all masks of a layer, or detach all")
    if any(trained):
        for term, (_, complement) in zip(site.terms, masks, strict=True):
            _check_slopes(term, -1 if complement else 1)
    return any(trained)


def _trains(site: Site, term: Term) -> bool:
    """True if a gradient reaches the mask of a term. Under `no_grad` no gradient does, even for trained parameters."""
    slopes = [factor.slope for factor in (term.gate.factor, term.value.factor) if factor is not None]
    return requires_grad(site.root) and any(map(any, slopes))


def _check_slopes(term: Term, sign: int) -> None:
    gate, value = (projection.factor and unscaled(projection.factor) for projection in (term.gate, term.value))
    assert gate is not None, "the masks are checked first"
    assert value is not None, "the masks are checked first"
    carriers = [factor.mask.carrier and factor.mask.carrier.key for factor in (gate, value)]
    if carriers[0] != carriers[1]:
        raise Refusal("gate and value take the mask's gradient through different tensors")
    if not gate.passes_gradient(sign) or not value.passes_gradient(-sign):
        raise Refusal(
            "the mask's gradient does not pass straight through both gate and value (a comparison, detach, power or "
            "no_grad stands between)"
        )


def _check_mask_shape(term: Term, mask: Mask) -> None:
    weight = tensor_example(term.gate.weight)
    if weight is None or not equal_sizes(weight.shape, mask.shape):
        shape = "unknown" if weight is None else list(weight.shape)
        of_experts = "each expert has a mask of its own, so expand a mask that experts share"
        of_a_layer = "MGLU masks single weights, so a per-channel mask is not MGLU"
        raise Refusal(
            f"mask `{mask.bits.name}` has shape {list(mask.shape)} and the weight {shape}; "
            f"{of_experts if holds_experts(term.gate.weight) else of_a_layer}"
        )


def _check_kinds(site: Site, masks: Iterable[Mask]) -> None:
    """Refuse unknown tensors, nested and sparse tensors, and subclasses that may compute products in their own way."""
    operands = [node for p in site.projections for node in (p.x, p.weight, p.offs) if node is not None]
    operands += [mask.bits for mask in masks]
    operands += [term.mask_weight.node for term in site.terms if term.mask_weight is not None]
    for node in operands:
        if tensor_example(node) is None:  # for example because of `Memory.misdescribed`
            raise Refusal(
                f"the shape of `{node}` is unknown, or a call such as t_ or unsqueeze_ changes it in place; "
                "call the function that returns a new tensor (such as t)"
            )
        kind = shapes.unusual_kind(node)
        if kind is not None:
            raise Refusal(f"`{node}` is a {kind}, and the operator takes plain tensors and DTensors")


# --- Activation, mask weights and dtypes ----------------------------------------------------------------------------


def named(term: Term) -> Scaled | None:
    """The activation of a term, with its coefficient; None if the operator does not have this activation."""
    digits = formulas.EXACT if term.gate.dtype is torch.float64 else formulas.DIGITS
    return formulas.activation(term.formula, digits)


def spelled(term: Term) -> str:
    """The name of a term's activation, or the formula if the operator does not have this activation."""
    found = named(term)
    return str(term.formula) if found is None else found.activation


def _check_activation(site: Site) -> tuple[str, list[float]]:
    """The activation, which is the same for all terms (`gates.joined`), and the coefficient of each term."""
    found = [named(term) for term in site.terms]
    first = found[0]
    if first is None:
        formula = str(site.terms[0].formula)
        if "`" in formula:
            raise Refusal(
                f"the gate g goes through {formula}, with a number whose value is unknown when compiling (a float that "
                "`dynamic=True` makes an input); write it as a literal"
            )
        raise Refusal(
            f"the gate g goes through {formula}, which is none of the operator's activations ({', '.join(ACTIVATIONS)})"
        )
    if first.kink is not None and requires_grad(site.root):
        raise Refusal(
            "the gate goes through a relu written as {}, whose gradient where the gate is 0 is {}, and not 0 as for "
            "relu; write torch.relu".format(*LIKE_RELU[first.kink])
        )
    return first.activation, [scaled.scale for scaled in found if scaled is not None]


def _check_weights(site: Site, scales: list[float], dtype: torch.dtype) -> tuple[tuple[MaskWeight | float, ...], float]:
    """The mask weights of the terms, and the number that multiplies their sum.

    If all terms have the same coefficient, it multiplies the sum. Coefficients that differ become mask weights.
    """
    mask_weights = tuple(term.mask_weight for term in site.terms if term.mask_weight is not None)
    if mask_weights and len(mask_weights) != len(site.terms):
        raise Refusal("some terms of the sum have mask weights and some do not")
    if dtype is torch.float16 and (any(abs(scale) != 1 for scale in scales) or any(term.moved for term in site.terms)):
        raise Refusal(
            "a number or a mask weight multiplies a part of the layer, and in float16 a value that is multiplied later "
            "may overflow or vanish before; multiply the layer's result, or use bfloat16"
        )
    if max(scales) - min(scales) <= 1e-12 * abs(scales[0]):  # equal up to rounding
        return mask_weights, scales[0]
    if mask_weights:
        raise Refusal("the terms of the sum have mask weights and are multiplied by numbers that differ")
    for scale in scales:
        held = as_dtype(scale, dtype)
        if not held or not math.isfinite(held):
            raise Refusal(f"a term is multiplied by {scale:g}, which {dtype} cannot hold as a weight of the term")
    return tuple(scales), 1.0


def _with_stored_weight(recogniser: Recogniser, layer: Layer) -> Layer:
    """The layer with its stored weight, or with the reason why the operator must read the decoded weight."""
    if not is_decoded(layer.weight):
        return layer
    try:
        if layer.weight_scale != 1:
            raise Refusal("the program multiplies the masked weight by a number")
        if layer.is_of_experts:
            raise Refusal("the pass proves the formats of single layers only")
        if layer.trains_masks:
            raise Refusal("the operator trains masks of weights in x's dtype only")
        stored = stored_weight(recogniser, layer.weight, layer.site.root, layer.dtype, transposed=layer.transposed)
    except Refusal as refusal:
        if any(projection.row_scaled for projection in layer.site.projections):
            raise
        return replace(layer, why_decoded=str(refusal))
    return replace(layer, stored=stored)


def _check_dtypes(site: Site) -> torch.dtype:
    """The dtype of the layer; its projections and its result must have this dtype."""
    root = dtype_of(site.root)
    if root is None:
        raise Refusal(f"the dtype of the result `{site.root}` is unknown, or a call such as detach_ changes what it is")
    if root not in FLOATING:
        raise Refusal(f"the result is {root}; the operator takes {FLOATING_NAMES}")
    for projection in site.projections:
        if projection.dtype != root:
            raise Refusal(f"the projections are {projection.dtype} and the result {root}; cast it after the sum")
    return site.terms[0].gate.dtype
