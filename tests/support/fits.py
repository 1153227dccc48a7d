"""A random layer for the tests of fits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from mglu_ops.activations import get_activation
from mglu_ops.nn import fitting
from mglu_ops.nn.fitting import Rows, Sample

D, H = 12, 8


def layer(seed: int = 0) -> tuple[Rows, Sample]:
    """A random teacher's layer with 12 neurons, and correlated hidden states of 8 elements."""
    generator = torch.Generator().manual_seed(seed)
    gate, value = torch.randn(2, D, H, generator=generator)
    x, down = (torch.randn(*shape, generator=generator) for shape in ((400, H), (H, D)))
    x = x @ torch.randn(H, H, generator=generator) / 3
    act = get_activation("silu")
    made = Sample(x, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, value), down), act)
    return Rows(gate, value, down, *fitting.sensitivities(gate, value, made)), made
