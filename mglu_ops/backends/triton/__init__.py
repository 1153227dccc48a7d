"""MGLU as Triton kernels, for few tokens: the choice where CUDA code cannot be built.

`matvec` is the kernel for one token, `matmul` the one for several, `configs` how they are launched. Triton is
imported at the first call, and not with this package, which may be asked `unsupported_reason` without it.
Deterministic: no atomics, and sums in one order.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .configs import MAX_TOKENS

if TYPE_CHECKING:
    from .configs import Config

MAX_WIDE_TOKENS = 8
"""float32 goes token by token: past this, library GEMMs are faster."""


@cache
def is_installed() -> bool:
    """Whether Triton can be imported; does not import it."""
    return importlib.util.find_spec("triton") is not None


@cache
def _runs_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def _device_reason(device: torch.device) -> str | None:
    if not is_installed():
        return "triton is not installed"
    if _runs_interpreted():
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"the Triton kernels are for CUDA GPUs (got device {device}), or for any with TRITON_INTERPRET=1"
    capability = torch.cuda.get_device_capability(device)
    return (
        None if capability >= (8, 0) else f"the Triton kernels need compute capability 8.0, this GPU has {capability}"
    )


def unsupported_reason(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> str | None:
    """Why `forward` cannot take this call, or None where it can. x is `[tokens, in_features]`."""
    if x.dtype is torch.float64:
        return "the Triton kernels sum in float32, which is too narrow for float64"
    most = MAX_WIDE_TOKENS if x.dtype is torch.float32 else MAX_TOKENS
    if x.shape[0] > most:
        return f"the Triton kernels are for {most} tokens at most in {x.dtype}, got {x.shape[0]}"
    for name, tensor in (("x", x), ("weight", weight), ("packed_masks", packed_masks)):
        if tensor.shape[1] * tensor.stride(1) >= 2**31:
            return f"{name}: its columns lie more than 2**31 elements apart, past the Triton kernels' offsets in a row"
    return _device_reason(x.device)


def forward(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    *,
    config: Config | None = None,
) -> Tensor:
    """MGLU of x `[tokens, in_features]`, `[tokens, out_features]` in x's dtype.

    Args:
        x: float16, bfloat16 or float32, of any strides, as the other tensors.
        weight: `[out_features, in_features]`, x's dtype.
        packed_masks: uint8 `[out_features, ceil(in_features / 8), n_masks]`.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        route_weights: floating `[tokens, n_masks]`, or None.
        config: how to launch, in place of the tuned choice (for tests and tuning).
    """
    from .launch import launch

    return launch(x, weight, packed_masks, activation, route_weights, config)
