"""How far a result is from the right one, and how far it may be: for the demo, for tuning and for the benchmarks."""

from __future__ import annotations

import torch
from torch import Tensor

ERROR_BUDGET = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.float32: 4e-6}
"""The largest relative error of a result, by the dtype of its matrix products: about three times measured errors."""


def relative_error(result: Tensor, expected: Tensor) -> float:
    """`||result - expected|| / ||expected||` in float64; the norm of the difference where `expected` is zero.

    NaN in either tensor gives NaN, which is not `<=` any budget.
    """
    result, expected = result.detach().double(), expected.detach().double()
    norm, error = expected.norm(), (result - expected).norm()
    return float(error / norm) if norm > 0 else float(error)
