"""MGLU on NVIDIA GPUs: the kernels of `csrc/cuda`, compiled by NVRTC on first use.

`cuda.core` is imported only to compile a kernel. A call allocates the result, and sometimes a workspace for copies of x
or W, on the current stream, and does not synchronise. The same inputs give the same bits in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ...call import Call
from ...given import Given
from ...words import counted
from .. import triton
from ..base import NO_DOWN_GRADIENTS, Backend, Description, Prepared, Reason, Task, no_kernel
from . import experts_training, training
from .choice import choose, choose_experts
from .compiler import compile_cubin, has_cuda_core, is_cached
from .current import current_device, current_stream, empty
from .device import Gpu, gpu_of
from .down import CudaDown
from .kernels import DecodeMma, LaunchConfig, Plain, TileWgmma, experts_down, group_tokens, quantize_x
from .kernels import pack as packing
from .kernels.base import ELEMENTS
from .kernels.plain import MOST_TOKENS as MOST_PLAIN_TOKENS
from .launch import LaunchSequence, Plan, load

__all__ = ["MOST_TOKENS_FOR_REREADING", "Cuda", "DecodeMma", "LaunchConfig", "Plain", "TileWgmma"]

MOST_TOKENS_FOR_REREADING = 512
"""The most tokens of a 16-bit call for kernels other than `tile_wgmma`. These kernels read W again, from L2 or memory,
for every 4, 8 or 16 tokens."""

_NO_COMPILER = "cuda-core is not installed (pip install cuda-core), and the cache does not hold the kernel"


class Cuda(Backend):
    """The backend of `csrc/cuda`."""

    name: ClassVar[str] = "cuda"
    device_type: ClassVar[str | None] = "cuda"
    rounds_x: ClassVar[bool] = True
    batch_invariant_tasks: ClassVar[frozenset[Task]] = frozenset(("forward", "down"))

    def reason(self, task: Task, call: Call) -> Reason | None:
        if call.device.type != "cuda":
            return Reason(f"x is on {call.device}, not on a CUDA device")
        if task in ("train", "backward"):
            return self._training_reason(call)
        if task == "down":
            return self._down_reason(call)
        if task == "down_backward":
            return NO_DOWN_GRADIENTS
        if call.routing is not None:
            return self._experts_reason(call)
        return self._layer_reason(call) or self._tokens_reason(call)

    def _layer_reason(self, call: Call) -> Reason | None:
        """Return the reason why no kernel runs a layer without experts, with any number of tokens; None if one does."""
        if call.dtype not in ELEMENTS:
            return no_kernel(call)
        if call.mask_weights_dtype is not None and call.mask_weights_dtype not in ELEMENTS:
            return Reason(f"no kernel for mask_weights {call.mask_weights_dtype}")
        if call.out_features >= 2**31 or call.in_features >= 2**28:
            shape = call.out_features, call.in_features
            return Reason(f"weight {shape} has a dimension beyond the kernels' 32-bit indices")
        gpu = gpu_of(call.device.index)
        if gpu.arch < (8, 0):
            return Reason(f"compute capability {gpu.arch} is below 8.0")
        if not (has_cuda_core() or self._is_cached(call, gpu)):
            return Reason(_NO_COMPILER)
        return None

    def _tokens_reason(self, call: Call) -> Reason | None:
        """Return the reason why this backend does not run a layer with this many tokens; None if it does."""
        most = _most_tokens_on_chip(call)
        if call.tokens <= most:
            return None
        kernel = choose(call, gpu_of(call.device.index)).config.kernel
        if kernel == "tile_wgmma":
            return None
        if kernel == "plain" and call.tokens > MOST_PLAIN_TOKENS:
            return Reason(
                f"{call.tokens} tokens, above {MOST_PLAIN_TOKENS}, the most that the plain kernel's grid holds"
            )
        if call.batch_invariant:
            return None
        return Reason(f"for {counted(call.tokens, 'token')} (more than {most})", is_preference=True, is_loss=False)

    def _experts_reason(self, call: Call) -> Reason | None:
        problem = self._layer_reason(call.of_rows(1))
        if problem is not None or 0 in call.result_shape:
            return problem
        experts, most = call.routed.experts, (group_tokens.MOST_EXPERTS, group_tokens.MOST_ROWS)
        if experts > most[0] or call.tokens > most[1]:
            return Reason(f"{experts} experts and {call.tokens} rows, above {most[0]} or {most[1]}")
        gpu = gpu_of(call.device.index)
        text = choose_experts(call, gpu).violation(call, gpu)
        return None if text is None else Reason(text)

    def _down_reason(self, call: Call) -> Reason | None:
        gpu = gpu_of(call.device.index)
        text = experts_down.unsupported_reason(call, gpu)
        if text is None and not has_cuda_core():
            sources = experts_down.sources(experts_down.launch_for(call, gpu), call, gpu)
            text = None if all(is_cached(*source) for source in sources) else _NO_COMPILER
        return None if text is None else Reason(text, is_loss=call.dtype is not torch.float64)

    def _training_reason(self, call: Call) -> Reason | None:
        if call.dtype not in (torch.float16, torch.bfloat16):
            return Reason(f"no kernels of a training step for {call.dtype}, only for 16 bits", is_loss=False)
        if call.mask_weights_dtype is not None and call.mask_weights_dtype not in ELEMENTS:
            return Reason(f"no kernel for mask_weights {call.mask_weights_dtype}", is_loss=False)
        if not has_cuda_core():
            return Reason("cuda-core is not installed (pip install cuda-core)")
        if call.routing is not None:
            text = triton.device_reason(call.device)  # Triton kernels are a part of every step
            return None if text is None else Reason(text)
        if gpu_of(call.device.index).arch < (8, 0):
            return Reason("compute capability is below 8.0", is_loss=False)
        if max(call.tokens, call.out_features, call.in_features) >= 2**30:
            return Reason("a size is beyond the kernels' 32-bit indices", is_loss=False)
        return None

    def _is_cached(self, call: Call, gpu: Gpu) -> bool:
        """True if the cache holds every kernel of a call, so that no compiler is needed."""
        if 0 in call.result_shape:
            return True
        return all(is_cached(*step.source) for step in quantize_x.plan(choose(call, gpu).config, call, gpu))

    def describe(self, task: Task, call: Call) -> Description:
        if task != "forward" or call.routing is not None:
            return super().describe(task, call)
        launch = choose(call, gpu_of(call.device.index))
        return Description(
            f"the masks are applied on chip, for {counted(call.tokens, 'token')}",
            launch.config,
            launch.origin,
            None
            if launch.slow_reason is None
            else f"several times slower than by the kernels for aligned layers: {launch.slow_reason}",
            launch.config.rounds_x,
        )

    def build(self, task: Task, call: Call) -> None:
        """As in `Backend`, for the tasks `forward` and `down`; the kernels of other tasks depend on tensors.

        Raises:
            CompileError: NVRTC refused a kernel.
            TableError: a table of launches cannot be used.
        """
        gpu = gpu_of(call.device.index)
        if task == "down":
            sources = experts_down.sources(experts_down.launch_for(call, gpu), call, gpu)
        elif task == "forward" and 0 not in call.result_shape:
            sources = [step.source for step in self._plan(call, gpu, None)]
        else:
            return
        for source in sources:
            if not is_cached(*source):
                compile_cubin(*source)

    def prepare(self, task: Task, call: Call, launch: Any = None) -> Prepared:
        """Choose the launches of a supported task (or take `launch`), compile their kernels and load them.

        For the task `backward`, the first call compiles and loads the kernels, which it chooses by its tensors.

        Raises:
            ValueError: `launch` cannot run the call.
            CompileError: NVRTC refused a kernel.
            LaunchError: the driver refused to load a kernel; the context stays usable.
            TableError: a table of launches cannot be used.
        """
        device: int = call.device.index
        with torch.cuda.device(device):
            if task == "train":
                kind = training.ForwardTrain if call.routing is None else experts_training.ForwardTrain
                return _on_device(device, kind(call))
            if task == "backward":
                return _on_device(
                    device, training.Backward(call) if call.routing is None else experts_training.backward
                )
            gpu = gpu_of(device)
            if task == "down":
                _check_launch(launch, call, gpu)
                return CudaDown(call, launch, device)
            launches = None if 0 in call.result_shape else load(self._plan(call, gpu, launch), device)
            return CudaCall(launches, device, call.dtype, call.result_shape)

    def _plan(self, call: Call, gpu: Gpu, launch: Any) -> Plan:
        if call.routing is not None:
            _check_launch(launch, call, gpu)
            return (launch or choose_experts(call, gpu)).plan(call, gpu)
        if launch is not None:
            _check_launch(launch, call, gpu, as_read=quantize_x.as_read(launch, call))
        return quantize_x.plan(launch or choose(call, gpu).config, call, gpu)

    def can_pack(self, masks: Tensor) -> bool:
        if masks.device.type != "cuda" or masks.dtype not in packing.KINDS or max(masks.shape[-2:]) >= 2**31:
            return False
        arch, n_masks = gpu_of(masks.device.index).arch, masks.shape[-3]
        if masks.dim() == 4 and len(masks) >= 2**16:
            return False
        return arch >= (8, 0) and (has_cuda_core() or is_cached(*packing.source(arch, masks.dtype, n_masks)))

    def pack(self, masks: Tensor) -> Tensor:
        device: int = masks.device.index
        if device != current_device():
            with torch.cuda.device(device):
                return self.pack(masks)
        return packing.pack(masks, gpu_of(device).arch, current_stream(device))


def _most_tokens_on_chip(call: Call) -> int:
    """Return the number of tokens above which GEMMs of cuBLAS beat kernels that reread W for every 4, 8 or 16 tokens.

    `tile_wgmma` beats both, so the limit does not apply to it. Measured in 16 bits on an H200
    (benchmarks/results/tokens.csv, routes.csv); float32 was not measured.
    """
    if call.dtype is torch.float32:
        return 64
    return 256 if call.n_masks == 1 else MOST_TOKENS_FOR_REREADING


def _check_launch(launch: Any, call: Call, gpu: Gpu, as_read: Call | None = None) -> None:
    """Raise ValueError if `launch` cannot run `call`. If x is copied first, `as_read` is the call with that copy."""
    problem = None if launch is None else launch.violation(as_read or call, gpu)
    if problem is not None:
        raise ValueError(f"launch: got {launch}, which cannot run {call}: {problem}")


F = TypeVar("F", bound=Callable[..., Any])


def _on_device(device: int, function: F) -> F:
    """Return a function that runs `function` with `device` as the current device."""

    def run(*arguments: Any) -> Any:
        if device == current_device():
            return function(*arguments)
        with torch.cuda.device(device):
            return function(*arguments)

    return cast("F", run)


class CudaCall:
    """A prepared call of `mglu::forward`. Thread-safe. It runs `sequence`, which is None for an empty result."""

    __slots__ = ("_device", "_dtype", "_shape", "_strides", "sequence")

    def __init__(
        self, sequence: LaunchSequence | None, device: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        self.sequence = sequence
        self._shape = shape
        self._strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self._dtype = dtype
        self._device = device

    def __call__(self, given: Given) -> Tensor:
        device = self._device
        if device != current_device():
            with torch.cuda.device(device):
                return self(given)
        out = empty(self._shape, self._strides, self._dtype, device)
        sequence = self.sequence
        if sequence is None:
            return out
        stream = current_stream(device)
        pointers = given.addresses(out)
        if sequence.workspace_bytes:
            # The workspace is freed on return, while the kernels may still run. The next kernel that uses the memory
            # runs on the same stream, after them.
            workspace = empty((sequence.workspace_bytes,), (1,), torch.uint8, device)
            sequence(stream, pointers, workspace=workspace.data_ptr())
        elif sequence.maps:
            sequence(stream, pointers)
        else:
            sequence.kernel(stream, pointers)
        return out
