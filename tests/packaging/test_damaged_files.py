"""Damaged and foreign packages, libraries and checkpoints give an error message, and never a crash."""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import platform
import random
import zipfile
from pathlib import Path

import pytest
import torch
from crafted_packages import INFO, INPUT, package_with, write_small_package
from hypothesis import given
from hypothesis import strategies as st
from library_fixtures import needs_compiler, run_package

import mglu_ops
from mglu_ops.nn import MGLU
from mglu_ops.packaging.library import load_library
from mglu_ops.packaging.package import KEY, PackageError, read_info

pytest_plugins = ["library_fixtures"]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package that passes every check but has no code to run."""
    path = tmp_path / "model.pt2"
    write_small_package(path)
    assert read_info(path).torch == torch.__version__
    return path


def rewritten(path: Path, **changes: object) -> Path:
    """Overwrite a package by one with changes in its description."""
    values = {**json.loads(INFO.texts()[KEY]), **changes}
    path.write_bytes(package_with(values, torch_version=values["torch"], device=values["device"]))
    return path


# --- Packages -------------------------------------------------------------------------------------------------------


def members(path: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_truncated_packages_are_refused(package: Path, tmp_path: Path) -> None:
    whole, truncated = package.read_bytes(), tmp_path / "truncated.pt2"
    for size in range(0, len(whole), 13):
        truncated.write_bytes(whole[:size])
        with pytest.raises(PackageError, match=r"truncated\.pt2"):
            read_info(truncated)


def flips(whole: bytes, count: int) -> list[bytes]:
    generator = random.Random(0)
    found = []
    for _ in range(count):
        changed = bytearray(whole)
        # Half of the changes are in the zip directory at the end, which tells the reader where to look.
        start = generator.choice((0, max(0, len(whole) - 600)))
        changed[generator.randrange(start, len(whole))] ^= 1 << generator.randrange(8)
        found.append(bytes(changed))
    return found


def test_packages_with_a_changed_bit_are_refused_or_unchanged_in_content(package: Path, tmp_path: Path) -> None:
    expected, refused = members(package), 0
    for changed in flips(package.read_bytes(), 800):
        flipped = tmp_path / "flipped.pt2"
        flipped.write_bytes(changed)
        try:
            read_info(flipped)
        except PackageError:
            refused += 1
        else:  # the bit is part of a date, for example, and the content is the same
            assert members(flipped) == expected
    assert refused > 400


@needs_compiler
def test_the_library_refuses_damaged_packages_too(package: Path, library: Path, tmp_path: Path) -> None:
    check = ctypes.CDLL(str(library)).mglu_check_package
    check.restype = ctypes.c_char_p

    def problem(path: Path, version: str | None = None, device: str | None = None) -> str:
        words = [None if word is None else word.encode() for word in (str(path), version, device)]
        return (check(*words) or b"").decode(errors="replace")  # the message may quote damaged text

    assert problem(package) == ""
    assert problem(package, torch.__version__, "cpu") == ""
    assert "compiled by torch" in problem(package, "9.9.0")
    assert "compiled for cpu, not for cuda" in problem(package, None, "cuda")
    assert "No such file" in problem(tmp_path / "missing.pt2")
    whole, changed_file, expected = package.read_bytes(), tmp_path / "changed.pt2", members(package)
    for size in range(0, len(whole), 13):
        changed_file.write_bytes(whole[:size])
        assert "changed.pt2: " in problem(changed_file)
    for changed in flips(whole, 800):
        changed_file.write_bytes(changed)
        if problem(changed_file) == "":
            with contextlib.suppress(zipfile.BadZipFile, NotImplementedError):  # zipfile checks more of the directory
                assert members(changed_file) == expected


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"torch": "2.9.1"}, "compiled by torch 2.9.1"),
        ({"device": "cuda", "arch": [9, 0]}, "for a GPU, and torch sees none|compute capability|cannot load"),
        ({"cpu": ["vax", "DEFAULT"]}, "compiled for a CPU vax DEFAULT"),
        ({"cpu": [platform.machine(), "AVX1024"]}, "AVX1024"),
        ({"inputs": [{**INPUT, "order": [0, 0]}]}, "its description: 'x': its order is none of its dimensions"),
        ({"inputs": [{**INPUT, "dtype": "nn"}]}, "its description: 'x': torch has no dtype 'nn'"),
        ({"inputs": [INPUT], "conditions": ["s0 % 2 == 0", "s1 > 0"]}, "no size of its inputs tells 's1'"),
        ({"conditions": ["__import__('os').abort()"]}, "'__import__.*' is no expression in sizes"),
        ({"calls": "shim"}, "pass library="),
        ({"embeds_weights": False}, "pass weights="),
        ({"format": 7}, "its description: format: got 7, must be 3; export the model anew"),
        ({"layers": 3}, "its description: layers: got 3, must be a list"),
        ({"surprise": 1}, "its description: 'surprise' is unknown to this version of mglu_ops"),
    ],
)
def test_a_package_for_another_environment_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(PackageError, match=words):
        mglu_ops.load(rewritten(tmp_path / "model.pt2", **changes))


LEVELS = ("DEFAULT", "AVX2", "AVX512")


@pytest.mark.parametrize("made", LEVELS)
@pytest.mark.parametrize("here", LEVELS)
def test_a_cpu_runs_code_for_its_vector_instructions_and_for_fewer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, made: str, here: str
) -> None:
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: here)
    path = rewritten(tmp_path / "model.pt2", cpu=[platform.machine(), made])
    is_refused = LEVELS.index(made) > LEVELS.index(here)
    words = f"was compiled for a CPU {platform.machine()} {made}, and this is" if is_refused else "torch cannot load it"
    with pytest.raises(PackageError, match=words):
        mglu_ops.load(path)


def test_a_package_for_another_gpu_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 9))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")
    path = rewritten(tmp_path / "model.pt2", device="cuda", arch=[9, 0])
    with pytest.raises(PackageError, match=r"capability 9.0, and this GPU \(a GPU\) has 8.9; export it here"):
        mglu_ops.load(path)


def test_arguments_of_another_type_are_named(tmp_path: Path) -> None:
    for call, name in (
        (lambda: mglu_ops.load(3), "path"),
        (lambda: mglu_ops.load(b"model.pt2"), "path"),
        (lambda: mglu_ops.load("model.pt2", library=3), "library"),
        (lambda: mglu_ops.load("model.pt2", weights=3), "weights"),
        (lambda: mglu_ops.load_weights(None), "path"),
        (lambda: mglu_ops.load_library(3), "path"),
        (lambda: mglu_ops.build_runtime(3), "out"),
    ):
        with pytest.raises(TypeError, match=f"^{name}: got (int|bytes|NoneType), must be a path"):
            call()
    with pytest.raises(ValueError, match="device: got 'tpu:x', must be a device such as"):
        mglu_ops.load_weights(tmp_path / "weights.pt", "tpu:x")


def test_files_that_are_no_packages_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        mglu_ops.load(tmp_path / "missing.pt2")
    foreign = tmp_path / "foreign.pt2"
    torch.save({"weight": torch.ones(3)}, foreign)
    with pytest.raises(PackageError, match=r"was not made by mglu_ops\.export"):
        mglu_ops.load(foreign)
    with torch.no_grad():
        torch.export.save(torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),)), foreign)
    with pytest.raises(
        PackageError, match=r"is a program of torch.export.save and no package: torch\.export\.load reads"
    ):
        mglu_ops.load(foreign)
    foreign.write_bytes(b"\x7fELF" + bytes(1000))
    with pytest.raises(PackageError, match="has no seal at its end"):
        mglu_ops.load(foreign)


def test_a_package_without_code_gives_the_error_of_torch(package: Path) -> None:
    with pytest.raises(PackageError, match="torch cannot load it"):
        mglu_ops.load(package)


@needs_compiler
def test_the_library_asks_for_weights(package: Path, library: Path, tmp_path: Path) -> None:
    """Torch's loader would run the package without them, and crash."""
    checks = ctypes.CDLL(str(library))
    check, weights, bare = checks.mglu_check_model, tmp_path / "weights.pt", tmp_path / "bare.pt2"
    check.restype = ctypes.c_char_p
    torch.save({"weight": torch.ones(3)}, weights)
    rewritten(bare, embeds_weights=False)

    def problem(path: Path, weights: Path | None) -> str:
        words = [None if word is None else str(word).encode() for word in (path, weights, torch.__version__, "cpu")]
        return (check(*words) or b"").decode()

    assert problem(package, None) == problem(bare, weights) == ""
    assert problem(bare, None).startswith(f"{bare}: it has no weights in it: give the model the file of export")
    assert problem(package, weights) == f"{package}: it has its own weights"
    assert problem(bare, tmp_path / "no.pt").startswith(f"{tmp_path}/no.pt: ")
    for foreign in (bare, package):
        assert problem(bare, foreign) == f"{foreign}: it is no file of weights: torch.save did not write it"
        with pytest.raises(PackageError, match=r"it is no file of weights: torch\.save did not write it"):
            mglu_ops.load_weights(foreign)


@needs_compiler
@pytest.mark.long
def test_the_program_refuses_damaged_packages(programs: Path, packages: Path, tmp_path: Path) -> None:
    whole = (packages / "operator.pt2").read_bytes()
    damaged = tmp_path / "damaged.pt2"
    start = whole.index(b"\x7fELF")
    for data in (whole[: len(whole) // 2], whole[: start + 5000] + b"\xff" + whole[start + 5001 :], b"", b"PK\5\6"):
        damaged.write_bytes(data)
        process = run_package(programs, damaged, packages / "x7.tensor", packages / "y7.tensor")
        assert process.returncode == 2, process.stdout
        assert process.stderr.startswith("run_package: ")


# --- Weights and libraries ------------------------------------------------------------------------------------------


def test_damaged_or_foreign_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.arange(1000.0)}, path)
    whole = path.read_bytes()
    assert torch.equal(mglu_ops.load_weights(path)["weight"], torch.arange(1000.0))
    middle = whole.index(torch.arange(500.0, 510.0).numpy().tobytes())
    for data in (whole[:-100], whole[: middle + 1] + b"\x55" + whole[middle + 2 :], b""):
        path.write_bytes(data)
        with pytest.raises(PackageError):
            mglu_ops.load_weights(path)
    torch.save([1, 2], path)
    with pytest.raises(PackageError, match="something else"):
        mglu_ops.load_weights(path)


@needs_compiler
def test_damaged_or_foreign_libraries_are_refused(library: Path, tmp_path: Path) -> None:
    copy = tmp_path / "libmglu_ops.so"
    checksum = tmp_path / "libmglu_ops.so.sha256"
    with pytest.raises(FileNotFoundError, match="build-runtime"):
        load_library(copy)
    whole = library.read_bytes()
    copy.write_bytes(whole)
    with pytest.raises(PackageError, match=r"has no libmglu_ops\.so\.sha256"):
        load_library(copy)
    checksum.write_text(library.with_name(checksum.name).read_text())
    for data in (whole[: len(whole) // 2], whole[:-9] + b"\x55" + whole[-8:], b""):
        copy.write_bytes(data)
        with pytest.raises(PackageError, match="truncated, damaged"):
            load_library(copy)


@given(st.integers(0, 2**31), st.sampled_from(["truncate", "flip"]))
def test_a_damaged_checkpoint_is_refused_or_unchanged_in_content(tmp_path: Path, seed: int, how: str) -> None:
    layer = MGLU(20, 4, n_masks=2, learnable_masks=False)
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    whole, generator = bytearray(file.getvalue()), random.Random(seed)
    at = generator.randrange(len(whole))
    if how == "truncate":
        del whole[at:]
    else:
        whole[at] ^= 1 << generator.randrange(8)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(whole)
    expected = {name: value.clone() for name, value in layer.state_dict().items()}
    try:
        found = mglu_ops.load_weights(path)
    except PackageError:
        return
    assert how == "flip"
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())
