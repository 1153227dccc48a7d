"""A loop in Python over the experts that have rows.

It runs the backend `composite`, and of the backend `cpu` what csrc/cpu does not compute. The backend passes the
function that prepares one layer. An expert without rows costs no time, except in `backward`, which fills the gradients
of that expert with zeros. The host reads which rows each expert has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache, partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..call import Call, Layout
from ..given import BackwardGiven, DownGiven, Given
from ..routing import sort_pairs
from .base import Backend, Prepared, Task
from .experts_down import sum_in_order
from .formula import sum_dtype

_LAYERS_KEPT, _ROWS_KEPT = 64, 256
"""The most layers in the cache, and the most numbers of rows for which each is prepared. A prepared layer of the CPU
kernels takes about 1 KB, so a full cache takes less than 20 MB."""


def prepare(backend: Backend, task: Task, call: Call, launch: Any = None) -> Prepared:
    """Prepare a task over experts, other than `down`, with a backend that can prepare this task for one layer."""
    runs: dict[str, Callable[..., Any]] = {"forward": _forward, "train": _forward_train, "backward": _backward}
    return partial(runs[task], layers(backend, task, call, launch), call)


def layers(backend: Backend, task: Task, call: Call, launch: Any = None) -> Callable[[int], Prepared]:
    """Return a cached function from an expert's number of rows to the prepared task of its layer."""
    one = call.of_rows(1)
    if not call.routed.is_sorted:  # rows are gathered, so they are contiguous
        one = replace(one, x=Layout((one.in_features, 1)))
        if one.mask_weights_dtype is not None:
            one = replace(one, mask_weights=Layout((one.n_masks, 1)))
    return _layers(backend, task, one, launch)


@lru_cache(_LAYERS_KEPT)
def _layers(backend: Backend, task: Task, one: Call, launch: Any) -> Callable[[int], Prepared]:
    """Return the function of `layers` for the layer of one expert. Calls with any number of tokens share it."""
    return lru_cache(_ROWS_KEPT)(lambda rows: backend.prepare(task, one.of_rows(rows), launch))


def _forward(layers: Callable[[int], Prepared], call: Call, given: Given) -> Tensor:
    out = given.x.new_zeros(call.tokens, call.out_features)
    for expert, rows in _rows_of_experts(given, call):
        one = _layer(given, expert, rows, call.routed.top_k or 1)
        out[rows] = layers(len(one.x))(one)
    return torch.ops.aten._unsafe_view(out, call.result_shape)  # not a view; `composite._layer` says why


def down(product: Callable[[int, Tensor], Tensor], given: DownGiven) -> Tensor:
    """Run `experts_down`. `product(expert, rows)` multiplies rows of y by the transposed weight of an expert."""
    y, weight, ids, expert_weights, *_ = given
    (tokens, top_k, d), (experts, out_features, _), dtype = y.shape, weight.shape, sum_dtype(y.dtype)
    terms = y.new_zeros(tokens * top_k, out_features, dtype=dtype)
    rows_of_y, weights = y.view(tokens * top_k, d), expert_weights.view(tokens * top_k, 1).to(dtype)
    for expert, rows in pairs_of_experts(ids, experts):
        terms[rows] = product(expert, rows_of_y[rows]) * weights[rows]
    return sum_in_order(terms.view(tokens, top_k, out_features)).to(y.dtype)


def _forward_train(layers: Callable[[int], Prepared], call: Call, given: Given) -> tuple[Tensor, Tensor]:
    out = given.x.new_zeros(call.result_shape)
    partials = given.x.new_zeros(call.tokens, call.n_partials, call.out_features)
    for expert, rows in _rows_of_experts(given, call):
        one = _layer(given, expert, rows, 1)
        out[rows], partials[rows] = layers(len(one.x))(one)
    return out, partials


def _backward(
    layers: Callable[[int], Prepared], call: Call, given: BackwardGiven
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert given.offs is not None
    grad_x, grad_weight, grad_logits, grad_mask_weights = (grad.zero_() for grad in given.empty_gradients())
    for expert, rows in slices_of_experts(given.offs, call.tokens):
        grads = layers(rows.stop - rows.start)(given.of_expert(expert, rows))
        for grad, expert_grad in zip((grad_x, grad_mask_weights), grads[::3], strict=True):
            if grad.numel():
                grad[rows] = expert_grad
        for grad, expert_grad in zip((grad_weight, grad_logits), grads[1:3], strict=True):
            if grad.numel():
                grad[expert] = expert_grad
    return grad_x, grad_weight, grad_logits, grad_mask_weights


def _layer(given: Given, expert: int, rows: slice | Tensor, top_k: int) -> Given:
    """Return the arguments of an expert's layer for its rows of the result. Row r belongs to token `r // top_k`."""
    x = given.x[rows] if isinstance(rows, slice) else given.x[rows // top_k]
    return given.of_expert(expert, x, None if given.mask_weights is None else given.mask_weights[rows])


def _rows_of_experts(given: Given, call: Call) -> Iterator[tuple[int, slice | Tensor]]:
    """Yield each expert that has rows, and its rows."""
    if given.expert_ids is not None:
        yield from pairs_of_experts(given.expert_ids, call.routed.experts)
    elif given.offs is not None:
        yield from slices_of_experts(given.offs, call.tokens)


def pairs_of_experts(expert_ids: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    """Yield each expert that has rows, and the numbers of its rows in ascending order."""
    pairs, offs = sort_pairs(expert_ids, experts)
    for expert, rows in slices_of_experts(offs, expert_ids.numel()):
        yield expert, pairs[rows]


def slices_of_experts(offs: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """Yield each expert that has rows, and its slice of the rows, which are sorted by expert."""
    ends = offs.clamp(0, rows).cummax(0).values.tolist()
    for expert, (first, end) in enumerate(pairwise((0, *ends))):
        if first < end:
            yield expert, slice(first, end)
