"""Packages, the C++ library and its programs. xdist workers share them, so each is built at most once per test run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from filelock import FileLock
from torch import Tensor, nn

import mglu_ops
from mglu_ops.__main__ import main
from mglu_ops.files import source_directory
from mglu_ops.nn import MGLU, MGLUExpertsFeedForward, NaiveMGLU
from mglu_ops.packaging import library as build
from mglu_ops.packaging.package import KEY, InputInfo, LayerInfo, PackageInfo, WeightInfo, seal_package
from mglu_ops.packaging.seal import seal
from mglu_ops.packaging.tensor_file import write_tensor
from tests.support.commands import BUILT, python, run
from tests.support.layers import StoredLayers

# --- Packages without code that runs ----------------------------------------------------------------------------------

FOLDER = "model/data/aotinductor/model/"
TEXTS = f"{FOLDER}code.wrapper_metadata.json"
INFO = PackageInfo(
    torch.__version__,
    mglu_ops.__version__,
    "cpu",
    "cpu",
    True,
    [InputInfo("x", "float32", [[1, None, "s0"], 64], [0, 1], False, None)],
    [LayerInfo(2, 8, 16, "float32", "silu", None)],
    [WeightInfo("0.weight", "float32", [8, 16], [16, 1])],
)


def write_small_package(path: Path, code: bytes = bytes(range(256)) * 8, **changes: object) -> PackageInfo:
    """Write a package with this code and with `changes` to the fields of `INFO`, and return its description."""
    info = replace(INFO, **changes)
    write_archive(path, {TEXTS: json.dumps(info.texts()), f"{FOLDER}code.wrapper.so": code})
    seal_package(path, info)
    return info


def write_package_with(path: Path, members: dict[str, str | bytes]) -> None:
    """Write a package with any members and a valid seal."""
    write_archive(path, members)
    seal(path, "package torch=2.13 device=cpu weights=inside")


def write_archive(path: Path, members: dict[str, str | bytes]) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def texts_with(**changes: object) -> str:
    """The texts of a package whose description has `changes`: other values of its fields, or additional fields."""
    return json.dumps({KEY: json.dumps({**json.loads(INFO.texts()[KEY]), **changes})})


# --- Exported models and the C++ library ------------------------------------------------------------------------------

TOKENS = (1, 7, 64)
SANITIZERS = ("-O0", "-w", "-fsanitize=address,undefined", "-fno-sanitize=vptr", "-fno-sanitize-recover=all")

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


def model() -> nn.Module:
    """A model with one layer of each kind.

    It has a naive layer, an MGLU with mask weights, and a layer of each quantized format with several blocks of scales.
    It also has a norm, which Inductor compiles for the strides of x.
    """
    torch.manual_seed(0)
    layers = (nn.RMSNorm(64), NaiveMGLU(64, 96, n_masks=4), nn.Linear(96, 64), MGLU(64, 40, n_masks=2, top_k=2))
    return nn.Sequential(*layers, nn.Linear(40, 136), StoredLayers(136, 130, n_masks=3)).eval()


def model_and_inputs() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model for `python -m mglu_ops export`, and one token.

    One token is the hard case, because `torch.export` takes a size of 1 for fixed.
    """
    return model(), (torch.randn(1, 64),)


def inputs(tokens: int) -> Tensor:
    return torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens))


def once(factory: pytest.TempPathFactory, name: str, make: Callable[[Path], object]) -> Path:
    """A folder for this test run, which `make` fills in the first process that asks for it."""
    base = factory.getbasetemp()
    return _made(base.parent if "PYTEST_XDIST_WORKER" in os.environ else base, name, make)


def kept(name: str, make: Callable[[Path], object]) -> Path:
    """A folder that `make` fills once for the present C++ sources. Later test runs use the folder again."""
    sources = [*source_directory().rglob("*"), Path(build.__file__), Path(torch.__file__)]
    content = [f"{path} {path.read_text()}" for path in sorted(sources) if path.is_file()]
    return _made(BUILT, f"{name}-{hashlib.sha256(repr(content).encode()).hexdigest()[:16]}", make)


def _made(base: Path, name: str, make: Callable[[Path], object]) -> Path:
    folder = base / name
    base.mkdir(0o755, parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if not folder.exists():
            unfinished = base / f"{name}.unfinished"
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir()
            make(unfinished)
            unfinished.rename(folder)
    return folder


@pytest.fixture(scope="session")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with packages, and inputs and results of eager PyTorch.

    - `operator.pt2` takes any number of tokens.
    - `small.pt2` is a minimal package without code that runs.
    - `x7.tensor` and `y7.tensor` are the input and the result for 7 tokens. Each entry of `TOKENS` has such files.
    """

    def make(folder: Path) -> None:
        layers, example = model_and_inputs()
        mglu_ops.export(layers, example, folder / "operator.pt2")
        write_small_package(folder / "small.pt2")
        for tokens in TOKENS:
            write_tensor(folder / f"x{tokens}.tensor", inputs(tokens))
            write_tensor(folder / f"y{tokens}.tensor", layers(inputs(tokens)))

    return once(tmp_path_factory, "packages", make)


@pytest.fixture(scope="session")
def more_packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with more packages, for tests marked `long`.

    - `composite.pt2` takes any number of tokens.
    - `bare.pt2` is made by the command line. It takes one token, and has its weights in `weights.pt`.
    """

    def make(folder: Path) -> None:
        layers, example = model_and_inputs()
        mglu_ops.export(layers, example, folder / "composite.pt2", backend="composite")
        options = ["--static", "--strict", "--weights", str(folder / "weights.pt")]
        assert main(["export", f"{__name__}:model_and_inputs", str(folder / "bare.pt2"), *options]) == 0

    return once(tmp_path_factory, "more_packages", make)


def frozen_experts() -> nn.Module:
    """A frozen layer of experts in which each token selects two of three masks."""
    torch.manual_seed(0)
    return mglu_ops.freeze(MGLUExpertsFeedForward(5, 64, 40, 2, n_masks=3, mask_top_k=2).eval())


@pytest.fixture(scope="session")
def expert_package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package `experts.pt2` of `frozen_experts`, which takes any number of tokens."""

    def make(folder: Path) -> None:
        mglu_ops.export(frozen_experts(), (inputs(1),), folder / "experts.pt2")

    return once(tmp_path_factory, "experts", make) / "experts.pt2"


def tensor_files(packages: Path) -> list[Path]:
    return [packages / f"{name}{tokens}.tensor" for tokens in TOKENS for name in "xy"]


@pytest.fixture(scope="session")
def library() -> Path:
    """`libmglu_ops.so`, built by the command line, with the program `run_package` beside it."""

    def make(folder: Path) -> None:
        python("-m", "mglu_ops", "build-runtime", "--out", folder, "--program")

    return kept("library", make) / "libmglu_ops.so"


@pytest.fixture(scope="session")
def programs() -> Path:
    """A folder with `run_package`, the library and `fuzz`, built with AddressSanitizer and UBSan.

    The build takes minutes, so only tests marked `long` use it.
    """
    targets = ["mglu_ops", "run_package", "fuzz"]
    return kept("programs", lambda folder: build.build_targets(folder, targets, flags=SANITIZERS))


def run_package(folder: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run the `run_package` of a folder. LeakSanitizer is off, because torch itself leaks at exit."""
    return run([folder / "run_package", *arguments], ASAN_OPTIONS="detect_leaks=0")
