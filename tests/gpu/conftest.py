"""Fixtures of the tests on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seed the random numbers, and report a fault of a kernel in the test that caused it."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Run float32 GEMMs in float32 (not TF32), as the error limits assume."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
