"""Times what fusion adds to the compilation of a model: the pass alone, and the compilation with and without it.

It measures a stack of MGLU layers, and models without one, to which the pass must add next to nothing: chains of four
kinds of elementwise operators, a Llama, a UNet, a ResNet, and layers with masked activations.

python -m benchmarks.compile_time --out benchmarks/results [--layers 32] [--n-masks 4] [--nodes 10 100 1000 5000]
    [--masked-layers 100 200 400 800] [--only "padded MLP"]
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
from benchmarks.ordinary_models import FEATURES, MASKED_LAYERS, STEPS, TOKENS, Chain, Masked, UNet, resnet
from benchmarks.records import Row, parser_of, write
from benchmarks.timing import summarise, wall_microseconds
from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import GLU, NaiveMGLU

WIDTH, HIDDEN = 64, 128
NODES = (10, 100, 1000, 5000)
MOST_NODES_TO_COMPILE = {"relu": 10}
"""The longest chain of a step that Inductor compiles here, if limited: 100 nodes of relu take it 11 minutes. Longer
chains are only traced, by Dynamo and AOTAutograd. Tracing is faster, so the pass's share of it is an upper bound of its
share of the whole compilation."""
LLAMA_LAYERS = 200
DEPTHS = (100, 200, 400, 800)
"""Layers of the models with masked activations."""
MOST_LAYERS_TO_COMPILE = {"padded MLP": 200, "MLP with dropout": 40, "split attention": 100, "masked tanh": 400}
"""The deepest model of a kind that Inductor compiles within a minute, if limited. Deeper models are only traced."""
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


def model(layers: int, n_masks: int) -> nn.Module:
    return nn.Sequential(*(Block(n_masks) for _ in range(layers)))


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
    """Seconds of this thread's CPU time, which other load does not affect, to fuse a copy of a graph.

    The garbage collector is off meanwhile, since it visits all objects of the process.

    Args:
        graph: the graph, which is not changed.
        layers: how many layers the pass must fuse.
        may_report: allow the report to mention products that were not fused.
    """
    copy, report = Graph(graph.owning_module), FusionReport()
    copy.output(copy.graph_copy(graph, {}))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="mglu_ops")  # the pass warns if it fails
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
    """Seconds of a first call with empty caches, so that no earlier compilation helps it."""
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch(fx_graph_cache=False):
        return wall_microseconds(lambda: torch.compile(function, backend=backend)(x)) / 1e6


def no_autograd_cache() -> AbstractContextManager[None]:
    """Turn off the cache of AOTAutograd, which `fresh_cache` leaves on."""
    return torch._functorch.config.patch(enable_autograd_cache=False)


def bench(layers: int, n_masks: int, rounds: int) -> list[Row]:
    """Measure a stack of MGLU layers."""
    layer_stack, x = model(layers, n_masks), torch.randn(3, WIDTH)
    with torch.no_grad(), no_autograd_cache():
        graph = captured(layer_stack, x)
        times: dict[str, list[float]] = {"pass": [], "naive compiled": [], "fused": []}
        time_of_compilation(layer_stack, x, "mglu")  # so that no timed call imports modules
        for _ in range(rounds):
            times["pass"].append(time_of_pass(graph, layers))
            times["naive compiled"].append(time_of_compilation(layer_stack, x, "inductor"))
            times["fused"].append(time_of_compilation(layer_stack, x, "mglu"))
    naive = summarise(times["naive compiled"]).median
    name, nodes = f"compile {layers} layers", len(graph.nodes)
    return [
        _row(name, variant, values, {"of_naive": round(summarise(values).median / naive, 4), "nodes": nodes}, n_masks)
        for variant, values in times.items()
    ]


@dataclass(frozen=True)
class Ordinary:
    """A model without an MGLU layer.

    Attributes:
        name: its name in the results.
        build: returns the model and its input.
        backend: `inductor` to compile it, or `aot_eager` to trace it only.
        may_report: whether the report may mention products, because they look like a part of an MGLU layer.
    """

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]
    backend: str = "inductor"
    may_report: bool = False


def chain(step: str, nodes: int) -> Ordinary:
    """A chain of elementwise operators; `step` is one of `STEPS`."""
    backend = "inductor" if nodes <= MOST_NODES_TO_COMPILE.get(step, nodes) else "aot_eager"
    return Ordinary(f"chain of {step}, {nodes} nodes", lambda: (Chain(step, nodes), torch.randn(3, FEATURES)), backend)


def llama(layers: int) -> Ordinary:
    """A decoder with SwiGLU that predicts the tokens of two sequences."""
    sizes = Sizes(layers, FEATURES, 2 * FEATURES, heads=4, kv_heads=4, vocabulary=256, context=64, rope_base=10_000.0)
    return Ordinary(f"Llama, {layers} layers", lambda: (LanguageModel(sizes, GLU), torch.arange(18).view(2, 9)))


def masked(kind: str, layers: int) -> Ordinary:
    """Layers with masked activations; `kind` is one of `MASKED_LAYERS`."""
    return Ordinary(
        f"{kind}, {layers} layers",
        lambda: (Masked(kind, layers), torch.randn(TOKENS, FEATURES)),
        "inductor" if layers <= MOST_LAYERS_TO_COMPILE.get(kind, layers) else "aot_eager",
        may_report=kind == "split attention",  # it multiplies v by two masked forms of the scores
    )


UNET = Ordinary("UNet", lambda: (UNet(), torch.randn(1, 3, 64, 64)))
RESNET = Ordinary("ResNet", lambda: (resnet().eval(), torch.randn(1, 3, 64, 64)))


def bench_ordinary(case: Ordinary, rounds: int) -> list[Row]:
    """Measure the pass and the whole compilation of a model that the pass must not change."""
    function, x = case.build()
    with torch.no_grad(), no_autograd_cache():
        assert function(x).isfinite().all(), f"{case.name}: infinities would change the time of arithmetic"
        graph = captured(function, x)
        times = {"pass": [time_of_pass(graph, layers=0, may_report=case.may_report) for _ in range(rounds)]}
        whole = "compiled" if case.backend == "inductor" else "traced"
        times[whole] = [time_of_compilation(function, x, case.backend)]
    compiled, nodes = times[whole][0], len(graph.nodes)

    def extra(seconds: float) -> dict[str, object]:
        per_node = round(seconds / nodes * 1e6, 2)
        return {"of_compiled": round(seconds / compiled, 5), "nodes": nodes, "us_a_node": per_node}

    return [_row(case.name, variant, values, extra(summarise(values).median)) for variant, values in times.items()]


def _row(case: str, variant: str, seconds: Sequence[float], extra: dict[str, object], n_masks: int = 0) -> Row:
    """A row of compilation times; its sizes are 0 for a model without MGLU layers."""
    tokens, shape = (3, (HIDDEN, WIDTH)) if n_masks else (0, (0, 0))
    times = [1e6 * one for one in seconds]
    return Row.of_times(case, variant, tokens, shape, n_masks, times, dtype=torch.float32, extra=extra)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--n-masks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES, help="lengths of the chains")
    parser.add_argument("--llama-layers", type=int, default=LLAMA_LAYERS)
    parser.add_argument("--masked-layers", type=int, nargs="*", default=DEPTHS, help="depths of the masked models")
    parser.add_argument("--only", help="print the times of models whose names contain this, and write no result")
    options = parser.parse_args()
    chains = [chain(step, nodes) for nodes in options.nodes for step in STEPS]
    masked_models = [masked(kind, layers) for kind in MASKED_LAYERS for layers in options.masked_layers]
    cases = (*chains, UNET, RESNET, llama(options.llama_layers), *masked_models)
    if options.only is not None:
        for case in cases:
            if options.only in case.name:
                _printed(bench_ordinary(case, options.rounds))
        return
    rows = _printed(bench(options.layers, options.n_masks, options.rounds))
    for case in cases:
        rows += _printed(bench_ordinary(case, options.rounds))
    write(rows, options.out, "compile_time", PROTOCOL)


def _printed(rows: list[Row]) -> list[Row]:
    for row in rows:
        print(f"{row.case:34}{row.variant:16}{row.microseconds / 1e6:9.4f} s  {row.extra}", flush=True)
    return rows


if __name__ == "__main__":
    main()
