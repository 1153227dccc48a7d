"""Chooses the backend for a call of an operator, prepares the call and runs it.

A `LayerCall` describes a call of `mglu::forward`. `choose` is a pure function of the description and names the backend.
The backend prepares the call: it decides everything except the tensors. Later calls with the same description reuse the
prepared call. Nothing is tuned or timed at run time. `backend=` overrides the choice, for tests and for tuning.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor

from . import batch_invariance, notices
from .backends import BACKENDS, Backend, PreparedCall, cpu
from .backends.base import BackwardArguments, PreparedBackward, PreparedForwardTrain
from .backends.cuda import Cuda, LaunchConfig
from .backends.cuda.choice import LaunchChoice
from .checks import check_layer
from .formats import round_activation
from .layer_call import Key, LayerArguments, LayerCall, as_rows, metadata_key
from .masks import pack
from .words import counted

CALLS_KEPT = 4096
"""The capacity of each cache of prepared calls. A full cache is cleared, and calls are prepared again."""

_prepared: dict[Key, PreparedCall] = {}
"""The prepared calls by the metadata of their tensors."""


# --- The choice of a backend -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """The backend of a call, and why it was chosen.

    Attributes:
        backend: the name of the backend.
        reason: why the backend was chosen.
        is_fallback: True if `reason` prevents a faster backend or kernel from running the call.
        launch: the launch configuration of the CUDA backend.
        launch_origin: the source of `launch`: a table of measured launches, or the cost model.
        weight_format: the format of the weight (`mglu_ops.formats`).
        activation_format: the format to which the kernel or torch rounds x before it is multiplied.
    """

    backend: str
    reason: str
    is_fallback: bool = False
    launch: LaunchConfig | None = None
    launch_origin: str = ""
    weight_format: str = "dense"
    activation_format: str = "dense"

    @property
    def kernel(self) -> str | None:
        """The CUDA backend's kernel: decode_mma, tile_wgmma or plain."""
        return None if self.launch is None else self.launch.kernel

    def __str__(self) -> str:
        launch = "" if self.launch is None else f" {self.launch}, by {self.launch_origin}"
        stored = "" if self.weight_format == "dense" else f", weight in {self.weight_format}"
        if self.activation_format != "dense":
            rounds_x = self.launch is not None and self.launch.rounds_x
            stored += f", x {'in' if rounds_x else 'rounded to'} {self.activation_format}"
        return f"{self.backend}{launch}{stored}: {self.reason}"


NOTICEABLE_WEIGHTS = 1 << 18
"""The number of weights from which a slow backend is worth a warning. Smaller layers take at most 1 ms on every
backend."""

REFUSED = (
    "mglu: set_batch_invariant_mode(True) asks for results that do not depend on the batch, "
    "which only the CUDA backend's kernels give, and they cannot run this: {}"
)


def explain_dispatch(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str = "silu",
    mask_weights: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_format: str = "dense",
    activation_format: str = "dense",
) -> Choice:
    """The backend and the kernel for a call of `mglu::forward` with these arguments. Reads no tensor values.

    Raises:
        TypeError: an argument is not a dense tensor, or has a wrong dtype.
        ValueError: the shape or the device of an argument is wrong, or there is no such activation.
        TableError: a table of launches (`MGLU_TUNING_TABLE`) cannot be used.
        RuntimeError: the batch-invariant mode is on, and no kernel can run the call in it.
    """
    given = LayerArguments(
        x, weight, packed_masks, activation, mask_weights, weight_scale, weight_format, activation_format
    )
    check_layer(given)
    return choose(LayerCall.of(given))


def choose(call: LayerCall) -> Choice:
    """The backend for a call; raises the errors of `explain_dispatch`."""
    return replace(_choose(call), weight_format=call.weight.format.name, activation_format=call.activation_format)


def _choose(call: LayerCall) -> Choice:
    if call.batch_invariant:
        return _choose_batch_invariant(call)
    if call.device.type == "cpu":
        return _choose_on_cpu(call)
    if call.device.type == "cuda":
        return _choose_on_gpu(call)
    return Choice("composite", f"library GEMMs, the only backend for {call.device.type}")


def _most_tokens_on_chip(call: LayerCall) -> int:
    """The tokens above which `composite` beats `decode_mma` and Triton, which reread W for every 8 or 16 tokens.

    `tile_wgmma` beats all of them, so the limit does not apply to it. Measured in 16 bits on an H200
    (benchmarks/results/tokens.csv, routes.csv); float32 was not measured.
    """
    if call.dtype in (torch.float16, torch.bfloat16):
        return 256 if call.n_masks == 1 else 512
    return 64 if call.dtype is torch.float32 else 0


def _choose_on_gpu(call: LayerCall) -> Choice:
    limit = _most_tokens_on_chip(call)
    if not limit:
        return Choice("composite", f"library GEMMs, the only backend for {call.dtype}")
    problem = BACKENDS["cuda"].unsupported_reason(call)
    if problem is None:
        launch = cuda_backend().choose(call)
        if call.tokens <= limit or launch.config.kernel == "tile_wgmma":
            return _on_cuda(launch, call)
    if call.tokens > limit:
        return Choice("composite", f"library GEMMs, for {counted(call.tokens, 'token')} (more than {limit})")
    if BACKENDS["triton"].supports(call):
        return Choice("triton", f"the masks are applied on chip, but slower than by the CUDA backend: {problem}", True)
    return Choice("composite", f"library GEMMs, several times slower here than the CUDA backend: {problem}", True)


def _on_cuda(launch: LaunchChoice, call: LayerCall) -> Choice:
    if launch.slow_reason is None:
        reason, is_fallback = f"the masks are applied on chip, for {counted(call.tokens, 'token')}", False
    else:
        reason = f"several times slower than by the kernels for aligned layers: {launch.slow_reason}"
        is_fallback = call.out_features * call.in_features >= NOTICEABLE_WEIGHTS
    return Choice("cuda", reason, is_fallback, launch.config, launch.origin)


def _choose_batch_invariant(call: LayerCall) -> Choice:
    problem = BACKENDS["cuda"].unsupported_reason(call)
    if problem is not None:
        raise RuntimeError(REFUSED.format(problem))
    return _on_cuda(cuda_backend().choose(call), call)


def _choose_on_cpu(call: LayerCall) -> Choice:
    if call.dtype is torch.float64:
        return Choice("composite", f"library GEMMs, the only backend for {call.dtype} on a CPU")
    problem = BACKENDS["cpu"].unsupported_reason(call)
    if problem is None:
        isa = cpu.isa(call.dtype, call.tokens, call.n_masks, call.weight.format.name)
        return Choice("cpu", f"kernels of this package, instruction set {isa}")
    slow = call.out_features * call.in_features >= NOTICEABLE_WEIGHTS
    return Choice("composite", f"library GEMMs, several times slower here than the CPU backend: {problem}", slow)


def cuda_backend() -> Cuda:
    """The backend `cuda`."""
    backend = BACKENDS["cuda"]
    assert isinstance(backend, Cuda)
    return backend


@cache
def warn_of_fallback(backend: str, reason: str, op: str = "forward", stacklevel: int = 5) -> None:
    """Warn once that an operator runs on a slow backend. `stacklevel` is the number of frames up to the user's call."""
    notices.warn(f"mglu::{op} runs on the backend {backend}: {reason}", stacklevel=stacklevel)


# --- Inference -------------------------------------------------------------------------------------------------------


def repeat(given: LayerArguments) -> Tensor | None:
    """Run a call whose `metadata_key` equals that of an earlier call, without checking or preparing it again.

    Returns None for any other call, which must be checked and passed to `forward`.
    """
    try:
        prepared = _prepared.get(metadata_key(given))
    except (RuntimeError, AttributeError):  # the checks will refuse the argument that is None or not a dense tensor
        return None
    return None if prepared is None else prepared(given)


def forward(given: LayerArguments, *, backend: str | None = None, launch: Any = None) -> Tensor:
    """The result `[..., out_features]` of a call whose arguments have been checked.

    Args:
        given: the arguments.
        backend: a name of `BACKENDS` that overrides the choice, for tests and tuning. Such a call is not cached.
        launch: a launch configuration for that backend; see its `prepare`.

    Raises:
        ValueError: there is no such backend, or it cannot run the call.
        RuntimeError: the batch-invariant mode is on, and no kernel can run the call in it.
    """
    if backend is not None:
        return _prepare_on(backend, given, launch)(given)
    result = repeat(given)
    if result is not None:
        return result
    call = LayerCall.of(given)
    choice = choose(call)
    if choice.is_fallback:
        warn_of_fallback(choice.backend, choice.reason)
    prepared = _prepare(BACKENDS[choice.backend], call, given, choice.launch)
    if is_kept(call, choice.backend):
        if len(_prepared) >= CALLS_KEPT:
            _prepared.clear()
        _prepared[metadata_key(given)] = prepared
    return prepared(given)


def is_kept(call: LayerCall, backend: str) -> bool:
    """True if the prepared call is cached for later calls.

    A call is not cached if it falls back to composite because the CPU kernels could not be built. So later calls use
    the CPU kernels as soon as `CXX` is fixed.
    """
    if call.device.type == "cpu":
        return not (backend == "composite" and call.dtype is not torch.float64 and cpu.is_missing())
    return call.device.type == "cuda"


def _prepare_on(name: str, given: LayerArguments, launch: Any) -> PreparedCall:
    """Prepare a call on the backend called `name`. Raises the errors of `forward`."""
    if batch_invariance.enabled and name != "cuda":
        raise RuntimeError(REFUSED.format(f"the backend {name!r} was asked for"))
    if name not in BACKENDS:
        raise ValueError(f"backend: got {name!r}, must be {', '.join(sorted(BACKENDS))}")
    call = LayerCall.of(given)
    problem = BACKENDS[name].unsupported_reason(call)
    if problem is not None:
        raise ValueError(f"backend: got {name!r}, which cannot take this call: {problem}")
    return _prepare(BACKENDS[name], call, given, launch)


def _prepare(backend: Backend, call: LayerCall, given: LayerArguments, launch: Any) -> PreparedCall:
    """Prepare a call. If necessary, the prepared call first rounds x, and copies arguments that are not `in_rows`."""
    if call.activation_format != "dense" and not backend.rounds_x:
        return OfRoundedX(backend.prepare(call.with_rounded_x(), launch))
    prepared = backend.prepare(call, launch)
    scale, weights = given.weight_scale, given.mask_weights
    copies = _is_copied(given.x) or (weights is not None and _is_copied(weights))
    copies = copies or (scale is not None and not scale.is_contiguous())
    return InRows(prepared) if copies else prepared


def _is_copied(tensor: Tensor) -> bool:
    return as_rows(tensor).data_ptr() != tensor.data_ptr()


class InRows:
    """A prepared call, of a layer or of experts, that first converts its arguments with `in_rows`."""

    def __init__(self, prepared: Callable[[Any], Tensor]) -> None:
        self._prepared = prepared

    def __call__(self, given: Any) -> Tensor:
        return self._prepared(given.in_rows())


class OfRoundedX:
    """A prepared call, of a layer or of experts, that first rounds x to the activation format `fp8_token`."""

    def __init__(self, prepared: Callable[[Any], Tensor]) -> None:
        self._prepared = prepared

    def __call__(self, given: Any) -> Tensor:
        x = round_activation(given.x).contiguous()
        return self._prepared(given._replace(x=x, activation_format="dense").in_rows())


# --- Packing and training --------------------------------------------------------------------------------------------


def pack_masks(masks: Tensor) -> Tensor:
    """The packed masks of bool masks `[n_masks, out_features, in_features]`."""
    backend = _packing_backend(masks)
    return pack(masks) if backend is None else backend.pack(masks)


def pack_logits(mask_logits: Tensor) -> Tensor:
    """The packed masks of logits `[n_masks, out_features, in_features]`, `M = logits > 0`."""
    backend = _packing_backend(mask_logits)
    return pack(mask_logits > 0) if backend is None else backend.pack(mask_logits)


def _packing_backend(masks: Tensor) -> Backend | None:
    """The backend that packs these masks in one pass; None if torch must pack them.

    Small masks on a CPU are not worth building the CPU kernels, so torch packs them until the kernels are loaded.
    """
    if masks.is_cuda:
        backend = BACKENDS["cuda"]
    elif masks.is_cpu and (masks.numel() >= NOTICEABLE_WEIGHTS or cpu.is_loaded()):
        backend = BACKENDS["cpu"]
    else:
        return None
    return backend if backend.can_pack(masks) else None


_training_calls: dict[Key, PreparedForwardTrain | PreparedBackward] = {}
"""The prepared calls of `mglu::forward_train` and `mglu::backward`, by the metadata of their arguments."""


def is_known(key: Key | None) -> bool:
    """True if an earlier training call with this key has passed the checks."""
    return key in _training_calls


def _forward_backend(call: LayerCall) -> Backend:
    """The first backend that can run the forward pass of a training call. `composite`, the last, can run every call.

    The backward pass may run on another backend, as all backends store the partials in the same layout.
    """
    backend = next(backend for backend in BACKENDS.values() if backend.can_train_forward(call))
    is_on_cpu = call.device.type == "cpu" and call.dtype is not torch.float64
    if backend.name == "composite" and is_on_cpu and call.out_features * call.in_features >= NOTICEABLE_WEIGHTS:
        problem = BACKENDS["cpu"].unsupported_reason(call)
        warn_of_fallback(backend.name, f"library GEMMs, slower here than the CPU backend: {problem}", "forward_train")
    return backend


def _backward_backend(call: LayerCall) -> Backend:
    return next(backend for backend in BACKENDS.values() if backend.can_train_backward(call))


P = TypeVar("P", PreparedForwardTrain, PreparedBackward)


def _keep(key: Key | None, call: LayerCall, backend: Backend, prepared: P) -> P:
    if key is not None and is_kept(call, backend.name):
        if len(_training_calls) >= CALLS_KEPT:
            _training_calls.clear()
        _training_calls[key] = prepared
    return prepared


def forward_train(key: Key | None, given: LayerArguments) -> tuple[Tensor, Tensor]:
    """The result `[..., out_features]`, and the partial derivatives `[..., rows, out_features]` that backward needs.

    `key` is the `arguments_key` of the arguments.
    """
    if batch_invariance.enabled:
        raise RuntimeError(REFUSED.format("training"))
    x, given = given.x, given.in_rows()
    prepared: Any = _training_calls.get(key) if key else None
    if prepared is None:
        call = LayerCall.of(given)
        backend = _forward_backend(call)
        prepared = _keep(key, call, backend, backend.prepare_forward_train(call))
    result, partials = prepared(given)
    if given.x is x:
        return result, partials
    leading = x.shape[:-1]
    # The result may not be a view, since autograd does not allow detaching a view in place.
    result = torch.ops.aten._unsafe_view(result, (*leading, *result.shape[1:]))
    return result, partials.view(*leading, *partials.shape[1:])


def backward(key: Key | None, arguments: BackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, mask logits and mask weights; gradients that are not needed are empty.

    `key` is the `arguments_key` of the arguments.
    """
    x, weight, packed_masks, partials = arguments[1:5]
    rows, mask_weights_dtype = as_rows(x), arguments.mask_weights_dtype
    prepared: Any = _training_calls.get(key) if key else None
    if prepared is None:
        described = LayerCall.of(LayerArguments(rows, weight, packed_masks))
        call = replace(described, mask_weights_dtype=mask_weights_dtype)
        backend = _backward_backend(call)
        prepared = _keep(key, call, backend, backend.prepare_backward(call))
    if rows is x and partials.is_contiguous():
        return prepared(arguments)
    in_rows = arguments._replace(
        grad_output=as_rows(arguments.grad_output),
        x=rows,
        partials=partials.contiguous().view(len(rows), *partials.shape[-2:]),
    )
    grad_x, grad_weight, grad_logits, grad_mask_weights = prepared(in_rows)
    if arguments.needs[0]:
        grad_x = grad_x.view(x.shape)
    if mask_weights_dtype is not None:
        grad_mask_weights = grad_mask_weights.view(*x.shape[:-1], grad_mask_weights.shape[-1])
    return grad_x, grad_weight, grad_logits, grad_mask_weights
