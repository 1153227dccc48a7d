"""Programs that look like MGLU give what eager gives: kinks, constants, mask arithmetic and arguments of calls.

Whether the pass fuses them is its own choice, but for the few that say so; a refusal must have a reason. The inputs
hold what hides a wrong derivative: mask rows that are all gate or all value, whose gates or values are exactly 0,
and zeros in x and in the weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET
from graphs import Capture, assert_says_why, compare
from spellings import straight_through
from torch import Tensor

SAME = 10 * BUDGET[torch.float64]
D = H = 8  # square, so that no shape tells what is transposed
ALL = ("x", "weight", "logits", "other")

Layer = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Any]
"""`layer(x, weight, logits, bits, other)`."""


def tensors(trained: tuple[str, ...] = ()) -> dict[str, Tensor]:
    """X `[5, 8]`, weight and other `[8, 8]`, logits and bits `[3, 8, 8]`.

    Row 0 of each mask is all value, row 1 all gate; a row of x and one of the weight are 0.
    """
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, weight, logits, other = 3 * normal(5, H), normal(D, H), normal(3, D, H), normal(D, H)
    logits[:, 0], logits[:, 1] = -1, 1
    x[0], weight[2] = 0, 0
    named = {"x": x, "weight": weight, "logits": logits, "bits": logits > 0, "other": other}
    return {name: t.requires_grad_(name in trained) if name != "bits" else t for name, t in named.items()}


def check(layer: Layer, trained: tuple[str, ...] = (), **options: Any) -> Capture:
    """Results and gradients are those of eager, and the report does not pass the layer over in silence."""
    capture = compare(layer, lambda: tensors(trained), SAME, **options)
    assert_says_why(capture)
    return capture


def gated(x: Tensor, weight: Tensor, m: Tensor, complement: Tensor) -> Tensor:
    return F.silu(F.linear(x, weight * m)) * F.linear(x, weight * complement)


# --- Activations at their kinks -------------------------------------------------------------------------------------

# Functions that are relu at every number. At 0, the gradient that torch gives them is 0, 1/2 or 1, relu's is 0.
SPELLINGS_OF_RELU: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "clamp(min=0)": lambda g: g.clamp(min=0),
    "clamp(0)": lambda g: g.clamp(0),
    "clamp(0.0, None)": lambda g: torch.clamp(g, 0.0, None),
    "clamp of a tensor": lambda g: torch.clamp(g, min=torch.zeros_like(g)),
    "clamp_": lambda g: g.clone().clamp_(min=0),
    "clip": lambda g: torch.clip(g, min=0),
    "clamp_min": lambda g: g.clamp_min(0),
    "clamp_min of a keyword": lambda g: torch.clamp_min(g, min=0.0),
    "maximum": lambda g: torch.maximum(g, torch.zeros_like(g)),
    "maximum of swapped operands": lambda g: torch.maximum(torch.zeros_like(g), g),
    "maximum of a number": lambda g: torch.maximum(g, torch.tensor(0.0, dtype=g.dtype)),
}

OTHER_KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "max": lambda g: torch.max(g, torch.zeros_like(g)),
    "fmax": lambda g: torch.fmax(g, torch.zeros_like(g)),
    "-minimum(-g)": lambda g: -torch.minimum(-g, torch.zeros_like(g)),
    "threshold": lambda g: F.threshold(g, 0, 0),
    "threshold at 1": lambda g: F.threshold(g, threshold=1.0, value=0.0),
    "hardtanh": lambda g: F.hardtanh(g, 0.0, float("inf")),
    "leaky_relu of 0": lambda g: F.leaky_relu(g, 0.0),
    "elu of 0": lambda g: F.elu(g, 0.0),
    "g * (g > 0)": lambda g: g * (g > 0),
    "g * (g >= 0)": lambda g: g * (g >= 0),
    "where(g > 0)": lambda g: torch.where(g > 0, g, 0),
    "where(g >= 0)": lambda g: torch.where(g >= 0, g, 0),
    "masked_fill(g < 0)": lambda g: g.masked_fill(g < 0, 0),
    "masked_fill(g <= 0)": lambda g: g.masked_fill(g <= 0, 0),
    "g * heaviside(g)": lambda g: g * torch.heaviside(g.detach(), torch.tensor(0.5, dtype=g.dtype)),
    "g * (sign(g) + 1) / 2": lambda g: g * ((torch.sign(g) + 1) / 2),
    "(g + |g|) / 2": lambda g: (g + g.abs()) / 2,
    "relu(g) - relu(-g)": lambda g: F.relu(g) - F.relu(-g),
    "clamp - clamp of the opposite": lambda g: g.clamp(min=0) - (-g).clamp(min=0),
    "clamp - relu + silu": lambda g: g.clamp(min=0) - F.relu(g) + F.silu(g),
    "maximum - relu + silu": lambda g: torch.maximum(g, torch.zeros_like(g)) - F.relu(g) + F.silu(g),
    "clamp - maximum + relu": lambda g: g.clamp_min(0) - torch.maximum(g, torch.zeros_like(g)) + F.relu(g),
    "relu of clamp": lambda g: F.relu(g.clamp(min=0)),
    "clamp of relu": lambda g: F.relu(g).clamp(min=0),
    "clamp of -0.0": lambda g: g.clamp(min=-0.0),
    "relu(2 g) / 2": lambda g: F.relu(2 * g) / 2,
    "relu6": F.relu6,
    "clamp(0, 1)": lambda g: g.clamp(0, 1),
    "clamp(min=0, max=6)": lambda g: torch.clamp(g, min=0, max=6),
    "clamp(max=0)": lambda g: g.clamp(max=0),
    "clamp_max": lambda g: g.clamp_max(0),
    "clamp(min=-1)": lambda g: g.clamp(min=-1),
    "clamp by the lesser bound": lambda g: g.clamp(min=0, max=-1),
}

# Functions of several terms, which cancel only for who forgets a parameter.
CANCELLING: dict[str, Callable[[Tensor], Tensor]] = {
    "leaky_relu": lambda g: F.leaky_relu(g, 0.2) - F.leaky_relu(g, 0.01) + F.silu(g),
    "leaky_relu by keyword": lambda g: F.leaky_relu(g, negative_slope=0.2) - F.leaky_relu(g) + F.silu(g),
    "elu": lambda g: F.elu(g, 1.0) - F.elu(g, alpha=0.5) + F.silu(g),
    "celu": lambda g: F.celu(g, 1.0) - F.celu(g, alpha=0.5) + F.silu(g),
    "softplus of beta": lambda g: F.softplus(g, 1) - F.softplus(g, beta=2) + F.silu(g),
    "softplus of threshold": lambda g: F.softplus(g, threshold=1) - F.softplus(g) + F.silu(g),
    "hardtanh": lambda g: F.hardtanh(g) - F.hardtanh(g, max_val=2.0) + F.silu(g),
    "hardtanh of a lower bound": lambda g: F.hardtanh(g, -2.0) - F.hardtanh(g, -1.0) + F.silu(g),
    "gelu": lambda g: F.gelu(g, approximate="tanh") - F.gelu(g) + F.silu(g),
    "clamp": lambda g: g.clamp(min=0) - g.clamp(min=0, max=1) + F.silu(g),
    "threshold": lambda g: F.threshold(g, 0, 0) - F.threshold(g, 0, 1) + F.silu(g),
    "dropout": lambda g: F.dropout(g, p=1.0, training=True) - F.dropout(g, p=0.0) + g + F.silu(g),
    "add of alpha": lambda g: torch.add(F.silu(g), g, alpha=2) - g,
    "sub of alpha": lambda g: torch.sub(F.silu(g), g, alpha=2) + g,
    "rsub of alpha": lambda g: torch.rsub(g, F.silu(g), alpha=3) + g,
    "round of decimals": lambda g: torch.round(g, decimals=1) - torch.round(g) + F.silu(g),
    "div of rounding": lambda g: torch.div(g, 2, rounding_mode="trunc") - g / 2 + F.silu(g),
    "log of bases": lambda g: torch.log2(1 + g * g) - torch.log10(1 + g * g) + F.silu(g),
    "pow of a negative exponent": lambda g: F.silu(g) * (1 + g * g) ** -1 + g,
    "pow of a half": lambda g: F.silu(g) * (1 + g * g) ** 0.5,
    "pow of infinity": lambda g: F.silu(g) * torch.sigmoid(g) ** float("inf"),
    "pow of NaN": lambda g: F.silu(g) * torch.nan_to_num(torch.sigmoid(g) ** float("nan")),
    "pow of a base": lambda g: torch.pow(2, g) - torch.pow(g, 2) + F.silu(g),
    "pow of 0": lambda g: F.silu(g) * g**0,
    "softmax of dimensions": lambda g: g.softmax(0) - g.softmax(-1) + F.silu(g),
    "cumsum": lambda g: g.cumsum(0) - g.cumsum(-1) + F.silu(g),
    "mean": lambda g: F.silu(g) - g.mean(-1, keepdim=True) + g.mean(0, keepdim=True),
    "fmod and remainder": lambda g: torch.fmod(g, 2) - torch.remainder(g, 2) + F.silu(g),
    "floor_divide": lambda g: (g.detach() // 2) - g / 2 + F.silu(g),
    "a detached factor": lambda g: g * torch.sigmoid(g).detach(),
    "the other factor detached": lambda g: g.detach() * torch.sigmoid(g),
    "a detached difference": lambda g: F.silu(g) + (F.gelu(g) - F.silu(g)).detach(),
    "a number in a narrower dtype": lambda g: F.silu(g) * torch.full_like(g, 1.001, dtype=torch.bfloat16),
    "a number as an integer": lambda g: F.silu(g) * torch.full_like(g, 1.5, dtype=torch.int64),
}

FUNCTIONS = SPELLINGS_OF_RELU | OTHER_KINKS | {f"sum: {name}": function for name, function in CANCELLING.items()}


def with_function(function: Callable[[Tensor], Tensor], *, learned: bool) -> Layer:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        y: Any = 0
        for i in range(2):
            m = straight_through(logits[i]) if learned else bits[i].double()
            y = y + function(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m))
        return y

    return layer


@pytest.mark.parametrize("trained", [ALL, ("weight",)], ids="+".join)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_the_gate_in_training(name: str, trained: tuple[str, ...]) -> None:
    check(with_function(FUNCTIONS[name], learned="logits" in trained), trained)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_function_of_the_gate_in_inference(name: str) -> None:
    """Without a gradient nothing but the values counts, and all of the first table are relu."""
    capture = check(with_function(FUNCTIONS[name], learned=True))
    if name in SPELLINGS_OF_RELU:
        assert [site.activation for site in capture.report.fused] == ["relu"]
        assert capture.report.missed == []


def test_relu_of_a_clamp_in_inference_under_no_grad() -> None:
    """Parameters that require a gradient do not matter where none is recorded."""
    with torch.no_grad():
        capture = check(with_function(SPELLINGS_OF_RELU["clamp(min=0)"], learned=True), ALL)
    assert [site.activation for site in capture.report.fused] == ["relu"]


# --- Functions of masks ---------------------------------------------------------------------------------------------

# Factor of the value beside a gate that takes m, by the dtype of m: numbers take the dtype of their tensor.
CONSTANTS: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "m < full_like(0.5) of int64": (torch.int64, lambda m: m < torch.full_like(m, 0.5)),
    "m < full_like(0.5) of uint8": (torch.uint8, lambda m: m < torch.full_like(m, 0.5)),
    "m < full_like(0.5) of bool": (torch.bool, lambda m: m < torch.full_like(m, 0.5)),
    "m < full_like(0.5) of float64": (torch.float64, lambda m: m < torch.full_like(m, 0.5)),
    "m < full_like(0.5) cast": (torch.int64, lambda m: m < torch.full_like(m, 0.5, dtype=torch.float32)),
    "m < full_like(0.5) narrowed": (torch.float64, lambda m: m < torch.full_like(m, 0.5, dtype=torch.int8)),
    "m < new_full(0.5)": (torch.int64, lambda m: m < m.new_full(m.shape, 0.5)),
    "m < new_full(0.5), dtype": (torch.int64, lambda m: m < m.new_full((), 0.5, dtype=torch.float64)),
    "m < full(0.5, int)": (torch.int64, lambda m: m < torch.full((D, H), 0.5, dtype=torch.int64)),
    "m < full(0.5)": (torch.int64, lambda m: m < torch.full((D, H), 0.5)),
    "m < full(fill_value=0.5, int)": (torch.int64, lambda m: m < torch.full(size=(), fill_value=0.5, dtype=torch.long)),
    "m < tensor(0.5, int)": (torch.int64, lambda m: m < torch.tensor(0.5, dtype=torch.int64)),
    "m < tensor(0.5)": (torch.int64, lambda m: m < torch.tensor(0.5)),
    "m < tensor(0.5).long()": (torch.int64, lambda m: m < torch.tensor(0.5).long()),
    "m < full_like(0.5).to(int)": (torch.float64, lambda m: m < torch.full_like(m, 0.5).to(torch.int32)),
    "m < tensor(0.5, bool)": (torch.bool, lambda m: m < torch.tensor(0.5, dtype=torch.bool)),
    "m < scalar_tensor(0.5, int)": (torch.int64, lambda m: m < torch.scalar_tensor(0.5, dtype=torch.int32)),
    "m < as_tensor(0.5, int)": (torch.int64, lambda m: m < torch.as_tensor(0.5, dtype=torch.int16)),
    "m > full_like(0.999) of bfloat16": (torch.bfloat16, lambda m: ~(m > torch.full_like(m, 0.999))),
    "m >= full_like(1.001) of bfloat16": (torch.bfloat16, lambda m: ~(m >= torch.full_like(m, 1.001))),
    "m >= full_like(1.0001) of half": (torch.float16, lambda m: ~(m >= torch.full_like(m, 1.0001))),
    "m > full_like(1e-8) of half": (torch.float16, lambda m: m > torch.full_like(m, 1e-8)),
    "m <= full_like(-1e-8) of half": (torch.float16, lambda m: m <= torch.full_like(m, -1e-8)),
    "m > 0.999 of bfloat16": (torch.bfloat16, lambda m: ~(m > 0.999)),
    "m < 1.001 of bfloat16": (torch.bfloat16, lambda m: m < 1.001),
    "m < 0.5 of int64": (torch.int64, lambda m: m < 0.5),
    "m < True": (torch.int64, lambda m: m < True),
    "full_like(1.5) - m of int64": (torch.int64, lambda m: torch.full_like(m, 1.5) - m),
    "full_like(1.5) - m of float64": (torch.float64, lambda m: torch.full_like(m, 1.5) - m),
    "full_like(2) - m of bool": (torch.bool, lambda m: torch.full_like(m, 2).double() - m.double()),
    "full_like(True) - m": (torch.int64, lambda m: torch.full_like(m, True) - m),
    "full_like(257) - m of uint8": (torch.uint8, lambda m: torch.full_like(m, 256, dtype=torch.int64).to(m) - m + 1),
    "ones_like - m of int64": (torch.int64, lambda m: torch.ones_like(m) - m),
    "ones_like ^ m of bool": (torch.bool, lambda m: torch.ones_like(m) ^ m),
    "ones_like(bool) * (1 - m)": (torch.float64, lambda m: torch.ones_like(m, dtype=torch.bool) * (1 - m)),
    "new_ones - m": (torch.uint8, lambda m: m.new_ones(m.shape) - m),
    "zeros_like == m of bool": (torch.bool, lambda m: torch.zeros_like(m) == m),
    "m == zeros_like": (torch.bfloat16, lambda m: m == torch.zeros_like(m)),
    "full_like(0.5) * m of int64": (torch.int64, lambda m: torch.full_like(m, 0.5) * m),
    "full_like(0.9999) - m of bfloat16": (torch.bfloat16, lambda m: torch.full_like(m, 0.9999) - m),
    "0.9999 - m of bfloat16": (torch.bfloat16, lambda m: 0.9999 - m),
    "0.9999 - m of float64": (torch.float64, lambda m: 0.9999 - m),
    "1 - 1.0001 * m of bfloat16": (torch.bfloat16, lambda m: 1 - 1.0001 * m),
    "where(m, 0, 0.5) of int64": (torch.bool, lambda m: torch.where(m, 0, torch.full((), 1.5, dtype=torch.int64))),
    "where of full_like": (torch.int64, lambda m: torch.where(m > 0, torch.zeros_like(m), torch.full_like(m, 0.5))),
    "heaviside(0.5 of an integer)": (torch.int64, lambda m: 1 - torch.heaviside(m, torch.full_like(m, 0.5))),
}

# m is 0 and 1; of what is not plain arithmetic, the note says what torch gives.
ARITHMETIC: dict[str, tuple[torch.dtype, Callable[[Tensor], Tensor]]] = {
    "m - 1 of uint8": (torch.uint8, lambda m: m - 1),  # 255 for 0
    "(m - 1) > 0 of uint8": (torch.uint8, lambda m: (m - 1) > 0),  # the complement
    "(m - 1) > 0 of int64": (torch.int64, lambda m: (m - 1) > 0),  # all False
    "(m - 1) ** 2 of uint8": (torch.uint8, lambda m: (m - 1) * (m - 1)),  # 255 * 255 is 1
    "-(m - 1) of uint8": (torch.uint8, lambda m: -(m - 1)),  # 1 for 0
    "-m > 0 of uint8": (torch.uint8, lambda m: ~(-m > 0)),  # 255 for 1
    "-m of uint8": (torch.uint8, lambda m: 1 + (-m)),
    "m > -1 of uint8": (torch.uint8, lambda m: m > -1),  # torch compares with 255
    "m < -1 of uint8": (torch.uint8, lambda m: m < -1),
    "m == -255 of uint8": (torch.uint8, lambda m: m == -255),
    "m > -1 of int64": (torch.int64, lambda m: m > -1),
    "m < 256 of uint8": (torch.uint8, lambda m: m < 256),
    "m < 257 of uint8": (torch.uint8, lambda m: m < 257),
    "~m of uint8": (torch.uint8, lambda m: ~m),  # 254 and 255
    "~m & 1 of uint8": (torch.uint8, lambda m: ~m & 1),
    "~m + 2 of int64": (torch.int64, lambda m: ~m + 2),
    "~m of int64": (torch.int64, lambda m: ~m),
    "m + m of bool": (torch.bool, lambda m: ~(m + m)),  # True + True is True
    "m + True of bool": (torch.bool, lambda m: m + True),
    "2 - (m + 1) of bool": (torch.bool, lambda m: 2 - (m + 1)),
    "m * 2 of bool": (torch.bool, lambda m: 1 - m * 2),
    "m * m of bool": (torch.bool, lambda m: 1 - (m * m).double()),
    "m ^ m of bool": (torch.bool, lambda m: m ^ m),
    "m ^ 1 of int64": (torch.int64, lambda m: m ^ 1),
    "m ^ 3 of int64": (torch.int64, lambda m: m ^ 3),
    "m | 1 of int64": (torch.int64, lambda m: m | 1),
    "m & 2 of int64": (torch.int64, lambda m: m & 2),
    "m & True of bool": (torch.bool, lambda m: ~(m & True)),
    "m << 1": (torch.int64, lambda m: m << 1),
    "m >> 1": (torch.int64, lambda m: m >> 1),
    "1 >> m": (torch.int64, lambda m: 1 >> m),  # the complement
    "1 - (m << 8) of uint8": (torch.uint8, lambda m: 1 - (m << 7)),
    "m * 255 + 1 of uint8": (torch.uint8, lambda m: m * 255 + 1),  # 0 for 1: the complement
    "m * 127 + 1 of int8": (torch.int8, lambda m: (m * 127 + 1) > 0),  # overflows to -128
    "m * 200 of int8": (torch.float64, lambda m: (m * 200).to(torch.int8) <= 0),
    "m * 256 to uint8": (torch.int64, lambda m: (m * 256).to(torch.uint8) == 0),
    "-m to uint8": (torch.float64, lambda m: (-m).to(torch.int64).to(torch.uint8) == 0),
    "m * 0.5 to int": (torch.float64, lambda m: (m * 0.5).int() == 0),
    "(1 - m * 0.5).int()": (torch.float64, lambda m: (1 - m * 0.5).int()),  # the complement
    "(m - 0.5).bool()": (torch.float64, lambda m: (m - 0.5).bool()),
    "m / 2 rounded to even": (torch.float64, lambda m: 1 - torch.round(m * 0.5)),
    "m * 1.5 rounded to even": (torch.float64, lambda m: torch.round(1.5 - m * 1.5)),
    "round(decimals=-1)": (torch.float64, lambda m: 1 - torch.round(m, decimals=-1)),
    "round(decimals=1)": (torch.float64, lambda m: 1 - torch.round(m * 0.25, decimals=1)),
    "div floor": (torch.int64, lambda m: 1 - torch.div(m, 2, rounding_mode="floor")),
    "div trunc": (torch.float64, lambda m: 1 - torch.div(m, 2, rounding_mode="trunc")),
    "div floor of a negative": (torch.int64, lambda m: 1 + torch.div(-m, 2, rounding_mode="floor")),  # the complement
    "div of no rounding": (torch.float64, lambda m: 1 - torch.div(m, 1, rounding_mode=None)),
    "m // 2": (torch.int64, lambda m: 1 - m // 2),
    "floor_divide of a negative": (torch.int64, lambda m: 1 + torch.floor_divide(-m, 2)),
    "(m + 1) % 2": (torch.int64, lambda m: (m + 1) % 2),
    "m % 1": (torch.int64, lambda m: m % 1),
    "-m % 2": (torch.int64, lambda m: 1 - (-m) % 2),  # 1 for -1, of Python's sign
    "fmod(-m, 2)": (torch.int64, lambda m: 1 - torch.fmod(-m, 2)),  # -1 for -1, of C's sign
    "remainder(2, m + 1)": (torch.int64, lambda m: torch.remainder(2, m + 1)),
    "remainder(m, -2)": (torch.int64, lambda m: 1 - torch.remainder(m, -2)),  # -1 for 1
    "m ** 0": (torch.float64, lambda m: m**0),
    "0 ** m": (torch.float64, lambda m: 0**m),  # the complement
    "2 - 2 ** m": (torch.float64, lambda m: 2 - 2**m),
    "m ** 2": (torch.float64, lambda m: 1 - m**2),
    "m ** 0.5": (torch.float64, lambda m: 1 - (m + 0.0) ** 0.5),
    "rsub of alpha": (torch.float64, lambda m: torch.rsub(m, 1, alpha=2)),
    "rsub of alpha -1": (torch.float64, lambda m: torch.rsub(m, 1, alpha=-1)),
    "sub of alpha": (torch.float64, lambda m: torch.sub(torch.ones_like(m), m, alpha=2)),
    "add of alpha -1": (torch.float64, lambda m: torch.add(torch.ones_like(m), m, alpha=-1)),  # the complement
    "add of alpha 0": (torch.float64, lambda m: torch.add(torch.ones_like(m), m, alpha=0)),
    "1.sub of alpha 0.5": (torch.float64, lambda m: torch.sub(torch.ones_like(m), m, alpha=0.5)),
    "clamp(max=0)": (torch.float64, lambda m: 1 - m.clamp(max=0)),
    "clamp(max=1)": (torch.float64, lambda m: 1 - m.clamp(max=1)),
    "clamp(min=1)": (torch.float64, lambda m: 1 - m.clamp(min=1)),
    "clamp(0.5, 0.2)": (torch.float64, lambda m: 1 - m.clamp(0.5, 0.2)),  # 0.2, the greater bound
    "maximum of another tensor": (torch.float64, lambda m: 1 - torch.maximum(m, m.flip(0))),
    "logical_xor(m, 1)": (torch.int64, lambda m: torch.logical_xor(m, torch.ones_like(m))),
    "logical_and(m, 0)": (torch.int64, lambda m: torch.logical_and(m, torch.zeros_like(m))),
    "logical_or": (torch.bool, lambda m: torch.logical_or(m, ~m)),
    "logical_not twice": (torch.bool, lambda m: torch.logical_not(m.logical_not())),
    "eq of itself": (torch.float64, lambda m: m == m),
    "isclose": (torch.float64, lambda m: torch.isclose(m, torch.zeros_like(m))),
    "cumsum": (torch.int64, lambda m: 1 - m.cumsum(0)),
    "cumsum of the other dimension": (torch.int64, lambda m: 1 - m.cumsum(dim=1)),
    "flip": (torch.float64, lambda m: 1 - m.flip(0)),
    "roll": (torch.float64, lambda m: 1 - m.roll(1, 1)),
    "tril": (torch.float64, lambda m: 1 - m.tril()),
    "sum of a dimension": (torch.int64, lambda m: 1 - m.sum(0, keepdim=True)),
    "sum to uint8": (torch.int64, lambda m: 1 - m.sum(dtype=torch.uint8)),
    "mean of a dimension": (torch.float64, lambda m: 1 - m.mean(dim=0, keepdim=True)),
    "amax of a dimension": (torch.float64, lambda m: 1 - m.amax(1, keepdim=True)),
    "any": (torch.bool, lambda m: ~m.any(0, keepdim=True)),
    "sort": (torch.float64, lambda m: 1 - m.sort(dim=0).values),
    "transpose(dim0=0, dim1=0)": (torch.float64, lambda m: 1 - m.transpose(dim0=0, dim1=0)),  # itself
    "transpose(dim0=0, dim1=1)": (torch.float64, lambda m: 1 - m.transpose(dim0=0, dim1=1)),
    "swapaxes(axis0=-1, axis1=1)": (torch.float64, lambda m: 1 - m.swapaxes(axis0=-1, axis1=1)),  # itself
    "swapdims(dim0=-2, dim1=-1)": (torch.float64, lambda m: 1 - torch.swapdims(m, dim0=-2, dim1=-1)),
    "permute(dims=(1, 0))": (torch.float64, lambda m: 1 - m.permute(dims=(1, 0))),
    "rot90": (torch.float64, lambda m: 1 - torch.rot90(m)),
    "view of the transpose": (torch.float64, lambda m: 1 - m.t().reshape(D, H)),
    "nan_to_num": (torch.float64, lambda m: 1 - torch.nan_to_num(m / m, nan=1.0)),
    "m / m": (torch.float64, lambda m: torch.nan_to_num(m / m, nan=2.0) - 1),  # the complement
    "sign of a difference": (torch.float64, lambda m: torch.sign(0.5 - m)),
    "relu of sign": (torch.float64, lambda m: F.relu(torch.sign(0.5 - m))),  # the complement
    "clamp of sign to uint8": (torch.float64, lambda m: torch.sign(m - 0.5).to(torch.int8).to(torch.uint8).clamp(0, 1)),
    "sign of 0": (torch.float64, lambda m: 1 - F.relu(torch.sign(m - 1) + 1)),
    "heaviside(values=0.5)": (
        torch.float64,
        lambda m: 1 - torch.heaviside(m.detach() - 1, values=torch.full_like(m, 0.5)),
    ),
    "masked_fill(value=2)": (torch.float64, lambda m: m.masked_fill(m == 0, value=2)),
    "where(m == 0, 2, 0)": (torch.float64, lambda m: torch.where(m == 0, 2.0, 0.0)),
    "view as another dtype": (torch.uint8, lambda m: 1 - m.view(torch.int8)),
}

MASK_FUNCTIONS = CONSTANTS | ARITHMETIC


def with_factor(name: str, source: str, *, of_the_value: bool) -> Layer:
    """A function of the mask in place of the value's factor, or of the gate's beside the mask's complement."""
    dtype, function = MASK_FUNCTIONS[name]

    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        m = bits[0] if source == "buffer" else logits[0] > 0
        m = straight_through(logits[0]) if source == "straight-through" else m.to(dtype)
        return gated(x, weight, m, function(m)) if of_the_value else gated(x, weight, function(m), m == 0)

    return layer


@pytest.mark.parametrize("of_the_value", [True, False], ids=["value", "gate"])
@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_function_of_a_mask(name: str, of_the_value: bool) -> None:
    """Of a mask that is a comparison."""
    check(with_factor(name, "comparison", of_the_value=of_the_value), ("x", "weight"))


@pytest.mark.parametrize("name", [name for name, (dtype, _) in MASK_FUNCTIONS.items() if dtype is torch.float64])
def test_function_of_a_straight_through_mask(name: str) -> None:
    """Its derivative counts too, at 0 and at 1."""
    check(with_factor(name, "straight-through", of_the_value=True), ALL)


HARD_FIRST: dict[str, tuple[bool, Callable[[Tensor], Tensor]]] = {
    # whether it fuses, and the value's factor beside a gate of m = hard + L - L.detach(), which is only almost 1
    "1 - m": (True, lambda m: 1 - m),
    "m < 0.5": (True, lambda m: m < 0.5),
    "not m.bool()": (True, lambda m: ~m.bool()),
    "m == 0": (True, lambda m: m == 0),
    "1 - round(m)": (True, lambda m: 1 - m.detach().round()),
    "m < 1": (False, lambda m: m < 1),
    "m != 1": (False, lambda m: m != 1),
    "m >= 1": (False, lambda m: ~(m >= 1)),
    "not (1 - m)": (False, lambda m: (1 - m) != 0),
    "m as an integer": (False, lambda m: 1 - m.to(torch.int32)),
    "m as an integer of bfloat16": (False, lambda m: 1 - m.bfloat16().to(torch.int32)),
    "(m - 1) of uint8": (False, lambda m: (m.to(torch.uint8) - 1) > 0),
    "floor(m)": (False, lambda m: 1 - m.detach().floor()),
}


@pytest.mark.parametrize("trained", [(), ("x", "weight"), ALL], ids=["inference", "frozen masks", "training"])
@pytest.mark.parametrize("name", HARD_FIRST)
def test_function_of_a_mask_with_rounding_errors(name: str, trained: tuple[str, ...]) -> None:
    """A function that jumps at 1 sees the rounding errors of `hard + L - L.detach()`, and the operator does not."""
    fuses, function = HARD_FIRST[name]

    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        m = (logits[0] > 0).to(logits.dtype) + logits[0] - logits[0].detach()
        return gated(x, weight, m, function(m))

    capture = check(layer, trained)
    assert len(capture.report.fused) == (1 if fuses and not (trained == ALL and name != "1 - m") else 0)


class Buffered(torch.nn.Module):
    """A mask of a dtype as a buffer: what it holds may change, so only `assume_binary` makes it binary."""

    def __init__(self, dtype: torch.dtype, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.function = function
        self.register_buffer("m", tensors()["bits"][0].to(dtype))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return gated(x, weight, self.m, self.function(self.m))


def x_and_weight() -> dict[str, Tensor]:
    named = tensors(("x", "weight"))
    return {"x": named["x"], "weight": named["weight"]}


@pytest.mark.parametrize("name", MASK_FUNCTIONS)
def test_function_of_a_buffer(name: str) -> None:
    assert_says_why(compare(Buffered(*MASK_FUNCTIONS[name]), x_and_weight, SAME, assume_binary=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.uint8, torch.int64], ids=str)
def test_a_buffer_that_nothing_proves_is_refused(dtype: torch.dtype) -> None:
    capture = compare(Buffered(dtype, lambda m: 1 - m), x_and_weight, SAME)
    assert capture.report.fused == []
    assert ["nothing proves to be binary" in reason for reason in capture.reasons] == [True]


# --- Arguments of calls ---------------------------------------------------------------------------------------------


def _cube(logits: Tensor) -> Tensor:
    """Bool masks `[8, 8, 8]`, so that no shape tells one dimension from another."""
    return torch.cat([logits, -logits.mT, logits.flip(1)])[:8] > 0


def _term(x: Tensor, weight: Tensor, m: Tensor) -> Tensor:
    return gated(x, weight, m, ~m)


def _pair(x: Tensor, weight: Tensor, m: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, weight * m), F.linear(x, weight * ~m)


def _activated(g: Tensor, v: Tensor) -> Tensor:
    return F.silu(g) * v


def _square(x: Tensor) -> Tensor:
    """As many tokens as features."""
    return torch.cat([x, x.flip(0) * 2])[:H]


# What follows is a layer `(x, weight, logits, bits, other)` whose meaning hangs on one argument of one call.
CALLS: dict[str, Layer] = {
    # Quotients
    "div floor of the activation": lambda x, w, l, b, o: (
        torch.div(F.linear(x, w * b[0]), 1 + torch.exp(-F.linear(x, w * b[0])), rounding_mode="floor")
        * F.linear(x, w * ~b[0])
    ),
    "div trunc of the activation": lambda x, w, l, b, o: (
        F.linear(x, w * b[0]).div(1 + torch.exp(-F.linear(x, w * b[0])), rounding_mode="trunc") * F.linear(x, w * ~b[0])
    ),
    "floor_divide of the activation": lambda x, w, l, b, o: (
        F.linear(x, w * b[0]).detach() // (1 + torch.exp(-F.linear(x, w * b[0]).detach())) * F.linear(x, w * ~b[0])
    ),
    "div floor of the result": lambda x, w, l, b, o: torch.div(_term(x, w, b[0]), 3, rounding_mode="floor"),
    # Transposes: 8 x 8 everywhere
    "transpose(dim0=0, dim1=0)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).transpose(dim0=0, dim1=0), x @ (w * ~b[0]).transpose(dim0=0, dim1=1)
    ),
    "both transpose(dim0=0, dim1=0)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).transpose(dim0=0, dim1=0), x @ (w * ~b[0]).transpose(dim0=0, dim1=0)
    ),
    "transpose(0, 0)": lambda x, w, l, b, o: _activated(
        x @ torch.transpose(w * b[0], 0, 0), x @ torch.transpose(w * ~b[0], -1, 1)
    ),
    "swapaxes(axis0=-1, axis1=1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).swapaxes(axis0=-1, axis1=1), x @ (w * ~b[0]).swapaxes(axis0=-1, axis1=0)
    ),
    "both swapaxes(axis0=-1, axis1=1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).swapaxes(axis0=-1, axis1=1), x @ torch.swapaxes(w * ~b[0], axis0=-1, axis1=1)
    ),
    "swapdims(dim0=1, dim1=1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).swapdims(dim0=1, dim1=1), x @ (w * ~b[0]).swapdims(dim0=1, dim1=0)
    ),
    "permute(dims=(0, 1))": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).permute(dims=(0, 1)), x @ (w * ~b[0]).permute(dims=(1, 0))
    ),
    "permute(-1, -2) and permute(-2, -1)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).permute(-1, -2), x @ (w * ~b[0]).permute([-2, -1])
    ),
    "movedim(source=0, destination=0)": lambda x, w, l, b, o: _activated(
        x @ (w * b[0]).movedim(source=0, destination=0), x @ (w * ~b[0]).movedim(source=0, destination=1)
    ),
    "mT of a stack": lambda x, w, l, b, o: (F.silu(x @ (w * b).mT) * (x @ (w * ~b).transpose(-2, 1))).sum(0),
    "transpose of the masks of a stack": lambda x, w, l, b, o: (
        F.silu(x @ (w * _cube(l)).mT) * (x @ (w * ~_cube(l)).transpose(dim0=0, dim1=1).mT)
    ).sum(0),
    "transposed x": lambda x, w, l, b, o: _activated(
        F.linear(_square(x).transpose(dim0=1, dim1=1), w * b[0]), F.linear(_square(x).t(), w * ~b[0])
    ),
    # Sums
    "add of alpha": lambda x, w, l, b, o: torch.add(_term(x, w, b[0]), _term(x, w, b[1]), alpha=2),
    "method add of alpha": lambda x, w, l, b, o: _term(x, w, b[0]).add(_term(x, w, b[1]), alpha=-1),
    "add_ of alpha": lambda x, w, l, b, o: _term(x, w, b[0]).add_(_term(x, w, b[1]), alpha=0.5),
    "sub of terms": lambda x, w, l, b, o: torch.sub(_term(x, w, b[0]), _term(x, w, b[1]), alpha=-1),
    "rsub of terms": lambda x, w, l, b, o: torch.rsub(_term(x, w, b[0]), _term(x, w, b[1]), alpha=2),
    "total less alpha gates": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), torch.sub(F.linear(x, w), F.linear(x, w * b[0]), alpha=2)
    ),
    "gate from the total": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), torch.rsub(F.linear(x, w * b[0]), F.linear(x, w), alpha=0.5)
    ),
    "weight less alpha masked": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, w.sub(w * b[0], alpha=2))
    ),
    "weight plus -1 masked": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, torch.add(w, w * b[0], alpha=-1))
    ),
    "addcmul of value": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, torch.addcmul(w, w, b[0].double(), value=-0.5))
    ),
    "lerp": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, torch.lerp(w, torch.zeros_like(w), 0.5 * b[0].double()))
    ),
    "sum(keepdim=True)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(0, keepdim=True),
    "sum(0, True)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(0, True),
    "sum of a dtype": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(dim=0, dtype=torch.float32),
    "sum of everything": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(),
    "sum of two dimensions": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(dim=(0, 1)),
    "sum of the other dimension": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b], dim=1).sum(dim=0),
    "sum of no dimension": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).sum(dim=None),
    "sum(axis=)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b], -1).sum(axis=-1),
    "mean(dim=1)": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).mean(dim=1),
    "nansum": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).nansum(0),
    "prod": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).prod(0),
    "cumsum": lambda x, w, l, b, o: torch.stack([_term(x, w, m) for m in b]).cumsum(0)[-2],
    "logical and of terms": lambda x, w, l, b, o: (_term(x, w, b[0]) > 0) & (_term(x, w, b[0]) < 1),
    # Einsum
    "einsum to db": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->db", _square(x), w * b[0]), torch.einsum("bh,dh->db", _square(x), w * ~b[0])
    ),
    "einsum to bd and db": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->bd", _square(x), w * b[0]), torch.einsum("bh,dh->db", _square(x), w * ~b[0])
    ),
    "einsum of hd": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,hd->bd", x, w * b[0]), torch.einsum("bh,dh->bd", x, w * ~b[0])
    ),
    "einsum without arrow": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh", x, w * b[0]), torch.einsum("bh,dh", x, w * ~b[0])
    ),
    "einsum without arrow, other letters": lambda x, w, l, b, o: _activated(
        torch.einsum("zh,ah", _square(x), w * b[0]), torch.einsum("zh,ah->za", _square(x), w * ~b[0])
    ),
    "einsum of the diagonal": lambda x, w, l, b, o: _activated(
        torch.einsum("bd,dd->bd", x, w * b[0]), torch.einsum("bd,dd->bd", x, w * ~b[0])
    ),
    "einsum without sum": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->bdh", x, w * b[0]).sum(-1), torch.einsum("bh,dh->bdh", x, w * ~b[0]).sum(-1)
    ),
    "einsum that sums the tokens": lambda x, w, l, b, o: _activated(
        torch.einsum("bh,dh->d", x, w * b[0]), torch.einsum("bh,dh->d", x, w * ~b[0])
    ),
    "einsum of sublists": lambda x, w, l, b, o: _activated(
        torch.einsum(x, [0, 1], w * b[0], [2, 1], [0, 2]), torch.einsum(x, [0, 1], w * ~b[0], [2, 1], [0, 2])
    ),
    "einsum of capitals": lambda x, w, l, b, o: _activated(
        torch.einsum("Bh,Hh->BH", x, w * b[0]), torch.einsum(" B h , H h -> B H ", x, w * ~b[0])
    ),
    "einsum of a stack by tokens": lambda x, w, l, b, o: (
        F.silu(torch.einsum("nh,ndh->nd", _square(x), w * _cube(l)))
        * torch.einsum("nh,ndh->nd", _square(x), w * ~_cube(l))
    ),
    "einsum of exchanged masks": lambda x, w, l, b, o: (
        F.silu(torch.einsum("bh,ndh->nbd", x, w * _cube(l))) * torch.einsum("bh,ndh->dbn", x, w * ~_cube(l))
    ).sum(0),
    # Products with a bias or a factor
    "linear(bias=)": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0], bias=o[0]), F.linear(input=x, weight=w * ~b[0], bias=None)
    ),
    "linear of a positional bias": lambda x, w, l, b, o: _activated(
        F.linear(x, w * b[0]), F.linear(x, w * ~b[0], o[0])
    ),
    "addmm(beta=2)": lambda x, w, l, b, o: _activated(
        torch.addmm(o[0], x, (w * b[0]).t(), beta=2), torch.addmm(o[0], x, (w * ~b[0]).t(), beta=0)
    ),
    "addmm(alpha=2)": lambda x, w, l, b, o: _activated(
        torch.addmm(o[0], x, (w * b[0]).t(), beta=0, alpha=2), torch.addmm(o[0], x, (w * ~b[0]).t(), beta=0)
    ),
    "addmm by keywords": lambda x, w, l, b, o: _activated(
        torch.addmm(input=o[0], mat1=x, mat2=(w * b[0]).t(), beta=0, alpha=1),
        torch.addmm(mat2=(w * ~b[0]).t(), mat1=x, input=o[0] * 0),
    ),
    "addmm of zeros and alpha": lambda x, w, l, b, o: _activated(
        torch.addmm(torch.zeros(D, dtype=x.dtype), x, (w * b[0]).t(), alpha=0.5), F.linear(x, w * ~b[0])
    ),
    "baddbmm": lambda x, w, l, b, o: (
        F.silu(torch.baddbmm(o[:1], x.expand(3, -1, -1), (w * b).mT, beta=0.5))
        * torch.baddbmm(o[:1], x.expand(3, -1, -1), (w * ~b).mT, beta=0)
    ).sum(0),
    "addbmm": lambda x, w, l, b, o: _activated(
        torch.addbmm(o[:5], x.expand(3, -1, -1), (w * b).mT, beta=0),
        torch.addbmm(o[:5], x.expand(3, -1, -1), (w * ~b).mT, beta=0),
    ),
    "bilinear": lambda x, w, l, b, o: _activated(F.bilinear(x, x, (w * b).mT), F.bilinear(x, x, (w * ~b).mT)),
    # Activations and dropout
    "gelu(approximate=)": lambda x, w, l, b, o: (
        F.gelu(F.linear(x, w * b[0]), approximate="tanh") * F.linear(x, w * ~b[0])
        + F.gelu(F.linear(x, w * b[1]), approximate="none") * F.linear(x, w * ~b[1])
    ),
    "gelu of two terms": lambda x, w, l, b, o: (
        F.gelu(input=F.linear(x, w * b[0])) * F.linear(x, w * ~b[0])
        + F.gelu(approximate="tanh", input=F.linear(x, w * b[1])) * F.linear(x, w * ~b[1])
    ),
    "dropout(p=1, training=True)": lambda x, w, l, b, o: (
        F.silu(F.dropout(F.linear(x, w * b[0]), p=1.0, training=True)) * F.linear(x, w * ~b[0])
    ),
    "dropout(training=False)": lambda x, w, l, b, o: (
        F.silu(F.dropout(F.linear(x, w * b[0]), p=0.9, training=False)) * F.linear(x, w * ~b[0])
    ),
    "dropout of all by default": lambda x, w, l, b, o: (
        F.silu(F.dropout(F.linear(x, w * b[0]), 1.0)) * F.linear(x, w * ~b[0])
    ),
    "torch.dropout(train=True)": lambda x, w, l, b, o: (
        F.silu(torch.dropout(F.linear(x, w * b[0]), 1.0, train=True)) * F.linear(x, w * ~b[0])
    ),
    "alpha_dropout": lambda x, w, l, b, o: (
        F.silu(F.alpha_dropout(F.linear(x, w * b[0]), 0.5, False)) * F.linear(x, w * ~b[0])
    ),
    "silu(input=)": lambda x, w, l, b, o: F.silu(input=F.linear(x, w * b[0])) * F.linear(x, w * ~b[0]),
    "softmax of gates": lambda x, w, l, b, o: F.linear(x, w * b[0]).softmax(dim=-1) * F.linear(x, w * ~b[0]),
    "glu": lambda x, w, l, b, o: F.glu(torch.cat(_pair(x, w, b[0]), 0), dim=0),
    "glu of the last dimension": lambda x, w, l, b, o: F.glu(torch.cat(_pair(x, w, b[0]), -1)),
    # Choices
    "where by keywords": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.where(condition=b[0], input=w, other=0)),
        F.linear(x, torch.where(other=w, input=torch.zeros_like(w), condition=b[0])),
    ),
    "where of swapped keywords": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.where(input=torch.zeros_like(w), other=w, condition=b[0])),
        F.linear(x, torch.where(b[0], other=w, input=torch.zeros_like(w))),
    ),
    "method where": lambda x, w, l, b, o: _activated(
        F.linear(x, w.where(b[0], 0.0)), F.linear(x, w.where(condition=~b[0], other=torch.zeros_like(w)))
    ),
    "where of another number": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.where(b[0], w, 1.0)), F.linear(x, torch.where(b[0], 0.0, w))
    ),
    "masked_fill(value=1)": lambda x, w, l, b, o: _activated(
        F.linear(x, w.masked_fill(mask=~b[0], value=1.0)), F.linear(x, w.masked_fill(b[0], value=0.0))
    ),
    "masked_fill of a tensor": lambda x, w, l, b, o: _activated(
        F.linear(x, w.masked_fill(~b[0], o[0, 0].detach())), F.linear(x, w.masked_fill(b[0], torch.tensor(0.0)))
    ),
    "masked_scatter": lambda x, w, l, b, o: _activated(
        F.linear(x, w.masked_scatter(~b[0], torch.zeros_like(w))), F.linear(x, w.masked_scatter(b[0], o))
    ),
    "index_put(accumulate=True)": lambda x, w, l, b, o: _activated(
        F.linear(x, w.clone().index_put_((~b[0],), torch.tensor(0.0).double(), accumulate=True)),
        F.linear(x, w.clone().index_put_((b[0],), torch.tensor(0.0).double())),
    ),
    # Slices of masks
    "select(dim=1)": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).select(dim=1, index=0)),
    "select(index=0, dim=0)": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).select(index=0, dim=0)),
    "select of the last dimension": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~torch.select(_cube(l), -1, 0)),
    "index of the second dimension": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l)[:, 0]),
    "unbind(dim=1)": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).unbind(dim=1)[0]),
    "torch.unbind of the last": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~torch.unbind(_cube(l), dim=-1)[0]),
    "chunk of another dimension": lambda x, w, l, b, o: gated(
        x, w, _cube(l).chunk(8, dim=0)[0].squeeze(0), ~_cube(l).chunk(8, dim=1)[0].squeeze(1)
    ),
    "movedim of masks": lambda x, w, l, b, o: gated(x, w, _cube(l)[0], ~_cube(l).movedim(1, 0)[0]),
    "index of a list": lambda x, w, l, b, o: gated(x, w, _cube(l)[[0, 1]][1], ~_cube(l)[0]),
    "index of a tensor": lambda x, w, l, b, o: gated(x, w, _cube(l)[torch.tensor(1)], ~_cube(l)[0]),
    "slice with a step": lambda x, w, l, b, o: gated(x, w, _cube(l)[::2][1], ~_cube(l)[1]),
    "slice with an end": lambda x, w, l, b, o: gated(x, w, _cube(l)[1:][0], ~_cube(l)[0]),
    "stack of masks along 1": lambda x, w, l, b, o: gated(x, w, torch.stack([b[0], b[1]], 1)[:, 0], ~b[1]),
    # Comparisons
    "gt of a keyword": lambda x, w, l, b, o: gated(x, w, torch.gt(l[0], other=0.5), torch.le(l[0], other=0)),
    "gt by keywords": lambda x, w, l, b, o: gated(
        x, w, torch.gt(input=l[0], other=0.0), torch.le(input=l[0], other=0.0)
    ),
    "gt and lt": lambda x, w, l, b, o: gated(x, w, l[0] > 0.5, l[0] < 0.5),
    "gt and le of another bound": lambda x, w, l, b, o: gated(x, w, l[0] > 0.0, l[0] <= 1e-9),
    "gt of swapped operands": lambda x, w, l, b, o: gated(x, w, l[0] > o, o > l[0]),
    "ge and le": lambda x, w, l, b, o: gated(x, w, l[0] >= -1, l[0] <= -1),  # row 0 is both
    "gt and ge": lambda x, w, l, b, o: gated(x, w, l[0] > -1, ~(l[0] >= -1)),
    "gt of a bound a row": lambda x, w, l, b, o: gated(x, w, l[0] > o[:1], l[0] <= o[:, :1]),
    "lt of a number and a cast": lambda x, w, l, b, o: gated(x, w, l[0] > 0, l[0].int() <= 0),
    "gt of a rounded tensor": lambda x, w, l, b, o: gated(x, w, l[0] > 0.3, l[0].half() <= 0.3),
    "isnan": lambda x, w, l, b, o: gated(x, w, ~(l[0] / l[0].relu()).isnan(), l[0] <= 0),
    # Numbers and shapes
    "multiply by keywords": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.mul(input=w, other=b[0])), F.linear(x, torch.mul(other=o, input=~b[0]))
    ),
    "expand(size=)": lambda x, w, l, b, o: gated(x, w, b[0][:1].expand(size=(D, H)), ~b[0][:1].expand(D, H)),
    "expand of a column": lambda x, w, l, b, o: gated(x, w, b[0][:, :1].expand(D, H), ~b[0][:1].expand(D, H)),
    "repeat of x": lambda x, w, l, b, o: _activated(
        F.linear(x.repeat(2, 1), w * b[0]), F.linear(x, w * ~b[0]).repeat(2, 1)
    ),
    "repeat along the masks": lambda x, w, l, b, o: (
        F.silu(x.repeat(3, 1, 1) @ (w * b).mT) * (x.repeat(3, 1).view(3, 5, H).flip(1) @ (w * ~b).mT)
    ).sum(0),
    "unsqueeze(dim=1)": lambda x, w, l, b, o: (
        F.silu(torch.einsum("bh,ndh->nbd", _square(x), w * _cube(l)))
        * (F.linear(_square(x), w).unsqueeze(dim=1) - torch.einsum("bh,ndh->nbd", _square(x), w * _cube(l)))
    ).sum(0),
    "to(dtype=) of a weight": lambda x, w, l, b, o: _activated(
        F.linear(x, w.to(dtype=torch.float16).to(w.dtype) * b[0]), F.linear(x, w * ~b[0])
    ),
    "type of a weight": lambda x, w, l, b, o: _activated(
        F.linear(x, w.type(torch.int8).type_as(w) * b[0]), F.linear(x, w.type(dtype=torch.int8).double() * ~b[0])
    ),
    "normalize of another p": lambda x, w, l, b, o: _activated(
        F.linear(x, F.normalize(w + 1) * b[0]), F.linear(x, F.normalize(w + 1, p=1) * ~b[0])
    ),
    "normalize of another dim": lambda x, w, l, b, o: _activated(
        F.linear(x, F.normalize(w + 1) * b[0]), F.linear(x, F.normalize(w + 1, dim=0) * ~b[0])
    ),
    "narrow of x": lambda x, w, l, b, o: _activated(
        F.linear(x.narrow(0, 0, 4), w * b[0]), F.linear(x.narrow(0, start=1, length=4), w * ~b[0])
    ),
    "roll of x": lambda x, w, l, b, o: _activated(F.linear(x.roll(1, 0), w * b[0]), F.linear(x.roll(1, 1), w * ~b[0])),
    "cat of weights along 1": lambda x, w, l, b, o: _activated(
        *F.linear(torch.cat([x, x], 1), torch.cat([w * b[0], w * ~b[0]], dim=1)).expand(2, -1, -1).unbind(0)
    ),
    "chunk of the tokens": lambda x, w, l, b, o: _activated(
        *F.linear(x[:4], torch.cat([w * b[0], w * ~b[0]], dim=0)).chunk(2, dim=0)
    ),
    "chunk in four": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).chunk(4, dim=-1)[1:3]
    ),
    "split at another row": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).split([4, 12], dim=-1)[:1], o[:5, :4]
    ),
    "interleaved cat": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.stack([w * b[0], w * ~b[0]], dim=1).flatten(0, 1)).chunk(2, dim=-1)
    ),
    "strided slices of a cat": lambda x, w, l, b, o: _activated(
        F.linear(x, torch.cat([w * b[0], w * ~b[0]]))[:, ::2], F.linear(x, torch.cat([w * b[0], w * ~b[0]]))[:, 1::2]
    ),
    "unflatten of another order": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).unflatten(-1, (D, 2)).unbind(-1)
    ),
    "view of another order": lambda x, w, l, b, o: _activated(
        *F.linear(x, torch.cat([w * b[0], w * ~b[0]])).view(2, 5, D).unbind(0)
    ),
}


# Programs that are not one x times two masked forms of one weight, of which the report need not speak.
MAY_BE_SILENT = {
    *("transposed x", "repeat of x", "repeat along the masks", "narrow of x", "roll of x"),
    *("addcmul of value", "lerp", "where of another number", "masked_fill(value=1)", "masked_fill of a tensor"),
    *("masked_scatter", "index_put(accumulate=True)", "multiply by keywords", "bilinear", "addbmm"),
    *("einsum of the diagonal", "einsum without sum", "einsum that sums the tokens", "einsum of a stack by tokens"),
    *("cat of weights along 1", "split at another row"),
}


@pytest.mark.parametrize("trained", [ALL, ()], ids=["training", "inference"])
@pytest.mark.parametrize("name", CALLS)
def test_arguments_of_a_call(name: str, trained: tuple[str, ...]) -> None:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Any:
        return CALLS[name](x, weight, logits, bits, other)

    capture = compare(layer, lambda: tensors(trained), SAME)
    if name not in MAY_BE_SILENT:
        assert_says_why(capture)
