"""What Inductor makes of our operators where library GEMMs run them: on a GPU, the GEMMs and its own fused kernels.

An operator is opaque to Inductor, so that `composite` under it takes a dozen passes over memory for every product. Here
it is taken apart when the graph is traced, after autograd, which only the operator knows how to do in 3 (n_masks + 1)
GEMMs. Calls that a kernel of ours runs stay whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.decomposition as inductor

from mglu_ops import dispatch, ops
from mglu_ops.backends import traced


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _runs_on_gemms(x: torch.Tensor, *args: Any) -> bool:
    """Of a call of `mglu::forward`: not where the number of tokens is left open, as a kernel may then run it."""
    tokens = math.prod(x.shape[:-1])
    return isinstance(tokens, int) and dispatch.choose(x, *args).backend == "composite"


def _forward(x: torch.Tensor, *args: Any) -> Any:
    return traced.forward(x, *args) if _is_on_gpu(x) and _runs_on_gemms(x, *args) else NotImplemented


def _if_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def decomposition(tensor: torch.Tensor, *args: Any) -> Any:
        return function(tensor, *args) if _is_on_gpu(tensor) else NotImplemented

    return decomposition


def register() -> None:
    """Enter the decompositions into Inductor's table."""
    inductor.decompositions[ops.forward] = _forward
    inductor.decompositions[ops.forward_train] = _if_on_gpu(traced.forward_train)
    inductor.decompositions[ops.backward] = _if_on_gpu(traced.backward)
    inductor.fast_random_decomps.cache_clear()  # a copy of the table, made at the first compilation
