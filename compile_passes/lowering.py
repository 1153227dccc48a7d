"""Inductor's lowering of the training operators on a GPU: library GEMMs and fused elementwise kernels.

An operator is opaque to Inductor, so the `composite` backend inside it makes a dozen passes over memory for every
product. Therefore `forward_train` and `backward` are decomposed when a graph is traced for Inductor. That happens after
autograd, because only the operators have a backward with 3 (n_masks + 1) GEMMs. On other devices they stay opaque, and
so does `forward`, whose kernels read the weight once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch._inductor.decomposition as decomposition
import torch._inductor.lowering as inductor

from mglu_ops import ops
from mglu_ops.backends import traced


def _is_on_gpu(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cuda"


def _if_on_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    def decompose(tensor: torch.Tensor, *args: Any) -> Any:
        return function(tensor, *args) if _is_on_gpu(tensor) else NotImplemented

    return decompose


def register() -> None:
    """Register the decompositions with Inductor, and the operators as fallbacks for devices where they stay opaque."""
    for op, function in ((ops.forward_train, traced.forward_train), (ops.backward, traced.backward)):
        if op not in inductor.lowerings:
            # Keep the strides of the traced inputs, as Inductor does for any operator without a lowering.
            inductor.make_fallback(op, inductor.constrain_to_fx_strides, warn=False, override_decomp=True)
        decomposition.decompositions[op] = _if_on_gpu(function)
    decomposition.fast_random_decomps.cache_clear()  # it holds a copy of the table
