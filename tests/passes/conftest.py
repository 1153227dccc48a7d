"""Fixtures of the tests of the pass."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch._inductor.config as inductor_config

import mglu_ops


@pytest.fixture
def unchanged_inductor() -> Iterator[None]:
    """Start and end a test with Inductor's own slot for passes, an empty report, and nothing compiled."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    slot, report = inductor_config.pre_grad_custom_pass, mglu_ops.fusion_report()
    assert slot is None
    report.fused.clear(), report.missed.clear()
    report.graphs = 0
    with inductor_config.patch({"fx_graph_cache": False}):
        yield
    mglu_ops.disable_fusion()
    inductor_config.pre_grad_custom_pass = slot
    torch._dynamo.reset()
