"""Copies of a tensor with other alignments and strides. The memory around them must be neither read nor written."""

from __future__ import annotations

import torch
from torch import Tensor

BAND = 4096
"""The number of elements before a tensor that `between` returns, and the number after it."""


def unaligned(tensor: Tensor, offset: int = 1) -> Tensor:
    """A contiguous copy that starts `offset` elements past a multiple of 16 bytes."""
    return tensor.new_empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)


def rows_apart(tensor: Tensor, distance: int = 8) -> Tensor:
    """A copy with `distance` elements between its rows. These elements are NaN or the largest integer."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + distance)
    return tensor.new_full(shape, _poison(tensor))[..., : tensor.shape[-1]].copy_(tensor)


def spaced(tensor: Tensor) -> Tensor:
    """A copy with one element between neighbouring elements. These elements are NaN or the largest integer."""
    return torch.stack((tensor, torch.full_like(tensor, _poison(tensor))), -1)[..., 0]


def transposed(tensor: Tensor) -> Tensor:
    """A copy whose first two dimensions are swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def mask_major(tensor: Tensor) -> Tensor:
    """A copy of packed masks whose last dimension, the masks, is outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def between(tensor: Tensor, fill: float) -> Tensor:
    """A contiguous copy with `BAND` elements of `fill` before and after it."""
    storage = tensor.new_full((tensor.numel() + 2 * BAND,), fill)
    return storage[BAND:-BAND].view(tensor.shape).copy_(tensor)


def bands_of(tensor: Tensor) -> Tensor:
    """The bands around a tensor that `between` returned."""
    storage = tensor.as_strided((tensor.numel() + 2 * BAND,), (1,), tensor.storage_offset() - BAND)
    return torch.cat((storage[:BAND], storage[-BAND:]))


def _poison(tensor: Tensor) -> float:
    if tensor.is_floating_point():
        return float("nan")
    return 1 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max
