"""All rules of the recogniser. They are tried in this order: by module, and within a module from top to bottom.

A node gets its value from the first rule that returns one. Most rules exclude one another by the types of the values
that they read, so their order does not matter. If two rules may return different values for one node, `PRECEDENCE`
lists both rules and why the earlier rule is right. `tests/support/programs/graphs.py` finds conflicts that are not
listed.
"""

from __future__ import annotations

from collections.abc import Mapping

from . import activations, base, gates, masks, projections, weights
from .base import Rule, by_symbol, rules_of

WEIGHT_RULES = rules_of(base, weights, masks)
"""The rules that find masks and (masked) weights. They are tried at every node of a graph."""

LAYER_RULES = rules_of(base, projections, activations, gates)
"""The rules that find products, activations, terms and sums. They are tried only in graphs with a masked weight."""

_KNOWN_MASK = "the operand is a known mask or a tensor of few values, and a function of that says more than a new mask"

PRECEDENCE: Mapping[tuple[Rule, Rule], str] = {
    (masks.pointwise, masks.comparison): _KNOWN_MASK,
    (masks.pointwise, masks.sign): _KNOWN_MASK,
    (masks.pointwise, masks.lowest_bit): _KNOWN_MASK,
    (weights.masked_weight, weights.scaled_weight): (
        "`W * f` with `f = sign(l) * m` is W masked by f if f is used as a mask, and also `sign(l) * W` masked by m"
    ),
    (masks.slice_of_a_stack, masks.rearranged): "the former knows which mask of the stack it is",
    (projections.difference_of_projections, activations.function_of_two): (
        "`p + p` and `p - p` are projections with the mask factors 2 M and 0; both values hold"
    ),
    (activations.function_of_two, gates.gated_product): (
        "`g * sigmoid(g)` is one function of one projection, not a gate times a value"
    ),
}
"""For `(earlier rule, later rule)`: why the earlier rule is right if the two rules give a node different values."""

WEIGHT_RULES_BY_SYMBOL = by_symbol(WEIGHT_RULES)
LAYER_RULES_BY_SYMBOL = by_symbol(LAYER_RULES)
