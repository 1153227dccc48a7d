"""Compiles device code to cubins with NVRTC (through `cuda.core`) or nvcc, and caches them on disk."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.util
import os
import shlex
import shutil
import subprocess
import threading
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ...files import source_directory
from ...notices import say
from ..cache import Artifact, is_stored, obtain
from ..interruptible import COMPILER_SECONDS, run

_STANDARD = "c++17"
_IMPORTING = threading.RLock()
# A process that is forked while another thread imports could never finish the import, so forks wait for the lock.
os.register_at_fork(before=_IMPORTING.acquire, after_in_parent=_IMPORTING.release, after_in_child=_IMPORTING.release)


class CompileError(RuntimeError):
    """No compiler is installed, it has no folder for its output, or it refused a kernel (the message has its log)."""


@cache
def source_hash() -> str:
    """Return the hash of all sources, so that a change of any header makes cached cubins invalid."""
    digest = hashlib.sha256()
    for path in sorted(source_directory("cuda").glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def compiler_version() -> str:
    """Return the version of NVRTC, from its package's metadata if possible, since loading NVRTC takes 0.15 s."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    return ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:])


def compile_cubin(kernel: str, arch: str, macros: dict[str, int], folder: Path | None = None) -> bytes:
    """Return the cubin of `csrc/cuda/<kernel>.cu` for an architecture such as `sm_90`, from the cache if possible.

    If no folder can keep the cubin, every process compiles it. If `folder` is given, no other folder is used.

    Raises:
        CompileError: the compiler failed, `folder` cannot be used, or nvcc has no folder to work in.
    """
    artifact = _artifact(kernel, arch, macros)
    try:
        return obtain(artifact, lambda scratch: _compile(kernel, arch, macros, scratch), lambda _, cubin: cubin, folder)
    except OSError as error:
        if folder is not None or not has_cuda_core():
            raise CompileError(str(error)) from error
        say(f"each process compiles its CUDA kernels: {error}")
        return _run_nvrtc(kernel, arch, macros)


def is_cached(kernel: str, arch: str, macros: dict[str, int]) -> bool:
    """True if the cache holds the cubin, so that no compiler is needed."""
    return is_stored(_artifact(kernel, arch, macros))


@cache
def has_cuda_core() -> bool:
    """True if `cuda.core` is installed, which compiles with NVRTC."""
    try:
        return importlib.util.find_spec("cuda.core") is not None
    except ModuleNotFoundError:
        return False


def _artifact(kernel: str, arch: str, macros: dict[str, int]) -> Artifact:
    return Artifact(
        name=f"{kernel}-{arch}",
        suffix=".cubin",
        inputs=(source_hash(), _STANDARD, kernel, arch, *(f"{name}={value}" for name, value in sorted(macros.items()))),
        activity="compiling CUDA kernels for this GPU",
        duration="2 to 5 seconds for each kernel",
    )


def _compile(kernel: str, arch: str, macros: dict[str, int], scratch: Path) -> bytes:
    if has_cuda_core():
        return _run_nvrtc(kernel, arch, macros)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        raise CompileError("CUDA kernels need NVRTC (pip install cuda-core) or nvcc, and neither is here")
    return _run_nvcc(nvcc, kernel, arch, macros, scratch)


def _run_nvcc(nvcc: str, kernel: str, arch: str, macros: dict[str, int], scratch: Path) -> bytes:
    cubin, source = scratch / "kernel.cubin", source_directory("cuda") / f"{kernel}.cu"
    defines = [f"-D{name}={value}" for name, value in macros.items()]
    command = [nvcc, "-cubin", f"-std={_STANDARD}", f"-arch={arch}", *defines, str(source), "-o", str(cubin)]
    try:
        (result,) = run([command], {"TMPDIR": str(scratch)}, COMPILER_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise CompileError(f"nvcc did not end within {COMPILER_SECONDS:.0f} s: {shlex.join(command)}") from error
    if result.returncode != 0:
        raise CompileError(f"nvcc could not compile {kernel}.cu for {arch} with {macros}:\n{result.stdout}")
    return cubin.read_bytes()


def _cuda_core() -> Any:
    """Import `cuda.core`, which replaces itself during the import. The lock hides its incomplete state from threads."""
    with _IMPORTING:
        return importlib.import_module("cuda.core")


def _run_nvrtc(kernel: str, arch: str, macros: dict[str, int]) -> bytes:
    core = _cuda_core()
    directory = source_directory("cuda")
    options = core.ProgramOptions(
        name=f"{kernel}.cu",
        arch=arch,
        std=_STANDARD,
        include_path=str(directory),
        define_macro=[(name, str(value)) for name, value in sorted(macros.items())],
    )
    try:
        program = core.Program((directory / f"{kernel}.cu").read_text(), "c++", options)
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core raises types of its own
        raise CompileError(f"NVRTC could not compile {kernel}.cu for {arch} with {macros}:\n{error}") from error
