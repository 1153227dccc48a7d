"""Calls that are like an earlier one: what tells them, and how many are kept."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .. import batch_invariance

Key = tuple[object, ...]

CALLS_KEPT = 4096
"""Of the calls that are remembered; where there are more kinds of them, all are forgotten."""


def key_of(x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None) -> Key:
    """All that the checks of a call, its backend and its plan depend on: metadata, and where the pointers lie between
    multiples of 16 bytes; of tensors of any rank. Strides stand for themselves only where shapes do not tell them.
    """
    route: Key | None = None
    if route_weights is not None:
        route = (route_weights.dtype, route_weights.device, route_weights.shape, route_weights.stride())
    masks = packed_masks
    return (
        batch_invariance.enabled, activation, route,
        x.dtype, x.device, x.shape, x.is_contiguous() or x.stride(), x.data_ptr() & 15,
        weight.dtype, weight.device, weight.shape, weight.is_contiguous() or weight.stride(), weight.data_ptr() & 15,
        masks.dtype, masks.device, masks.shape, masks.is_contiguous() or masks.stride(), masks.data_ptr() & 15,
    )  # fmt: skip


def remember(calls: dict[Any, Any], key: Any, call: Any) -> None:
    """Keep a call, and forget all others if they are too many."""
    if len(calls) >= CALLS_KEPT:
        calls.clear()
    calls[key] = call
