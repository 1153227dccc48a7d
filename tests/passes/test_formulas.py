"""Formulas of activations: their values, their texts, and the precision with which they are compared."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from compile_passes.formulas import (
    CLAMP,
    EXACT,
    MAXIMUM,
    VARIABLE,
    Atom,
    Formula,
    Scaled,
    activation,
    add,
    apply,
    constant,
    inverse,
    multiply,
    number,
    power,
    scaled,
    unscaled,
)
from mglu_ops.activations import ACTIVATIONS

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp,
    "erf": torch.erf,
    "tanh": torch.tanh,
    "inv": torch.reciprocal,
    "relu": torch.relu,
}
POINTS = torch.linspace(-3, 2, 9, dtype=torch.float64)


def value(formula: Formula | None, g: Tensor = POINTS) -> Tensor:
    """The value of a formula, given the value g of its variable."""
    assert formula is not None

    def atom_value(atom: Atom) -> Tensor:
        return g if atom.argument is None else FUNCTIONS[atom.name](value(atom.argument, g))

    result = torch.zeros_like(g)
    for monomial, coefficient in formula.terms:
        product = torch.full_like(g, coefficient)
        for atom, exponent in monomial:
            product = product * atom_value(atom) ** exponent
        result = result + product
    return result


@pytest.mark.parametrize("name", [name for name in ACTIVATIONS if name != "identity"])
def test_the_formula_of_an_activation_computes_it(name: str) -> None:
    torch.testing.assert_close(value(apply(name, VARIABLE)), ACTIVATIONS[name].forward(POINTS))


def test_arithmetic() -> None:
    a, b = add(scaled(VARIABLE, 3), constant(2)), apply("tanh", scaled(VARIABLE, 0.5))
    of_a, of_b = 3 * POINTS + 2, torch.tanh(POINTS / 2)
    for formula, wanted in (
        (add(a, b), of_a + of_b),
        (add(a, a, -2), -of_a),
        (multiply(a, a), of_a**2),
        (multiply(a, add(b, VARIABLE)), of_a * (of_b + POINTS)),
        (power(a, 1), of_a),
        (power(b, 2), of_b**2),
        (power(a, 3), of_a**3),
        (power(b, 4), of_b**4),
        (inverse(a), 1 / of_a),
        (inverse(VARIABLE), 1 / POINTS),
        (inverse(constant(4)), torch.full_like(POINTS, 0.25)),
    ):
        torch.testing.assert_close(value(formula), wanted)


@pytest.mark.parametrize(
    "formula",
    [
        *(power(VARIABLE, exponent) for exponent in (0, 5, 0.5, -1)),
        inverse(constant(0)),
        constant(math.inf),
        scaled(constant(1e300), 1e300),
        *(function(None) for function in (lambda a: add(a, VARIABLE), lambda a: multiply(VARIABLE, a), inverse)),
        apply("silu", None),
        scaled(None, 2),
    ],
)
def test_an_expression_without_a_formula(formula: Formula | None) -> None:
    assert formula is None


def test_a_sum_of_more_than_8_terms_has_no_formula() -> None:
    total = VARIABLE
    for name in "abcdefg":
        total = add(total, number(name))
    assert total is not None
    assert len(total.terms) == 8
    assert add(total, number("h")) is None


def test_a_formula_of_more_than_48_atoms_is_none() -> None:
    formula = VARIABLE
    for _ in range(47):
        formula = apply("tanh", formula)
    assert formula is not None
    assert formula.size == 48
    assert add(formula, constant(1)) is not None
    assert add(formula, VARIABLE) is None


def test_text() -> None:
    formula = add(scaled(multiply(power(VARIABLE, 2), number("a")), -0.5), add(apply("tanh", VARIABLE), constant(1)))
    assert str(formula) == "1 + -0.5 `a` g^2 + tanh(g)"
    assert str(add(VARIABLE, VARIABLE, -1)) == "0"
    assert str(scaled(multiply(number("a"), number("a")), 4)) == "4 `a`^2"
    assert str(inverse(constant(4))) == "0.25"
    assert str(inverse(scaled(VARIABLE, 4))) == "inv(4 g)"


def test_formulas_are_equal_up_to_12_digits() -> None:
    assert constant(1 + 2e-12) == constant(1)
    assert constant(1 + 1e-11) != constant(1)
    assert constant(1) != constant(1 + 1e-11)
    assert VARIABLE != "g"
    assert Atom("g") == Atom("g")
    assert Atom("g") != Atom("h")
    assert Atom("h") != Atom("g")
    assert len({VARIABLE, add(VARIABLE, constant(0)), constant(1)}) == 2


def test_the_first_coefficient_of_a_unit_is_1() -> None:
    unit, factor = unscaled(scaled(add(VARIABLE, constant(3)), 4))
    assert (str(unit), factor) == ("1 + 0.333333333333 g", 12)
    zero = add(VARIABLE, VARIABLE, -1)
    assert unscaled(zero) == (zero, 1)
    tiny = constant(5e-324)  # its reciprocal is infinite
    assert unscaled(tiny) == (tiny, 1)


# --- Activations -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1, 0.5, -1, 1e-7, 12])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_multiple_of_an_activation(name: str, factor: float) -> None:
    found = activation(scaled(VARIABLE if name == "identity" else apply(name, VARIABLE), factor))
    assert found == Scaled(name, pytest.approx(factor, rel=1e-12, abs=0))


@pytest.mark.parametrize("name", [CLAMP, MAXIMUM])
def test_relu_with_another_derivative_at_0(name: str) -> None:
    assert activation(apply(name, VARIABLE)) == Scaled("relu", 1, name)


@pytest.mark.parametrize("formula", [apply("silu", scaled(VARIABLE, 2)), constant(1), apply("exp", VARIABLE)])
def test_no_activation(formula: Formula) -> None:
    assert activation(formula) is None


def test_a_factor_that_is_1_up_to_the_digits_is_1() -> None:
    silu = apply("silu", VARIABLE)
    assert activation(scaled(silu, 1 + 1e-7)) == Scaled("silu", 1)
    assert activation(scaled(silu, 1 - 1e-5)) == Scaled("silu", 1 - 1e-5)
    assert activation(scaled(silu, 1 - 1e-12), EXACT) == Scaled("silu", 1)
    assert activation(scaled(silu, 1 + 1e-10), EXACT) == Scaled("silu", 1 + 1e-10)


def test_digits_of_the_coefficients() -> None:
    def gelu(coefficient: float) -> Formula | None:
        return multiply(scaled(VARIABLE, 0.5), add(constant(1), apply("erf", scaled(VARIABLE, coefficient))))

    assert activation(gelu(0.707107)) == Scaled("gelu", 1)
    assert activation(gelu(0.70711)) is None
    assert activation(gelu(0.70710678119), EXACT) == Scaled("gelu", 1)
    assert activation(gelu(0.7071067812), EXACT) is None
