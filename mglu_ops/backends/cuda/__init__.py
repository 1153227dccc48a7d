"""MGLU on NVIDIA GPUs: kernels of `csrc/cuda`, compiled by NVRTC where they run.

Nothing of `cuda.core` is imported before a kernel has to be compiled. Only the output is allocated, and a copy of x for
many tokens of many masks, on the current stream, with no synchronisation; the same inputs give the same bits on every
call.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from ... import batch_invariance
from ..known import Key, key_of, remember
from . import packing
from .choice import choose
from .config import MAX_TOKENS, LaunchConfig
from .packing import KINDS
from .plan import ACTIVATIONS, ELEMENTS, Decision, Plan, Problem, build, decide, describe

__all__ = [
    "MAX_TOKENS",
    "Call",
    "LaunchConfig",
    "can_pack",
    "choose",
    "forward",
    "launch_of",
    "pack",
    "plan_call",
    "unsupported_reason",
]

_MOST_PLAIN_TOKENS = 4 * 65535  # a grid's second dimension, of blocks of 4 tokens


@cache
def _has_cuda_core() -> bool:
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        return False


@cache
def _device_facts(device: int) -> tuple[tuple[int, int], int, str]:
    """Compute capability, number of multiprocessors and name."""
    properties = torch.cuda.get_device_properties(device)
    return (properties.major, properties.minor), properties.multi_processor_count, properties.name


def _current_device() -> int:
    return torch._C._cuda_getDevice()


def _current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


def unsupported_reason(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> str | None:
    """Why `forward` cannot take a call, or None if it can. Reads metadata only."""
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
    tokens = x.shape[0]
    if tokens > MAX_TOKENS:
        kernel = launch_of(x, weight, packed_masks, activation, route_weights).config.kernel
        if kernel != "tile_wgmma" and not batch_invariance.enabled:
            return f"{tokens} tokens, above {MAX_TOKENS}, with no wgmma for this device, dtype or alignment"
        if kernel == "plain" and tokens > _MOST_PLAIN_TOKENS:
            return f"{tokens} tokens, above {_MOST_PLAIN_TOKENS}, which the plain kernel's grid does not hold"
    return None


def launch_of(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> Decision:
    """How `forward` launches a call that it can take.

    Raises:
        TableError: a table of launches cannot be used.
    """
    return decide(_describe(x, weight, packed_masks, activation, route_weights))


def _describe(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> Problem:
    facts = _device_facts(x.device.index)
    return describe(x, weight, packed_masks, activation, route_weights, *facts, batch_invariance.enabled)


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


# What Inductor's code calls for its buffers: memory without the dispatcher, which takes longer than all else here.
_empty_strided: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def _empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
    """New memory on `device`, the current one; filled as torch fills it where results have to be deterministic."""
    if _empty_strided is None or torch._C._get_deterministic_algorithms():
        return torch.empty_strided(shape, strides, dtype=dtype, device=torch.device("cuda", device))
    return _empty_strided(shape, strides, dtype)


class Call:
    """A call with all settled but its tensors, which may be any of the same key. Thread-safe.

    Attributes:
        plan: what is launched; None for an empty result.
        shape: of the result.
    """

    __slots__ = ("_device", "_dtype", "_strides", "plan", "shape")

    def __init__(self, plan: Plan | None, device: int, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
        self.plan = plan
        self.shape = shape
        self._strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self._dtype = dtype
        self._device = device

    def with_shape(self, shape: tuple[int, ...]) -> Call:
        """The same with a result of another shape."""
        return Call(self.plan, self._device, self._dtype, shape)

    def __call__(self, x: Tensor, weight: Tensor, packed_masks: Tensor, route_weights: Tensor | None) -> Tensor:
        device = self._device
        if device != _current_device():
            with torch.cuda.device(device):
                return self(x, weight, packed_masks, route_weights)
        out = _empty(self.shape, self._strides, self._dtype, device)
        plan = self.plan
        if plan is None:
            return out
        stream = _current_stream(device)
        pointers = (
            weight.data_ptr(),
            packed_masks.data_ptr(),
            0 if route_weights is None else route_weights.data_ptr(),
            out.data_ptr(),
        )
        if plan.workspace:
            # Freed on return, after the launches: on this stream, whoever gets the memory next runs behind the kernels.
            workspace = _empty((plan.workspace,), (1,), torch.uint8, device)
            plan.launch(stream, workspace.data_ptr(), x.data_ptr(), *pointers)
        elif plan.maps is not None:
            plan.launch(stream, 0, x.data_ptr(), *pointers)
        else:
            plan.kernel(stream, x.data_ptr(), *pointers)
        return out


_calls: dict[tuple[Key, LaunchConfig | None], Call] = {}


def plan_call(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    config: LaunchConfig | None = None,
) -> Call:
    """What runs such a call, once its kernel is chosen, compiled and loaded; arguments and errors as of `forward`."""
    key = key_of(x, weight, packed_masks, activation, route_weights), config
    call = _calls.get(key)
    if call is None:
        device: int = x.device.index
        shape = x.shape[0], weight.shape[0]
        plan = None
        if 0 not in shape:
            problem = _describe(x, weight, packed_masks, activation, route_weights)
            with torch.cuda.device(device):
                plan = build(problem, config)
        call = Call(plan, device, x.dtype, shape)
        remember(_calls, key, call)
    return call


def forward(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    *,
    config: LaunchConfig | None = None,
) -> Tensor:
    """`sum_i route_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T)`.

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
        TableError: a table of launches cannot be used.
    """
    call = plan_call(x, weight, packed_masks, activation, route_weights, config)
    return call(x, weight, packed_masks, route_weights)
