"""Turning the pass on and off: settings, strict mode, passes of other libraries, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from budgets import relative_error
from compiled_models import SAME, RealMask, Recorder, SoftMGLU, layer, run, trace
from torch import nn
from torch.fx import Graph

import mglu_ops
from compile_passes import install
from compile_passes.fusion import FusionError, FusionPass
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU

pytestmark = pytest.mark.usefixtures("unchanged_inductor")


@pytest.mark.parametrize("training", [True, pytest.param(False, marks=pytest.mark.long)])
def test_plain_compile(training: bool) -> None:
    model, x = layer(), torch.randn(3, 16)
    with torch.set_grad_enabled(training), mglu_ops.fusion(strict=True) as report:
        result = torch.compile(model)(x)
        expected = model(x)
    assert relative_error(result, expected) <= SAME
    assert [site.route for site in report.fused] == ["forward_ste" if training else "forward"]
    assert report.missed == []
    if training:
        for name, p in model.named_parameters():
            got, wanted = (torch.autograd.grad(y.sum(), p, retain_graph=True)[0] for y in (result, expected))
            assert relative_error(got, wanted) <= SAME, name


def test_enable_and_disable() -> None:
    trace(layer())
    assert mglu_ops.fusion_report().graphs == 0
    report = mglu_ops.enable_fusion()
    assert report is mglu_ops.fusion_report()
    trace(layer())
    assert (len(report.fused), report.graphs) == (1, 1)
    mglu_ops.disable_fusion()
    assert inductor_config.pre_grad_custom_pass is None
    trace(layer())
    assert report.graphs == 1
    mglu_ops.disable_fusion()  # without effect


def test_settings_are_restored() -> None:
    def settings() -> dict[str, Any]:
        return {k: v for k, v in inductor_config.get_config_copy().items() if k.startswith("pre_grad")}

    before = settings()
    with mglu_ops.fusion():
        assert settings() != before
    assert settings() == before
    mglu_ops.enable_fusion()
    mglu_ops.disable_fusion()
    assert settings() == before
    with pytest.raises(ZeroDivisionError), mglu_ops.fusion(strict=True):
        1 / 0  # noqa: B018 (the error of a user's code in the block)
    assert settings() == before


def test_enabling_twice_replaces_the_options() -> None:
    mglu_ops.enable_fusion()
    mglu_ops.enable_fusion(assume_binary=True)
    report = mglu_ops.fusion_report()
    trace(RealMask())
    assert (len(report.fused), report.graphs) == (1, 1)
    mglu_ops.disable_fusion()
    assert inductor_config.pre_grad_custom_pass is None


def test_blocks_nest_and_have_reports_of_their_own() -> None:
    mglu_ops.enable_fusion()
    with mglu_ops.fusion() as outer:
        trace(layer())
        with mglu_ops.fusion(assume_binary=True) as inner:
            trace(RealMask())
        trace(RealMask())
    trace(layer())
    assert (len(inner.fused), len(inner.missed)) == (1, 0)
    assert (len(outer.fused), len(outer.missed)) == (1, 1)
    assert (len(mglu_ops.fusion_report().fused), mglu_ops.fusion_report().graphs) == (1, 1)


@pytest.mark.long
def test_a_new_model_of_a_class_compiled_before_is_fused() -> None:
    """Without a reset, Dynamo would reuse the unfused code of the first model for the second."""
    x = torch.randn(3, 24)
    torch.compile(NaiveMGLU(24, 16))(x)
    try:
        report = mglu_ops.enable_fusion()
        before = len(report.fused)
        torch.compile(NaiveMGLU(24, 16))(x)
        assert len(report.fused) == before + 1
    finally:
        mglu_ops.disable_fusion()


@pytest.mark.long
def test_a_block_that_compiles_nothing_says_so() -> None:
    x = torch.randn(3, 24)
    torch.compile(NaiveMGLU(24, 16))(x)
    with pytest.warns(UserWarning, match="no graph was compiled"), mglu_ops.fusion():
        torch.compile(NaiveMGLU(24, 16))(x)
    with pytest.raises(FusionError, match="no graph was compiled"), mglu_ops.fusion(strict=True):
        torch.compile(NaiveMGLU(24, 16))(x)


# --- Strict and assume_binary ----------------------------------------------------------------------------------------


def test_strict_raises_for_a_missed_layer() -> None:
    """Torch wraps the error in an error of its own."""
    with mglu_ops.fusion(strict=True) as report:
        with pytest.raises(Exception, match=r"FusionError: strict fusion: .*proves to be binary"):
            run(SoftMGLU())
        report.fused.append(report.missed[0])  # so that the end of the block raises nothing
    assert len(report.missed) == 1


@pytest.mark.long
def test_strict_raises_where_nothing_was_fused() -> None:
    with pytest.raises(FusionError, match="nothing was fused"), mglu_ops.fusion(strict=True):
        run(nn.Sequential(nn.Linear(16, 12), nn.ReLU()))


@pytest.mark.long
def test_assume_binary_checks_at_run_time() -> None:
    model = RealMask()
    with mglu_ops.fusion() as report:
        run(model)
    assert [len(report.fused), len(report.missed)] == [0, 1]
    torch._dynamo.reset()
    with mglu_ops.fusion(strict=True, assume_binary=True) as report, torch.no_grad():
        compiled, x = torch.compile(model), torch.randn(3, 16)
        assert relative_error(compiled(x), model(x)) <= SAME
        assert len(report.fused) == 1
        model.mask[3, 4] = 2
        with pytest.raises(ValueError, match=r"masks: 1 of 192 values are neither 0 nor 1 \(the first is 2.0\)"):
            compiled(x)


# --- Other libraries -------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_a_pass_that_is_there_runs_first_and_is_restored() -> None:
    theirs = Recorder()
    inductor_config.pre_grad_custom_pass = theirs
    with mglu_ops.fusion() as report:
        run(layer())
    assert inductor_config.pre_grad_custom_pass is theirs
    assert len(report.fused) == len(theirs.seen) == 1
    assert "linear" in theirs.seen[0]
    mglu_ops.enable_fusion()
    assert inductor_config.pre_grad_custom_pass is not theirs
    mglu_ops.disable_fusion()
    assert inductor_config.pre_grad_custom_pass is theirs


@pytest.mark.long
def test_a_pass_without_uuid_is_run_and_turns_caches_off() -> None:
    seen = []
    inductor_config.pre_grad_custom_pass = seen.append
    with mglu_ops.fusion() as report:
        assert inductor_config.pre_grad_custom_pass.uuid() is None
        run(layer())
    assert len(seen) == len(report.fused) == 1


def test_a_list_in_the_slot() -> None:
    first, second = Recorder("first"), Recorder("second")
    slot = [first, second]
    inductor_config.pre_grad_custom_pass = slot
    with mglu_ops.fusion() as report:
        ours = inductor_config.pre_grad_custom_pass
        assert ours.before == (first, second)
        trace(layer())
    assert inductor_config.pre_grad_custom_pass is slot
    assert len(first.seen) == len(second.seen) == len(report.fused) == 1


def test_another_library_overwrites_the_slot() -> None:
    theirs = Recorder()
    mglu_ops.enable_fusion()
    inductor_config.pre_grad_custom_pass = theirs
    mglu_ops.disable_fusion()
    assert inductor_config.pre_grad_custom_pass is theirs
    mglu_ops.enable_fusion()
    trace(layer())
    assert len(theirs.seen) == len(mglu_ops.fusion_report().fused) == 1
    mglu_ops.disable_fusion()
    assert inductor_config.pre_grad_custom_pass is theirs


def test_another_library_chains_ours_in_a_list() -> None:
    theirs = Recorder()
    mglu_ops.enable_fusion()
    inductor_config.pre_grad_custom_pass = [inductor_config.pre_grad_custom_pass, theirs]
    mglu_ops.disable_fusion()
    trace(layer())
    assert len(theirs.seen) == 1
    assert mglu_ops.fusion_report().graphs == 0
    assert install.passes_in_slot() == [theirs]


def test_passes_are_run_once_whatever_is_nested() -> None:
    theirs = Recorder()
    inductor_config.pre_grad_custom_pass = theirs
    mglu_ops.enable_fusion()
    with mglu_ops.fusion(), mglu_ops.fusion() as report:
        trace(layer())
    assert len(theirs.seen) == len(report.fused) == report.graphs == 1


# --- Threads ---------------------------------------------------------------------------------------------------------


def in_threads(work: Callable[[int], Any], count: int = 4) -> None:
    errors: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_one_pass_in_many_threads() -> None:
    """Each layer is reported once."""
    graphs: list[Graph] = []

    def capture(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    for _ in range(4):
        torch._dynamo.reset()
        torch.compile(layer(), backend=capture)(torch.randn(3, 16))
    report = FusionReport()
    fusion_pass = FusionPass(report)
    in_threads(lambda i: fusion_pass(graphs[i]))
    assert (len(report.fused), report.graphs) == (4, 4)


def test_enable_and_disable_from_threads() -> None:
    def work(_: int) -> None:
        for _ in range(50):
            mglu_ops.enable_fusion()
            mglu_ops.disable_fusion()

    in_threads(work)
    assert inductor_config.pre_grad_custom_pass is None


def test_fusion_enabled_in_a_thread() -> None:
    """Fusion that is enabled in a thread acts in that thread."""

    def work(_: int) -> None:
        mglu_ops.enable_fusion()
        trace(layer())
        mglu_ops.disable_fusion()
        assert inductor_config.pre_grad_custom_pass is None

    in_threads(work, count=1)
    assert len(mglu_ops.fusion_report().fused) == 1
    assert inductor_config.pre_grad_custom_pass is None


@pytest.mark.long
def test_backend_in_a_thread() -> None:
    in_threads(lambda _: run(layer(), backend="mglu"), count=1)
    assert len(mglu_ops.fusion_report().fused) == 1
