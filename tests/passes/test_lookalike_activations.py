"""Layers with functions of the gate that are almost an activation have eager's results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.families import sample
from tests.support.programs.lookalikes import ALL, Layer, check
from tests.support.programs.spellings import straight_through

# Functions with the values of relu but another derivative at 0, and functions that would equal silu if the pass ignored
# an argument of one of their calls.
DOUBTFUL_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp": lambda g: g.clamp(min=0),
    "clamp_min": lambda g: torch.clamp_min(g, 0),
    "where(g > 0)": lambda g: torch.where(g > 0, g, 0),
    "g * (g > 0)": lambda g: g * (g > 0),
    "threshold": lambda g: F.threshold(g, 0, 0),
    "clamp(0, 1)": lambda g: g.clamp(min=0, max=1),
    "clamp - relu + silu": lambda g: g.clamp(min=0) - F.relu(g) + F.silu(g),
    "slopes": lambda g: F.leaky_relu(g, 0.2) - F.leaky_relu(g, 0.01) + F.silu(g),
    "gelus": lambda g: F.gelu(g, approximate="tanh") - F.gelu(g) + F.silu(g),
    "floor": lambda g: torch.div(g, 1 + torch.exp(-g), rounding_mode="floor"),
    "dropout of all": lambda g: F.dropout(g, p=1.0, training=True) + F.silu(g),
    "detached factor": lambda g: g * torch.sigmoid(g).detach(),
    "constant of an integer": lambda g: g * torch.full_like(g, 0.5, dtype=torch.int64) + F.silu(g),
}


# More functions with a kink, most of which have the values of relu. Their gradients at 0 in torch are 0, 1/2 or 1.
KINKS: dict[str, Callable[[Tensor], Tensor]] = {
    "clamp of a tensor": lambda g: torch.clamp(g, min=torch.zeros_like(g)),
    "threshold at 1": lambda g: F.threshold(g, threshold=1.0, value=0.0),
    "hardtanh": lambda g: F.hardtanh(g, 0.0, float("inf")),
    "masked_fill(g < 0)": lambda g: g.masked_fill(g < 0, 0),
    "g * heaviside(g)": lambda g: g * torch.heaviside(g.detach(), torch.tensor(0.5, dtype=g.dtype)),
    "g * (sign(g) + 1) / 2": lambda g: g * ((torch.sign(g) + 1) / 2),
    "(g + |g|) / 2": lambda g: (g + g.abs()) / 2,
    "relu(g) - relu(-g)": lambda g: F.relu(g) - F.relu(-g),
    "clamp - clamp of the opposite": lambda g: g.clamp(min=0) - (-g).clamp(min=0),
    "clamp - maximum + relu": lambda g: g.clamp_min(0) - torch.maximum(g, torch.zeros_like(g)) + F.relu(g),
    "relu6": F.relu6,
    "clamp(max=0)": lambda g: g.clamp(max=0),
    "clamp(min=-1)": lambda g: g.clamp(min=-1),
}

# Sums and products that would equal silu if the pass ignored an argument of one of their calls.
CANCELLING: dict[str, Callable[[Tensor], Tensor]] = {
    "hardtanh": lambda g: F.hardtanh(g) - F.hardtanh(g, max_val=2.0) + F.silu(g),
    "clamp": lambda g: g.clamp(min=0) - g.clamp(min=0, max=1) + F.silu(g),
    "round of decimals": lambda g: torch.round(g, decimals=1) - torch.round(g) + F.silu(g),
    "pow of a negative exponent": lambda g: F.silu(g) * (1 + g * g) ** -1 + g,
    "pow of NaN": lambda g: F.silu(g) * torch.nan_to_num(torch.sigmoid(g) ** float("nan")),
    "pow of a base": lambda g: torch.pow(2, g) - torch.pow(g, 2) + F.silu(g),
    "pow of 0": lambda g: F.silu(g) * g**0,
    "mean": lambda g: F.silu(g) - g.mean(-1, keepdim=True) + g.mean(0, keepdim=True),
    "a detached difference": lambda g: F.silu(g) + (F.gelu(g) - F.silu(g)).detach(),
    "a number in a narrower dtype": lambda g: F.silu(g) * torch.full_like(g, 1.001, dtype=torch.bfloat16),
}

FUNCTIONS = DOUBTFUL_FUNCTIONS | KINKS | {f"sum: {name}": function for name, function in CANCELLING.items()}


def with_function(function: Callable[[Tensor], Tensor], *, learned: bool) -> Layer:
    def layer(x: Tensor, weight: Tensor, logits: Tensor, bits: Tensor, other: Tensor) -> Tensor:
        y: Any = 0
        for i in range(2):
            m = straight_through(logits[i]) if learned else bits[i].double()
            y = y + function(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m))
        return y

    return layer


@pytest.mark.parametrize("trained", [ALL, ("weight",), ()], ids=["all", "weight", "inference"])
@pytest.mark.parametrize("name", sample(FUNCTIONS, every=10))
def test_function_of_the_gate(name: str, trained: tuple[str, ...]) -> None:
    check(with_function(FUNCTIONS[name], learned=trained != ("weight",)), trained)
