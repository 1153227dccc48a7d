"""What the backends share of the down projection of experts: the sum over a token's experts, and the gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sum_in_order(terms: Tensor) -> Tensor:
    """Return `sum_k terms[t, k]`, added in the order of k."""
    total = terms[:, 0].clone(memory_format=torch.contiguous_format)
    for k in range(1, terms.shape[1]):
        total += terms[:, k]
    return total


def gradients_of_rows(
    product: Callable[[Tensor, Tensor], Tensor],
    grad: Tensor,
    rows: Tensor,
    weight: Tensor,
    factors: Tensor,
    needs: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of rows of y, of the weight and of the rows' expert weights; None if not needed.

    Args:
        product: multiplies two matrices, or with the rows of several experts those of each expert.
        grad: the gradient of the result for each row, `[rows, out_features]`.
        rows: rows of y, `[rows, in_features]`.
        weight: `[(E,) out_features, in_features]`.
        factors: the expert weights `[rows, 1]`, in the dtype of the sums.
        needs: which gradients are needed.
    """
    back = product(grad, weight) if needs[0] or needs[2] else None
    return (
        _times(back, factors, rows.dtype) if needs[0] and back is not None else None,
        product(_times(grad, factors, grad.dtype).t(), rows) if needs[1] else None,
        (back.to(factors.dtype) * rows).sum(-1, keepdim=True) if needs[2] and back is not None else None,
    )


def _times(rows: Tensor, factors: Tensor, dtype: torch.dtype) -> Tensor:
    """`rows * factors` in a dtype, rounded once, without an intermediate tensor in a wider dtype."""
    return torch.mul(rows, factors, out=rows.new_empty(rows.shape, dtype=dtype))
