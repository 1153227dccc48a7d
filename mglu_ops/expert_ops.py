"""The contract of the operators over experts: schemas, fake kernels, gradients, autocast and vmap.

| op | result |
|---|---|
| `mglu::experts_forward(x, weight, packed_masks, expert_ids, ...)` | the layers of the experts that a router chose |
| `mglu::experts_down(y, weight, expert_ids, expert_weights, ...)` | the weighted sum of a linear layer of each expert |
| `mglu::grouped_forward(x, weight, packed_masks, offs, ...)` | the layers of experts, for rows sorted by expert |
| `mglu::grouped_forward_ste(x, weight, mask_logits, offs, ...)` | the same with learned masks; packs them |
| `mglu::grouped_forward_train(...)`, `mglu::grouped_backward(...)` | forward and backward in training; see `ops` |
| `mglu::experts_down_backward(...)` | all gradients of `experts_down` |
| `mglu::pack_expert_logits(mask_logits)` | the masks `logits > 0` of all experts in the packed format |

An expert is a layer as in `mglu_ops.ops`, so the tensors of a layer get a leading dimension of E experts. There are T
tokens, K experts per token and S = T K rows of the result; d = out_features and h = in_features:

    experts_forward: y[t, k] = layer(expert_ids[t, k])(x[t]),  x [T, h], mask_weights [T, K, n_masks], y [T, K, d]
    grouped_forward: y[s] = layer(e)(x[s]) for offs[e - 1] <= s < offs[e], x [S, h], mask_weights [S, n_masks], y [S, d]
    experts_down:    out[t] = sum_k expert_weights[t, k] * (y[t, k] W[expert_ids[t, k]]^T), y [T, K, d], W [E, h, d]

The other shapes are weight `[E, d, h]`, packed_masks `[E, d, ceil(h / 8), n_masks]` and mask_logits
`[E, n_masks, d, h]`. `experts_down` adds its products in the order of k, in float64 for float64 tensors and in float32
for others.

**Rows without an expert.** A row has no expert if its id is outside 0 .. E-1, or if the row lies past `offs[-1]`.
Expert parallelism gives such ids to experts of other ranks. `torch.nn.functional.grouped_mm` leaves the result past
`offs[-1]` undefined. Here, the result and the gradients of a row without an expert are zeros, and the row contributes
nothing to a sum, even if its inputs are NaN. The gradients of an expert without rows are zeros too. offs must ascend;
otherwise the results are unspecified.

**No value is read on the host of a GPU.** Shapes and launches do not depend on ids or offs, so a captured CUDA graph
replays with new ids or offs.

**Gradients.** Partial derivatives and backward are as in `mglu_ops.ops`, for each expert's rows.

| op | arguments with a gradient |
|---|---|
| `grouped_forward_ste` | x, weight, mask_logits, mask_weights |
| `grouped_forward` | x, a dense weight, mask_weights |
| `experts_forward`, for inference | x, mask_weights |
| `experts_down` | y, a dense weight, expert_weights |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C import DispatchKeySet

from . import expert_checks, expert_dispatch
from .backends.base import BackwardArguments, GroupedBackwardArguments
from .checks import check_needs
from .expert_calls import DownArguments, ExpertArguments, inverse_of, sort_pairs
from .layer_call import arguments_key
from .masks import packed_shape
from .ops import LAYER, STORED, check_backward, decoded, refuse_gradients, rows_of_partials
from .registering import (
    apply_function,
    batched,
    below_autograd,
    define,
    fake,
    kernel,
    last_derivative,
    library,
    names_of,
    needs_gradient,
    no_view_tracking,
    outer_gradients,
    register_autocast,
    vmap_loop,
    without_autograd,
)
from .tensors import check_dense, check_memory

_DOWN = "Tensor expert_ids, Tensor expert_weights"
SCHEMAS = (
    "pack_expert_logits(Tensor mask_logits) -> Tensor",
    f"experts_forward(Tensor x, Tensor weight, Tensor packed_masks, Tensor expert_ids, {LAYER}, {STORED}) -> Tensor",
    f'experts_down(Tensor y, Tensor weight, {_DOWN}, Tensor? weight_scale=None, str weight_format="dense") -> Tensor',
    f"experts_down_backward(Tensor grad_output, Tensor y, Tensor weight, {_DOWN}, bool[3] needs) "
    "-> (Tensor, Tensor, Tensor)",
    f"grouped_forward(Tensor x, Tensor weight, Tensor packed_masks, Tensor offs, {LAYER}, {STORED}) -> Tensor",
    f"grouped_forward_ste(Tensor x, Tensor weight, Tensor mask_logits, Tensor offs, {LAYER}) -> (Tensor, Tensor)",
    f"grouped_forward_train(Tensor x, Tensor weight, Tensor packed_masks, Tensor offs, {LAYER}) -> (Tensor, Tensor)",
    "grouped_backward(Tensor grad_output, Tensor x, Tensor weight, Tensor packed_masks, Tensor offs, Tensor partials, "
    "bool[2] needs, ScalarType? logits_dtype, ScalarType? mask_weights_dtype) -> (Tensor, Tensor, Tensor, Tensor)",
)

(
    pack_expert_logits,
    experts_forward,
    experts_down,
    experts_down_backward,
    grouped_forward,
    grouped_forward_ste,
    grouped_forward_train,
    grouped_backward,
) = define(SCHEMAS)


# --- Inference ------------------------------------------------------------------------------------------------------


def _check_real(tensors: dict[str, Tensor]) -> None:
    """Check that the arguments of a kernel have memory, because later checks index the tensors by expert."""
    for name, tensor in tensors.items():
        check_dense(name, tensor)
    check_memory(**tensors)


def _run(given: ExpertArguments) -> Tensor:
    known = expert_dispatch.repeat(given)
    if known is not None:
        return known
    _check_real(given.tensors())
    expert_checks.check_experts(given)
    return expert_dispatch.forward(given)


def _run_fake(given: ExpertArguments) -> Tensor:
    expert_checks.check_experts(given)
    return given.x.new_empty((*given.leading, given.out_features))


@kernel("experts_forward")
def _experts_forward(*args: Any) -> Tensor:
    return _run(ExpertArguments.of_ids(*args))


@fake("experts_forward")
def _experts_forward_fake(*args: Any) -> Tensor:
    return _run_fake(ExpertArguments.of_ids(*args))


@kernel("grouped_forward")
def _grouped_forward(*args: Any) -> Tensor:
    return _run(ExpertArguments.of_offs(*args))


@fake("grouped_forward")
def _grouped_forward_fake(*args: Any) -> Tensor:
    return _run_fake(ExpertArguments.of_offs(*args))


@kernel("experts_down")
def _experts_down(*args: Any) -> Tensor:
    given, key = DownArguments(*args), arguments_key("experts_down", *args)
    if not expert_dispatch.is_known(key):
        _check_real(given.tensors())
        expert_checks.check_down(given)
    return expert_dispatch.down(key, given)


@fake("experts_down")
def _experts_down_fake(*args: Any) -> Tensor:
    given = DownArguments(*args)
    expert_checks.check_down(given)
    return given.y.new_empty((given.y.shape[0], given.weight.shape[1]))


# --- Training -------------------------------------------------------------------------------------------------------


@kernel("pack_expert_logits")
def _pack_expert_logits(mask_logits: Tensor) -> Tensor:
    _check_real({"mask_logits": mask_logits})
    expert_checks.check_packable_logits(mask_logits)
    return expert_dispatch.pack_logits(mask_logits)


@fake("pack_expert_logits")
def _pack_expert_logits_fake(mask_logits: Tensor) -> Tensor:
    expert_checks.check_packable_logits(mask_logits)
    experts, *sizes = mask_logits.shape
    return mask_logits.new_empty((experts, *packed_shape(*sizes)), dtype=torch.uint8)


@kernel("grouped_forward_ste")
def _grouped_forward_ste(
    x: Tensor, weight: Tensor, mask_logits: Tensor, offs: Tensor, *layer: Any
) -> tuple[Tensor, Tensor]:
    _check_real({"weight": weight, "mask_logits": mask_logits})  # `_run` checks the others
    expert_checks.check_grouped_ste(x, weight, mask_logits, offs, *layer)
    packed_masks = expert_dispatch.pack_logits(mask_logits)
    return _run(ExpertArguments.of_offs(x, weight, packed_masks, offs, *layer)), packed_masks


@fake("grouped_forward_ste")
def _grouped_forward_ste_fake(
    x: Tensor, weight: Tensor, mask_logits: Tensor, offs: Tensor, *layer: Any
) -> tuple[Tensor, Tensor]:
    expert_checks.check_grouped_ste(x, weight, mask_logits, offs, *layer)
    return x.new_empty((x.shape[0], mask_logits.shape[2])), _pack_expert_logits_fake(mask_logits)


@kernel("grouped_forward_train")
def _grouped_forward_train(*args: Any) -> tuple[Tensor, Tensor]:
    given, key = ExpertArguments.of_offs(*args), arguments_key("grouped_forward_train", *args)
    if not expert_dispatch.is_known(key):
        _check_real(given.tensors())
        expert_checks.check_experts(given)
    return expert_dispatch.forward_train(key, given)


@fake("grouped_forward_train")
def _grouped_forward_train_fake(*args: Any) -> tuple[Tensor, Tensor]:
    given = ExpertArguments.of_offs(*args)
    result = _run_fake(given)
    rows = rows_of_partials(given.n_masks, given.mask_weights is not None)
    return result, result.new_empty((result.shape[0], rows, result.shape[1]))


def _check_grouped_backward(call: GroupedBackwardArguments) -> None:
    expert_checks.check_rows_and_experts(call.x, call.offs, weight=call.weight, packed_masks=call.packed_masks)
    grad_output, x, weight, packed_masks, _, partials, needs, logits_dtype, mask_weights_dtype = call
    with expert_checks.of_each_expert():
        check_backward(
            BackwardArguments(
                grad_output, x, weight[0], packed_masks[0], partials, needs, logits_dtype, mask_weights_dtype
            )
        )


@kernel("grouped_backward")
def _grouped_backward(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weight, mask logits and mask_weights; gradients that are not needed are empty."""
    key, call = arguments_key("grouped_backward", *args), GroupedBackwardArguments(*args)
    if not expert_dispatch.is_known(key):
        _check_real(call.tensors())
        _check_grouped_backward(call)
    return expert_dispatch.backward(key, call)


@fake("grouped_backward")
def _grouped_backward_fake(*args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    call = GroupedBackwardArguments(*args)
    _check_grouped_backward(call)
    x, weight, needs, n_masks = call.x, call.weight, call.needs, call.packed_masks.shape[-1]
    experts, *of_expert = weight.shape
    logits, mask_weights = (experts, n_masks, *of_expert), (x.shape[0], n_masks)
    return (
        x.new_empty(x.shape if needs[0] else (0,)),
        x.new_empty(weight.shape if needs[1] else (0,)),
        x.new_empty(logits if call.logits_dtype else (0,), dtype=call.logits_dtype or x.dtype),
        x.new_empty(mask_weights if call.mask_weights_dtype else (0,), dtype=call.mask_weights_dtype or x.dtype),
    )


def _check_down_backward(grad_output: Tensor, given: DownArguments, needs: Sequence[bool]) -> None:
    expert_checks.check_down(given)
    check_needs(needs, "y", "weight", "expert_weights")
    check_dense("grad_output", grad_output)
    expected = (given.y.shape[0], given.weight.shape[1])
    expert_checks.check_like("grad_output", grad_output, expected, "y", given.y)


@kernel("experts_down_backward")
def _experts_down_backward(grad_output: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of y, weight and expert_weights; gradients that are not needed are empty."""
    given, needs = DownArguments(*args[:4]), args[4]
    _check_real({"grad_output": grad_output, **given.tensors()})
    _check_down_backward(grad_output, given, needs)
    return expert_dispatch.down_backward(grad_output, given, needs)


@fake("experts_down_backward")
def _experts_down_backward_fake(grad_output: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given, needs = DownArguments(*args[:4]), args[4]
    _check_down_backward(grad_output, given, needs)
    tensors = zip((given.y, given.weight, given.expert_weights), needs, strict=True)
    grad_y, grad_weight, grad_expert_weights = (one.new_empty(one.shape if needed else (0,)) for one, needed in tensors)
    return grad_y, grad_weight, grad_expert_weights


# --- Gradients ------------------------------------------------------------------------------------------------------


class _Grouped(torch.autograd.Function):
    """Autograd of the grouped operators. Exactly one of `mask_logits` and `packed_masks` is not None."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        mask_logits: Tensor | None,
        packed_masks: Tensor | None,
        offs: Tensor,
        activation: str,
        mask_weights: Tensor | None,
        weight_scale: Tensor | None = None,
        weight_format: str = "dense",
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        in_dtype = decoded(x, weight, weight_scale, weight_format)
        with torch._C._AutoDispatchBelowAutograd(), no_view_tracking(), outer_gradients():
            if mask_logits is not None:
                expert_checks.check_grouped_ste(x, weight, mask_logits, offs, activation, mask_weights)
                packed_masks = pack_expert_logits(mask_logits)
            result, partials = grouped_forward_train(x, in_dtype, packed_masks, offs, activation, mask_weights)
        ctx.save_for_backward(x, weight, packed_masks, offs, partials, weight_scale)
        ctx.weight_format = weight_format
        ctx.logits_dtype = None if mask_logits is None else mask_logits.dtype
        ctx.mask_weights_dtype = None if mask_weights is None else mask_weights.dtype
        ctx.mark_non_differentiable(packed_masks, partials)
        ctx.set_materialize_grads(False)  # autograd would fill a gradient of the partials with zeros
        return result, packed_masks, partials

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        if grad_output is None:
            return (None,) * 9
        needs_x, needs_weight, needs_logits, _, _, _, needs_mask_weights, *_ = ctx.needs_input_grad
        x, weight, packed_masks, offs, partials, weight_scale = ctx.saved_tensors
        grads = grouped_backward(
            grad_output,
            x,
            decoded(x, weight, weight_scale, ctx.weight_format),
            packed_masks,
            offs,
            partials,
            (needs_x, needs_weight),
            ctx.logits_dtype if needs_logits else None,
            ctx.mask_weights_dtype if needs_mask_weights else None,
        )
        needed = (needs_x, needs_weight, needs_logits, needs_mask_weights)
        grad_x, grad_weight, grad_logits, grad_mask_weights = (
            grad if is_needed else None for grad, is_needed in zip(grads, needed, strict=True)
        )
        return grad_x, grad_weight, grad_logits, None, None, None, grad_mask_weights, None, None


class _Down(torch.autograd.Function):
    """Autograd of `mglu::experts_down`."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> Tensor:
        given = DownArguments(*args)
        with torch._C._AutoDispatchBelowAutograd(), no_view_tracking(), outer_gradients():
            result = experts_down(*args)
        ctx.save_for_backward(*given[:5])
        ctx.weight_format = given.weight_format
        return result

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        y, weight, expert_ids, expert_weights, scale = ctx.saved_tensors
        needs_y, needs_weight, _, needs_expert_weights, *_ = ctx.needs_input_grad
        needs = (needs_y, needs_weight, needs_expert_weights)
        weight = decoded(y, weight, scale, ctx.weight_format)
        grads = experts_down_backward(grad_output, y, weight, expert_ids, expert_weights, needs)
        grads = [grad if is_needed else None for grad, is_needed in zip(grads, needs, strict=True)]
        return grads[0], grads[1], None, grads[2], None, None


@kernel("experts_forward", "Autograd", with_keyset=True)
def _experts_forward_autograd(keys: DispatchKeySet, *args: Any) -> Tensor:
    if not needs_gradient(*args):
        return below_autograd(experts_forward, _experts_forward, keys, *args)
    given = ExpertArguments.of_ids(*args)
    expert_checks.check_experts(given)
    refuse_gradients(given.tensors(), given.weight_format, given.activation_format)
    if given.weight.requires_grad:
        raise ValueError(
            "weight: got a tensor that requires a gradient, which mglu::experts_forward does not compute: sort the "
            "tokens by expert and call mglu::grouped_forward or mglu::grouped_forward_ste"
        )
    return _by_sorted_rows(given)


def _by_sorted_rows(given: ExpertArguments) -> Tensor:
    """`experts_forward` in differentiable steps: sort the rows by expert, `grouped_forward`, undo the sort."""
    x, weight, packed_masks, activation, mask_weights, *stored, expert_ids, _ = given
    assert expert_ids is not None
    pairs, offs = sort_pairs(expert_ids, weight.shape[0])
    if mask_weights is not None:
        mask_weights = mask_weights.flatten(0, 1)[pairs]
    rows = x[pairs // expert_ids.shape[1]]
    sorted_result = grouped_forward(rows, weight, packed_masks, offs, activation, mask_weights, *stored)
    return sorted_result[inverse_of(pairs)].view(*expert_ids.shape, given.out_features)


@kernel("grouped_forward", "Autograd", with_keyset=True)
def _grouped_forward_autograd(keys: DispatchKeySet, *args: Any) -> Tensor:
    if not needs_gradient(*args):
        return below_autograd(grouped_forward, _grouped_forward, keys, *args)
    return _apply_grouped(*args)[0]


def _apply_grouped(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    given = ExpertArguments.of_offs(*args)
    x, weight, packed_masks, activation, mask_weights, scale, weight_format, activation_format, _, offs = given
    if weight_format != "dense" or scale is not None or activation_format != "dense":
        expert_checks.check_experts(given)
        refuse_gradients(given.tensors(), weight_format, activation_format)
    return apply_function(_Grouped, x, weight, None, packed_masks, offs, activation, mask_weights, scale, weight_format)


@kernel("grouped_forward_ste", "Autograd")
def _grouped_forward_ste_autograd(
    x: Tensor,
    weight: Tensor,
    mask_logits: Tensor,
    offs: Tensor,
    activation: str = "silu",
    mask_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    if needs_gradient(x, weight, mask_logits, mask_weights):
        check_dense("mask_logits", mask_logits)  # `_Grouped` would take None for a call with packed masks
        return apply_function(_Grouped, x, weight, mask_logits, None, offs, activation, mask_weights)[:2]
    with torch._C._AutoDispatchBelowAutograd():
        return grouped_forward_ste(x, weight, mask_logits, offs, activation, mask_weights)


@kernel("grouped_forward_train", "Autograd")
def _grouped_forward_train_autograd(*args: Any) -> tuple[Tensor, Tensor]:
    """Return a result that outer functorch levels can differentiate. The partials are constants."""
    if needs_gradient(*args):
        result, _, partials = _apply_grouped(*args)
        return result, partials
    with torch._C._AutoDispatchBelowAutograd():
        return grouped_forward_train(*args)


@kernel("experts_down", "Autograd", with_keyset=True)
def _experts_down_autograd(keys: DispatchKeySet, *args: Any) -> Tensor:
    if not needs_gradient(*args):
        return below_autograd(experts_down, _experts_down, keys, *args)
    given = DownArguments(*args)
    if given.weight_format != "dense" or given.weight_scale is not None:
        expert_checks.check_down(given)
        refuse_gradients(given.tensors(), given.weight_format)
    return apply_function(_Down, *given)


def _differentiable_once(op: Any) -> Callable[..., Any]:
    last = last_derivative(op)

    def autograd(*args: Any) -> Any:
        if needs_gradient(*args):
            return apply_function(last, *args)
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)

    return autograd


kernel("pack_expert_logits", "Autograd")(without_autograd(pack_expert_logits))
kernel("grouped_backward", "Autograd")(_differentiable_once(grouped_backward))
kernel("experts_down_backward", "Autograd")(_differentiable_once(experts_down_backward))


# --- Autocast: as in `ops`; expert_weights and mask_weights keep their dtype ------------------------------------------

for _op in (experts_forward, experts_down, grouped_forward, grouped_forward_ste):
    register_autocast(_op)


# --- vmap: a batch of tokens becomes more tokens of one call; any other batch becomes a loop of calls ----------------

# The arguments with a dimension of tokens. Grouped operators are missing, because rows that are sorted in each entry of
# a batch are not sorted in the whole batch.
_TOKEN_ARGUMENTS = {
    experts_forward: {"x", "expert_ids", "mask_weights"},
    experts_down: {"y", "expert_ids", "expert_weights"},
}


def _vmap_tokens(op: Any) -> Callable[..., Any]:
    names, token_arguments = names_of(op), _TOKEN_ARGUMENTS[op]

    def rule(info: Any, in_dims: tuple[Any, ...], *args: Any) -> Any:
        given, dims = dict(zip(names, args, strict=False)), dict(zip(names, in_dims, strict=False))
        if any(dim is not None for name, dim in dims.items() if name not in token_arguments):
            return vmap_loop(op)(info, in_dims, *args)
        given |= {
            name: batched(given[name], dims[name], info.batch_size)
            for name in token_arguments
            if given.get(name) is not None
        }
        leading = given["expert_ids"].shape[:2]
        flat = {name: given[name].flatten(0, 1) for name in token_arguments if given.get(name) is not None}
        result = op(**given | flat)
        return result.view(*leading, *result.shape[1:]), 0

    return rule


for _op in (experts_forward, experts_down):
    torch.library.register_vmap(_op, _vmap_tokens(_op), lib=library)
for _op in (
    *(pack_expert_logits, experts_down_backward),
    *(grouped_forward, grouped_forward_ste, grouped_forward_train, grouped_backward),
):
    torch.library.register_vmap(_op, vmap_loop(_op), lib=library)


from . import flops  # noqa: E402, F401 (registers the FLOP formulas of all operators)
