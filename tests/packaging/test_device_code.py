"""The table of launches, and the kernels, that `build-runtime --arch --package` puts into the library."""

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
from library_fixtures import needs_compiler
from processes import run
from small_packages import write_small_package

from mglu_ops.backends.cuda import Plain, TileWgmma, driver
from mglu_ops.backends.cuda import launch as compiler_of_launches
from mglu_ops.backends.cuda.choice import LaunchChoice, choose, choose_experts
from mglu_ops.backends.cuda.device import Gpu, gpu_of_architecture
from mglu_ops.backends.cuda.kernels import experts, experts_down, quantize_x
from mglu_ops.backends.cuda.launch import LaunchSequence, parameters
from mglu_ops.backends.parameters import MAP_BYTES
from mglu_ops.call import Call
from mglu_ops.formats import FORMATS
from mglu_ops.packaging import device_code
from mglu_ops.packaging.library import source_directory
from mglu_ops.packaging.package import LayerInfo
from mglu_ops.packaging.seal import PackageError

pytestmark = [needs_compiler, pytest.mark.long]

HERE = Path(__file__).parent
LAYER = LayerInfo(8, 1024, 2048, "float16", "silu", None)
STORED = {1: "fp8_block", 8: "int4_group"}
"""Number of masks -> the weight format of the second layer in a package."""


def layers_with(n_masks: int) -> list[LayerInfo]:
    """A dense layer, a layer with a quantized weight, and a quantized layer that also rounds x."""
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
    """Write a package with these layers, compile its kernels for sm_90, and return the table of launches."""
    write_small_package(folder / "model.pt2", device="cuda", backend="cuda", layers=layers, arch=[9, 0])
    device_code.write(folder, ["sm_90"], [folder / "model.pt2"])
    return (folder / device_code.TABLE).read_text()


def compile_table(folder: Path) -> None:
    """Compile the table into `kernels.o`, with warnings as errors."""
    root = source_directory()
    names = "plain", "quantize_x", "group_tokens"
    embedded = "".join(f'MGLU_EMBED(source_{name}, "cuda/{name}.cu");\n' for name in names)
    sources = ", ".join(f'source("{name}.cu", source_{name})' for name in names)
    # CMake writes this file in a real build.
    (folder / "mglu_sources.inc").write_text(f"{embedded}#define MGLU_SOURCES(source) {sources}\n")
    folders = [f"-I{folder}", f"-Wa,-I{folder}", f"-Wa,-I{root}"]
    compile_cpp(folder / "kernels.o", "-c", *folders, root / "library/cuda/kernels.cpp")


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
        patch.setattr(device_code, "choose", choose_or_decode)
        write_table(folder, [*layers_with(layer.n_masks), *MIXTURES, *DOWNS])
    compile_table(folder)
    compile_cpp(folder / "libcuda.so.1", "-shared", "-fPIC", HERE / "fake_driver.cpp")
    (folder / "libnvrtc.so").symlink_to("libcuda.so.1")
    library = source_directory() / "library"
    sources = [library / "tensor.cpp", library / "cuda/driver.cpp", library / "cuda/launch.cpp"]
    compile_cpp(folder / "print_launches", HERE / "print_launches.cpp", *sources, folder / "kernels.o", "-ldl")
    return folder / "print_launches", layer


@cache  # a choice takes milliseconds, and the fixture and a test both make those of 512 numbers of tokens
def choose_or_decode(call: Call, gpu: Gpu) -> LaunchChoice:
    """The usual choice, but 512 tokens of a weight in fewer bits read copies of W and x, whatever is faster."""
    choice = choose(call, gpu)
    if call.tokens < device_code.MAX_TOKENS or call.weight.format.is_dense:
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
    """The output and the errors of the program on a GPU with `sms` SMs."""
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
    return {**found, "items": 0, "y": found["x"], "expert_weights": found["mask_weights"]}


@pytest.fixture
def driver_of_python(monkeypatch: pytest.MonkeyPatch) -> PrintingDriver:
    printing = PrintingDriver()
    monkeypatch.setattr(driver, "_library", lambda: printing)
    monkeypatch.setattr(compiler_of_launches, "compile_cubin", lambda *_: b"")
    compiler_of_launches._load_kernel.cache_clear()
    return printing


def launched(printing: PrintingDriver, sequence: LaunchSequence, pointers: dict[str, int]) -> list[str]:
    """The printed lines of a sequence of launches."""
    printing.lines = [f"allocate {sequence.workspace_bytes}"] if sequence.workspace_bytes else []
    sequence(0, pointers, WORKSPACE)
    return printing.lines


def launches(printing: PrintingDriver, layer: LayerInfo, tokens: int, sms: int) -> list[str]:
    """The CUDA backend's launches, chosen for a usual GPU and launched on a GPU with `sms` SMs."""
    chosen_for = gpu_of_architecture((9, 0))
    gpu = replace(chosen_for, multiprocessors=sms)
    call = device_code._call(layer, tokens)
    sequence = quantize_x.sequence(choose_or_decode(call, chosen_for).config, call, gpu, 0)
    return [f"{tokens} tokens", *launched(printing, sequence, addresses(layer))]


@pytest.mark.parametrize("sms", [2, 78, 132, 144])
def test_cpp_launches_what_python_launches_on_gpus_of_any_size(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver, sms: int
) -> None:
    path, dense = program
    tokens = range(1, device_code.MAX_TOKENS + 1) if sms == 132 else (1, 2, 8, 16, 17, 64, 200, 512)
    for layer in layers_with(dense.n_masks):
        printed, errors = printed_launches(path, layer, tokens, sms)
        assert printed == [line for count in tokens for line in launches(driver_of_python, layer, count, sms)]
        assert errors == ""


def test_cpp_runs_a_layer_that_is_not_in_the_table_on_the_plain_kernel(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver
) -> None:
    """A launch takes at most 512 tokens, so 600 tokens take two."""
    path, layer = program
    gpu = gpu_of_architecture((9, 0))
    for known in layers_with(layer.n_masks):
        missing = replace(known, out_features=2048, in_features=64)
        printed, errors = printed_launches(path, missing, (1, 5, 600), 132)
        expected = []
        for tokens in (1, 5, 600):
            expected.append(f"{tokens} tokens")
            for first in range(0, tokens, device_code.MAX_TOKENS):
                call = device_code._call(missing, min(tokens - first, device_code.MAX_TOKENS))
                sequence = quantize_x.sequence(Plain(block_tokens=1 if call.tokens == 1 else 4), call, gpu, 0)
                pointers = addresses(missing)
                pointers |= {"x": pointers["x"] + 2 * 64 * first, "out": pointers["out"] + 2 * 2048 * first}
                expected += launched(driver_of_python, sequence, pointers)
        assert printed == expected
        shape = [2048, 64 // FORMATS[missing.weight_format].packed]
        assert errors.count(f"no tuned kernel for a layer with weight {shape}") == 1


def expert_call(layer: LayerInfo, tokens: int) -> Call:
    """A call with 64-bit ids, or with 32-bit offs."""
    call = layer.call(torch.device("cuda"), tokens)
    return replace(call, routing=replace(call.routed, index_dtype=torch.int64 if layer.top_k else torch.int32))


@one_program
@pytest.mark.parametrize("sms", [2, 132])
def test_cpp_launches_the_experts_that_python_launches(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver, sms: int
) -> None:
    """Above 512 tokens, C++ uses the launch that was chosen for the next power of two."""
    path, _ = program
    chosen_for = gpu_of_architecture((9, 0))
    gpu, kernels = replace(chosen_for, multiprocessors=sms), set()
    for layer in MIXTURES:
        counts = (1, 2, 7, 16, 17, 64, 65, 200, 512, 600, 2048, 30000)
        expected = []
        for tokens in counts:
            chosen = next(count for count in device_code._chosen_tokens(layer) if count >= tokens)
            launch = choose_experts(layer.call(torch.device("cuda"), chosen), chosen_for)
            kernels |= {kernel for kernel, *_ in launch.sources(expert_call(layer, tokens), gpu)}
            sequence = launch.sequence(expert_call(layer, tokens), gpu, 0)
            expected += [f"{tokens} tokens", *launched(driver_of_python, sequence, addresses(layer))]
        printed, errors = printed_launches(path, layer, counts, sms, torch.int64 if layer.top_k else torch.int32)
        assert printed == expected
        assert errors == ""
    assert kernels == {"decode_mma", "tile_wgmma", "plain", "group_tokens", "permute_x", "quantize_x"}


@one_program
@pytest.mark.parametrize("sms", [2, 132])
def test_cpp_launches_the_down_projections_that_python_launches(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver, sms: int
) -> None:
    """Calls with more rows than one launch can sort take several launches."""
    path, _ = program
    chosen_for = gpu_of_architecture((9, 0))
    gpu = replace(chosen_for, multiprocessors=sms)
    for layer in DOWNS:
        item, counts = getattr(torch, layer.dtype).itemsize, (1, 2, 9, 40, 300, 512, 700, 5000)
        most, expected = experts_down.MOST_ROWS // layer.top_k, []
        for tokens in counts:
            expected.append(f"{tokens} tokens")
            for first in range(0, tokens, most):
                call = expert_call(layer, min(most, tokens - first))
                rows = first * layer.top_k
                chosen = next(one for one in device_code._chosen_tokens(layer) if one * layer.top_k >= call.tokens)
                config = experts_down.choose(layer.call(torch.device("cuda"), chosen), chosen_for)
                products, combine, *_ = experts_down.launches(config, call, gpu, 0)
                pointers = addresses(layer)
                steps = {"y": rows * layer.in_features * item, "out": first * layer.out_features * item}
                steps |= {"expert_ids": 8 * rows, "expert_weights": 4 * rows}
                pointers |= {name: pointers[name] + step for name, step in steps.items()}
                driver_of_python.lines = expected
                if combine is None:
                    products(0, pointers)
                    continue
                expected.append(f"allocate {4 * call.tokens * layer.out_features}")
                products(0, {**pointers, "out": WORKSPACE})
                combine(0, {**pointers, "products": WORKSPACE, "places": 0})
        printed, errors = printed_launches(path, layer, counts, sms, torch.int64)
        assert printed == expected
        assert errors == ""


@one_program
def test_cpp_compiles_plain_kernels_for_experts_that_are_not_in_the_table(
    program: tuple[Path, LayerInfo], driver_of_python: PrintingDriver
) -> None:
    path, _ = program
    gpu = gpu_of_architecture((9, 0))
    for known in MIXTURES:
        missing, counts, expected, compiled = replace(known, experts=5), (1, 7, 300), [], set()
        for tokens in counts:
            call = expert_call(missing, tokens)
            launch = experts._plain(call)
            compiled |= {(f"{kernel}.cu", *sorted(macros.items())) for kernel, _, macros in launch.sources(call, gpu)}
            sequence = launch.sequence(call, gpu, 0)
            expected += [f"{tokens} tokens", *launched(driver_of_python, sequence, addresses(missing))]
        printed, errors = printed_launches(path, missing, counts, 132, torch.int64 if known.top_k else torch.int32)
        assert [line for line in printed if not line.startswith("compile")] == expected
        commands = [line.split()[1:] for line in printed if line.startswith("compile")]
        assert len(commands) == len(compiled)
        for source, arch, _, *defines in commands:
            values = (define.removeprefix("-D").split("=") for define in defines)
            assert (source, *sorted((name, int(value)) for name, value in values)) in compiled
            assert arch == "-arch=sm_90"
        assert errors.count("no tuned kernel for a layer with weight") == 1


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
    assert len(embedded) == table.count("code = mglu_cubin_")
    assert all((tmp_path / name).read_bytes().startswith(b"\x7fELF") for name in embedded)
    compile_table(tmp_path)
