"""Chooses the backend for a call of an operator over experts, prepares the call and runs it: `dispatch` for experts.

The choice depends on the `ExpertCall` only, never on the values of ids or offs. Prepared calls are cached as in
`dispatch`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import batch_invariance, dispatch
from .backends import BACKENDS, Backend, composite_experts
from .backends.base import GroupedBackwardArguments, PreparedExperts
from .dispatch import (
    CALLS_KEPT,
    NOTICEABLE_WEIGHTS,
    REFUSED,
    Choice,
    InRows,
    OfRoundedX,
    cuda_backend,
    is_kept,
    warn_of_fallback,
)
from .expert_calls import DownArguments, ExpertArguments, ExpertCall
from .expert_checks import check_experts
from .layer_call import Key

_prepared: dict[Key, PreparedExperts] = {}
"""The prepared calls of `experts_forward` and `grouped_forward`, by the metadata of their arguments."""

_other_calls: dict[Key, Callable[..., Any]] = {}
"""The prepared calls of `experts_down`, `grouped_forward_train` and `grouped_backward`, by their `arguments_key`."""


# --- The choice of a backend -----------------------------------------------------------------------------------------


def explain_experts_dispatch(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    expert_ids: Tensor,
    activation: str = "silu",
    mask_weights: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_format: str = "dense",
    activation_format: str = "dense",
) -> Choice:
    """The backend for a call of `mglu::experts_forward` with these arguments. Reads no tensor values.

    Raises the errors of `explain_dispatch`.
    """
    given = ExpertArguments.of_ids(
        x, weight, packed_masks, expert_ids, activation, mask_weights, weight_scale, weight_format, activation_format
    )
    check_experts(given)
    return choose(ExpertCall.of(given))


def choose(call: ExpertCall) -> Choice:
    """The backend for a call of `experts_forward`, `grouped_forward` or, without masks, of `experts_down`."""
    layer = call.layer
    formats = layer.weight.format.name, layer.activation_format
    fast = {"cuda": "cuda", "cpu": "cpu"}.get(layer.device.type)
    problem = BACKENDS[fast].unsupported_experts_reason(call) if fast else f"the only backend for {layer.device.type}"
    if fast and problem is None:
        return Choice(fast, f"kernels of this package, for {call}", False, None, "", *formats)
    if layer.batch_invariant:
        raise RuntimeError(REFUSED.format(problem))
    is_fallback = bool(fast) and layer.dtype is not torch.float64 and _is_noticeable(call)
    return Choice("composite", f"library GEMMs: {problem}", is_fallback, None, "", *formats)


def _is_noticeable(call: ExpertCall) -> bool:
    return call.layer.out_features * call.layer.in_features >= NOTICEABLE_WEIGHTS


def _chosen(call: ExpertCall, op: str) -> Backend:
    choice = choose(call)
    if choice.is_fallback:
        warn_of_fallback(choice.backend, choice.reason, op, stacklevel=6)
    return BACKENDS[choice.backend]


# --- Inference -------------------------------------------------------------------------------------------------------


def repeat(given: ExpertArguments) -> Tensor | None:
    """Run a call whose key equals that of an earlier call. Returns None for any other call, which must be checked."""
    try:
        prepared = _prepared.get(given.key())
    except (RuntimeError, AttributeError):  # the checks will refuse the argument that is None or not a dense tensor
        return None
    return None if prepared is None else prepared(given)


def forward(given: ExpertArguments, *, backend: str | None = None, launch: Any = None) -> Tensor:
    """The result of a call whose arguments have been checked.

    `backend`, `launch` and the errors are as in `dispatch.forward`.
    """
    call = ExpertCall.of(given)
    if backend is not None:
        return _prepare(_asked_for(backend, call), call, given, launch)(given)
    chosen = _chosen(call, "experts_forward" if given.offs is None else "grouped_forward")
    prepared = _prepare(chosen, call, given, None)
    if is_kept(call.layer, chosen.name):
        if len(_prepared) >= CALLS_KEPT:
            _prepared.clear()
        _prepared[given.key()] = prepared
    return prepared(given)


def _asked_for(name: str, call: ExpertCall) -> Backend:
    if batch_invariance.enabled and name != "cuda":
        raise RuntimeError(REFUSED.format(f"the backend {name!r} was asked for"))
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, must be {', '.join(sorted(BACKENDS))}")
    problem = BACKENDS[name].unsupported_experts_reason(call)
    if problem is not None:
        raise ValueError(f"backend: got {name!r}, which cannot take this call: {problem}")
    return BACKENDS[name]


def _prepare(backend: Backend, call: ExpertCall, given: ExpertArguments, launch: Any) -> PreparedExperts:
    """Prepare a call. If necessary, the prepared call first rounds x, and copies arguments that are not `in_rows`."""
    if call.layer.activation_format != "dense" and not backend.rounds_x:
        rounded = replace(call, layer=call.layer.with_rounded_x())
        return OfRoundedX(backend.prepare_experts(rounded, launch))
    prepared = backend.prepare_experts(call, launch)
    changes = any(a is not b for a, b in zip(given, given.in_rows(), strict=True))
    return InRows(prepared) if changes else prepared


# --- Down projection, packing and training ---------------------------------------------------------------------------


def pack_logits(mask_logits: Tensor) -> Tensor:
    """The packed masks `[E, ...]` of logits `[E, n_masks, out_features, in_features]`. Does not copy the logits."""
    if mask_logits.is_cuda and cuda_backend().can_pack_experts(mask_logits):
        return cuda_backend().pack(mask_logits)
    return torch.stack([dispatch.pack_logits(one) for one in mask_logits])


def is_known(key: Key | None) -> bool:
    """True if an earlier call with this key has passed the checks."""
    return key in _other_calls


def _keep(key: Key | None, call: ExpertCall, backend: str, prepared: Callable[..., Any]) -> None:
    if key is not None and is_kept(call.layer, backend):
        if len(_other_calls) >= CALLS_KEPT:
            _other_calls.clear()
        _other_calls[key] = prepared


def down(key: Key | None, given: DownArguments, *, backend: str | None = None, launch: Any = None) -> Tensor:
    """The result `[T, out_features]`; `key` is the `arguments_key` of the operator's name and arguments."""
    prepared = _other_calls.get(key) if key and backend is None else None
    given = given.in_rows()
    if prepared is None:
        call = ExpertCall.of_down(given)
        chosen = _chosen(call, "experts_down") if backend is None else _asked_for(backend, call)
        prepared = chosen.prepare_down(call, launch)
        if backend is None:
            _keep(key, call, chosen.name, prepared)
    return prepared(given)


def down_backward(grad_output: Tensor, given: DownArguments, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, weight and expert_weights; gradients that are not needed are empty."""
    return composite_experts.down_backward(grad_output, given.in_rows(), needs)


def forward_train(key: Key | None, given: ExpertArguments) -> tuple[Tensor, Tensor]:
    """The result `[S, out_features]`, and the partials `[S, entries, out_features]` that backward needs."""
    if batch_invariance.enabled:
        raise RuntimeError(REFUSED.format("training"))
    given = given.in_rows()
    prepared = _other_calls.get(key) if key else None
    if prepared is None:
        call = ExpertCall.of(given)
        backend = next((one for one in BACKENDS.values() if one.can_train_experts_forward(call)), None)
        if backend is None:
            raise _untrainable(call)
        prepared = backend.prepare_grouped_forward_train(call)
        _keep(key, call, backend.name, prepared)
    return prepared(given)


def backward(key: Key | None, arguments: GroupedBackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, mask logits and mask weights; gradients that are not needed are empty."""
    arguments = arguments._replace(offs=arguments.offs.contiguous(), partials=arguments.partials.contiguous())
    prepared = _other_calls.get(key) if key else None
    if prepared is None:
        _, x, weight, packed_masks, offs, *_ = arguments
        call = ExpertCall.of(ExpertArguments.of_offs(x, weight, packed_masks, offs))
        call = replace(call, layer=replace(call.layer, mask_weights_dtype=arguments.mask_weights_dtype))
        backend = next((one for one in BACKENDS.values() if one.can_train_experts_backward(call)), None)
        if backend is None:
            raise _untrainable(call)
        prepared = backend.prepare_grouped_backward(call)
        _keep(key, call, backend.name, prepared)
    return prepared(arguments)


def untrainable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why experts in this dtype cannot be trained on this device; None if they can."""
    return composite_experts.untrainable_reason(device, dtype) if device.type == "cuda" else None


def _untrainable(call: ExpertCall) -> NotImplementedError:
    device, dtype = call.layer.device, call.layer.dtype
    reason = composite_experts.untrainable_reason(device, dtype)
    return NotImplementedError(f"x: got {dtype} on {device}, which cannot train experts: {reason}")
