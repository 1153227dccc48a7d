"""The report of the fusion pass, the command `report`, and the log."""

from __future__ import annotations

import json
import logging
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from compile_passes.explain import explain
from compile_passes.report import FusionReport, SiteReport, layers_present, line, module_path, source_line
from mglu_ops.__main__ import main
from mglu_ops.nn import MGLU, NaiveMGLU
from tests.support.commands import run
from tests.support.programs.compiled import OfSource, layer, parameter
from tests.support.programs.graphs import Capture

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn
from mglu_ops.nn import NaiveMGLU


class Soft(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.mask = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.rand(8, 8))

    def forward(self, x):
        return F.silu(F.linear(x, self.weight * self.mask)) * F.linear(x, self.weight * (1 - self.mask))


def fused():
    return nn.Sequential(NaiveMGLU(8, 8, n_masks=3), NaiveMGLU(8, 8, activation="gelu")), (torch.randn(2, 8),)


def missed():
    return nn.Sequential(NaiveMGLU(8, 8), Soft()), (torch.randn(2, 8),)


def plain():
    return nn.Linear(8, 8), (torch.randn(2, 8),)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "some_model.py"
    path.write_text(MODEL)
    return path


class Mixed(nn.Module):
    """A layer with logits, a layer with packed masks, and a layer that cannot be fused."""

    def __init__(self) -> None:
        super().__init__()
        self.first = NaiveMGLU(8, 8, n_masks=2)
        self.second = NaiveMGLU(8, 8, n_masks=3, learnable_masks=False)
        self.soft = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(x))
        w = self.first.weight
        return F.relu(F.linear(x, w * self.soft)) * F.linear(x, w * (1 - self.soft))


def report_of(model: nn.Module) -> FusionReport:
    capture = Capture()
    with torch.no_grad():
        capture.compile(model)(torch.randn(2, 8))
    return capture.report


def test_report_prints_a_table_and_notes() -> None:
    text = str(report_of(Mixed()))
    head, _, header, *rows = text.splitlines()
    assert head == "2 fused, 1 missed, 1 graph seen"
    assert header.split("  ")[0] == "module"
    columns = [header.index(name) for name in ("module", "source", "masks", "activation", "dtype", "result", "masks p")]
    first, second, third = (
        [row[a:b].strip() for a, b in zip(columns, [*columns[1:], None], strict=True)] for row in rows[:3]
    )
    assert (first[0], *first[2:]) == ("first", "2", "silu", "float32", "mglu::forward", "at each call")
    assert (second[0], *second[2:]) == ("second", "3", "silu", "float32", "mglu::forward", "beforehand")
    assert third[2:] == ["1", "relu", "float32", "not fused [1]", ""]
    assert third[1].startswith("test_report.py:")
    assert "\n[1] mask `" in text
    assert "is a float32 tensor that nothing proves to be binary" in text
    assert "mglu_ops.freeze" in text


def test_a_near_miss_shows_no_masks_and_no_activation() -> None:
    source = "m = l > 0; F.softsign(linear(x, w * m)) * linear(x, w * ~m)"
    report = report_of(OfSource(source, w=parameter(8, 8), l=parameter(8, 8)))
    assert ": float32, not fused: one x is multiplied" in str(report.missed[0])
    assert "  float32  not fused [1]" in str(report)
    assert " 0 " not in str(report).splitlines()[3]


def test_an_empty_report_is_one_line() -> None:
    assert str(report_of(nn.Linear(8, 8))) == "0 fused, 0 missed, 1 graph seen"


@pytest.mark.parametrize(
    ("operator", "packed", "noted"),
    [("forward", "at each call", True), ("forward", "beforehand", False), ("forward_ste", "at each call", False)],
)
def test_masks_that_are_packed_at_each_call_are_noted(operator: str, packed: str, noted: bool) -> None:
    site = SiteReport("mlp", "", 2, "silu", "float32", operator, packed=packed)
    assert ("use mglu_ops.freeze" in str(FusionReport(fused=[site]))) is noted


@pytest.mark.parametrize("learnable", [True, False])
def test_layers_that_call_the_operator_already_are_listed(learnable: bool) -> None:
    report = report_of(MGLU(8, 8, n_masks=3, learnable_masks=learnable))
    assert str(report).startswith("0 fused, 0 missed, 1 called the operator already, 1 graph seen")
    (site,) = report.present
    expected = ("forward_ste", "at each call") if learnable else ("forward", "beforehand")
    assert (site.n_masks, site.activation, site.operator, site.packed) == (3, "silu", *expected)


def test_a_layer_that_rounds_x_is_listed_with_its_formats() -> None:
    formats = {"weight_format": "fp8_row", "activation_format": "fp8_token"}
    with torch.no_grad():
        report = report_of(MGLU(8, 8, learnable_masks=False, **formats))
    (site,) = report.present
    assert {name: getattr(site, name) for name in formats} == formats
    assert "mglu::forward, fp8_row, fp8_token" in str(report)


def test_arguments_of_the_operator() -> None:
    graph, mglu = Graph(), torch.ops.mglu
    x, weight, packed, logits = (graph.placeholder(name) for name in ("x", "weight", "packed", "logits"))
    examples = (torch.zeros(2, 8, dtype=torch.float16), torch.zeros(4, 8), torch.zeros(4, 2, 3), torch.zeros(5, 4, 8))
    for node, example in zip((x, weight, packed, logits), examples, strict=True):
        node.meta["example_value"] = example
    graph.call_function(mglu.forward.default, (x, weight, packed))
    graph.call_function(mglu.forward, (x, weight, packed, "gelu"))
    graph.call_function(mglu.forward.default, (x, weight, packed), {"activation": "relu"})
    graph.call_function(mglu.forward_ste.default, (x, weight, logits, "tanh", None))
    graph.call_function(mglu.forward.default, (x, weight, graph.placeholder("unknown")))
    graph.call_function(mglu.forward.default, (x, weight), {"packed_masks": packed})
    graph.call_function(mglu.pack_masks.default, (logits,))
    found = [(site.operator, site.n_masks, site.activation, site.dtype) for site in layers_present(graph)]
    assert found == [
        *(("forward", 3, activation, "float16") for activation in ("silu", "gelu", "relu")),
        ("forward_ste", 5, "tanh", "float16"),
        ("forward", 0, "silu", "float16"),
        ("forward", 3, "silu", "float16"),
    ]


def node_with(**meta: object) -> Node:
    node = Graph().placeholder("x")
    node.meta = meta
    return node


@pytest.mark.parametrize(
    ("recorded", "path"),
    [
        ("L['self']", ""),
        ("L['self'].layers[3].mlp", "layers.3.mlp"),
        ("L['model'].layers.3.mlp", "layers.3.mlp"),
        ("L['self']._modules['layers']._modules['3'].mlp", "layers.3.mlp"),
        ("L['self']._orig_mod.mlp", "mlp"),
        ("L['self']._orig_mod", ""),
        ("self.mlp", "mlp"),
        ("mlp", "mlp"),
    ],
)
def test_module_path(recorded: str, path: str) -> None:
    stack = {"a": ("L['self'].outer", nn.Module), "b": (recorded, nn.Module)}
    assert module_path(node_with(nn_module_stack=stack)) == path


def test_module_path_and_source_that_are_unknown() -> None:
    assert module_path(node_with()) == module_path(node_with(nn_module_stack={})) == ""
    assert source_line(node_with()) == source_line(node_with(stack_trace=None)) == ""


def test_source_line_is_the_innermost_of_the_user() -> None:
    of_torch = f'File "{torch.__file__}", line 3, in f'
    trace = f'File "a.py", line 1, in f\n    f()\nFile "b.py", line 2, in f\n{of_torch}\n'
    assert source_line(node_with(stack_trace=trace)) == "b.py:2"
    assert source_line(node_with(stack_trace=of_torch)) == f"{torch.__file__}:3"


def test_a_node_as_text() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    for target, args, kwargs, text in (
        (torch.cat, ([x, x], 0), {}, "cat = cat([x, x], 0)"),
        (F.softmax, (x,), {"dim": 1}, "softmax = softmax(x, dim=1)"),
        (torch.ops.aten.sort.default, (x,), {}, "sort_default = aten.sort(x)"),
    ):
        assert line(graph.call_function(target, args, kwargs)) == text
    x.meta["example_value"] = torch.zeros(2, 3)
    assert line(x) == "x"
    node = graph.call_method("relu", (x,))
    node.meta["example_value"] = torch.zeros(2, 3)
    assert line(node) == "relu [2, 3] = relu(x)"


@pytest.mark.parametrize(
    ("module", "source", "place"), [("mlp", "a.py:1", "mlp"), ("", "a.py:1", "a.py:1"), ("", "", "(function)")]
)
def test_place_of_a_layer(module: str, source: str, place: str) -> None:
    site = SiteReport(module, source, 2, "silu", "float32")
    assert str(site) == f"{place}: n_masks=2, silu, float32, fused to mglu::"


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops the examples on a CPU; the pass warns")
def test_masks_that_freezing_makes_constants_are_packed_when_compiled() -> None:
    with inductor_config.patch(freezing=True):
        report = report_of(Mixed())
    assert [site.packed for site in report.fused] == ["when compiled", "beforehand"]


def test_json_of_a_report_has_all_its_attributes() -> None:
    report = report_of(Mixed())
    parsed = json.loads(report.to_json())
    sites = [
        SiteReport(**{k: tuple(v) if isinstance(v, list) else v for k, v in site.items()})
        for site in (*parsed["fused"], *parsed["missed"])
    ]
    assert sites == [*report.fused, *report.missed]
    assert parsed["graphs"] == 1


def test_picture_shows_the_layer_before_and_after() -> None:
    fused, _ = report_of(Mixed()).fused
    lines = fused.picture().splitlines()
    before, after = lines[lines.index("before:") + 1 : lines.index("after:")], lines[lines.index("after:") + 1 :]
    assert sum(" = linear(" in line for line in before) == 4
    assert [line.split(" = ")[1].split("(")[0] for line in after] == ["mglu.pack_logits", "mglu.forward"]
    assert any("[2, 8] = silu(" in line for line in before)


def test_pass_logs_each_layer(caplog: pytest.LogCaptureFixture) -> None:
    """The pass logs with Python's `logging`. `TORCH_LOGS="+compile_passes.fusion"` shows this log, too."""
    with caplog.at_level(logging.DEBUG, logger="compile_passes.fusion"):
        report_of(Mixed())
    records = [record for record in caplog.records if record.name == "compile_passes.fusion"]
    assert sorted(record.levelname for record in records) == ["DEBUG", "DEBUG", "INFO"]
    assert any("fused to mglu::forward" in record.getMessage() for record in records)


@pytest.mark.long
def test_torch_logs_shows_the_log(file: Path) -> None:
    program = f"import sys; from mglu_ops.__main__ import main; sys.exit(main(['report', {str(file)!r} + ':missed']))"
    result = run([sys.executable, "-c", program], TORCH_LOGS="+compile_passes.fusion")
    assert result.returncode == 1, result.stderr
    assert "fused to mglu::forward" in result.stderr
    assert "not fused: mask" in result.stderr


# --- explain ---------------------------------------------------------------------------------------------------------


def test_explain_leaves_the_model_as_it_was() -> None:
    model, x = nn.Sequential(NaiveMGLU(8, 8), nn.Dropout(0.5), MGLU(8, 8)).train(), torch.randn(2, 8)
    for train, operator in ((False, "forward"), (True, "forward_ste")):
        report = explain(model, x, train=train)
        assert [site.operator for site in report.fused] == [operator]
        assert model.training
        assert model[1].training
    assert isinstance(model[0], NaiveMGLU)


def test_explain_names_a_wrong_input_in_one_line() -> None:
    model = nn.Sequential(NaiveMGLU(8, 8)).eval()
    for inputs, words in (
        (
            (torch.randn(2, 9),),
            r"inputs: the model failed on float32 \[2, 9\]: ValueError: x: got shape \[2, 9\], must be",
        ),
        ((None,), "inputs: the model failed on None: TypeError: x: got None"),
        ((), "inputs: the model failed on no inputs: TypeError: .* missing 1 required positional argument"),
    ):
        with pytest.raises(ValueError, match=words) as caught:
            explain(model, *inputs)
        assert "\n" not in str(caught.value)
        assert len("".join(traceback.format_exception(caught.value)).splitlines()) < 60
    assert not model.training


@pytest.mark.parametrize("model", ["model", None, 3])
def test_explain_refuses_an_object_that_is_not_a_model(model: object) -> None:
    with pytest.raises(ValueError, match=r"model: got (str|NoneType|int), must be a torch\.nn\.Module or a function"):
        explain(model, torch.randn(2, 8))


def test_explain_says_what_dynamo_cannot_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("not this one\nand 200 lines more")

    monkeypatch.setattr(torch, "compile", fails)
    with pytest.raises(ValueError, match=r"^model: Dynamo cannot capture it: RuntimeError: not this one \(test_report"):
        explain(nn.Linear(8, 8), torch.randn(2, 8))


def test_explain_command(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", f"{file}:fused"]) == 0
    assert capsys.readouterr().out.startswith("2 fused, 0 missed, 1 graph seen\n")
    assert main(["report", f"{file}:fused", "--train", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [(site["n_masks"], site["activation"], site["operator"]) for site in report["fused"]] == [
        (3, "silu", "forward_ste"),
        (1, "gelu", "forward_ste"),
    ]
    assert main(["report", f"{file}:missed", "--graphs"]) == 1
    assert "nothing proves to be binary" in capsys.readouterr().out
    assert main(["report", f"{file}:missed", "--assume-binary"]) == 0
    assert main(["report", f"{file}:plain"]) == 1
    assert "0 fused, 0 missed" in capsys.readouterr().out


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("is_selective", [True, False])
def test_a_policy_that_saves_products_must_name_the_operator(is_selective: bool, training: bool) -> None:
    """Torch has such a policy by operator, and a fused layer has no products that it could save."""

    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_saved = op in (torch.ops.aten.mm.default, torch.ops.mglu.forward_train.default)
        return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    options = {"context_fn": contexts} if is_selective else {}
    model, capture = layer(), Capture(strict=True)
    with torch.set_grad_enabled(training):
        capture.compile(lambda x: checkpoint(model, x, use_reentrant=False, **options))(torch.randn(3, 16))
    (site,) = capture.report.fused
    assert ("name torch.ops.mglu.forward_train in the policy" in site.note) == (is_selective and training)
