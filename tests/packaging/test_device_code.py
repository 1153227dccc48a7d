"""The table of launches and the kernels that `build-runtime --arch --package` puts into the library."""

from __future__ import annotations

import importlib
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from library_fixtures import needs_compiler, run, write_small_package

import mglu_ops
from mglu_ops.backends.cuda import TileWgmma
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.device import gpu_of_architecture
from mglu_ops.backends.cuda.driver import POINTERS
from mglu_ops.backends.cuda.kernels import permute_x
from mglu_ops.backends.cuda.kernels.base import constants
from mglu_ops.layer_call import LayerCall
from mglu_ops.packaging import device_code
from mglu_ops.packaging.library import source_directory
from mglu_ops.packaging.package import LayerInfo, PackageInfo

LAYER = LayerInfo(8, 1024, 2048, "float16", "silu", None)


def test_parameters_are_laid_out_alike() -> None:
    """The pointers, and the constants that Python packs after them, are as long as `Params` in C++."""
    size = re.search(r"sizeof\(Params\) == (\d+)", (source_directory() / "library/cuda/launch.cpp").read_text())
    assert size is not None
    call = LayerCall.contiguous(torch.device("cuda"), torch.float16, 4, 1, 64, 64)
    assert len(constants(call)) + POINTERS.size == int(size[1])


def test_a_launch_has_as_many_tokens_as_in_cpp() -> None:
    source = (source_directory() / "library/cuda/launch.cpp").read_text()
    assert f"kMaxTokens = {device_code.MAX_TOKENS};" in source


def write_table(folder: Path, layer: LayerInfo) -> str:
    """Compile the kernels of a package with one layer for sm_90; the table."""
    info = PackageInfo("2.11.0", mglu_ops.__version__, "cuda", "cuda", "operator", True, [], [layer], arch=[9, 0])
    write_small_package(folder / "model.pt2", **info.texts())
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


def assert_cpp_takes_the_table(folder: Path) -> None:
    root = source_directory()
    (folder / "mglu_sources.inc").write_text(  # which CMake writes
        'MGLU_EMBED(source_plain, "cuda/plain.cu");\n#define MGLU_SOURCES(source) source("plain.cu", source_plain)\n'
    )
    folders = [f"-I{folder}", f"-Wa,-I{folder}", f"-Wa,-I{root}"]
    warnings = ["-Wall", "-Wextra", "-Werror"]
    source = root / "library/cuda/kernels.cpp"
    built = run(["g++", "-std=c++20", *warnings, *folders, "-c", source, "-o", folder / "kernels.o"])
    assert built.returncode == 0, built.stderr


@needs_compiler
@pytest.mark.parametrize("n_masks", [1, 8])
def test_the_table_covers_every_number_of_tokens(n_masks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_code, "_compile", lambda *_: b"\x7fELF")
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
    variant = {"arch": 90, "element": 0, "n_masks": n_masks, "activation": 0, "route": -1}
    for row in tuned + rows(table, "PlainKernel kPlain"):
        assert {name: int(row[f"variant.{name}"]) for name in variant} == variant
    assert [row["tokens"] for row in rows(table, "PlainKernel kPlain")] == ["1", "4"]
    assert_cpp_takes_the_table(tmp_path)


def assert_is_the_launch_of_python(row: dict[str, str], layer: LayerInfo, kernels: list[str]) -> None:
    """Compare a row with the launch that the CUDA backend chooses, and with its grid on GPUs of several sizes."""
    gpu = gpu_of_architecture((9, 0))
    call = device_code._call(layer, int(row["last_tokens"]))
    config = choose(call, gpu).config
    assert kernels[int(row["cubin"])] == config.kernel
    assert config.kernel == choose(device_code._call(layer, int(row["first_tokens"])), gpu).config.kernel
    blocks, cluster, is_tile = int(row["blocks"]), int(row["cluster"]), isinstance(config, TileWgmma)
    assert row["persistent"] == str(is_tile).lower()
    for sms in (2, 78, 132, 144):
        launched = min(blocks, sms // cluster * cluster) if is_tile else blocks  # as csrc/library/cuda/launch.cpp does
        assert (launched, 1) == config.grid(call, replace(gpu, multiprocessors=sms))
    assert int(row["threads"]) == config.threads
    assert int(row["shared_bytes"]) == config.shared_bytes(call)
    assert int(row["blocks_per_sm"]) == (0 if is_tile else config.blocks_per_sm)
    permuted = is_tile and config.permuted
    assert (int(row["permute_x.cubin"]) >= 0) == permuted
    if permuted:
        assert kernels[int(row["permute_x.cubin"])] == "permute_x"
        assert int(row["permute_x.bytes"]) == permute_x.copy_bytes(call, config.block_tokens, config.sub)
    boxes = [int(row[f"boxes.{name}"]) for name in ("tokens", "rows", "mask_bytes")]
    mask_bytes = 16 if layer.n_masks == 1 else 64
    assert boxes == ([config.block_tokens, config.rows // config.cluster, mask_bytes] if is_tile else [0, 0, 0])


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
    assert_cpp_takes_the_table(tmp_path)
