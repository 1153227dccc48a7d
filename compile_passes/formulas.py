"""Formulas: elementwise functions of one variable in a normal form, which identifies hand-written activations.

A formula is a polynomial with real coefficients in *atoms*: the variable, and functions of formulas (`exp`, `tanh`,
`1 / ...`). Programs that differ only in the order or the association of sums and products have one normal form:
`g / (1 + exp(-g))`, `g * sigmoid(g)` and `g * (1 / (exp(-g) + 1))` are all `g inv(1 + exp(-1 g))`, which is silu.

Formulas are compared as texts, which are built from the texts of their parts. The size of a formula is limited, so
building, comparing or sorting a formula takes constant time, however long the chain of operations is. A larger
expression cannot be an activation of the operator and has no formula (None).

Equal formulas are equal functions with equal derivatives: the normal form only reorders sums and products of
differentiable functions. Functions that differ only in torch's derivative at a kink are separate atoms. The derivative
at 0 is 0 for `relu`, 1 for `clamp(min=0)` and 1/2 for `maximum(g, 0)`; the last two functions equal relu only in value
(`Scaled.kink`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache

from mglu_ops.activations import ACTIVATIONS

_DIGITS = 12  # significant digits of coefficients in a formula's text; fewer than 16, to hide rounding errors

DIGITS = 6
"""Significant digits in which an activation's coefficients must agree, in dtypes other than float64.

A float32 holds 7 digits, and people write sqrt(2 / pi) with 8 or more.
"""

EXACT = 11  # significant digits in which an activation's coefficients must agree in float64

_MOST_TERMS = 8  # the most terms in the sum of a formula
_MOST_ATOMS = 48  # the most atoms in a formula, counted at all depths; gelu_tanh has 9


@dataclass(frozen=True)
class Atom:
    """The variable, a number of unknown value, or a function of a formula. Equal atoms have equal texts."""

    name: str = field(compare=False)
    argument: Formula | None = field(default=None, compare=False)
    text: str = field(init=False)
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        inner = "" if self.argument is None else f"({self.argument.text})"
        object.__setattr__(self, "text", self.name + inner)
        object.__setattr__(self, "size", 1 if self.argument is None else 1 + self.argument.size)


Monomial = tuple[tuple[Atom, int], ...]  # a product of powers of atoms, sorted by their texts


@dataclass(frozen=True)
class Formula:
    """A sorted sum of terms `(monomial, coefficient)`, in which no coefficient is 0.

    Equal formulas have equal texts, in which coefficients are rounded.
    """

    terms: tuple[tuple[Monomial, float], ...] = field(compare=False)
    text: str = field(init=False)
    size: int = field(init=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", " + ".join(_spelled_term(*term) for term in self.terms) or "0")
        object.__setattr__(self, "size", sum(atom.size for monomial, _ in self.terms for atom, _ in monomial))

    def __str__(self) -> str:
        return self.text


def _spelled_term(monomial: Monomial, value: float) -> str:
    factors = [atom.text + (f"^{power}" if power > 1 else "") for atom, power in monomial]
    coefficient = f"{value:.{_DIGITS}g}"
    return " ".join([*([] if coefficient == "1" and factors else [coefficient]), *factors])


def _formula(terms: dict[Monomial, float]) -> Formula | None:
    """The normal form of a sum; None if it is too large or a coefficient is not finite."""
    present = [(monomial, value) for monomial, value in terms.items() if value != 0]
    if len(present) > _MOST_TERMS or not all(math.isfinite(value) for _, value in present):
        return None
    formula = _sum_of(present)
    return formula if formula.size <= _MOST_ATOMS else None


def _sum_of(terms: Iterable[tuple[Monomial, float]]) -> Formula:
    return Formula(tuple(sorted(terms, key=lambda term: [(atom.text, power) for atom, power in term[0]])))


def constant(value: float) -> Formula | None:
    return _formula({(): value})


def number(name: str) -> Formula | None:
    """The formula of a number that is unknown while compiling. The name stands for the number."""
    return _formula({((Atom(f"`{name}`"), 1),): 1.0})


def _applied(function: str, a: Formula) -> Formula | None:
    return _formula({((Atom(function, a), 1),): 1.0})


VARIABLE = Formula(((((Atom("g"), 1),), 1.0),))


def add(a: Formula | None, b: Formula | None, sign: float = 1.0) -> Formula | None:
    """`a + sign * b`."""
    if a is None or b is None:
        return None
    terms = dict(a.terms)
    for monomial, value in b.terms:
        terms[monomial] = terms.get(monomial, 0.0) + sign * value
    return _formula(terms)


def scaled(a: Formula | None, factor: float) -> Formula | None:
    """`factor * a`."""
    return None if a is None else _formula({monomial: value * factor for monomial, value in a.terms})


def unscaled(a: Formula) -> tuple[Formula, float]:
    """`(unit, factor)` such that the formula equals `factor * unit`, and the first coefficient of `unit` is 1."""
    if not a.terms:
        return a, 1.0
    factor = a.terms[0][1]
    unit = scaled(a, 1 / factor)
    return (a, 1.0) if unit is None else (unit, factor)


def multiply(a: Formula | None, b: Formula | None) -> Formula | None:
    """`a * b`."""
    if a is None or b is None:
        return None
    terms: dict[Monomial, float] = {}
    for left, x in a.terms:
        for right, y in b.terms:
            powers = dict(left)
            for atom, power in right:
                powers[atom] = powers.get(atom, 0) + power
            monomial = tuple(sorted(powers.items(), key=lambda item: item[0].text))
            terms[monomial] = terms.get(monomial, 0.0) + x * y
    return _formula(terms)


def power(a: Formula | None, exponent: float) -> Formula | None:
    """`a ** exponent` for the exponents 1 to 4; None for others."""
    if exponent not in (1, 2, 3, 4):
        return None
    result = a
    for _ in range(int(exponent) - 1):
        result = multiply(result, a)
    return result


def inverse(a: Formula | None) -> Formula | None:
    """`1 / a`."""
    if a is None or not a.terms:
        return None
    terms = dict(a.terms)
    if terms.keys() == {()}:
        return constant(1 / terms[()])
    return _applied("inv", a)


def apply(function: str, a: Formula | None) -> Formula | None:
    """`function(a)`. Composite functions are written out: `sigmoid(a)` becomes `1 / (1 + exp(-a))`."""
    if a is None:
        return None
    if function == "sigmoid":
        negative = scaled(a, -1)
        return None if negative is None else inverse(add(constant(1), _applied("exp", negative)))
    if function == "relu_squared":
        return power(_applied("relu", a), 2)
    if function == "silu":
        return multiply(a, apply("sigmoid", a))
    if function == "gelu":
        return _half_of_one_plus(a, apply("erf", scaled(a, 0.5**0.5)))
    if function == "gelu_tanh":
        inner = add(a, scaled(power(a, 3), 0.044715))
        return _half_of_one_plus(a, apply("tanh", scaled(inner, (2 / math.pi) ** 0.5)))
    return _applied(function, a)


def _half_of_one_plus(a: Formula, b: Formula | None) -> Formula | None:
    """`a / 2 * (1 + b)`."""
    return multiply(scaled(a, 0.5), add(constant(1), b))


# --- Activations -----------------------------------------------------------------------------------------------------

CLAMP, MAXIMUM = "clamp_min", "maximum"

LIKE_RELU: Mapping[str, tuple[str, str]] = {CLAMP: ("clamp(min=0)", "1"), MAXIMUM: ("maximum(g, 0)", "1/2")}
"""For functions that differ from relu only in the derivative at 0: how users write the function, and its derivative."""


@dataclass(frozen=True)
class Scaled:
    """`scale * activation`. `kink` is `CLAMP` or `MAXIMUM` for a relu whose derivative at 0 is not 0, else None."""

    activation: str
    scale: float
    kink: str | None = None


def activation(formula: Formula, digits: int = DIGITS) -> Scaled | None:
    """The operator's activation that a formula equals up to a factor, compared to `digits` digits; or None."""
    unit, factor = unscaled(formula)
    name, known = _by_digits(digits).get(_rounded(unit, digits), (None, 1.0))
    if name is None:
        return None
    scale = factor / known
    scale = 1.0 if abs(scale - 1) < 10.0**-digits else scale
    return Scaled("relu", scale, name) if name in LIKE_RELU else Scaled(name, scale)


@lru_cache
def _by_digits(digits: int) -> Mapping[Formula, tuple[str, float]]:
    """The name and the factor (`unscaled`) of each activation, keyed by its unit formula."""
    named = {}
    for name in (*ACTIVATIONS, CLAMP, MAXIMUM):
        formula = VARIABLE if name == "identity" else apply(name, VARIABLE)
        assert formula is not None, "within the limits"
        unit, factor = unscaled(formula)
        named[_rounded(unit, digits)] = (name, factor)
    return named


def _rounded(formula: Formula, digits: int) -> Formula:
    return _sum_of(
        (_rounded_atoms(monomial, digits), float(f"{value:.{digits}g}")) for monomial, value in formula.terms
    )


def _rounded_atoms(monomial: Monomial, digits: int) -> Monomial:
    rounded = [
        (Atom(atom.name, None if atom.argument is None else _rounded(atom.argument, digits)), power)
        for atom, power in monomial
    ]
    return tuple(sorted(rounded, key=lambda item: item[0].text))
