"""Elementwise functions of one variable in a normal form, so that hand-written activations are told by what they are.

A formula is a polynomial with real coefficients in *atoms*: the variable, and functions of formulas (`exp`, `tanh`,
`1 / ...`). Two spellings that differ in the order or the association of sums and products have one normal form:
`g / (1 + exp(-g))`, `g * sigmoid(g)` and `g * (1 / (exp(-g) + 1))` are all `g inv(1 + exp(-1 g))`, which is silu.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from types import MappingProxyType

Atom = Hashable
"""The variable's name, or `(function, formula)`."""

Monomial = tuple[tuple[Atom, int], ...]
Formula = tuple[tuple[Monomial, float], ...]
"""Terms `(product of powers of atoms, coefficient)`, sorted; no coefficient is 0."""

_DIGITS = 12
"""Significant digits to which coefficients are computed, so that rounding does not keep equal formulas apart."""

EXACT = 11
"""Digits that a layer in float64 asks for."""

_MOST_TERMS = 8
"""A product with more terms is no activation of ours, and normal forms grow fast."""


def _normal(terms: dict[Monomial, float]) -> Formula:
    rounded = {monomial: float(f"{value:.{_DIGITS}g}") for monomial, value in terms.items()}
    return tuple(sorted(((m, c) for m, c in rounded.items() if c != 0), key=repr))


def constant(value: float) -> Formula:
    return _normal({(): value})


def atom(name: Atom) -> Formula:
    return _normal({((name, 1),): 1.0})


VARIABLE = atom("g")


def add(a: Formula, b: Formula, sign: float = 1.0) -> Formula:
    """`a + sign * b`."""
    terms = dict(a)
    for monomial, value in b:
        terms[monomial] = terms.get(monomial, 0.0) + sign * value
    return _normal(terms)


def multiply(a: Formula, b: Formula) -> Formula | None:
    """`a * b`; None where it is too long to be of interest."""
    terms: dict[Monomial, float] = {}
    for left, x in a:
        for right, y in b:
            powers = dict(left)
            for name, power in right:
                powers[name] = powers.get(name, 0) + power
            monomial = tuple(sorted(powers.items(), key=repr))
            terms[monomial] = terms.get(monomial, 0.0) + x * y
    return _normal(terms) if len(terms) <= _MOST_TERMS else None


def power(a: Formula, exponent: int) -> Formula | None:
    """`a ** exponent` of a whole number from 1 to 4."""
    result: Formula | None = a
    for _ in range(exponent - 1):
        result = None if result is None else multiply(result, a)
    return result if 1 <= exponent <= 4 else None


def inverse(a: Formula) -> Formula | None:
    """`1 / a`."""
    if not a:
        return None
    if len(a) == 1 and a[0][0] == ():
        return constant(1 / a[0][1])
    return atom(("inv", a))


def apply(function: str, a: Formula) -> Formula | None:
    """`function(a)`, those that others are made of written out: `sigmoid(a) = 1 / (1 + exp(-a))`."""
    if function == "sigmoid":
        return inverse(add(constant(1), atom(("exp", add((), a, -1)))))
    if function == "silu":
        sigmoid = apply("sigmoid", a)
        return None if sigmoid is None else multiply(a, sigmoid)
    if function == "gelu":
        return _half_of_one_plus(a, atom(("erf", _scaled(a, 0.5**0.5))))
    if function == "gelu_tanh":
        cube = power(a, 3)
        if cube is None:
            return None
        return _half_of_one_plus(a, atom(("tanh", _scaled(add(a, _scaled(cube, 0.044715)), (2 / math.pi) ** 0.5))))
    return atom((function, a))


def _scaled(a: Formula, factor: float) -> Formula:
    return _normal({monomial: value * factor for monomial, value in a})


def _half_of_one_plus(a: Formula, b: Formula) -> Formula | None:
    """`a / 2 * (1 + b)`."""
    return multiply(_scaled(a, 0.5), add(constant(1), b))


_ACTIVATIONS = MappingProxyType(
    {
        VARIABLE: "identity",
        **{
            formula: name
            for name in ("silu", "gelu", "gelu_tanh", "relu", "sigmoid", "tanh")
            if (formula := apply(name, VARIABLE)) is not None
        },
    }
)


def activation(formula: Formula, digits: int = 6) -> str | None:
    """The operator's activation that a formula is, to so many digits of its coefficients; None if it is none.

    sqrt(2 / pi) is written with eight digits and more, a float32 holds seven.
    """
    return _ACTIVATIONS_BY_DIGITS[digits].get(_rounded(formula, digits))


def _rounded(formula: Formula, digits: int) -> Formula:
    return tuple((_rounded_atoms(monomial, digits), float(f"{value:.{digits}g}")) for monomial, value in formula)


def _rounded_atoms(monomial: Monomial, digits: int) -> Monomial:
    return tuple(
        ((name[0], _rounded(name[1], digits)) if isinstance(name, tuple) else name, power) for name, power in monomial
    )


_ACTIVATIONS_BY_DIGITS = MappingProxyType(
    {digits: {_rounded(formula, digits): name for formula, name in _ACTIVATIONS.items()} for digits in (6, EXACT)}
)


def spelled(formula: Formula) -> str:
    """A formula in words, for a report."""
    return " + ".join(_spelled_term(monomial, value) for monomial, value in formula) or "0"


def _spelled_term(monomial: Monomial, value: float) -> str:
    factors = [_spelled_atom(name) + (f"^{power}" if power > 1 else "") for name, power in monomial]
    return " ".join([*([] if value == 1 and factors else [f"{value:g}"]), *factors])


def _spelled_atom(name: Atom) -> str:
    return f"{name[0]}({spelled(name[1])})" if isinstance(name, tuple) else str(name)
