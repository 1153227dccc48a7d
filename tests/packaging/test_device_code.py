"""The plans and kernels that `build-runtime --arch --package` puts into libmglu_ops.so."""

from __future__ import annotations

import ctypes
import importlib
import re
import shutil
import struct
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from mglu_ops.backends.cuda import Plain, TileWgmma, driver, plans
from mglu_ops.backends.cuda import launch as compiler_of_launches
from mglu_ops.backends.cuda.choice import LaunchChoice, choose, choose_experts
from mglu_ops.backends.cuda.device import Gpu, gpu_of_architecture
from mglu_ops.backends.cuda.kernels import experts, quantize_x
from mglu_ops.backends.cuda.launch import Plan, load, parameters
from mglu_ops.backends.parameters import MAP_BYTES
from mglu_ops.call import Call
from mglu_ops.files import source_directory
from mglu_ops.formats import FORMATS
from mglu_ops.packaging import device_code
from mglu_ops.packaging.package import LayerInfo
from mglu_ops.packaging.seal import PackageError
from tests.support.commands import run
from tests.support.packaging import needs_compiler, write_small_package

pytestmark = [needs_compiler, pytest.mark.long]

HERE = Path(__file__).parent
LAYER = LayerInfo(8, 1024, 2048, "float16", "silu", None)
STORED = {1: "fp8_block", 8: "int4_group"}
"""Maps the number of masks to the weight format of the second layer in `layers_with`."""


def layers_with(n_masks: int) -> list[LayerInfo]:
    """Return a layer with a dense weight, one with a quantized weight, and one that rounds x too."""
    dense = replace(LAYER, n_masks=n_masks)
    rounding = replace(dense, weight_format="fp8_block", activation_format="fp8_token")
    return [dense, replace(dense, weight_format=STORED[n_masks]), rounding]


EXPERTS = LayerInfo(4, 256, 512, "bfloat16", "silu", None, experts=16, top_k=4)
ROUNDED = {"weight_format": "fp8_block", "activation_format": "fp8_token"}
MIXTURES = [
    EXPERTS,
    replace(EXPERTS, n_masks=1, out_features=40, in_features=72, dtype="float16", mask_weights_dtype="float32"),
    replace(EXPERTS, top_k=0, mask_weights_dtype="bfloat16"),
    replace(EXPERTS, n_masks=3, weight_format="fp8_row", top_k=2),
    replace(EXPERTS, n_masks=2, weight_format="int4_group", top_k=0),
    replace(EXPERTS, n_masks=2, **ROUNDED),
    replace(EXPERTS, dtype="float32", in_features=45, mask_weights_dtype="float16"),
    replace(EXPERTS, dtype="float32", top_k=0, **ROUNDED),
]
DOWN = replace(EXPERTS, n_masks=0, activation="identity", mask_weights_dtype="float32")
DOWNS = [DOWN, *(replace(DOWN, dtype="float16", out_features=41, weight_format=name) for name in FORMATS)]


def write_table(folder: Path, layers: list[LayerInfo]) -> str:
    """Write a package with these layers, compile its kernels for sm_90, and return the table of plans."""
    write_small_package(folder / "model.pt2", device="cuda", backend="cuda", layers=layers, arch=[9, 0])
    device_code.write(folder, ["sm_90"], [folder / "model.pt2"])
    return (folder / device_code.TABLE).read_text()


def compile_table(folder: Path) -> None:
    """Compile the table into `plan.o`, with warnings as errors."""
    root = source_directory()
    names = [path.name for path in (root / "cuda").glob("*.cu*")]
    embedded = "".join(f'MGLU_EMBED(source_{number}, "cuda/{name}");\n' for number, name in enumerate(names))
    sources = ", ".join(f'source("{name}", source_{number})' for number, name in enumerate(names))
    # CMake writes this file in a real build.
    (folder / "mglu_sources.inc").write_text(f"{embedded}#define MGLU_SOURCES(source) {sources}\n")
    folders = [f"-I{folder}", f"-Wa,-I{folder}", f"-Wa,-I{root}"]
    compile_cpp(folder / "plan.o", "-c", *folders, root / "library/cuda/plan.cpp")


def compile_cpp(out: Path, *arguments: str | Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Werror"]
    process = run(["g++", "-std=c++20", *warnings, f"-I{source_directory()}", *arguments, "-o", out])
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module", params=[1, 8], ids="n_masks={}".format)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerInfo]:
    """A C++ program that prints the launches of calls, and the dense layer of its table. Its kernels never run."""
    folder, layer = tmp_path_factory.mktemp("launches"), replace(LAYER, n_masks=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_code, "compile_cubin", lambda *_: b"\x7fELF")
        patch.setattr(plans, "choose", choose_or_decode)
        write_table(folder, [*layers_with(layer.n_masks), *MIXTURES, *DOWNS])
    compile_table(folder)
    compile_cpp(folder / "libcuda.so.1", "-shared", "-fPIC", HERE / "fake_driver.cpp")
    (folder / "libnvrtc.so").symlink_to("libcuda.so.1")
    library = source_directory() / "library"
    sources = [library / "tensor.cpp", library / "cuda/driver.cpp", library / "cuda/launch.cpp"]
    compile_cpp(folder / "print_launches", HERE / "print_launches.cpp", *sources, folder / "plan.o", "-ldl")
    return folder / "print_launches", layer


@cache  # a choice takes milliseconds, and both the fixture and a test choose for 512 numbers of tokens
def choose_or_decode(call: Call, gpu: Gpu) -> LaunchChoice:
    """Choose as usual. For 512 tokens or more and a quantized weight, copy W and x first, even if that is slower."""
    choice = choose(call, gpu)
    if call.tokens < 512 or call.weight.format.is_dense:
        return choice
    if choice.config.rounds_x:
        choice = choose(call.with_rounded_x(), gpu)
    assert isinstance(choice.config, TileWgmma)
    return replace(choice, config=replace(choice.config, decoded=True, permuted=True, sparse=False, stages=2))


one_program = pytest.mark.parametrize("program", [8], indirect=True)
"""Runs a test with one table only, because experts are the same in all tables."""

SCALARS = {torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6, torch.bfloat16: 15, None: -1}
"""The codes of dtypes in csrc/library/tensor.h."""


def printed_launches(
    program: Path, layer: LayerInfo, tokens: Iterable[int], sms: int, id_dtype: torch.dtype = torch.int32
) -> tuple[list[str], str]:
    """Return the lines and the errors that the program prints on a GPU with `sms` SMs."""
    dtype, weights = getattr(torch, layer.dtype), layer.mask_weights_dtype
    arguments = [
        *(layer.n_masks, layer.out_features, layer.in_features, FORMATS[layer.weight_format].code),
        *(int(layer.activation_format != "dense"), SCALARS[dtype], SCALARS[weights and getattr(torch, weights)]),
        *(layer.experts, layer.top_k, SCALARS[id_dtype], *tokens),
    ]
    process = run([program, *map(str, arguments)], LD_LIBRARY_PATH=str(program.parent), FAKE_SMS=str(sms))
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines(), process.stderr


class PrintingDriver:
    """A fake driver for Python's launches, which prints what fake_driver.cpp prints for C++."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.names: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return lambda *_: 0

    def cuModuleGetFunction(self, handle: Any, module: Any, name: bytes) -> int:  # noqa: N802
        self.names.append(name.decode())
        handle._obj.value = len(self.names)
        return 0

    def cuLaunchKernelEx(self, config: Any, function: Any, arguments: Any, extra: None) -> int:  # noqa: N802
        name, geometry = self.names[function.value - 1], config._obj
        fields = parameters("params.cuh", STRUCTS.get(name, "Params"))
        struct = ctypes.string_at(arguments[0], fields.size)
        end = 8 * len(fields.pointers + fields.longs) + 4 * len(fields.ints)
        text = (struct[:end] + struct[fields.map_offset :] if fields.maps else struct[:end]).hex()
        if len(arguments) == 2:
            text += ctypes.string_at(arguments[1], parameters("params.cuh", "ItemParams").size).hex()
        numbers = geometry.grid_x, geometry.grid_y, geometry.block_x, geometry.shared, geometry.n_attributes
        self.lines.append(" ".join([name, *map(str, numbers), text]))
        return 0

    def cuTensorMapEncodeTiled(  # noqa: N802
        self,
        memory: Any,
        item: int,
        rank: int,
        pointer: Any,
        sizes: Any,
        pitches: Any,
        box: Any,
        steps: Any,
        *rest: int,
    ) -> int:
        _, swizzle, *_ = rest
        fields = item, pointer.value, *sizes, *pitches, *box, swizzle
        ctypes.memmove(memory.value, struct.pack("16Q", *fields, *[0] * 8), MAP_BYTES)
        return 0


STRUCTS = {
    "mglu_tile_wgmma": "TileParams",
    "mglu_group_tokens": "GroupParams",
    "mglu_experts_down": "DownParams",
    "mglu_combine_experts": "CombineParams",
}
NAMES = "x", "weight", "packed_masks", "mask_weights", "weight_scale", "expert_ids", "out"
WORKSPACE = 0x100000


def addresses(layer: LayerInfo) -> dict[str, int]:
    """The addresses that print_launches.cpp gives tensors: 0 for tensors that a layer lacks."""
    found = {name: 0x1000 * number for number, name in enumerate(NAMES, 1)}
    missing = [] if layer.mask_weights_dtype else ["mask_weights"]
    missing += ["weight_scale"] if layer.weight_format == "dense" else []
    found |= dict.fromkeys(missing, 0)
    return {**found, "items": 0, "places": 0, "y": found["x"], "expert_weights": found["mask_weights"]}


@pytest.fixture
def driver_of_python(monkeypatch: pytest.MonkeyPatch) -> PrintingDriver:
    printing = PrintingDriver()
    monkeypatch.setattr(driver, "_library", lambda: printing)
    monkeypatch.setattr(compiler_of_launches, "compile_cubin", lambda *_: b"")
    compiler_of_launches._load_kernel.cache_clear()
    return printing


def launched(printing: PrintingDriver, plan: Plan, pointers: dict[str, int]) -> list[str]:
    """Return the lines that `printing` prints for a plan."""
    sequence = load(plan, 0)
    printing.lines = [f"allocate {sequence.workspace_bytes}"] if sequence.workspace_bytes else []
    sequence(0, pointers, WORKSPACE)
    return printing.lines


def call_of(layer: LayerInfo, tokens: int) -> Call:
    """Describe a call of a layer; with experts, it has 64-bit ids or 32-bit offs."""
    call = layer.call(torch.device("cuda"), tokens)
    if call.routing is None:
        return call
    return replace(call, routing=replace(call.routing, index_dtype=torch.int64 if layer.top_k else torch.int32))


def launches(printing: PrintingDriver, layer: LayerInfo, tokens: int, sms: int) -> list[str]:
    """Return the CUDA backend's launches of a call on a GPU with `sms` SMs. The launches are chosen for a usual H200.

    If no launch was chosen for a number of tokens, the launch for the next larger number is used. If one launch cannot
    take all tokens, several do.
    """
    chosen_for = gpu_of_architecture((9, 0))
    gpu, counts, lines = replace(chosen_for, multiprocessors=sms), plans._row_counts(call_of(layer, 1)), []
    most, rows, item = counts[-1], max(layer.top_k, 1), getattr(torch, layer.dtype).itemsize
    for first in range(0, tokens, most):
        count = min(most, tokens - first)
        launch = plans._launch(call_of(layer, next(one for one in counts if one >= count)), chosen_for)
        assert launch is not None
        pointers = addresses(layer)
        steps = {"x": first * layer.in_features * item, "y": rows * first * layer.in_features * item}
        steps |= {"out": first * layer.out_features * item, "expert_ids": 8 * rows * first}
        steps |= {"expert_weights": 4 * rows * first}
        pointers |= {name: pointers[name] + step for name, step in steps.items()}
        lines += launched(printing, launch(call_of(layer, count), gpu), pointers)
    return [f"{tokens} tokens", *lines]


def assert_cpp_launches(
    program: Path, printing: PrintingDriver, layer: LayerInfo, counts: Iterable[int], sms: int
) -> None:
    """Check that C++ launches what Python launches for some numbers of tokens, without a warning."""
    printed, errors = printed_launches(program, layer, counts, sms, torch.int64 if layer.top_k else torch.int32)
    assert printed == [line for count in counts for line in launches(printing, layer, count, sms)]
    assert errors == ""


@pytest.fixture
def _decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "choose", choose_or_decode)


@pytest.mark.usefixtures("_decoded")
@pytest.mark.parametrize("sms", [2, 78, 132, 144])
def test_cpp_launches_what_python_launches_on_gpus_of_any_size(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver, sms: int
) -> None:
    """Covers a number of tokens that takes two launches."""
    path, dense = program
    few = range(1, 513) if sms == 132 else (1, 2, 8, 16, 17, 64, 200, 512)
    for layer in layers_with(dense.n_masks):
        assert_cpp_launches(path, driver_of_python, layer, (*few, 513, 5000, 300000), sms)


@one_program
@pytest.mark.usefixtures("_decoded")
def test_cpp_and_python_compute_the_same_sizes(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver
) -> None:
    """Compares 200 launches, of all kinds of layers in turn, for numbers of rows for which no launch was chosen."""
    path, dense = program
    layers = [*layers_with(dense.n_masks), *MIXTURES, *DOWNS]
    generator = torch.Generator().manual_seed(0)
    for number in range(200):
        layer = layers[number % len(layers)]
        counts = plans._row_counts(call_of(layer, 1))
        most = min(counts[-1], 2**16)
        rows = int(2 ** (9 + (most.bit_length() - 10) * float(torch.rand((), generator=generator)))) + 3
        assert rows not in counts
        assert_cpp_launches(path, driver_of_python, layer, [rows], 132)


@one_program
@pytest.mark.parametrize("sms", [2, 132])
def test_cpp_launches_the_experts_that_python_launches(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver, sms: int
) -> None:
    path, _ = program
    gpu, kernels, counts = gpu_of_architecture((9, 0)), set(), (1, 2, 7, 16, 17, 64, 65, 200, 512, 600, 2048, 30000)
    for layer in MIXTURES:
        assert_cpp_launches(path, driver_of_python, layer, counts, sms)
        for tokens in counts:
            call = call_of(layer, tokens)
            kernels |= {step.kernel for step in choose_experts(call, gpu).plan(call, gpu)}
    assert kernels == {"decode_mma", "tile_wgmma", "plain", "group_tokens", "permute_x", "quantize_x"}


@one_program
@pytest.mark.parametrize("sms", [2, 132])
def test_cpp_launches_the_down_projections_that_python_launches(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver, sms: int
) -> None:
    """Covers calls with more rows than one launch can sort, which take several launches."""
    for layer in DOWNS:
        assert_cpp_launches(program[0], driver_of_python, layer, (1, 2, 9, 40, 300, 512, 700, 5000), sms)


def plain_plan(call: Call) -> Plan:
    """Return the plan by which C++ runs a call of a layer that the table lacks, with the kernel `plain`."""
    config, gpu = Plain(block_tokens=1 if call.rows_of_x == 1 else 4), gpu_of_architecture((9, 0))
    if call.routing is not None:
        return experts.ExpertLaunch(config, grouped=True).plan(call, gpu)
    return quantize_x.plan(config, call, gpu)


def assert_runs_on_plain(
    program: Path, printing: PrintingDriver, layer: LayerInfo, counts: tuple[int, ...], is_compiled: bool
) -> None:
    """Check the launches of a layer that the table lacks, and the sources that C++ compiles."""
    expected, sources = [], set()
    for tokens in counts:
        plan = plain_plan(call_of(layer, tokens))
        sources |= {(f"{step.kernel}.cu", *sorted(step.macros.items())) for step in plan}
        expected += [f"{tokens} tokens", *launched(printing, plan, addresses(layer))]
    printed, errors = printed_launches(program, layer, counts, 132, torch.int64 if layer.top_k else torch.int32)
    assert [line for line in printed if not line.startswith("compile")] == expected
    found = set()
    for source, arch, _, *defines in (line.split()[1:] for line in printed if line.startswith("compile")):
        values = (define.removeprefix("-D").split("=") for define in defines)
        found.add((source, *sorted((name, int(value)) for name, value in values)))
        assert arch == "-arch=sm_90"
    assert found == (sources if is_compiled else set())
    assert errors.count("no tuned kernel for a layer with weight") == 1


def test_cpp_runs_a_layer_that_is_not_in_the_table_on_the_plain_kernel(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver
) -> None:
    """The table has the kernels if the layer differs only in shape from a layer of a package."""
    path, layer = program
    for known in layers_with(layer.n_masks):
        missing = replace(known, out_features=2048, in_features=64)
        assert_runs_on_plain(path, driver_of_python, missing, (1, 5, 600), is_compiled=False)
        other = replace(missing, mask_weights_dtype="float32")
        assert_runs_on_plain(path, driver_of_python, other, (1, 5, 600), is_compiled=True)


@one_program
def test_cpp_compiles_plain_kernels_for_experts_that_are_not_in_the_table(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver
) -> None:
    for known in MIXTURES:
        assert_runs_on_plain(program[0], driver_of_python, replace(known, experts=5), (1, 7, 300), is_compiled=True)


@one_program
def test_down_projections_without_a_kernel_are_refused(program: tuple[Path, LayerInfo], tmp_path: Path) -> None:
    with pytest.raises(
        AssertionError,
        match=r"weight: got shape \[5, 256, 512\], .*mglu::experts_down with 4 experts a token in bfloat16; build",
    ):
        printed_launches(program[0], replace(DOWN, experts=5), [3], 132)
    with pytest.raises(
        PackageError, match=r"mglu::experts_down of a weight \[16, 256, 512\] .*: no kernel for y torch"
    ):
        write_table(tmp_path, [replace(DOWN, dtype="float32")])


def compiles_device_code() -> bool:
    try:
        importlib.import_module("cuda.core")
    except ImportError:
        return shutil.which("nvcc") is not None
    return True


@pytest.mark.skipif(not compiles_device_code(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize("n_masks", [1, 8])
def test_the_kernels_of_a_package_are_compiled_and_embedded(n_masks: int, tmp_path: Path) -> None:
    table = write_table(tmp_path, layers_with(n_masks))
    for kernel in ("mglu_decode_mma", "mglu_plain", "mglu_quantize_x"):
        assert table.count(f'kernel = "{kernel}"') >= 2  # one for each of two layers
    embedded = re.findall(r'"(\d+\.cubin)"', table)
    assert len(embedded) == len(set(re.findall(r"code = (\w+)", table)))
    assert all((tmp_path / name).read_bytes().startswith(b"\x7fELF") for name in embedded)
    compile_table(tmp_path)
