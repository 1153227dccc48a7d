"""What fusing adds to the time of compiling a model: the pass alone, and the whole compilation with and without it.

python -m benchmarks.compile_time --out benchmarks/results [--layers 32] [--masks 4]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor, nn
from torch.fx import Graph

from benchmarks.harness import Row, write
from compile_passes.fusion import fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU

WIDTH, HIDDEN = 64, 128
PROTOCOL = (
    "a first call of torch.compile under no_grad, Inductor's cache off, variants in turn, median over rounds; "
    "the pass: fuse_graph on a copy of the graph that Dynamo captures; us per model"
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
    """Seconds to fuse a copy of a graph."""
    copy, report = Graph(), FusionReport()
    copy.output(copy.graph_copy(graph, {}))
    start = time.perf_counter()
    fuse_graph(copy, report, strict=True)
    elapsed = time.perf_counter() - start
    assert len(report.fused) == layers, f"{len(report.fused)} of {layers} layers fused"
    return elapsed


def time_of_compilation(function: Callable[..., Any], x: Tensor, backend: str) -> float:
    """Seconds of a first call."""
    torch._dynamo.reset()
    with inductor_config.patch(fx_graph_cache=False):
        start = time.perf_counter()
        torch.compile(function, backend=backend)(x)
        return time.perf_counter() - start


@contextmanager
def no_autograd_cache() -> Any:
    with torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def bench(layers: int, n_masks: int, rounds: int) -> list[Row]:
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
    return [
        Row(
            case=f"compile {layers} layers",
            variant=name,
            tokens=3,
            out_features=HIDDEN,
            in_features=WIDTH,
            n_masks=n_masks,
            dtype="float32",
            microseconds=statistics.median(values) * 1e6,
            spread=(max(values) - min(values)) * 1e6,
            fraction_of_ceiling=float("nan"),
            error=float("nan"),
            extra={"of_naive": round(statistics.median(values) / naive, 4)},
        )
        for name, values in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--masks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    rows = bench(options.layers, options.masks, options.rounds)
    for row in rows:
        print(f"{row.variant:16}{row.microseconds / 1e6:8.2f} s  {row.extra}")
    write(rows, options.out, "compile_time", PROTOCOL)


if __name__ == "__main__":
    main()
