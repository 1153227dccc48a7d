"""The table of launches and the kernels that `build-runtime --arch --package` puts into the library."""

from __future__ import annotations

import importlib
import re
import shutil
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from library_fixtures import needs_compiler, run
from small_packages import write_small_package

from mglu_ops.backends.cuda import TileWgmma
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.device import gpu_of_architecture
from mglu_ops.backends.cuda.kernels import permute_x
from mglu_ops.packaging import device_code
from mglu_ops.packaging.library import source_directory
from mglu_ops.packaging.package import LayerInfo

HERE = Path(__file__).parent
LAYER = LayerInfo(8, 1024, 2048, "float16", "silu", None)


def test_a_launch_has_as_many_tokens_as_in_cpp() -> None:
    source = (source_directory() / "library/cuda/launch.cpp").read_text()
    assert f"kMaxTokens = {device_code.MAX_TOKENS};" in source


def write_table(folder: Path, layer: LayerInfo) -> str:
    """Compile the kernels of a package with one layer for sm_90; the table."""
    write_small_package(folder / "model.pt2", device="cuda", backend="cuda", layers=[layer], arch=[9, 0])
    device_code.write(folder, ["sm_90"], [folder / "model.pt2"])
    return (folder / device_code.TABLE).read_text()


def rows(table: str, name: str) -> list[dict[str, str]]:
    """The rows of a table; fields of a struct in a row are named `struct.field`."""
    (body,) = re.findall(rf"{name}\[\] = \{{\n(.*?)    \{{\}}\}};", table, flags=re.DOTALL)
    return [fields(line.strip().removesuffix(",")) for line in body.splitlines()]


def fields(row: str) -> dict[str, str]:
    found = {}
    for name, struct, value in re.findall(r"\.(\w+) = (?:\{([^{}]*)\}|([^{},]+))", row[1:-1]):
        inner = {f"{name}.{key}": text for key, text in fields(f"{{{struct}}}").items()} if struct else {name: value}
        found.update(inner)
    return found


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


@needs_compiler
@pytest.mark.parametrize("n_masks", [1, 8])
def test_the_table_covers_every_number_of_tokens(n_masks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_: b"\x7fELF")
    layer = replace(LAYER, n_masks=n_masks)
    table = write_table(tmp_path, layer)
    tuned = rows(table, "TunedLaunch kTuned")
    tokens = [count for row in tuned for count in range(int(row["first_tokens"]), int(row["last_tokens"]) + 1)]
    assert tokens == list(range(1, device_code.MAX_TOKENS + 1))
    kernels = [row["kernel"].strip('"').removeprefix("mglu_") for row in rows(table, "Cubin kCubins")]
    with_permute = set() if n_masks == 1 else {"permute_x"}  # with one mask, tiles read x as it is
    assert set(kernels) == {"decode_mma", "tile_wgmma", "plain"} | with_permute
    for row in tuned:
        assert_is_the_launch_of_python(row, layer, kernels)
    variant = {"arch": 90, "element": 0, "weight_format": 0, "n_masks": n_masks, "activation": 0, "mask_weight": -1}
    for row in tuned + rows(table, "PlainKernel kPlain"):
        assert {name: int(row[f"variant.{name}"]) for name in variant} == variant
    assert [row["tokens"] for row in rows(table, "PlainKernel kPlain")] == ["1", "4"]
    compile_table(tmp_path)


def assert_is_the_launch_of_python(row: dict[str, str], layer: LayerInfo, kernels: list[str]) -> None:
    """Compare a row with the launch that the CUDA backend chooses. Its grid is compared below, as C++ launches it."""
    gpu = gpu_of_architecture((9, 0))
    call = device_code._call(layer, int(row["last_tokens"]))
    config = choose(call, gpu).config
    assert kernels[int(row["cubin"])] == config.kernel
    assert config.kernel == choose(device_code._call(layer, int(row["first_tokens"])), gpu).config.kernel
    is_tile = isinstance(config, TileWgmma)
    permuted = is_tile and config.permuted
    assert (int(row["permute_x.cubin"]) >= 0) == permuted
    if permuted:
        assert kernels[int(row["permute_x.cubin"])] == "permute_x"
        assert int(row["permute_x.bytes"]) == permute_x.copy_bytes(call, config.block_tokens, config.sub)
    boxes = [int(row[f"boxes.{name}"]) for name in ("tokens", "rows", "mask_bytes")]
    mask_bytes = 16 if layer.n_masks == 1 else 64
    assert boxes == ([config.block_tokens, config.rows // config.cluster, mask_bytes] if is_tile else [0, 0, 0])


def build_print_launches(folder: Path, layer: LayerInfo) -> Path:
    """A program that prints the launches of calls, with the table of a layer. Its kernels are never run."""
    write_table(folder, layer)
    compile_table(folder)
    compile_cpp(folder / "libcuda.so.1", "-shared", "-fPIC", HERE / "fake_driver.cpp")
    library = source_directory() / "library"
    sources = [library / "tensor.cpp", library / "cuda/driver.cpp", library / "cuda/launch.cpp"]
    compile_cpp(folder / "print_launches", HERE / "print_launches.cpp", *sources, folder / "kernels.o", "-ldl")
    return folder / "print_launches"


def printed_launches(program: Path, shape: tuple[int, ...], tokens: Iterable[int], sms: int) -> tuple[list[str], str]:
    """The lines and the errors that the program prints on a GPU with `sms` SMs."""
    arguments = map(str, [*shape, *tokens])
    process = run([program, *arguments], LD_LIBRARY_PATH=str(program.parent), FAKE_SMS=str(sms))
    assert process.returncode == 0, process.stderr
    return process.stdout.splitlines(), process.stderr


@needs_compiler
@pytest.mark.parametrize("n_masks", [pytest.param(1, marks=pytest.mark.long), 8])
def test_cpp_launches_what_python_launches_on_gpus_of_any_size(
    n_masks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_: b"\x7fELF")
    layer = replace(LAYER, n_masks=n_masks)
    program = build_print_launches(tmp_path, layer)
    shape = n_masks, layer.out_features, layer.in_features
    tokens = 1, 2, 8, 16, 17, 64, 200, 512
    for sms in (2, 78, 132, 144):
        printed, errors = printed_launches(program, shape, tokens, sms)
        assert printed == [line for count in tokens for line in launches(layer, count, sms)]
        assert errors == ""


@needs_compiler
@pytest.mark.long
def test_cpp_runs_a_layer_that_is_not_in_the_table_on_the_plain_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most 512 tokens a launch."""
    monkeypatch.setattr(device_code, "compile_cubin", lambda *_: b"\x7fELF")
    program = build_print_launches(tmp_path, LAYER)
    printed, errors = printed_launches(program, (LAYER.n_masks, 2048, 64), (1, 5, 600), 132)
    grids = {"1": ["256 1"], "5": ["256 2"], "600": ["256 128", "256 22"]}
    assert printed == [
        line
        for tokens, launched in grids.items()
        for line in (f"{tokens} tokens", *(f"mglu_plain {grid} 256 0" for grid in launched))
    ]
    assert errors.count("no tuned kernel for a layer with weight [2048, 64]") == 1


def launches(layer: LayerInfo, tokens: int, sms: int) -> list[str]:
    """The launches of the CUDA backend: it chooses as for its own GPU, and launches on one with `sms` SMs."""
    chosen_for = gpu_of_architecture((9, 0))
    gpu = replace(chosen_for, multiprocessors=sms)
    call = device_code._call(layer, tokens)
    config = choose(call, chosen_for).config
    lines = [f"{tokens} tokens"]
    if isinstance(config, TileWgmma) and config.permuted:
        lines.append(f"mglu_permute_x {permute_x.blocks(call, config.block_tokens, config.sub)} 1 256 0")
    x, y = config.grid(call, gpu)
    shared = config.requested_shared_bytes(call, gpu)
    return [*lines, f"mglu_{config.kernel} {x} {y} {config.threads} {shared}"]


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
    table = write_table(tmp_path, replace(LAYER, n_masks=n_masks))
    embedded = re.findall(r'"(\d+\.cubin)"', table)
    assert len(embedded) == len(rows(table, "Cubin kCubins"))
    assert all((tmp_path / name).read_bytes().startswith(b"\x7fELF") for name in embedded)
    compile_table(tmp_path)
