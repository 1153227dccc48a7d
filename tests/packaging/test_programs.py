"""Packages run in processes without Python: in `run_package`, and in the program of csrc/README.md."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

import mglu_ops
from mglu_ops.packaging.tensor_file import write_tensor
from tests.support.commands import ROOT, run, snippets
from tests.support.packaging import TOKENS, inputs, needs_compiler, run_package, tensor_files

pytest_plugins = ["tests.support.packaging"]
pytestmark = [needs_compiler]


def test_the_program_needs_no_python(library: Path) -> None:
    needed = run(["ldd", library.with_name("run_package")]).stdout
    assert "libmglu_ops.so" in needed
    assert "libtorch_cpu.so" in needed
    assert "libpython" not in needed
    assert "not found" not in needed


def test_a_package_agrees_with_eager(library: Path, packages: Path) -> None:
    """The results for 1, 7 and 64 tokens agree with files that eager PyTorch wrote."""
    process = run_package(library.parent, packages / "operator.pt2", "--time", "2", *tensor_files(packages))
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(re.findall(r"[\d.]+ us a call", process.stdout)) == 3


def test_a_package_gives_the_bits_that_it_gives_in_python(library: Path, packages: Path, tmp_path: Path) -> None:
    write_tensor(tmp_path / "y.tensor", mglu_ops.load(packages / "operator.pt2")(inputs(7)))
    files = packages / "x7.tensor", tmp_path / "y.tensor"
    process = run_package(library.parent, packages / "operator.pt2", "--tolerance", "0", *files)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
@pytest.mark.parametrize("tokens", TOKENS)
def test_experts_give_the_bits_that_they_give_in_python(library, expert_package, tmp_path, tokens):
    write_tensor(tmp_path / "x.tensor", inputs(tokens))
    write_tensor(tmp_path / "y.tensor", mglu_ops.load(expert_package)(inputs(tokens)))
    files = tmp_path / "x.tensor", tmp_path / "y.tensor"
    process = run_package(library.parent, expert_package, "--tolerance", "0", *files)
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
def test_a_package_reads_its_weights_from_a_file(library, packages, more_packages):
    package, weights, tensors = more_packages / "bare.pt2", more_packages / "weights.pt", tensor_files(packages)[:2]
    process = run_package(library.parent, package, "--weights", weights, *tensors)
    assert process.returncode == 0, process.stdout + process.stderr
    foreign = run_package(library.parent, package, "--weights", packages / "x7.tensor", *tensors)
    assert foreign.returncode == 2
    assert foreign.stderr.startswith("run_package: ")
    without = run_package(library.parent, package, *tensors)
    assert without.returncode == 2
    assert "has no weights in it" in without.stderr


def test_a_damaged_package_is_refused(library: Path, packages: Path, tmp_path: Path) -> None:
    whole = (packages / "operator.pt2").read_bytes()
    damaged = tmp_path / "damaged.pt2"
    in_code = whole.index(b"\x7fELF") + 5000
    for data, reason in (
        (whole[: len(whole) // 2], "has no seal"),
        (whole[:in_code] + bytes([whole[in_code] ^ 1]) + whole[in_code + 1 :], "its checksum is wrong"),
    ):
        damaged.write_bytes(data)
        process = run_package(library.parent, damaged, packages / "x7.tensor", packages / "y7.tensor")
        assert process.returncode == 2
        assert reason in process.stderr


def test_the_program_explains_its_arguments(library: Path) -> None:
    helped = run_package(library.parent, "--help")
    assert helped.returncode == 0
    assert helped.stdout.startswith("usage: run_package MODEL.pt2 [--weights FILE]")
    for words, problem in (
        ([], "a package is missing"),
        (["model.pt2", "--times", "3"], "got the unknown option --times"),
        (["model.pt2", "--time", "3x"], "--time: got '3x', must be a number of at least 0"),
        (["model.pt2", "x.tensor"], "INPUT x.tensor has no RESULT"),
    ):
        refused = run_package(library.parent, *words)
        assert refused.returncode == 2
        assert problem in refused.stderr


def test_a_wrong_result_is_noticed(library: Path, packages: Path) -> None:
    package, x, y = packages / "operator.pt2", packages / "x7.tensor", packages / "y7.tensor"
    assert run_package(library.parent, package, x, y, "--tolerance", "1e-12").returncode == 1
    other = run_package(library.parent, package, x, packages / "y64.tensor")
    assert other.returncode == 2
    assert "another shape" in other.stderr


@pytest.mark.long
@pytest.mark.parametrize("package", ["operator", "composite"])
def test_packages_run_under_sanitizers(programs: Path, packages: Path, more_packages: Path, package: str) -> None:
    folder = packages if package == "operator" else more_packages
    process = run_package(programs, folder / f"{package}.pt2", *tensor_files(packages))
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
def test_weights_files_are_read_under_sanitizers(programs: Path, packages: Path, more_packages: Path) -> None:
    package, weights = more_packages / "bare.pt2", more_packages / "weights.pt"
    process = run_package(programs, package, "--weights", weights, *tensor_files(packages)[:2])
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
def test_damaged_packages_and_hostile_tensors_are_refused_under_sanitizers(programs: Path, packages: Path) -> None:
    process = run([programs / "fuzz", "2", packages / "small.pt2"])
    assert process.returncode == 0, process.stdout + process.stderr


@pytest.mark.long
def test_the_snippets_of_the_page_run_in_order(tmp_path: Path) -> None:
    """The C++ program is built with g++ and with CMake, and loads the package that the Python snippet makes."""
    page = (ROOT / "csrc/README.md").read_text()
    for language, name in (("python", "readme.py"), ("cpp", "main.cpp"), ("cmake", "CMakeLists.txt")):
        (snippet,) = snippets(page, language)
        (tmp_path / name).write_text(snippet)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    script = "\n".join(["set -euo pipefail", "python readme.py", *snippets(page, "bash")])
    process = run(["bash", "-c", script], timeout=600, folder=tmp_path, PATH=path)
    assert process.returncode == 0, process.stderr
    results = [line for line in process.stdout.splitlines() if line.startswith("[") and "%" not in line]
    assert results == ["[1, 64]", "[7, 64]", "[64, 64]"] * 2
