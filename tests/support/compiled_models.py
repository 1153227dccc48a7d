"""Models for torch.compile, and a custom pass such as another library may register."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from budgets import BUDGET, relative_error
from exported import Masked
from functorch.compile import make_boxed_func
from graphs import call_name
from torch import Tensor, nn
from torch._inductor.compile_fx import compile_fx
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from mglu_ops.nn import NaiveMGLU

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
