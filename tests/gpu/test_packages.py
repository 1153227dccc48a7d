"""Packages on a GPU without Python: with our C++ library and its kernels, or with Triton's kernels alone."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mglu_ops
from mglu_ops.backends.cuda import plans
from mglu_ops.nn import MGLU, NaiveMGLU
from mglu_ops.packaging.library import build_targets
from mglu_ops.packaging.package import LayerInfo
from mglu_ops.packaging.tensor_file import write_tensor
from tests.support.layers import StoredLayers, make_down, make_layer
from tests.support.packaging import run, write_small_package

pytestmark = [pytest.mark.gpu]

TOKENS = (1, 7, 16, 64, 400, 600)
ROUNDING_TOKENS = (1, 8, 40, 300)


def model(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    # On Hopper with 400 tokens, the first layer permutes x, and the last reads it in place.
    layers = (NaiveMGLU(2048, 1024, n_masks=8), nn.Linear(1024, 256), MGLU(256, 264, n_masks=2, top_k=2))
    return nn.Sequential(*layers).eval().cuda().to(dtype)


def inputs(tokens: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(tokens, 2048, generator=torch.Generator().manual_seed(tokens)).to("cuda", dtype)


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    layers = model(torch.float16)
    mglu_ops.export(layers, (inputs(1, torch.float16),), folder / "operator.pt2")
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
    """Two builds of the library, each with `run_package` beside it.

    "compiled" contains the kernels of the layers. "nvrtc" has none, so NVRTC compiles plain kernels at run time.
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
    """Run a package on the inputs in its folder, compare the results, and return the text on standard error."""
    files = [x.with_name(name + x.name[1:]) for x in package.parent.glob("x*.tensor") for name in "xy"]
    process = run([program, package, "--tolerance", "3e-3", *options, *files])
    assert process.returncode == 0, process.stdout + process.stderr
    print(package.stem, re.findall(r"([\d.]+) us a call", process.stdout))
    return process.stderr


@pytest.mark.parametrize("package", ["operator.pt2", "stored/operator.pt2", "rounding/operator.pt2"])
@pytest.mark.parametrize("kernels", ["compiled", "nvrtc"])
def test_the_library_runs_packages(packages: Path, libraries: dict[str, Path], kernels: str, package: str) -> None:
    """Without compiled kernels, the library uses plain kernels and must print a message."""
    printed = run_package(libraries[kernels].with_name("run_package"), packages / package, "--time", "200")
    assert ("no tuned kernel" in printed) is (kernels == "nvrtc")


def test_triton_packages_need_no_library(packages: Path, program_alone: Path) -> None:
    run_package(program_alone, packages / "triton.pt2", "--time", "200")
    assert "libmglu_ops" not in run(["ldd", program_alone]).stdout


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
    """In a process without mglu_ops, the library uses the current stream, and accepts any memory layout of x."""
    process = run([sys.executable, "-c", program, libraries[kernels]])
    assert process.returncode == 0, process.stderr
    assert "fine" in process.stdout


# --- Experts ---------------------------------------------------------------------------------------------------------

EXPERT_TOKENS = (1, 5, 40, 200)
"""Numbers of tokens for three paths: decode_mma without and with a table of items, and tile_wgmma."""
FORMS: tuple[dict[str, Any], ...] = (
    {"dtype": torch.bfloat16},
    {"dtype": torch.float16, "weighted": True, "weight_format": "fp8_block", "activation_format": "fp8_token"},
    {"dtype": torch.bfloat16, "weight_format": "int4_group"},
    {"dtype": torch.float32, "weighted": True, "in_features": 100},
)

Call = tuple[str, tuple[Any, ...]]
"""The name of an operator, and the arguments of a call."""


class Mixture(nn.Module):
    """Experts and their down projections. Only our operators round, so compiled code gives the bits of eager mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = make_layer((6,), 256, 128, routing="ids", experts=8, dtype=torch.bfloat16)
        down = make_down(layer)
        self.register_buffer("weight", layer.given.weight)
        self.register_buffer("packed_masks", layer.given.packed_masks)
        self.register_buffer("down", down.weight)

    def forward(self, x: Tensor) -> Tensor:
        ids = (4 * x[:, :2]).abs().to(torch.int64)  # some are out of range
        y = torch.ops.mglu.experts_forward(x, self.weight, self.packed_masks, ids)
        return torch.ops.mglu.experts_down(y, self.down, ids, x[:, 2:4].contiguous())


def expert_calls() -> tuple[list[Call], list[LayerInfo]]:
    """Calls of the operators over experts on a GPU, and their layers. Some memory layouts run only on `plain`."""
    calls: list[Call] = []
    layers: dict[LayerInfo, None] = {}
    for form in FORMS:
        for tokens in EXPERT_TOKENS:
            options = {"in_features": 256, "out_features": 128, "loads": "some out of range", **form}
            layer = make_layer((tokens,), routing="ids", experts=8, **options)
            x, weight, masks, *rest, ids, _ = map(on_gpu, layer.given)
            sorted_x, _, _, *sorted_rest, _, offs = map(on_gpu, layer.sorted_by_expert()[0].given)
            calls += [
                ("experts_forward", (x, weight, masks, ids, *rest)),
                ("grouped_forward", (sorted_x, weight, masks, offs, *sorted_rest)),
                ("experts_forward", (x, weight.mT.contiguous().mT, masks, ids, *rest)),
            ]
            names = [str(form["dtype"])[6:], "silu", "float32" if "weighted" in form else None]
            names += [form.get("weight_format", "dense"), form.get("activation_format", "dense")]
            layers |= {LayerInfo(3, 128, x.shape[1], *names, 8, top_k): None for top_k in (2, 0)}
            if form["dtype"] != torch.float32:
                calls.append(("experts_down", tuple(map(on_gpu, make_down(layer, names[3])))))
                layers[LayerInfo(0, x.shape[1], 128, names[0], "identity", "float32", names[3], "dense", 8, 2)] = None
    return calls, list(layers)


def on_gpu(argument: Any) -> Any:
    return argument.cuda() if isinstance(argument, Tensor) else argument


EXPERTS_ALONE = """
import sys, torch
torch.ops.load_library(sys.argv[1])
calls = torch.load(sys.argv[2])
torch.save([getattr(torch.ops.mglu, name)(*given).cpu() for name, given in calls], sys.argv[3])
"""


def test_experts_give_the_bits_of_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package, and the library's operators in a process without `mglu_ops`, give the bits of Python's operators."""
    module, package = Mixture().eval().cuda(), tmp_path / "package/experts.pt2"
    calls, layers = expert_calls()
    package.parent.mkdir()
    tokens = [inputs(count, torch.bfloat16)[:, :256].contiguous() for count in EXPERT_TOKENS]
    mglu_ops.export(module, (tokens[0],), package)
    for count, x in zip(EXPERT_TOKENS, tokens, strict=True):
        write_tensor(package.with_name(f"x{count}.tensor"), x)
        write_tensor(package.with_name(f"y{count}.tensor"), module(x))
    arch = torch.cuda.get_device_capability()
    write_small_package(tmp_path / "layers.pt2", device="cuda", backend="cuda", layers=layers, arch=list(arch))
    sizes = {2: EXPERT_TOKENS, 0: [2 * count for count in EXPERT_TOKENS]}  # sorted calls have two rows per token
    monkeypatch.setattr(plans, "_row_counts", lambda call: sizes[call.routing.top_k or 0])
    library = mglu_ops.build_runtime(
        tmp_path / "runtime",
        flags=["-O0"],
        program=True,
        archs=[f"sm_{arch[0]}{arch[1]}"],
        packages=[package, tmp_path / "layers.pt2"],
    )
    printed = run_package(library.with_name("run_package"), package, "--tolerance", "0", "--time", "200")
    assert "no tuned kernel" not in printed
    torch.save(calls, tmp_path / "calls.pt")
    process = run([sys.executable, "-c", EXPERTS_ALONE, library, tmp_path / "calls.pt", tmp_path / "results.pt"])
    assert process.returncode == 0, process.stderr
    assert process.stderr.count("no tuned kernel") == 1  # the library prints this only once
    for (name, given), found in zip(calls, torch.load(tmp_path / "results.pt"), strict=True):
        expected = getattr(torch.ops.mglu, name)(*given).cpu()
        assert torch.equal(found, expected), (name, given[0].shape, given[1].dtype, given[1].stride())
