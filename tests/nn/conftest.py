"""Tests of modules start from the same seed, with an empty compiler cache."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
