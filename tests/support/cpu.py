"""Calls the CPU backend with a chosen instruction set, checks its results, and builds a library of emulated AVX-512."""

from __future__ import annotations

import functools
import hashlib
import platform
import shlex
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from mglu_ops.backends.cpu import build, library
from tests.support.calls import run_on
from tests.support.layers import Layer

EMULATION = Path(__file__).parents[1] / "cpu" / "cpu_avx512_emulation.h"
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, build.COMPILERS)), reason=f"needs one of {', '.join(build.COMPILERS)}"
)


class Kernel(NamedTuple):
    """An instruction set and a dtype. The kernels run on this CPU or with emulated intrinsics."""

    isa: str
    dtype: torch.dtype
    is_emulated: bool = False

    def __str__(self) -> str:
        return f"{'emulated ' if self.is_emulated else ''}{self.isa} {self.dtype}".replace("torch.", "")

    def library(self) -> library.Library:
        if self.is_emulated and platform.machine() != "x86_64":
            pytest.skip("the emulated instructions are those of x86-64")
        loaded = emulated_library() if self.is_emulated else library.load()
        assert isinstance(loaded, library.Library), loaded
        if not loaded.supports(self.isa, self.dtype):
            pytest.skip(f"this CPU has no {self.isa}")
        return loaded


DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BFLOAT16 = [Kernel(isa, torch.bfloat16) for isa in ("avx512_bf16", "amx")]
NATIVE = [*(Kernel(isa, dtype) for isa in ("portable", "avx2", "avx512") for dtype in DTYPES), *BFLOAT16]
EMULATED = [pytest.param(kernel._replace(is_emulated=True), marks=pytest.mark.long) for kernel in BFLOAT16]


@pytest.fixture(params=[*NATIVE, *EMULATED], ids=str)
def kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Kernel:
    """Every instruction set that this machine has or emulates, with every dtype that its kernels take."""
    found: Kernel = request.param
    monkeypatch.setattr(library, "_loaded", found.library())
    return found


@functools.cache
def emulated_library() -> library.Library:
    """The CPU library built with emulated intrinsics, so that every x86-64 machine can run all instruction sets."""
    version = hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:16]  # part of the options, and so of the cache's key
    options = (f'-DMGLU_EMULATE_AVX512="{EMULATION.name}"', f"-DMGLU_EMULATION={version}", f"-I{EMULATION.parent}")
    compile_files = build._run

    def compile_quickly(compiler: Sequence[str], folder: Path, *arguments: Sequence[str]) -> None:
        """Compile with -O1, but avx512.cpp with -O0. That file is emulated: it compiles slowest and rarely runs."""
        compile_files(compiler, folder, *([*one, "-O0" if "avx512.cpp" in one[1] else "-O1"] for one in arguments))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "_run", compile_quickly)
        patch.setenv("CXX", shlex.join((*build.find_compiler(), *options)))
        return build.load_library(library.Library)


def isas(dtype: torch.dtype) -> list[str]:
    """This machine's instruction sets that have kernels for a dtype."""
    loaded = library.load()
    assert isinstance(loaded, library.Library), loaded
    return [isa for isa in library.ISAS if loaded.supports(isa, dtype)]


def run(layer: Layer, isa: str = "best") -> Tensor:
    return run_on("cpu", layer.x, layer.weight, layer.packed_masks, layer.activation, layer.mask_weights, launch=isa)
