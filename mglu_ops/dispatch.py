"""Which backend runs a call, and the calls that obey: a pure function of the arguments' metadata.

Nothing is tuned or timed at run time. `backend=` overrides the choice, for tests and for tuning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from .backends import composite, cpu, cuda, triton
from .masks import pack


def _few_tokens(dtype: torch.dtype, n_masks: int) -> int:
    """Up to how many tokens kernels that read W again for every 8 or 16 of them win over GEMMs on masked copies of it.

    In 16 bits as measured (benchmarks/results/few_tokens.csv): at 512 tokens the kernel wins by 1.7x to 2x for 4 to 16
    masks and loses by 1.1x to 1.4x for one, at 128 it wins by 2x and more for any. float32 was not measured.
    Where wgmma runs (`cuda.takes_many`), its kernel wins over both (benchmarks/results/tokens.csv, routes.csv).
    """
    if dtype in (torch.float16, torch.bfloat16):
        return 256 if n_masks == 1 else 512
    return 64 if dtype is torch.float32 else 0


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why it is that one."""

    backend: str
    reason: str
    is_fallback: bool = False
    """Whether a faster backend would have taken the call, but for the reason."""

    def __str__(self) -> str:
        return f"{self.backend}: {self.reason}"


_BACKENDS: dict[str, Any] = {"cpu": cpu, "cuda": cuda, "triton": triton}
"""Those that take `[tokens, in_features]`; `composite` takes all."""


def choose(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str = "silu", route_weights: Tensor | None = None
) -> Choice:
    """The backend for a call of `mglu::forward`; reads no value of the tensors."""
    tokens = math.prod(x.shape[:-1])
    if x.is_cpu:
        return _choose_on_cpu(x, weight, packed_masks, activation, route_weights)
    if not x.is_cuda:
        return Choice("composite", f"library GEMMs, the only backend for {x.device.type}")
    limit = _few_tokens(x.dtype, packed_masks.shape[2])
    if not limit:
        return Choice("composite", f"library GEMMs, the only backend for {x.dtype}")
    call = (_rows(x, tokens), weight, packed_masks, activation, route_weights)
    problem = cuda.unsupported_reason(*call)
    if problem is None and (tokens <= limit or cuda.takes_many(*call)):
        return Choice("cuda", f"the masks are applied on chip, for {tokens} tokens")
    if tokens > limit:
        return Choice("composite", f"library GEMMs, for {tokens} tokens (more than {limit})")
    if triton.unsupported_reason(*call) is None:
        return Choice("triton", f"the masks are applied on chip, but slower than by the CUDA backend: {problem}", True)
    return Choice("composite", f"library GEMMs, several times slower here than the CUDA backend: {problem}", True)


_NOTICEABLE_WEIGHTS = 1 << 18
"""A smaller layer is done in a millisecond by any backend: not worth a word to those who have no compiler."""


def _choose_on_cpu(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> Choice:
    if x.dtype is torch.float64:
        return Choice("composite", f"library GEMMs, the only backend for {x.dtype} on a CPU")
    problem = cpu.unsupported_reason(x, weight, packed_masks, activation, route_weights)
    if problem is None:
        return Choice("cpu", f"kernels of this package, instruction set {cpu.isa()}")
    slow = weight.numel() >= _NOTICEABLE_WEIGHTS
    return Choice("composite", f"library GEMMs, several times slower here than the CPU backend: {problem}", slow)


def _rows(tensor: Tensor, tokens: int) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(tokens, tensor.shape[-1])


@cache
def _warn_of_fallback(choice: Choice) -> None:
    warnings.warn(f"mglu::forward runs on the backend {choice}", UserWarning, stacklevel=4)


def forward(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    *,
    backend: str | None = None,
) -> Tensor:
    """The result `[..., out_features]`, by the chosen backend or by `backend`.

    Raises:
        ValueError: `backend` is none of ours, or cannot take the call.
    """
    chosen = backend is None
    if backend is None:
        choice = choose(x, weight, packed_masks, activation, route_weights)
        backend = choice.backend
        if choice.is_fallback:
            _warn_of_fallback(choice)
    if backend == "composite":
        return composite.forward(x, weight, packed_masks, activation, route_weights)
    implementation = _BACKENDS.get(backend)
    if implementation is None:
        raise ValueError(f"backend: got {backend!r}, must be composite, cpu, cuda or triton")
    tokens = math.prod(x.shape[:-1])
    rows = _rows(x, tokens)
    routes = None if route_weights is None else _rows(route_weights, tokens)
    problem = None if chosen else implementation.unsupported_reason(rows, weight, packed_masks, activation, routes)
    if problem is not None:
        raise ValueError(f"backend: got {backend!r}, which cannot take this call: {problem}")
    result = implementation.forward(rows, weight, packed_masks, activation, routes)
    return result if x.dim() == 2 else result.view(*x.shape[:-1], weight.shape[0])


def pack_masks(masks: Tensor) -> Tensor:
    """The packed masks of bool masks `[n_masks, out_features, in_features]`."""
    backend = _packing_backend(masks)
    return pack(masks) if backend is None else backend.pack(masks)


def pack_logits(mask_logits: Tensor) -> Tensor:
    """The packed masks of logits `[n_masks, out_features, in_features]`, `M = logits > 0`."""
    backend = _packing_backend(mask_logits)
    return pack(mask_logits > 0) if backend is None else backend.pack(mask_logits)


def _packing_backend(masks: Tensor) -> Any:
    """What packs in one pass; None for torch, also for what is too small to build kernels for."""
    if masks.is_cuda:
        return cuda if cuda.can_pack(masks) else None
    return cpu if masks.numel() >= _NOTICEABLE_WEIGHTS and cpu.can_pack(masks) else None


def forward_train(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the gates and values `[n_masks, ..., out_features]` that backward needs."""
    return composite.forward_train(x, weight, packed_masks, activation, route_weights)


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    gates: Tensor,
    values: Tensor,
    activation: str,
    route_weights: Tensor | None,
    needs: Sequence[bool],
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, mask logits and route weights; those not asked for are empty."""
    return composite.backward(
        grad_output, x, weight, packed_masks, gates, values, activation, route_weights, needs, logits_dtype
    )
