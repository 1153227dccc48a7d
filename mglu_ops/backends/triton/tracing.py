"""Showing the kernels to a compiler: `mglu::forward` as a rule of functionalisation, in terms of the kernel launch.

With the rule, AOTDispatcher has the launch in its graph in place of the opaque op, so that Inductor calls the kernel
without Python's dispatcher, and AOTInductor puts its binary into the package, which then needs no operator library.
It is what `torch.library.triton_op` does for an op of its own. Registration, where the op is defined:

    torch.library.register_torch_dispatch("mglu::forward", FunctionalTensorMode, functional_rule, lib=_lib)
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from . import forward, unsupported_reason


def functional_rule(mode: Any, op: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
    """`mglu::forward` as the launch, or as the op where the backend cannot take it, and always for torch.export."""
    from torch.export._trace import custom_triton_ops_decomposition_disabled  # slow to import, and there when tracing

    x, weight, packed_masks, activation, route_weights = _all_arguments(*args, **(kwargs or {}))
    tokens = math.prod(x.shape[:-1])
    if not custom_triton_ops_decomposition_disabled():
        with mode:
            rows = x.reshape(tokens, x.shape[-1])
            routes = None if route_weights is None else route_weights.reshape(tokens, packed_masks.shape[2])
            if unsupported_reason(rows, weight, packed_masks, activation, routes) is None:
                result = forward(rows, weight, packed_masks, activation, routes)
                return result.view(*x.shape[:-1], weight.shape[0])
    return mode.__torch_dispatch__(op, types, args, kwargs or {})


def _all_arguments(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str = "silu",
    route_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, str, Tensor | None]:
    return x, weight, packed_masks, activation, route_weights
