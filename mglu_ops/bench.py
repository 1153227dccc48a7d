"""`python -m mglu_ops bench [SUITE ...]`: the benchmarks of a checkout. Light to import."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path
from typing import Any

DESCRIPTION = (
    "Measures the kernels on this GPU against the read ceiling, the naive layer and SwiGLU, and draws what was "
    "measured. Every result is compared with float64 first; exits with 1 if one is wrong."
)
ROOT = Path(__file__).resolve().parent.parent


def add_parser(subparsers: Any) -> None:
    """Add `bench` to the commands."""
    parser = subparsers.add_parser("bench", help="measure on this GPU, in a checkout", description=DESCRIPTION)
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="what to measure or draw (default: everything)")
    parser.add_argument("--list", action="store_true", help="name the suites, and measure nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", help="for tables and plots (default: benchmarks/results)")
    parser.add_argument("--quick", action="store_true", help="a small problem of each suite, to see that all works")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the suites; 1 if a result is wrong, 2 if they cannot run here."""
    if not (ROOT / "benchmarks" / "suites.py").is_file():
        print(
            f"python -m mglu_ops bench: error: no benchmarks beside {Path(__file__).parent}: they are in the "
            "repository and not in the wheel. In a clone, run `pip install -e .` and then this command",
            file=sys.stderr,
        )
        return 2
    sys.path.insert(0, str(ROOT))
    suites: Any = importlib.import_module("benchmarks.suites")
    if options.list:
        print(suites.listing())
        return 0
    try:
        wrong = suites.run(options.suites, options.out or suites.RESULTS, options.quick)
    except suites.SuiteError as error:
        print(f"python -m mglu_ops bench: error: {error}", file=sys.stderr)
        return 2
    return 1 if wrong else 0
