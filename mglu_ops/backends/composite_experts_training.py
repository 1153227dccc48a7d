"""A training step of experts, for rows sorted by expert: `mglu::grouped_forward_train` and `mglu::grouped_backward`.

The rows of expert e are `offs[e - 1]` to `offs[e]`, as for `torch.nn.functional.grouped_mm`. They are a layer of their
own, with the equations of `mglu_ops.ops`. Rows past `offs[-1]` belong to no expert: their results and gradients are
zeros, whatever they hold. So are the gradients of the parameters of experts without rows.

On a CPU, where `offs` can be read, the operators of one layer run for each expert. On a GPU nothing waits for the
device (`mglu_ops.backends.cuda.experts_training`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from .cuda import experts_training as on_gpu


def unsupported_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """Why experts of a dtype cannot be trained on a device; None if they can."""
    return on_gpu.unsupported_reason(device, dtype) if device.type == "cuda" else None


def forward_train(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    offs: Tensor,
    activation: str = "silu",
    mask_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the result and the partial derivatives that `backward` needs.

    Args:
        x: `[S, in_features]`, like the other tensors in any strides.
        weight: `[E, out_features, in_features]` in x's dtype.
        packed_masks: uint8 `[E, out_features, ceil(in_features / 8), n_masks]`.
        offs: int32 `[E]`, ascending, from 0 to S.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        mask_weights: `[S, n_masks]`, or None.

    Returns:
        y `[S, out_features]`, and partials `[S, n_masks + 1, out_features]`, or with mask weights `[S, 2 n_masks + 1,
        out_features]`. Both are contiguous and of x's dtype.

    Raises:
        NotImplementedError: `unsupported_reason` says why.
    """
    _check_supported(x)
    if x.is_cuda:
        with torch.cuda.device(x.device):
            return on_gpu.forward_train(x, weight, packed_masks, offs, activation, mask_weights)
    n_masks, d = packed_masks.shape[3], weight.shape[1]
    y = x.new_zeros(x.shape[0], d)
    partials = x.new_zeros(x.shape[0], 1 + (1 if mask_weights is None else 2) * n_masks, d)
    for expert, rows in _rows_of_experts(offs, x.shape[0]):
        weights = None if mask_weights is None else mask_weights[rows]
        y[rows], partials[rows] = torch.ops.mglu.forward_train(
            x[rows], weight[expert], packed_masks[expert], activation, weights
        )
    return y, partials


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    offs: Tensor,
    partials: Tensor,
    needs: Sequence[bool],
    logits_dtype: torch.dtype | None,
    mask_weights_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of a result of `forward_train`.

    Args:
        grad_output: `[S, out_features]` in x's dtype.
        x: as in `forward_train`.
        weight: likewise.
        packed_masks: likewise.
        offs: likewise.
        partials: what `forward_train` returned.
        needs: whether the gradients of x and weight are needed.
        logits_dtype: the dtype of the gradient of the mask logits; None if it is not needed.
        mask_weights_dtype: the dtype of the gradient of the mask weights; None if it is not needed.

    Returns:
        The gradients of x, weight, mask logits `[E, n_masks, out_features, in_features]` and mask weights
        `[S, n_masks]`, contiguous, with memory of their own. A gradient that is not needed is an empty tensor.

    Raises:
        NotImplementedError: `unsupported_reason` says why.
    """
    _check_supported(x)
    arguments = grad_output, x, weight, packed_masks, offs, partials
    if x.is_cuda:
        with torch.cuda.device(x.device):
            found = on_gpu.backward(*arguments, (needs[0], needs[1]), logits_dtype, mask_weights_dtype)
        return tuple(x.new_empty(0) if grad is None else grad for grad in found)  # type: ignore[return-value]
    experts, n_masks = weight.shape[0], packed_masks.shape[3]
    grads = (
        x.new_zeros(x.shape if needs[0] else 0),
        weight.new_zeros(weight.shape if needs[1] else 0),
        x.new_zeros((experts, n_masks, *weight.shape[1:]) if logits_dtype else 0, dtype=logits_dtype or x.dtype),
        x.new_zeros((x.shape[0], n_masks) if mask_weights_dtype else 0, dtype=mask_weights_dtype or x.dtype),
    )
    is_needed = (*needs, logits_dtype, mask_weights_dtype)
    for expert, rows in _rows_of_experts(offs, x.shape[0]):
        of_layer = grad_output[rows], x[rows], weight[expert], packed_masks[expert], partials[rows]
        found = torch.ops.mglu.backward(*of_layer, list(needs), logits_dtype, mask_weights_dtype)
        parts: tuple[slice | int, ...] = (rows, expert, expert, rows)
        for grad, part, of_expert, needed in zip(grads, parts, found, is_needed, strict=True):
            if needed:
                grad[part] = of_expert
    return grads


def _check_supported(x: Tensor) -> None:
    if reason := unsupported_reason(x.device, x.dtype):
        raise NotImplementedError(f"x: got {x.dtype} on {x.device}, which cannot train experts: {reason}")


def _rows_of_experts(offs: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Each expert that has rows, and its rows. Reads offs; ends that are not valid count as the nearest valid ones."""
    for expert, (start, end) in enumerate(pairwise([0, *offs.clamp(0, rows).cummax(0).values.tolist()])):
        if end > start:
            yield expert, slice(start, end)
