"""Python and C++ find any damage to a package or a weights file, and name the problem of other files."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import mglu_ops
from mglu_ops.packaging.seal import PackageError, check_seal, seal
from tests.support.packaging import needs_compiler, write_small_package

pytest_plugins = ["tests.support.packaging"]

Check = Callable[..., str]
"""A function `check(package, weights=None, torch_version=None, device=None)` that returns the problem, or ""."""


def in_python(package: Path, weights: Path | None = None) -> str:
    try:
        check_seal(package, "package")
        if weights is not None:
            check_seal(weights, "weights")
    except PackageError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def in_cpp(library: Path) -> Check:
    function = ctypes.CDLL(str(library)).mglu_check_model
    function.restype = ctypes.c_char_p

    def check(*words: object) -> str:
        given = [None if word is None else str(word).encode() for word in (*words, None, None, None)[:4]]
        return (function(*given) or b"").decode(errors="replace")  # the message may quote damaged text

    return check


@pytest.fixture(params=["Python", pytest.param("C++", marks=needs_compiler)])
def check(request: pytest.FixtureRequest) -> Check:
    return in_python if request.param == "Python" else request.getfixturevalue("in_cpp")


@pytest.fixture
def bare(tmp_path: Path) -> Path:
    """A package with its weights in a separate file."""
    path = tmp_path / "bare.pt2"
    write_small_package(path, b"some code", embeds_weights=False)
    return path


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "weights.pt"
    torch.save({"weight": torch.arange(100.0)}, path)
    seal(path, "weights")
    return path


def test_whole_files_are_accepted(check: Check, bare: Path, weights: Path) -> None:
    assert check(bare, weights) == ""
    assert torch.equal(mglu_ops.load_weights(weights)["weight"], torch.arange(100.0))


def damaged(whole: bytes) -> Iterator[bytes]:
    """Yield copies of a file: one for each changed byte, one for each shorter length, and three with more bytes."""
    for at in range(len(whole)):
        changed = bytearray(whole)
        changed[at] ^= 1 << at % 8
        yield bytes(changed)
        yield whole[:at]
    yield from (whole + b"x", b"x" + whole, whole + whole)


@pytest.mark.parametrize("name", ["bare", pytest.param("weights", marks=pytest.mark.long)])
def test_any_damage_is_found(name: str, check: Check, bare: Path, weights: Path) -> None:
    path = {"bare": bare, "weights": weights}[name]
    for number, data in enumerate(damaged(path.read_bytes())):
        path.write_bytes(data)
        assert str(path) in check(bare, weights), number


FOREIGN = {
    "empty": (b"", "has no seal at its end: it is truncated, or was not made by mglu_ops.export"),
    "code": (b"\x7fELF" + bytes(1000), "has no seal at its end"),
    "half a seal": (b"mglu_ops seal adler32=00000000", "has no seal at its end"),
    "older": (b"mglu_ops seal 1 torch=2.13.0 device=cpu adler32=00000000", "has the format 1, must have 8: export the"),
    "newer": (b"mglu_ops seal 9 package adler32=00000000", "has the format 9, must have 8: export the model anew"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_other_files_are_refused(case: str, check: Check, tmp_path: Path) -> None:
    data, words = FOREIGN[case]
    path = tmp_path / "foreign.pt2"
    path.write_bytes(data)
    problem = check(path)
    assert problem.startswith(f"{path}")
    assert words in problem


def test_a_package_is_refused_as_a_weights_file(check: Check, bare: Path, weights: Path) -> None:
    assert "is sealed as 'package', must be 'weights'" in check(bare, bare)
    assert "is sealed as 'weights', must be 'package'" in check(weights)
    torch.save({}, weights)
    assert str(weights) in check(bare, weights)


def test_a_program_of_torch_export_is_named(tmp_path: Path) -> None:
    path = tmp_path / "program.pt2"
    torch.export.save(torch.export.export(torch.nn.Linear(3, 3), (torch.ones(2, 3),)), path)
    with pytest.raises(PackageError, match=r"program of torch.export.save and no package: torch\.export\.load reads"):
        mglu_ops.load(path)


@needs_compiler
def test_cpp_compares_torch_and_the_device(in_cpp: Check, bare: Path, weights: Path, tmp_path: Path) -> None:
    write_small_package(bare, embeds_weights=False, torch="2.13.1+cu130")
    for version in ("2.13.0", "2.13.1", "2.13", None):
        assert in_cpp(bare, weights, version, "cpu") == ""
    for version in ("2.1.0", "2.130.0", "2.1", "3.13.0"):
        assert f"{bare}: it was compiled by torch 2.13, and this is {version}" in in_cpp(bare, weights, version)
    assert in_cpp(bare, weights, None, "cuda") == f"{bare}: it was compiled for cpu, not for cuda"
    write_small_package(bare, embeds_weights=False, device="cuda", arch=[9, 0])
    assert in_cpp(bare, weights, None, "cuda") == ""
    assert in_cpp(bare, weights, None, "cpu") == f"{bare}: it was compiled for cuda, not for cpu"


@needs_compiler
def test_cpp_asks_for_weights(in_cpp: Check, bare: Path, weights: Path, tmp_path: Path) -> None:
    """Without weights, torch's loader would run the package and crash."""
    assert in_cpp(bare) == f"{bare}: it has no weights in it: give the model the file of export(..., weights=FILE)"
    assert in_cpp(bare, tmp_path / "no.pt") == f"{tmp_path}/no.pt: No such file or directory"
    write_small_package(bare)
    assert in_cpp(bare) == ""
    assert in_cpp(bare, weights) == f"{bare}: it has its own weights"


@needs_compiler
def test_cpp_refuses_what_is_not_a_file(in_cpp: Check, tmp_path: Path) -> None:
    assert in_cpp(None) == "package: got null, must be the path of a package"
    assert in_cpp(tmp_path / "no.pt2") == f"{tmp_path}/no.pt2: No such file or directory"
    for path in (tmp_path, Path("/dev/zero")):
        assert in_cpp(path).startswith(f"{path}: it has no seal")
