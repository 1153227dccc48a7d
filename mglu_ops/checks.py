"""Argument checks shared by eager and fake kernels. An error names the argument, its value and what it must be.

The checks read metadata but no values, so they never synchronise and work under FakeTensor. `mglu_ops.ops` defines the
sizes E, T, K and S of experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from .activations import get_activation
from .formats import FORMATS, WeightFormat, check_activation_format, get_format
from .given import BackwardGiven, DownGiven, Given, SteGiven
from .masks import MAX_MASKS, check_layout
from .sizes import same_sizes
from .tensors import check_dense

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATING_NAMES = "float16, bfloat16, float32 or float64"
INDEX_DTYPES = (torch.int32, torch.int64)


# --- One function for each task ---------------------------------------------------------------------------------------


def check_forward(given: Given) -> None:
    """Check the arguments of `mglu::forward`, `mglu::experts_forward` or `mglu::grouped_forward`."""
    x = given.x
    if given.routing is None:
        _check_layer(given)
        check_mask_weights(x, x.shape[:-1], given.n_masks, given.mask_weights)
        return
    _check_rank("x", x, "[S, in_features]" if given.expert_ids is None else "[T, in_features]")
    experts = _check_experts_of(weight=given.weight, packed_masks=given.packed_masks, weight_scale=given.weight_scale)
    if given.expert_ids is None:
        _check_offs(given.offs, experts, x.device)
    else:
        _check_ids(given.expert_ids, x.shape[0], x.device)
    with _of_each_expert():
        _check_layer(given.of_expert(0, x, None))
    check_mask_weights(x, given.leading, given.n_masks, given.mask_weights)


def _check_layer(given: Given) -> None:
    """Check the arguments of one layer, but not the mask weights."""
    weight_format = get_format(given.weight_format)
    check_inputs(given.x, given.weight, weight_format)
    check_activation_format(given.activation_format, given.weight_format)
    if given.activation_format != "dense" and given.x.dtype is torch.float64:
        raise TypeError(
            f"x: got dtype {given.x.dtype}, must be float16, bfloat16 or float32 for "
            f"activation_format={given.activation_format!r}"
        )
    check_scale(given.weight, given.weight_scale, weight_format)
    get_activation(given.activation)
    check_packed(given.weight, given.packed_masks, weight_format)


def check_ste(given: SteGiven) -> None:
    """Check the arguments of `mglu::forward_ste` or `mglu::grouped_forward_ste`."""
    x, weight, mask_logits, activation, mask_weights, *_ = given
    if given.offs is not None:
        _check_rows_and_experts(x, given.offs, weight=weight, mask_logits=mask_logits)
        with _of_each_expert():
            check_ste(given._replace(weight=weight[0], mask_logits=mask_logits[0], offs=None))
        return
    check_inputs(x, weight)
    get_activation(activation)
    check_packable_logits(mask_logits, weight)
    check_mask_weights(x, x.shape[:-1], mask_logits.shape[0], mask_weights)


def check_backward(given: BackwardGiven) -> None:
    """Check the arguments of `mglu::backward` or, with offs, of `mglu::grouped_backward`."""
    if given.offs is not None:
        _check_rows_and_experts(given.x, given.offs, weight=given.weight, packed_masks=given.packed_masks)
        with _of_each_expert():
            check_backward(given._replace(weight=given.weight[0], packed_masks=given.packed_masks[0], offs=None))
        return
    check_inputs(given.x, given.weight)
    check_packed(given.weight, given.packed_masks)
    _check_needs(given.needs, "x", "weight")
    for name in ("grad_output", "partials"):
        check_dense(name, getattr(given, name))
    for name in ("logits_dtype", "mask_weights_dtype"):
        check_floating(name, getattr(given, name))
    leading, out_features, n_masks = given.x.shape[:-1], given.weight.shape[0], given.packed_masks.shape[-1]
    # mask_weights_dtype is None also if there are mask weights that need no gradient. Then only the size of partials
    # tells that there are mask weights.
    weighted = rows_of_partials(n_masks, has_mask_weights=True)
    has_mask_weights = given.mask_weights_dtype is not None or same_sizes(given.partials.shape[-2:-1], (weighted,))
    partials = (*leading, rows_of_partials(n_masks, has_mask_weights), out_features)
    _check_like("grad_output", given.grad_output, (*leading, out_features), "x", given.x)
    _check_like("partials", given.partials, partials, "x", given.x)


def rows_of_partials(n_masks: int, has_mask_weights: bool) -> int:
    """The number of partial derivatives of each element of the result: the second last size of `partials`."""
    return 2 * n_masks + 1 if has_mask_weights else n_masks + 1


def check_down(given: DownGiven) -> None:
    """Check the arguments of `mglu::experts_down`."""
    y, weight, ids, expert_weights, scale, name = given
    weight_format = get_format(name)
    _check_rank("y", y, "[T, K, in_features]")
    _check_experts_of(weight=weight, weight_scale=scale)
    _check_ids(ids, y.shape[0], y.device)
    _check_floating_tensor("expert_weights", expert_weights)
    if not same_sizes(y.shape[:2], ids.shape):
        raise ValueError(f"y: got shape {list(y.shape)}, must begin with expert_ids' {list(ids.shape)}")
    if not same_sizes(expert_weights.shape, ids.shape):
        raise ValueError(
            f"expert_weights: got shape {list(expert_weights.shape)}, must be expert_ids' {list(ids.shape)}"
        )
    _check_device("expert_weights", expert_weights, "y", y.device)
    with _of_each_expert():
        check_inputs(y, weight[0], weight_format, "y")
        check_scale(weight[0], None if scale is None else scale[0], weight_format)


def check_down_backward(grad_output: Tensor, given: DownGiven, needs: Sequence[bool]) -> None:
    """Check the arguments of `mglu::experts_down_backward`."""
    check_down(given)
    _check_needs(needs, "y", "weight", "expert_weights")
    _check_like("grad_output", grad_output, (given.y.shape[0], given.weight.shape[1]), "y", given.y)


def check_expert_logits(mask_logits: Tensor) -> None:
    """Check that mask_logits are floating `[E, n_masks, out_features, in_features]` of at least one expert."""
    check_dense("mask_logits", mask_logits)
    if mask_logits.dim() != 4 or mask_logits.shape[0] == 0:
        raise ValueError(
            f"mask_logits: got shape {list(mask_logits.shape)}, must be [E, n_masks, out_features, in_features] of at "
            "least 1 expert"
        )
    with _of_each_expert():
        check_packable_logits(mask_logits[0])


# --- Single arguments -------------------------------------------------------------------------------------------------


def check_inputs(x: Tensor, weight: Tensor, weight_format: WeightFormat = FORMATS["dense"], name: str = "x") -> None:
    """Check that x `[..., in_features]` and a weight in this format fit together. Errors call x `name`."""
    check_dense("weight", weight)
    _check_floating_tensor(name, x)
    if weight.dtype != (weight_format.dtype or x.dtype):
        expected = f"{name}'s dtype {x.dtype}" if weight_format.is_dense else str(weight_format.dtype)
        raise TypeError(
            f"weight: got dtype {weight.dtype}, must be {expected} for weight_format={weight_format.name!r}"
        )
    if x.dim() < 1:
        raise ValueError(f"{name}: got a scalar, must be [..., in_features]")
    if weight.dim() != 2:
        shape = "[out_features, in_features / 2]" if weight_format.packed == 2 else "[out_features, in_features]"
        raise ValueError(f"weight: got shape {list(weight.shape)}, must be {shape}")
    in_features = weight_format.packed * weight.shape[1]
    if not same_sizes(x.shape[-1:], (in_features,)):
        raise ValueError(
            f"{name}: got last size {x.shape[-1]} (shape {list(x.shape)}), must be weight's in_features {in_features}"
        )
    _check_device("weight", weight, name, x.device)


def check_scale(weight: Tensor, scale: Tensor | None, weight_format: WeightFormat) -> None:
    """Check the dtype, shape and device of the scales of a weight in this format."""
    where = f"for weight_format={weight_format.name!r}"
    if weight_format.is_dense:
        if scale is not None:
            raise ValueError(f"weight_scale: got a tensor of shape {list(scale.shape)}, must be None {where}")
        return
    shape = weight_format.scale_shape(weight.shape[0], weight_format.packed * weight.shape[1])
    if scale is None:
        raise ValueError(f"weight_scale: got None, must be {weight_format.scale_dtype} {list(shape)} {where}")
    check_dense("weight_scale", scale)
    if scale.dtype != weight_format.scale_dtype:
        raise TypeError(f"weight_scale: got dtype {scale.dtype}, must be {weight_format.scale_dtype} {where}")
    if not same_sizes(scale.shape, shape):
        raise ValueError(f"weight_scale: got shape {list(scale.shape)}, must be {list(shape)} {where}")
    _check_device("weight_scale", scale, "x", weight.device)


def check_floating(name: str, dtype: torch.dtype | None) -> None:
    """Check that a dtype is floating or None. Errors call it `name`."""
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(f"{name}: got {dtype}, must be {FLOATING_NAMES}, or None")


def check_packed(weight: Tensor, packed_masks: Tensor, weight_format: WeightFormat = FORMATS["dense"]) -> None:
    """Check that packed_masks fit the weight: its shape, its format and its device."""
    check_layout(packed_masks, weight_format.packed * weight.shape[1], weight.shape[0])
    _check_device("packed_masks", packed_masks, "x", weight.device)


def check_packable_logits(mask_logits: Tensor, weight: Tensor | None = None) -> None:
    """Check that mask_logits are floating `[n_masks, out_features, in_features]` and fit `weight`, if it is given."""
    _check_floating_tensor("mask_logits", mask_logits)
    shape = mask_logits.shape
    if len(shape) != 3 or (weight is not None and not same_sizes(shape[1:], weight.shape)):
        known = "" if weight is None else f" = [n_masks, {weight.shape[0]}, {weight.shape[1]}]"
        raise ValueError(f"mask_logits: got shape {list(shape)}, must be [n_masks, out_features, in_features]{known}")
    if not 1 <= shape[0] <= MAX_MASKS:
        raise ValueError(f"mask_logits: got n_masks={shape[0]}, must be 1 to {MAX_MASKS}")
    if weight is not None:
        _check_device("mask_logits", mask_logits, "x", weight.device)


def _check_needs(needs: Sequence[bool], *names: str) -> None:
    """Check that `needs` has one bool for each argument in `names`: True asks for its gradient."""
    if len(needs) != len(names):
        wanted = f"{len(names)} bools, for the gradients of {', '.join(names)}"
        raise ValueError(f"needs: got {list(needs)}, must be {wanted}")


def check_mask_weights(x: Tensor, leading: Sequence[int], n_masks: int, mask_weights: Tensor | None) -> None:
    """Check that mask_weights are None or floating `[..., n_masks]` with these leading sizes, on x's device."""
    if mask_weights is None:
        return
    _check_floating_tensor("mask_weights", mask_weights)
    expected = [*leading, n_masks]
    if not same_sizes(mask_weights.shape, expected):
        raise ValueError(
            f"mask_weights: got shape {list(mask_weights.shape)}, "
            f"must be the result's leading sizes and n_masks, {expected}"
        )
    _check_device("mask_weights", mask_weights, "x", x.device)


def _check_like(name: str, tensor: Tensor, shape: Sequence[int], like: str, other: Tensor) -> None:
    """Check that a tensor has this shape, and the dtype and device of `other`. `like` is `other`'s name in errors."""
    check_dense(name, tensor)
    if not same_sizes(tensor.shape, shape):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be {list(shape)}")
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, must be {like}'s dtype {other.dtype}")
    _check_device(name, tensor, like, other.device)


def _check_floating_tensor(name: str, tensor: Tensor) -> None:
    check_dense(name, tensor)
    if tensor.dtype not in FLOATING:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, must be {FLOATING_NAMES}")


def _check_device(name: str, tensor: Tensor, other: str, device: torch.device) -> None:
    """Check that a tensor is on the device of the argument `other`."""
    if tensor.device != device:
        raise ValueError(f"{name}: got device {tensor.device}, must be {other}'s device {device}")


def _check_rows_and_experts(x: Tensor, offs: Tensor, **tensors: Tensor) -> None:
    """Check the shapes of x `[S, in_features]` and offs `[E]`, and that `tensors` are `[E, ...]`."""
    _check_rank("x", x, "[S, in_features]")
    _check_offs(offs, _check_experts_of(**tensors), x.device)


def _check_offs(offs: Tensor | None, experts: int, device: torch.device) -> None:
    """Check that offs are int32 `[E]` on x's device. Their values are not read."""
    check_dense("offs", offs)
    assert offs is not None
    if offs.dtype is not torch.int32:
        raise TypeError(f"offs: got dtype {offs.dtype}, must be torch.int32, as for torch.nn.functional.grouped_mm")
    if not same_sizes(offs.shape, (experts,)):
        raise ValueError(f"offs: got shape {list(offs.shape)}, must be [{experts}], the end of each expert's rows")
    _check_device("offs", offs, "x", device)


def _check_ids(expert_ids: Tensor, tokens: int, device: torch.device) -> None:
    check_dense("expert_ids", expert_ids)
    if expert_ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"expert_ids: got dtype {expert_ids.dtype}, must be torch.int32 or torch.int64")
    if expert_ids.dim() != 2 or not same_sizes(expert_ids.shape[:1], (tokens,)) or expert_ids.shape[1] == 0:
        raise ValueError(
            f"expert_ids: got shape {list(expert_ids.shape)}, must be [T, K] = [{tokens}, K] with K of at least 1"
        )
    _check_device("expert_ids", expert_ids, "x", device)


def _check_rank(name: str, tensor: Tensor, shape: str) -> None:
    check_dense(name, tensor)
    if tensor.dim() != shape.count(",") + 1:
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be {shape}")


def _check_experts_of(**tensors: Tensor | None) -> int:
    """Check that all tensors are `[E, ...]` as the weight is, and return E."""
    weight = tensors["weight"]
    check_dense("weight", weight)
    assert weight is not None
    if weight.dim() != 3 or weight.shape[0] == 0:
        raise ValueError(
            f"weight: got shape {list(weight.shape)}, must be [E, ...] with the weights of at least 1 expert in 3 sizes"
        )
    for name, tensor in tensors.items():
        if tensor is None and name == "weight_scale":
            continue
        check_dense(name, tensor)
        assert tensor is not None
        if not same_sizes(tensor.shape[:1], weight.shape[:1]):
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, must begin with E = {weight.shape[0]} experts")
    return weight.shape[0]


@contextmanager
def _of_each_expert() -> Iterator[None]:
    """Append "(of each expert)" to the errors of a layer's checks, which show the shapes of one expert."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (of each expert)") from None
