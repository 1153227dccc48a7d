"""MGLU as Triton kernels: for few tokens where CUDA code cannot be built, and for training experts.

`matvec` is the kernel for one token, and `matmul` the kernel for several tokens. `configs` chooses how they are
launched. `grouped` has the kernels for experts. This package does not import Triton before the first call is prepared,
so `reason` works without Triton. The kernels are deterministic: they use no atomics, and sum in one order.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from ...call import Call
from ...given import Given
from ...masks import packed_width
from ..base import Backend, Description, Prepared, Reason, Task
from . import experts
from .configs import MAX_TOKENS

if TYPE_CHECKING:
    from .configs import Config

MAX_WIDE_TOKENS = 8
"""The most tokens in float32. The kernel computes float32 tokens one by one, so torch's GEMMs are faster for more."""

_FORMATS = ("dense", "fp8_row", "int8_row")
"""The weight formats that the kernels read: those with at most one scale per row, which multiplies the row's sums."""


@cache
def is_installed() -> bool:
    """True if Triton is installed. This function does not import it."""
    return importlib.util.find_spec("triton") is not None


@cache
def _runs_interpreted() -> bool:
    import triton

    return bool(triton.knobs.runtime.interpret)


@cache
def device_reason(device: torch.device, needs_fp8: bool = False) -> str | None:
    """Return the reason why the kernels of this package cannot run on a device; None if they can."""
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
    device_type: ClassVar[str | None] = "cuda"

    def reason(self, task: Task, call: Call) -> Reason | None:
        if call.dtype is torch.float64:
            return Reason("the Triton kernels sum in float32, which is too narrow for float64", is_loss=False)
        if call.routing is not None:
            problem = device_reason(call.device)
            return None if problem is None else Reason(problem)
        if task != "forward":
            return Reason("the Triton kernels do not train a layer without experts", is_loss=False)
        weight_format = call.weight.format
        if weight_format.name not in _FORMATS:
            return Reason(f"the Triton kernels have no weight format {weight_format.name}, only {', '.join(_FORMATS)}")
        most = MAX_WIDE_TOKENS if call.dtype is torch.float32 else MAX_TOKENS
        if call.tokens > most:
            text = f"the Triton kernels are for {most} tokens at most in {call.dtype}, got {call.tokens}"
            return Reason(text, is_loss=False)
        columns = (
            ("x", call.in_features, call.x),
            ("weight", call.in_features, call.weight.layout),
            ("packed_masks", packed_width(call.in_features), call.masks),
        )
        for name, size, layout in columns:
            if size * layout.strides[1] >= 2**31:
                text = f"{name}: its columns lie more than 2**31 elements apart, past the offsets of the Triton kernels"
                return Reason(text)
        problem = device_reason(call.device, weight_format.dtype is torch.float8_e4m3fn)
        return None if problem is None else Reason(problem)

    def describe(self, task: Task, call: Call) -> Description:
        of_experts = call.routing is not None
        return Description("grouped products in Triton" if of_experts else "the masks are applied on chip")

    def prepare(self, task: Task, call: Call, launch: Config | None = None) -> Prepared:
        """Import the kernels, which Triton compiles when they run. `launch` replaces the tuned configuration."""
        if task != "forward":
            return getattr(experts, {"train": "forward_train"}.get(task, task))
        shape = call.result_shape
        if call.routing is not None:
            return lambda given: torch.ops.aten._unsafe_view(experts.forward(given), shape)
        from .launch import launch as run

        def prepared(given: Given) -> Tensor:
            return run(given.in_rows(), launch).view(shape)

        return prepared
