"""Times a naive layer in inference on a GPU, with several ways to fuse it and to pack its masks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch._inductor.config as inductor_config
from torch import Tensor

import mglu_ops
from benchmarks.records import Result, Row
from benchmarks.timing import gpu_microseconds, relative_error
from compile_passes.backend import mglu
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.nn import NaiveMGLU

SHAPE = (14336, 4096)
DTYPE = torch.float16
PROTOCOL = (
    "one token, logits in the dtype of the weights, one layer larger than the caches, one call of the compiled model "
    "(CUDA graphs on a GPU) under no_grad, one variant after the other, median over rounds; us with the host's part"
)


class Way(NamedTuple):
    """A way to run a naive layer.

    Attributes:
        backend: the backend of torch.compile, or None for eager mode.
        packed: text for the table that says when masks are computed from logits or packed.
        frozen: `mglu_ops.freeze` freezes the model first.
        freezing: Inductor's option `freezing`, which computes constants when the model is compiled.
    """

    backend: str | Callable[..., Any] | None
    packed: str
    frozen: bool = False
    freezing: bool = False


WAYS = {
    "naive eager": Way(None, "at each call, twice"),
    "naive compiled": Way("inductor", "at each call"),
    "fused": Way(mglu, "at each call"),
    "fused, frozen by Inductor": Way(mglu, "when compiled", freezing=True),
    "mglu_ops.freeze": Way("inductor", "beforehand", frozen=True),
}


def times_of(model: NaiveMGLU, x: Tensor, way: Way, rounds: int) -> tuple[list[float], Tensor]:
    """Microseconds of each call after five warm-up calls, and the result."""
    torch._dynamo.reset()
    call: Callable[[Tensor], Tensor] = model
    if way.backend is not None:
        call = torch.compile(model, backend=way.backend, mode="reduce-overhead")
    with inductor_config.patch(freezing=way.freezing):
        for _ in range(5):
            result = call(x)
        result = result.clone()
        return [gpu_microseconds(partial(call, x)) for _ in range(rounds)], result


@torch.no_grad()
def bench(n_masks: int, rounds: int = 30) -> list[Row]:
    """Measure one number of masks in every way."""
    (d, h), rows = SHAPE, []
    naive = NaiveMGLU(h, d, n_masks=n_masks).to("cuda", DTYPE).eval()
    frozen = mglu_ops.freeze(copy.deepcopy(naive))
    x = torch.randn(1, h, device="cuda", dtype=DTYPE)
    expected = copy.deepcopy(naive).double()(x.double())
    for name, way in WAYS.items():
        times, result = times_of(frozen if way.frozen else naive, x, way, rounds)
        error, problem = relative_error(result, expected), ("masks at inference", name, 1, SHAPE, n_masks)
        options: dict[str, Any] = {"error": error, "budget": ERROR_BUDGET[DTYPE], "extra": {"packed": way.packed}}
        rows.append(Row.of_times(*problem, times, dtype=DTYPE, **options))
    return rows


RESULT = Result("masks_at_inference_cuda", (1, 4, 8), (1,), bench, PROTOCOL)
