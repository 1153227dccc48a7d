"""Fixtures for the tests of the pass."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch._inductor.config as inductor_config
from torch._inductor import compile_fx
from torch._subclasses.fake_tensor import FakeTensorMode

import mglu_ops
from tests.support.programs.compiled import interpreted


@pytest.fixture(scope="session", autouse=True)
def _no_latency_of_guards() -> Iterator[None]:
    """Skip Dynamo's measurement of guards, which Dynamo only logs and which takes a third of a test's time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _fake_tensors_in_the_main_thread() -> None:
    """Use fake tensors in the main thread first.

    Without a GPU, torch 2.11 crashes when the first thread that used fake tensors ends.
    """
    with FakeTensorMode():
        pass


@pytest.fixture
def without_codegen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Inductor interpret each graph instead of generating code. Passes on the graph before autograd still run."""
    monkeypatch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=interpreted))


@pytest.fixture
def unchanged_inductor() -> Iterator[None]:
    """Start and end a test with an empty slot for passes in Inductor, an empty report, and nothing compiled."""
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
