"""A compiler launcher for CMake that compiles without optimisation and caches object files.

Tests build the C++ library often. `commands.run` tells CMake to use the launcher. When CMake links a library, or
compiles a source that embeds files, the launcher runs the compiler and caches nothing.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

KEPT = Path(__file__).parents[2] / "build" / "tests" / "objects"


def main(command: list[str]) -> int:
    command = [*command, "-O0"]
    if "-c" not in command:
        return subprocess.run(command).returncode
    where = command.index("-o")
    out = Path(command[where + 1])
    preprocess = [*command[:where], *command[where + 2 :], "-E", "-P"]
    source = subprocess.run(preprocess, stdout=subprocess.PIPE)
    if source.returncode != 0:
        return source.returncode
    options = sorted({word for word in command if word.startswith(("-f", "-m", "-std=", "-w"))})
    kept = KEPT / f"{hashlib.sha256(repr(options).encode() + source.stdout).hexdigest()[:24]}.o"
    if b".incbin" in source.stdout or not kept.exists():
        code = subprocess.run(command).returncode
        if code != 0 or b".incbin" in source.stdout:
            return code
        KEPT.mkdir(parents=True, exist_ok=True)
        unfinished = kept.with_suffix(f".{os.getpid()}")
        shutil.copy(out, unfinished)
        unfinished.replace(kept)
    shutil.copy(kept, out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
