"""The CPU kernels as a shared library: built by the machine's C++ compiler at first use, kept on disk, loaded once.

The library knows nothing of torch: it is one file for any version of Python and torch, and picks its instruction set
when it runs. Several processes may build at once; whoever is last replaces the file, whole, by an equal one.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from ..cache import announce, cache_directory

COMPILERS = ("c++", "g++", "clang++")
# Products and sums are contracted only where a kernel says fma, so that equal sums are rounded equally.
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi", "-pthread")


class BuildError(RuntimeError):
    """There is no C++ compiler, or it refused the kernels; the message holds its log."""


@cache
def source_directory() -> Path:
    """The folder of the kernels: inside an installed package, or beside it in a checkout."""
    package = Path(__file__).resolve().parents[2]
    for candidate in (package / "csrc" / "cpu", package.parent / "csrc" / "cpu"):
        if candidate.is_dir():
            return candidate
    raise FileNotFoundError(f"the CPU sources of mglu_ops are neither in {package} nor beside it")


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler: its command line, and what tells this version of it from others."""

    command: tuple[str, ...]
    identity: str


def find_compiler() -> Compiler:
    """`$CXX` (with its options), else the first of `COMPILERS` on the path.

    Raises:
        BuildError: there is none.
    """
    wanted = os.environ.get("CXX")
    for candidate in (wanted,) if wanted else COMPILERS:
        command = shlex.split(candidate)
        program = shutil.which(command[0]) if command else None
        if program:
            # Asking for --version takes a process; a new version is a new file.
            path = Path(program).resolve()
            status = path.stat()
            identity = f"{path} {status.st_size} {status.st_mtime_ns} {command[1:]}"
            return Compiler((program, *command[1:]), identity)
    names = f"CXX={wanted}" if wanted else ", ".join(COMPILERS)
    raise BuildError(f"there is no C++ compiler on the path ({names}); install g++ or clang++, or set CXX")


def _key(compiler: Compiler) -> str:
    digest = hashlib.sha256()
    folder = source_directory()
    geometry = folder.parent / "cuda" / "packed_masks.cuh"
    for path in sorted((*folder.glob("*.cpp"), *folder.glob("*.h"), geometry)):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    digest.update("\0".join((compiler.identity, *FLAGS, platform.system(), platform.machine())).encode())
    return digest.hexdigest()[:32]


def library_path() -> Path:
    """The shared library, built if it is not in the cache yet.

    It is kept in `MGLU_CACHE_DIR` beside the CUDA kernels; where that cannot be written, in a folder of this process.

    Raises:
        BuildError: there is no compiler, or it refused the kernels.
    """
    compiler = find_compiler()
    path = cache_directory() / f"cpu-{platform.machine()}-{_key(compiler)}.so"
    return path if path.is_file() else _build(compiler, path)


def _build(compiler: Compiler, path: Path) -> Path:
    announce("building the CPU kernels with the C++ compiler", "about half a minute")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=path.parent, prefix="cpu-build-"))
    except OSError:  # a cache that cannot be written is only a slower one
        folder = Path(tempfile.mkdtemp(prefix="mglu-cpu-"))
        path = Path(tempfile.mkdtemp(prefix="mglu-cpu-")) / path.name
    try:
        sources = sorted(source_directory().glob("*.cpp"))
        objects = [folder / f"{source.stem}.o" for source in sources]
        with ThreadPoolExecutor(len(sources)) as pool:
            commands = [["-c", str(source), "-o", str(out)] for source, out in zip(sources, objects, strict=True)]
            list(pool.map(lambda command: _run(compiler, *command), commands))
        linked = folder / "linked.so"
        _run(compiler, "-shared", *map(str, objects), "-o", str(linked))
        os.replace(linked, path)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return path


def _run(compiler: Compiler, *arguments: str) -> None:
    command = [*compiler.command, *FLAGS, *arguments]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    except OSError as error:
        raise BuildError(f"the C++ compiler did not start: {shlex.join(command)}: {error}") from error
    if result.returncode != 0:
        log = (result.stderr or result.stdout).strip()
        raise BuildError(f"the C++ compiler refused the CPU kernels: {shlex.join(command)}\n{log}")
