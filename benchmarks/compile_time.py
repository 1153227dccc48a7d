"""What fusing adds to the time of compiling a model: the pass alone, and the whole compilation with and without it.

Beside a stack of MGLU layers stand models that have none, to which the pass must add next to nothing: chains of
elementwise operators of four kinds and growing length, a Llama, a UNet and a ResNet.

python -m benchmarks.compile_time --out benchmarks/results [--layers 32] [--masks 4] [--nodes 10 100 1000 5000]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache
from torch.fx import Graph

from benchmarks.harness import Row, write
from benchmarks.ordinary_models import FEATURES, STEPS, Chain, Llama, UNet, resnet
from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU

WIDTH, HIDDEN = 64, 128
NODES = (10, 100, 1000, 5000)
LLAMA_LAYERS = 200
PROTOCOL = (
    "a first call of torch.compile under no_grad (Dynamo, AOTAutograd and Inductor of the whole graph, whatever its "
    "size), Inductor's caches empty; of MGLU layers variants in turn, median over rounds, of other models once; "
    "the pass: fuse_graph on a copy of the graph that Dynamo captures, CPU time, median over rounds; us per model"
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
    """The graph that Dynamo makes of a model."""
    graphs: list[Graph] = []

    def backend(gm: torch.fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        graphs.append(gm.graph)
        return gm.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend, fullgraph=True)(x)
    return graphs[0]


def time_of_pass(graph: Graph, layers: int) -> float:
    """Seconds to fuse a copy of a graph: of its one thread, so that other load of the machine does not count."""
    copy, report = Graph(), FusionReport()
    copy.output(copy.graph_copy(graph, {}))
    start = time.thread_time()
    fuse_graph(copy, report, strict=True)
    elapsed = time.thread_time() - start
    assert len(report.fused) == layers, f"{len(report.fused)} of {layers} layers fused"
    return elapsed


def time_of_compilation(function: Callable[..., Any], x: Tensor, backend: str) -> float:
    """Seconds of a first call, on a disk that holds nothing of earlier ones, kernels among them."""
    torch._dynamo.reset()
    with fresh_cache(), inductor_config.patch(fx_graph_cache=False):
        start = time.perf_counter()
        torch.compile(function, backend=backend)(x)
        return time.perf_counter() - start


@contextmanager
def no_autograd_cache() -> Any:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def bench(layers: int, n_masks: int, rounds: int) -> list[Row]:
    """The rows of a stack of MGLU layers."""
    layer_stack, x = model(layers, n_masks), torch.randn(3, WIDTH)
    with torch.no_grad(), no_autograd_cache():
        graph = captured(layer_stack, x)
        times: dict[str, list[float]] = {"pass": [], "naive compiled": [], "fused": []}
        time_of_compilation(layer_stack, x, "mglu")  # what a process loads once
        for _ in range(rounds):
            times["pass"].append(time_of_pass(graph, layers))
            times["naive compiled"].append(time_of_compilation(layer_stack, x, "inductor"))
            times["fused"].append(time_of_compilation(layer_stack, x, "mglu"))
    naive = statistics.median(times["naive compiled"])
    name, nodes = f"compile {layers} layers", len(graph.nodes)
    return [
        _row(name, variant, values, {"of_naive": round(statistics.median(values) / naive, 4), "nodes": nodes}, n_masks)
        for variant, values in times.items()
    ]


@dataclass(frozen=True)
class Ordinary:
    """A model with no MGLU layer in it, and how to make it and its input."""

    name: str
    build: Callable[[], tuple[nn.Module, Tensor]]


def chain(step: str, nodes: int) -> Ordinary:
    """A chain of elementwise operators, `step` one of `STEPS`."""
    return Ordinary(f"chain of {step}, {nodes} nodes", lambda: (Chain(step, nodes), torch.randn(3, FEATURES)))


def llama(layers: int) -> Ordinary:
    return Ordinary(f"Llama, {layers} layers", lambda: (Llama(layers), torch.arange(16).view(2, 8)))


UNET = Ordinary("UNet", lambda: (UNet(), torch.randn(1, 3, 64, 64)))
RESNET = Ordinary("ResNet", lambda: (resnet().eval(), torch.randn(1, 3, 64, 64)))


def bench_ordinary(case: Ordinary, rounds: int) -> list[Row]:
    """The rows of a model that the pass leaves as it is: the pass, and the compilation of which it is a part."""
    function, x = case.build()
    with torch.no_grad(), no_autograd_cache():
        assert function(x).isfinite().all(), f"{case.name}: infinite results take other times than usual ones"
        graph = captured(function, x)
        times = {"pass": [time_of_pass(graph, layers=0) for _ in range(rounds)]}
        times["compiled"] = [time_of_compilation(function, x, "inductor")]
    compiled, nodes = times["compiled"][0], len(graph.nodes)

    def extra(seconds: float) -> dict[str, object]:
        a_node = round(seconds / nodes * 1e6, 2)
        return {"of_compiled": round(seconds / compiled, 5), "nodes": nodes, "us_a_node": a_node}

    return [_row(case.name, variant, values, extra(statistics.median(values))) for variant, values in times.items()]


def _row(case: str, variant: str, seconds: Sequence[float], extra: dict[str, object], n_masks: int = 0) -> Row:
    """Times of compiling a model, which has sizes of its own and no error; without masks it has no such features."""
    return Row(
        case=case,
        variant=variant,
        tokens=3 if n_masks else 0,
        out_features=HIDDEN if n_masks else 0,
        in_features=WIDTH if n_masks else 0,
        n_masks=n_masks,
        dtype="float32",
        microseconds=statistics.median(seconds) * 1e6,
        spread=(max(seconds) - min(seconds)) * 1e6,
        fraction_of_ceiling=float("nan"),
        error=float("nan"),
        extra=extra,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--masks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES, help="lengths of the chains")
    parser.add_argument("--llama-layers", type=int, default=LLAMA_LAYERS)
    options = parser.parse_args()
    rows = _printed(bench(options.layers, options.masks, options.rounds))
    chains = [chain(step, nodes) for nodes in options.nodes for step in STEPS]
    for case in (*chains, UNET, RESNET, llama(options.llama_layers)):
        rows += _printed(bench_ordinary(case, options.rounds))
    write(rows, options.out, "compile_time", PROTOCOL)


def _printed(rows: list[Row]) -> list[Row]:
    for row in rows:
        print(f"{row.case:28}{row.variant:16}{row.microseconds / 1e6:9.4f} s  {row.extra}", flush=True)
    return rows


if __name__ == "__main__":
    main()
