"""The current device and stream of torch, and memory on them, without the overhead of torch's public functions."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor


def current_device() -> int:
    return torch._C._cuda_getDevice()


def current_stream(device: int) -> int:
    return torch._C._cuda_getCurrentRawStream(device)


# Inductor's code allocates its buffers with this function. It avoids the dispatcher, which would take longer than the
# rest of a call.
_empty_strided: Callable[..., Tensor] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


def empty(shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype, device: int) -> Tensor:
    """Allocate memory on `device`, the current device; torch fills it if results have to be deterministic."""
    if _empty_strided is None or torch._C._get_deterministic_algorithms():
        return torch.empty_strided(shape, strides, dtype=dtype, device=torch.device("cuda", device))
    return _empty_strided(shape, strides, dtype)
