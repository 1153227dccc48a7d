"""A model with one MGLU layer written in plain torch, for the commands in README.md."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mglu_ops.nn import NaiveMGLU


def model() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model and its example inputs."""
    layers = nn.Sequential(NaiveMGLU(64, 256, n_masks=4), nn.Linear(256, 64, bias=False))
    return layers.eval(), (torch.randn(1, 64),)
