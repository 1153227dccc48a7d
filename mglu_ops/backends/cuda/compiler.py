"""Device code to cubins: NVRTC through `cuda.core`, with a cache on disk that several processes may share."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import os
import tempfile
import threading
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from ..cache import announce, cache_directory

_IMPORTING = threading.Lock()


class CompileError(RuntimeError):
    """NVRTC refused a kernel; the message holds its log."""


@cache
def source_directory() -> Path:
    """The folder of the device code: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for candidate in (package / "csrc" / "cuda", package.parent / "csrc" / "cuda"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the CUDA sources of mglu_ops are neither in {package} nor beside it")


@cache
def source_hash() -> str:
    """The hash of all sources, since each kernel includes several: a changed header never finds an old cubin."""
    digest = hashlib.sha256()
    for path in sorted(source_directory().glob("*.cu*")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@cache
def compiler_version() -> str:
    """NVRTC's version, from its package if there is one: loading the library only to ask it takes 0.15 s."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return f"{package} {metadata.version(package)}"
    nvrtc = importlib.import_module("cuda.bindings.nvrtc")
    return ".".join(str(part) for part in nvrtc.nvrtcVersion()[1:])


def compile_cubin(kernel: str, arch: str, macros: dict[str, int]) -> bytes:
    """The cubin of `csrc/cuda/<kernel>.cu` for an architecture such as `sm_90`, from the cache if it is there.

    Raises:
        CompileError: with NVRTC's log.
    """
    options = ";".join(f"{name}={value}" for name, value in sorted(macros.items()))
    identity = "\0".join((source_hash(), kernel, arch, options, compiler_version()))
    path = cache_directory() / f"{kernel}-{arch}-{hashlib.sha256(identity.encode()).hexdigest()[:32]}.cubin"
    try:
        return path.read_bytes()
    except OSError:
        pass
    announce("compiling CUDA kernels for this GPU", "2 to 5 seconds for each kernel")
    code = _run_nvrtc(kernel, arch, macros)
    _store(path, code)
    return code


def _cuda_core() -> Any:
    """Import `cuda.core`, one thread at a time: it replaces itself on import, and others would find half of it."""
    with _IMPORTING:
        return importlib.import_module("cuda.core")


def _run_nvrtc(kernel: str, arch: str, macros: dict[str, int]) -> bytes:
    core = _cuda_core()
    directory = source_directory()
    options = core.ProgramOptions(
        name=f"{kernel}.cu",
        arch=arch,
        std="c++17",
        include_path=str(directory),
        define_macro=[(name, str(value)) for name, value in sorted(macros.items())],
    )
    try:
        program = core.Program((directory / f"{kernel}.cu").read_text(), "c++", options)
        return bytes(program.compile("cubin").code)
    except Exception as error:  # cuda.core raises its own types, which are not importable without it
        raise CompileError(f"NVRTC could not compile {kernel}.cu for {arch} with {macros}:\n{error}") from error


def _store(path: Path, code: bytes) -> None:
    """Write a file whole or not at all, so that no process reads half of it. A cache that cannot be written is slow."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(code)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise
    except OSError:
        return
