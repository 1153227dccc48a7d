"""Which backend and kernel run a call, and the calls that obey: a pure function of the arguments' metadata.

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

from . import batch_invariance
from .backends import composite, cpu, cuda, triton
from .backends.known import Key, key_of, remember
from .masks import pack


def _few_tokens(dtype: torch.dtype, n_masks: int) -> int:
    """Up to how many tokens kernels that read W again for every 8 or 16 of them win over GEMMs on masked copies of it.

    In 16 bits as measured (benchmarks/results/few_tokens.csv): at 512 tokens the kernel wins by 1.7x to 2x for 4 to 16
    masks and loses by 1.1x to 1.4x for one, at 128 it wins by 2x and more for any. float32 was not measured.
    Where wgmma runs (`tile_wgmma`), its kernel wins over both (benchmarks/results/tokens.csv, routes.csv).
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
    """Whether a faster backend or kernel would have taken the call, but for the reason."""
    launch: cuda.LaunchConfig | None = None
    """How the CUDA backend cuts the call."""
    launch_origin: str = ""
    """Where that comes from: a table that measured it, or the model of costs."""

    @property
    def kernel(self) -> str | None:
        """The CUDA backend's kernel: decode_mma, tile_wgmma or plain."""
        return None if self.launch is None else self.launch.kernel

    def __str__(self) -> str:
        launch = "" if self.launch is None else f" {self.launch}, by {self.launch_origin}"
        return f"{self.backend}{launch}: {self.reason}"


_BACKENDS: dict[str, Any] = {"cpu": cpu, "cuda": cuda, "triton": triton}
"""Those that take `[tokens, in_features]`; `composite` takes all."""

_NOTICEABLE_WEIGHTS = 1 << 18
"""A smaller layer is done in a millisecond by any backend: not worth a word to those who have no compiler."""


def choose(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str = "silu", route_weights: Tensor | None = None
) -> Choice:
    """The backend and the kernel for a call of `mglu::forward`; reads no value of the tensors.

    Raises:
        TableError: a table of launches (`MGLU_TUNING_TABLE`) cannot be used.
        RuntimeError: the batch-invariant mode is on, and nothing can run the call in it.
    """
    tokens = math.prod(x.shape[:-1])
    routes = None if route_weights is None else _rows(route_weights, tokens)
    call = (_rows(x, tokens), weight, packed_masks, activation, routes)
    if batch_invariance.enabled:
        return _choose_batch_invariant(*call)
    if x.is_cpu:
        return _choose_on_cpu(*call)
    if not x.is_cuda:
        return Choice("composite", f"library GEMMs, the only backend for {x.device.type}")
    limit = _few_tokens(x.dtype, packed_masks.shape[2])
    if not limit:
        return Choice("composite", f"library GEMMs, the only backend for {x.dtype}")
    problem = cuda.unsupported_reason(*call)
    if problem is None:
        decision = cuda.launch_of(*call)
        if tokens <= limit or decision.config.kernel == "tile_wgmma":
            return _on_cuda(decision, tokens, weight)
    if tokens > limit:
        return Choice("composite", f"library GEMMs, for {tokens} tokens (more than {limit})")
    if triton.unsupported_reason(*call) is None:
        return Choice("triton", f"the masks are applied on chip, but slower than by the CUDA backend: {problem}", True)
    return Choice("composite", f"library GEMMs, several times slower here than the CUDA backend: {problem}", True)


def _on_cuda(decision: cuda.Decision, tokens: int, weight: Tensor) -> Choice:
    if decision.problem is None:
        reason = f"the masks are applied on chip, for {tokens} tokens"
        return Choice("cuda", reason, launch=decision.config, launch_origin=decision.origin)
    reason = f"several times slower than by the kernels for aligned layers: {decision.problem}"
    return Choice("cuda", reason, weight.numel() >= _NOTICEABLE_WEIGHTS, decision.config, decision.origin)


def _choose_batch_invariant(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> Choice:
    problem = cuda.unsupported_reason(x, weight, packed_masks, activation, route_weights)
    if problem is not None:
        raise RuntimeError(_REFUSED.format(problem))
    return _on_cuda(cuda.launch_of(x, weight, packed_masks, activation, route_weights), x.shape[0], weight)


_REFUSED = (
    "mglu: set_batch_invariant_mode(True) asks for results that do not depend on the batch, "
    "which only the CUDA backend's kernels give, and they cannot run this: {}"
)


def _choose_on_cpu(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> Choice:
    if x.dtype is torch.float64:
        return Choice("composite", f"library GEMMs, the only backend for {x.dtype} on a CPU")
    problem = cpu.unsupported_reason(x, weight, packed_masks, activation, route_weights)
    if problem is None:
        isa = cpu.isa(x.dtype, math.prod(x.shape[:-1]), packed_masks.shape[2])
        return Choice("cpu", f"kernels of this package, instruction set {isa}")
    slow = weight.numel() >= _NOTICEABLE_WEIGHTS
    return Choice("composite", f"library GEMMs, several times slower here than the CPU backend: {problem}", slow)


def _rows(tensor: Tensor, tokens: int) -> Tensor:
    return tensor if tensor.dim() == 2 else tensor.reshape(tokens, tensor.shape[-1])


@cache
def _warn_of_fallback(backend: str, reason: str) -> None:
    warnings.warn(f"mglu::forward runs on the backend {backend}: {reason}", UserWarning, stacklevel=5)


_Arguments = tuple[Tensor, Tensor, Tensor, str, Tensor | None]

_calls: dict[Key, cuda.Call | cpu.Call] = {}
"""Those whose checks and whose choice are behind them."""


def repeat(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> Tensor | None:
    """The result of a call that is like an earlier one in all that its checks, its backend and its plan depend on.

    None of any other call, which has to be checked and given to `forward`.
    """
    if x is None or weight is None or packed_masks is None or not (x.is_cuda or x.is_cpu):  # torch lets None through
        return None
    call = _calls.get(key_of(x, weight, packed_masks, activation, route_weights))
    return None if call is None else call(x, weight, packed_masks, route_weights)


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
        RuntimeError: the batch-invariant mode is on, and nothing can run the call in it.
    """
    given = (x, weight, packed_masks, activation, route_weights)
    known = repeat(*given) if backend is None else None
    if known is not None:
        return known
    tokens = math.prod(x.shape[:-1])
    routes = None if route_weights is None else _rows(route_weights, tokens)
    by_rows = (_rows(x, tokens), weight, packed_masks, activation, routes)
    shape = (*x.shape[:-1], weight.shape[0])
    chosen = backend is None
    if backend is None:
        known = repeat(*by_rows) if _are_copied(given, by_rows) else None
        if known is not None:
            return known.view(shape)
        choice = choose(*by_rows)
        if choice.is_fallback:
            _warn_of_fallback(choice.backend, choice.reason)
        backend = choice.backend
    elif batch_invariance.enabled and backend != "cuda":
        raise RuntimeError(_REFUSED.format(f"the backend {backend!r} was asked for"))
    if backend == "composite":
        return composite.forward(x, weight, packed_masks, activation, route_weights)
    implementation = _BACKENDS.get(backend)
    if implementation is None:
        raise ValueError(f"backend: got {backend!r}, must be composite, cpu, cuda or triton")
    problem = None if chosen else implementation.unsupported_reason(*by_rows)
    if problem is not None:
        raise ValueError(f"backend: got {backend!r}, which cannot take this call: {problem}")
    call = implementation.plan_call(*by_rows) if chosen and implementation in (cuda, cpu) else None
    if call is not None:
        if _are_copied(given, by_rows):  # the copies are what comes again
            remember(_calls, key_of(*by_rows), call)
        else:
            remember(_calls, key_of(*given), call.with_shape(shape))
        result = call(*by_rows[:3], routes)
    else:
        result = implementation.forward(*by_rows)
    return result if x.dim() == 2 else result.view(shape)


def _are_copied(given: _Arguments, by_rows: _Arguments) -> bool:
    """Whether the rows of x or of the route weights are not views of them."""
    routes, route_weights = by_rows[4], given[4]
    copied = by_rows[0].data_ptr() != given[0].data_ptr()
    if routes is not None and route_weights is not None:
        copied = copied or routes.data_ptr() != route_weights.data_ptr()
    return copied


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
    if batch_invariance.enabled:
        raise RuntimeError(_REFUSED.format("training runs on library GEMMs"))
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
