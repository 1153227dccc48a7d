"""Argument checks of the operators over experts. The tensors of one expert are checked like a layer's (`checks`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from . import checks
from .activations import get_activation
from .expert_calls import DownArguments, ExpertArguments
from .formats import get_format
from .sizes import same_sizes
from .tensors import check_dense

INDEX_DTYPES = (torch.int32, torch.int64)


def check_experts(given: ExpertArguments) -> None:
    """Check the arguments of `mglu::experts_forward` or, with offs, of `mglu::grouped_forward`."""
    x = given.x
    _check_rank("x", x, "[S, in_features]" if given.expert_ids is None else "[T, in_features]")
    experts = _check_experts_of(weight=given.weight, packed_masks=given.packed_masks, weight_scale=given.weight_scale)
    if given.offs is not None:
        _check_offs(given.offs, experts, x.device)
    else:
        _check_ids(given.expert_ids, x.shape[0], x.device)
        assert given.expert_ids is not None
        x = x.unsqueeze(1).expand(-1, given.expert_ids.shape[1], -1)
    with of_each_expert():
        checks.check_layer(given.of_expert(0, x, given.mask_weights))


def check_grouped_ste(
    x: Tensor,
    weight: Tensor,
    mask_logits: Tensor,
    offs: Tensor,
    activation: str = "silu",
    mask_weights: Tensor | None = None,
) -> None:
    """Check the arguments of `mglu::grouped_forward_ste`."""
    check_rows_and_experts(x, offs, weight=weight, mask_logits=mask_logits)
    get_activation(activation)
    with of_each_expert():
        checks.check_inputs(x, weight[0])
        checks.check_packable_logits(mask_logits[0], weight[0])
        checks.check_mask_weights(x, mask_logits.shape[1], mask_weights)


def check_packable_logits(mask_logits: Tensor) -> None:
    """Check that mask_logits are floating `[E, n_masks, out_features, in_features]` of at least one expert."""
    check_dense("mask_logits", mask_logits)
    if mask_logits.dim() != 4 or mask_logits.shape[0] == 0:
        raise ValueError(
            f"mask_logits: got shape {list(mask_logits.shape)}, must be [E, n_masks, out_features, in_features] of at "
            "least 1 expert"
        )
    with of_each_expert():
        checks.check_packable_logits(mask_logits[0])


def check_rows_and_experts(x: Tensor, offs: Tensor, **tensors: Tensor) -> None:
    """Check the shapes of x `[S, in_features]` and offs `[E]`, and that `tensors` are `[E, ...]`."""
    _check_rank("x", x, "[S, in_features]")
    _check_offs(offs, _check_experts_of(**tensors), x.device)


def check_down(given: DownArguments) -> None:
    """Check the arguments of `mglu::experts_down`."""
    y, weight, ids, expert_weights, scale, name = given
    weight_format = get_format(name)
    _check_rank("y", y, "[T, K, in_features]")
    _check_experts_of(weight=weight, weight_scale=scale)
    _check_ids(ids, y.shape[0], y.device)
    check_dense("expert_weights", expert_weights)
    if expert_weights.dtype not in checks.FLOATING:
        raise TypeError(f"expert_weights: got dtype {expert_weights.dtype}, must be {checks.FLOATING_NAMES}")
    for what, tensor in (("y", y), ("expert_weights", expert_weights)):
        if not same_sizes(tensor.shape[:2], ids.shape) or (tensor is expert_weights and tensor.dim() != 2):
            raise ValueError(f"{what}: got shape {list(tensor.shape)}, must begin with expert_ids' {list(ids.shape)}")
    if expert_weights.device != y.device:
        raise ValueError(f"expert_weights: got device {expert_weights.device}, must be y's device {y.device}")
    with of_each_expert():
        checks.check_inputs(y, weight[0], weight_format, "y")
        checks.check_scale(weight[0], None if scale is None else scale[0], weight_format)


def check_like(name: str, tensor: Tensor, shape: Sequence[int], like: str, other: Tensor) -> None:
    """Check that a tensor has this shape, and the dtype and device of `other`, which errors call `like`."""
    check_dense(name, tensor)
    if not same_sizes(tensor.shape, shape):
        raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be {list(shape)}")
    if tensor.dtype != other.dtype:
        raise TypeError(f"{name}: got dtype {tensor.dtype}, must be {like}'s dtype {other.dtype}")
    if tensor.device != other.device:
        raise ValueError(f"{name}: got device {tensor.device}, must be {like}'s device {other.device}")


def _check_offs(offs: Tensor, experts: int, device: torch.device) -> None:
    """Check that offs are int32 `[E]` on x's device. Their values are not read."""
    check_dense("offs", offs)
    if offs.dtype is not torch.int32:
        raise TypeError(f"offs: got dtype {offs.dtype}, must be torch.int32, as for torch.nn.functional.grouped_mm")
    if not same_sizes(offs.shape, (experts,)):
        raise ValueError(f"offs: got shape {list(offs.shape)}, must be [{experts}], the end of each expert's rows")
    if offs.device != device:
        raise ValueError(f"offs: got device {offs.device}, must be x's device {device}")


def _check_ids(expert_ids: Tensor | None, tokens: int, device: torch.device) -> None:
    check_dense("expert_ids", expert_ids)
    assert expert_ids is not None
    if expert_ids.dtype not in INDEX_DTYPES:
        raise TypeError(f"expert_ids: got dtype {expert_ids.dtype}, must be torch.int32 or torch.int64")
    if expert_ids.dim() != 2 or not same_sizes(expert_ids.shape[:1], (tokens,)) or expert_ids.shape[1] == 0:
        raise ValueError(
            f"expert_ids: got shape {list(expert_ids.shape)}, must be [T, K] = [{tokens}, K] with K of at least 1"
        )
    if expert_ids.device != device:
        raise ValueError(f"expert_ids: got device {expert_ids.device}, must be x's device {device}")


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
def of_each_expert() -> Iterator[None]:
    """Append "(of each expert)" to the errors of a layer's checks, which show the shapes of one expert."""
    try:
        yield
    except (TypeError, ValueError) as error:
        raise type(error)(f"{error} (of each expert)") from None
