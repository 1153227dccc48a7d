"""Times a naive layer at inference, by how it is fused and when its masks are packed.

python -m benchmarks.masks_at_inference --out benchmarks/results [--device cuda|cpu] [--n-masks 1 4 8]
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import mglu_ops
from benchmarks.harness import relative_error
from benchmarks.records import Row, parser_of, written
from benchmarks.timing import clock_of
from compile_passes.backend import mglu
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.nn import NaiveMGLU

SHAPES = {"cuda": (14336, 4096), "cpu": (8192, 2048)}
DTYPES = {"cuda": torch.float16, "cpu": torch.float32}
PROTOCOL = (
    "one token, logits in the dtype of the weights, one layer larger than the caches, one call of the compiled model "
    "(CUDA graphs on a GPU) under no_grad, one variant after the other, median over rounds; us with the host's part"
)


class Way(NamedTuple):
    """A way to run a naive layer.

    Attributes:
        model: "naive", or "frozen" for the result of `mglu_ops.freeze`.
        backend: the backend of torch.compile; None for eager, "export" for a package.
        freezing: whether Inductor freezes the graph.
        packed: when the masks are computed from the logits, or packed.
    """

    model: str
    backend: str | Callable[..., Any] | None
    freezing: bool
    packed: str


WAYS = {
    "naive eager": Way("naive", None, False, "at each call, twice"),
    "naive compiled": Way("naive", "inductor", False, "at each call"),
    "fused": Way("naive", mglu, False, "at each call"),
    "fused, frozen by Inductor": Way("naive", mglu, True, "when compiled"),
    "mglu_ops.freeze": Way("frozen", "inductor", False, "beforehand"),
    # On a CPU only: no package for a GPU has run in Python yet (csrc/README.md).
    "mglu_ops.export": Way("naive", "export", False, "when exported"),
}


def times_of(
    model: NaiveMGLU, x: Tensor, backend: str | Callable[..., Any] | None, freezing: bool, rounds: int
) -> tuple[list[float], Tensor]:
    """Microseconds of each call, and the result."""
    clock = clock_of(x.device.type)
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
        return [clock(partial(call, x)) for _ in range(rounds)], result


def bench(device: str, n_masks: int, rounds: int) -> list[Row]:
    """Measure one number of masks in every way that the device supports."""
    (d, h), dtype = SHAPES[device], DTYPES[device]
    rows = []
    with torch.no_grad():
        naive = NaiveMGLU(h, d, n_masks=n_masks).to(device, dtype).eval()
        models = {"naive": naive, "frozen": mglu_ops.freeze(copy.deepcopy(naive))}
        x = torch.randn(1, h, device=device, dtype=dtype)
        expected = copy.deepcopy(naive).double()(x.double())
        for name, way in WAYS.items():
            if way.backend == "export" and device != "cpu":
                continue
            times, result = times_of(models[way.model], x, way.backend, way.freezing, rounds)
            error, budget = relative_error(result, expected), ERROR_BUDGET[dtype]
            problem, extra = ("masks at inference", name, 1, (d, h), n_masks), {"packed": way.packed}
            rows.append(Row.of_times(*problem, times, dtype=dtype, error=error, budget=budget, extra={**extra}))
    return rows


def run(device: str, masks: Sequence[int], rounds: int, out: Path) -> list[Row]:
    """Measure several numbers of masks into `masks_at_inference_DEVICE.csv` of a folder."""
    rows = [row for n_masks in masks for row in bench(device, n_masks, rounds)]
    return written(rows, out, f"masks_at_inference_{device}", PROTOCOL)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", choices=list(SHAPES), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--n-masks", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    run(options.device, options.n_masks, options.rounds, options.out)


if __name__ == "__main__":
    main()
