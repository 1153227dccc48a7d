"""What the masks cost at inference, by the way in which a naive model comes to its fused layer.

python -m benchmarks.masks_at_inference --out benchmarks/results [--device cuda|cpu] [--masks 1 4 8]
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import mglu_ops
from benchmarks.harness import Row, write
from mglu_ops.nn import NaiveMGLU

SHAPES = {"cuda": (14336, 4096), "cpu": (8192, 2048)}
DTYPES = {"cuda": torch.float16, "cpu": torch.float32}
ROUTES = {
    "naive eager": "at each call, twice",
    "naive compiled": "at each call",
    "fused": "at each call",
    "fused, frozen by Inductor": "when compiled",
    "mglu_ops.freeze": "beforehand",
}
PROTOCOL = (
    "one token, logits in the dtype of the weights, one layer larger than the caches, one call of the compiled model "
    "(CUDA graphs on a GPU) under no_grad, variants in turn, median over rounds"
)


def variants(naive: NaiveMGLU, x: Tensor, mode: str) -> dict[str, Callable[[Tensor], Tensor]]:
    """Each compiled by a first call."""
    frozen = mglu_ops.freeze(copy.deepcopy(naive))
    made: dict[str, Callable[[Tensor], Tensor]] = {"naive eager": naive}
    settings = {
        "naive compiled": (naive, "inductor", False),
        "fused": (naive, "mglu", False),
        "fused, frozen by Inductor": (naive, "mglu", True),
        "mglu_ops.freeze": (frozen, "inductor", False),
    }
    for name, (model, backend, freezing) in settings.items():
        torch._dynamo.reset()
        with inductor_config.patch(freezing=freezing):
            made[name] = torch.compile(copy.deepcopy(model), backend=backend, mode=mode)
            for _ in range(3):
                made[name](x)
    return made


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


def bench(device: str, n_masks: int, rounds: int) -> list[Row]:
    (d, h), dtype = SHAPES[device], DTYPES[device]
    with torch.no_grad():
        naive = NaiveMGLU(h, d, n_masks=n_masks).to(device, dtype).eval()
        x = torch.randn(1, h, device=device, dtype=dtype)
        calls = variants(naive, x, "reduce-overhead" if device == "cuda" else "default")
        expected = naive(x).float()
        times: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                call(x)
                times[name].append(time_of(call, x))
        errors = {name: ((call(x).float() - expected).norm() / expected.norm()).item() for name, call in calls.items()}
    return [
        Row(
            case="masks at inference",
            variant=name,
            tokens=1,
            out_features=d,
            in_features=h,
            n_masks=n_masks,
            dtype=str(dtype).removeprefix("torch."),
            microseconds=statistics.median(values),
            spread=statistics.quantiles(values, n=4)[2] - statistics.quantiles(values, n=4)[0],
            fraction_of_ceiling=float("nan"),
            error=errors[name],
            extra={"packed": ROUTES[name]},
        )
        for name, values in times.items()
    ]


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
