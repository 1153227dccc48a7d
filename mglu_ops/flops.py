"""The operators' formulas for `torch.utils.flop_counter`.

Forward is n_masks + 1 GEMMs of 2 * tokens * out_features * in_features each, and backward twice as many.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .masks import N_MASKS_DIM


def _gemm_flops(x_shape: Sequence[int], weight_shape: Sequence[int], n_masks: int) -> int:
    return (n_masks + 1) * 2 * math.prod(x_shape) * weight_shape[0]


@register_flop_formula([torch.ops.mglu.forward, torch.ops.mglu.forward_train])
def _forward_flops(
    x_shape: Sequence[int], weight_shape: Sequence[int], packed_masks_shape: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return _gemm_flops(x_shape, weight_shape, packed_masks_shape[N_MASKS_DIM])


@register_flop_formula(torch.ops.mglu.forward_ste)
def _forward_ste_flops(
    x_shape: Sequence[int], weight_shape: Sequence[int], logits_shape: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return _gemm_flops(x_shape, weight_shape, logits_shape[0])


@register_flop_formula(torch.ops.mglu.backward)
def _backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    packed_masks_shape: Sequence[int],
    partials_shape: Sequence[int],
    needs: Sequence[bool],
    logits_dtype: torch.dtype | None,
    *args: Any,
    **kwargs: Any,
) -> int:
    n_masks = packed_masks_shape[N_MASKS_DIM]
    gemm = _gemm_flops(x_shape, weight_shape, n_masks)
    masked = gemm * n_masks // (n_masks + 1)
    weight_gradient = gemm if needs[1] else masked if logits_dtype else 0
    return weight_gradient + (gemm if needs[0] else 0)
