"""Prepared calls of the operators over experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...expert_calls import ExpertArguments
from .current import current_device, current_stream, empty
from .launch import LaunchSequence


class CudaExperts:
    """A prepared call of `experts_forward` or `grouped_forward`. Thread-safe.

    It launches `sequence`, which is None for an empty result.
    """

    __slots__ = ("_device", "_dtype", "_shape", "_strides", "sequence")

    def __init__(
        self, sequence: LaunchSequence | None, device: int, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> None:
        self.sequence = sequence
        self._shape = shape
        self._strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
        self._dtype = dtype
        self._device = device

    def __call__(self, given: ExpertArguments) -> Tensor:
        device = self._device
        if device != current_device():
            with torch.cuda.device(device):
                return self(given)
        out = empty(self._shape, self._strides, self._dtype, device)
        sequence = self.sequence
        if sequence is None:
            return out
        stream, pointers = current_stream(device), addresses(given, out)
        if not sequence.workspace_bytes:
            sequence(stream, pointers)
            return out
        # Freed on return, after the launches. Whoever gets the memory next runs after the kernels on this stream.
        workspace = empty((sequence.workspace_bytes,), (1,), torch.uint8, device)
        sequence(stream, pointers, workspace=workspace.data_ptr())
        return out


def addresses(given: ExpertArguments, out: Tensor) -> dict[str, int]:
    """The addresses of the tensors and of the result by the names that kernels have for them, 0 for None."""
    mask_weights, scale = given.mask_weights, given.weight_scale
    return {
        "x": given.x.data_ptr(),
        "weight": given.weight.data_ptr(),
        "packed_masks": given.packed_masks.data_ptr(),
        "mask_weights": 0 if mask_weights is None else mask_weights.data_ptr(),
        "weight_scale": 0 if scale is None else scale.data_ptr(),
        "out": out.data_ptr(),
        "expert_ids": given.routing.data_ptr(),
        "items": 0,
    }
