"""Tensors as files that a C++ program reads without a library, for inputs and expected results of a package.

A file is a line of text, `mglu-tensor 1 float32 2 3 64` (version, dtype, sizes), and the elements, row by row, little
endian.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor


def write_tensor(path: str | Path, tensor: Tensor) -> None:
    """Write a tensor of any number type. The file does not keep its device, strides and gradient."""
    tensor = tensor.detach().cpu().contiguous()
    head = " ".join(["mglu-tensor 1", str(tensor.dtype).removeprefix("torch."), *(str(size) for size in tensor.shape)])
    data = tensor.reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
    Path(path).write_bytes(head.encode() + b"\n" + data)
