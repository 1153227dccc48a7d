"""Each refusal of a candidate, with its reason; results and gradients equal eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET
from families import family
from graphs import Capture, assert_same, results
from spellings import straight_through
from torch import Tensor

SAME = 10 * BUDGET[torch.float64]


D = H = 8  # square, so that no shape tells what is transposed


def tensors(seed: int = 0, trained: tuple[str, ...] = ("x", "weight", "logits")) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    named = {"x": normal(5, H), "weight": normal(D, H), "logits": normal(3, D, H), "bits": normal(3, D, H) > 0}
    named |= {"other": normal(D, H)}
    return {name: t.requires_grad_(name in trained) if name != "bits" else t for name, t in named.items()}


def layer(x: Tensor, weight: Tensor, m: Tensor, complement: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * complement)


REFUSED: dict[str, tuple[str, Callable[..., Any]]] = {}


def refused(reason: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function of `x, weight, logits, bits, other`, whose site is refused for `reason` (`a|b`: a or b)."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        REFUSED[function.__name__] = (reason, function)
        return function

    return register


# --- Masks -----------------------------------------------------------------------------------------------------------


@refused("nothing proves to be binary")
def soft_mask(x, weight, logits, bits, other):
    m = torch.sigmoid(logits[0])
    return layer(x, weight, m, 1 - m)


@refused("nothing proves to be binary")
def float_mask(x, weight, logits, bits, other):
    m = other + 0
    return layer(x, weight, m, 1 - m)


@refused("nothing proves to be binary")
def integer_mask_of_more_values(x, weight, logits, bits, other):
    m = other.abs().long() % 4
    return layer(x, weight, m, 1 - m)


@refused("two different masks")
def two_masks(x, weight, logits, bits, other):
    return layer(x, weight, bits[0], ~bits[1])


@refused("two different masks")
def mask_and_transposed_complement(x, weight, logits, bits, other):
    return layer(x, weight, bits[0], ~bits[0].t())


@refused("different masks (the graph writes in place to one of them)")
def complement_of_a_mask_after_a_write_to_part_of_it(x, weight, logits, bits, other):
    m, weight = bits[0].clone(), weight.detach()
    gate = F.silu(F.linear(x, weight * m))
    m[0] = True
    return gate * F.linear(x, weight * ~m)


@refused("write the second as 1 - mask")
def two_real_tensors(x, weight, logits, bits, other):
    return layer(x, weight, other, logits[0])


@refused("not complementary")
def two_minus_mask(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m, 2 - m)


@refused("not complementary")
def mask_twice(x, weight, logits, bits, other):
    return layer(x, weight, bits[0], bits[0])


@refused("not complementary")
def scaled_mask(x, weight, logits, bits, other):
    return layer(x, weight, bits[0] * 2, ~bits[0])


@refused("not complementary")
def sum_of_bools(x, weight, logits, bits, other):
    """True + True is True, so the gate's factor is 0."""
    m = (bits[0] + bits[0]) == 2
    return layer(x, weight, m, ~m)


@refused("not complementary")
def overflow_of_int8(x, weight, logits, bits, other):
    m = (bits[0].to(torch.int8) * 127 + 1) > 0
    return layer(x, weight, bits[0], ~m)


@refused("a per-channel mask")
def mask_per_row(x, weight, logits, bits, other):
    m = bits[0][:, :1]
    return layer(x, weight, m, ~m)


@refused("a per-channel mask")
def mask_per_column(x, weight, logits, bits, other):
    m = bits[0][:1]
    return layer(x, weight, m, ~m)


@refused("the value is not masked")
def only_the_gate_is_masked(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * F.linear(x, weight)


@refused("the gate is not masked")
def only_the_value_is_masked(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight)) * F.linear(x, weight * bits[0])


@refused("at most 16")
def seventeen_masks(x, weight, logits, bits, other):
    return sum(layer(x, weight, bits[i % 3], ~bits[i % 3]) for i in range(17))


# --- Operands --------------------------------------------------------------------------------------------------------


@refused("mask different weights")
def other_weight(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * F.linear(x, other * ~bits[0])


@refused("mask different weights")
def other_weight_with_the_complement_first(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * ~bits[0])) * F.linear(x, other * bits[0])


@refused("mask different weights")
def detached_weight(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * F.linear(x, weight.detach() * ~bits[0])


@refused("project different inputs")
def other_x(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * F.linear(x + 1, weight * ~bits[0])


@refused("different inputs, `l_x_` and `add [5, 8] = add(l_x_, 1)`")
def sine_of_another_x(x, weight, logits, bits, other):
    """The reason names the arguments of the sine, where the two expressions begin to differ."""
    return F.silu(F.linear(x.sin(), weight * bits[0])) * F.linear((x + 1).sin(), weight * ~bits[0])


@refused("different inputs, `sin [8, 8] = sin(a)` and `sin_1 [8, 8] = sin(b)`")
def sines_of_two_slices(x, weight, logits, bits, other):
    """The reason does not name the slices alone, because their names tell nothing."""
    a, b = logits[0], logits[1]
    return F.silu(F.linear(a.sin(), weight * bits[0])) * F.linear(b.sin(), weight * ~bits[0])


@refused("different inputs, `sub [5, 8] = sub(l_x_, y)` and `sub_1 [5, 8] = sub(y, l_x_)`")
def arguments_in_another_order(x, weight, logits, bits, other):
    y = x + 1
    return F.silu(F.linear(x - y, weight * bits[0])) * F.linear(y - x, weight * ~bits[0])


@refused("different inputs, `sin [5, 8] = sin(l_x_)` and `cos [5, 8] = cos(l_x_)`")
def two_functions_of_x(x, weight, logits, bits, other):
    return F.silu(F.linear(x.sin(), weight * bits[0])) * F.linear(x.cos(), weight * ~bits[0])


@refused("(only one of them takes a gradient)")
def detached_x(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * F.linear(x.detach(), weight * ~bits[0])


@refused("project different inputs")
def one_input_without_gradient(x, weight, logits, bits, other):
    """The same expression occurs twice, once under no_grad."""
    with torch.no_grad():
        first = x * 2
    return F.silu(F.linear(first, weight * bits[0])) * F.linear(x * 2, weight * ~bits[0])


@refused("(each call draws new random numbers)")
def dropout_of_each_input(x, weight, logits, bits, other):
    a, b = F.dropout(x, 0.5), F.dropout(x, 0.5)
    return F.silu(F.linear(a, weight * bits[0])) * F.linear(b, weight * ~bits[0])


@refused("different orientations")
def two_orientations(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * (x @ (weight * ~bits[0]))


@refused("adds a bias")
def bias(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0], other[0])) * F.linear(x, weight * ~bits[0])


@refused("adds a bias")
def bias_in_one_half_of_silu(x, weight, logits, bits, other):
    gate = F.linear(x, weight * bits[0])
    return torch.sigmoid(F.linear(x, weight * bits[0], other[0])) * gate * F.linear(x, weight * ~bits[0])


@refused("the result torch.float64; cast it after the sum")
def cast_terms(x, weight, logits, bits, other):
    terms = [layer(x.float(), weight.float(), m, ~m).double() for m in bits]
    return terms[0] + terms[1] + terms[2]


# --- Other users -----------------------------------------------------------------------------------------------------


@refused("is also used by")
def gate_is_returned(x, weight, logits, bits, other):
    gate = F.linear(x, weight * bits[0])
    return F.silu(gate) * F.linear(x, weight * ~bits[0]), gate


@refused("is also used by")
def activation_is_used(x, weight, logits, bits, other):
    activated = F.silu(F.linear(x, weight * bits[0]))
    return activated * F.linear(x, weight * ~bits[0]) + activated.mean()


@refused("is also used by")
def stack_is_used(x, weight, logits, bits, other):
    """Each term is a layer of its own; the sum is not a layer."""
    stacked = torch.stack([layer(x, weight, m, ~m) for m in bits])
    return stacked.sum(0), stacked[0]


# --- Gradients and modes ---------------------------------------------------------------------------------------------


@refused("does not pass straight through")
def compared_complement(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m, m == 0)


@refused("does not pass straight through")
def detached_complement(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m, (1 - m).detach())


@refused("does not pass straight through")
def squared(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m * m, 1 - m)


@refused("through different tensors")
def gradients_of_one_mask_to_two_tensors(x, weight, logits, bits, other):
    """The two masks have the same values, and each passes its gradient to a tensor of its own."""
    hard = (other > 0).to(other.dtype)
    m, same = (hard - logits[0]).detach() + logits[0], (hard - logits[1]).detach() + logits[1]
    return layer(x, weight, m, 1 - same)


@refused("reads a masked weight by `sub`")
def gradient_that_changes_the_tensor_in_a_sum(x, weight, logits, bits, other):
    """`1 - m + m - same` has the gradient of `1 - same`, where `same` has the values of m."""
    hard = (other > 0).to(other.dtype)
    m, same = (hard - logits[0]).detach() + logits[0], (hard - logits[1]).detach() + logits[1]
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m) + weight * m - weight * same)


@refused("not complementary")
def sigmoid_of_a_gate_with_another_gradient(x, weight, logits, bits, other):
    hard = (other > 0).to(other.dtype)
    m, same = (hard - logits[0]).detach() + logits[0], (hard - logits[1]).detach() + logits[1]
    gate = F.linear(x, weight * m)
    return gate * torch.sigmoid(F.linear(x, weight * same)) * F.linear(x, weight * (1 - m))


@refused("not complementary")
def sigmoid_of_a_gate_with_a_detached_mask(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    gate = F.linear(x, weight * m)
    return gate * torch.sigmoid(F.linear(x, weight * m.detach())) * F.linear(x, weight * (1 - m))


@refused("gradient of zeros")
def zeros_from_the_first_weight_of_a_difference(x, weight, logits, bits, other):
    m = torch.sigmoid(logits[0]).round()
    return F.silu(F.linear(x, weight * m.detach())) * F.linear(x, -(weight * m) + weight)


@refused("gradient of zeros")
def zeros_from_the_second_weight_of_a_difference(x, weight, logits, bits, other):
    m = torch.sigmoid(logits[0]).round()
    return F.silu(F.linear(x, weight * m.detach())) * F.linear(x, weight - weight * m)


@refused("gradient of zeros")
def zeros_from_the_first_mask_of_a_product(x, weight, logits, bits, other):
    m = torch.sigmoid(logits[0]).round()
    return F.silu(F.linear(x, weight * m * m.detach())) * F.linear(x, weight * (1 - m.detach()))


@refused("gradient of zeros")
def zeros_from_the_second_mask_of_a_product(x, weight, logits, bits, other):
    m = torch.sigmoid(logits[0]).round()
    return F.silu(F.linear(x, weight * m.detach() * m)) * F.linear(x, weight * (1 - m.detach()))


@refused("through different tensors")
def gradient_of_the_gates_mask_alone(x, weight, logits, bits, other):
    return layer(x, weight, straight_through(logits[0]), logits[0] <= 0)


@refused("through different tensors")
def gradient_of_the_values_mask_alone(x, weight, logits, bits, other):
    return layer(x, weight, logits[0] > 0, 1 - straight_through(logits[0]))


@refused("does not pass straight through")
def gradient_of_the_gate_alone_through_one_mask(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m > 0.5, 1 - m)


@refused("some masks carry a gradient and some do not")
def one_trained_and_one_fixed(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m, 1 - m) + layer(x, weight, bits[0], ~bits[0])


@refused("does not pass straight through|under another grad mode")
def value_without_gradient(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    gate = F.silu(F.linear(x, weight * m))
    with torch.no_grad():
        value = F.linear(x, weight * (1 - m))
    return gate * value


@refused("under another grad mode")
def projection_of_the_value_without_gradient(x, weight, logits, bits, other):
    gate = F.silu(F.linear(x, weight * bits[0]))
    masked = weight * ~bits[0]
    with torch.no_grad():
        value = F.linear(x, masked)
    return gate * value


@refused("under another autocast|cast it after the sum")
def autocast_of_the_value(x, weight, logits, bits, other):
    x, weight = x.float(), weight.float()
    gate = F.silu(F.linear(x, weight * bits[0]))
    with torch.autocast("cpu", torch.bfloat16):
        value = F.linear(x, weight * ~bits[0])
    return gate * value


@refused("functorch transform")
def functorch_gradient(x, weight, logits, bits, other):
    return torch.func.grad(lambda x: layer(x, weight, bits[0], ~bits[0]).sum())(x)


@refused("functorch transform")
def functorch_vmap(x, weight, logits, bits, other):
    return torch.vmap(lambda row: layer(row, weight, bits[0], ~bits[0]))(x)


# --- Mutation --------------------------------------------------------------------------------------------------------


@refused("project different inputs")
def same_expression_of_mutated_x(x, weight, logits, bits, other):
    x = x.clone()
    first = x + 1
    x.add_(1)
    return F.silu(F.linear(first, weight * bits[0])) * F.linear(x + 1, weight * ~bits[0])


@refused("project different inputs")
def same_expression_and_then_mutated(x, weight, logits, bits, other):
    first, second = x + 1, x + 1
    second.add_(5)
    return F.silu(F.linear(first, weight * bits[0])) * F.linear(second, weight * ~bits[0])


@refused("(the graph writes in place to one of them)")
def same_expression_of_mutated_weight(x, weight, logits, bits, other):
    weight = weight.clone()
    first = weight * 2
    weight[0] = 1
    return F.silu(F.linear(x, first * bits[0])) * F.linear(x, (weight * 2) * ~bits[0])


@refused("two different masks")
def same_comparison_of_mutated_logits(x, weight, logits, bits, other):
    logits = logits.clone()
    first = logits[0] > 0
    logits.neg_()
    return layer(x, weight, first, ~(logits[0] > 0))


@refused("is also used by")
def weighted_by_its_own_result(x, weight, logits, bits, other):
    term = layer(x, weight, bits[0], ~bits[0])
    return term.mean(-1, keepdim=True) * term


@refused("some terms of the sum have mask weights")
def weighted_in_part(x, weight, logits, bits, other):
    return x[:, :1] * layer(x, weight, bits[0], ~bits[0]) + layer(x, weight, bits[1], ~bits[1])


@refused("mask weights and are multiplied by numbers that differ")
def weighted_and_multiplied_by_numbers(x, weight, logits, bits, other):
    terms = [layer(x, weight, m, ~m) for m in bits[:2]]
    return x[:, :1] * terms[0] + 0.5 * (x[:, 1:2] * terms[1])


@refused("by `mul` in a way that")
def gate_and_value_with_mask_weights(x, weight, logits, bits, other):
    gate, value = F.silu(F.linear(x, weight * bits[0])), F.linear(x, weight * ~bits[0])
    return (x[:, :1] * gate) * (x[:, 1:2] * value)


@refused("by `silu`")
def mask_weight_inside_of_the_activation(x, weight, logits, bits, other):
    return F.silu(x[:, :1] * F.linear(x, weight * bits[0])) * F.linear(x, weight * ~bits[0])


@refused("by `add` in a way that")
def number_of_more_dimensions_in_the_activation(x, weight, logits, bits, other):
    gate = F.linear(x, weight * bits[0]) + torch.zeros(2, 1, 1, dtype=x.dtype)
    return F.silu(gate) * F.linear(x, weight * ~bits[0])


@refused("by `addcmul` in a way that")
def product_that_is_added_no_times(x, weight, logits, bits, other):
    gate, value = F.silu(F.linear(x, weight * bits[0])), F.linear(x, weight * ~bits[0])
    return torch.addcmul(other[0], gate, value, value=0)


@refused("by `addcmul` in a way that")
def product_that_is_added_to_more_dimensions(x, weight, logits, bits, other):
    gate, value = F.silu(F.linear(x, weight * bits[0])), F.linear(x, weight * ~bits[0])
    return torch.addcmul(torch.zeros(2, 5, D, dtype=x.dtype), gate, value)


@refused("dropout is applied")
def dropout_of_the_activation(x, weight, logits, bits, other):
    return F.dropout(F.silu(F.linear(x, weight * bits[0])), 0.5) * F.linear(x, weight * ~bits[0])


@refused("dropout is applied")
def dropout_of_the_value(x, weight, logits, bits, other):
    return F.silu(F.linear(x, weight * bits[0])) * F.dropout(F.linear(x, weight * ~bits[0]), 0.5)


@refused("two different masks")
def sigmoid_of_another_mask(x, weight, logits, bits, other):
    gates = [F.linear(x, weight * m) for m in bits[:2]]
    return gates[0] * torch.sigmoid(gates[1]) * F.linear(x, weight * ~bits[0])


@refused("the gate is not masked")
def sigmoid_of_the_whole_weight(x, weight, logits, bits, other):
    gate = F.linear(x, weight * bits[0])
    return gate * torch.sigmoid(F.linear(x, weight)) * F.linear(x, weight * ~bits[0])


@refused("is also used by")
def product_and_bias_times_a_sigmoid(x, weight, logits, bits, other):
    gate = F.linear(x, weight * bits[0])
    return (gate * F.linear(x, weight * ~bits[0]) + other[0]) * torch.sigmoid(gate)


@refused("is also used by")
def two_products_times_a_sigmoid(x, weight, logits, bits, other):
    gates = [F.linear(x, weight * m) for m in bits[:2]]
    values = [F.linear(x, weight * ~m) for m in bits[:2]]
    return (gates[0] * values[0] + gates[1] * values[1]) * torch.sigmoid(gates[0])


@refused("is also used by")
def silu_of_the_gate_times_sigmoid_of_the_value(x, weight, logits, bits, other):
    gate, value = F.linear(x, weight * bits[0]), F.linear(x, weight * ~bits[0])
    return F.silu(gate) * value * torch.sigmoid(value)


@refused("not recognised as a mask and its complement")
def rounding_errors_that_an_integer_cuts(x, weight, logits, bits, other):
    """The product of a mask without rounding errors and a mask with them has rounding errors."""
    hard = (logits[0] > 0).to(logits.dtype)
    m = (hard * (hard + logits[0] - logits[0].detach())).detach()
    return layer(x, weight, hard, 1 - m.int())


@refused("in a way that the pass does not know")
def gate_overwritten_and_read(x, weight, logits, bits, other):
    gate = F.linear(x, weight * bits[0])
    activated = F.relu(gate, True)
    return activated * (F.linear(x, weight) - gate)


@refused("in a way that the pass does not know")
def value_scaled_in_place(x, weight, logits, bits, other):
    gate, value = F.linear(x, weight * bits[0]), F.linear(x, weight * ~bits[0])
    value[0].mul_(2)
    return F.silu(gate) * value


@refused("writes in place to memory that")
def view_of_the_sum(x, weight, logits, bits, other):
    """The view shows the values that are added to the sum."""
    y = torch.zeros(5, D, dtype=x.dtype)
    view = y.view(-1)
    y += layer(x, weight, bits[0], ~bits[0])
    return y, view


# --- Programs that are fused -----------------------------------------------------------------------------------------


ACCEPTED: dict[str, Callable[..., Any]] = {}


def accepted(function: Callable[..., Any]) -> Callable[..., Any]:
    """Register a function of `x, weight, logits, bits, other` with one layer, which no condition may refuse."""
    ACCEPTED[function.__name__] = function
    return function


@accepted
def sixteen_masks(x, weight, logits, bits, other):
    return sum(layer(x, weight, bits[i % 3], ~bits[i % 3]) for i in range(16))


@accepted
def both_halves_of_silu_from_projections_of_their_own(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    gates = F.linear(x, weight * m), F.linear(x, m * weight)
    return gates[0] * torch.sigmoid(gates[1]) * F.linear(x, weight * (1 - m))


@accepted
def mask_without_a_gradient_plus_the_rest_of_one_with_it(x, weight, logits, bits, other):
    hard, m = (logits[0] > 0).to(logits.dtype), straight_through(logits[0])
    return F.silu(F.linear(x, weight * hard + (weight * m - weight * hard))) * F.linear(x, weight * (1 - m))


@accepted
def detached_straight_through_mask(x, weight, logits, bits, other):
    m = straight_through(logits[0])
    return layer(x, weight, m.detach(), (1 - m).detach())


@accepted
def plain_product_of_a_weight_that_is_masked_elsewhere(x, weight, logits, bits, other):
    return layer(x, weight, bits[0], ~bits[0]), F.silu(F.linear(x, weight)) * F.linear(x, weight)


@accepted
def pruned_product_of_two_weights(x, weight, logits, bits, other):
    pruned = F.silu(F.linear(x, weight * bits[1])) * F.linear(x, other * bits[1])
    return layer(x, weight, bits[0], ~bits[0]), pruned


@accepted
def products_of_two_weights_with_two_masks(x, weight, logits, bits, other):
    first = F.silu(F.linear(x, logits[0] * bits[1])) * F.linear(x, logits[1] * ~bits[2])
    second = F.silu(F.linear(x, logits[2] * bits[2])) * F.linear(x, other * ~bits[1])
    return layer(x, weight, bits[0], ~bits[0]), first, second


# --- The tests -------------------------------------------------------------------------------------------------------


ABOUT_GRADIENTS = (
    "compared_complement",
    "detached_complement",
    "squared",
    "gradients_of_one_mask_to_two_tensors",
    "gradient_that_changes_the_tensor_in_a_sum",
    "sigmoid_of_a_gate_with_another_gradient",
    "sigmoid_of_a_gate_with_a_detached_mask",
    "zeros_from_the_first_weight_of_a_difference",
    "zeros_from_the_second_weight_of_a_difference",
    "zeros_from_the_first_mask_of_a_product",
    "zeros_from_the_second_mask_of_a_product",
    "gradient_of_the_gates_mask_alone",
    "gradient_of_the_values_mask_alone",
    "gradient_of_the_gate_alone_through_one_mask",
    "one_trained_and_one_fixed",
    "detached_x",
    "detached_weight",
    "one_input_without_gradient",
)


@pytest.mark.parametrize(("name", "training"), family(REFUSED, [True, False], one_in=1))
def test_layer_is_refused(name: str, training: bool) -> None:
    reason, function = REFUSED[name]
    trained = ("x", "weight", "logits") if training else ()
    capture = Capture()
    torch.manual_seed(0)
    wanted = results(function, tensors(trained=trained))
    torch.manual_seed(0)
    assert_same(results(capture.compile(function), tensors(trained=trained)), wanted, SAME)
    if not training and name in ABOUT_GRADIENTS:
        return  # it may be fused, since no gradient is recorded; only the numbers are compared
    assert len(capture.report.missed) == 1
    assert any(part in capture.reasons[0] for part in reason.split("|"))
    assert name == "bias_in_one_half_of_silu" or ". Also: " not in capture.reasons[0]
    if name not in ("stack_is_used", "weighted_by_its_own_result"):  # their terms are layers too
        assert capture.report.fused == []
        assert capture.calls["mglu.forward"] == capture.calls["mglu.forward_ste"] == 0


@pytest.mark.parametrize(("name", "training"), family(ACCEPTED, [True, False]))
def test_layer_is_accepted(name: str, training: bool) -> None:
    trained = ("x", "weight", "logits") if training else ()
    wanted = results(ACCEPTED[name], tensors(trained=trained))
    capture = Capture()
    assert_same(results(capture.compile(ACCEPTED[name]), tensors(trained=trained)), wanted, SAME)
    assert [len(capture.report.fused), capture.reasons] == [1, []]


def test_no_more_than_four_reasons_are_named() -> None:
    def function(x: Tensor, weight: Tensor, logits: Tensor, count: int) -> Any:
        return sum(layer(x, weight, m, 1 - m) for m in (torch.sigmoid(logits[0] + i) for i in range(count)))

    for count, more in ((4, ""), (6, ". Also: 2 more reasons")):
        named, capture = tensors(trained=()), Capture()
        capture.compile(function)(named["x"], named["weight"], named["logits"], count)
        (reason,) = capture.reasons
        assert reason.count("nothing proves to be binary") == 4
        assert reason.endswith(more)


def test_numbers_that_the_dtype_of_the_layer_rounds_to_zero() -> None:
    named, capture = tensors(trained=()), Capture()
    x, weight, bits = named["x"].half(), named["weight"].half(), named["bits"]

    def function(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        return 1e-9 * layer(x, weight, bits[0], ~bits[0]) + 1e-3 * layer(x, weight, bits[1], ~bits[1])

    capture.compile(function)(x, weight, bits)
    assert capture.report.fused == []
    assert "cannot hold" in capture.reasons[0]


def test_dropout_in_training() -> None:
    """Dropout draws the random numbers that it draws in eager from the same seed."""

    def function(x: Tensor, weight: Tensor, bits: Tensor, training: bool) -> Tensor:
        gate = F.dropout(F.linear(x, weight * bits), 0.5, training)
        return F.silu(gate) * F.linear(x, weight * ~bits)

    named = tensors(trained=())
    for training in (True, False):
        torch.manual_seed(0)
        wanted = function(named["x"], named["weight"], named["bits"][0], training)
        capture = Capture()
        compiled = capture.compile(function)
        torch.manual_seed(0)
        assert_same({"y": compiled(named["x"], named["weight"], named["bits"][0], training)}, {"y": wanted}, SAME)
        assert [len(capture.report.fused), len(capture.report.missed)] == ([0, 1] if training else [1, 0])
        assert not training or "dropout" in capture.reasons[0]


@pytest.mark.parametrize("where", ["weight", "integer weight", "gate", "activated", "sum", "mm"])
def test_narrower_parts_are_kept(where: str) -> None:
    """A rounding that the user asks for, as in fake quantisation, is kept."""

    def narrow(t: Tensor, here: str) -> Tensor:
        if where == "integer weight" and here == "weight":
            return t.int().double()
        return t.half().double() if where == here else t

    def function(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        y: Any = 0
        for m in bits:
            weights = [narrow(weight * m, "weight"), narrow(weight * ~m, "weight")]
            if where == "mm":
                gate, value = (F.linear(x.half(), w.half()).double() for w in weights)
            else:
                gate, value = (F.linear(x, w) for w in weights)
            y = narrow(y + narrow(F.silu(narrow(gate, "gate")), "activated") * value, "sum")
        return y

    named = {name: t for name, t in tensors(trained=()).items() if name in ("x", "weight", "bits")}
    named["weight"] = named["weight"] * 3
    capture = Capture()
    assert_same(results(capture.compile(function), named), results(function, named), SAME)
    assert where == "sum" or capture.report.fused == []


@pytest.mark.parametrize("of_the_gate", [True, False])
def test_a_nan_that_one_straight_through_factor_makes_is_hidden(of_the_gate: bool) -> None:
    """In inference the other factor may be a comparison of the same logits, which makes no NaN."""

    def function(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        m, hard = straight_through(logits[0]), logits[0] > 0
        return layer(x, weight, m, ~hard) if of_the_gate else layer(x, weight, hard, 1 - m)

    named, capture = tensors(trained=()), Capture()
    named["logits"][0, 0, 0] = torch.nan
    given = named["x"], named["weight"], named["logits"]
    assert function(*given).isnan().any()
    assert capture.compile(function)(*given).isfinite().all()
    assert [site.hides_nan for site in capture.report.fused] == [True]


def test_terms_around_a_residual_of_a_wider_dtype_are_layers_of_their_own() -> None:
    """Each is fused in its own dtype, in which these whole numbers are exact; their sum has no dtype that all share."""

    def function(x: Tensor, weight: Tensor, bits: Tensor, residual: Tensor) -> Tensor:
        first, second = (F.relu(F.linear(x, weight * m)) * F.linear(x, weight * ~m) for m in bits[:2])
        return first + residual + second

    named, capture = tensors(trained=()), Capture()
    given = named["x"].round().float(), named["weight"].round().float(), named["bits"], named["other"][0]
    assert_same({"y": capture.compile(function)(*given)}, {"y": function(*given)}, SAME)
    assert [len(capture.report.fused), capture.reasons] == [2, []]
