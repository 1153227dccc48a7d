"""Makes programs with `torch.export`, saves and loads them, and lists their operators."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from spellings import from_source
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram


def export(module: nn.Module, *example: Tensor, grad: bool = False) -> ExportedProgram:
    """Export a module with a dynamic first dimension in each input."""
    with torch.set_grad_enabled(grad):
        return torch.export.export(module, example, dynamic_shapes=tuple({0: Dim.AUTO} for _ in example))


def operators(program: ExportedProgram) -> list[str]:
    """The operators of mglu_ops in a program, in order."""
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith("mglu")]


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


class OfSource(nn.Module):
    """A module that returns an expression of x and of its own parameters and buffers."""

    def __init__(self, source: str, names: dict[str, Any] | None = None, **tensors: Tensor) -> None:
        super().__init__()
        self.source = source
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.names = list(tensors)
        self.function = from_source(", ".join(["x", *tensors]), source, names or {})

    def extra_repr(self) -> str:
        return self.source

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, *(getattr(self, name) for name in self.names))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape))


class Masked(nn.Module):
    """A layer whose mask is `mask(stored)`, where `stored` is a buffer or a parameter."""

    def __init__(self, stored: Tensor, mask: Callable[[Tensor], Tensor], *, parameter: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(stored.shape[-2:]))
        if parameter:
            self.stored: Tensor = nn.Parameter(stored)
        else:
            self.register_buffer("stored", stored)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        m = self.mask(self.stored)
        other = ~m if m.dtype is torch.bool else 1 - m
        return F.silu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * other)
