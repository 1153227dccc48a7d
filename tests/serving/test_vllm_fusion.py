"""The fusion pass inside vLLM. The tests configure Inductor as vLLM does, but do not need vLLM."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import standalone_compile
from torch.fx import GraphModule

import mglu_ops
from compile_passes.entry import current_pass
from mglu_ops.vllm.plugin import FUSION, enable_fusion_from_environment
from tests.support.budgets import relative_error
from tests.support.programs.compiled import SAME, Recorder, layer, trace

WITHOUT_PASSES = "did not run the passes before autograd .*VLLM_ENABLE_PREGRAD_PASSES=0"


@pytest.fixture(autouse=True)
def _no_fusion_before_and_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    monkeypatch.delenv(FUSION, raising=False)
    monkeypatch.setenv("VLLM_DISABLE_COMPILE_CACHE", "0")
    yield
    mglu_ops.disable_fusion()
    torch._dynamo.reset()


def test_a_graph_that_vllm_compiles_with_its_own_pass_is_fused() -> None:
    """For each compilation, vLLM captures the graph and puts its own pass into Inductor's `pre_grad_custom_pass`."""
    theirs = Recorder()

    def compile_as_vllm(graph: GraphModule, inputs: list[Any]) -> Any:
        patches = {"pre_grad_custom_pass": theirs, "fx_graph_cache": False}
        return standalone_compile(graph, inputs, dynamic_shapes="from_graph", options={"config_patches": patches})

    model, x = layer(), torch.randn(3, 16)
    with torch.no_grad(), mglu_ops.fusion(strict=True) as report:
        result = torch.compile(model, backend=compile_as_vllm, fullgraph=True)(x)
        assert relative_error(result, model(x)) <= SAME
    assert len(theirs.seen) == len(report.fused) == 1


@pytest.mark.parametrize("strict", [False, True])
def test_a_vllm_that_switches_the_passes_off_is_named(strict: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the variable set to 0, vLLM replaces the Inductor function that runs the passes."""
    monkeypatch.setattr("torch._inductor.compile_fx._recursive_pre_grad_passes", lambda graph, _: graph)
    mglu_ops.enable_fusion(strict=strict)
    expected = (
        pytest.raises(Exception, match=WITHOUT_PASSES) if strict else pytest.warns(UserWarning, match=WITHOUT_PASSES)
    )
    with expected:
        trace(layer())


@pytest.mark.parametrize("value", ["1", "strict"])
def test_the_variable_enables_fusion_and_switches_vllms_cache_off(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUSION, value)
    enable_fusion_from_environment()
    fusion_pass = current_pass()
    assert fusion_pass is not None
    assert fusion_pass.strict == (value == "strict")
    assert os.environ["VLLM_DISABLE_COMPILE_CACHE"] == "1"


def test_without_the_variable_nothing_is_enabled() -> None:
    enable_fusion_from_environment()
    assert current_pass() is None
    assert os.environ["VLLM_DISABLE_COMPILE_CACHE"] == "0"


def test_fusion_that_would_not_reach_vllms_processes_is_warned_about() -> None:
    mglu_ops.enable_fusion()
    with pytest.warns(UserWarning, match="set MGLU_VLLM_FUSION=1"):
        enable_fusion_from_environment()


def test_another_value_of_the_variable_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FUSION, "yes")
    with pytest.raises(ValueError, match="MGLU_VLLM_FUSION: got 'yes', must be '1' or 'strict'"):
        enable_fusion_from_environment()
