"""The contract of every operator in one place: schemas, fake kernels, gradients, autocast and vmap.

| op | result |
|---|---|
| `mglu::pack_masks(masks)` | bool or {0, 1} masks in the packed format (`mglu_ops.masks`) |
| `mglu::pack_logits(mask_logits)` | the masks `logits > 0` in the packed format, in one pass over the logits |
| `mglu::pack_expert_logits(mask_logits)` | the masks of all experts in the packed format, from their logits |
| `mglu::unpack_masks(packed_masks, in_features)` | bool masks: the inverse of packing |
| `mglu::forward(x, weight, packed_masks, activation, mask_weights, ...)` | the layer with fixed masks |
| `mglu::forward_ste(x, weight, mask_logits, activation, mask_weights)` | the layer with learned masks; packs them |
| `mglu::forward_train(...)` | the result and the partial derivatives that backward reads; for autograd |
| `mglu::backward(...)` | all gradients of a layer |
| `mglu::grouped_forward(x, weight, packed_masks, offs, ...)` | the layers of experts, for rows sorted by expert |
| `grouped_forward_ste`, `grouped_forward_train`, `grouped_backward` | as for one layer, with `offs` after the masks |
| `mglu::experts_forward(x, weight, packed_masks, expert_ids, ...)` | the layers of the experts that a router chose |
| `mglu::experts_down(y, weight, expert_ids, expert_weights, ...)` | the weighted sum of a linear layer of each expert |
| `mglu::experts_down_backward(...)` | all gradients of `experts_down` |

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

**Rounding.** Products of 16-bit types are summed in float32, and the result is rounded once. A backend may compute g_i
and v_i as differences of two sums over a whole row, as in the formulas above. Their error is then the error of the
naive layer plus the float32 rounding of `s = sum_k |x_k W_k|`, which is at most 2^-17 s for 1024 in_features. In 16
bits this matters if the gate or the value is smaller than about 2^-9 s (float16) or 2^-12 s (bfloat16). `forward` on a
CPU sums such small values separately.

**Values that are not finite.** In all backends:

- A NaN logit gives a mask bit of 0, as `NaN > 0` is False. It does not show in y.
- If a token of x, a row of W or the mask weights of a token hold NaN, the elements of y of that token or row are NaN.
- If they hold an infinity, these elements may be NaN, infinite or finite, and backends may differ. The element is
  finite in `relu(-inf) * 2 = 0`, for example, where a mask keeps the infinity out of the value.

**Experts.** An expert is a layer, and the tensors of its layer get a leading dimension of E experts. There are T
tokens, K experts per token and S = T K rows of the result; d = out_features and h = in_features:

    experts_forward: y[t, k] = layer(expert_ids[t, k])(x[t]),  x [T, h], mask_weights [T, K, n_masks], y [T, K, d]
    grouped_forward: y[s] = layer(e)(x[s]) for offs[e - 1] <= s < offs[e], x [S, h], mask_weights [S, n_masks], y [S, d]
    experts_down:    out[t] = sum_k expert_weights[t, k] * (y[t, k] W[expert_ids[t, k]]^T), y [T, K, d], W [E, h, d]

weight `[E, d, h]`, packed_masks `[E, d, ceil(h / 8), n_masks]`, mask_logits `[E, n_masks, d, h]`. `experts_down` adds
its products in float32, or float64 for float64, in the order of k.

**Rows without an expert.** A row has no expert if its id is outside 0 .. E-1, as expert parallelism sets it for experts
of other ranks, or if it lies past `offs[-1]`, where `torch.nn.functional.grouped_mm` leaves the result undefined. Its
result and its gradients are zeros, and it contributes nothing to a sum, even if its inputs are NaN. The gradients of an
expert without rows are zeros too. offs must ascend; otherwise the results are unspecified.

**No value is read on the host of a GPU.** Shapes and launches do not depend on ids or offs, so a captured CUDA graph
replays with new ids or offs. A warning names the exceptions: float64, no Triton, or a GPU below compute
capability 8.0.

**Gradients.** All operators over experts have gradients of every floating argument. To have a gradient, a weight must
be dense. Under autograd, `experts_forward` sorts its rows by expert and runs `grouped_forward_train`.

The operators are registered with `torch.library.Library`, because a call costs three times as much with `@custom_op`.
This module names no backend and no kernel: `dispatch` chooses them. DTensor's sharding rules are in `sharding`, and the
formulas for FLOPs are in `flops`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet
from torch.autograd import forward_ad

from . import checks, dispatch
from .call import arguments_key
from .formats import FORMATS
from .given import OPERATORS, BackwardGiven, DownGiven, Given, SteGiven, options_of, schema_of_options
from .masks import binary_masks, check_layout, check_masks, packed_shape, unpack, unpacked_shape
from .registering import (
    NO_SECOND_DERIVATIVE,
    PLAIN_KEYSETS,
    apply_function,
    batched,
    below_autograd,
    define,
    fake,
    has_outer_derivative,
    kernel,
    last_derivative,
    library,
    names_of,
    needs_gradient,
    no_view_tracking,
    register_autocast,
    save_for_backward,
    saved_tensors,
    vmap_loop,
    without_autograd,
)
from .routing import GatherRows, SortedRows
from .tensors import check_dense, check_memory

_LAYER, _STORED_LAYER = schema_of_options(SteGiven), schema_of_options(Given)
_TENSORS = "Tensor x, Tensor weight, Tensor"
_DOWN = "Tensor expert_ids, Tensor expert_weights"
_NEEDS = "Tensor partials, bool[2] needs, ScalarType? logits_dtype, ScalarType? mask_weights_dtype"
_GRADIENTS = "(Tensor, Tensor, Tensor, Tensor)"
SCHEMAS = (
    "pack_masks(Tensor masks) -> Tensor",
    "pack_logits(Tensor mask_logits) -> Tensor",
    "pack_expert_logits(Tensor mask_logits) -> Tensor",
    "unpack_masks(Tensor packed_masks, SymInt in_features) -> Tensor",
    f"forward({_TENSORS} packed_masks, {_STORED_LAYER}) -> Tensor",
    f"forward_ste({_TENSORS} mask_logits, {_LAYER}) -> (Tensor, Tensor)",
    f"forward_train({_TENSORS} packed_masks, {_LAYER}) -> (Tensor, Tensor)",
    f"backward(Tensor grad_output, {_TENSORS} packed_masks, {_NEEDS}) -> {_GRADIENTS}",
    f"grouped_forward({_TENSORS} packed_masks, Tensor offs, {_STORED_LAYER}) -> Tensor",
    f"grouped_forward_ste({_TENSORS} mask_logits, Tensor offs, {_LAYER}) -> (Tensor, Tensor)",
    f"grouped_forward_train({_TENSORS} packed_masks, Tensor offs, {_LAYER}) -> (Tensor, Tensor)",
    f"grouped_backward(Tensor grad_output, {_TENSORS} packed_masks, Tensor offs, {_NEEDS}) -> {_GRADIENTS}",
    f"experts_forward({_TENSORS} packed_masks, Tensor expert_ids, {_STORED_LAYER}) -> Tensor",
    f"experts_down(Tensor y, Tensor weight, {_DOWN}, {schema_of_options(DownGiven)}) -> Tensor",
    f"experts_down_backward(Tensor grad_output, Tensor y, Tensor weight, {_DOWN}, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)",
)

pack_masks, pack_logits, pack_expert_logits, unpack_masks, *_layers = define(SCHEMAS)
forward, forward_ste, forward_train, backward, *_layers = _layers
grouped_forward, grouped_forward_ste, grouped_forward_train, grouped_backward, *_layers = _layers
experts_forward, experts_down, experts_down_backward = _layers


def _check_real(tensors: dict[str, Tensor]) -> None:
    """Check that the arguments of a kernel are dense, and that each lies within its storage."""
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    check_memory(**tensors)


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


def _register_pack_logits(name: str, check: Callable[[Tensor], None]) -> None:
    @kernel(name)
    def pack(mask_logits: Tensor) -> Tensor:
        _check_real({"mask_logits": mask_logits})
        check(mask_logits)
        return dispatch.pack_logits(mask_logits)

    @fake(name)
    def pack_fake(mask_logits: Tensor) -> Tensor:
        check(mask_logits)
        *experts, n_masks, d, h = mask_logits.shape
        return mask_logits.new_empty((*experts, *packed_shape(n_masks, d, h)), dtype=torch.uint8)


_register_pack_logits("pack_logits", checks.check_packable_logits)
_register_pack_logits("pack_expert_logits", checks.check_expert_logits)


@kernel("unpack_masks")
def _unpack_masks(packed_masks: Tensor, in_features: int) -> Tensor:
    check_layout(packed_masks, in_features)
    check_memory(packed_masks=packed_masks)
    return unpack(packed_masks, in_features)


@fake("unpack_masks")
def _unpack_masks_fake(packed_masks: Tensor, in_features: int) -> Tensor:
    check_layout(packed_masks, in_features)
    return packed_masks.new_empty(unpacked_shape(packed_masks, in_features), dtype=torch.bool)


# --- Kernels and their fakes: each function registers an operator for one layer or over experts -----------------------


def _register_forward(op: Any, given_of: Callable[..., Given]) -> None:
    """Register an inference operator. `given_of` takes the operator's arguments in the order of its schema."""
    name = op._schema.name.split("::")[1]

    @kernel(name)
    def run(*args: Any) -> Tensor:
        given = given_of(*args)
        known = dispatch.repeat(given)
        if known is not None:
            return known
        _check_real(given.tensors())
        checks.check_forward(given)
        return dispatch.forward(given)

    @fake(name)
    def run_fake(*args: Any) -> Tensor:
        given = given_of(*args)
        checks.check_forward(given)
        return given.x.new_empty((*given.leading, given.out_features))

    @kernel(name, "Autograd", with_keyset=True)
    def autograd(keys: DispatchKeySet, *args: Any) -> Tensor:
        # When a model generates tokens, gradients are off, and checking this first saves a call of `needs_gradient`.
        if (torch.is_grad_enabled() or forward_ad._current_level >= 0) and needs_gradient(*args):
            return _differentiable(given_of(*args))[0]
        if keys.raw_repr() in PLAIN_KEYSETS:
            return run(*args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)


def _register_ste(op: Any, given_of: Callable[..., SteGiven]) -> None:
    """Register an operator with learned masks."""
    name = op._schema.name.split("::")[1]

    @kernel(name)
    def run(*args: Any) -> tuple[Tensor, Tensor]:
        given = given_of(*args)
        _check_real(given.tensors())
        checks.check_ste(given)
        packed_masks = dispatch.pack_logits(given.mask_logits)
        return dispatch.forward(given.packed(packed_masks)), packed_masks

    @fake(name)
    def run_fake(*args: Any) -> tuple[Tensor, Tensor]:
        given = given_of(*args)
        checks.check_ste(given)
        pack = pack_logits if given.offs is None else pack_expert_logits
        return given.x.new_empty((*given.x.shape[:-1], given.mask_logits.shape[-2])), pack(given.mask_logits)

    @kernel(name, "Autograd")
    def autograd(*args: Any) -> tuple[Tensor, Tensor]:
        if needs_gradient(*args):
            given = given_of(*args)
            check_dense("mask_logits", given.mask_logits)  # if they are None, `_Layer` expects packed masks
            return apply_function(_Layer, None, None, "dense", *given)[:2]
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)


def _register_task(
    op: Any,
    given_of: Callable[..., Any],
    task: str,
    check: Callable[[Any], None],
    fake_result: Callable[[Any], Any],
) -> Callable[..., Any]:
    """Register the kernel of an operator, which runs the function of `dispatch` for a task, and its fake kernel.

    Returns the kernel.
    """
    name = op._schema.name.split("::")[1]

    @kernel(name)
    def run(*args: Any) -> Any:
        given, key = given_of(*args), arguments_key(name, *args)
        if not dispatch.is_known(key):
            _check_real(given.tensors())
            check(given)
        return getattr(dispatch, task)(key, given)

    @fake(name)
    def run_fake(*args: Any) -> Any:
        given = given_of(*args)
        check(given)
        return fake_result(given)

    return run


def _fake_train(given: Given) -> tuple[Tensor, Tensor]:
    rows = checks.rows_of_partials(given.n_masks, given.mask_weights is not None)
    shapes = (*given.leading, given.out_features), (*given.leading, rows, given.out_features)
    return given.x.new_empty(shapes[0]), given.x.new_empty(shapes[1])


def _register_train(op: Any, given_of: Callable[..., Given]) -> None:
    """Register an operator that returns a result and partials."""
    run = _register_task(op, given_of, "train", checks.check_forward, _fake_train)

    @kernel(op._schema.name.split("::")[1], "Autograd", with_keyset=True)
    def autograd(keys: DispatchKeySet, *args: Any) -> tuple[Tensor, Tensor]:
        """Return a result that outer functorch levels can differentiate. The partials cannot be differentiated."""
        if needs_gradient(*args):
            result, _, partials = _differentiable(given_of(*args))
            return result, partials
        return below_autograd(op, run, keys, *args)


def _register_backward(op: Any, given_of: Callable[..., BackwardGiven]) -> None:
    """Register an operator that returns gradients, which cannot be differentiated again."""
    run = _register_task(op, given_of, "backward", checks.check_backward, BackwardGiven.empty_gradients)
    _register_last(op, run)


def _register_last(op: Any, run: Callable[..., Any]) -> None:
    """Register the Autograd kernel of an operator whose results cannot be differentiated."""
    last = last_derivative(op)

    @kernel(op._schema.name.split("::")[1], "Autograd", with_keyset=True)
    def autograd(keys: DispatchKeySet, *args: Any) -> Any:
        return apply_function(last, *args) if needs_gradient(*args) else below_autograd(op, run, keys, *args)


_REGISTER: dict[str, Callable[..., None]] = {
    "forward": _register_forward,
    "ste": _register_ste,
    "train": _register_train,
    "backward": _register_backward,
}
for _name, (_task, _given_of) in OPERATORS.items():
    if _task in _REGISTER:
        _REGISTER[_task](getattr(torch.ops.mglu, _name).default, _given_of)


def _fake_down(given: DownGiven) -> Tensor:
    return given.y.new_empty((given.y.shape[0], given.weight.shape[1]))


_experts_down = _register_task(experts_down, DownGiven, "down", checks.check_down, _fake_down)


@kernel("experts_down", "Autograd", with_keyset=True)
def _experts_down_autograd(keys: DispatchKeySet, *args: Any) -> Tensor:
    if not needs_gradient(*args):
        return below_autograd(experts_down, _experts_down, keys, *args)
    given = DownGiven(*args)
    if given.weight_format != "dense" or given.weight_scale is not None:
        checks.check_down(given)
        _refuse_gradients(given.tensors(), given.weight_format)
    return apply_function(_Down, *given)


@kernel("experts_down_backward")
def _experts_down_backward(grad_output: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, weight and expert_weights; gradients that are not needed are empty."""
    given, needs = DownGiven(*args[:4]), args[4]
    _check_real({"grad_output": grad_output, **given.tensors()})
    checks.check_down_backward(grad_output, given, needs)
    return dispatch.down_backward(grad_output, given, needs)


@fake("experts_down_backward")
def _experts_down_backward_fake(grad_output: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, needs = DownGiven(*args[:4]), args[4]
    checks.check_down_backward(grad_output, given, needs)
    grad_y, grad_weight, grad_expert_weights = given.empty_gradients(needs)
    return grad_y, grad_weight, grad_expert_weights


_register_last(experts_down_backward, _experts_down_backward)


for _op in (pack_masks, pack_logits, pack_expert_logits, unpack_masks):
    kernel(_op._schema.name.split("::")[1], "Autograd")(without_autograd(_op))


# --- Gradients ------------------------------------------------------------------------------------------------------


class _Layer(torch.autograd.Function):
    """A layer and its derivative; with `offs`, the layers of experts.

    It takes the fields of `SteGiven` last, whose mask logits are None if there are packed masks. The partials have no
    gradient, but depend on all inputs: by them, a derivative of the gradients arrives at the error that there is none.
    """

    @staticmethod
    def forward(
        ctx: Any, packed_masks: Tensor | None, weight_scale: Tensor | None, weight_format: str, *layer: Any
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        given = SteGiven(*layer)
        (x, weight, mask_logits, *_), mask_weights, offs = given, given.mask_weights, given.offs
        in_dtype = decoded(x, weight, weight_scale, weight_format)
        train, pack, ste = (
            (forward_train, pack_logits, forward_ste)
            if offs is None
            else (grouped_forward_train, pack_expert_logits, grouped_forward_ste)
        )
        with torch._C._AutoDispatchBelowAutograd(), no_view_tracking():
            if mask_logits is not None:
                checks.check_ste(given)
                packed_masks = pack(mask_logits)
            routing = () if offs is None else (offs,)
            result, partials = train(x, in_dtype, packed_masks, *routing, *options_of(given))
            if mask_logits is not None and has_outer_derivative(mask_logits):  # `train` does not take them
                result, _ = ste(x, weight, mask_logits, *routing, *options_of(given))
                partials = partials + mask_logits[:0].sum()
        needs = SteGiven(*ctx.needs_input_grad[3:])
        reads_x = needs.weight or needs.mask_logits  # the gradients of x and of the mask weights do not
        save_for_backward(ctx, x if reads_x else None, weight, packed_masks, offs, partials, weight_scale)
        ctx.x_shape = x.shape
        ctx.weight_format = weight_format
        ctx.logits_dtype = None if mask_logits is None else mask_logits.dtype
        ctx.mask_weights_dtype = None if mask_weights is None else mask_weights.dtype
        ctx.mark_non_differentiable(packed_masks)
        ctx.set_materialize_grads(False)  # otherwise, autograd would make a tensor of zeros as gradient of the partials
        return result, packed_masks, partials

    @staticmethod
    def backward(
        ctx: Any, grad_output: Tensor | None, _: None, grad_partials: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        if grad_partials is not None:
            raise RuntimeError(NO_SECOND_DERIVATIVE)
        _, _, _, *needed = ctx.needs_input_grad
        if grad_output is None:
            return (None,) * (3 + len(needed))
        needs = SteGiven(*needed)
        x, weight, packed_masks, offs, partials, weight_scale = saved_tensors(ctx)
        x = grad_output.new_empty(ctx.x_shape) if x is None else x
        grads = (backward if offs is None else grouped_backward)(
            grad_output,
            x,
            decoded(x, weight, weight_scale, ctx.weight_format),
            packed_masks,
            *(() if offs is None else (offs,)),
            partials,
            (needs.x, needs.weight),
            ctx.logits_dtype if needs.mask_logits else None,
            ctx.mask_weights_dtype if needs.mask_weights else None,
        )
        found = dict(zip(("x", "weight", "mask_logits", "mask_weights"), grads, strict=True))
        return None, None, None, *(found[name] if need else None for name, need in needs._asdict().items())


class _Down(torch.autograd.Function):
    """`mglu::experts_down` and its derivative."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        given = DownGiven(*args)
        with torch._C._AutoDispatchBelowAutograd(), no_view_tracking():
            result = experts_down(*args)
        y, *others = given[:5]
        _, needs_weight, _, needs_expert_weights, *_ = ctx.needs_input_grad
        save_for_backward(ctx, y if needs_weight or needs_expert_weights else None, *others)
        ctx.y_shape, ctx.weight_format = y.shape, given.weight_format
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, expert_ids, expert_weights, scale = saved_tensors(ctx)
        y = grad_output.new_empty(ctx.y_shape) if y is None else y
        needs_y, needs_weight, _, needs_expert_weights, *_ = ctx.needs_input_grad
        needs = (needs_y, needs_weight, needs_expert_weights)
        weight = decoded(y, weight, scale, ctx.weight_format)
        grads = experts_down_backward(grad_output, y, weight, expert_ids, expert_weights, needs)
        grads = [grad if is_needed else None for grad, is_needed in zip(grads, needs, strict=True)]
        return grads[0], grads[1], None, grads[2], None, None


def decoded(x: Tensor, weight: Tensor, scale: Tensor | None, weight_format: str) -> Tensor:
    """Decode a weight, or the weights of several experts, to x's dtype."""
    return weight if weight_format == "dense" else FORMATS[weight_format].dequantize(weight, scale, x.dtype)


def _differentiable(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Return result, packed masks and partials of a call that autograd records.

    With ids there are no partials, and x is returned in their place.
    """
    weight_format, activation_format, scale = given.weight_format, given.activation_format, given.weight_scale
    is_routed = given.expert_ids is not None
    if is_routed or activation_format != "dense" or weight_format != "dense" or scale is not None:
        checks.check_forward(given)
        _refuse_gradients(given.tensors(), weight_format, activation_format)
    if is_routed:
        return _sorted_by_expert(given), given.packed_masks, given.x
    layer = (getattr(given, name, None) for name in SteGiven._fields)  # Given has no mask logits
    return apply_function(_Layer, given.packed_masks, scale, weight_format, *layer)


def _sorted_by_expert(given: Given) -> Tensor:
    """Compute `experts_forward` from operators that autograd can differentiate. The tensors may be DTensors."""
    if not any(type(tensor).__name__ == "DTensor" for tensor in given.tensors().values()):
        return _by_sorted_rows(given)
    from .sharding import on_local_tensors  # `sharding` imports torch.distributed.tensor

    return on_local_tensors(_by_sorted_rows, given)


def _by_sorted_rows(given: Given) -> Tensor:
    """Sort the rows by expert, call `grouped_forward`, and undo the sort."""
    x, weight, packed_masks = given[:3]
    expert_ids = given.expert_ids
    assert expert_ids is not None
    rows = SortedRows(expert_ids, weight.shape[0], partial(apply_function, GatherRows))
    if given.mask_weights is not None:
        given = given._replace(mask_weights=rows.of_pairs(given.mask_weights.flatten(0, 1)))
    result = grouped_forward(rows.of_tokens(x), weight, packed_masks, rows.offs, *options_of(given))
    return rows.put_back(result).view(*expert_ids.shape, given.out_features)


def _refuse_gradients(tensors: dict[str, Tensor], weight_format: str, activation_format: str = "dense") -> None:
    """Raise ValueError if a stored weight, its scales or, with an activation format, any tensor needs a gradient."""
    if activation_format != "dense":
        name = next(name for name, tensor in tensors.items() if tensor.requires_grad)
        raise ValueError(
            f"{name}: got a tensor that requires a gradient, must be called under torch.no_grad() or detached, because "
            f"activation_format={activation_format!r} is for inference"
        )
    for name in ("weight", "weight_scale") if weight_format != "dense" else ():
        tensor = tensors.get(name)
        if tensor is not None and tensor.requires_grad:
            raise ValueError(
                f"{name}: got a tensor that requires a gradient, but there is no such gradient "
                f"for weight_format={weight_format!r}: call {name}.requires_grad_(False)"
            )


# --- Autocast: x and weight are cast as by F.linear; logits, mask_weights and expert_weights keep their dtype --------

for _op in (forward, forward_ste, grouped_forward, grouped_forward_ste, experts_forward, experts_down):
    register_autocast(_op)


# --- vmap: if only arguments with tokens are batched, one call takes all tokens; otherwise vmap is a loop of calls ---


def _vmap_tokens(op: Any, tokens: set[str], out_dims: Any = 0) -> Callable[..., Any]:
    """Return the vmap rule that turns a batch into more tokens. `tokens` names the arguments with token dimensions.

    In operators over experts, each of these arguments has exactly one dimension of tokens.
    """
    names = names_of(op)

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        given = {name: arg for name, arg in zip(names, args, strict=False) if arg is not None}
        dims = {name: dim for name, dim in zip(names, in_dims, strict=False) if dim is not None}
        if not dims or dims.keys() - tokens:
            return vmap_loop(op)(info, in_dims, *args)
        together = {name: batched(given[name], dims.get(name), info.batch_size) for name in tokens & given.keys()}
        if "expert_ids" not in tokens:
            return op(**given | together), out_dims
        leading = together["expert_ids"].shape[:2]
        result = op(**given | {name: tensor.flatten(0, 1) for name, tensor in together.items()})
        return result.view(*leading, *result.shape[1:]), out_dims

    return rule


_VMAP_RULES = {
    forward: _vmap_tokens(forward, {"x", "mask_weights"}),
    forward_ste: _vmap_tokens(forward_ste, {"x", "mask_weights"}, (0, None)),
    forward_train: _vmap_tokens(forward_train, {"x", "mask_weights"}, (0, 0)),
    experts_forward: _vmap_tokens(experts_forward, {"x", "expert_ids", "mask_weights"}),
    experts_down: _vmap_tokens(experts_down, {"y", "expert_ids", "expert_weights"}),
}
"""The vmap rules that avoid a loop. Grouped operators have none: the rows of a whole batch are not sorted by expert."""

for _schema in SCHEMAS:
    _op = getattr(torch.ops.mglu, _schema.partition("(")[0]).default
    torch.library.register_vmap(_op, _VMAP_RULES.get(_op) or vmap_loop(_op), lib=library)


# --- DTensor --------------------------------------------------------------------------------------------------------


def register_dtensor_rules() -> None:
    """Register the sharding rules of `mglu_ops.sharding` with DTensor.

    Calling this function is optional, because the rules are registered when an operator first gets a DTensor. The call
    may be repeated. It imports `torch.distributed.tensor`, which `import mglu_ops` does not import.
    """
    from . import sharding  # noqa: F401 (importing it registers the rules)


from . import flops  # noqa: E402, F401 (registers the FLOP formulas of all operators)
