"""Chooses the backend for a call of an operator, prepares the call and runs it.

A `Call` describes the arguments of an operator. The first backend that can run the described call is chosen, and
prepares it: the backend decides everything about the call except its tensors. The choice depends only on the
description. Later calls with the same description reuse the prepared call. Nothing is tuned or timed at run time. Tests
and tuning override the choice by the argument `backend`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from . import checks, notices
from .backends import BACKENDS
from .backends.base import Backend, Description, Prepared, Reason, Task
from .call import Call, Key, metadata_key
from .formats import round_activation
from .given import OPERATORS, BackwardGiven, DownGiven, Given
from .masks import pack, packed_shape

CALLS_KEPT = 4096
"""The capacity of the cache of prepared calls. A full cache is cleared, and calls are prepared again."""

_prepared: dict[Key, Prepared] = {}
"""The prepared calls. A key is a result of `metadata_key` for the task `forward`, and of `arguments_key` for others."""


# --- The choice of a backend -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why it was chosen.

    Attributes:
        backend: the name of the backend.
        reason: why the backend was chosen.
        is_fallback: True if `reason` prevents a faster backend or kernel from running the call.
        launch: the launch configuration, if the backend has several.
        launch_origin: the source of `launch`: a table of measured launches, or the cost model.
        weight_format: the format of the weight (`mglu_ops.formats`).
        activation_format: the format to which the kernel or torch rounds x before it is multiplied.
        rounds_x: True if the kernel multiplies in `activation_format`.
        is_kept: True if later calls with the same description may reuse the prepared call.
    """

    backend: str
    reason: str
    is_fallback: bool = False
    launch: Any = None
    launch_origin: str = ""
    weight_format: str = "dense"
    activation_format: str = "dense"
    rounds_x: bool = False
    is_kept: bool = True

    @property
    def kernel(self) -> str | None:
        """The name of the kernel, where a backend has several."""
        return None if self.launch is None else self.launch.kernel

    def __str__(self) -> str:
        launch = "" if self.launch is None else f" {self.launch}, by {self.launch_origin}"
        stored = "" if self.weight_format == "dense" else f", weight in {self.weight_format}"
        if self.activation_format != "dense":
            stored += f", x {'in' if self.rounds_x else 'rounded to'} {self.activation_format}"
        return f"{self.backend}{launch}{stored}: {self.reason}"


NOTICEABLE_WEIGHTS = 1 << 18
"""The number of weights from which a slow backend is worth a warning. Smaller layers take at most 1 ms on every
backend."""

REFUSED = (
    "mglu: set_batch_invariant_mode(True) asks for results that do not depend on the batch, "
    "which only the CUDA backend's kernels give, and they cannot run this: {}"
)


def explain_dispatch(*args: Any, **kwargs: Any) -> Choice:
    """Return the backend and the kernel that would run a call of an operator, without reading tensor values.

    Args:
        *args: an operator, such as `torch.ops.mglu.experts_forward`, and its arguments. Without an operator, they are
            the arguments of `mglu::forward`: x, weight, packed_masks, activation and so on.
        **kwargs: arguments of the operator by name.

    Raises:
        TypeError: an argument is missing or unknown, is not a dense tensor, or has a wrong dtype.
        ValueError: the shape or the device of an argument is wrong, there is no such activation, or the operator is
            not one of `mglu_ops.given.OPERATORS`.
        TableError: a table of launches (`MGLU_TUNING_TABLE`) cannot be used.
        RuntimeError: the batch-invariant mode is on, and no kernel can run the call in it.
    """
    op: Any = torch.ops.mglu.forward
    if args and isinstance(args[0], (OpOverload, OpOverloadPacket)):
        op, *args = args  # type: ignore[assignment] # a list
    schema = (op.default if isinstance(op, OpOverloadPacket) else op)._schema
    name = schema.name.removeprefix("mglu::")
    if name not in OPERATORS:
        raise ValueError(f"operator: got {schema.name}, must be mglu::{{{', '.join(OPERATORS)}}}")
    task, given_of = OPERATORS[name]
    return choose(*_task_and_call(task, given_of(*_in_order(schema, args, kwargs))))


def _in_order(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments in the order of a schema. Raises TypeError if an argument is missing or unknown."""
    names = [argument.name for argument in schema.arguments]
    found = {**dict(zip(names, args, strict=False)), **kwargs}
    missing = [one.name for one in schema.arguments if one.name not in found and not one.has_default_value()]
    unknown = [*(found.keys() - set(names)), *map(repr, args[len(names) :])]
    if missing or unknown:
        raise TypeError(f"{schema.name}: must get {', '.join(names)}; missing {missing}, unknown {unknown}")
    return [found.get(one.name, one.default_value) for one in schema.arguments]


def _task_and_call(task: str, given: Any) -> tuple[Task, Call]:
    """Check the arguments of an operator of `OPERATORS`, and describe its call."""
    if task == "down":
        checks.check_down(given)
        return "down", Call.of_down(given)
    if task == "backward":
        checks.check_backward(given)
        return "backward", _of_backward(given)
    if task == "ste":
        checks.check_ste(given)
        *experts, n_masks, d, h = given.mask_logits.shape
        packed_masks = given.x.new_empty((*experts, *packed_shape(n_masks, d, h)), dtype=torch.uint8)
        return "forward", Call.of(given.packed(packed_masks))
    checks.check_forward(given)
    return ("train" if task == "train" else "forward"), Call.of(given)


def choose(task: Task, call: Call) -> Choice:
    """Choose the first backend that can run a task. Raises the errors of `explain_dispatch`."""
    declined: list[Reason] = []
    for backend in _candidates(task, call):
        reason = backend.reason(task, call)
        if reason is None:
            return _chosen(backend, backend.describe(task, call), call, declined)
        declined.append(reason)
    assert call.batch_invariant  # otherwise, the backend `composite` runs every task
    raise RuntimeError(REFUSED.format("; ".join(dict.fromkeys(map(str, declined))) or "training"))


def build(task: Task, call: Call) -> None:
    """Compile the kernels that a call will run into the cache of kernels, and load nothing.

    Raises the errors of `explain_dispatch` and of the backend's `build`.
    """
    BACKENDS[choose(task, call).backend].build(task, call)


def _candidates(task: Task, call: Call) -> list[Backend]:
    """Return the backends for the call's device; in the batch-invariant mode, those that run the task in this mode."""
    if call.batch_invariant:
        return [backend for backend in BACKENDS.values() if task in backend.batch_invariant_tasks]
    return [backend for backend in BACKENDS.values() if backend.device_type in (None, call.device.type)]


def _chosen(backend: Backend, how: Description, call: Call, declined: Sequence[Reason]) -> Choice:
    losses, text = [reason for reason in declined if reason.is_loss], how.text
    is_fallback = bool(losses or how.slow_reason) and call.out_features * call.in_features >= NOTICEABLE_WEIGHTS
    if how.slow_reason is not None:
        text = ": ".join((how.slow_reason, *(["; ".join(dict.fromkeys(map(str, declined)))] if declined else [])))
    elif declined:
        text += f", slower here than other kernels of this package: {losses[0]}" if losses else f": {declined[0]}"
    return Choice(
        backend.name,
        text,
        is_fallback,
        how.launch,
        how.origin,
        call.weight.format.name,
        call.activation_format,
        how.rounds_x,
        not any(reason.is_passing for reason in declined),
    )


@cache
def warn_of_fallback(backend: str, reason: str, op: str) -> None:
    """Warn once that an operator runs on a slow backend."""
    notices.warn(f"mglu::{op} runs on the backend {backend}: {reason}", stacklevel=6)


# --- Prepared calls --------------------------------------------------------------------------------------------------


def repeat(given: Given) -> Tensor | None:
    """Run a call whose `metadata_key` equals an earlier call's, without checking or preparing it again.

    Returns None for any other call, which must be checked and passed to `forward`.
    """
    try:
        prepared = _prepared.get(metadata_key(given))
    except (RuntimeError, AttributeError):  # the checks will refuse the argument that is None or not a dense tensor
        return None
    return None if prepared is None else prepared(given)


def is_known(key: Key | None) -> bool:
    """True if an earlier call with this key has passed the checks."""
    return key in _prepared


def forward(given: Given, *, backend: str | None = None, launch: Any = None) -> Tensor:
    """Run a call whose arguments have been checked, and return its result `[..., out_features]`.

    Args:
        given: the arguments.
        backend: a name of `BACKENDS` that overrides the choice, for tests and tuning. Such a call is not cached.
        launch: a launch configuration for that backend; see its `prepare`.

    Raises:
        ValueError: there is no such backend, or it cannot run the call.
        RuntimeError: the batch-invariant mode is on, and no kernel can run the call in it.
    """
    call = Call.of(given)
    if backend is not None:
        return _forward_on(_asked_for(backend, "forward", call), call, given, launch)(given)
    known = repeat(given)
    if known is not None:
        return known
    op = "forward" if given.routing is None else "experts_forward" if given.offs is None else "grouped_forward"
    return _prepare("forward", call, op, metadata_key(given), given)(given)


def _prepare(task: Task, call: Call, op: str, key: Key | None, given: Any = None) -> Prepared:
    """Choose a backend, warn if it is a fallback, prepare the call and keep it for later calls with the same key.

    `given` is needed for the task `forward` only.
    """
    choice = choose(task, call)
    if choice.is_fallback:
        warn_of_fallback(choice.backend, choice.reason, op)
    backend = BACKENDS[choice.backend]
    if task == "forward":
        prepared = _forward_on(backend, call, given, choice.launch)
    else:
        prepared = backend.prepare(task, call, choice.launch)
    if key is not None and choice.is_kept:
        if len(_prepared) >= CALLS_KEPT:
            _prepared.clear()
        _prepared[key] = prepared
    return prepared


def _asked_for(name: str, task: Task, call: Call) -> Backend:
    """Return the backend called `name`. Raises the errors of `forward`."""
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, must be {', '.join(sorted(BACKENDS))}")
    backend = BACKENDS[name]
    if call.batch_invariant and task not in backend.batch_invariant_tasks:
        raise RuntimeError(REFUSED.format(f"the backend {name!r} was asked for"))
    problem = backend.reason(task, call)
    if problem is not None and not problem.is_preference:
        raise ValueError(f"backend: got {name!r}, which cannot take this call: {problem}")
    return backend


def _forward_on(backend: Backend, call: Call, given: Given, launch: Any) -> Prepared:
    """Prepare a call. Where necessary, the prepared call first rounds x, and converts its arguments with `in_rows`."""
    if call.activation_format != "dense" and not backend.rounds_x:
        dense = backend.prepare("forward", call.with_rounded_x(), launch)
        return lambda given: dense(_rounded(given).in_rows())
    prepared = backend.prepare("forward", call, launch)
    return (lambda given: prepared(given.in_rows())) if _is_copied(given) else prepared


def _rounded(given: Given) -> Given:
    """Round x to the activation format `fp8_token`."""
    return given._replace(x=round_activation(given.x).contiguous(), activation_format="dense")


def _is_copied(given: Given) -> bool:
    """True if backends need `given.in_rows()`: it copies a tensor, or changes the shape of experts' mask weights."""
    rows = given.in_rows()
    weights = given.mask_weights
    return (given.routing is not None and weights is not None and weights.dim() != 2) or any(
        tensor.data_ptr() != getattr(rows, name).data_ptr() for name, tensor in given.tensors().items()
    )


# --- Packing ---------------------------------------------------------------------------------------------------------


def pack_masks(masks: Tensor) -> Tensor:
    """Pack bool masks `[n_masks, out_features, in_features]`."""
    backend = _packing_backend(masks)
    return pack(masks) if backend is None else backend.pack(masks)


def pack_logits(mask_logits: Tensor) -> Tensor:
    """Pack the masks `logits > 0` of mask logits `[(E,) n_masks, out_features, in_features]`."""
    backend = _packing_backend(mask_logits)
    if backend is not None:
        return backend.pack(mask_logits)
    if mask_logits.dim() == 4:
        return torch.stack([pack_logits(one) for one in mask_logits])
    return pack(mask_logits > 0)


def _packing_backend(masks: Tensor) -> Backend | None:
    """Return the backend that packs these masks in one pass over them; None if torch must pack them."""
    return next((backend for backend in BACKENDS.values() if backend.can_pack(masks)), None)


# --- Training, and the down projections of experts --------------------------------------------------------------------


def train(key: Key | None, given: Given) -> tuple[Tensor, Tensor]:
    """Return the result `[..., out_features]`, and the partials `[..., rows, out_features]` that backward needs.

    `key` is the `arguments_key` of the operator and its arguments.
    """
    x, given = given.x, given.in_rows()
    prepared = _prepared.get(key) if key else None
    if prepared is None:
        op = "forward_train" if given.offs is None else "grouped_forward_train"
        prepared = _prepare("train", Call.of(given), op, key)
    result, partials = prepared(given)
    if given.x is x:
        return result, partials
    leading = x.shape[:-1]
    # The result must not be a view, since autograd does not allow detaching a view in place.
    result = torch.ops.aten._unsafe_view(result, (*leading, *result.shape[1:]))
    return result, partials.view(*leading, *partials.shape[1:])


def backward(key: Key | None, given: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, mask logits and mask weights; gradients that are not needed are empty.

    `key` is the `arguments_key` of the operator and its arguments.
    """
    x, given = given.x, given.in_rows()
    prepared = _prepared.get(key) if key else None
    if prepared is None:
        op = "backward" if given.offs is None else "grouped_backward"
        prepared = _prepare("backward", _of_backward(given), op, key)
    grad_x, grad_weight, grad_logits, grad_mask_weights = prepared(given)
    if given.x is not x:
        if given.needs[0]:
            grad_x = grad_x.view(x.shape)
        if given.mask_weights_dtype is not None:
            grad_mask_weights = grad_mask_weights.view(*x.shape[:-1], grad_mask_weights.shape[-1])
    return grad_x, grad_weight, grad_logits, grad_mask_weights


def _of_backward(given: BackwardGiven) -> Call:
    described = Call.of(Given(given.x, given.weight, given.packed_masks, offs=given.offs))
    return replace(described, mask_weights_dtype=given.mask_weights_dtype)


def down(key: Key | None, given: DownGiven, *, backend: str | None = None, launch: Any = None) -> Tensor:
    """Return the result `[T, out_features]`. `key` is as in `train`; `backend` and `launch` are as in `forward`."""
    prepared = _prepared.get(key) if key and backend is None else None
    given = given.in_rows()
    if prepared is None:
        call = Call.of_down(given)
        if backend is not None:
            return _asked_for(backend, "down", call).prepare("down", call, launch)(given)
        prepared = _prepare("down", call, "experts_down", key)
    return prepared(given)


def down_backward(grad_output: Tensor, given: DownGiven, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, weight and expert_weights; gradients that are not needed are empty."""
    given = given.in_rows()
    prepared = _prepare("down_backward", Call.of_down(given), "experts_down_backward", None)
    return prepared(grad_output, given, needs)


def waiting_reason(task: Task, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return the reason why the host waits for a device to run a task of experts in this dtype; None if it does not."""
    call = Call.contiguous(device, dtype, 1, 1, 16, 16).over_experts(1, 1, None)
    choice = choose(task, replace(call, batch_invariant=False))
    return choice.reason if choice.backend == "composite" and device.type not in ("cpu", "meta") else None
