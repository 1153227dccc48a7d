"""What Inductor makes of training on a GPU: library GEMMs and its own fused kernels.

An operator is opaque to Inductor, so that `composite` under it takes a dozen passes over memory for every product. Here
`forward_train` and `backward` are taken apart when a graph is traced for Inductor, after autograd, which only the
operators know how to do in 3 (n_masks + 1) GEMMs. Elsewhere they stay whole, and so does `forward`, whose kernels read
the weight once.
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
    """Enter the decompositions into Inductor's table, and the operators as fallbacks for where they stay whole."""
    for op, function in ((ops.forward_train, traced.forward_train), (ops.backward, traced.backward)):
        if op not in inductor.lowerings:
            # As Inductor does by itself for an operator that it cannot take apart: the strides of the traced inputs.
            inductor.make_fallback(op, inductor.constrain_to_fx_strides, warn=False, override_decomp=True)
        decomposition.decompositions[op] = _if_on_gpu(function)
    decomposition.fast_random_decomps.cache_clear()  # a copy of the table, made at the first compilation
