"""examples/demo.py succeeds at a small size, and fails if results disagree."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import mglu_ops
from mglu_ops.timer import milliseconds
from tests.support.commands import ROOT, run

DEMO = ROOT / "examples" / "demo.py"
SMALL = ["--device", "cpu", "--layer", "128", "64", "--layers", "1", "--width", "32", "--n-masks", "2", "--steps", "60"]


def start(program: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the demo in a folder, at a small size."""
    return run([sys.executable, *program, *SMALL], folder=folder, timeout=500)


@pytest.mark.long
def test_the_demo_times_a_layer_and_takes_a_model_to_a_package(tmp_path: Path) -> None:
    done = start([str(DEMO)], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    for row in ("SwiGLU, compiled", "MGLU, 4 masks, naive, compiled", "MGLU, 4 masks, frozen"):
        _, milliseconds, ratio, error = re.findall(rf"^{row} +(.+)$", done.stdout, re.MULTILINE)[0].split()
        assert float(milliseconds) > 0
        assert re.fullmatch(r"\d+\.\d\dx", ratio)
        assert 0 < float(error) < 4e-6
    losses = [float(loss) for loss in re.findall(r"step \d+ of 60: loss (\S+)", done.stdout)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 1
    assert "1 fused, 0 missed" in done.stdout
    assert "The syntax for " in done.stdout
    assert (tmp_path / "build" / "examples" / "demo.pt2").is_file()
    for form in ("compiled and fused", "frozen", "exported and loaded"):
        assert re.search(rf"^{form} .* agrees$", done.stdout, re.MULTILINE), form
    assert "everything agrees" in done.stdout


WRONG_KERNEL = f"""
import runpy, mglu_ops
from mglu_ops import dispatch
right = dispatch.train
def wrong(*arguments):
    result, *saved = right(*arguments)
    return (result * 1.001, *saved)
dispatch.train = wrong
runpy.run_path({str(DEMO)!r}, run_name="__main__")
"""


@pytest.mark.long
def test_a_wrong_kernel_fails_the_demo(tmp_path: Path) -> None:
    done = start(["-c", WRONG_KERNEL], tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stderr.splitlines()[-1] == "FAILED: the forms of the model disagree"
    assert re.findall(r"^(.+?)  .*DISAGREES$", done.stdout, re.MULTILINE) == ["compiled and fused"]


@pytest.fixture(scope="module")
def demo() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(DEMO)))


def with_wrong_gradient(logits: Tensor) -> Tensor:
    if logits.requires_grad:
        logits.register_hook(lambda gradient: gradient * 1.001)
    return logits


@pytest.mark.parametrize(
    ("wrong", "trained", "deployed"),
    [
        (lambda logits: logits, True, True),
        (lambda logits: logits * 1.001, False, False),
        (lambda logits: logits * float("nan"), False, False),
        (with_wrong_gradient, False, True),
        (lambda logits: logits * (1.001 if logits.shape[1] == 1 else 1), True, False),
    ],
    ids=["right", "outputs", "nan", "gradients", "one token"],
)
def test_each_form_is_compared_with_float64(wrong, trained, deployed, demo, capsys):
    torch.manual_seed(0)
    model = demo.LanguageModel(layers=1, width=32, n_masks=2)
    inputs, following = torch.randint(256, (2, 4, 16))

    def form(tokens: Tensor) -> Tensor:
        return wrong(model(tokens))

    assert demo.compare(model, form, {}, inputs, following) == trained
    assert demo.compare(model, model, {"deployed": form}, inputs, following) == deployed
    assert capsys.readouterr().out.count("DISAGREES") == 2 - trained - deployed


def test_a_model_that_has_not_learned_fails(demo: SimpleNamespace) -> None:
    text = torch.randint(256, (20_000,))
    with pytest.raises(SystemExit, match="FAILED: the model has not learned"):
        demo.check_learning(lambda tokens: torch.zeros(*tokens.shape, 256), text.clamp(max=99), text.clamp(max=99))


def test_a_wrong_layer_fails(demo, monkeypatch, capsys):
    freeze = mglu_ops.freeze

    def wrong(layer: torch.nn.Module) -> torch.nn.Module:
        layer.weight.data *= 1.001
        return freeze(layer)

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    demo.time_layer(32, 16, torch.device("cpu"))
    monkeypatch.setattr(mglu_ops, "freeze", wrong)
    with pytest.raises(SystemExit, match="FAILED: the error of MGLU, 1 mask, frozen is 2"):
        demo.time_layer(32, 16, torch.device("cpu"))
    assert "MGLU, 4 masks, frozen" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--width", "33"], "--width: got 33, must be a multiple of 32"),
        (["--n-masks", "17"], "--n-masks: got 17, must be at most 16"),
        (["--layer", "8", "0"], "--layer: got 0, must be at least 1"),
    ],
)
def test_a_wrong_option_is_named(options, words, demo, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["demo.py", *options])
    with pytest.raises(SystemExit) as ended:
        demo.main()
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_the_timer_interleaves_variants_and_drops_the_first_round() -> None:
    order: list[str] = []
    variants = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = milliseconds(variants, torch.device("cpu"), rounds=2, calls=2)
    assert order == ["a", "a", "b", "b"] * 3
    assert set(times) == {"a", "b"}
