"""The gradients of the down projection of experts, from products over rows sorted by expert, and its sum over a token.

A backend passes `product(a, b, offs)`. It computes `torch.nn.functional.grouped_mm`, and may return a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..given import DownGiven
from ..routing import inverse_of, sort_pairs
from .formula import operand_dtype, sum_dtype

Product = Callable[[Tensor, Tensor, Tensor], Tensor]


def sum_in_order(terms: Tensor) -> Tensor:
    """Return `sum_k terms[t, k]`, added in the order of k."""
    total = terms[:, 0].clone(memory_format=torch.contiguous_format)
    for k in range(1, terms.shape[1]):
        total += terms[:, k]
    return total


def backward(
    product: Product, grad_output: Tensor, given: DownGiven, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, weight and expert_weights; a gradient that is not needed is empty."""
    y, weight, ids, expert_weights, *_ = given
    grads = [
        one.new_zeros(one.shape if need else 0) for one, need in zip((y, weight, expert_weights), needs, strict=True)
    ]
    if not (y.numel() and weight.numel()):
        return grads[0], grads[1], grads[2]
    pairs, offs = sort_pairs(ids, weight.shape[0])
    back, has_expert = inverse_of(pairs), (torch.arange(len(pairs), device=y.device) < offs[-1])[:, None]
    rows, grad = y.flatten(0, 1)[pairs], grad_output[pairs // ids.shape[1]]
    weights = expert_weights.view(-1, 1)[pairs].to(sum_dtype(y.dtype))
    if needs[0] or needs[2]:
        products = product(grad, weight, offs)  # undefined in rows without an expert
        if needs[0]:
            grads[0] = torch.where(has_expert, _times(products, weights, y.dtype), 0)[back].view(y.shape)
        if needs[2]:
            sums = (products.to(weights.dtype) * rows).sum(-1, keepdim=True)
            grads[2] = torch.where(has_expert, sums, 0)[back].view(ids.shape).to(expert_weights.dtype)
    if needs[1]:
        operand = operand_dtype(y)
        grads[1] = product(_times(grad, weights, operand).t(), rows.to(operand), offs).to(weight.dtype)
    return grads[0], grads[1], grads[2]


def _times(rows: Tensor, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows * weights` in a dtype, rounded once, without an intermediate tensor in a wider dtype."""
    return torch.mul(rows, weights, out=rows.new_empty(rows.shape, dtype=dtype))
