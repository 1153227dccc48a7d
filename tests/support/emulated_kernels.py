"""Runs small CUDA kernels on a CPU: a C++ compiler compiles their sources with stand-ins for PTX.

A machine without a GPU thus runs the same device code, with the parameters that the host code packs. This finds wrong
indices, formulas and parameters. It does not find races, and says nothing about speed.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mglu_ops.backends.cache import Artifact, obtain
from mglu_ops.backends.cuda import training
from mglu_ops.backends.cuda.device import KNOWN_GPUS
from mglu_ops.backends.cuda.kernels import training_steps
from mglu_ops.backends.cuda.launch import parameters
from mglu_ops.files import source_directory
from tests.support.commands import BUILT

STAND_INS = Path(__file__).parents[1] / "cuda" / "emulation"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


@pytest.fixture
def emulated_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `training_steps` take CPU tensors, as if the CPU were a GPU of compute capability 8.0.

    `torch.mm` also takes `out_dtype` on the CPU, which torch itself supports only on a GPU.
    """
    monkeypatch.setattr(training_steps, "_launch", _launch)
    monkeypatch.setattr(training_steps, "current_stream", lambda device: 0)
    monkeypatch.setattr(training, "gpu_of", lambda device: KNOWN_GPUS[8, 0])
    mm = torch.mm

    def wide_mm(a: Tensor, b: Tensor, *, out_dtype: torch.dtype | None = None) -> Tensor:
        return mm(a, b) if out_dtype is None else mm(a.to(out_dtype), b.to(out_dtype))

    monkeypatch.setattr(torch, "mm", wide_mm)


def _launch(
    device: int | None,
    kernel: str,
    macros: tuple[tuple[str, int], ...],
    blocks: int,
    integers: tuple[tuple[str, int], ...],
) -> Callable[..., None]:
    assert device is None  # for CPU tensors

    def launch(stream: int, pointers: Mapping[str, int]) -> None:
        run(kernel, macros, blocks, pointers, dict(integers))

    return launch


def run(
    kernel: str,
    macros: tuple[tuple[str, int], ...],
    blocks: int,
    pointers: Mapping[str, int],
    integers: Mapping[str, int],
    struct: str = "Params",
) -> None:
    """Run all blocks of a kernel, with the given pointers and integers in its parameter struct."""
    fields = parameters(f"{kernel}.cu" if struct == "Params" else "params.cuh", struct)
    assert pointers.keys() == set(fields.pointers)
    packed = bytearray(fields.with_integers(integers))
    fields.pointer_struct.pack_into(packed, 0, *fields.in_order(pointers))
    assert _compiled(kernel, macros)(bytes(packed), len(packed), blocks), f"{kernel}: other parameters"


@cache
def _compiled(kernel: str, macros: tuple[tuple[str, int], ...]) -> Any:
    defines = [f"-D{name}={value}" for name, value in macros]
    defines += [f'-DKERNEL_SOURCE="{kernel}.cu"', f"-DKERNEL=mglu_{kernel}"]
    defines += ["-DLANES_AT_ONCE"] if kernel in ("mask_weight_gradients", "group_tokens") else []
    defines += ["-DWARPS_AT_ONCE"] if kernel == "group_tokens" else []
    options = ["-std=c++20", "-O1", "-ffp-contract=off", "-shared", "-fPIC", "-pthread", *defines]
    sources = [*sorted(source_directory("cuda").glob("*.cu*")), *sorted(STAND_INS.iterdir())]

    def compile_sources(scratch: Path) -> bytes:
        for path in sources:  # a stand-in overwrites the header of the same name
            shutil.copy(path, scratch)
        command = ["g++", *options, "launch.cpp", "-o", "kernel.so"]
        process = subprocess.run(command, cwd=scratch, capture_output=True, text=True, check=False)
        assert process.returncode == 0, process.stderr
        return (scratch / "kernel.so").read_bytes()

    inputs = (*options, *(path.read_text() for path in sources))
    artifact = Artifact(f"emulated-{kernel}", ".so", inputs, "compiling an emulated kernel", "a second")
    launch = obtain(artifact, compile_sources, lambda path, _: ctypes.CDLL(str(path)), BUILT).launch
    launch.argtypes = [ctypes.c_char_p, ctypes.c_ulong, ctypes.c_uint]
    launch.restype = ctypes.c_bool
    return launch
