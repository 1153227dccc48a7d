"""MGLU on NVIDIA GPUs: kernels of `csrc/cuda`, compiled by NVRTC where they run.

Nothing of `cuda.core` is imported before a kernel has to be compiled. Only the output and, past a few tokens, a copy of
x are allocated, on the current stream, with no synchronisation; the same inputs give the same bits on every call.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch
from torch import Tensor

from . import packing
from .config import MAX_TOKENS, LaunchConfig, choose
from .packing import KINDS
from .plan import ACTIVATIONS, ELEMENTS, Plan, build, choice, describe

__all__ = [
    "MAX_TOKENS",
    "LaunchConfig",
    "can_pack",
    "choose",
    "forward",
    "pack",
    "takes_many",
    "unsupported_reason",
]

_PLANS_KEPT = 4096
_plans: dict[tuple[object, ...], Plan] = {}


@cache
def _has_cuda_core() -> bool:
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        return False


@cache
def _device_facts(device: int) -> tuple[tuple[int, int], int]:
    """Compute capability and number of multiprocessors."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def unsupported_reason(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> str | None:
    """Why `forward` cannot take a call, or None if it can. Cheap; reads metadata only."""
    if x.device.type != "cuda":
        return f"x is on {x.device}, not on a CUDA device"
    if x.dtype not in ELEMENTS or weight.dtype != x.dtype:
        return f"no kernel for x {x.dtype} and weight {weight.dtype}"
    if activation not in ACTIVATIONS:
        return f"no kernel for activation {activation!r}"
    if not 1 <= packed_masks.shape[2] <= 16:
        return f"n_masks is {packed_masks.shape[2]}, outside 1 to 16"
    if route_weights is not None and route_weights.dtype not in ELEMENTS:
        return f"no kernel for route_weights {route_weights.dtype}"
    if weight.shape[0] >= 2**31 or weight.shape[1] >= 2**28:
        return f"weight {tuple(weight.shape)} has a dimension beyond the kernels' 32-bit indices"
    if not _has_cuda_core():
        return "cuda-core is not installed (pip install mglu-ops[cuda])"
    if _device_facts(x.device.index)[0] < (8, 0):
        return f"compute capability {_device_facts(x.device.index)[0]} is below 8.0"
    if x.shape[0] > MAX_TOKENS and not takes_many(x, weight, packed_masks, activation, route_weights):
        return f"{x.shape[0]} tokens, above {MAX_TOKENS}, with no wgmma for this device, dtype or alignment"
    return None


def takes_many(x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None) -> bool:
    """Whether a call that `forward` can take runs on wgmma, whose kernel is the fastest for any number of tokens."""
    arch, multiprocessors = _device_facts(x.device.index)
    problem = describe(x, weight, packed_masks, activation, route_weights, arch, multiprocessors)
    return choice(problem).kernel == "tile_wgmma"


def can_pack(masks: Tensor) -> bool:
    """Whether `pack` takes bool masks or logits."""
    return (
        masks.device.type == "cuda"
        and masks.dtype in KINDS
        and max(masks.shape[1:]) < 2**31
        and _has_cuda_core()
        and _device_facts(masks.device.index)[0] >= (8, 0)
    )


def pack(masks: Tensor) -> Tensor:
    """The packed masks of bool masks, or of logits by `M = logits > 0`; see `packing.pack`."""
    device: int = masks.device.index
    if device != _current_device():
        with torch.cuda.device(device):
            return pack(masks)
    return packing.pack(masks, _device_facts(device)[0], _current_stream(device))


def forward(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    *,
    config: LaunchConfig | None = None,
) -> Tensor:
    """`sum_i route_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T)` for few tokens.

    Args:
        x: `[tokens, in_features]`, float16, bfloat16 or float32, any strides.
        weight: `[out_features, in_features]`, the dtype of x, any strides.
        packed_masks: uint8 `[out_features, ceil(in_features / 8), n_masks]`, any strides.
        activation: a name of the design's list.
        route_weights: `[tokens, n_masks]` in float16, bfloat16 or float32, or None.
        config: overrides the chosen launch, for tests and tuning.

    Returns:
        `[tokens, out_features]` in x's dtype.

    Raises:
        CompileError: NVRTC refused the kernel.
        LaunchError: the driver refused the launch; the context stays usable.
    """
    tokens, _ = x.shape
    out_features = weight.shape[0]
    out = x.new_empty((tokens, out_features))
    if tokens == 0 or out_features == 0:
        return out
    device: int = x.device.index
    if device != _current_device():
        with torch.cuda.device(device):
            _launch(x, weight, packed_masks, activation, route_weights, config, out, device)
    else:
        _launch(x, weight, packed_masks, activation, route_weights, config, out, device)
    return out


def _launch(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    config: LaunchConfig | None,
    out: Tensor,
    device: int,
) -> None:
    x_pointer, weight_pointer, mask_pointer = x.data_ptr(), weight.data_ptr(), packed_masks.data_ptr()
    route_pointer, route_key = 0, None
    if route_weights is not None:
        route_pointer, route_key = route_weights.data_ptr(), (route_weights.dtype, route_weights.stride())
    # All that a plan depends on: metadata, and how the pointers lie towards 16-byte vectors.
    key = (
        device, x.dtype, activation, x.shape, packed_masks.shape,
        x.stride(), weight.stride(), packed_masks.stride(), route_key,
        x_pointer & 15, weight_pointer & 15, mask_pointer & 15, config,
    )  # fmt: skip
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _PLANS_KEPT:
            _plans.clear()
        arch, multiprocessors = _device_facts(device)
        problem = describe(x, weight, packed_masks, activation, route_weights, arch, multiprocessors)
        plan = _plans[key] = build(problem, config)
    # Freed on return, and yet safe: on this stream, whoever gets the memory next runs after the kernels.
    workspace = x.new_empty(plan.workspace, dtype=torch.uint8).data_ptr() if plan.workspace else 0
    plan.launch(
        _current_stream(device), workspace, x_pointer, weight_pointer, mask_pointer, route_pointer, out.data_ptr()
    )
