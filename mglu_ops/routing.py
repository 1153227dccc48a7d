"""Sorts rows by expert without reading a value on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def sort_pairs(expert_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """Sort the (token, expert) pairs by expert, stably, without reading a value on the host.

    Args:
        expert_ids: int32 or int64 `[T, K]`. The number of pair `[t, k]` is `t K + k`.
        experts: E, the number of experts.

    Returns:
        The sorted numbers of the pairs, int64 `[T K]`, and offs, int32 `[E]`: the end of each expert's pairs. Pairs
        whose id is not an expert come last.
    """
    ids = expert_ids.flatten()
    ids = torch.where((ids >= 0) & (ids < experts), ids, experts)
    # A radix sort passes over memory once for each byte of an id.
    ids, pairs = ids.to(torch.int16 if experts <= torch.iinfo(torch.int16).max else ids.dtype).sort(stable=True)
    each = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return pairs, torch.searchsorted(ids, each, right=True, out_int32=True)


def inverse_of(pairs: Tensor) -> Tensor:
    """The inverse of the permutation `pairs`: the position of each pair in it."""
    return torch.empty_like(pairs).scatter(0, pairs, torch.arange(pairs.shape[0], device=pairs.device))


class SortedRows:
    """The rows of experts in the order of their experts, without reading a value on the host.

    Attributes:
        pairs: the sorted numbers of the (token, expert) pairs, as `sort_pairs` returns them.
        offs: the end of each expert's rows, int32 `[E]`.
    """

    def __init__(self, expert_ids: Tensor, experts: int, apply: Callable[..., Tensor] | None = None) -> None:
        """Sort the pairs of ids `[T, K]`. `apply` replaces `GatherRows.apply`, which autograd records."""
        self.pairs, self.offs = sort_pairs(expert_ids, experts)
        self._places, self._top_k = inverse_of(self.pairs), expert_ids.shape[1]
        self._apply = GatherRows.apply if apply is None else apply

    def of_tokens(self, rows: Tensor) -> Tensor:
        """Gather rows `[T, ...]` of tokens."""
        return self._apply(rows, self.pairs, self._places, self._top_k)

    def of_pairs(self, rows: Tensor) -> Tensor:
        """Gather rows `[T K, ...]`, one for each pair."""
        return self._apply(rows, self.pairs, self._places, 1)

    def put_back(self, rows: Tensor) -> Tensor:
        """Return sorted rows in the order of the pairs, `[T K, ...]`."""
        return self._apply(rows, self._places, self.pairs, 1)


class GatherRows(torch.autograd.Function):
    """Gather the rows `x[order // copies]`, where `order` is a permutation of `copies * len(x)` indices.

    The backward pass gathers the gradient with the inverse permutation and sums over the copies of a row. Autograd's
    own gradient of indexing adds rows with atomic operations, in an order that changes from call to call.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
        return x[order if copies == 1 else order // copies]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, _, inverse, copies = inputs
        ctx.sizes = x.shape[0], copies
        ctx.save_for_backward(inverse)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        grad = grad[inverse]
        return grad if ctx.sizes[1] == 1 else grad.view(*ctx.sizes, *grad.shape[1:]).sum(1), None, None, None
