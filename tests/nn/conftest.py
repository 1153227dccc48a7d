"""Every test of modules starts from the same seed, and compiles anew."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
