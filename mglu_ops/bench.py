"""`python -m mglu_ops bench [SUITE ...]`: the benchmarks of a checkout. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

from .errors import UserError

DESCRIPTION = (
    "Measures the kernels on this GPU against the read ceiling, the naive layer and SwiGLU, and plots the results. "
    "Compares every result with float64 first, and exits with 1 if one is wrong."
)
ROOT = Path(__file__).resolve().parent.parent


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the commands."""
    parser = subparsers.add_parser("bench", help="run the benchmarks of a checkout", description=DESCRIPTION)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="what to measure or plot (default: everything)")
    parser.add_argument("--list", action="store_true", help="list the suites, and measure nothing")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="for results, tables and plots (default: benchmarks/results)"
    )
    parser.add_argument("--quick", action="store_true", help="measure one small problem of each suite, as a check")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the suites.

    Returns:
        The exit code: 1 if a result is wrong, else 0.

    Raises:
        UserError: the benchmarks are not installed, or a suite cannot run on this machine.
    """
    if not (ROOT / "benchmarks" / "suites.py").is_file():
        raise UserError(
            f"there are no benchmarks beside {Path(__file__).parent}, because the wheel does not contain them; "
            "in a clone, run `pip install -e .` and then this command"
        )
    sys.path.insert(0, str(ROOT))
    suites: Any = importlib.import_module("benchmarks.suites")
    if options.list:
        print(suites.listing())
        return 0
    try:
        wrong = suites.run(options.suites, options.out or suites.RESULTS, options.quick)
    except suites.SuiteError as error:
        raise UserError(str(error)) from error
    return 1 if wrong else 0
