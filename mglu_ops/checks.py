"""Argument checks shared by eager and fake kernels. An error names the argument, its value and what it must be.

The checks read metadata but no values, so they never synchronise and work under FakeTensor.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .activations import get_activation
from .formats import FORMATS, WeightFormat, check_activation_format, get_format
from .layer_call import LayerArguments
from .masks import MAX_MASKS, check_layout
from .sizes import same_sizes
from .tensors import check_dense

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATING_NAMES = "float16, bfloat16, float32 or float64"


def check_layer(given: LayerArguments) -> None:
    """Check the arguments of `mglu::forward`."""
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
    check_mask_weights(given.x, given.n_masks, given.mask_weights)


def check_inputs(x: Tensor, weight: Tensor, weight_format: WeightFormat = FORMATS["dense"], name: str = "x") -> None:
    """Check that x `[..., in_features]` and a weight in this format fit together. Errors call x `name`."""
    check_dense(name, x)
    check_dense("weight", weight)
    if x.dtype not in FLOATING:
        raise TypeError(f"{name}: got dtype {x.dtype}, must be {FLOATING_NAMES}")
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
    if weight.device != x.device:
        raise ValueError(f"weight: got device {weight.device}, must be {name}'s device {x.device}")


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
    if scale.device != weight.device:
        raise ValueError(f"weight_scale: got device {scale.device}, must be x's device {weight.device}")


def check_floating(name: str, dtype: torch.dtype | None) -> None:
    """Check that a dtype is floating or None. Errors call it `name`."""
    if dtype is not None and dtype not in FLOATING:
        raise TypeError(f"{name}: got {dtype}, must be {FLOATING_NAMES}, or None")


def check_packed(weight: Tensor, packed_masks: Tensor, weight_format: WeightFormat = FORMATS["dense"]) -> None:
    """Check that packed_masks fit the weight: its shape, its format and its device."""
    check_layout(packed_masks, weight_format.packed * weight.shape[1], weight.shape[0])
    if packed_masks.device != weight.device:
        raise ValueError(f"packed_masks: got device {packed_masks.device}, must be x's device {weight.device}")


def check_packable_logits(mask_logits: Tensor, weight: Tensor | None = None) -> None:
    """Check that mask_logits are floating `[n_masks, out_features, in_features]` and fit `weight`, if it is given."""
    check_dense("mask_logits", mask_logits)
    if mask_logits.dtype not in FLOATING:
        raise TypeError(f"mask_logits: got dtype {mask_logits.dtype}, must be {FLOATING_NAMES}")
    shape = mask_logits.shape
    if len(shape) != 3 or (weight is not None and not same_sizes(shape[1:], weight.shape)):
        known = "" if weight is None else f" = [n_masks, {weight.shape[0]}, {weight.shape[1]}]"
        raise ValueError(f"mask_logits: got shape {list(shape)}, must be [n_masks, out_features, in_features]{known}")
    if not 1 <= shape[0] <= MAX_MASKS:
        raise ValueError(f"mask_logits: got n_masks={shape[0]}, must be 1 to {MAX_MASKS}")
    if weight is not None and mask_logits.device != weight.device:
        raise ValueError(f"mask_logits: got device {mask_logits.device}, must be x's device {weight.device}")


def check_needs(needs: Sequence[bool], *names: str) -> None:
    """Check that `needs` has one bool for each argument in `names`: True asks for its gradient."""
    if len(needs) != len(names):
        wanted = f"{len(names)} bools, for the gradients of {', '.join(names)}"
        raise ValueError(f"needs: got {list(needs)}, must be {wanted}")


def check_mask_weights(x: Tensor, n_masks: int, mask_weights: Tensor | None) -> None:
    """Check that mask_weights are None or floating `[..., n_masks]` with x's leading sizes, on x's device."""
    if mask_weights is None:
        return
    check_dense("mask_weights", mask_weights)
    if mask_weights.dtype not in FLOATING:
        raise TypeError(f"mask_weights: got dtype {mask_weights.dtype}, must be {FLOATING_NAMES}")
    expected = [*x.shape[:-1], n_masks]
    if not same_sizes(mask_weights.shape, expected):
        raise ValueError(
            f"mask_weights: got shape {list(mask_weights.shape)}, must be x's leading sizes and n_masks, {expected}"
        )
    if mask_weights.device != x.device:
        raise ValueError(f"mask_weights: got device {mask_weights.device}, must be x's device {x.device}")
