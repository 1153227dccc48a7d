"""Packages, the C++ library and its programs, built once in a test run, even if xdist runs it in several processes."""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from small_packages import write_small_package
from torch import Tensor, nn

import mglu_ops
from mglu_ops.__main__ import main
from mglu_ops.nn import MGLU, NaiveMGLU
from mglu_ops.packaging.library import build_targets
from mglu_ops.packaging.tensor_file import write_tensor

TOKENS = (1, 7, 64)
SANITIZERS = ("-O0", "-w", "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def model() -> nn.Module:
    """A naive layer, a linear layer, and a weighted layer of `mglu_ops.nn`."""
    torch.manual_seed(0)
    return nn.Sequential(NaiveMGLU(64, 96, n_masks=4), nn.Linear(96, 64), MGLU(64, 40, n_masks=2, top_k=2)).eval()


def model_and_inputs() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model for `python -m mglu_ops export`, and one token, a size that `torch.export` treats as fixed."""
    return model(), (torch.randn(1, 64),)


def inputs(tokens: int) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """A folder that `make` fills in the first process that asks for it."""
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
    """Run code in a new Python process; the text that it prints."""
    process = run([sys.executable, "-W", "ignore", "-c", code, *arguments], PYTHONPATH=os.pathsep.join(sys.path))
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages, and the inputs and results of eager PyTorch.

    - `operator.pt2` takes any number of tokens.
    - `bare.pt2`, made by the command line, calls the shim for one token, and has its weights in `weights.pt`.
    - `small.pt2` has the form of a package and little content.
    - `x7.tensor` and `y7.tensor` are the input and the result for 7 tokens; there is such a pair for each entry of
      `TOKENS`.
    """

    def make(folder: Path) -> None:
        layers, example = model_and_inputs()
        mglu_ops.export(layers, example, folder / "operator.pt2")
        options = ["--static", "--shim", "--strict", "--weights", str(folder / "weights.pt")]
        assert main(["export", "library_fixtures:model_and_inputs", str(folder / "bare.pt2"), *options]) == 0
        write_small_package(folder / "small.pt2")
        for tokens in TOKENS:
            write_tensor(folder / f"x{tokens}.tensor", inputs(tokens))
            write_tensor(folder / f"y{tokens}.tensor", layers(inputs(tokens)))

    return once(tmp_path_factory, "packages", make)


@pytest.fixture(scope="session")
def more_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `composite.pt2` and `shim.pt2`, which take any number of tokens. For tests marked `long`."""

    def make(folder: Path) -> None:
        layers, example = model_and_inputs()
        mglu_ops.export(layers, example, folder / "composite.pt2", backend="composite")
        mglu_ops.export(layers, example, folder / "shim.pt2", shim=True)

    return once(tmp_path_factory, "more_packages", make)


def tensor_files(packages: Path) -> list[Path]:
    return [packages / f"{name}{tokens}.tensor" for tokens in TOKENS for name in "xy"]


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`libmglu_ops.so`, built by the command line; `run_package` is beside it."""

    def make(folder: Path) -> None:
        assert main(["build-runtime", "--out", str(folder), "--program", "--flag=-O0"]) == 0

    return once(tmp_path_factory, "library", make) / "libmglu_ops.so"


@pytest.fixture(scope="session")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `run_package`, the library and `fuzz`, built with the address and undefined behaviour sanitizers.

    Building them takes minutes, so only tests marked `long` use them.
    """

    def make(folder: Path) -> None:
        build_targets(folder, ["mglu_ops", "run_package", "fuzz"], flags=SANITIZERS)

    return once(tmp_path_factory, "programs", make)


def run_package(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the `run_package` of a folder. Leaks at exit are torch's own."""
    return run([folder / "run_package", *arguments], ASAN_OPTIONS="detect_leaks=0")
