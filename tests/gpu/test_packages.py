"""Packages on a GPU without Python: with the library and its kernels, and with Triton's kernels and no library."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from library_fixtures import run
from stored_weights import StoredLayers
from torch import Tensor, nn

import mglu_ops
from mglu_ops.nn import MGLU, NaiveMGLU
from mglu_ops.packaging.library import build_targets
from mglu_ops.packaging.tensor_file import write_tensor

pytestmark = [pytest.mark.gpu]

TOKENS = (1, 7, 16, 64, 400, 600)
ROUNDING_TOKENS = (1, 8, 40, 300)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    # On Hopper, with 400 tokens the first layer permutes x, and the last reads it in place.
    layers = (NaiveMGLU(2048, 1024, n_masks=8), nn.Linear(1024, 256), MGLU(256, 264, n_masks=2, top_k=2))
    return nn.Sequential(*layers).eval().cuda().to(dtype)


def inputs(tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, 2048, generator=torch.Generator().manual_seed(tokens)).to("cuda", dtype)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    layers = model(torch.float16)
    mglu_ops.export(layers, (inputs(1, torch.float16),), folder / "operator.pt2")
    mglu_ops.export(layers, (inputs(1, torch.float16),), folder / "shim.pt2", shim=True)
    mglu_ops.export(layers, (inputs(1, torch.float16),), folder / "triton.pt2", backend="triton")
    stored = StoredLayers(2048, 1024, n_masks=4).cuda()
    (folder / "stored").mkdir()
    mglu_ops.export(stored, (inputs(1, torch.float16),), folder / "stored/operator.pt2")
    with pytest.raises(ValueError, match=r"backend: got 'triton', .* have no weight format"):
        mglu_ops.export(stored, (inputs(1, torch.float16),), folder / "stored/triton.pt2", backend="triton")
    rounding = StoredLayers(2048, 1024, n_masks=4, activation_format="fp8_token").cuda()
    (folder / "rounding").mkdir()
    mglu_ops.export(rounding, (inputs(1, torch.float16),), folder / "rounding/operator.pt2")
    groups = (
        (layers, folder, TOKENS),
        (stored, folder / "stored", TOKENS),
        (rounding, folder / "rounding", ROUNDING_TOKENS),
    )
    for module, place, sizes in groups:
        for tokens in sizes:
            write_tensor(place / f"x{tokens}.tensor", inputs(tokens, torch.float16))
            write_tensor(place / f"y{tokens}.tensor", module(inputs(tokens, torch.float16)))
    return folder


@pytest.fixture(scope="module")
def libraries(packages: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Build the library with the kernels of the layers, and without them, so that NVRTC compiles plain kernels.

    `run_package` is beside each.
    """
    major, minor = torch.cuda.get_device_capability()
    chosen: dict[str, dict[str, Any]] = {
        "compiled": {
            "archs": [f"sm_{major}{minor}"],
            "packages": [packages / f"{folder}/operator.pt2" for folder in (".", "stored", "rounding")],
        },
        "nvrtc": {},
    }
    return {
        name: mglu_ops.build_runtime(tmp_path_factory.mktemp(name), flags=["-O1"], program=True, **kernels)
        for name, kernels in chosen.items()
    }


@pytest.fixture(scope="module")
def program_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`run_package_alone`, which runs packages without libmglu_ops.so."""
    folder = tmp_path_factory.mktemp("program")
    build_targets(folder, ["run_package_alone"], flags=["-O0"])
    return folder / "run_package_alone"


def run_package(program: Path, package: Path, *options: str) -> str:
    """Run a package with the inputs beside it, compare its results, and return what was printed as errors."""
    files = [x.with_name(name + x.name[1:]) for x in package.parent.glob("x*.tensor") for name in "xy"]
    process = run([program, package, "--tolerance", "3e-3", *options, *files])
    assert process.returncode == 0, process.stdout + process.stderr
    print(package.stem, re.findall(r"([\d.]+) us a call", process.stdout))
    return process.stderr


@pytest.mark.parametrize("package", ["operator.pt2", "shim.pt2", "stored/operator.pt2", "rounding/operator.pt2"])
@pytest.mark.parametrize("kernels", ["compiled", "nvrtc"])
def test_the_library_runs_packages(packages: Path, libraries: dict[str, Path], kernels: str, package: str) -> None:
    """The library prints a message if it has to use the plain kernels."""
    printed = run_package(libraries[kernels].with_name("run_package"), packages / package, "--time", "200")
    assert ("no tuned kernel" in printed) is (kernels == "nvrtc")


def test_triton_packages_need_no_library(packages: Path, program_alone: Path) -> None:
    run_package(program_alone, packages / "triton.pt2", "--time", "200")
    assert "libmglu_ops" not in run(["ldd", program_alone]).stdout


def test_a_package_for_several_gpus(packages: Path, program_alone: Path) -> None:
    """Below Hopper such a package runs on this GPU; from Hopper on torch cannot make it, and `export` says so."""
    layers, example, path = model(torch.float16), (inputs(1, torch.float16),), packages / "several.pt2"
    if torch.cuda.get_device_capability() >= (9, 0):
        with pytest.raises(ValueError, match=r"compute capability 8\.x alone"):
            mglu_ops.export(layers, example, path, backend="triton", multi_arch=True)
        return
    assert mglu_ops.export(layers, example, path, backend="triton", multi_arch=True).multi_arch
    run_package(program_alone, path)


LIBRARY_ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
x, weight = torch.randn(3, 512, device="cuda").half(), torch.randn(256, 512, device="cuda").half()
packed = torch.ops.mglu.pack_masks(torch.rand(4, 256, 512) > 0.5).cuda()
expected = torch.ops.mglu.forward(2 * x, weight, packed)
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    torch.cuda._sleep(20_000_000)
    x.mul_(2)
    result = torch.ops.mglu.forward(x, weight, packed)
stream.synchronize()
assert torch.equal(result, expected)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    y = torch.ops.mglu.forward(x, weight, packed)
x.copy_(torch.randn_like(x))
graph.replay()
assert torch.equal(y, torch.ops.mglu.forward(x, weight, packed))
print("fine")
"""

LAYOUTS_OF_X = """
import sys, torch
torch.ops.load_library(sys.argv[1])
torch.manual_seed(0)
packed = torch.ops.mglu.pack_masks(torch.rand(8, 1024, 2048) > 0.5).cuda()
weight = torch.randn(1024, 2048, device="cuda").half()
scale = torch.ones(1024, device="cuda")
stored = weight.to(torch.float8_e4m3fn), packed[..., :4].contiguous(), "gelu", None, scale, "fp8_row", "fp8_token"
for tokens in (1, 7, 20, 64, 400, 600):
    wide = torch.randn(tokens, 4096, device="cuda").half()
    window = torch.randn(tokens * 8 + 2040, device="cuda").half().as_strided((tokens, 2048), (8, 1))
    for x in (wide[:, 8:2056], wide[:, 1:2049], wide[:, ::2], window, wide[:1, :2048].expand(tokens, 2048)):
        for layer in ((weight, packed), stored):
            expected = torch.ops.mglu.forward(x.contiguous().clone(), *layer)
            assert torch.equal(torch.ops.mglu.forward(x, *layer), expected), (tokens, x.stride(), layer[2:])
print("fine")
"""


@pytest.mark.parametrize(("kernels", "program"), [("nvrtc", LIBRARY_ALONE), ("compiled", LAYOUTS_OF_X)])
def test_the_library_alone(libraries: dict[str, Path], kernels: str, program: str) -> None:
    """The library launches on the current stream, and takes any layout of x."""
    process = run([sys.executable, "-c", program, libraries[kernels]])
    assert process.returncode == 0, process.stderr
    assert "fine" in process.stdout
