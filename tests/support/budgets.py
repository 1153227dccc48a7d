"""The tolerances of every test, by dtype, and the comparison of a result with the float64 oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from mglu_ops import accuracy

# The largest relative error ||result - oracle|| / ||oracle|| by dtype. A budget allows a few roundings (of epsilon / 2
# each) in the gate, value, activation, product and sum; measured errors are about a third of the budget. This table is
# separate from mglu_ops/accuracy.py, because a test must not take its tolerance from the code it tests.
BUDGET = {
    torch.float64: 1e-14,
    torch.float32: 4e-6,
    torch.float16: 3e-3,
    torch.bfloat16: 2.4e-2,
}

# A result may have at most this many times the error of the naive layer in the same dtype.
NAIVE_FACTOR = 1.5

# If a gate or a value is a difference of sums over a whole row, it has at most this additional error, in units of
# `sum_k |x_k W_k|`. The bound holds for float32 sums of up to 1024 products, in any kernel's order of addition.
DIFFERENCE_ERROR = 2.0**-17
# The CPU kernels do not use a difference that has lost more than 9 bits. A difference that they use has at most this
# relative error in float32, and no error in 16 bits (csrc/cpu/small_values.h).
SMALL_DIFFERENCE_ERROR = 2.0**-15


def relative_error(result: Tensor, oracle: Tensor) -> float:
    """`||result - oracle|| / ||oracle||` in float64: NaN if a tensor has a NaN; `||result||` if the oracle is zero."""
    assert result.shape == oracle.shape, f"shape {tuple(result.shape)}, oracle {tuple(oracle.shape)}"
    return accuracy.relative_error(result.cpu(), oracle.cpu())


def assert_matches(result: Tensor, oracle: Tensor, dtype: torch.dtype | None = None, what: str = "result") -> None:
    """Assert that the relative error of `result` is within the budget of its dtype, or of `dtype`."""
    budget = BUDGET[dtype or result.dtype]
    error = relative_error(result, oracle)
    assert error <= budget, f"{what}: relative error {error:.3g} above the budget {budget:.3g}"
