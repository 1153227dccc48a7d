"""Experts on a CPU: a loop that runs the kernels of one layer for each expert that has rows. The host reads the ids.

Backends give it how they prepare one layer. An expert without rows costs nothing, except in
`backward`, where its gradients are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..expert_calls import DownArguments, ExpertArguments, ExpertCall, sort_pairs
from ..layer_call import LayerArguments, LayerCall, Layout
from .base import (
    BackwardArguments,
    GroupedBackwardArguments,
    PreparedBackward,
    PreparedCall,
    PreparedForwardTrain,
)
from .composite import sum_dtype

Rows = slice | Tensor
P = TypeVar("P")

_ROWS_KEPT = 1024
"""The most numbers of rows for which the kernels of one layer stay prepared."""


def layers(prepare: Callable[[LayerCall], Callable[[P], Any]], call: ExpertCall) -> Callable[[int], Callable[[P], Any]]:
    """A function of an expert's rows that returns what runs its layer; `prepare` is that of a backend for one layer."""
    layer = call.layer
    if not call.is_sorted:  # then rows are gathered
        layer = replace(layer, x=Layout((layer.in_features, 1)))
        if layer.mask_weights_dtype is not None:
            layer = replace(layer, mask_weights=Layout((layer.n_masks, 1)))
    return lru_cache(_ROWS_KEPT)(lambda rows: prepare(replace(layer, leading=(rows,))))


def forward(layers: Callable[[int], PreparedCall], call: ExpertCall, given: ExpertArguments) -> Tensor:
    """The result of `experts_forward` or `grouped_forward`."""
    out = given.x.new_zeros(call.rows, call.layer.out_features)
    for expert, rows in rows_of_experts(given.expert_ids, given.offs, call.experts, call.rows):
        layer = _layer(given, expert, rows, call.top_k or 1)
        out[rows] = layers(len(layer.x))(layer)
    return torch.ops.aten._unsafe_view(out, call.result_shape)  # not a view, as in `composite`


def down(product: Callable[[int, Tensor], Tensor], given: DownArguments) -> Tensor:
    """The result of `experts_down`; `product` returns the wide product of an expert's transposed weight and its rows."""
    y, weight, ids, expert_weights, *_ = given
    (tokens, top_k, d), (experts, out_features, _) = y.shape, weight.shape
    products = y.new_zeros(tokens * top_k, out_features, dtype=sum_dtype(y.dtype))
    for expert, rows in rows_of_experts(ids, None, experts, tokens * top_k):
        products[rows] = product(expert, y.view(tokens * top_k, d)[rows])
    return weighted_sum(products.view(tokens, top_k, out_features), expert_weights).to(y.dtype)


def weighted_sum(products: Tensor, expert_weights: Tensor) -> Tensor:
    """`sum_k expert_weights[t, k] * products[t, k]` in the order of k and in the dtype of the products."""
    weights = expert_weights.to(products.dtype)
    total = products[:, 0] * weights[:, :1]
    for k in range(1, products.shape[1]):
        total.addcmul_(products[:, k], weights[:, k : k + 1])
    return total


def forward_train(
    layers: Callable[[int], PreparedForwardTrain], call: ExpertCall, given: ExpertArguments
) -> tuple[Tensor, Tensor]:
    """The result and the partials of `grouped_forward_train`."""
    layer = call.layer
    entries = (1 if layer.mask_weights_dtype is None else 2) * layer.n_masks + 1
    out = given.x.new_zeros(call.result_shape)
    partials = given.x.new_zeros(call.rows, entries, layer.out_features)
    for expert, rows in rows_of_experts(None, given.offs, call.experts, call.rows):
        one = _layer(given, expert, rows, 1)
        out[rows], partials[rows] = layers(len(one.x))(one)
    return out, partials


def backward(
    layers: Callable[[int], PreparedBackward], arguments: GroupedBackwardArguments
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of `grouped_backward`."""
    grad_output, x, weight, packed_masks, offs, partials, needs, logits_dtype, mask_weights_dtype = arguments
    (experts, d, h), n_masks = weight.shape, packed_masks.shape[-1]
    of_x = x.new_zeros(x.shape if needs[0] else 0)
    of_weight = x.new_zeros(weight.shape if needs[1] else 0)
    of_logits = x.new_zeros((experts, n_masks, d, h) if logits_dtype else 0, dtype=logits_dtype or x.dtype)
    of_mask_weights = x.new_zeros(
        (x.shape[0], n_masks) if mask_weights_dtype else 0, dtype=mask_weights_dtype or x.dtype
    )
    for expert, rows in rows_of_experts(None, offs, experts, x.shape[0]):
        given = (grad_output[rows], x[rows], weight[expert], packed_masks[expert], partials[rows])
        found = layers(len(given[0]))(BackwardArguments(*given, needs, logits_dtype, mask_weights_dtype))
        for gradient, index, of_expert in zip(
            (of_x, of_weight, of_logits, of_mask_weights), (rows, expert, expert, rows), found, strict=True
        ):
            if gradient.numel():
                gradient[index] = of_expert
    return of_x, of_weight, of_logits, of_mask_weights


def _layer(given: ExpertArguments, expert: int, rows: Rows, top_k: int) -> LayerArguments:
    """The arguments of an expert's layer for its rows, of which each token has `top_k`."""
    x = given.x[rows] if isinstance(rows, slice) else given.x[rows // top_k]
    return given.of_expert(expert, x, None if given.mask_weights is None else given.mask_weights[rows])


def rows_of_experts(
    expert_ids: Tensor | None, offs: Tensor | None, experts: int, rows: int
) -> Iterator[tuple[int, Rows]]:
    """Yield the experts that have rows, with these rows: a slice if they are sorted."""
    pairs = None
    if offs is None:
        assert expert_ids is not None
        pairs, offs = sort_pairs(expert_ids, experts)
    ends = offs.clamp(0, rows).cummax(0).values.tolist()
    for expert, (first, end) in enumerate(pairwise((0, *ends))):
        if first < end:
            yield expert, slice(first, end) if pairs is None else pairs[first:end]
