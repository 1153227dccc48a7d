"""`libmglu_ops.so`: built with a C++ compiler alone, and loaded after a look at what is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import torch

from .package import PackageError

LIBRARY = "libmglu_ops.so"
CHECKSUM = f"{LIBRARY}.sha256"
"""In the form of `sha256sum`, beside the library."""

# The oldest torch whose C interface the library uses: what is newer is hidden from its sources.
TARGET = "0x020b000000000000"

_COMPILE = ("-std=c++17", "-O3", "-fPIC", "-fvisibility=hidden", f"-DTORCH_TARGET_VERSION={TARGET}")


class BuildError(RuntimeError):
    """The compiler refused the sources, or there is none; the message holds what it said."""


@cache
def source_directory() -> Path:
    """`csrc`: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    for candidate in (package / "csrc", package.parent / "csrc"):
        if (candidate / "library").is_dir():
            return candidate
    raise FileNotFoundError(f"the C++ sources of mglu_ops are neither in {package} nor beside it")


def library_sources() -> list[Path]:
    """What the library is made of; `programs` beside it holds programs of their own."""
    root = source_directory()
    return sorted(path for folder in ("cpu", "library", "library/cuda") for path in (root / folder).glob("*.cpp"))


def build_runtime(
    out: str | Path,
    *,
    compiler: str | None = None,
    flags: Sequence[str] = (),
    archs: Sequence[str] = (),
    packages: Sequence[str | Path] = (),
) -> Path:
    """Build `libmglu_ops.so` for C++ programs and for packages that call its shims.

    It needs a C++17 compiler and the headers that torch brings, and neither CUDA nor CMake. It runs with torch 2.11 and
    later, whichever torch it was built beside.

    Args:
        out: folder to write the library and its checksum to; made if missing.
        compiler: to call; else `$CXX`, else `g++`.
        flags: further flags for it, such as `-march=native` or `-fsanitize=address`.
        archs: GPU architectures ("sm_90") to compile kernels for now, with NVRTC or nvcc, so that the library needs
            neither where it runs. What is not among them is compiled where it runs, by NVRTC.
        packages: whose layers' kernels these are.

    Returns:
        The library.

    Raises:
        BuildError: there is no compiler, or it refused the sources.
    """
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    compiler = compiler or os.environ.get("CXX") or "g++"
    if shutil.which(compiler) is None:
        raise BuildError(f"no C++ compiler: {compiler} is not on the PATH (set CXX, or pass --compiler)")
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(prefix="mglu-build-") as folder:
        # The assembler looks for what is embedded: the kernels' sources, and those that were compiled now.
        embedded = [f"-Wa,-I{source_directory()}", f"-Wa,-I{folder}"]
        includes = ["-isystem", str(root / "include"), "-I", folder, *embedded]
        if archs or packages:
            write_kernels(folder, archs, packages)

        def compile_one(source: Path) -> str:
            # Objects are named by folder too: two folders may have files of one name.
            target = str(Path(folder) / f"{source.parent.name}-{source.stem}.o")
            _run([compiler, *_COMPILE, *flags, *includes, "-c", str(source), "-o", target])
            return target

        with ThreadPoolExecutor(os.cpu_count()) as pool:
            objects = list(pool.map(compile_one, library_sources()))
        library = out / LIBRARY
        # libtorch.so stands for all of torch's libraries, those for CUDA too where there are any. Its folder is only a
        # hint: a process that has loaded a torch, wherever from, keeps that.
        torch_libraries = [f"-L{root / 'lib'}", f"-Wl,-rpath,{root / 'lib'}", "-ltorch", "-ltorch_cpu", "-lc10"]
        link = ["-shared", "-Wl,--no-as-needed", *torch_libraries, "-ldl"]
        temporary = library.with_suffix(f".{os.getpid()}.tmp")
        _run([compiler, *flags, *objects, *link, f"-Wl,-soname,{LIBRARY}", "-o", str(temporary)])
        os.replace(temporary, library)  # a process that has the old one mapped keeps it
    (out / CHECKSUM).write_text(f"{_checksum(library)}  {LIBRARY}\n")
    return library


def build_program(
    source: str | Path, out: str | Path, library: str | Path | None = None, *, flags: Sequence[str] = ("-O2",)
) -> Path:
    """Build a C++20 program against this torch, and against `libmglu_ops.so` if its path is given, with g++ or `$CXX`.

    Raises:
        BuildError: there is no compiler, or it refused the source.
    """
    root = Path(torch.__file__).parent
    includes = [source_directory(), root / "include", root / "include/torch/csrc/api/include"]
    places = [root / "lib"] if library is None else [Path(library).resolve().parent, root / "lib"]
    libraries = [*(["-lmglu_ops"] if library is not None else []), "-ltorch", "-ltorch_cpu", "-lc10"]
    command = [os.environ.get("CXX") or "g++", "-std=c++20", *flags, *(f"-isystem{path}" for path in includes)]
    command += [str(source), "-o", str(out), *(f"{to}{path}" for path in places for to in ("-L", "-Wl,-rpath,"))]
    _run([*command, "-Wl,--no-as-needed", *libraries])
    return Path(out)


def write_kernels(folder: str | Path, archs: Sequence[str], packages: Sequence[str | Path]) -> None:
    """Compile kernels and write them to a folder, for CMake's `MGLU_KERNELS`; arguments as of `build_runtime`.

    Raises:
        BuildError: neither NVRTC nor nvcc is here, or a kernel was refused.
    """
    from ..backends.cuda.compiler import CompileError
    from . import device_code

    try:
        device_code.write(Path(folder), archs, packages)
    except CompileError as error:
        raise BuildError(str(error)) from error


def _run(command: list[str]) -> None:
    try:
        process = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise BuildError(f"no C++ compiler: {command[0]} is not on the PATH (set CXX)") from None
    if process.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{process.stderr}")


def _checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


_loaded: dict[str, ctypes.CDLL] = {}


def load_library(path: str | Path) -> None:
    """Load `libmglu_ops.so` into this process, for packages that call its shims. A second time is without effect.

    The operators stay those of `mglu_ops`: the library registers none where they are already.

    Raises:
        FileNotFoundError: there is no such file.
        PackageError: the checksum beside it is missing or another one, or the system cannot load it.
    """
    path = Path(path).resolve()
    if str(path) in _loaded:
        return
    if not path.is_file():
        raise FileNotFoundError(f"{path} is not a file; `python -m mglu_ops build-runtime --out DIR` builds it")
    # The loader maps what it is given: a truncated library kills the process, and a damaged one does worse.
    beside = path.with_name(path.name + ".sha256")
    if not beside.is_file():
        raise PackageError(f"{path} has no {beside.name} beside it; build it with `python -m mglu_ops build-runtime`")
    if beside.read_text().split()[:1] != [_checksum(path)]:
        raise PackageError(f"{path} is truncated, damaged or another file than {beside.name} was written for")
    try:
        _loaded[str(path)] = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)  # packages look for its symbols there
    except OSError as error:
        raise PackageError(f"{path} cannot be loaded: {error}") from error
