"""Turning the pass on and off: slots, other libraries' passes, caches, threads, the backend, through Inductor."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from budgets import BUDGET, relative_error
from graphs import call_name
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

import mglu_ops
from compile_passes import install
from compile_passes.fusion import FusionError, FusionPass, fuse_graph
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU

SAME = 4 * BUDGET[torch.float32]


class Recorder(CustomGraphPass):
    """Another library's pass: notes what the graph calls when it comes."""

    def __init__(self, identity: Any = "recorder") -> None:
        self.identity = identity
        self.seen: list[list[str]] = []

    def __call__(self, graph: Graph) -> None:
        self.seen.append([call_name(node) for node in graph.nodes if node.op.startswith("call")])

    def uuid(self) -> Any:
        return self.identity


class SoftMGLU(nn.Module):
    """A candidate that cannot be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.logits = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(12, 16))

    def forward(self, x: Tensor) -> Tensor:
        m = torch.sigmoid(self.logits)
        return torch.tanh(x @ (self.weight * m).T) * (x @ (self.weight * (1 - m)).T)


class RealMask(nn.Module):
    """A mask of float dtype, which is binary by the user's word only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(12, 16))
        self.register_buffer("mask", (torch.rand(12, 16) > 0.5).float())

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ (self.weight * self.mask).T) * (x @ (self.weight * (1 - self.mask)).T)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """Each test starts and ends with the slot as torch has it, and with nothing compiled."""
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


def run(model: nn.Module, **options: Any) -> Tensor:
    """Compile for inference, run, and compare with eager."""
    x = torch.randn(3, 16)
    with torch.no_grad():
        result = torch.compile(model, **options)(x)
        assert relative_error(result, model(x)) <= SAME
    return result


def trace(model: nn.Module) -> None:
    """Run the passes of the slot over the model's graph, without the rest of Inductor."""

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        slot = inductor_config.pre_grad_custom_pass
        for graph_pass in slot if isinstance(slot, list) else [slot]:
            if graph_pass is not None:
                graph_pass(gm.graph)
        gm.recompile()
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(torch.randn(3, 16))


def layer() -> NaiveMGLU:
    return NaiveMGLU(16, 12, n_masks=2)


# --- Plain torch.compile --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
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


def test_checkpoint_and_freezing_with_inductor() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = layer()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.mlp, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report:
        result = torch.compile(model)(x)
    assert relative_error(result, model(x)) <= SAME
    assert [site.module_path for site in report.fused] == ["mlp"]
    result.sum().backward()


def test_freezing_with_inductor(recwarn: pytest.WarningsRecorder) -> None:
    """Fused; but torch 2.11 takes the examples out of the graph on a CPU, which must not pass in silence."""
    with mglu_ops.fusion() as report, inductor_config.patch({"freezing": True}):
        run(layer().eval())
    if torch.__version__ < "2.12":
        assert any("without the examples" in str(warning.message) for warning in recwarn)
    else:
        assert [site.route for site in report.fused] == ["forward"]


def test_enable_and_disable() -> None:
    run(layer())
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


# --- Strict and assume_binary ---------------------------------------------------------------------------------------


def test_strict_raises_for_a_missed_layer() -> None:
    """Torch wraps the error in its own."""
    with mglu_ops.fusion(strict=True) as report:
        with pytest.raises(Exception, match=r"FusionError: strict fusion: .*proves to be binary"):
            run(SoftMGLU())
        report.fused.append(report.missed[0])  # the block itself has nothing to complain of
    assert len(report.missed) == 1


def test_strict_raises_where_nothing_was_fused() -> None:
    with pytest.raises(FusionError, match="nothing was fused"), mglu_ops.fusion(strict=True):
        run(nn.Sequential(nn.Linear(16, 12), nn.ReLU()))


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


# --- Masks at inference ---------------------------------------------------------------------------------------------

LIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "reduce-overhead": ("reduce-overhead", {}),
    "max-autotune": ("max-autotune", {}),
    "cpp_wrapper": ("default", {"cpp_wrapper": True}),
}
FROZEN: dict[str, tuple[str, dict[str, Any]]] = {
    name: (mode, {**settings, "freezing": True}) for name, (mode, settings) in LIVE.items()
}


@pytest.mark.parametrize("name", LIVE)
def test_a_mask_changed_in_place_is_seen_at_the_next_call(name: str) -> None:
    """Also one changed through `.data`, of which no version counter tells."""
    mode, settings = LIVE[name]
    model, x = layer().eval(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report, inductor_config.patch(settings), torch.no_grad():
        compiled = torch.compile(model, mode=mode)
        for change in (lambda m: None, lambda m: m.neg_(), lambda m: m.data.copy_(m.data.flip(0).neg())):
            change(model.mask_logits)
            for _ in range(2):
                assert relative_error(compiled(x), model(x)) <= SAME
    assert [(site.route, site.packed) for site in report.fused] == [("forward", "at each call")]
    assert "mglu_ops.freeze" in str(report)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops on a CPU what proves anything; it warns")
@pytest.mark.parametrize("name", FROZEN)
def test_freezing_packs_the_masks_once(name: str) -> None:
    """Freezing makes constants of the parameters: no packing is left, and a later change is not seen."""
    mode, settings = FROZEN[name]
    model, x = layer().eval(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report, inductor_config.patch(settings), torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, mode=mode)
        assert relative_error(compiled(x), expected) <= SAME
        model.mask_logits.neg_()
        with torch.profiler.profile() as profile:
            assert relative_error(compiled(x), expected) <= SAME
    assert [(site.route, site.packed) for site in report.fused] == [("forward", "when compiled")]
    assert "mglu_ops.freeze" not in str(report)
    names = {event.key for event in profile.key_averages()}
    assert "mglu::forward" in names
    assert not {"mglu::pack_masks", "mglu::pack_logits"} & names


def test_freezing_does_nothing_to_a_model_that_trains() -> None:
    model, x = layer(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report, inductor_config.patch(freezing=True):
        compiled = torch.compile(model)
        compiled(x)
        with torch.no_grad():
            model.mask_logits.neg_()
        result, expected = compiled(x), model(x)
        assert relative_error(result, expected) <= SAME
        found, wanted = (torch.autograd.grad(y.sum(), model.mask_logits)[0] for y in (result, expected))
    assert relative_error(found, wanted) <= SAME
    assert [(site.route, site.packed) for site in report.fused] == [("forward_ste", "at each call")]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops on a CPU what proves anything; it warns")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_real_masks_are_proved_by_their_values_where_freezing_fixes_them(dtype: torch.dtype) -> None:
    class Fixed(nn.Module):
        def __init__(self, values: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 16))
            self.register_buffer("mask", torch.randint(0, values, (12, 16)).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.weight * self.mask, self.weight * (1 - self.mask)
            return torch.nn.functional.silu(x @ gate.T) * (x @ value.T)

    x = torch.randn(3, 16)
    for values, frozen in ((2, True), (2, False), (4, True)):
        torch._dynamo.reset()
        model = Fixed(values).eval()
        with mglu_ops.fusion() as report, inductor_config.patch(freezing=frozen), torch.no_grad():
            assert relative_error(torch.compile(model)(x), model(x)) <= SAME
        is_proved = values == 2 and frozen
        assert [site.packed for site in report.fused] == ["when compiled"] * is_proved
        assert len(report.missed) == 1 - is_proved


def test_freezing_as_an_option_is_warned_of() -> None:
    """Torch ignores it: Dynamo reads the setting before it knows of options."""
    with torch.no_grad(), pytest.warns(UserWarning, match="freezes nothing"):
        run(torch.compile(layer().eval(), backend="mglu", options={"freezing": True}))


# --- Other libraries ------------------------------------------------------------------------------------------------


def test_a_pass_that_is_there_runs_first_and_is_put_back() -> None:
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


# --- The pass as an object ------------------------------------------------------------------------------------------


def test_pickle_keeps_options_and_uuid() -> None:
    fusion_pass = FusionPass(FusionReport(graphs=3), assume_binary=True, before=[Recorder("other")])
    copied = pickle.loads(pickle.dumps(fusion_pass))
    assert copied.uuid() == fusion_pass.uuid()
    assert (copied.strict, copied.assume_binary, copied.report.graphs) == (False, True, 0)


def test_uuid_tells_options_and_chains_apart() -> None:
    report = FusionReport()
    passes = [
        FusionPass(report),
        FusionPass(report, strict=True),
        FusionPass(report, assume_binary=True),
        FusionPass(report, before=[Recorder("a")]),
        FusionPass(report, before=[Recorder("b")]),
        FusionPass(report, before=[Recorder("a"), Recorder("b")]),
    ]
    uuids = [p.uuid() for p in passes]
    assert len({pickle.dumps(uuid) for uuid in uuids}) == len(passes)
    assert FusionPass(FusionReport(graphs=1)).uuid() == uuids[0]
    assert FusionPass(report, before=[Recorder(None)]).uuid() is None


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
    """Each layer is reported, none twice."""
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


def test_enabled_in_a_thread() -> None:
    """It compiles fused there, whoever enables and disables meanwhile elsewhere."""

    def work(_: int) -> None:
        mglu_ops.enable_fusion()
        trace(layer())
        mglu_ops.disable_fusion()
        assert inductor_config.pre_grad_custom_pass is None

    in_threads(work, count=1)
    assert len(mglu_ops.fusion_report().fused) == 1
    assert inductor_config.pre_grad_custom_pass is None


def test_backend_in_a_thread() -> None:
    in_threads(lambda _: run(layer(), backend="mglu"), count=1)
    assert len(mglu_ops.fusion_report().fused) == 1


def test_an_empty_graph() -> None:
    graph, report = Graph(), FusionReport()
    graph.output(())
    fuse_graph(graph, report, strict=True)
    assert (report.fused, report.missed, report.graphs) == ([], [], 1)


# --- The backend ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [{}, {"mode": "reduce-overhead"}, {"mode": "max-autotune"}, {"options": {"assume_binary": True, "strict": True}}],
    ids=["plain", "reduce-overhead", "max-autotune", "own options"],
)
def test_backend(options: dict[str, Any]) -> None:
    model = RealMask() if "options" in options else layer()
    run(model, backend="mglu", **options)
    report = mglu_ops.fusion_report()
    assert [len(report.fused), len(report.missed)] == [1, 0]
    assert inductor_config.pre_grad_custom_pass is None


def test_backend_is_strict_and_takes_inductor_options() -> None:
    with pytest.raises(Exception, match="strict fusion"):
        run(SoftMGLU(), backend="mglu", options={"strict": True})
    run(layer(), backend="mglu", options={"epilogue_fusion": False})
    with pytest.raises(Exception, match="no_such_option"):
        run(layer(), backend="mglu", options={"no_such_option": 1})


def test_backend_inside_a_block_reports_there() -> None:
    theirs = Recorder()
    inductor_config.pre_grad_custom_pass = theirs
    with mglu_ops.fusion() as report:
        run(layer(), backend="mglu")
    assert len(theirs.seen) == len(report.fused) == 1
    assert mglu_ops.fusion_report().graphs == 0


# --- Other processes ------------------------------------------------------------------------------------------------

MODEL = """
import json, sys, torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(12, 16))
        self.logits = torch.nn.Parameter(torch.randn(2, 12, 16))

    def forward(self, x):
        y = 0
        for l in self.logits:
            m = ((l > 0).float() - l).detach() + l
            y = y + F.silu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * (1 - m))
        return y
"""

CACHED = """
import mglu_ops
with mglu_ops.fusion(strict=True) as report:
    y = torch.compile(Layer())(torch.randn(3, 16))
    y.sum().backward()
print(json.dumps({
    "report": str(report),
    "fx_hits": counters["inductor"]["fxgraph_cache_hit"],
    "aot_hits": counters["aot_autograd"]["autograd_cache_hit"],
    "aot_misses": counters["aot_autograd"]["autograd_cache_miss"],
    "bypasses": counters["inductor"]["fxgraph_cache_bypass"] + counters["aot_autograd"]["autograd_cache_bypass"],
    "sum": y.sum().item(),
}))
"""

WITHOUT_IMPORT = """
assert "mglu_ops" not in sys.modules
model, x = Layer(), torch.randn(3, 16)
error = (torch.compile(model, backend="mglu")(x) - model(x)).abs().max().item()
import mglu_ops
print(json.dumps({"fused": len(mglu_ops.fusion_report().fused), "error": error}))
"""


def process(script: str, tmp_path: Path) -> dict[str, Any]:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(MODEL + script))
    done = subprocess.run(
        [sys.executable, str(file)],
        env=os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "cache")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_caches_hit_in_a_second_process_and_report_the_same(tmp_path: Path) -> None:
    cold, warm = process(CACHED, tmp_path), process(CACHED, tmp_path)
    assert "1 fused, 0 missed, 1 graphs seen" in cold["report"]
    assert (cold["aot_misses"], cold["aot_hits"], cold["bypasses"]) == (1, 0, 0)
    assert (warm["aot_misses"], warm["aot_hits"], warm["bypasses"]) == (0, 1, 0)
    assert warm["fx_hits"] >= 1
    assert warm["report"] == cold["report"]
    assert warm["sum"] == cold["sum"]


@pytest.mark.slow
def test_backend_by_its_entry_point_without_import(tmp_path: Path) -> None:
    found = process(WITHOUT_IMPORT, tmp_path)
    assert found["fused"] == 1
    assert found["error"] < 1e-4


def test_a_new_model_of_a_class_compiled_before_is_fused() -> None:
    """Dynamo would reuse the unfused code of the first for the second."""
    x = torch.randn(3, 24)
    torch.compile(NaiveMGLU(24, 16))(x)
    try:
        report = mglu_ops.enable_fusion()
        before = len(report.fused)
        torch.compile(NaiveMGLU(24, 16))(x)
        assert len(report.fused) == before + 1
    finally:
        mglu_ops.disable_fusion()


def test_a_block_that_compiles_nothing_says_so() -> None:
    x = torch.randn(3, 24)
    torch.compile(NaiveMGLU(24, 16))(x)
    with pytest.warns(UserWarning, match="no graph was compiled"), mglu_ops.fusion():
        torch.compile(NaiveMGLU(24, 16))(x)
    with pytest.raises(FusionError, match="no graph was compiled"), mglu_ops.fusion(strict=True):
        torch.compile(NaiveMGLU(24, 16))(x)
