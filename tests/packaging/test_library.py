"""The C++ operator library: one registration whoever comes first, and packages that run with no Python."""

from __future__ import annotations

import importlib
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from library_fixtures import needs_compiler, python, run, run_package, tensor_files, write_small_package

import mglu_ops
from mglu_ops import ops
from mglu_ops.__main__ import main
from mglu_ops.backends.cuda import TileWgmma
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.device import gpu_of_architecture
from mglu_ops.backends.cuda.driver import POINTERS
from mglu_ops.backends.cuda.kernels.base import constants
from mglu_ops.layer_call import LayerCall
from mglu_ops.packaging import device_code
from mglu_ops.packaging.library import BuildError, build_runtime, source_directory
from mglu_ops.packaging.package import LayerInfo, PackageInfo

pytest_plugins = ["library_fixtures"]
pytestmark = [needs_compiler, pytest.mark.slow]

# --- What is in the library -----------------------------------------------------------------------------------------


def symbols(library: Path, which: str) -> list[str]:
    listed = subprocess.run(["nm", "-D", which, str(library)], capture_output=True, text=True, check=True).stdout
    return [line.split()[-1] for line in listed.splitlines()]


def test_it_takes_only_the_stable_interface_of_torch(library: Path) -> None:
    """No C++ name of torch, which would tie it to one version; those of the C interface have no namespace."""
    used = symbols(library, "--undefined-only")
    assert "aoti_torch_library_def" in used
    assert not [name for name in used if re.search(r"_ZN?K?(2at|3c10|5torch)", name)]


def test_it_exports_names_that_cannot_collide(library: Path) -> None:
    exported = [
        name for name in symbols(library, "--defined-only") if not re.match(r"_Z|_edata|_end|__bss_start", name)
    ]
    assert {"aoti_torch_cpu_mglu_forward", "aoti_torch_cuda_mglu_forward", "mglu_check_package"} <= set(exported)
    assert all("mglu_" in name for name in exported), exported


def test_version_is_that_of_the_package() -> None:
    header = (source_directory() / "library/mglu_ops.h").read_text()
    assert re.search(r'#define MGLU_OPS_VERSION "([^"]+)"', header)[1] == mglu_ops.__version__


def test_a_build_that_cannot_be_says_so(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="no C\\+\\+ compiler: no-such-compiler"):
        build_runtime(tmp_path, compiler="no-such-compiler")
    with pytest.raises(BuildError, match="unrecognized"):
        build_runtime(tmp_path, flags=["-fno-such-flag"])
    assert not list(tmp_path.iterdir())


# --- Kernels for GPUs -----------------------------------------------------------------------------------------------


def included(source: Path) -> set[str]:
    names = set(re.findall(r'#include "([^"]+)"', source.read_text()))
    return names.union(*(included(source.with_name(name)) for name in names))


def test_all_sources_of_the_plain_kernel_are_embedded() -> None:
    embedded = re.findall(r'"cuda/([^"]+)"', (source_directory() / "library/cuda/kernels.cpp").read_text())
    assert set(embedded) == {"plain.cu"} | included(source_directory() / "cuda/plain.cu")


def test_parameters_are_laid_out_alike() -> None:
    """The pointers, and what Python packs after them, are as long as C++ says."""
    size = re.search(r"sizeof\(Params\) == (\d+)", (source_directory() / "library/cuda/launch.cpp").read_text())
    call = LayerCall.contiguous(torch.device("cuda"), torch.float16, 4, 1, 64, 64)
    assert len(constants(call)) + POINTERS.size == int(size[1])


def compiles_device_code() -> bool:
    try:
        importlib.import_module("cuda.core")
    except ImportError:
        return shutil.which("nvcc") is not None
    return True


@pytest.mark.skipif(not compiles_device_code(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize("n_masks", [1, 8])
def test_kernels_of_a_package_cover_every_number_of_tokens(n_masks: int, tmp_path: Path) -> None:
    layer = LayerInfo(n_masks, 1024, 2048, "float16", "silu", None)
    info = PackageInfo("2.11.0", mglu_ops.__version__, "cuda", "cuda", "operator", True, [], [layer], arch=[9, 0])
    write_small_package(tmp_path / "model.pt2", **info.texts())
    device_code.write(tmp_path, ["sm_90"], [tmp_path / "model.pt2"])
    table = (tmp_path / device_code.TABLE).read_text()
    geometry, permutation = r"\{\d+, 1, \d+, \d+, true\}", r"\{(-?\d+), \d+, (\d+)\}"
    variant, boxes = rf"\{{90, 0, {n_masks}, 0, -1\}}", r"\{(\d+), (\d+), (\d+), false\}"
    line = rf"\{{{variant}, 1024, 2048, (\d+), (\d+), (\d+), " + ", ".join((geometry, permutation, boxes)) + r"\}"
    tuned = [tuple(map(int, found)) for found in re.findall(line, table)]
    tokens = [count for first, last, *_ in tuned for count in range(first, last + 1)]
    assert tokens == list(range(1, device_code.MOST_TOKENS + 1))
    names = re.findall(r'\{"mglu_(\w+)", mglu_cubin_(\d+)\}', table)
    kernels = {int(number): name for name, number in names}
    permuting = set() if n_masks == 1 else {"permute_x"}  # one mask's tiles read x as it is
    assert set(kernels.values()) == {"decode_mma", "tile_wgmma", "plain"} | permuting
    gpu = gpu_of_architecture((9, 0))
    for first, last, cubin, permute, copied, *box in tuned:
        config, first_config = (choose(device_code._call(layer, tokens), gpu).config for tokens in (last, first))
        assert kernels[cubin] == config.kernel == first_config.kernel
        if isinstance(config, TileWgmma):
            assert kernels.get(permute) == ("permute_x" if config.permuted else None)
            assert box == [config.block_tokens, config.rows // config.cluster, 16 if n_masks == 1 else 64]
        else:
            assert box == [0, 0, 0]
        assert copied == 0 if permute < 0 else copied >= last * 2048 * 2
    for _, number in names:
        assert (tmp_path / f"{number}.cubin").read_bytes().startswith(b"\x7fELF")
    assert len(re.findall(rf"\{{{variant}, [14], \d+\}}", table)) == 2
    # C++ takes the table as it is written.
    root = source_directory()
    places = [f"-I{tmp_path}", f"-Wa,-I{tmp_path}", f"-Wa,-I{root}"]
    source = root / "library/cuda/kernels.cpp"
    built = run(["g++", "-std=c++17", "-Wall", "-Werror", *places, "-c", source, "-o", tmp_path / "kernels.o"])
    assert built.returncode == 0, built.stderr


def test_kernels_need_a_package_of_a_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = tmp_path / "small.pt2"
    info = PackageInfo("2.11.0", mglu_ops.__version__, "cpu", "cpu", "operator", True, [], [])
    write_small_package(small, **info.texts())
    build = ["build-runtime", "--out", str(tmp_path / "out")]
    for options, words in (
        (["--arch", "sm_90"], "give both"),
        (["--arch", "hopper", "--package", str(small)], "of the form sm_90"),
        (["--arch", "sm_90", "--package", str(small)], "does not call the library on a GPU"),
        (["--arch", "sm_90", "--package", str(tmp_path / "missing")], "is not a file"),
    ):
        assert main([*build, *options]) == 2
        assert words in capsys.readouterr().err


# --- In a Python process --------------------------------------------------------------------------------------------

ALONE = """
import json, sys, torch
torch.ops.load_library(sys.argv[1])
assert "mglu_ops" not in sys.modules
names = ("pack_masks", "pack_logits", "unpack_masks", "forward", "forward_ste", "forward_train", "backward")
schemas = [str(torch._C._jit_get_schemas_for_operator(f"mglu::{name}")[0]) for name in names]
generator = torch.Generator().manual_seed(0)
def draw(*shape, dtype=torch.float32): return torch.randn(shape, generator=generator).to(dtype)
results = []
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    logits, weight, route = draw(3, 24, 45, dtype=dtype), draw(24, 45, dtype=dtype), draw(2, 5, 3, dtype=dtype)
    logits[0, 0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    x = draw(5, 2, 45, dtype=dtype).transpose(0, 1)
    packed = torch.ops.mglu.pack_masks(logits > 0)
    y = torch.ops.mglu.forward(x, weight.t().contiguous().t(), packed, "gelu", route)
    y_ste, packed_ste = torch.ops.mglu.forward_ste(x, weight, logits, "gelu", route)
    assert torch.equal(packed, packed_ste) and torch.equal(y, y_ste)
    assert torch.equal(packed, torch.ops.mglu.pack_logits(logits))
    assert torch.equal(packed, torch.ops.mglu.pack_masks((logits > 0).to(dtype)))
    assert torch.equal(torch.ops.mglu.unpack_masks(packed, 45), logits > 0)
    results.append([packed.flatten().tolist(), y.double().flatten().tolist()])
words = []
for call in (
    lambda: torch.ops.mglu.forward(x, weight, packed, "swish"),
    lambda: torch.ops.mglu.forward(x[..., :-1], weight, packed),
    lambda: torch.ops.mglu.forward(x, weight, packed[..., :0]),
    lambda: torch.ops.mglu.forward(x.double(), weight.double(), packed),
    lambda: torch.ops.mglu.pack_masks(logits),
    lambda: torch.ops.mglu.unpack_masks(packed, -1),
):
    try: call()
    except Exception as error: words.append(str(error).splitlines()[0])
print(json.dumps([schemas, results, words]))
"""


def test_alone_it_computes_what_python_does(library: Path) -> None:
    import torch
    from budgets import assert_matches

    from mglu_ops.backends import reference

    schemas, results, words = json.loads(python(ALONE, library))
    assert schemas == [str(getattr(torch.ops.mglu, name.split("(")[0]).default._schema) for name in ops.SCHEMAS]
    generator = torch.Generator().manual_seed(0)
    for dtype, (packed, y) in zip((torch.float32, torch.float16, torch.bfloat16), results, strict=True):
        shapes = ((3, 24, 45), (24, 45), (2, 5, 3), (5, 2, 45))
        logits, weight, route, x = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        logits[0, 0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
        assert packed == torch.ops.mglu.pack_masks(logits > 0).flatten().tolist()
        expected = reference.forward(x.transpose(0, 1), weight, logits > 0, "gelu", route)
        assert_matches(torch.tensor(y, dtype=torch.float64).view_as(expected), expected, dtype)
    patterns = (
        "activation: got 'swish'",
        "x: got shape",
        "n_masks=0",
        "float64",
        "neither 0 nor 1",
        "in_features: got -1",
    )
    assert len(words) == len(patterns)
    for word, pattern in zip(words, patterns, strict=True):
        assert pattern in word


TOGETHER = """
import sys, torch
if sys.argv[2] == "library first": torch.ops.load_library(sys.argv[1])
import mglu_ops
if sys.argv[2] == "python first": torch.ops.load_library(sys.argv[1])
for name in ("pack_masks", "pack_logits", "unpack_masks", "forward", "forward_ste", "forward_train", "backward"):
    assert len(torch._C._jit_get_schemas_for_operator(f"mglu::{name}")) == 1
    table = torch._C._dispatch_dump_table(f"mglu::{name}")
    (cpu,) = [line for line in table.splitlines() if line.startswith("CPU:")]
    assert "ops.py" in cpu, cpu
torch.manual_seed(0)
layer = mglu_ops.nn.MGLU(20, 6, n_masks=2)
x = torch.randn(3, 20, requires_grad=True)
y = layer(x)
y.sum().backward()
assert x.grad.abs().sum() > 0
frozen = mglu_ops.freeze(layer)
torch.testing.assert_close(torch.func.vmap(frozen)(x[None])[0], y)
assert frozen.to("meta")(torch.empty(4, 20, device="meta")).shape == (4, 6)
print("fine")
"""


@pytest.mark.parametrize("order", ["library first", "python first"])
def test_nothing_is_registered_twice(library: Path, order: str) -> None:
    """And the kernels in force are Python's, with its gradients, vmap and fake kernels."""
    assert "fine" in python(TOGETHER, library, order)


# --- With no Python -------------------------------------------------------------------------------------------------


def test_the_program_has_no_python_in_it(programs: Path) -> None:
    needed = run(["ldd", programs / "run_package"]).stdout
    assert "libmglu_ops.so" in needed
    assert "libtorch_cpu.so" in needed
    assert "libpython" not in needed
    assert "not found" not in needed


@pytest.mark.parametrize("package", ["operator", "composite", "shim"])
def test_packages_run_with_no_python(programs: Path, packages: Path, package: str) -> None:
    """1, 7 and 64 tokens agree with files of eager, and the sanitizers have nothing to say."""
    process = run_package(programs, packages / f"{package}.pt2", "--time", "2", *tensor_files(packages))
    assert process.returncode == 0, process.stdout + process.stderr
    assert len(re.findall(r"[\d.]+ us a call", process.stdout)) == 3


def test_weights_may_come_from_a_file(programs: Path, packages: Path) -> None:
    package, weights, files = packages / "bare.pt2", packages / "weights.pt", tensor_files(packages)
    process = run_package(programs, package, "--weights", weights, *files)
    assert process.returncode == 0, process.stdout + process.stderr
    lacking = run_package(programs, package, "--weights", packages / "x7.tensor", *files)
    assert lacking.returncode == 2
    assert lacking.stderr.startswith("run_package: ")
    without = run_package(programs, package, *files)
    assert without.returncode == 2
    assert "has no weights in it: pass --weights FILE" in without.stderr


def test_a_wrong_result_is_noticed(programs: Path, packages: Path) -> None:
    package, x, y = packages / "operator.pt2", packages / "x7.tensor", packages / "y7.tensor"
    assert run_package(programs, package, x, y, "--tolerance", "1e-12").returncode == 1
    other = run_package(programs, package, x, packages / "y64.tensor")
    assert other.returncode == 2
    assert "another shape" in other.stderr


def test_fuzzing(programs: Path, packages: Path) -> None:
    process = run([programs / "fuzz", "2", packages / "small.pt2"])
    assert process.returncode == 0, process.stdout + process.stderr
