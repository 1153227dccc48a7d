"""The command line of the demo. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import UserError
from ..files import check_writable
from .errors import Disagreement

if TYPE_CHECKING:
    from .settings import Settings

DESCRIPTION = (
    "Trains a small byte-level language model with masked gated linear units through the fusion pass, beside a "
    "SwiGLU model of the same sizes. Compares the fused model with the naive one, freezes it, generates text, exports "
    "it with AOTInductor, loads the package back, and prints a table. Ends with the time of one layer of the size of "
    "a real model. Exits with 1 if anything disagrees."
)


def add_parser(subparsers: Any) -> None:
    """Add `demo` to the commands."""
    parser = subparsers.add_parser("demo", help="train, freeze, export and time a small model", description=DESCRIPTION)
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="train on FILE (default: Python's language reference)"
    )
    parser.add_argument("--steps", type=_at_least(1), metavar="N", help="training steps of each model")
    parser.add_argument("--n-masks", type=_at_least(1), default=4, metavar="N", help="masks per layer (default: 4)")
    parser.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of weights, data order and sampling")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    sizes = parser.add_argument_group("sizes (default: by device)")
    sizes.add_argument("--layers", type=_at_least(1), metavar="N", help="decoder blocks")
    sizes.add_argument("--width", type=_at_least(1), metavar="N", help="model width, a multiple of 32")
    sizes.add_argument("--context", type=_at_least(2), metavar="N", help="bytes of context")
    sizes.add_argument("--batch", type=_at_least(1), metavar="N", help="sequences per step")
    sizes.add_argument(
        "--layer", type=_shape, default=(8192, 2048), metavar="OUTxIN", help="the layer timed last (default: 8192x2048)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        The exit code, 1 if two results disagree or a model did not learn.

    Raises:
        UserError: an option has a wrong value.
    """
    try:
        settings = _settings(options)
        from .run import run_demo

        run_demo(settings)
    except Disagreement as error:
        print(f"\nFAILED: {error}", file=sys.stderr)
        return 1
    return 0


def _settings(options: argparse.Namespace) -> Settings:
    from ..masks import MAX_MASKS
    from .settings import choose

    if options.n_masks > MAX_MASKS:
        raise UserError(f"--n-masks: got {options.n_masks}, must be 1 to {MAX_MASKS}")
    if options.json is not None:
        check_writable("--json", options.json)
    return choose(options)


def _at_least(minimum: int) -> Any:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"got {text!r}, must be a whole number") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"got {value}, must be at least {minimum}")
        return value

    return number


def _shape(text: str) -> tuple[int, int]:
    sizes = text.split("x")
    if len(sizes) != 2 or not all(size.isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be OUTxIN, for example 14336x4096")
    return int(sizes[0]), int(sizes[1])
