"""The table of launches and the kernels that `build-runtime --arch --package` puts into the library."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from families import quick_only_for
from library_fixtures import needs_compiler
from processes import run
from small_packages import write_small_package

from mglu_ops.backends.cuda import TileWgmma
from mglu_ops.backends.cuda.choice import LaunchChoice, choose
from mglu_ops.backends.cuda.device import Gpu, gpu_of_architecture
from mglu_ops.backends.cuda.kernels import decode_weight, permute_x
from mglu_ops.backends.cuda.kernels.base import integers
from mglu_ops.formats import FORMATS
from mglu_ops.layer_call import LayerCall
from mglu_ops.packaging import device_code
from mglu_ops.packaging.library import source_directory
from mglu_ops.packaging.package import LayerInfo
from mglu_ops.packaging.seal import PackageError
from mglu_ops.sizes import round_up

HERE = Path(__file__).parent
LAYER = LayerInfo(8, 1024, 2048, "float16", "silu", None)
STORED = {1: "fp8_block", 8: "int4_group"}
"""The format of a second layer, beside a dense one with that number of masks."""


def layers_with(n_masks: int) -> list[LayerInfo]:
    """A layer with a dense weight, one with a weight in fewer bits, and one that rounds x as well."""
    dense = replace(LAYER, n_masks=n_masks)
    rounding = replace(dense, weight_format="fp8_block", activation_format="fp8_token")
    return [dense, replace(dense, weight_format=STORED[n_masks]), rounding]


def write_table(folder: Path, n_masks: int) -> str:
    """Compile the kernels of a package with the layers of `layers_with` for sm_90; the table."""
    layers = layers_with(n_masks)
    write_small_package(folder / "model.pt2", device="cuda", backend="cuda", layers=layers, arch=[9, 0])
    device_code.write(folder, ["sm_90"], [folder / "model.pt2"])
    return (folder / device_code.TABLE).read_text()


def test_a_package_of_experts_is_refused(tmp_path: Path) -> None:
    layers = [LAYER, replace(LAYER, experts=8)]
    write_small_package(tmp_path / "model.pt2", device="cuda", backend="cuda", layers=layers, arch=[9, 0])
    with pytest.raises(PackageError, match="has experts, for which the library has no GPU kernels"):
        device_code.write(tmp_path, ["sm_90"], [tmp_path / "model.pt2"])


def compile_table(folder: Path) -> None:
    """Compile the table into `kernels.o`, with warnings as errors."""
    root = source_directory()
    (folder / "mglu_sources.inc").write_text(  # which CMake writes
        'MGLU_EMBED(source_plain, "cuda/plain.cu");\n#define MGLU_SOURCES(source) source("plain.cu", source_plain)\n'
    )
    folders = [f"-I{folder}", f"-Wa,-I{folder}", f"-Wa,-I{root}"]
    compile_cpp(folder / "kernels.o", "-c", *folders, root / "library/cuda/kernels.cpp")


def compile_cpp(out: Path, *arguments: str | Path) -> None:
    warnings = ["-Wall", "-Wextra", "-Werror"]
    process = run(["g++", "-std=c++20", *warnings, f"-I{source_directory()}", *arguments, "-o", out])
    assert process.returncode == 0, process.stderr


@pytest.fixture(scope="module", params=quick_only_for([8], [1, 8]), ids="n_masks={}".format)
def program(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, LayerInfo]:
    """A program that prints the launches of calls, with the table of three layers, and the dense one of them.

    Its kernels never run.
    """
    folder, layer = tmp_path_factory.mktemp("launches"), replace(LAYER, n_masks=request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_code, "compile_cubin", lambda *_: b"\x7fELF")
        patch.setattr(device_code, "choose", choose_or_decode)
        write_table(folder, layer.n_masks)
    compile_table(folder)
    compile_cpp(folder / "libcuda.so.1", "-shared", "-fPIC", HERE / "fake_driver.cpp")
    library = source_directory() / "library"
    sources = [library / "tensor.cpp", library / "cuda/driver.cpp", library / "cuda/launch.cpp"]
    compile_cpp(folder / "print_launches", HERE / "print_launches.cpp", *sources, folder / "kernels.o", "-ldl")
    return folder / "print_launches", layer


def choose_or_decode(call: LayerCall, gpu: Gpu) -> LaunchChoice:
    """The usual choice, but 512 tokens of a weight in fewer bits read copies of W and x, whatever is faster."""
    choice = choose(call, gpu)
    if call.tokens < device_code.MAX_TOKENS or call.weight.format.is_dense:
        return choice
    if choice.config.rounds_x:
        choice = choose(call.with_rounded_x(), gpu)
    assert isinstance(choice.config, TileWgmma)
    return replace(choice, config=replace(choice.config, decoded=True, permuted=True, sparse=False, stages=2))


def printed_launches(program: Path, layer: LayerInfo, tokens: Iterable[int], sms: int) -> tuple[list[str], str]:
    """The lines and the errors that the program prints on a GPU with `sms` SMs."""
    shape = layer.n_masks, layer.out_features, layer.in_features, FORMATS[layer.weight_format].code
    shape = *shape, int(layer.activation_format != "dense")
    process = run([program, *map(str, (*shape, *tokens))], LD_LIBRARY_PATH=str(program.parent), FAKE_SMS=str(sms))
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines(), process.stderr


def launches(layer: LayerInfo, tokens: int, sms: int) -> list[str]:
    """The launches of the CUDA backend: it chooses as for its own GPU, and launches on one with `sms` SMs."""
    chosen_for = gpu_of_architecture((9, 0))
    gpu = replace(chosen_for, multiprocessors=sms)
    call = device_code._call(layer, tokens)
    config = choose_or_decode(call, chosen_for).config
    copied, lines, weight = 0, [], weight_of(call)
    if call.activation_format != "dense":
        row_bytes, rows = 2 * call.in_features, tokens
        if config.rounds_x:
            row_bytes, rows = call.in_features + 4, round_up(tokens, config.block_tokens)
        copied = round_up(rows * row_bytes, 16)
        lines.append(f"mglu_quantize_x {rows} 1 256 0{weight}")
    if isinstance(config, TileWgmma):
        if config.decoded:
            copied += round_up(decode_weight.copy_bytes(call), 16)
            lines.append(f"mglu_decode_weight {decode_weight.blocks(call)} 1 256 0{weight}")
        if config.permuted:
            tile = config.block_tokens, config.sub
            copied += permute_x.copy_bytes(call, *tile)
            lines.append(f"mglu_permute_x {permute_x.blocks(call, *tile)} 1 256 0{weight}")
        x, matrix, masks = config.matrices(call)
        for one in filter(None, (matrix, x, masks)):
            lines.append(" ".join(["map", *(str(int(value)) for value in astuple(one)[:7])]))
    x_blocks, y_blocks = config.grid(call, gpu)
    shared = config.requested_shared_bytes(call, gpu)
    first = [f"{tokens} tokens", *([f"allocate {copied}"] if copied else [])]
    return [*first, *lines, f"mglu_{config.kernel} {x_blocks} {y_blocks} {config.threads} {shared}{weight}"]


def weight_of(call: LayerCall) -> str:
    """What a launch prints of its parameters."""
    scales = "" if call.weight.format.is_dense else ", with scales"
    return f", weight of {call.in_features} columns {integers(call)['weight_row_stride']} apart{scales}"


@needs_compiler
@pytest.mark.parametrize("sms", [2, 78, 132, 144])
def test_cpp_launches_what_python_launches_on_gpus_of_any_size(program: tuple[Path, LayerInfo], sms: int) -> None:
    path, dense = program
    tokens = range(1, device_code.MAX_TOKENS + 1) if sms == 132 else (1, 2, 8, 16, 17, 64, 200, 512)
    for layer in layers_with(dense.n_masks):
        printed, errors = printed_launches(path, layer, tokens, sms)
        assert printed == [line for count in tokens for line in launches(layer, count, sms)]
        assert errors == ""


@needs_compiler
def test_cpp_runs_a_layer_that_is_not_in_the_table_on_the_plain_kernel(program: tuple[Path, LayerInfo]) -> None:
    """At most 512 tokens a launch."""
    path, layer = program
    grids = {1: ["256 1"], 5: ["256 2"], 600: ["256 128", "256 22"]}
    for known in layers_with(layer.n_masks):
        missing = replace(known, out_features=2048, in_features=64)
        printed, errors = printed_launches(path, missing, grids, 132)
        weight = weight_of(device_code._call(missing, 1))
        expected = []
        for tokens, launched in grids.items():
            expected.append(f"{tokens} tokens")
            for first, grid in zip(range(0, tokens, device_code.MAX_TOKENS), launched, strict=True):
                count = min(tokens - first, device_code.MAX_TOKENS)
                if missing.activation_format != "dense":
                    expected += [f"allocate {128 * count}", f"mglu_quantize_x {count} 1 256 0{weight}"]
                expected.append(f"mglu_plain {grid} 256 0{weight}")
        assert printed == expected
        shape = [2048, 64 // FORMATS[missing.weight_format].packed]
        assert errors.count(f"no tuned kernel for a layer with weight {shape}") == 1


def compiles_device_code() -> bool:
    try:
        importlib.import_module("cuda.core")
    except ImportError:
        return shutil.which("nvcc") is not None
    return True


@needs_compiler
@pytest.mark.long
@pytest.mark.skipif(not compiles_device_code(), reason="needs NVRTC or nvcc")
@pytest.mark.parametrize("n_masks", [1, 8])
def test_the_kernels_of_a_package_are_compiled_and_embedded(n_masks: int, tmp_path: Path) -> None:
    table = write_table(tmp_path, n_masks)
    for kernel in ("mglu_decode_mma", "mglu_plain", "mglu_quantize_x"):
        assert table.count(f'kernel = "{kernel}"') >= 2  # of each layer
    embedded = re.findall(r'"(\d+\.cubin)"', table)
    assert len(embedded) == table.count("code = mglu_cubin_")
    assert all((tmp_path / name).read_bytes().startswith(b"\x7fELF") for name in embedded)
    compile_table(tmp_path)
