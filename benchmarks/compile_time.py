"""Times the compilation of models with and without the fusion pass, and the pass alone.

One model is a stack of MGLU layers. The other models have no MGLU layers, and the pass must hardly slow down their
compilation: chains of elementwise operators, a Llama, a UNet, a ResNet, and layers with masked activations.

python -m benchmarks.compile_time --out benchmarks/results
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

from benchmarks.decoder import Sizes
from benchmarks.language_model import LanguageModel
from benchmarks.ordinary_models import (
    FEATURES,
    MASKED_LAYERS,
    STEPS,
    TOKENS,
    Chain,
    Masked,
    UNet,
    UnknownCalls,
    Writes,
    resnet,
)
from benchmarks.records import Row, measure, parser_of
from benchmarks.timing import summarise, wall_microseconds
from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import GLU, NaiveMGLU

ROUNDS = 3
WIDTH, HIDDEN = 64, 128
MOST_NODES_TO_COMPILE = {"relu": 10}
"""Step -> number of nodes of the longest chain that Inductor compiles here. It takes 11 minutes for 100 nodes of relu.

Longer chains are only traced, by Dynamo and AOTAutograd. Since tracing is faster than compilation, the time of the pass
divided by the time of tracing is an upper bound of the pass's share of a compilation."""
MOST_LAYERS_TO_COMPILE = {"padded MLP": 200, "MLP with dropout": 40, "split attention": 100, "masked tanh": 400}
"""Kind of model -> number of layers that Inductor compiles within a minute. Deeper models are only traced."""
PROTOCOL = (
    "a first call of torch.compile under no_grad (Dynamo, AOTAutograd and Inductor of the whole graph, whatever its "
    "size), Inductor's caches empty; of MGLU layers variants in turn, median over rounds, of other models once; "
    "traced: without Inductor, for models that it takes too long to compile; "
    "the pass: fuse_graph on a copy of the graph that Dynamo captures, CPU time without garbage collection, "
    "median over rounds; us per model"
)


class Block(nn.Module):
    def __init__(self, n_masks: int) -> None:
        super().__init__()
        self.norm, self.mlp = nn.RMSNorm(WIDTH), NaiveMGLU(WIDTH, HIDDEN, n_masks=n_masks)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.mlp(self.norm(x)))


def captured(function: Callable[..., Any], x: Tensor) -> Graph:
    """The graph that Dynamo captures from a model."""
    graphs: list[Graph] = []

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return graphs[0]


def time_of_pass(graph: Graph, layers: int, may_report: bool = False) -> float:
    """Seconds of this thread's CPU time to fuse a copy of a graph. Other load does not affect CPU time.

    The garbage collector is off while the pass runs, because it would visit all objects of the process.

    Args:
        graph: the graph.
        layers: the number of layers that the pass must fuse.
        may_report: allow the report to mention products that were not fused.
    """
    copy, report = Graph(graph.owning_module), FusionReport()
    copy.output(copy.graph_copy(graph, {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mglu_ops")  # otherwise, a failure of the pass only warns
        gc.disable()
        try:
            start = time.thread_time()
            fuse_graph(copy, report, strict=not may_report)
            elapsed = time.thread_time() - start
        finally:
            gc.enable()
    assert len(report.fused) == layers, f"{len(report.fused)} of {layers} layers fused"
    return elapsed


def time_of_compilation(function: Callable[..., Any], x: Tensor, backend: str) -> float:
    """Seconds of a first call, with empty caches."""
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch(fx_graph_cache=False):
        return wall_microseconds(lambda: torch.compile(function, backend=backend)(x)) / 1e6


def no_autograd_cache() -> AbstractContextManager[None]:
    """Turn off the cache of AOTAutograd, which `fresh_cache` leaves on."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


@dataclass(frozen=True)
class Case:
    """A model to compile.

    Attributes:
        name: the case's name in the results.
        build: returns the model and its input.
        backend: `inductor` to compile the model, or `aot_eager` to trace it only.
        may_report: allow the report to mention products that look like parts of an MGLU layer.
        layers: number of MGLU layers, all of which the pass must fuse. A model without any is compiled only without
            fusion.
        n_masks: number of masks of each MGLU layer.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    backend: str = "inductor"
    may_report: bool = False
    layers: int = 0
    n_masks: int = 0


def mglu_layers(n_masks: int, layers: int = 32) -> Case:
    """A stack of MGLU layers."""
    name = f"compile {layers} layers"

    def build() -> tuple[nn.Module, Tensor]:
        return nn.Sequential(*(Block(n_masks) for _ in range(layers))), torch.randn(3, WIDTH)

    return Case(name, build, layers=layers, n_masks=n_masks)


def chain(step: str, nodes: int) -> Case:
    """A chain of elementwise operators. `step` is one of `STEPS`."""
    backend = "inductor" if nodes <= MOST_NODES_TO_COMPILE.get(step, nodes) else "aot_eager"
    return Case(f"chain of {step}, {nodes} nodes", lambda: (Chain(step, nodes), torch.randn(3, FEATURES)), backend)


def llama(layers: int) -> Case:
    """A decoder with SwiGLU that predicts the tokens of two sequences."""
    sizes = Sizes(layers, FEATURES, 2 * FEATURES, heads=4, kv_heads=4, vocabulary=256, context=64, rope_base=10_000.0)
    return Case(f"Llama, {layers} layers", lambda: (LanguageModel(sizes, GLU), torch.arange(18).view(2, 9)))


def masked(kind: str, layers: int) -> Case:
    """Layers with masked activations. `kind` is one of `MASKED_LAYERS`."""
    return Case(
        f"{kind}, {layers} layers",
        lambda: (Masked(kind, layers), torch.randn(TOKENS, FEATURES)),
        "inductor" if layers <= MOST_LAYERS_TO_COMPILE.get(kind, layers) else "aot_eager",
        may_report=kind == "split attention",  # it looks like MGLU: scores under a mask and its complement
    )


def unknown_calls(calls: int) -> Case:
    """A chain of calls whose effects the pass does not know."""
    return Case(f"{calls} unknown calls", lambda: (UnknownCalls(calls), torch.randn(3, FEATURES)), "aot_eager")


def writes(count: int) -> Case:
    """A tensor whose rows are written one after the other."""
    return Case(f"{count} writes y[i] = x", lambda: (Writes(count), torch.randn(3, FEATURES)), "aot_eager")


UNET = Case("UNet", lambda: (UNet(), torch.randn(1, 3, 64, 64)))
RESNET = Case("ResNet", lambda: (resnet().eval(), torch.randn(1, 3, 64, 64)))
CASES = (
    mglu_layers(4),
    *(chain(step, nodes) for nodes in (10, 100, 1000, 5000) for step in STEPS),
    *(UNET, RESNET, llama(200)),
    *(make(count) for make in (unknown_calls, writes) for count in (200, 600)),
    *(masked(kind, layers) for kind in MASKED_LAYERS for layers in (100, 200, 400, 800)),
)


def bench(case: Case) -> list[Row]:
    """Measure the pass and the whole compilation of a model."""
    function, x = case.build()
    variants = {"compiled" if case.backend == "inductor" else "traced": case.backend}
    if case.layers:
        variants = {"naive compiled": "inductor", "fused": "mglu"}
    times: dict[str, list[float]] = {name: [] for name in ("pass", *variants)}
    with torch.no_grad(), no_autograd_cache():
        assert function(x).isfinite().all(), f"{case.name}: infinities would change the time of arithmetic"
        graph = captured(function, x)
        if case.layers:
            time_of_compilation(function, x, "mglu")  # imports modules before the first timed call
        for i in range(ROUNDS):
            times["pass"].append(time_of_pass(graph, case.layers, case.may_report))
            for name, backend in variants.items():
                if case.layers or i == 0:
                    times[name].append(time_of_compilation(function, x, backend))
    tokens, shape = (3, (HIDDEN, WIDTH)) if case.layers else (0, (0, 0))
    nodes, rows = len(graph.nodes), []
    for name, seconds in times.items():
        microseconds = [1e6 * one for one in seconds]
        extra: dict[str, object] = {"nodes": nodes, "us_a_node": round(summarise(microseconds).median / nodes, 2)}
        size = tokens, shape, case.n_masks
        rows.append(Row.of_times(case.name, name, *size, microseconds, dtype=torch.float32, extra=extra))
    return rows


if __name__ == "__main__":
    measure(CASES, bench, parser_of(__doc__).parse_args().out, "compile_time", PROTOCOL)
