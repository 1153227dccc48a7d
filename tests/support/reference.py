"""The oracle of the tests: Algorithm 2 of arXiv 2506.23225 as written, in float64.

It is ordinary PyTorch, so its gradients come from autograd and not from the formulas of this package.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.activations import get_activation


def forward(
    x: Tensor, weight: Tensor, masks: Tensor, activation: str = "silu", mask_weights: Tensor | None = None
) -> Tensor:
    """`sum_i r_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T)` in float64.

    Args:
        x: `[..., in_features]`.
        weight: `[out_features, in_features]`.
        masks: `[n_masks, out_features, in_features]`; bool, or floating if the masks need a gradient.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        mask_weights: `[..., n_masks]` or None.

    Returns:
        float64 `[..., out_features]`.
    """
    act = get_activation(activation).forward
    x, weight, masks = x.double(), weight.double(), masks.double()
    result = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.float64, device=x.device)
    for i, mask in enumerate(masks):
        gate = F.linear(x, weight * mask)
        value = F.linear(x, weight * (1.0 - mask))
        term = act(gate) * value
        if mask_weights is not None:
            term = mask_weights[..., i : i + 1].double() * term
        result = result + term
    return result
