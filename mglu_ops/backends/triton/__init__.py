"""MGLU as Triton kernels, for few tokens on GPUs where CUDA code cannot be built.

`matvec` is the kernel for one token, `matmul` the kernel for several. `configs` chooses their launch configurations.
Triton is imported when the first call is prepared, so `unsupported_reason` works without it. The kernels are
deterministic: they use no atomics and sum in a fixed order.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...layer_call import LayerArguments, LayerCall
from ...masks import packed_width
from ..base import Backend, PreparedCall
from .configs import MAX_TOKENS

if TYPE_CHECKING:
    from .configs import Config

MAX_WIDE_TOKENS = 8
"""The most tokens in float32. The kernel computes them one by one, so library GEMMs are faster for more tokens."""

_FORMATS = ("dense", "fp8_row", "int8_row")
"""Formats with at most one scale per row. At the end, kernels multiply the gates and values of a row by its scale."""


@cache
def is_installed() -> bool:
    """True if Triton is installed. Does not import it."""
    return importlib.util.find_spec("triton") is not None


@cache
def _runs_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def device_reason(device: torch.device, needs_fp8: bool = False) -> str | None:
    """The reason why the kernels of this package cannot run on a device; None if they can."""
    if not is_installed():
        return "triton is not installed"
    if _runs_interpreted():
        return None
    if device.type != "cuda" or torch.version.hip:
        return f"the Triton kernels are for CUDA GPUs (got device {device}), or for any with TRITON_INTERPRET=1"
    capability, needed = torch.cuda.get_device_capability(device), (8, 9) if needs_fp8 else (8, 0)
    if capability >= needed:
        return None
    what = "the Triton kernels" + (" for weights in fp8" if needs_fp8 else "")
    return f"{what} need compute capability {needed[0]}.{needed[1]}, this GPU has {capability}"


class Triton(Backend):
    """The backend of this package."""

    name: ClassVar[str] = "triton"

    def unsupported_reason(self, call: LayerCall) -> str | None:
        if call.dtype is torch.float64:
            return "the Triton kernels sum in float32, which is too narrow for float64"
        weight_format = call.weight.format
        if weight_format.name not in _FORMATS:
            return f"the Triton kernels have no weight format {weight_format.name}, only {', '.join(_FORMATS)}"
        most = MAX_WIDE_TOKENS if call.dtype is torch.float32 else MAX_TOKENS
        if call.tokens > most:
            return f"the Triton kernels are for {most} tokens at most in {call.dtype}, got {call.tokens}"
        columns = (
            ("x", call.in_features, call.x),
            ("weight", call.in_features, call.weight.layout),
            ("packed_masks", packed_width(call.in_features), call.masks),
        )
        for name, size, layout in columns:
            if size * layout.strides[1] >= 2**31:
                return f"{name}: its columns lie more than 2**31 elements apart, past the offsets of the Triton kernels"
        return device_reason(call.device, weight_format.dtype is torch.float8_e4m3fn)

    def prepare(self, call: LayerCall, launch: Config | None = None) -> PreparedCall:
        """Import the kernels. Triton compiles them in the first call. `launch` overrides the configuration."""
        from .launch import launch as run

        shape = call.result_shape

        def prepared(given: LayerArguments) -> Tensor:
            return run(given.in_rows(), launch).view(shape)

        return prepared
