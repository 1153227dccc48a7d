"""Many tokens: forward and a training step of the fused layer against the naive one, both compiled, in one run.

python -m benchmarks.train --out benchmarks/results [--tokens 1024 8192] [--masks 1 4 8]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import mglu_ops
from benchmarks.harness import ERROR_BUDGET, Row, relative_error, write
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
    """Layers of one shape, compiled; each compiles at its first call."""
    torch._dynamo.reset()
    d, h = SHAPE
    layers = {name: NaiveMGLU(h, d, n_masks=n_masks).cuda().bfloat16() for name in ("naive compiled", "fused")}
    compiled = {
        "naive compiled": torch.compile(layers["naive compiled"]),
        "fused": torch.compile(layers["fused"], backend=mglu),
    }
    if n_masks == 1:
        compiled["SwiGLU compiled"] = torch.compile(GLU(h, d).cuda().bfloat16())
    return compiled


def time_of(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1000


def peak_of(run: Callable[[], None]) -> float:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def results(layer: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], x: Tensor, grad: Tensor) -> list[Tensor]:
    """The result, and the gradients of x and the parameters."""
    x = x.detach().requires_grad_()
    result = layer(x)
    return [result.detach(), *torch.autograd.grad(result, [x, *parameters], grad)]


def errors(compiled: Any, x: Tensor, grad: Tensor) -> dict[str, float]:
    """By case, the largest error of what a compiled layer computes against the same layer in float64."""
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
            peaks[name] = peak_of(run)
            layers[name].zero_grad(set_to_none=True)
            x.grad = None
        times: dict[str, list[float]] = {name: [] for name in runs}
        for _ in range(rounds):
            for name, run in runs.items():
                times[name].append(time_of(run))
        for name, found in times.items():
            low, middle, high = statistics.quantiles(found, n=4)
            error = found_errors[name][case]
            time = middle if error <= ERROR_BUDGET[torch.bfloat16] else float("nan")
            extra: dict[str, object] = {"peak_mb": round(peaks[name], 1)}
            rows.append(
                Row(case, name, tokens, d, h, n_masks, "bfloat16", time, high - low, float("nan"), error, extra)
            )
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
