"""MGLU on NVIDIA GPUs: the kernels of `csrc/cuda`, compiled by NVRTC on first use.

`cuda.core` is imported only to compile a kernel. A call allocates the result, and sometimes a workspace for copies of x
or W, on the current stream, and does not synchronise. The same inputs give the same bits in every call.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from ...activations import ACTIVATIONS
from ...expert_calls import ExpertCall
from ...layer_call import LayerArguments, LayerCall
from ..base import (
    Backend,
    PreparedBackward,
    PreparedCall,
    PreparedForwardTrain,
    PreparedGroupedBackward,
    PreparedGroupedForwardTrain,
)
from . import experts_training, training
from .choice import LaunchChoice, choose, choose_experts
from .compiler import has_cuda_core, is_cached
from .current import current_device, current_stream, empty
from .device import Gpu, gpu_of
from .experts import CudaDown, CudaExperts
from .kernels import DecodeMma, LaunchConfig, Plain, TileWgmma, experts_down, group_tokens, quantize_x
from .kernels import pack as packing
from .kernels.base import ELEMENTS
from .kernels.experts import ExpertLaunch
from .kernels.experts_down import ExpertsDown
from .kernels.plain import MOST_TOKENS as MOST_PLAIN_TOKENS
from .launch import LaunchSequence

__all__ = ["MOST_TOKENS_FOR_REREADING", "Cuda", "DecodeMma", "LaunchConfig", "Plain", "TileWgmma"]

MOST_TOKENS_FOR_REREADING = 512
"""The most tokens of a call without `tile_wgmma`. The other kernels read W again, from L2 or memory, for every 4, 8 or
16 tokens."""


class Cuda(Backend):
    """The backend of `csrc/cuda`."""

    name: ClassVar[str] = "cuda"
    rounds_x: ClassVar[bool] = True

    def unsupported_reason(self, call: LayerCall) -> str | None:
        if call.device.type != "cuda":
            return f"x is on {call.device}, not on a CUDA device"
        if call.dtype not in ELEMENTS:
            return f"no kernel for x {call.dtype}"
        if call.mask_weights_dtype is not None and call.mask_weights_dtype not in ELEMENTS:
            return f"no kernel for mask_weights {call.mask_weights_dtype}"
        if call.activation not in ACTIVATIONS:
            return f"no kernel for activation {call.activation!r}"
        if call.out_features >= 2**31 or call.in_features >= 2**28:
            return f"weight {(call.out_features, call.in_features)} has a dimension beyond the kernels' 32-bit indices"
        gpu = gpu_of(call.device.index)
        if gpu.arch < (8, 0):
            return f"compute capability {gpu.arch} is below 8.0"
        if not (has_cuda_core() or self._is_cached(call, gpu)):
            return "cuda-core is not installed (pip install cuda-core), and the cache does not hold the kernel"
        if call.tokens > MOST_TOKENS_FOR_REREADING:
            kernel = self.choose(call).config.kernel
            if kernel != "tile_wgmma" and not call.batch_invariant:
                return (
                    f"{call.tokens} tokens, above {MOST_TOKENS_FOR_REREADING}, with no wgmma for this device, dtype or "
                    "alignment"
                )
            if kernel == "plain" and call.tokens > MOST_PLAIN_TOKENS:
                return f"{call.tokens} tokens, above {MOST_PLAIN_TOKENS}, the most that the plain kernel's grid holds"
        return None

    def _is_cached(self, call: LayerCall, gpu: Gpu) -> bool:
        """True if the cache holds every kernel of a call, so that no compiler is needed."""
        if 0 in call.result_shape:
            return True
        return all(is_cached(*source) for source in quantize_x.sources(self.choose(call).config, call, gpu))

    def choose(self, call: LayerCall) -> LaunchChoice:
        """Choose the launch of a call.

        Raises:
            TableError: a table of launches cannot be used.
        """
        return choose(call, gpu_of(call.device.index))

    def prepare(self, call: LayerCall, launch: LaunchConfig | None = None) -> PreparedCall:
        """Choose the launch of a supported call (or take `launch`), and compile and load its kernels.

        Raises:
            ValueError: `launch` cannot run the call.
            CompileError: NVRTC refused a kernel.
            LaunchError: the driver refused to load a kernel; the context stays usable.
            TableError: a table of launches cannot be used.
        """
        device: int = call.device.index
        gpu = gpu_of(device)
        sequence = None
        if 0 not in call.result_shape:
            problem = None if launch is None else launch.violation(quantize_x.as_read(launch, call), gpu)
            if problem is not None:
                raise ValueError(f"launch: got {launch}, which cannot run {call}: {problem}")
            config = launch or self.choose(call).config
            with torch.cuda.device(device):
                sequence = quantize_x.sequence(config, call, gpu, device)
        return CudaCall(sequence, device, call.dtype, call.result_shape)

    def unsupported_experts_reason(self, call: ExpertCall) -> str | None:
        layer = call.layer
        if layer.n_masks == 0:
            return self._unsupported_down_reason(call)
        problem = self.unsupported_reason(replace(layer, leading=(1,)))
        if problem is not None or 0 in call.result_shape:
            return problem
        if call.experts > group_tokens.MOST_EXPERTS or call.rows > group_tokens.MOST_ROWS:
            return (
                f"{call.experts} experts and {call.rows} rows, above {group_tokens.MOST_EXPERTS} or "
                f"{group_tokens.MOST_ROWS}"
            )
        gpu = gpu_of(layer.device.index)
        return choose_experts(call, gpu).violation(call, gpu)

    def prepare_experts(self, call: ExpertCall, launch: ExpertLaunch | None = None) -> CudaExperts:
        """Choose the launch of a supported call of experts, or take `launch`. Raises what `prepare` raises."""
        device: int = call.layer.device.index
        gpu = gpu_of(device)
        sequence = None
        if 0 not in call.result_shape:
            problem = None if launch is None else launch.violation(call, gpu)
            if problem is not None:
                raise ValueError(f"launch: got {launch}, which cannot run {call}: {problem}")
            with torch.cuda.device(device):
                sequence = (launch or choose_experts(call, gpu)).sequence(call, gpu, device)
        return CudaExperts(sequence, device, call.layer.dtype, call.result_shape)

    def _unsupported_down_reason(self, call: ExpertCall) -> str | None:
        if call.layer.device.type != "cuda":
            return f"y is on {call.layer.device}, not on a CUDA device"
        gpu = gpu_of(call.layer.device.index)
        problem = experts_down.unsupported_reason(call, gpu)
        if problem is not None or has_cuda_core():
            return problem
        if all(is_cached(*source) for source in experts_down.sources(experts_down.launch_for(call, gpu), call, gpu)):
            return None
        return "cuda-core is not installed (pip install cuda-core), and the cache does not hold the kernel"

    def prepare_down(self, call: ExpertCall, launch: ExpertsDown | None = None) -> CudaDown:
        """Choose the launch of a supported `experts_down`, or take `launch`. Raises what `prepare` raises."""
        device: int = call.layer.device.index
        gpu = gpu_of(device)
        problem = None if launch is None else launch.violation(call, gpu)
        if problem is not None:
            raise ValueError(f"launch: got {launch}, which cannot run {call}: {problem}")
        with torch.cuda.device(device):
            return CudaDown(
                *experts_down.launches(launch or experts_down.launch_for(call, gpu), call, gpu, device), device
            )

    def can_pack(self, masks: Tensor) -> bool:
        if masks.device.type != "cuda" or masks.dtype not in packing.KINDS or max(masks.shape[1:]) >= 2**31:
            return False
        arch = gpu_of(masks.device.index).arch
        return arch >= (8, 0) and (has_cuda_core() or is_cached(*packing.source(arch, masks.dtype, masks.shape[0])))

    def can_pack_experts(self, mask_logits: Tensor) -> bool:
        """True if `pack` takes these logits `[E, n_masks, out_features, in_features]`."""
        return len(mask_logits) < 2**16 and self.can_pack(mask_logits[0])

    def pack(self, masks: Tensor) -> Tensor:
        device: int = masks.device.index
        if device != current_device():
            with torch.cuda.device(device):
                return self.pack(masks)
        return packing.pack(masks, gpu_of(device).arch, current_stream(device))

    def can_train_forward(self, call: LayerCall) -> bool:
        return (
            call.device.type == "cuda"
            and call.dtype in (torch.float16, torch.bfloat16)
            and (call.mask_weights_dtype is None or call.mask_weights_dtype in ELEMENTS)
            and call.activation in ACTIVATIONS
            and max(call.tokens, call.out_features, call.in_features) < 2**30
            and has_cuda_core()
            and gpu_of(call.device.index).arch >= (8, 0)
        )

    def can_train_backward(self, call: LayerCall) -> bool:
        return self.can_train_forward(call)

    def prepare_forward_train(self, call: LayerCall) -> PreparedForwardTrain:
        """Prepare a forward pass. Raises what `prepare` raises."""
        with torch.cuda.device(call.device):
            return _on_device(call.device.index, training.ForwardTrain(call))

    def prepare_backward(self, call: LayerCall) -> PreparedBackward:
        """Prepare a backward pass. Its first call compiles and loads the kernels, and raises what `prepare` raises."""
        return _on_device(call.device.index, training.Backward(call))

    def unsupported_experts_training_reason(self, call: ExpertCall) -> str | None:
        """The reason why the backend cannot train these experts; None if it can."""
        layer = call.layer
        if layer.device.type != "cuda":
            return f"x is on {layer.device}, not on a CUDA device"
        if layer.mask_weights_dtype is not None and layer.mask_weights_dtype not in ELEMENTS:
            return f"no kernel for mask_weights {layer.mask_weights_dtype}"
        return experts_training.unsupported_reason(layer.device, layer.dtype)

    def can_train_experts_forward(self, call: ExpertCall) -> bool:
        return self.unsupported_experts_training_reason(call) is None

    def can_train_experts_backward(self, call: ExpertCall) -> bool:
        return self.unsupported_experts_training_reason(call) is None

    def prepare_grouped_forward_train(self, call: ExpertCall) -> PreparedGroupedForwardTrain:
        """Prepare a forward pass. Raises what `prepare` raises."""
        with torch.cuda.device(call.layer.device):
            return _on_device(call.layer.device.index, experts_training.ForwardTrain(call))

    def prepare_grouped_backward(self, call: ExpertCall) -> PreparedGroupedBackward:
        """Prepare a backward pass. Its first call compiles and loads the kernels, and raises what `prepare` raises."""
        return _on_device(call.layer.device.index, experts_training.backward)


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

    def __call__(self, given: LayerArguments) -> Tensor:
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
            # The workspace is freed on return, while the kernels may still run. The stream runs the next user of the
            # memory after them.
            workspace = empty((sequence.workspace_bytes,), (1,), torch.uint8, device)
            sequence(stream, pointers, workspace=workspace.data_ptr())
        elif sequence.maps:
            sequence(stream, pointers)
        else:
            sequence.kernel(stream, pointers)
        return out
