"""Sorts rows by expert without reading a value on the host."""

from __future__ import annotations

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
    ids, pairs = ids.to(_sorted_dtype(experts, ids.dtype)).sort(stable=True)
    each = torch.arange(experts, dtype=ids.dtype, device=ids.device)
    return pairs, torch.searchsorted(ids, each, right=True, out_int32=True)


def _sorted_dtype(experts: int, dtype: torch.dtype) -> torch.dtype:
    """The dtype to which ids are cast before sorting. A radix sort passes over memory once for each byte of an id."""
    return torch.int16 if experts <= torch.iinfo(torch.int16).max else dtype


def inverse_of(pairs: Tensor) -> Tensor:
    """The inverse of the permutation `pairs`: the position of each pair in it."""
    return torch.empty_like(pairs).scatter(0, pairs, torch.arange(pairs.shape[0], device=pairs.device))
