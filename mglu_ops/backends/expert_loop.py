"""Experts on a CPU: a loop over the experts that have rows, which runs the kernels of one layer for each.

The backend passes the function that prepares one layer. An expert without rows costs no time, except in `backward`,
which fills the gradients of that expert with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor

from ..expert_calls import DownArguments, ExpertArguments, ExpertCall, sort_pairs
from ..layer_call import LayerArguments, LayerCall, Layout
from .base import (
    GroupedBackwardArguments,
    PreparedBackward,
    PreparedCall,
    PreparedForwardTrain,
)
from .composite import sum_dtype

P = TypeVar("P")

_ROWS_KEPT = 1024
"""The capacity of the cache of prepared layers. Its key is an expert's number of rows."""


def layers(prepare: Callable[[LayerCall], P], call: ExpertCall) -> Callable[[int], P]:
    """Return a cached function from an expert's number of rows to the prepared call of its layer.

    `prepare` is the backend's method that prepares one layer.
    """
    layer = call.layer
    if not call.is_sorted:  # rows are gathered, so they are contiguous
        layer = replace(layer, x=Layout((layer.in_features, 1)))
        if layer.mask_weights_dtype is not None:
            layer = replace(layer, mask_weights=Layout((layer.n_masks, 1)))
    return lru_cache(_ROWS_KEPT)(lambda rows: prepare(replace(layer, leading=(rows,))))


def forward(layers: Callable[[int], PreparedCall], call: ExpertCall, given: ExpertArguments) -> Tensor:
    """Run `experts_forward` or `grouped_forward`."""
    out = given.x.new_zeros(call.rows, call.layer.out_features)
    for expert, rows in _rows_of_experts(given.routing, call):
        one = _layer(given, expert, rows, call.top_k or 1)
        out[rows] = layers(len(one.x))(one)
    return torch.ops.aten._unsafe_view(out, call.result_shape)  # not a view, see `Composite.prepare`


def down(product: Callable[[int, Tensor], Tensor], given: DownArguments) -> Tensor:
    """Run `experts_down`. `product(expert, rows)` multiplies rows of y by the transposed weight of an expert."""
    y, weight, ids, expert_weights, *_ = given
    (tokens, top_k, d), (experts, out_features, _), dtype = y.shape, weight.shape, sum_dtype(y.dtype)
    terms = y.new_zeros(tokens * top_k, out_features, dtype=dtype)
    rows_of_y, weights = y.view(tokens * top_k, d), expert_weights.view(tokens * top_k, 1).to(dtype)
    for expert, rows in pairs_of_experts(ids, experts):
        terms[rows] = product(expert, rows_of_y[rows]) * weights[rows]
    return sum_in_order(terms.view(tokens, top_k, out_features)).to(y.dtype)


def sum_in_order(terms: Tensor) -> Tensor:
    """`sum_k terms[t, k]` in the order of k."""
    total = terms[:, 0].clone(memory_format=torch.contiguous_format)
    for k in range(1, terms.shape[1]):
        total += terms[:, k]
    return total


def forward_train(
    layers: Callable[[int], PreparedForwardTrain], call: ExpertCall, given: ExpertArguments
) -> tuple[Tensor, Tensor]:
    """Run `grouped_forward_train`."""
    layer = call.layer
    entries = (1 if layer.mask_weights_dtype is None else 2) * layer.n_masks + 1
    out = given.x.new_zeros(call.result_shape)
    partials = given.x.new_zeros(call.rows, entries, layer.out_features)
    for expert, rows in _slices_of_experts(given.routing, call.rows):
        one = _layer(given, expert, rows, 1)
        out[rows], partials[rows] = layers(len(one.x))(one)
    return out, partials


def backward(
    layers: Callable[[int], PreparedBackward], arguments: GroupedBackwardArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `grouped_backward`."""
    _, x, weight, packed_masks, offs, _, needs, logits_dtype, mask_weights_dtype = arguments
    (experts, d, h), n_masks = weight.shape, packed_masks.shape[-1]
    grad_x = x.new_zeros(x.shape if needs[0] else 0)
    grad_weight = x.new_zeros(weight.shape if needs[1] else 0)
    grad_logits = x.new_zeros((experts, n_masks, d, h) if logits_dtype else 0, dtype=logits_dtype or x.dtype)
    grad_mask_weights = x.new_zeros(
        (x.shape[0], n_masks) if mask_weights_dtype else 0, dtype=mask_weights_dtype or x.dtype
    )
    for expert, rows in _slices_of_experts(offs, x.shape[0]):
        grads = layers(rows.stop - rows.start)(arguments.of_expert(expert, rows))
        for grad, expert_grad in zip((grad_x, grad_mask_weights), grads[::3], strict=True):
            if grad.numel():
                grad[rows] = expert_grad
        for grad, expert_grad in zip((grad_weight, grad_logits), grads[1:3], strict=True):
            if grad.numel():
                grad[expert] = expert_grad
    return grad_x, grad_weight, grad_logits, grad_mask_weights


def _layer(given: ExpertArguments, expert: int, rows: slice | Tensor, top_k: int) -> LayerArguments:
    """The arguments of an expert's layer for its rows; each token has `top_k` rows."""
    x = given.x[rows] if isinstance(rows, slice) else given.x[rows // top_k]
    return given.of_expert(expert, x, None if given.mask_weights is None else given.mask_weights[rows])


def _rows_of_experts(index: Tensor, call: ExpertCall) -> Iterator[tuple[int, slice | Tensor]]:
    """Yield each expert that has rows, and its rows."""
    if call.is_sorted:
        yield from _slices_of_experts(index, call.rows)
    else:
        yield from pairs_of_experts(index, call.experts)


def pairs_of_experts(expert_ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that has rows, and the numbers of its rows in ascending order."""
    pairs, offs = sort_pairs(expert_ids, experts)
    for expert, rows in _slices_of_experts(offs, expert_ids.numel()):
        yield expert, pairs[rows]


def _slices_of_experts(offs: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and its slice of the rows, which are sorted by expert."""
    ends = offs.clamp(0, rows).cummax(0).values.tolist()
    for expert, (first, end) in enumerate(pairwise((0, *ends))):
        if first < end:
            yield expert, slice(first, end)
