"""The device code compiles for every architecture, without spills, on a machine that has no GPU.

With NVRTC (the `cuda-core` package) where it is installed, as on a user's machine; else with nvcc; else skipped.
"""

from __future__ import annotations

import importlib
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from mglu_ops.backends.cuda import plan
from mglu_ops.backends.cuda.choice import choose
from mglu_ops.backends.cuda.compiler import source_directory
from mglu_ops.backends.cuda.config import LaunchConfig, shared_limit

ARCHITECTURES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))
REGISTERS_PER_SM = 65536


def _nvrtc() -> Any:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        nvrtc.nvrtcVersion()
    except Exception:  # not installed, or its shared library is missing
        return None
    return nvrtc


def _problem(
    arch: tuple[int, int],
    dtype: torch.dtype,
    n_masks: int,
    tokens: int,
    mask_alignment: int = 16,
) -> plan.Problem:
    return plan.Problem(
        arch=arch,
        dtype=dtype,
        n_masks=n_masks,
        tokens=tokens,
        out_features=8192,
        in_features=2048,
        activation="silu",
        route_dtype=None,
        weight_aligned=True,
        mask_alignment=mask_alignment,
        x_vectorizable=True,
        strides=(2048, 1, 2048, 1, 256 * n_masks, n_masks, 1, 0, 0),
        multiprocessors=132,
    )


def _compile(kernel: str, name: str, defines: dict[str, int], tmp_path: Path) -> str:
    """What ptxas reports for a target such as sm_90a."""
    source = source_directory() / f"{kernel}.cu"
    macros = [f"-D{key}={value}" for key, value in defines.items()]
    nvrtc = _nvrtc()
    if nvrtc is None:
        nvcc = shutil.which("nvcc")
        if nvcc is None:
            pytest.skip("neither NVRTC (pip install mglu-ops[cuda]) nor nvcc is here")
        target = f"-gencode=arch=compute_{name[3:]},code={name}"
        command = [nvcc, "-cubin", "-std=c++17", target, "-Xptxas", "-v", *macros, "-o", str(tmp_path / "out.cubin")]
        result = subprocess.run([*command, str(source)], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        return result.stderr
    error, program = nvrtc.nvrtcCreateProgram(source.read_bytes(), source.name.encode(), 0, [], [])
    assert int(error) == 0
    options = [f"-arch={name}", "-std=c++17", f"-I{source.parent}", "--ptxas-options=-v", *macros]
    (error,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(program)
    assert int(error) == 0, log.decode()
    return log.decode()


def _check(problem: plan.Problem, config: LaunchConfig, tmp_path: Path) -> None:
    log = _compile(config.kernel, plan.target(problem.arch, config), plan.defines(problem, config), tmp_path)
    registers = re.search(r"Used (\d+) registers", log)
    spills = re.search(r"(\d+) bytes spill stores", log)
    assert registers is not None, log
    assert spills is not None, log
    assert int(spills[1]) == 0, f"{config} for {problem.arch}: {log}"
    assert "serialized" not in log, f"wgmmas wait for each other in {config}: {log}"
    assert int(registers[1]) * config.threads * config.blocks_per_sm <= REGISTERS_PER_SM, f"{config}: {log}"


@pytest.mark.parametrize(
    ("tokens", "n_masks"),
    [(1, 1), (1, 3), (1, 4), (1, 8), (1, 16), (8, 1), (8, 4), (8, 7), (8, 16), (16, 3), (16, 8), (16, 15), (16, 16)],
)
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_fast_kernels(arch: tuple[int, int], tokens: int, n_masks: int, tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16) if n_masks == 4 else (torch.float16,):
        shape = (14336, 4096) if tokens == 1 else (4096, 1024)  # long stages, and short ones
        config = choose(arch, dtype, n_masks, tokens, *shape, aligned=True)
        assert config.kernel == "decode_mma"
        _check(_problem(arch, dtype, n_masks, tokens), config, tmp_path)


@pytest.mark.parametrize("tokens", [32, 64, 8192])
@pytest.mark.parametrize("n_masks", [1, 4, 8, 9, 16])
def test_tile_kernel(n_masks: int, tokens: int, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if n_masks == 4 else torch.float16
    config = choose((9, 0), dtype, n_masks, tokens, 8192, 2048, aligned=True)
    assert config.kernel == "tile_wgmma"
    problem = _problem((9, 0), dtype, n_masks, tokens)
    _check(problem, config, tmp_path)
    if config.turned:
        _compile("permute_x", "sm_90a", plan.turn_defines(config), tmp_path)
    elif not config.sparse:  # as it is for an x of other layouts
        config = choose((9, 0), dtype, n_masks, tokens, 8192, 2048, aligned=True, x_in_rows=False)
        assert config.turned
        _check(problem, config, tmp_path)


@pytest.mark.parametrize(
    ("n_masks", "tokens"),
    [(2, 24), (8, 32), (9, 32), (10, 32), (11, 24), (12, 24), (13, 24), (15, 16), (16, 16), (16, 32)],
)
def test_sparse_tiles_where_registers_are_fewest(n_masks: int, tokens: int, tmp_path: Path) -> None:
    config = choose((9, 0), torch.bfloat16, n_masks, tokens, 14336, 4096, aligned=True)
    assert config.sparse
    _check(_problem((9, 0), torch.bfloat16, n_masks, tokens), config, tmp_path)


@pytest.mark.parametrize(("n_masks", "tokens"), [(3, 64), (8, 80), (16, 64)])
def test_sparse_tiles_of_small_layers(n_masks: int, tokens: int, tmp_path: Path) -> None:
    config = choose((9, 0), torch.bfloat16, n_masks, tokens, 4096, 1024, aligned=True)
    assert config.sparse
    assert config.block_tokens < tokens
    assert config.cluster == 2
    _check(_problem((9, 0), torch.bfloat16, n_masks, tokens), config, tmp_path)


@pytest.mark.parametrize("tokens", [32, 64])
def test_tile_kernel_reads_masks_that_the_copy_engine_cannot(tokens: int, tmp_path: Path) -> None:
    problem = _problem((9, 0), torch.float16, 3, tokens, mask_alignment=8)
    config = choose((9, 0), torch.float16, 3, tokens, 8192, 2048, aligned=True)
    assert config.sparse == (tokens == 32)
    assert plan.matrices(problem, config)[2] is None
    _check(problem, config, tmp_path)


@pytest.mark.parametrize("n_masks", range(1, 17))
def test_tiles_cover_all_rows_and_tokens(n_masks: int) -> None:
    for tokens, out_features in ((9, 64), (17, 100), (64, 14336), (1000, 8192), (8192, 8192)):
        config = choose((9, 0), torch.float16, n_masks, tokens, out_features, 4096, aligned=True)
        assert config.kernel == "tile_wgmma" or tokens <= 16
        if config.kernel == "tile_wgmma":
            assert config.rows <= out_features
            assert config.stages >= 3
            assert config.turned_bytes(tokens, 4096) >= tokens * 4096 * 2
            assert config.turned_bytes(tokens, 4096) % (8 * 128) == 0  # whole warps of permute_x
            assert not (config.turned and config.sparse)
            assert config.threads <= 384


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
def test_plain_kernel(arch: tuple[int, int], dtype: torch.dtype, tmp_path: Path) -> None:
    for n_masks, tokens in ((3, 1), (16, 4)):
        config = choose(arch, dtype, n_masks, tokens, 8192, 2048, aligned=False)
        assert config.kernel == "plain"
        _check(_problem(arch, dtype, n_masks, tokens), config, tmp_path)


@pytest.mark.parametrize("n_masks", range(1, 17))
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 64])
@pytest.mark.parametrize("in_features", [8, 2048, 4096, 14336, 65536])
def test_shared_memory_fits(in_features: int, tokens: int, n_masks: int) -> None:
    for arch in ARCHITECTURES:
        config = choose(arch, torch.float16, n_masks, tokens, 8192, in_features, aligned=True)
        shared = config.shared_bytes(n_masks, tokens, in_features)
        assert config.blocks_per_sm * (shared + 1024) <= shared_limit(arch) or config.kernel == "plain"
        if config.kernel == "decode_mma":  # as many blocks an SM as are meant to be there, and no more
            reserved = config.reserved_bytes(arch, n_masks, tokens, in_features)
            assert reserved >= shared
            assert shared_limit(arch) // (reserved + 1024) == config.blocks_per_sm


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("out_features", [16, 2048, 8192, 9728, 14336, 28672])
def test_few_tokens_fill_the_schedulers(out_features: int, arch: tuple[int, int]) -> None:
    for n_masks in (5, 8, 12, 16):
        config = choose(arch, torch.bfloat16, n_masks, 8, out_features, 2048, aligned=True)
        warps = config.tiles * config.split_k
        assert config.kernel == "decode_mma"
        assert 7 <= warps <= 12
        assert warps / (4 * -(-warps // 4)) > 0.8


def test_no_header_is_included() -> None:
    """NVRTC needs no toolkit on the user's machine only as long as the sources include nothing but each other."""
    for path in source_directory().glob("*.cu*"):
        for name in re.findall(r'#include\s+([<"][^>"]+[>"])', path.read_text()):
            assert name.startswith('"'), f"{path.name} includes {name}"
            assert (source_directory() / name.strip('"')).is_file()
