"""`load` refuses packages for another environment, wrong arguments, and missing files."""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

import mglu_ops
from mglu_ops.packaging.seal import PackageError
from tests.support.packaging import write_small_package


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.9.1"}, "compiled by torch 2.9.1"),
        ({"device": "cuda", "arch": [9, 0]}, "for a GPU, and torch sees none|compute capability|cannot load"),
        ({"cpu": ["vax", "DEFAULT"]}, "compiled for a CPU vax DEFAULT"),
        ({"cpu": [platform.machine(), "AVX1024"]}, "AVX1024"),
        ({"embeds_weights": False}, "pass weights="),
    ],
)
def test_a_package_for_another_environment_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    write_small_package(tmp_path / "model.pt2", **changes)
    with pytest.raises(mglu_ops.PackageError, match=words):
        mglu_ops.load(tmp_path / "model.pt2")


LEVELS = ("DEFAULT", "AVX2", "AVX512")


@pytest.mark.parametrize("made", LEVELS)
@pytest.mark.parametrize("here", LEVELS)
def test_a_cpu_runs_code_for_its_vector_instructions_and_for_fewer(tmp_path, monkeypatch, made, here):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: here)
    write_small_package(tmp_path / "model.pt2", cpu=[platform.machine(), made])
    is_refused = LEVELS.index(made) > LEVELS.index(here)
    words = f"was compiled for a CPU {platform.machine()} {made}, and this is" if is_refused else "torch cannot load it"
    with pytest.raises(PackageError, match=words):
        mglu_ops.load(tmp_path / "model.pt2")


def test_a_package_for_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    write_small_package(tmp_path / "model.pt2", device="cuda", arch=[9, 0])
    with pytest.raises(PackageError, match=r"capability 9.0, and this GPU \(a GPU\) has 8.9; export it here"):
        mglu_ops.load(tmp_path / "model.pt2")


def test_arguments_of_another_type_are_named(tmp_path: Path) -> None:
    for call, name in (
        (lambda: mglu_ops.load(3), "path"),
        (lambda: mglu_ops.load(b"model.pt2"), "path"),
        (lambda: mglu_ops.load("model.pt2", weights=3), "weights"),
        (lambda: mglu_ops.load_weights(None), "path"),
        (lambda: mglu_ops.build_runtime(3), "out"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got (int|bytes|NoneType), must be a path"):
            call()
    with pytest.raises(ValueError, match="device: got 'tpu:x', must be a device such as"):
        mglu_ops.load_weights(tmp_path / "weights.pt", "tpu:x")


def test_missing_files_are_named(tmp_path: Path) -> None:
    for load in (mglu_ops.load, mglu_ops.load_weights):
        with pytest.raises(FileNotFoundError, match=r"missing\.pt2 is not a file"):
            load(tmp_path / "missing.pt2")
