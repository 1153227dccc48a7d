"""`python -m mglu_ops COMMAND`.

The modules of the commands do not import torch, so `--help` and errors about options appear at once. A command imports
torch when it runs.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Sequence

from . import __version__, bench, build, notices, passes
from .errors import UserError
from .packaging import command as packaging
from .tuning import command as tuning

PROG = "python -m mglu_ops"

COMMANDS = (passes, packaging, build, tuning, bench)
"""The modules of the commands. The function `add_parser(subparsers)` of a module adds the command's parser and sets the
parser's default `run`: a function that takes the parsed options, runs the command and returns the exit code."""

OWN_PACKAGES = ("benchmarks", "compile_passes", "mglu_ops")
DISTRIBUTIONS = {"cuda": "cuda-core"}
"""Maps a module to the package that contains it for pip, if the two have different names."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Returns:
        The exit code: 0 for success, 1 if the command's check fails, 2 if an option is wrong, a file cannot be used or
        a package is missing.
    """
    options = _parser().parse_args(arguments)
    try:
        from . import nn, ops  # noqa: F401 (registers torch.ops.mglu, which `import mglu_ops` has put off)

        return int(options.run(options))
    except (UserError, ModuleNotFoundError) as error:
        problem = _problem(error)
        if problem is None:
            raise
        if options.traceback:
            traceback.print_exc()
    notices.write(f"{PROG} {options.command}: error: {problem}")
    return 2


def _problem(error: UserError | ModuleNotFoundError) -> str | None:
    """The line to print for an error; None for a bug of this package, which deserves a traceback."""
    if isinstance(error, UserError):
        return str(error)
    missing = (error.name or "").partition(".")[0]
    if not missing or missing in OWN_PACKAGES:
        return None
    package = DISTRIBUTIONS.get(missing, missing)
    return f"this command needs the package {package}, which is not installed: pip install {package}"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=PROG, description="Masked Gated Linear Units for PyTorch")
    parser.add_argument("--version", action="version", version=f"mglu_ops {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    return parser


if __name__ == "__main__":
    sys.exit(main())
