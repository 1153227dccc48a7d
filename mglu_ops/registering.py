"""Helpers that register operators with torch, for `ops`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import cache, wraps
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKey, DispatchKeySet
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import forward_ad
from torch.autograd.function import _SingleLevelFunction
from torch.nested._internal.nested_tensor import NestedTensor

from . import notices
from .tensors import check_dense

# `libmglu_ops.so` (csrc/library) defines the same schemas for processes without Python. If the library is loaded after
# this module, it registers nothing. If it is loaded before this module, its schemas stay. The library's kernels have
# the dispatch key CompositeExplicitAutograd, so kernels registered here for CPU and CUDA take precedence.
_library_came_first = torch._C._dispatch_has_kernel("mglu::forward")
_KERNEL_KEYS = (
    *(("CPU", "CUDA") if _library_came_first else ("CompositeExplicitAutograd",)),
    *("NestedTensorCPU", "NestedTensorCUDA"),  # so that the checks refuse nested tensors with a clear error
)

# Only this package registers kernels for autograd, so a kernel that exists already comes from an earlier import.
if _library_came_first and torch._C._dispatch_has_kernel_for_dispatch_key("mglu::forward", "Autograd"):
    raise ImportError(
        "mglu_ops was imported before in this process and then removed from sys.modules. Its operators are still "
        "registered with torch, which takes them once: restart Python, or leave mglu_ops in sys.modules"
    )

library = torch.library.Library("mglu", "FRAGMENT")


def define(schemas: Sequence[str]) -> tuple[Any, ...]:
    """Define operators and return them in the order of their schemas.

    This also registers a function that refuses jagged tensors with a clear error. No kernel could check them, because
    torch calls the class of a jagged tensor first.
    """
    ops = []
    for schema in schemas:
        name = schema[: schema.index("(")]
        # A library that came first may be an older version, without some of the schemas.
        if not _library_came_first or not torch._C._jit_get_schemas_for_operator(f"mglu::{name}"):
            library.define(schema)
        ops.append(getattr(torch.ops.mglu, name).default)
        torch.library.register_torch_dispatch(f"mglu::{name}", NestedTensor, _refuse_jagged, lib=library)
    return tuple(ops)


def kernel(name: str, *keys: str, with_keyset: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a kernel of an operator for the given dispatch keys; without keys, for all devices."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for key in keys or _KERNEL_KEYS:
            library.impl(name, function, key, with_keyset=with_keyset)
        return function

    return register


def fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the fake kernel of an operator, which computes the shapes and dtypes of its results."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            # DTensor calls the fake kernel, for the shapes of the results, before it looks for a sharding rule. So it
            # finds the rules that are registered here.
            if "torch.distributed.tensor" in sys.modules:
                _register_dtensor_rules_once()
            return function(*args, **kwargs)

        torch.library.register_fake(f"mglu::{name}", checked, lib=library)
        return function

    return register


@cache
def _register_dtensor_rules_once() -> None:
    """Register the sharding rules. A failure is only a notice, because the caller may not use DTensor at all."""
    try:
        from . import sharding  # noqa: F401 (importing it registers the rules)
    except (ImportError, AttributeError, TypeError) as error:
        notices.say(f"could not register sharding rules with the DTensor of torch {torch.__version__}: {error}")


def names_of(op: Any) -> list[str]:
    """The names of an operator's arguments."""
    return [argument.name for argument in op._schema.arguments]


def _refuse_jagged(cls: type, op: Any, types: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    for name, value in (*zip(names_of(op), args, strict=False), *kwargs.items()):
        if isinstance(value, NestedTensor):
            check_dense(name, value)


# --- Gradients ------------------------------------------------------------------------------------------------------


def has_outer_derivative(tensor: Tensor) -> bool:
    """True if an outer level of functorch transforms, or autograd outside of them, differentiates by a tensor."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
        if tensor.requires_grad or _has_tangent(tensor):
            return True
    return False


def _has_tangent(arg: Any) -> bool:
    """True for a tensor with a tangent of forward-mode AD. In a batch of vmap, only the tensor inside can have one."""
    if not isinstance(arg, Tensor) or torch._C._functorch.is_batchedtensor(arg):
        return False
    return forward_ad.unpack_dual(arg, level=0).tangent is not None


NO_SECOND_DERIVATIVE = (
    "a second derivative of MGLU is not implemented. torch.compile asks for it also if compiled code returns a "
    "gradient of torch.func and parameters require gradients: call that code under torch.no_grad(), or detach them"
)
_VIEW_TRACKING = DispatchKeySet(DispatchKey.ADInplaceOrView)


def no_view_tracking() -> torch._C._ExcludeDispatchKeyGuard:
    """Disable view tracking inside `Function.forward`, where a backend reshapes its result.

    Autograd forbids in-place writes to a view that a `Function` returns, but `y = mglu(x); y += residual` is common.
    """
    return torch._C._ExcludeDispatchKeyGuard(_VIEW_TRACKING)


def apply_function(function: type[torch.autograd.Function], *args: Any) -> Any:
    """Call `function.apply`, also under functorch transforms.

    The transforms call an operator's Autograd kernel once for each level, as for ATen operators. `Function.apply` would
    raise an error there, so this function calls a class for one level, as functorch does.
    """
    if not torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    with enable_single_level_autograd_function():
        return _for_one_level(function).apply(*args)


@cache
def _for_one_level(function: type[torch.autograd.Function]) -> Any:
    def forward(*args: Any) -> Any:
        # Autograd disables gradients and tangents here, but outer levels must record the operators that are called.
        with torch._C._AutoDispatchBelowAutograd(), torch.enable_grad(), forward_ad._set_fwd_grad_enabled(True):
            return function.forward(*args)

    methods = {name: method for name, method in vars(function).items() if isinstance(method, staticmethod)}
    return type(function.__name__, (_SingleLevelFunction,), methods | {"forward": staticmethod(forward)})


def save_for_backward(ctx: Any, *tensors: Tensor | None) -> None:
    """Save tensors for `saved_tensors`, with their dtypes."""
    ctx.save_for_backward(*tensors)
    ctx.saved_dtypes = [tensor if tensor is None else tensor.dtype for tensor in tensors]


def saved_tensors(ctx: Any) -> tuple[Any, ...]:
    """Return the tensors that `save_for_backward` has saved.

    Raises:
        RuntimeError: a hook of the user has cast one of them. The bits of masks or indices would then be lost.
    """
    tensors: tuple[Any, ...] = ctx.saved_tensors
    for tensor, dtype in zip(tensors, ctx.saved_dtypes, strict=True):
        if tensor is not None and tensor.dtype != dtype:
            raise RuntimeError(
                f"mglu: a tensor that was saved for backward in {dtype} came back in {tensor.dtype}. Hooks of "
                "torch.autograd.graph.saved_tensors_hooks must return the dtype that they were given, and must keep "
                "tensors that are not floating-point, such as packed masks, bit for bit"
            )
    return tensors


def needs_gradient(*args: Any) -> bool:
    """Return True if autograd must record this call.

    Raises:
        NotImplementedError: an argument has a tangent of forward-mode AD, which would be lost.
    """
    if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
        raise NotImplementedError(
            "mglu: forward-mode AD (torch.func.jvp, jacfwd, dual_level) is not implemented; "
            "use reverse mode (backward, torch.func.grad, vjp, jacrev)"
        )
    return torch.is_grad_enabled() and torch._C._any_requires_grad(*args)


# The keysets of plain calls, without an active mode, tensor subclass or transform. For these calls the dispatcher would
# only look up the device's kernel, so the kernel can be called directly.
PLAIN_KEYSETS = tuple(
    (DispatchKeySet(device) | DispatchKeySet(autograd)).raw_repr()
    for device, autograd in (
        (DispatchKey.CUDA, DispatchKey.AutogradCUDA),
        (DispatchKey.CPU, DispatchKey.AutogradCPU),
    )
)


def without_autograd(op: Any) -> Callable[..., Any]:
    """Return the Autograd kernel of an operator whose result has an integer dtype, and therefore no gradient."""

    def kernel(*args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return kernel


def below_autograd(op: Any, function: Callable[..., Any], keys: DispatchKeySet, *args: Any) -> Any:
    """Call an operator below its Autograd kernel. A plain call runs `function`, the kernel, without the dispatcher."""
    with torch._C._AutoDispatchBelowAutograd():  # the torch operations in the kernel also skip their Autograd kernels
        return function(*args) if keys.raw_repr() in PLAIN_KEYSETS else op(*args)


def last_derivative(op: Any) -> type[torch.autograd.Function]:
    """Make a Function that calls `op`, a backward operator, and whose own derivative raises RuntimeError.

    Under `create_graph=True` autograd records backward operators. The error appears only if their results are
    differentiated.
    """

    class LastDerivative(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                return op(*args)

        @staticmethod
        def backward(ctx: Any, *_: Any) -> Any:
            raise RuntimeError(f"{op.name()}: {NO_SECOND_DERIVATIVE}")

    return LastDerivative


# --- Autocast: x and weight are cast as by F.linear ------------------------------------------------------------------

_AUTOCAST_KEYS = {"cpu": DispatchKey.AutocastCPU, "cuda": DispatchKey.AutocastCUDA}
_AUTOCAST_KEYSET = DispatchKeySet(DispatchKey.AutocastCPU) | DispatchKeySet(DispatchKey.AutocastCUDA)


def register_autocast(op: Any) -> None:
    """Let autocast cast the first two arguments of an operator, x and weight."""
    for device_type, key in _AUTOCAST_KEYS.items():
        library.impl(op._schema.name.split("::")[1], _autocast(op, device_type), key.name)


def _autocast(op: Any, device_type: str) -> Callable[..., Any]:
    x_name, weight_name = names_of(op)[:2]

    def kernel(x: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device_type)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYSET):
            return op(_cast(x_name, x, dtype), _cast(weight_name, weight, dtype), *args, **kwargs)

    return kernel


def _cast(name: str, tensor: Tensor, dtype: torch.dtype) -> Tensor:
    check_dense(name, tensor)
    # float64 stays as it is, as in F.linear. So does a stored weight, whose dtype its format prescribes.
    return tensor.to(dtype) if tensor.dtype in (torch.float16, torch.bfloat16, torch.float32) else tensor


# --- vmap ------------------------------------------------------------------------------------------------------------


def batched(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """Move the batch dimension of a tensor to the front, or expand a tensor without one."""
    return tensor.unsqueeze(0).expand(batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _entry(tensor: Tensor, dim: int, index: int, size: int) -> Tensor:
    """Return one entry of a batch. For an empty batch, return zeros, so that the results get their shapes."""
    return tensor.select(dim, index) if size else tensor.new_zeros(tensor.movedim(dim, 0).shape[1:])


def vmap_loop(op: Any) -> Callable[..., Any]:
    """Return the vmap rule that calls an operator once for each entry of the batch."""

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        size = info.batch_size

        def pick(i: int) -> list[Any]:
            batched = [isinstance(arg, Tensor) and dim is not None for arg, dim in zip(args, in_dims, strict=True)]
            return [
                _entry(arg, dim, i, size) if has else arg for arg, dim, has in zip(args, in_dims, batched, strict=True)
            ]

        results = [op(*pick(i)) for i in range(max(size, 1))]
        if isinstance(results[0], tuple):
            stacked = tuple(torch.stack(part)[:size] for part in zip(*results, strict=True))
            return stacked, (0,) * len(stacked)
        return torch.stack(results)[:size], 0

    return rule
