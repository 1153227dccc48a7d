"""The Dynamo backend "mglu", the key of the pass for compile caches, and compilations in other processes."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from torch import nn
from torch._inductor import compile_fx
from torch.fx import Graph

import mglu_ops
from compile_passes.fusion import FusionPass, fuse_graph
from compile_passes.report import FusionReport
from tests.support.commands import python
from tests.support.families import sample
from tests.support.programs.compiled import Recorder, layer, real_mask, run, soft_mask

pytestmark = pytest.mark.usefixtures("unchanged_inductor")


OPTIONS: dict[str, dict[str, Any]] = {
    "own options": {"options": {"assume_binary": True, "strict": True}},
    "plain": {},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "max-autotune": {"mode": "max-autotune"},
}


@pytest.mark.parametrize("name", sample(OPTIONS, every=4))
def test_backend_with_options(name: str) -> None:
    options = OPTIONS[name]
    model = real_mask() if "options" in options else layer()
    run(model, backend="mglu", **options)
    report = mglu_ops.fusion_report()
    assert [len(report.fused), len(report.missed)] == [1, 0]
    assert inductor_config.pre_grad_custom_pass is None


@pytest.mark.long
def test_backend_is_strict_and_takes_inductor_options() -> None:
    with pytest.raises(Exception, match="strict fusion"):
        run(soft_mask(), backend="mglu", options={"strict": True})
    run(layer(), backend="mglu", options={"epilogue_fusion": False})
    with pytest.raises(Exception, match="no_such_option"):
        run(layer(), backend="mglu", options={"no_such_option": 1})


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize("around", [mglu_ops.enable_fusion, mglu_ops.fusion])
def test_backend_takes_the_options_around_it(around: Callable[..., Any]) -> None:
    def compile_around(model: nn.Module, **options: bool) -> FusionReport:
        torch._dynamo.reset()
        context = around(**options)
        with nullcontext(context) if isinstance(context, FusionReport) else context as report:
            run(model, backend="mglu")
        return report

    with pytest.raises(Exception, match="FusionError: strict fusion"):
        compile_around(soft_mask(), strict=True)
    assert len(compile_around(real_mask(), assume_binary=True).fused) == 1


@pytest.mark.parametrize("is_set", [False, True])
def test_freezing_as_an_option_gives_a_warning(is_set: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo reads the setting before it reads options, so the option alone does nothing."""
    monkeypatch.setattr(compile_fx, "compile_fx", lambda gm, *_, **__: gm.forward)
    expected = nullcontext() if is_set else pytest.warns(UserWarning, match="freezes nothing")
    with inductor_config.patch(freezing=is_set), expected:
        run(layer(), backend="mglu", options={"freezing": True})


# --- The pass as an object -------------------------------------------------------------------------------------------


def test_pickle_keeps_options_and_uuid() -> None:
    fusion_pass = FusionPass(FusionReport(graphs=3), assume_binary=True, before=[Recorder("other")])
    copied = pickle.loads(pickle.dumps(fusion_pass))
    assert copied.uuid() == fusion_pass.uuid()
    assert (copied.strict, copied.assume_binary) == (False, True)
    assert copied.report.graphs == 0


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


def test_an_empty_graph() -> None:
    graph, report = Graph(), FusionReport()
    graph.output(())
    fuse_graph(graph, report, strict=True)
    assert (report.fused, report.missed, report.graphs) == ([], [], 1)


# --- Other processes -------------------------------------------------------------------------------------------------


START = """
import json, sys, torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(3, 16)
"""


CACHED = """
import mglu_ops
from mglu_ops.nn import NaiveMGLU
with mglu_ops.fusion(strict=True) as report:
    y = torch.compile(NaiveMGLU(16, 12, n_masks=2))(x)
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
weight, mask = torch.randn(12, 16), torch.randn(12, 16) > 0

def layer(x):
    return F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * ~mask)

error = (torch.compile(layer, backend="mglu")(x) - layer(x)).abs().max().item()
import mglu_ops
print(json.dumps({"fused": len(mglu_ops.fusion_report().fused), "error": error}))
"""


def process(script: str, tmp_path: Path) -> dict[str, Any]:
    printed = python("-c", START + script, folder=tmp_path, TORCHINDUCTOR_CACHE_DIR=str(tmp_path / "cache"))
    return json.loads(printed.splitlines()[-1])


@pytest.mark.long
def test_caches_hit_in_a_second_process_and_report_the_same(tmp_path: Path) -> None:
    cold, warm = process(CACHED, tmp_path), process(CACHED, tmp_path)
    assert "1 fused, 0 missed, 1 graph seen" in cold["report"]
    assert (cold["aot_misses"], cold["aot_hits"], cold["bypasses"]) == (1, 0, 0)
    assert (warm["aot_misses"], warm["aot_hits"], warm["bypasses"]) == (0, 1, 0)
    assert warm["fx_hits"] >= 1
    assert warm["report"] == cold["report"]
    assert warm["sum"] == cold["sum"]


@pytest.mark.long
def test_backend_by_its_entry_point_without_import(tmp_path: Path) -> None:
    found = process(WITHOUT_IMPORT, tmp_path)
    assert found["fused"] == 1
    assert found["error"] < 1e-4
