"""Builds `libmglu_ops.so` from `csrc` with CMake."""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .. import notices
from ..backends.cpu.build import BuildError, as_program, find_compiler
from ..backends.interruptible import run
from ..files import as_path, check_writable, source_directory

LIBRARY = "libmglu_ops.so"


def build_runtime(
    out: str | Path,
    *,
    compiler: str | None = None,
    flags: Sequence[str] = (),
    archs: Sequence[str] = (),
    packages: Sequence[str | Path] = (),
    program: bool = False,
) -> Path:
    """Build `libmglu_ops.so` for C++ programs.

    The build needs CMake, a C++20 compiler and torch's headers, but not CUDA. The library runs with torch 2.11 and
    later, whichever version it was built with.

    Args:
        out: folder for the library; created if missing.
        compiler: the command line of the C++ compiler; by default `$CXX`, else `c++`, `g++` or `clang++`.
        flags: further compiler flags, such as `-march=native` or `-fsanitize=address`.
        archs: GPU architectures ("sm_90") for which kernels are compiled into the library, with NVRTC or nvcc. Other
            layers run the kernel `plain`, which NVRTC compiles where the library runs; it is several times slower.
        packages: packages for whose layers these kernels are compiled.
        program: also write `run_package` to `out`, a program that runs a package without Python (csrc/README.md).

    Returns:
        The path of the library.

    Raises:
        BuildError: CMake or the compiler is missing, or the compiler refused the sources.
        PackageError: a package is damaged or for a CPU, or no kernel takes one of its calls of `mglu::experts_down`.
        FileNotFoundError: one of `packages` does not exist.
        OSError: the folder cannot be created.
        TypeError: `out` is not a path.
        ValueError: an architecture is not of the form sm_90, only one of `archs` and `packages` is given, or the
            library cannot be written.
    """
    _find_tools(compiler)  # report a missing tool before kernels are compiled, which takes minutes
    out = as_path("out", out)
    out.mkdir(parents=True, exist_ok=True)
    check_writable("out", out / LIBRARY)
    with tempfile.TemporaryDirectory(prefix="mglu-kernels-") as kernels:
        if archs or packages:
            write_kernels(kernels, archs, packages)
        targets = ["mglu_ops", "run_package"] if program else ["mglu_ops"]
        build_targets(out, targets, compiler=compiler, flags=flags, kernels=kernels)
    return out / LIBRARY


def build_targets(
    out: str | Path,
    targets: Sequence[str],
    *,
    compiler: str | None = None,
    flags: Sequence[str] = (),
    kernels: str | Path = "",
) -> None:
    """Build targets of `csrc/CMakeLists.txt` and copy the results to a folder. Errors are as in `build_runtime`.

    Args:
        out: the folder; created if missing.
        targets: `mglu_ops`, and the programs `run_package`, `run_package_alone` and `fuzz`. `run_package` loads the
            library from its own folder.
        compiler: as in `build_runtime`.
        flags: as in `build_runtime`; they follow `-O3`.
        kernels: a folder that `write_kernels` filled.
    """
    cmake, generator, command = _find_tools(compiler)
    out = Path(out)
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mglu-build-") as folder:
        settings = {
            "TORCH_ROOT": Path(torch.__file__).parent,
            "CMAKE_CXX_COMPILER": as_program(command, Path(folder)),
            "CMAKE_BUILD_TYPE": "Release",
            "CMAKE_CXX_FLAGS_RELEASE": shlex.join(["-O3", *flags]),
            "MGLU_KERNELS": kernels,
        }
        defines = [f"-D{name}={value}" for name, value in settings.items()]
        notices.write(f"mglu_ops: building {', '.join(targets)} with CMake, which takes about two minutes on two cores")
        _run([cmake, "-S", str(source_directory()), "-B", folder, "-G", generator, *defines])
        _run([cmake, "--build", folder, "--parallel", str(os.cpu_count()), "--target", *targets], _show_progress)
        for name in (LIBRARY if target == "mglu_ops" else target for target in targets):
            temporary = out / f"{name}.{os.getpid()}.tmp"
            shutil.copy(Path(folder) / name, temporary)
            os.replace(temporary, out / name)  # processes that have mapped the old file keep it


def write_kernels(folder: str | Path, archs: Sequence[str], packages: Sequence[str | Path]) -> None:
    """Compile kernels and write them to a folder, for CMake's `MGLU_KERNELS`.

    Arguments and errors are as in `build_runtime`. A BuildError is also raised if neither NVRTC nor nvcc was found, or
    if a kernel does not compile.
    """
    from ..backends.cuda.compiler import CompileError
    from . import device_code

    if not archs:
        raise ValueError("no kernels: give an architecture and a package")
    Path(folder).mkdir(parents=True, exist_ok=True)
    try:
        device_code.write(Path(folder), archs, packages)
    except CompileError as error:
        raise BuildError(str(error)) from error


def _find_tools(compiler: str | None) -> tuple[str, str, list[str]]:
    """Return the path of CMake, the name of its generator, and the command line of the C++ compiler."""
    cmake, generator = _find_cmake(), os.environ.get("CMAKE_GENERATOR")
    if not generator:
        found = [name for program, name in (("ninja", "Ninja"), ("make", "Unix Makefiles")) if shutil.which(program)]
        if not found:
            raise BuildError("CMake needs ninja or make, and neither is on the PATH: install one (pip install ninja)")
        generator = found[0]
    return cmake, generator, find_compiler(compiler)


def _find_cmake() -> str:
    """Find CMake on the path, or else in the Python package `cmake`."""
    if found := shutil.which("cmake"):
        return found
    try:
        from cmake import CMAKE_BIN_DIR
    except ImportError:
        raise BuildError("CMake is missing: `pip install cmake`, or install it with the system's packages") from None
    return str(Path(CMAKE_BIN_DIR) / "cmake")


def _show_progress(line: str) -> None:
    """Write a progress line of ninja or make, such as `[3/40] Building ...`."""
    if line.startswith("["):
        notices.write(line)


def _run(command: Sequence[str], show: Callable[[str], object] | None = None) -> None:
    (process,) = run([command], show=show)
    if process.returncode != 0:
        raise BuildError(f"{shlex.join(command)} failed:\n{process.stdout}")
