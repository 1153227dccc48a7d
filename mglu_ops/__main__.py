"""`python -m mglu_ops COMMAND`. A command's module is light: what it needs, it imports when run."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from compile_passes import explain

from . import bench
from .demo import command as demo
from .packaging import command as packaging
from .tuning import command as tuning

COMMANDS = (demo, explain, packaging, tuning, bench)
"""Modules with `add_parser(subparsers)`, which sets the default `run`: `(argparse.Namespace) -> exit code`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Its exit code: 1 when what it did failed, 2 when an option is wrong or a package is missing."""
    parser = argparse.ArgumentParser(prog="python -m mglu_ops", description="Masked Gated Linear Units for PyTorch")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for command in COMMANDS:
        command.add_parser(subparsers)
    options = parser.parse_args(arguments)
    return int(options.run(options))


if __name__ == "__main__":
    sys.exit(main())
