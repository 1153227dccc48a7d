"""Checks that every tensor argument must pass before checks of its shape and dtype, and conversions of tensors."""

from __future__ import annotations

import ctypes
import sys

import torch
from torch import Tensor, nn


def check_dense(name: str, tensor: Tensor | None) -> None:
    """Check that an argument is a dense tensor. Reads no values.

    Raises:
        TypeError: the argument is no tensor (torch lets None pass as one), or it is a sparse, mkldnn or nested tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: got {'None' if tensor is None else type(tensor).__name__}, must be a tensor")
    if tensor.layout is not torch.strided or tensor.is_nested:
        layout = str(tensor.layout).removeprefix("torch.").removeprefix("_")
        advice = "; pass its values(), whose rows are the tokens" if layout == "jagged" and name == "x" else ""
        layout = "nested" if layout == "strided" else layout
        raise TypeError(f"{name}: got a tensor of layout {layout}, must be a dense tensor (torch.strided){advice}")


def whole(tensor: Tensor) -> Tensor:
    """Gather a DTensor to a plain tensor; return any other tensor unchanged. All ranks must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def is_readable(tensor: Tensor) -> bool:
    """True if Python may read the values: no tracing, functorch transform, graph capture or tensor subclass is active.

    DTensor is the one subclass that may be read. All ranks use a layer together, so a check that communicates finds the
    others waiting for it.
    """
    dtensor = sys.modules.get("torch.distributed.tensor")
    return (
        (type(tensor) in (Tensor, nn.Parameter) or (dtensor is not None and isinstance(tensor, dtensor.DTensor)))
        and not torch.jit.is_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not (tensor.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def bytes_of(tensor: Tensor) -> bytes:
    """The elements of a dense tensor on any device as raw bytes, row by row. Does not need NumPy."""
    tensor = tensor.detach().cpu().contiguous()
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes) if tensor.numel() else b""


def check_memory(**tensors: Tensor | None) -> None:
    """Check that each tensor's storage holds all its elements. Storages can be resized, as FSDP does.

    Call this in kernels only, because the tensors of a fake kernel have no memory.

    Raises:
        ValueError: a storage is too small.
    """
    for name, tensor in tensors.items():
        if tensor is None or tensor.numel() == 0:
            continue
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
        found = tensor.untyped_storage().nbytes()
        if found < needed:
            raise ValueError(
                f"{name}: got a tensor of shape {list(tensor.shape)} whose storage has {found} bytes, "
                f"must have {needed}; the storage was resized"
            )
