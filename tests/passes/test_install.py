"""Turning the pass on and off: settings, strict mode, passes of other libraries."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._dynamo.callback import CallbackTrigger, callback_handler

import mglu_ops
from compile_passes import fusion
from compile_passes.entry import NoFusion
from compile_passes.fusion import FusionError, FusionPass
from compile_passes.report import FusionReport
from tests.support.budgets import relative_error
from tests.support.programs.compiled import SAME, Recorder, layer, real_mask, run, soft_mask, trace, traced_by_inductor
from tests.support.programs.graphs import assert_same, model_results

pytestmark = pytest.mark.usefixtures("unchanged_inductor")

UNUSED = r"did not run the passes before autograd \(torch._inductor.config.use_pre_grad_passes is False\)"


def test_plain_compile() -> None:
    model, x = layer(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report:
        found = model_results(model, x, torch.compile(model))
    assert_same(found, model_results(model, x), SAME)
    assert [site.operator for site in report.fused] == ["forward_ste"]
    assert report.missed == []


def test_enable_and_disable() -> None:
    trace(layer())
    assert mglu_ops.fusion_report().graphs == 0
    report = mglu_ops.enable_fusion()
    assert report is mglu_ops.fusion_report()
    trace(layer())
    assert (len(report.fused), report.graphs) == (1, 1)
    mglu_ops.disable_fusion()
    trace(layer())
    assert report.graphs == 1
    mglu_ops.disable_fusion()  # does nothing
    with pytest.raises(ZeroDivisionError), mglu_ops.fusion(strict=True) as report:
        1 / 0  # noqa: B018 (an error of user code inside the block)
    trace(layer())
    assert report.graphs == 0


def test_settings_stay_unchanged() -> None:
    def settings() -> dict[str, Any]:
        return {k: v for k, v in inductor_config.get_config_copy().items() if k.startswith("pre_grad")}

    before = settings()
    mglu_ops.enable_fusion(strict=True)
    with mglu_ops.fusion():
        trace(layer())
        assert settings() == before
    with pytest.raises(Exception, match="strict fusion"):
        trace(soft_mask())
    assert settings() == before


def test_enabling_twice_replaces_the_options() -> None:
    mglu_ops.enable_fusion()
    mglu_ops.enable_fusion(assume_binary=True)
    report = mglu_ops.fusion_report()
    trace(real_mask())
    assert (len(report.fused), report.graphs) == (1, 1)
    with pytest.raises(TypeError, match="strict: got 1"):
        mglu_ops.enable_fusion(strict=1)  # type: ignore[arg-type]
    trace(real_mask())
    assert (len(report.fused), report.graphs) == (2, 2)


def test_blocks_nest_and_have_reports_of_their_own() -> None:
    mglu_ops.enable_fusion()
    with mglu_ops.fusion() as outer:
        trace(layer())
        with mglu_ops.fusion(assume_binary=True) as inner:
            trace(real_mask())
        trace(real_mask())
    trace(layer())
    assert (len(inner.fused), len(inner.missed)) == (1, 0)
    assert (len(outer.fused), len(outer.missed)) == (1, 1)
    assert (len(mglu_ops.fusion_report().fused), mglu_ops.fusion_report().graphs) == (1, 1)


def test_enabling_and_disabling_inside_a_block() -> None:
    """The options of a block hold until its end. Enabling or disabling fusion in a block takes effect afterwards."""
    mglu_ops.enable_fusion()
    with mglu_ops.fusion() as block:
        mglu_ops.disable_fusion()
        trace(layer())
    trace(layer())
    assert (block.graphs, mglu_ops.fusion_report().graphs) == (1, 0)
    with mglu_ops.fusion() as block:
        mglu_ops.enable_fusion()
        trace(layer())
    trace(layer())
    assert (block.graphs, mglu_ops.fusion_report().graphs) == (1, 1)


def test_enabling_leaves_the_callbacks_of_others() -> None:
    """`enable_fusion` keeps callbacks of other libraries, and works while a backward pass is being compiled.

    `torch._dynamo.reset` would remove the callbacks, and raise an error during such a compilation.
    """
    calls: list[Any] = []
    callback_handler.register_start_callback(calls.append)
    with callback_handler.install_callbacks(CallbackTrigger.LAZY_BACKWARD, "0"):
        mglu_ops.enable_fusion()
    assert callback_handler.start_callbacks == [calls.append]
    assert len(calls) == 1


def test_a_block_that_compiles_nothing_says_so() -> None:
    compiled, x = torch.compile(layer(), backend=traced_by_inductor), torch.randn(3, 16)
    compiled(x)
    with pytest.warns(UserWarning, match="no graph was compiled"), mglu_ops.fusion():
        compiled(x)
    with pytest.raises(FusionError, match="no graph was compiled"), mglu_ops.fusion(strict=True):
        compiled(x)


@pytest.mark.parametrize("strict", [False, True])
def test_inductor_without_passes_is_reported(strict: bool) -> None:
    mglu_ops.enable_fusion(strict=strict)
    expected = pytest.raises(Exception, match=UNUSED) if strict else pytest.warns(UserWarning, match=UNUSED)
    with expected:
        trace(layer(), use_pre_grad_passes=False)


@pytest.mark.long
def test_compiled_autograd_trains_under_strict_fusion() -> None:
    """Inductor runs no passes before autograd on the graph of a backward pass, which has no layers."""
    model, x = layer(), torch.randn(3, 16)
    with torch._dynamo.config.patch(compiled_autograd=True), mglu_ops.fusion(strict=True) as report:
        torch.compile(lambda x: model(x).sum().backward())(x)
    assert [site.operator for site in report.fused] == ["forward_ste"]


def test_graphs_that_inductor_keeps_belong_to_the_sources_of_the_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hash of the sources is part of the key of Inductor's cache."""
    monkeypatch.setattr(fusion, "__file__", str(tmp_path / "fusion.py"))
    hashes = set()
    for text in ("a = 1", "a = 2"):
        (tmp_path / "rules.py").write_text(text)
        fusion._source_hash.cache_clear()
        hashes.add(FusionPass(FusionReport()).uuid())
    fusion._source_hash.cache_clear()
    assert len(hashes) == 2


# --- Strict and assume_binary ----------------------------------------------------------------------------------------


def test_strict_raises_for_a_missed_layer() -> None:
    """`FusionError` is raised, and torch wraps it in an error of its own."""
    report = mglu_ops.enable_fusion(strict=True)
    with pytest.raises(Exception, match=r"FusionError: strict fusion: .*proves to be binary"):
        trace(soft_mask())
    assert len(report.missed) == 1


def test_strict_raises_where_nothing_was_fused() -> None:
    with pytest.raises(FusionError, match="nothing was fused"), mglu_ops.fusion(strict=True):
        trace(nn.Linear(16, 12))


@pytest.mark.long
def test_assume_binary_checks_at_run_time() -> None:
    model = real_mask()
    with mglu_ops.fusion() as report:
        run(model)
    assert [len(report.fused), len(report.missed)] == [0, 1]
    torch._dynamo.reset()
    with mglu_ops.fusion(strict=True, assume_binary=True) as report, torch.no_grad():
        compiled, x = torch.compile(model), torch.randn(3, 16)
        assert relative_error(compiled(x), model(x)) <= SAME
        assert len(report.fused) == 1
        model.stored[3, 4] = 2
        with pytest.raises(ValueError, match=r"masks: 1 of 192 values are neither 0 nor 1 \(the first is 2.0\)"):
            compiled(x)


# --- Other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["a pass", "a function without uuid", "a list of passes"])
def test_passes_in_the_slot_are_run_first_and_once(kind: str) -> None:
    """Other passes run before the fusion pass, and only once, even if several blocks enclose the compilation."""
    if kind == "a list of passes" and not hasattr(inductor_config, "pre_grad_pass_timing"):
        pytest.skip("the slot holds no list")
    theirs = [Recorder("first"), Recorder("second")]
    slot = {"a pass": theirs[0], "a function without uuid": theirs[0].__call__, "a list of passes": theirs}[kind]
    inductor_config.pre_grad_custom_pass = slot
    mglu_ops.enable_fusion()
    with mglu_ops.fusion(), mglu_ops.fusion() as report:
        trace(layer())
    assert inductor_config.pre_grad_custom_pass is slot
    assert ["linear" in calls for recorder in theirs for calls in recorder.seen] == [True] * (
        2 if slot is theirs else 1
    )
    assert len(report.fused) == report.graphs == 1


def test_another_library_overwrites_the_slot() -> None:
    theirs = Recorder()
    report = mglu_ops.enable_fusion(strict=True)
    inductor_config.pre_grad_custom_pass = theirs
    trace(layer())
    assert len(theirs.seen) == len(report.fused) == 1
    with pytest.raises(Exception, match="strict fusion"):
        trace(soft_mask())
    mglu_ops.disable_fusion()
    assert inductor_config.pre_grad_custom_pass is theirs


@pytest.mark.parametrize("enabled", ["in the process", "in a block"])
def test_another_library_gives_its_pass_to_one_compilation(enabled: str) -> None:
    """Settings for one compilation replace the thread's settings. vLLM adds its passes in this way."""
    theirs = Recorder()
    with mglu_ops.fusion() if enabled == "in a block" else nullcontext(mglu_ops.enable_fusion()) as report:
        trace(layer(), pre_grad_custom_pass=theirs)
    assert len(theirs.seen) == len(report.fused) == 1


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("backend", ["inductor", "mglu"])
def test_a_pass_in_the_options_of_one_model(backend: str) -> None:
    theirs = Recorder()
    report = mglu_ops.enable_fusion()
    run(layer(), backend=backend, options={"pre_grad_custom_pass": theirs})
    assert len(theirs.seen) == len(report.fused) == 1


def test_a_model_that_is_not_to_be_fused() -> None:
    report = mglu_ops.enable_fusion(strict=True)
    trace(soft_mask(), pre_grad_custom_pass=NoFusion())
    assert report.graphs == 0


def test_a_pass_of_ours_in_the_slot_is_run_once() -> None:
    """AOTInductor, for example, can be given the pass as an object in its settings."""
    mine = FusionReport()
    report = mglu_ops.enable_fusion()
    trace(layer(), pre_grad_custom_pass=FusionPass(mine))
    assert (mine.graphs, report.graphs) == (1, 0)


@pytest.mark.usefixtures("unchanged_inductor")
def test_a_loop_over_experts_that_dynamo_leaves_to_python() -> None:
    """The data-dependent number of an expert's rows breaks the graph. A warning names the option that prevents this."""

    def mixture(x: torch.Tensor, weight: torch.Tensor, masks: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(len(x), weight.shape[1])
        for e in range(len(weight)):
            (rows,) = torch.where(ids == e)
            routed, m = x[rows], masks[e]
            gate, value = (torch.nn.functional.linear(routed, weight[e] * factor) for factor in (m, ~m))
            y.index_add_(0, rows, torch.nn.functional.silu(gate) * value)
        return y

    given = torch.randn(6, 8), torch.randn(2, 4, 8), torch.rand(2, 4, 8) > 0.5, torch.tensor([0, 1, 0, 1, 1, 0])
    with torch.no_grad():
        with pytest.warns(UserWarning, match="capture_dynamic_output_shape_ops = True"), mglu_ops.fusion():
            torch.compile(mixture)(*given)
        torch._dynamo.reset()
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), mglu_ops.fusion() as report:
            found = torch.compile(mixture)(*given)
    torch.testing.assert_close(found, mixture(*given))
    assert [len(report.fused), report.missed] == [2, []]
