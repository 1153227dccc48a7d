"""Writes tensors to files that a C++ program reads without a library, for inputs and expected results of a package.

A file begins with a line of text, such as `mglu-tensor 1 float32 2 3 64` (version, dtype, sizes). The elements follow
in row-major order, little endian.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from ..tensors import bytes_of


def write_tensor(path: str | Path, tensor: Tensor) -> None:
    """Write a tensor of any numeric dtype. Device, strides and gradient are not stored."""
    head = " ".join(["mglu-tensor 1", str(tensor.dtype).removeprefix("torch."), *(str(size) for size in tensor.shape)])
    Path(path).write_bytes(head.encode() + b"\n" + bytes_of(tensor))
