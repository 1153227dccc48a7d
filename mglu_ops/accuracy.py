"""The relative error of a result, and the largest error that the demo, the tuning and the benchmarks accept."""

from __future__ import annotations

import torch
from torch import Tensor

ERROR_BUDGET = {torch.float16: 3e-3, torch.bfloat16: 2.4e-2, torch.float32: 4e-6}
"""The largest accepted relative error, by the dtype of the matrix products: about three times the measured errors."""


def relative_error(result: Tensor, expected: Tensor) -> float:
    """`||result - expected|| / ||expected||` in float64, or `||result - expected||` if `expected` is zero.

    NaN in either tensor gives NaN, which exceeds every budget if the comparison is `error <= budget`.
    """
    result, expected = result.detach().double(), expected.detach().double()
    norm, error = expected.norm(), (result - expected).norm()
    return float(error / norm) if norm > 0 else float(error)
