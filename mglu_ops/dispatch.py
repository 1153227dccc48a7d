"""Which backend runs a call: a pure function of the problem, and the three calls that obey it.

Nothing is tuned or timed at run time. `backend=` overrides the choice, for tests and for tuning.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backends import composite


def forward(x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None) -> Tensor:
    return composite.forward(x, weight, packed_masks, activation, route_weights)


def forward_train(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    return composite.forward_train(x, weight, packed_masks, activation, route_weights)


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    gates: Tensor,
    values: Tensor,
    activation: str,
    route_weights: Tensor | None,
    needs: Sequence[bool],
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return composite.backward(
        grad_output, x, weight, packed_masks, gates, values, activation, route_weights, needs, logits_dtype
    )
