"""Experts by grouped products in Triton, for rows sorted by expert, in any dtype but float64.

`backends/formula.py` has the formulas. Nothing waits for the GPU, and no shape depends on `offs`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ...formats import FORMATS
from ...given import BackwardGiven, DownGiven, Given
from ...routing import GatherRows, SortedRows
from .. import formula
from ..experts_down import gradients_of_rows, sum_in_order
from ..formula import Products, operand_dtype

_LIBRARY_ARCHITECTURES = (9, 10)
"""Major compute capabilities on which torch's `grouped_mm` has a kernel for bfloat16 (torch 2.11 to 2.13). On other
GPUs and for other dtypes, torch reads `offs` on the host and loops over the experts."""


class GroupedProducts(Products):
    """The GEMMs of experts, for rows sorted by expert. The results are in float32.

    Rows of a result that belong to no expert are undefined.

    `weight` is `[experts, out_features, in_features]`; `x` and `grad` have the rows of all experts.
    """

    has_float64 = False

    def __init__(self, offs: Tensor, rows: int) -> None:
        self._ends = ascending(offs, rows)
        self._expert = torch.searchsorted(self._ends, torch.arange(rows, device=offs.device), right=True)
        self.has_no_expert = self._expert == len(offs)

    def project(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        from .grouped import grouped_products  # imported here, because it imports Triton

        out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32) if out is None else out
        return grouped_products(x, weight.mT, self._ends, out)

    def back(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        from .grouped import grouped_products

        out = grad.new_zeros(grad.shape[0], weight.shape[2], dtype=torch.float32) if total is None else total
        return grouped_products(grad, weight, self._ends, out, add=total is not None)

    def weight_product(self, grad: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        from .grouped import products_over_rows

        shape = len(self._ends), grad.shape[1], x.shape[1]
        out = grad.new_empty(shape, dtype=torch.float32) if total is None else total
        return products_over_rows(grad, x, self._ends, out, add=total is not None)

    def count_ones(self, mask: Tensor) -> Tensor:
        return mask.sum((-2, -1), keepdim=True)

    def per_row(self, numbers: Tensor) -> Tensor:
        return numbers.view(-1, 1)[self._expert.clamp_max(len(self._ends) - 1)]


def forward_train(given: Given) -> tuple[Tensor, Tensor]:
    """Run `mglu::grouped_forward_train`."""
    assert given.offs is not None
    products = GroupedProducts(given.offs, given.x.shape[0])
    y, partials = formula.forward_train(given, products)
    return (
        y.masked_fill_(products.has_no_expert[:, None], 0),
        partials.masked_fill_(products.has_no_expert[:, None, None], 0),
    )


def backward(given: BackwardGiven) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mglu::grouped_backward`."""
    assert given.offs is not None
    products = GroupedProducts(given.offs, given.x.shape[0])
    grad_x, grad_weight, grad_logits, grad_mask_weights = formula.backward(given, products)
    if grad_mask_weights.numel():
        grad_mask_weights.masked_fill_(products.has_no_expert[:, None], 0)
    return grad_x, grad_weight, grad_logits, grad_mask_weights


def forward(given: Given) -> Tensor:
    """Run `mglu::experts_forward` or `mglu::grouped_forward`. Return `[rows, out_features]`."""
    if given.offs is not None:
        return _in_sorted_rows(given)
    ids, weights = given.expert_ids, given.mask_weights
    assert ids is not None
    rows = SortedRows(ids, given.weight.shape[0], GatherRows.forward)
    x, weights = rows.of_tokens(given.x), None if weights is None else rows.of_pairs(weights)
    return rows.put_back(_in_sorted_rows(given._replace(x=x, mask_weights=weights, expert_ids=None, offs=rows.offs)))


def _in_sorted_rows(given: Given) -> Tensor:
    if 0 in (given.x.shape[0], given.out_features):
        return given.x.new_zeros(given.x.shape[0], given.out_features)
    assert given.offs is not None
    products = GroupedProducts(given.offs, given.x.shape[0])
    return formula.forward(given, products).masked_fill_(products.has_no_expert[:, None], 0)


def down(given: DownGiven) -> Tensor:
    """Run `mglu::experts_down`."""
    y, weight, ids, expert_weights, scale, weight_format = given
    (tokens, top_k, _), (experts, out_features, _) = y.shape, weight.shape
    if not tokens or not out_features:
        return y.new_zeros(tokens, out_features)
    rows = SortedRows(ids, experts, GatherRows.forward)
    products = GroupedProducts(rows.offs, tokens * top_k)
    weight = FORMATS[weight_format].dequantize(weight, scale, operand_dtype(y))
    terms = products.project(rows.of_pairs(y.flatten(0, 1)).to(weight.dtype), weight)
    terms.mul_(rows.of_pairs(expert_weights.view(-1, 1))).masked_fill_(products.has_no_expert[:, None], 0)
    return sum_in_order(rows.put_back(terms).view(tokens, top_k, out_features)).to(y.dtype)


def down_backward(grad_output: Tensor, given: DownGiven, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Run `mglu::experts_down_backward`."""
    y, weight, ids, expert_weights, *_ = given
    if not (y.numel() and weight.numel()):
        grad_y, grad_weight, grad_expert_weights = (grad.zero_() for grad in given.empty_gradients(needs))
        return grad_y, grad_weight, grad_expert_weights
    rows = SortedRows(ids, weight.shape[0], GatherRows.forward)
    factors = rows.of_pairs(expert_weights.view(-1, 1)).float()
    of_y, of_weight, of_factors = gradients_of_rows(
        lambda a, b: product(a, b.contiguous(), rows.offs),
        rows.of_tokens(grad_output),
        rows.of_pairs(y.flatten(0, 1)),
        weight,
        factors,
        needs,
    )
    has_expert = (torch.arange(ids.numel(), device=y.device) < rows.offs[-1])[:, None]

    def put_back(grad: Tensor | None, like: Tensor) -> Tensor:
        if grad is None:
            return like.new_empty(0)
        return rows.put_back(torch.where(has_expert, grad, 0)).view(like.shape).to(like.dtype)  # others are undefined

    return put_back(of_y, y), y.new_empty(0) if of_weight is None else of_weight, put_back(of_factors, expert_weights)


# --- Grouped products ------------------------------------------------------------------------------------------------


def product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm`, with torch where it does not wait for the GPU, else with our kernels.

    Each expert multiplies its rows of a by its matrix of b, or its columns of a by its rows of b.
    """
    if not a.is_cuda or (_library_has_kernel(a) and _is_for_library(a) and _is_for_library(b)):
        return F.grouped_mm(a, b, offs=offs)
    from . import grouped  # imported here, because it imports Triton

    return grouped.products_over_rows(a.t(), b, offs) if b.dim() == 2 else grouped.grouped_products(a, b, offs)


def _library_has_kernel(a: Tensor) -> bool:
    major, _ = torch.cuda.get_device_capability(a.device)
    return a.dtype is torch.bfloat16 and major in _LIBRARY_ARCHITECTURES


def _is_for_library(matrices: Tensor) -> bool:
    """True if the rows or the columns of bfloat16 matrices are contiguous and all start at multiples of 16 bytes."""
    distance, step = sorted(matrices.stride()[-2:], reverse=True)
    return step == 1 and distance % 8 == 0 and matrices.data_ptr() % 16 == 0


def ascending(offs: Tensor, rows: int) -> Tensor:
    """Return valid ends unchanged, and change invalid ones, with which `grouped_mm` would read outside of the rows."""
    return offs.clamp(0, rows).cummax(0).values
