"""Models that are compiled or exported, and what the pass did in them."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.export import Dim, ExportedProgram
from torch.fx import Graph

from mglu_ops.nn import NaiveMGLU
from tests.support.budgets import BUDGET, relative_error
from tests.support.programs.graphs import call_name
from tests.support.programs.spellings import from_source


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


SAME = 4 * BUDGET[torch.float32]


class Recorder(CustomGraphPass):
    """Another library's pass, which records the operators that each graph calls."""

    def __init__(self, identity: Any = "recorder") -> None:
        self.identity = identity
        self.seen: list[list[str]] = []

    def __call__(self, graph: Graph) -> None:
        self.seen.append([call_name(node) for node in graph.nodes if node.op.startswith("call")])

    def uuid(self) -> Any:
        return self.identity


def layer() -> NaiveMGLU:
    return NaiveMGLU(16, 12, n_masks=2)


def soft_mask() -> Masked:
    """A layer that the pass recognises but cannot fuse."""
    return Masked(torch.randn(12, 16), torch.sigmoid, parameter=True)


def real_mask() -> Masked:
    """A layer with a float mask, which the pass takes for binary only with `assume_binary`."""
    return Masked((torch.rand(12, 16) > 0.5).float(), lambda stored: stored)


def run(model: nn.Module, **options: Any) -> Tensor:
    """Compile a model for inference, run it, and compare the result with eager's."""
    x = torch.randn(3, 16)
    with torch.no_grad():
        result = torch.compile(model, **options)(x)
        assert relative_error(result, model(x)) <= SAME
    return result


def traced_by_inductor(gm: torch.fx.GraphModule, inputs: list[Tensor], **settings: Any) -> Any:
    """A backend that runs Inductor's passes on a graph, with `settings` as config patches, and interprets the graph."""
    return compile_fx(gm, inputs, inner_compile=interpreted, config_patches=settings)


def trace(model: nn.Module, **settings: Any) -> None:
    """Run a model with the backend `traced_by_inductor` and compare the result with eager's."""
    x = torch.randn(3, 16)
    with torch.no_grad():
        result = torch.compile(model, backend=partial(traced_by_inductor, **settings))(x)
        assert relative_error(result, model(x)) <= SAME


def interpreted(gm: torch.fx.GraphModule, _: Any, **options: Any) -> Any:
    """An `inner_compile` for Inductor that compiles nothing."""
    return make_boxed_func(gm.forward)
