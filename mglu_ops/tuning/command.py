"""The command line of `tune`. Importing this module does not import torch."""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..errors import UserError
from ..files import check_writable
from ..words import counted

DESCRIPTION = (
    "Measures launches of the CUDA kernels for layers of the given shapes on this GPU, and writes a table of the "
    "launches that beat the choice of the cost model. MGLU_TUNING_TABLE=FILE makes mglu_ops use it. A table that is "
    "useful to others belongs in mglu_ops/backends/cuda/tables."
)


def add_parser(subparsers: Any) -> None:
    """Add `tune` to the commands."""
    parser = subparsers.add_parser("tune", help="measure launches of the CUDA kernels", description=DESCRIPTION)
    add_layer_options(parser, "the weights, as 14336x4096; required without --fit", ("float16", "bfloat16"))
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the table, JSON")
    parser.add_argument(
        "--rounds", type=int, default=25, metavar="N", help="timed replays of the finalists (default: 25)"
    )
    parser.add_argument(
        "--steps", type=int, default=3, metavar="N", help="steps from the model's choice to search (default: 3)"
    )
    parser.add_argument(
        "--min-gain", type=float, default=0.02, metavar="X", help="least gain in time of an entry (default: 0.02)"
    )
    parser.add_argument(
        "--fit",
        action="store_true",
        help="instead of a table, fit the cost model of the kernel for many tokens to this GPU (about 5 minutes, needs "
        "scipy); MGLU_COST_MODEL=FILE makes mglu_ops use it",
    )
    parser.add_argument(
        "--timings", type=Path, metavar="CSV", help="with --fit: read the timings from this file, or write them to it"
    )
    parser.set_defaults(run=run)


def add_layer_options(parser: argparse.ArgumentParser, help_of_shapes: str, dtypes: Sequence[str]) -> None:
    """Add the options that name layers and calls, for `check_layer_options`."""
    parser.add_argument("--shapes", type=shape, nargs="+", default=[], metavar="OUTxIN", help=help_of_shapes)
    parser.add_argument("--n-masks", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="default: 1 2 4 8")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1], metavar="N", help="rows of x (default: 1)")
    parser.add_argument("--dtype", choices=dtypes, default="bfloat16")


def check_layer_options(options: argparse.Namespace) -> None:
    if not all(1 <= n_masks <= 16 for n_masks in options.n_masks):
        raise UserError(f"--n-masks: got {options.n_masks}, must be 1 to 16")
    if min(options.tokens) < 1:
        raise UserError(f"--tokens: got {options.tokens}, must be at least 1")


def shape(text: str) -> tuple[int, int]:
    """Parse `OUTxIN` as `(out_features, in_features)`."""
    out_features, _, in_features = text.partition("x")
    if not (out_features.isdecimal() and in_features.isdecimal()):
        raise argparse.ArgumentTypeError(f"got {text!r}, must be OUTxIN, as 14336x4096")
    return int(out_features), int(in_features)


def run(options: argparse.Namespace) -> int:
    """Measure, write the table and return the exit code. Raises UserError for problems that the user can fix."""
    for name, path in (("--out", options.out), ("--timings", options.timings)):
        if path is not None:
            check_writable(name, path)
    if options.fit:
        return _fit(options)
    import torch

    from ..backends.cuda.device import gpu_of
    from ..backends.cuda.launch_tables import write
    from ..call import Call
    from .search import search

    if not torch.cuda.is_available():
        raise UserError("needs a CUDA GPU, and torch sees none")
    if not options.shapes:
        raise UserError("--shapes is needed without --fit")
    check_layer_options(options)
    gpu, facts, entries = gpu_of(torch.cuda.current_device()), environment(), []
    device, dtype = torch.device("cuda", torch.cuda.current_device()), getattr(torch, options.dtype)
    for shape, tokens, n_masks in itertools.product(options.shapes, options.tokens, options.n_masks):
        call = Call.contiguous(device, dtype, n_masks, tokens, *shape)
        entry = search(call, gpu, options.steps, options.rounds, lambda line: print(f"    {line}"))
        kept = 1 - entry.microseconds / entry.model_microseconds >= options.min_gain
        print(
            f"{call}: {entry.microseconds:.2f} us with {entry.config}, {entry.model_microseconds:.2f} us with "
            f"{entry.model}, the model's choice{': kept' if kept else ''}",
            flush=True,
        )
        if kept:
            entries.append(entry)
        write(options.out, facts, entries)  # after every call, so that a later failure loses nothing
        torch.cuda.empty_cache()
    print(f"{counted(len(entries), 'entry', 'entries')} in {options.out}")
    return 0


def _fit(options: argparse.Namespace) -> int:
    """Fit the cost model and return the exit code."""
    import torch

    from ..backends.cuda.device import gpu_of, gpu_of_architecture
    from ..backends.cuda.kernels.tile_wgmma import ARCH
    from ..backends.cuda.kernels.tile_wgmma_costs import costs_of, write
    from .fit import START, error_of, fit, measure, read_timings, regret_of, write_timings

    known = options.timings is not None and options.timings.exists()
    if known:
        try:
            gpu, timings = gpu_of_architecture(ARCH), read_timings(options.timings)
        except (OSError, ValueError) as error:
            raise UserError(str(error)) from error
        facts: dict[str, object] = {"device": gpu.name, "compute_capability": list(gpu.arch)}
    elif torch.cuda.is_available() and gpu_of(torch.cuda.current_device()).arch == ARCH:
        gpu, facts = gpu_of(torch.cuda.current_device()), environment()
        timings = measure(gpu, lambda line: print(line, flush=True))
        if options.timings is not None:
            write_timings(options.timings, timings, "; ".join(f"{name}: {value}" for name, value in facts.items()))
    else:
        raise UserError("--fit needs a GPU of compute capability 9.0")
    before, found = costs_of(gpu), fit(timings, gpu, START)
    for name, costs in (("before", before), ("fitted", found)):
        print(
            f"{name}: {len(timings)} times are off by a factor of {error_of(timings, gpu, costs):.3f} in the geometric "
            f"mean, and the choices {regret_of(timings, gpu, costs):.3f} times slower than the best"
        )
    write(options.out, facts, found)
    return 0


def environment() -> dict[str, object]:
    """The environment of the measurements. The first three entries identify the GPU."""
    import torch

    from .. import __version__
    from ..backends.cuda.compiler import compiler_version, source_hash
    from ..timer import PROTOCOL

    gpu = torch.cuda.get_device_properties()
    return {
        "device": gpu.name,
        "compute_capability": [gpu.major, gpu.minor],
        "multiprocessors": gpu.multi_processor_count,
        "mglu_ops": __version__,
        "commit": commit(),
        "device_code": source_hash(),
        "torch": torch.__version__,
        "cuda": str(torch.version.cuda),
        "compiler": compiler_version(),
        "protocol": PROTOCOL,
    }


def commit() -> str:
    """The commit of the checkout that contains this file, or MGLU_COMMIT for a copy without history."""
    named = os.environ.get("MGLU_COMMIT")
    if named:
        return named
    git = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        return subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
