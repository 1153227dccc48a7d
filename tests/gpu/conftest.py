"""Fixtures of the GPU tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    """Seed random numbers, and synchronize after each test so that a kernel's fault is reported in the right test."""
    torch.manual_seed(0)
    yield
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


@pytest.fixture
def exact_float32() -> Iterator[None]:
    """Disable TF32 for float32 GEMMs, as the error limits assume."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before
