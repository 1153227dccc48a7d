"""The contract of every operator in one place: schemas, fake kernels, gradients, autocast and vmap.

| op | result |
|---|---|
| `mglu::pack_masks(masks)` | bool or {0, 1} masks in the packed format (`mglu_ops.masks`) |
| `mglu::pack_logits(mask_logits)` | the masks `logits > 0` in the packed format, in one pass over the logits |
| `mglu::unpack_masks(packed_masks, in_features)` | bool masks: the inverse of packing |
| `mglu::forward(x, weight, packed_masks, activation, mask_weights, ...)` | the layer with fixed masks |
| `mglu::forward_ste(x, weight, mask_logits, activation, mask_weights)` | the layer with learned masks; packs them |
| `mglu::forward_train(...)` | forward, and the partial derivatives that backward reads; autograd calls it |
| `mglu::backward(...)` | all gradients of a layer |

    forward: y = sum_i r_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 1 .. n_masks, 1 <= n_masks <= 16

x `[..., in_features]`, weight W `[out_features, in_features]`, y `[..., out_features]`, mask_weights r
`[..., n_masks]` (1 without them), mask_logits `[n_masks, out_features, in_features]` with M = logits > 0.

`forward` also takes W in 8 or 4 bits, with `weight_scale` and `weight_format` (`mglu_ops.formats`). Such a weight has
no gradient. The gradients of x and of the mask weights need W in x's dtype, so forward and backward each decode it.

With `activation_format="fp8_token"`, `forward` first rounds each token of x to float8_e4m3fn with its own scale
(`mglu_ops.formats.quantize_activation`). This is for inference with weights in fp8. The rounded values are exact in x's
dtype, so a kernel multiplies them in fp8 or in x's dtype, whichever is faster. A token with NaN or an infinity becomes
NaN.

With F_i = -1 where M_i = 1 and +1 elsewhere, t = x W^T and f_i = x (F_i * W)^T, the gate g_i is (t - f_i) / 2 and the
value v_i is (t + f_i) / 2. `forward_train` keeps the derivatives of y, elementwise:

    P   = dy/dt   = sum_i r_i (act'(g_i) v_i + act(g_i)) / 2
    Q_i = dy/df_i = r_i (act(g_i) - act'(g_i) v_i) / 2
    R_i = dy/dr_i = act(g_i) v_i                          (with mask_weights only)

in one tensor `partials` in x's dtype: P, each Q_i and, with mask_weights, each R_i. Its shape is
`[..., n_masks + 1, out_features]`, or `[..., 2 n_masks + 1, out_features]` with mask_weights. So `backward` is linear
in G = grad_output and evaluates no activation. With dt = G * P, b_i = G * Q_i and D_i = b_i^T x:

    dx = dt W + sum_i b_i (F_i * W),   dW = dt^T x + sum_i F_i * D_i,   dlogits_i = -2 W * D_i,   dr_i = sum_d G * R_i

where sum_d is the sum over out_features, and the gradient of the logits is the straight-through gradient.

**Rounding.** Products of 16-bit types are summed in float32, and the result is rounded once. As above, g_i and
v_i may be differences of two sums over a whole row. Their error is then the naive layer's plus the float32 rounding of
`s = sum_k |x_k W_k|`: at most 2^-17 s for 1024 in_features. In 16 bits this matters if the gate or the value is smaller
than about 2^-9 s (float16) or 2^-12 s (bfloat16). `forward` on a CPU sums such small values separately.

**Values that are not finite.** In all backends:

- A NaN logit gives a mask bit of 0, as `NaN > 0` is False. It does not show in y.
- If a token of x, a row of W or the mask weights of a token hold NaN, the elements of y of that token or row are NaN.
- If they hold an infinity, these elements may be NaN, infinite or finite, and backends may differ. An example of finite
  is `relu(-inf) * 2 = 0`, where a mask keeps the infinity out of the value.

The operators are registered with `torch.library.Library`, because a call costs three times as much with `@custom_op`.
This module names no backend and no kernel: `dispatch` chooses them. DTensor's sharding rules are in `sharding`, and the
formulas for FLOPs are in `flops`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.autograd import forward_ad

from . import checks, dispatch, notices
from .activations import get_activation
from .backends.base import BackwardArguments
from .formats import FORMATS
from .layer_call import LayerArguments, arguments_key
from .masks import (
    binary_masks,
    check_layout,
    check_masks,
    n_masks_of,
    packed_shape,
    unpack,
    unpacked_shape,
)
from .registering import (
    PLAIN_KEYSETS,
    apply_function,
    batched,
    define,
    fake,
    kernel,
    last_derivative,
    library,
    needs_gradient,
    no_view_tracking,
    outer_gradients,
    register_autocast,
    vmap_loop,
    without_autograd,
)
from .sizes import same_sizes
from .tensors import check_dense, check_memory

LAYER = 'str activation="silu", Tensor? mask_weights=None'
STORED = 'Tensor? weight_scale=None, str weight_format="dense", str activation_format="dense"'
SCHEMAS = (
    "pack_masks(Tensor masks) -> Tensor",
    "pack_logits(Tensor mask_logits) -> Tensor",
    "unpack_masks(Tensor packed_masks, SymInt in_features) -> Tensor",
    f"forward(Tensor x, Tensor weight, Tensor packed_masks, {LAYER}, {STORED}) -> Tensor",
    f"forward_ste(Tensor x, Tensor weight, Tensor mask_logits, {LAYER}) -> (Tensor, Tensor)",
    f"forward_train(Tensor x, Tensor weight, Tensor packed_masks, {LAYER}) -> (Tensor, Tensor)",
    "backward(Tensor grad_output, Tensor x, Tensor weight, Tensor packed_masks, Tensor partials, bool[2] needs, "
    "ScalarType? logits_dtype, ScalarType? mask_weights_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)

pack_masks, pack_logits, unpack_masks, forward, forward_ste, forward_train, backward = define(SCHEMAS)


# --- Packing --------------------------------------------------------------------------------------------------------


@kernel("pack_masks")
def _pack_masks(masks: Tensor) -> Tensor:
    check_masks(masks)
    check_memory(masks=masks)
    return dispatch.pack_masks(binary_masks(masks))


@fake("pack_masks")
def _pack_masks_fake(masks: Tensor) -> Tensor:
    check_masks(masks)
    n_masks, out_features, in_features = masks.shape if masks.dim() == 3 else (1, *masks.shape)
    return masks.new_empty(packed_shape(n_masks, out_features, in_features), dtype=torch.uint8)


@kernel("pack_logits")
def _pack_logits(mask_logits: Tensor) -> Tensor:
    checks.check_packable_logits(mask_logits)
    check_memory(mask_logits=mask_logits)
    return dispatch.pack_logits(mask_logits)


@fake("pack_logits")
def _pack_logits_fake(mask_logits: Tensor) -> Tensor:
    checks.check_packable_logits(mask_logits)
    return _pack_masks_fake(mask_logits)


@kernel("unpack_masks")
def _unpack_masks(packed_masks: Tensor, in_features: int) -> Tensor:
    check_layout(packed_masks, in_features)
    check_memory(packed_masks=packed_masks)
    return unpack(packed_masks, in_features)


@fake("unpack_masks")
def _unpack_masks_fake(packed_masks: Tensor, in_features: int) -> Tensor:
    check_layout(packed_masks, in_features)
    return packed_masks.new_empty(unpacked_shape(packed_masks, in_features), dtype=torch.bool)


# --- The layer ------------------------------------------------------------------------------------------------------


def _check_ste(x: Tensor, weight: Tensor, mask_logits: Tensor, activation: str, mask_weights: Tensor | None) -> None:
    checks.check_inputs(x, weight)
    get_activation(activation)
    checks.check_packable_logits(mask_logits, weight)
    checks.check_mask_weights(x, mask_logits.shape[0], mask_weights)


def _check(given: LayerArguments) -> None:
    """Check the arguments of a kernel, and that their storages hold all their elements."""
    checks.check_layer(given)
    check_memory(**given.tensors())


@kernel("forward")
def _forward(*args: Any) -> Tensor:
    given = LayerArguments(*args)
    known = dispatch.repeat(given)
    if known is not None:
        return known
    _check(given)
    return dispatch.forward(given)


@fake("forward")
def _forward_fake(*args: Any) -> Tensor:
    given = LayerArguments(*args)
    checks.check_layer(given)
    return given.x.new_empty((*given.x.shape[:-1], given.out_features))


@kernel("forward_ste")
def _forward_ste(
    x: Tensor, weight: Tensor, mask_logits: Tensor, activation: str = "silu", mask_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check_ste(x, weight, mask_logits, activation, mask_weights)
    check_memory(x=x, weight=weight, mask_logits=mask_logits, mask_weights=mask_weights)
    packed_masks = dispatch.pack_logits(mask_logits)
    return dispatch.forward(LayerArguments(x, weight, packed_masks, activation, mask_weights)), packed_masks


@fake("forward_ste")
def _forward_ste_fake(
    x: Tensor, weight: Tensor, mask_logits: Tensor, activation: str = "silu", mask_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    _check_ste(x, weight, mask_logits, activation, mask_weights)
    return x.new_empty((*x.shape[:-1], mask_logits.shape[1])), _pack_masks_fake(mask_logits)


@kernel("forward_train")
def _forward_train(*args: Any) -> tuple[Tensor, Tensor]:
    given = LayerArguments(*args)
    key = arguments_key(*given)
    if not dispatch.is_known(key):
        _check(given)
    return dispatch.forward_train(key, given)


@fake("forward_train")
def _forward_train_fake(*args: Any) -> tuple[Tensor, Tensor]:
    given, result = LayerArguments(*args), _forward_fake(*args)
    rows = rows_of_partials(given.n_masks, given.mask_weights is not None)
    return result, result.new_empty((*given.x.shape[:-1], rows, given.out_features))


def rows_of_partials(n_masks: int, has_mask_weights: bool) -> int:
    """The number of partial derivatives of an element of y: the last but one size of `partials`."""
    return 2 * n_masks + 1 if has_mask_weights else n_masks + 1


def check_backward(call: BackwardArguments) -> None:
    """Check the arguments of `mglu::backward`."""
    checks.check_inputs(call.x, call.weight)
    checks.check_packed(call.weight, call.packed_masks)
    checks.check_needs(call.needs, "x", "weight")
    for name in ("grad_output", "partials"):
        check_dense(name, getattr(call, name))
    for name in ("logits_dtype", "mask_weights_dtype"):
        checks.check_floating(name, getattr(call, name))
    leading, out_features, n_masks = call.x.shape[:-1], call.weight.shape[0], n_masks_of(call.packed_masks)
    # Without `mask_weights_dtype`, only the size of the partials shows that the layer had mask weights.
    with_mask_weights = rows_of_partials(n_masks, has_mask_weights=True)
    has_mask_weights = call.mask_weights_dtype is not None or same_sizes(
        call.partials.shape[-2:-1], (with_mask_weights,)
    )
    shapes = {
        "grad_output": (*leading, out_features),
        "partials": (*leading, rows_of_partials(n_masks, has_mask_weights), out_features),
    }
    for name, shape in shapes.items():
        tensor = getattr(call, name)
        if not same_sizes(tensor.shape, shape):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be {list(shape)}")
        if tensor.dtype != call.x.dtype:
            raise TypeError(f"{name}: got dtype {tensor.dtype}, must be x's dtype {call.x.dtype}")
        if tensor.device != call.x.device:
            raise ValueError(f"{name}: got device {tensor.device}, must be x's device {call.x.device}")


@kernel("backward")
def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, mask logits and mask_weights; gradients that are not needed are empty."""
    key, call = arguments_key(*args), BackwardArguments(*args)
    if not dispatch.is_known(key):
        check_backward(call)
        check_memory(**call.tensors())
    return dispatch.backward(key, call)


@fake("backward")
def _backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = BackwardArguments(*args)
    check_backward(call)
    x, weight, needs, n_masks = call.x, call.weight, call.needs, n_masks_of(call.packed_masks)
    return (
        x.new_empty(x.shape if needs[0] else (0,)),
        weight.new_empty(weight.shape if needs[1] else (0,)),
        x.new_empty((n_masks, *weight.shape) if call.logits_dtype else (0,), dtype=call.logits_dtype or x.dtype),
        x.new_empty(
            (*x.shape[:-1], n_masks) if call.mask_weights_dtype else (0,), dtype=call.mask_weights_dtype or x.dtype
        ),
    )


# --- Gradients ------------------------------------------------------------------------------------------------------


class _Layer(torch.autograd.Function):
    """Autograd of forward and forward_ste. Exactly one of `mask_logits` and `packed_masks` is not None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        mask_logits: Tensor | None,
        packed_masks: Tensor | None,
        activation: str,
        mask_weights: Tensor | None,
        weight_scale: Tensor | None = None,
        weight_format: str = "dense",
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        in_dtype = decoded(x, weight, weight_scale, weight_format)
        with torch._C._AutoDispatchBelowAutograd(), no_view_tracking(), outer_gradients():
            if mask_logits is not None:
                _check_ste(x, weight, mask_logits, activation, mask_weights)
                packed_masks = pack_logits(mask_logits)
            result, partials = forward_train(x, in_dtype, packed_masks, activation, mask_weights)
        ctx.save_for_backward(x, weight, packed_masks, partials, weight_scale)
        ctx.weight_format = weight_format
        ctx.logits_dtype = None if mask_logits is None else mask_logits.dtype
        ctx.mask_weights_dtype = None if mask_weights is None else mask_weights.dtype
        ctx.mark_non_differentiable(packed_masks, partials)
        ctx.set_materialize_grads(False)  # autograd would fill a gradient of the partials with zeros
        return result, packed_masks, partials

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 8
        needs_x, needs_weight, needs_logits, _, _, needs_mask_weights, *_ = ctx.needs_input_grad
        x, weight, packed_masks, partials, weight_scale = ctx.saved_tensors
        grads = backward(
            grad_output,
            x,
            decoded(x, weight, weight_scale, ctx.weight_format),
            packed_masks,
            partials,
            (needs_x, needs_weight),
            ctx.logits_dtype if needs_logits else None,
            ctx.mask_weights_dtype if needs_mask_weights else None,
        )
        needed = (needs_x, needs_weight, needs_logits, needs_mask_weights)
        grad_x, grad_weight, grad_logits, grad_mask_weights = (
            grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True)
        )
        return grad_x, grad_weight, grad_logits, None, None, grad_mask_weights, None, None


def decoded(x: Tensor, weight: Tensor, scale: Tensor | None, weight_format: str) -> Tensor:
    """Decode a weight, or the weights of several experts, to x's dtype."""
    return weight if weight_format == "dense" else FORMATS[weight_format].dequantize(weight, scale, x.dtype)


def refuse_gradients(tensors: dict[str, Tensor], weight_format: str, activation_format: str = "dense") -> None:
    """Raise ValueError if a stored weight, its scales or, with an activation format, any tensor needs a gradient."""
    if activation_format != "dense":
        name = next(name for name, tensor in tensors.items() if tensor.requires_grad)
        raise ValueError(
            f"{name}: got a tensor that requires a gradient, must be called under torch.no_grad() or detached, because "
            f"activation_format={activation_format!r} is for inference"
        )
    if weight_format == "dense":
        return
    for name in ("weight", "weight_scale"):
        tensor = tensors.get(name)
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, but there is no such gradient "
                f"for weight_format={weight_format!r}: call {name}.requires_grad_(False)"
            )


def _apply_layer(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Call `_Layer` with the arguments of `mglu::forward`."""
    given = LayerArguments(*args)
    x, weight, packed_masks, activation, mask_weights, scale, weight_format, activation_format = given
    if activation_format != "dense" or weight_format != "dense" or scale is not None:
        checks.check_layer(given)
        refuse_gradients(given.tensors(), weight_format, activation_format)
    return apply_function(_Layer, x, weight, None, packed_masks, activation, mask_weights, scale, weight_format)


@kernel("forward", "Autograd", with_keyset=True)
def _forward_autograd(keys: DispatchKeySet, *args: Any) -> Tensor:
    # Checking here first saves a function call in decoding, where gradients are off.
    if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and needs_gradient(*args):
        return _apply_layer(*args)[0]
    if keys.raw_repr() in PLAIN_KEYSETS:
        return _forward(*args)
    with torch._C._AutoDispatchBelowAutograd():
        return forward(*args)


@kernel("forward_ste", "Autograd")
def _forward_ste_autograd(
    x: Tensor, weight: Tensor, mask_logits: Tensor, activation: str = "silu", mask_weights: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    if needs_gradient(x, weight, mask_logits, mask_weights):
        check_dense("mask_logits", mask_logits)  # `_Layer` would take None for a call with packed masks
        return apply_function(_Layer, x, weight, mask_logits, None, activation, mask_weights)[:2]
    with torch._C._AutoDispatchBelowAutograd():
        return forward_ste(x, weight, mask_logits, activation, mask_weights)


@kernel("forward_train", "Autograd", with_keyset=True)
def _forward_train_autograd(keys: DispatchKeySet, *args: Any) -> tuple[Tensor, Tensor]:
    """Return a result that outer functorch levels can differentiate. The partials are constants."""
    if needs_gradient(*args):
        result, _, partials = _apply_layer(*args)
        return result, partials
    with torch._C._AutoDispatchBelowAutograd():
        return _forward_train(*args) if keys.raw_repr() in PLAIN_KEYSETS else forward_train(*args)


_LastDerivative = last_derivative(backward)


@kernel("backward", "Autograd", with_keyset=True)
def _backward_autograd(keys: DispatchKeySet, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if needs_gradient(*args):
        return apply_function(_LastDerivative, *args)
    with torch._C._AutoDispatchBelowAutograd():
        return _backward(*args) if keys.raw_repr() in PLAIN_KEYSETS else backward(*args)


kernel("pack_masks", "Autograd")(without_autograd(pack_masks))
kernel("pack_logits", "Autograd")(without_autograd(pack_logits))
kernel("unpack_masks", "Autograd")(without_autograd(unpack_masks))


# --- Autocast: x and weight are cast as by F.linear; logits keep their dtype, as they are only compared with 0 --------

for _op in (forward, forward_ste):
    register_autocast(_op)


# --- vmap: a batch of x becomes more tokens of one call; a batch of weights or masks becomes a loop of calls ----------


def _vmap_layer(op: Any, out_dims: Any) -> Callable[..., Any]:
    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        given, names = LayerArguments(*args), LayerArguments._fields
        dims = {name: dim for name, dim in zip(names, in_dims, strict=False) if dim is not None}
        if not dims or dims.keys() - {"x", "mask_weights"}:
            return vmap_loop(op)(info, in_dims, *args)
        as_tokens: dict[str, Any] = {
            name: batched(getattr(given, name), dims.get(name), info.batch_size)
            for name in ("x", "mask_weights")
            if getattr(given, name) is not None
        }
        return op(*given._replace(**as_tokens)[: len(op._schema.arguments)]), out_dims

    return rule


for _op, _rule in (
    (pack_masks, vmap_loop(pack_masks)),
    (pack_logits, vmap_loop(pack_logits)),
    (unpack_masks, vmap_loop(unpack_masks)),
    (forward, _vmap_layer(forward, 0)),
    (forward_ste, _vmap_layer(forward_ste, (0, None))),
    (forward_train, _vmap_layer(forward_train, (0, 0))),
    (backward, vmap_loop(backward)),
):
    torch.library.register_vmap(_op, _rule, lib=library)


# --- `route_weights`, the former name of mask_weights ----------------------------------------------------------------


def _renamed(op: Any) -> Callable[..., Any]:
    """Return the kernel of an overload that takes `route_weights`."""

    def kernel(x: Tensor, weight: Tensor, masks: Tensor, activation: str = "silu", *, route_weights: Any) -> Any:
        notices.warn(f"{op.name()}: route_weights is now called mask_weights", stacklevel=3)
        return op(x, weight, masks, activation, route_weights)

    return kernel


for _op, _masks in ((forward, "packed_masks"), (forward_ste, "mask_logits")):
    _name = f"{_op._schema.name.split('::')[1]}.route_weights"
    _tail, _result = 'str activation="silu", *, Tensor? route_weights', str(_op._schema).rpartition("-> ")[2]
    library.define(f"{_name}(Tensor x, Tensor weight, Tensor {_masks}, {_tail}) -> {_result}")
    library.impl(_name, _renamed(_op), "CompositeImplicitAutograd")


# --- DTensor --------------------------------------------------------------------------------------------------------


def register_dtensor_rules() -> None:
    """Register the sharding rules of `mglu_ops.sharding` with DTensor.

    The rules are registered anyway when an operator first gets a DTensor, so this call is optional. It may be repeated.
    It imports `torch.distributed.tensor`, which `import mglu_ops` does not.
    """
    from . import sharding  # noqa: F401 (importing it registers the rules)
