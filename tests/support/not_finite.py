"""Checks a result by the rule of `mglu_ops.ops` for arguments with NaN or infinity."""

from __future__ import annotations

import torch
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS


def assert_right_or_not_finite(
    y: Tensor, x: Tensor, weight: Tensor, masks: Tensor, activation: str, mask_weights: Tensor | None = None
) -> None:
    """Check y `[tokens, out_features]` of a layer with bool masks `[n_masks, out_features, in_features]`.

    An element must be NaN if its row of x, of W or of the mask weights has a NaN. Finite elements must be close to the
    formula, in which gates and values skip the weights that their mask excludes.
    """
    act = ACTIVATIONS[activation].forward
    products = x.double()[:, None, :] * weight.double()  # [tokens, out_features, in_features]
    exact, size = torch.zeros(y.shape, dtype=torch.float64), torch.zeros(y.shape, dtype=torch.float64)
    for i, mask in enumerate(masks.cpu()):
        gate, value = (torch.where(part, products.cpu(), 0).sum(-1) for part in (mask, ~mask))
        term = act(gate) * value
        if mask_weights is not None:
            term = term * mask_weights.double().cpu()[:, i : i + 1]
        exact, size = exact + term, size + term.abs()
    y = y.detach().cpu().double()
    reads_nan = x.isnan().any(-1).cpu()[:, None] | weight.isnan().any(-1).cpu()
    if mask_weights is not None:
        reads_nan = reads_nan | mask_weights.isnan().any(-1).cpu()[:, None]
    assert y[reads_nan].isnan().all(), "a NaN is hidden"
    number = y.isfinite()
    wrong = number & ~((y - exact).abs() <= 0.05 * (1 + size))
    assert not wrong.any(), f"{y[wrong]} must be {exact[wrong]}, or not finite"
    ordinary = (products.abs() < 1e4).all(-1).cpu()
    if mask_weights is not None:
        ordinary &= mask_weights.isfinite().all(-1).cpu()[:, None]
    assert number[ordinary].all(), "a number is missing where all is finite"
