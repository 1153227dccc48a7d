"""Runs the examples that quantize, train experts, evaluate and export, at a small size, and checks their errors."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import ROOT, run
from tests.support.packaging import needs_compiler


def run_example(name: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return run([sys.executable, ROOT / "examples" / name, *arguments], timeout=500, **environment)


@needs_compiler
@pytest.mark.long
def test_a_block_is_exported_and_run_in_cpp(tmp_path: Path) -> None:
    arguments = ("--hidden", "32", "--intermediate", "64", "--n-masks", "2")
    process = run_example("export_cpp.py", "--out", tmp_path, *arguments)
    assert process.returncode == 0, process.stderr
    assert "agree with PyTorch's, for 1, 7 and 64 tokens" in process.stdout
    assert {"model.pt2", "libmglu_ops.so", "run_package"} <= {path.name for path in tmp_path.iterdir()}


@pytest.mark.long
@pytest.mark.parametrize(("weight_format", "size"), [("fp8_row", 96 * 64 + 4 * 96), ("int4_group", 96 * 34)])
def test_a_model_is_quantized_saved_and_loaded(weight_format: str, size: int, tmp_path: Path) -> None:
    small = ("--hidden", "64", "--intermediate", "96", "--n-masks", "2", "--output", tmp_path / "out/model.pt")
    process = run_example("quantize.py", *small, "--weight-format", weight_format)
    assert process.returncode == 0, process.stderr
    masks = 96 * 8 * 2
    assert f"{weight_format}: {96 * 64 * 2 + masks} -> {size + masks} bytes a layer" in process.stdout
    assert "the same results, True" in process.stdout
    assert f"weight in {weight_format}" in process.stdout


@pytest.mark.long
def test_what_train_trainer_writes_is_evaluated_offline(tmp_path: Path) -> None:
    pytest.importorskip("mglu_ops.transformers")
    pytest.importorskip("lm_eval", reason="the tests do not depend on the extra `evaluate`, which brings 48 packages")
    small = ("--size", "tiny", "--steps", "2", "--bytes", "30000")
    trained = run_example("train_trainer.py", *small, "--output", tmp_path / "model")
    assert trained.returncode == 0, trained.stderr[-4000:]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    for name in ("model", "model-frozen"):
        process = run_example("evaluate.py", tmp_path / name, "--limit", "10", **offline)
        assert process.returncode == 0, process.stderr[-4000:]
        assert "|next_line_of_python|" in process.stdout
        assert "evaluated next_line_of_python in" in process.stdout


@pytest.mark.parametrize("missing", ["lm_eval", "transformers"])
def test_a_missing_package_is_named_with_the_extras(missing: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    for name in ("transformers", "lm_eval"):  # one package cannot be imported, and the other is empty
        text = f"raise ImportError('No module named {name}')" if name == missing else ""
        (tmp_path / f"{name}.py").write_text(text)
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    process = run_example("evaluate.py", tmp_path, PYTHONPATH=path)
    assert process.returncode == 1
    last = process.stderr.strip().splitlines()[-1]
    assert last == f'No module named {missing}; in a clone, run: pip install ".[evaluate,transformers]"'


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    process = run_example("evaluate.py", tmp_path)
    assert process.returncode == 2
    assert "must be a folder with a config.json" in process.stderr


@pytest.mark.long
def test_a_mixture_is_trained_frozen_quantized_and_served(tmp_path: Path) -> None:
    options = ["--steps", "20", "--size", "tiny", "--experts", "3", "--bytes", "200000", "--output", tmp_path / "model"]
    process = run_example("experts.py", *options, "--weight-format", "int4_group")
    assert process.returncode == 0, process.stderr
    printed = process.stdout
    before, trained = map(float, re.search(r"steps: (\S+) -> (\d\.\d{3}),", printed).groups())
    frozen, quantized = (float(re.search(rf"{name}: (\S+)", printed)[1]) for name in ("frozen", "int4_group"))
    assert trained < before - 0.5
    assert frozen == pytest.approx(trained, abs=0.002)
    assert quantized == pytest.approx(trained, abs=0.1)
    one, masks = 32 * 32, 32 * 4 * 2  # elements of one projection, and bytes of one expert's masks
    assert f"{3 * (8 * one + masks)} -> {3 * (one + 4 * 32 + masks)} bytes" in printed
    assert "def __init__(self" in printed.split("it writes")[1]
