"""Builds the CPU kernels as a shared library, with the machine's C++ compiler at first use, and caches it.

The library does not depend on torch, so one file serves all versions of Python and torch. It chooses its instruction
set at run time.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable, Sequence
from itertools import dropwhile
from pathlib import Path
from typing import TypeVar

from ...files import source_directory
from ..cache import Artifact, obtain
from ..interruptible import COMPILER_SECONDS, run

T = TypeVar("T")

COMPILERS = ("c++", "g++", "clang++")
# The compiler must not contract products and sums to FMAs, so that every kernel rounds the same sum in the same way.
FLAGS = ("-O2", "-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-Wno-psabi", "-pthread")


class BuildError(RuntimeError):
    """A tool that a build needs is missing, or the C++ compiler failed. The message contains the compiler's log."""


def load_library(load: Callable[[Path], T], folder: Path | None = None) -> T:
    """Build the shared library if the cache does not hold it, and return the result of `load`.

    Args:
        load: called with the path of the library; raises OSError if this machine cannot load it.
        folder: the only folder to use, in place of the cache.

    Raises:
        BuildError: no compiler was found, or it refused the kernels.
        OSError: no folder can keep the library, or the library cannot be loaded from any folder.
    """
    return obtain(_artifact(), _build, lambda path, _: load(path), folder)


def find_compiler(command: str | None = None) -> list[str]:
    """Return the command line of the C++ compiler, whose first word is an absolute path.

    The command is `command`, or `$CXX`, or the first of `COMPILERS` on the path. `command` and `$CXX` may contain a
    launcher and options, such as `ccache g++ -m64`.

    Raises:
        BuildError: no compiler was found, or the text is not a command line.
    """
    wanted = _words_of_cxx() if command is None else _words("compiler", command)
    for words in [wanted] if wanted else [[name] for name in COMPILERS]:
        if program := shutil.which(words[0]):
            return [os.path.abspath(program), *words[1:]]
    given = "CXX" if command is None else "compiler"
    names = f"{given}={shlex.join(wanted)}" if wanted else ", ".join(COMPILERS)
    raise BuildError(f"there is no C++ compiler on the path ({names}); install g++ or clang++, or set CXX")


def as_program(command: Sequence[str], folder: Path) -> str:
    """Return a single program that runs a command line, for tools that take a compiler's path but no options with it.

    A command of one word is returned as it is; otherwise the program is a script in `folder`. The name of the script
    contains the name of the compiler, because torch tells GCC from Clang by the name of the program.
    """
    if len(command) == 1:
        return command[0]
    text = f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n'
    names = "-".join(Path(word).name for word in command if not word.startswith("-"))
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    script = folder / f"{re.sub(r'[^a-zA-Z0-9+.]', '-', names)[:100]}-{digest}"
    if not script.exists():
        folder.mkdir(parents=True, exist_ok=True)
        temporary = script.with_name(f"{script.name}.{os.getpid()}.tmp")
        temporary.write_text(text)
        temporary.chmod(0o755)
        os.replace(temporary, script)
    return str(script)


def _words(name: str, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BuildError(f"{name}: got {text!r}, must be a command line: {error}") from error


def _words_of_cxx() -> list[str]:
    """Return the words of `CXX`; an empty list if it is not set."""
    return _words("CXX", os.environ.get("CXX", ""))


def _options() -> list[str]:
    """Return the options in `CXX`. Refuse options that restrict the library to this machine's CPU."""
    words = _words_of_cxx()
    for word in words:
        if word.endswith("=native"):
            raise BuildError(
                f"CXX: got {os.environ['CXX']!r}, must not have {word}: other CPUs may find the library in the cache, "
                "and its kernels choose their instruction set when they run"
            )
    return list(dropwhile(lambda word: not word.startswith("-"), words))


def settings() -> tuple[str | None, ...]:
    """Return the environment variables on which the success of a build depends. After a change, a retry may succeed."""
    return tuple(os.environ.get(name) for name in ("CXX", "PATH", "MGLU_CACHE_DIR", "XDG_CACHE_HOME", "HOME"))


def _artifact() -> Artifact:
    """Describe the library. Its key depends on the options in `CXX`, but not on the compiler."""
    folder = source_directory("cpu")
    shared = (folder.parent / "cuda" / name for name in ("packed_masks.cuh", "weight_formats.cuh"))
    sources = sorted((*folder.glob("*.cpp"), *folder.glob("*.h"), *shared))
    return Artifact(
        name=f"cpu-{platform.machine()}",
        suffix=".so",
        inputs=(
            *(path.name + path.read_text(encoding="utf-8") for path in sources),
            *FLAGS,
            *_options(),
            platform.machine(),
        ),
        activity="building the CPU kernels with the C++ compiler",
        duration="about half a minute",
    )


def _build(folder: Path) -> bytes:
    compiler = find_compiler()
    sources = sorted(source_directory("cpu").glob("*.cpp"))
    objects = [str(folder / f"{source.stem}.o") for source in sources]
    library = folder / "linked.so"
    _run(compiler, folder, *(["-c", str(source), "-o", out] for source, out in zip(sources, objects, strict=True)))
    _run(compiler, folder, ["-shared", *objects, "-o", str(library)])
    return library.read_bytes()


def _run(compiler: Sequence[str], folder: Path, *arguments: Sequence[str]) -> None:
    """Run the compiler for each list of arguments, in parallel. The compiler's temporary files go to `folder`."""
    commands = [[*compiler, *FLAGS, *one] for one in arguments]
    try:
        results = run(commands, {"TMPDIR": str(folder)}, COMPILER_SECONDS)
    except subprocess.TimeoutExpired as error:
        command = shlex.join(commands[0])
        raise BuildError(f"the C++ compiler did not end within {COMPILER_SECONDS:.0f} s: {command}") from error
    except OSError as error:
        raise BuildError(f"the C++ compiler did not start: {shlex.join(commands[0])}: {error}") from error
    for result in results:
        if result.returncode != 0:
            raise BuildError(
                f"the C++ compiler refused the CPU kernels: {shlex.join(result.args)}\n{result.stdout.strip()}"
            )
