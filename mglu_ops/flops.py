"""The operators' formulas for `torch.utils.flop_counter`.

Forward counts n_masks + 1 GEMMs of 2 * tokens * out_features * in_features FLOPs each, and backward twice as many. For
experts, each row of the result counts as a token, also a row without an expert.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula


def _gemm_flops(x_shape: Sequence[int], weight_shape: Sequence[int], n_masks: int) -> int:
    """The FLOPs of n_masks + 1 GEMMs. `weight_shape` may have a leading dimension of experts."""
    return (n_masks + 1) * 2 * math.prod(x_shape) * weight_shape[-2]


_mglu = torch.ops.mglu


@register_flop_formula([_mglu.forward, _mglu.forward_train, _mglu.grouped_forward, _mglu.grouped_forward_train])
def _forward_flops(
    x_shape: Sequence[int], weight_shape: Sequence[int], packed_masks_shape: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return _gemm_flops(x_shape, weight_shape, packed_masks_shape[-1])


@register_flop_formula([_mglu.forward_ste, _mglu.grouped_forward_ste])
def _forward_ste_flops(
    x_shape: Sequence[int], weight_shape: Sequence[int], logits_shape: Sequence[int], *args: Any, **kwargs: Any
) -> int:
    return _gemm_flops(x_shape, weight_shape, logits_shape[-3])


@register_flop_formula(_mglu.backward)
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
    n_masks = packed_masks_shape[-1]
    gemm = _gemm_flops(x_shape, weight_shape, n_masks)
    masked = gemm * n_masks // (n_masks + 1)
    grad_weight = gemm if needs[1] else masked if logits_dtype else 0
    return grad_weight + (gemm if needs[0] else 0)


@register_flop_formula(_mglu.grouped_backward)
def _grouped_backward_flops(
    grad_shape: Sequence[int],
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    packed_masks_shape: Sequence[int],
    offs_shape: Sequence[int],
    *rest: Any,
    **kwargs: Any,
) -> int:
    return _backward_flops(grad_shape, x_shape, weight_shape, packed_masks_shape, *rest)


@register_flop_formula(_mglu.experts_forward)
def _experts_forward_flops(
    x_shape: Sequence[int],
    weight_shape: Sequence[int],
    packed_masks_shape: Sequence[int],
    ids_shape: Sequence[int],
    *args: Any,
    **kwargs: Any,
) -> int:
    return ids_shape[1] * _gemm_flops(x_shape, weight_shape, packed_masks_shape[-1])


@register_flop_formula(_mglu.experts_down)
def _experts_down_flops(y_shape: Sequence[int], weight_shape: Sequence[int], *args: Any, **kwargs: Any) -> int:
    return _gemm_flops(y_shape, weight_shape, 0)


@register_flop_formula(_mglu.experts_down_backward)
def _experts_down_backward_flops(
    grad_shape: Sequence[int],
    y_shape: Sequence[int],
    weight_shape: Sequence[int],
    ids_shape: Sequence[int],
    expert_weights_shape: Sequence[int],
    needs: Sequence[bool],
    *args: Any,
    **kwargs: Any,
) -> int:
    return ((needs[0] or needs[2]) + needs[1]) * _gemm_flops(y_shape, weight_shape, 0)
