"""Dependent launch: which graphs use it, what Inductor then generates, and that all settings are restored."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from compiled_models import SoftMGLU, layer, run, trace
from torch import Tensor
from torch._dynamo.utils import counters
from torch._inductor import custom_graph_pass, scheduler
from torch._inductor.virtualized import V

import mglu_ops
from compile_passes import dependent_launch
from compile_passes.dependent_launch import DependentLaunch, settings_of_dependent_launch
from mglu_ops.nn import MGLU

pytest.importorskip("triton", reason="triton is not installed")

from h200_code import Shape, h200, h200_code, kernels_of  # Inductor generates code for GPUs only with triton

pytestmark = pytest.mark.usefixtures("unchanged_inductor")

SLOT = "_post_fusion_custom_pass"
D, H = 64, 8192
INPUTS: list[Shape] = [
    ((2, H), torch.bfloat16),
    ((2, H), torch.bfloat16),
    ((H,), torch.bfloat16),
    ((D, H), torch.bfloat16),
    ((D, H // 8, 1), torch.uint8),
]


def block(x: Tensor, residual: Tensor, scale: Tensor, weight: Tensor, masks: Tensor) -> tuple[Tensor, Tensor]:
    """A residual, an RMS norm whose reduction is a loop, and an MGLU layer."""
    total = x + residual
    wide = total.float()
    normed = (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * scale
    return total, torch.ops.mglu.forward(normed, weight, masks) * 2


def update(x: Tensor, i: Tensor, cache: Tensor) -> tuple[Tensor, Tensor]:
    """An update of a cache in place, a kernel that reads the cache, and one that loads nothing."""
    cache.index_put_((i,), x)
    return cache * 2, torch.arange(7, device="cuda")


UPDATE: list[Shape] = [((1, 32), torch.float32), ((1,), torch.int64), ((64, 32), torch.float32)]


def cached(x: Tensor, i: Tensor, cache: Tensor, *layer: Tensor) -> tuple[Tensor, ...]:
    return *update(x, i, cache), *block(*layer)


CACHED = [*UPDATE, *INPUTS]


@contextmanager
def compiled_for(settings: dict[str, Any], capability: tuple[int, int] = (9, 0)) -> Iterator[None]:
    with h200(capability), inductor_config.patch({"triton.enable_pdl": False, "triton.cudagraphs": True, **settings}):
        yield


def code(
    function: Callable[..., Any] = block,
    inputs: list[Shape] = INPUTS,
    before: Callable[[list[Any]], list[Any]] | None = None,
    capability: tuple[int, int] = (9, 0),
    **settings: Any,
) -> str:
    """What Inductor generates with the pass in its slot."""
    with compiled_for(settings, capability):
        return h200_code(function, inputs, **{SLOT: DependentLaunch(before)})


# --- What is generated -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("function", "inputs"), [(block, INPUTS), (cached, CACHED)])
def test_every_kernel_waits_before_its_first_access(function: Callable[..., Any], inputs: list[Shape]) -> None:
    generated = code(function, inputs)
    kernels = kernels_of(generated)
    assert len(kernels) > 1
    assert [kernel for kernel in kernels if not kernel.waits_first] == []
    assert generated.count("'launch_pdl': True") == len(kernels)
    for kernel in kernels:
        assert kernel.launches == any("tl.load" in line for line in kernel.lines), kernel


def test_a_loop_waits_before_it_begins() -> None:
    (norm,) = (kernel for kernel in kernels_of(code()) if any(line.startswith("for") for line in kernel.lines))
    assert "gdc_wait" in norm.lines[0]
    assert sum("gdc_wait" in line for line in norm.lines) == 1
    assert "gdc_launch_dependents" in norm.lines[-1] or "gdc_launch_dependents" in norm.lines[-2]


def test_inductor_alone_does_not_wait_before_every_access() -> None:
    """So turning the setting on is not enough. If this fails, torch is fixed, and `DependentLaunch` may do less."""
    with compiled_for({"triton.enable_pdl": True}):
        updates, reads, fills = kernels_of(h200_code(update, UPDATE))
    assert "gdc_launch_dependents" in updates.lines[-2]
    assert "tl.store" in updates.lines[-1]
    assert "tl.load" in reads.lines[0]
    assert not any("gdc_" in line for line in fills.lines)


# --- Which graphs ----------------------------------------------------------------------------------------------------


def without_layer(x: Tensor, *_: Tensor) -> Tensor:
    return x * 2


def with_training(x: Tensor, residual: Tensor, scale: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
    return torch.ops.mglu.forward_train(x * 2, weight, masks)[0]


@pytest.mark.parametrize("function", [without_layer, with_training])
def test_other_graphs_launch_as_usual(function: Callable[..., Any]) -> None:
    generated = code(function)
    assert kernels_of(generated)
    assert "gdc_" not in generated
    assert "'launch_pdl': True" not in generated


@pytest.mark.parametrize(
    "settings",
    [
        {"triton.cudagraphs": False},
        {"capability": (8, 9)},
        {"combo_kernels": True},
        {"triton.cooperative_reductions": True},
        {"triton.multi_kernel": 1},
    ],
    ids=str,
)
def test_other_settings_and_gpus_launch_as_usual(settings: dict[str, Any]) -> None:
    generated = code(**settings)
    assert kernels_of(generated)
    assert "gdc_" not in generated


@pytest.mark.parametrize("attribute", ["aot_mode", "cpp_wrapper", "disable_cudagraphs_reason"])
def test_graphs_that_run_without_cuda_graphs_launch_as_usual(attribute: str) -> None:
    decisions: list[bool] = []

    def decide(nodes: list[Any]) -> list[Any]:
        for value in (getattr(V.graph, attribute), "yes"):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(V.graph, attribute, value)
                DependentLaunch()(nodes)
                decisions.append(inductor_config.triton.enable_pdl)
        return nodes

    with compiled_for({}):
        h200_code(block, INPUTS, **{SLOT: decide})
    assert decisions == [True, False]


@pytest.mark.parametrize("which", ["device", "is_template", "is_split_scan", "load_seed"])
def test_a_kernel_with_accesses_before_any_wait_cannot_wait(which: str) -> None:
    part = SimpleNamespace(
        get_device=lambda: torch.device("xpu" if which == "device" else "cuda"),
        is_template=lambda: which == "is_template",
        is_split_scan=lambda: which == "is_split_scan",
        _body=SimpleNamespace(has_op=lambda name: name == which),
    )
    with h200():
        assert not dependent_launch._part_can_wait(part)
        which = "none"
        part.get_device = lambda: torch.device("cuda")
        assert dependent_launch._part_can_wait(part)


def test_unknown_kinds_of_nodes_cannot_wait() -> None:
    for kind, known in ((scheduler.ForeachKernelSchedulerNode, False), (scheduler.ExternKernelSchedulerNode, True)):
        assert dependent_launch._can_wait(object.__new__(kind)) == known


def test_each_graph_is_decided_anew() -> None:
    """One compilation may compile a forward and a backward graph, or subgraphs, under the same settings."""
    with compiled_for({SLOT: DependentLaunch()}):
        generated = [h200_code(function, INPUTS) for function in (block, without_layer, block)]
    assert ["gdc_wait" in module for module in generated] == [True, False, True]


def test_a_subgraph_launches_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.graph.SubgraphLowering", torch._inductor.graph.GraphLowering)
    assert "gdc_" not in code()


def test_an_earlier_pass_runs_first_and_its_nodes_are_used() -> None:
    seen = []

    def earlier(nodes: list[Any]) -> list[Any]:
        seen.append(len(nodes))
        return list(nodes)

    assert "gdc_wait" in code(before=earlier)
    assert len(seen) == 1


# --- Settings and caches ---------------------------------------------------------------------------------------------


@pytest.fixture
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "_has_nvidia_gpu", lambda: True)


@pytest.mark.usefixtures("nvidia")
def test_which_compilations_get_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings_of_dependent_launch() == {}
    with inductor_config.patch({"triton.cudagraphs": True}):
        settings = settings_of_dependent_launch()
        assert settings.keys() == {SLOT, "triton.enable_pdl"}
        assert settings["triton.enable_pdl"] is False
        with inductor_config.patch({"triton.enable_pdl": True}):
            assert settings_of_dependent_launch() == {}, "a user's own setting"
        for version, known in (("2.10.1", False), ("2.11.0+cu130", True), ("2.15.1", True), ("2.16.0a0", False)):
            monkeypatch.setattr(torch, "__version__", version)
            assert bool(settings_of_dependent_launch()) == known, version


def test_rocm_and_cpu_do_not_get_the_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    with inductor_config.patch({"triton.cudagraphs": True}):
        for hip, available in (("7.0", True), (None, False)):
            monkeypatch.setattr(torch.version, "hip", hip)
            monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
            assert settings_of_dependent_launch() == {}


def state() -> tuple[Any, ...]:
    return inductor_config.triton.enable_pdl, getattr(inductor_config, SLOT), inductor_config.triton.cudagraphs


@pytest.mark.usefixtures("nvidia")
def test_settings_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    decided: list[bool] = []

    def right(*_: Any) -> bool:
        decided.append(True)
        return True

    monkeypatch.setattr(dependent_launch, "_is_right", right)
    during: list[bool] = []
    before = state()
    with mglu_ops.fusion():
        run(layer(), options={"triton.cudagraphs": True})
    assert (state(), len(decided)) == (before, 1)

    def fails(*_: Any) -> bool:
        inductor_config.triton.enable_pdl = True
        during.append(inductor_config.triton.enable_pdl)
        raise ZeroDivisionError

    monkeypatch.setattr(dependent_launch, "_is_right", fails)
    torch._dynamo.reset()
    with mglu_ops.fusion(), pytest.raises(Exception, match="ZeroDivisionError"):
        run(layer(), options={"triton.cudagraphs": True})
    assert (state(), during) == (before, [True])
    with pytest.raises(Exception, match="strict fusion"), mglu_ops.fusion(strict=True):
        trace(SoftMGLU(), {"triton.cudagraphs": True})
    assert state() == before


@pytest.mark.usefixtures("nvidia")
@pytest.mark.parametrize("way", ["fusion", "backend", "unfused", "user"])
def test_the_pass_does_not_run_where_it_is_off(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dependent_launch, "_is_right", lambda *_: pytest.fail("the pass ran"))
    options: dict[str, Any] = {"triton.cudagraphs": True}
    if way == "fusion":
        with mglu_ops.fusion(dependent_launch=False):
            run(layer(), options=options)
    elif way == "backend":
        run(layer(), backend="mglu", options={**options, "dependent_launch": False})
    elif way == "unfused":
        run(layer(), options=options)
    else:
        with mglu_ops.fusion():
            run(layer(), options={**options, "triton.enable_pdl": True})


def test_a_cpu_compilation_with_cuda_graphs_changes_no_setting() -> None:
    before = state()
    with mglu_ops.fusion(strict=True):
        run(layer(), mode="reduce-overhead")
    assert state() == before


@pytest.mark.usefixtures("nvidia")
def test_a_frozen_layer_on_a_cpu_launches_as_usual() -> None:
    """The graph calls the operator, but on a CPU. The nodes are real nodes of the scheduler."""
    decided: list[bool] = []

    def pass_of_another(nodes: list[Any]) -> list[Any]:
        assert any(node.is_extern() for node in nodes)
        decided.append(dependent_launch._is_right(V.graph, nodes))
        return nodes

    model = MGLU(16, 24, n_masks=1)
    with mglu_ops.fusion(), inductor_config.patch({SLOT: pass_of_another, "fx_graph_cache": False}):
        run(model.eval(), options={"triton.cudagraphs": True})
    assert decided == [False]


@pytest.mark.usefixtures("nvidia")
def test_a_warm_start_finds_the_code_of_its_own_decision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))

    def hits(*, dependent_launch: bool) -> int:
        torch._dynamo.reset()
        counters.clear()
        with mglu_ops.fusion(dependent_launch=dependent_launch), inductor_config.patch({"fx_graph_cache": True}):
            run(layer(), options={"triton.cudagraphs": True})
        return counters["inductor"]["fxgraph_cache_hit"]

    assert [hits(dependent_launch=on) for on in (True, True, False, False)] == [0, 1, 0, 1]


class Named(getattr(custom_graph_pass, "CustomSchedulerPass", object)):  # type: ignore[misc]
    """A pass of another library that may be cached."""

    def __init__(self, name: str | None) -> None:
        self.name = name

    def __call__(self, nodes: list[Any]) -> list[Any]:
        return nodes

    def uuid(self) -> str | None:
        return self.name


def test_keys_for_caches() -> None:
    passes = [DependentLaunch(), DependentLaunch(Named("a")), DependentLaunch(Named("b"))]
    assert len({pickle.dumps(p.uuid()) for p in passes}) == len({pickle.dumps(p) for p in passes}) == 3
    for p in passes:
        assert pickle.loads(pickle.dumps(p)).uuid() == p.uuid()


@pytest.mark.usefixtures("nvidia")
def test_the_pass_is_cached_only_if_the_one_before_it_is() -> None:
    for before, caches in ((None, True), (Named("a"), True), (Named(None), False), (lambda nodes: nodes, False)):
        with inductor_config.patch({"triton.cudagraphs": True, SLOT: before}):
            in_slot = settings_of_dependent_launch()[SLOT]
        assert isinstance(in_slot, DependentLaunch) == caches
