"""What the tests of packages and of the C++ library share: built once a test run, also by several workers of xdist."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import mglu_ops
from mglu_ops.__main__ import main
from mglu_ops.nn import MGLU, NaiveMGLU
from mglu_ops.packaging.library import build_program, source_directory
from mglu_ops.packaging.tensor_file import write_tensor

TOKENS = (1, 7, 64)
TORCH = Path(torch.__file__).parent
SANITIZERS = "-O0 -w -Wno-psabi -fsanitize=address,undefined -fno-sanitize=vptr -fno-sanitize-recover=all"

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def model() -> nn.Module:
    """A naive layer, and one of ours with routing."""
    torch.manual_seed(0)
    return nn.Sequential(NaiveMGLU(64, 96, n_masks=4), nn.Linear(96, 64), MGLU(64, 40, n_masks=2, top_k=2)).eval()


def model_and_inputs() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """For `python -m mglu_ops export`: one token, the size that torch would take for the only one."""
    return model(), (torch.randn(1, 64),)


def inputs(tokens: int) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills, in the first of the workers that asks."""
    base = factory.getbasetemp()
    root = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    folder, done = root / name, root / f"{name}.done"
    with (root / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            done.touch()
    return folder


def run(command: Sequence[str | Path], timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
    )


def python(code: str, *arguments: str | Path) -> str:
    """Run code in a fresh Python; what it prints."""
    process = run([sys.executable, "-W", "ignore", "-c", code, *arguments], PYTHONPATH=os.pathsep.join(sys.path))
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`operator.pt2`, `composite.pt2` and, by the command line, `shim.pt2`; `bare.pt2`, whose weights are in
    `weights.pt`; `x7.tensor` and `y7.tensor` of eager; and `small.pt2`, which has a package's form and little in it.
    """

    def make(folder: Path) -> None:
        layers, example = model_and_inputs()
        mglu_ops.export(layers, example, folder / "operator.pt2")
        mglu_ops.export(layers, example, folder / "composite.pt2", backend="composite")
        mglu_ops.export(layers, example, folder / "bare.pt2", weights=folder / "weights.pt")
        shim = str(folder / "shim.pt2")
        assert main(["export", "library_fixtures:model_and_inputs", shim, "--shim", "--strict"]) == 0
        write_small_package(folder / "small.pt2")
        for tokens in TOKENS:
            write_tensor(folder / f"x{tokens}.tensor", inputs(tokens))
            write_tensor(folder / f"y{tokens}.tensor", layers(inputs(tokens)))

    return once(tmp_path_factory, "packages", make)


def write_small_package(path: Path, **texts: str) -> None:
    described = {"mglu_ops_torch": "2.11.0", "mglu_ops_device": "cpu", **texts}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("small/data/aotinductor/model/code.so", bytes(range(256)) * 8)
        archive.writestr("small/data/aotinductor/model/code_metadata.json", json.dumps(described))


def tensor_files(packages: Path) -> list[Path]:
    return [packages / f"{name}{tokens}.tensor" for tokens in TOKENS for name in "xy"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`libmglu_ops.so`, built by the command line."""

    def make(folder: Path) -> None:
        assert main(["build-runtime", "--out", str(folder), "--flag=-O0"]) == 0

    return once(tmp_path_factory, "library", make) / "libmglu_ops.so"


def write_package_program(folder: Path, library: Path | None) -> Path:
    """`run_package`, built with g++ alone; without the library, it looks at no checksums."""
    flags = ("-O0", "-DMGLU_WITHOUT_LIBRARY") if library is None else ("-O0",)
    source = source_directory() / "library/programs/run_package.cpp"
    return build_program(source, folder / "run_package", library, flags=flags)


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run_package` and `fuzz`, built by CMake with the address and undefined behaviour sanitizers."""
    # That of the development tools lies beside Python, which need not be on the path.
    cmake = shutil.which("cmake", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    if cmake is None:
        pytest.skip("needs cmake")

    def make(folder: Path) -> None:
        settings = {"TORCH_ROOT": TORCH, "CMAKE_BUILD_TYPE": "None", "MGLU_FUZZ": "ON", "CMAKE_CXX_FLAGS": SANITIZERS}
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        for command in (
            [cmake, "-S", source_directory(), "-B", folder, *defines],
            [cmake, "--build", folder, "--parallel", "2"],
        ):
            built = run(command)
            assert built.returncode == 0, built.stdout + built.stderr

    return once(tmp_path_factory, "programs", make)


def run_package(programs: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    # Leaks at exit are torch's own.
    return run([programs / "run_package", *arguments], ASAN_OPTIONS="detect_leaks=0")
