"""Times the forward pass and a training step of the fused layer for many tokens, beside the naive layer and SwiGLU.

All layers are compiled and timed in one run.

python -m benchmarks.train --out benchmarks/results [--tokens 1024 8192] [--masks 1 4 8]
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mglu_ops
from benchmarks.baselines import ComplementTrick
from benchmarks.harness import ERROR_BUDGET, relative_error
from benchmarks.records import Row, write
from benchmarks.timing import gpu_microseconds, interleaved, summarise
from compile_passes.backend import mglu
from mglu_ops.nn import GLU, NaiveMGLU

SHAPE = (8192, 2048)
PROTOCOL = "events around one call, variants interleaved, median over rounds; peak memory over the inputs, in MB"


def step(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    layer(x).backward(grad)


def forward(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> None:
    with torch.no_grad():
        layer(x)


def variants(n_masks: int) -> dict[str, Any]:
    """Layers of one shape, which compile at their first call."""
    torch._dynamo.reset()
    d, h = SHAPE

    def layer(kind: type[NaiveMGLU]) -> NaiveMGLU:
        return kind(h, d, n_masks=n_masks).cuda().bfloat16()

    compiled = {
        "naive compiled": torch.compile(layer(NaiveMGLU)),
        "complement trick compiled": torch.compile(layer(ComplementTrick)),
        "fused": torch.compile(layer(NaiveMGLU), backend=mglu),
    }
    if n_masks == 1:
        compiled["SwiGLU compiled"] = torch.compile(GLU(h, d).cuda().bfloat16())
    return compiled


def peak_megabytes(run: Callable[[], None]) -> float:
    """Largest memory that a call allocates beyond what is allocated before it."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def results(layer: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    """The result of a layer and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    result = layer(x)
    return [result.detach(), *torch.autograd.grad(result, [x, *parameters], grad)]


def errors(compiled: Any, x: Tensor, grad: Tensor) -> dict[str, float]:
    """The largest error of a compiled layer against the same layer in float64, for each case."""
    layer = compiled._orig_mod
    wide = copy.deepcopy(layer).double()
    exact = results(wide, wide.parameters(), x.double(), grad.double())
    with torch.no_grad():
        inferred = compiled(x)
    trained = results(compiled, layer.parameters(), x, grad)
    return {
        "forward": relative_error(inferred, exact[0]),
        "training step": max(relative_error(*pair) for pair in zip(trained, exact, strict=True)),
    }


def bench(tokens: int, n_masks: int, rounds: int) -> list[Row]:
    """Measure one problem: both cases of every variant."""
    d, h = SHAPE
    x = torch.randn(tokens, h, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(tokens, d, device="cuda", dtype=torch.bfloat16)
    layers = variants(n_masks)
    found_errors = {name: errors(layer, x, grad) for name, layer in layers.items()}
    rows = []
    for case, work in (("forward", forward), ("training step", step)):
        runs = {name: lambda layer=layer, work=work: work(layer, x, grad) for name, layer in layers.items()}
        for run in runs.values():
            for _ in range(3):
                run()
        for layer in layers.values():
            layer.zero_grad(set_to_none=True)
        x.grad = None
        peaks = {}
        for name, run in runs.items():
            peaks[name] = peak_megabytes(run)
            layers[name].zero_grad(set_to_none=True)
            x.grad = None
        for name, times in interleaved(runs, gpu_microseconds, rounds).items():
            median, spread = summarise(times)
            error = found_errors[name][case]
            time = median if error <= ERROR_BUDGET[torch.bfloat16] else float("nan")
            extra: dict[str, object] = {"peak_mb": round(peaks[name], 1)}
            rows.append(Row(case, name, tokens, d, h, n_masks, "bfloat16", time, spread, float("nan"), error, extra))
            print(case, rows[-1], flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--masks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [row for tokens in arguments.tokens for n in arguments.masks for row in bench(tokens, n, arguments.rounds)]
    print(mglu_ops.fusion_report())
    write(rows, arguments.out, "train", PROTOCOL)


if __name__ == "__main__":
    main()
