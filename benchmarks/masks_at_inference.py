"""What the masks cost at inference, by the way in which a naive model comes to its fused layer.

python -m benchmarks.masks_at_inference --out benchmarks/results [--device cuda|cpu] [--masks 1 4 8]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import mglu_ops
from benchmarks.harness import ERROR_BUDGET, Row, relative_error, write
from compile_passes.backend import mglu
from mglu_ops.nn import NaiveMGLU

SHAPES = {"cuda": (14336, 4096), "cpu": (8192, 2048)}
DTYPES = {"cuda": torch.float16, "cpu": torch.float32}
ROUTES = {
    "naive eager": "at each call, twice",
    "naive compiled": "at each call",
    "fused": "at each call",
    "fused, frozen by Inductor": "when compiled",
    "mglu_ops.freeze": "beforehand",
    "mglu_ops.export": "when exported",
}
PROTOCOL = (
    "one token, logits in the dtype of the weights, one layer larger than the caches, one call of the compiled model "
    "(CUDA graphs on a GPU) under no_grad, one variant after the other, median over rounds; us with the host's part"
)


VARIANTS = {
    # the model, the backend of torch.compile, Inductor's freezing
    "naive eager": ("naive", None, False),
    "naive compiled": ("naive", "inductor", False),
    "fused": ("naive", mglu, False),
    "fused, frozen by Inductor": ("naive", mglu, True),
    "mglu_ops.freeze": ("frozen", "inductor", False),
    # (on a CPU: torch 2.11 cannot load packages into a Python process with a GPU)
    "mglu_ops.export": ("naive", "export", False),
}


def time_of(call: Callable[[Tensor], Tensor], x: Tensor) -> float:
    if x.is_cuda:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call(x)
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) * 1000
    begin = time.perf_counter()
    call(x)
    return (time.perf_counter() - begin) * 1e6


def times_of(
    model: NaiveMGLU, x: Tensor, backend: str | Callable[..., Any] | None, freezing: bool, rounds: int
) -> tuple[list[float], Tensor]:
    """Microseconds of each call, and the result."""
    torch._dynamo.reset()
    mode = "reduce-overhead" if x.is_cuda else "default"
    call: Callable[[Tensor], Tensor] = model
    if backend == "export":
        with tempfile.TemporaryDirectory() as folder:
            mglu_ops.export(model, (x,), f"{folder}/model.pt2")
            call = mglu_ops.load(f"{folder}/model.pt2")
    elif backend is not None:
        call = torch.compile(model, backend=backend, mode=mode)
    with inductor_config.patch(freezing=freezing):
        for _ in range(5):
            result = call(x)
        result = result.clone()
        return [time_of(call, x) for _ in range(rounds)], result


def bench(device: str, n_masks: int, rounds: int) -> list[Row]:
    (d, h), dtype = SHAPES[device], DTYPES[device]
    rows = []
    with torch.no_grad():
        naive = NaiveMGLU(h, d, n_masks=n_masks).to(device, dtype).eval()
        models = {"naive": naive, "frozen": mglu_ops.freeze(copy.deepcopy(naive))}
        x = torch.randn(1, h, device=device, dtype=dtype)
        expected = copy.deepcopy(naive).double()(x.double())
        for name, (model, backend, freezing) in VARIANTS.items():
            if backend == "export" and device != "cpu":
                continue
            times, result = times_of(models[model], x, backend, freezing, rounds)
            quartiles, error = statistics.quantiles(times, n=4), relative_error(result, expected)
            rows.append(
                Row(
                    case="masks at inference",
                    variant=name,
                    tokens=1,
                    out_features=d,
                    in_features=h,
                    n_masks=n_masks,
                    dtype=str(dtype).removeprefix("torch."),
                    microseconds=quartiles[1] if error <= ERROR_BUDGET[dtype] else float("nan"),
                    spread=quartiles[2] - quartiles[0],
                    fraction_of_ceiling=float("nan"),
                    error=error,
                    extra={"packed": ROUTES[name]},
                )
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--masks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    rows = [row for n_masks in options.masks for row in bench(options.device, n_masks, options.rounds)]
    for row in rows:
        print(f"n_masks={row.n_masks} {row.variant:28}{row.microseconds:10.1f} us  error {row.error:.1e}")
    write(rows, options.out, f"masks_at_inference_{options.device}", PROTOCOL)


if __name__ == "__main__":
    main()
