"""The command line of `build`, which builds kernels before calls need them. This module does not import torch."""

from __future__ import annotations

import argparse
import re
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .errors import UserError
from .notices import say
from .tuning.command import add_layer_options, check_layer_options

DESCRIPTION = (
    "Builds the CPU kernels, and with --arch the CUDA kernels of layers. Otherwise the first calls build them. With "
    "--out, they go to a folder that can be copied into an image. Where MGLU_CACHE_DIR names that folder, no compiler "
    "is needed."
)


def add_parser(subparsers: Any) -> None:
    """Add `build` to the commands."""
    parser = subparsers.add_parser("build", help="build the kernels before they are needed", description=DESCRIPTION)
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder; a new one may be read by all (default: this user's cache)"
    )
    parser.add_argument("--no-cpu", action="store_true", help="leave out the CPU kernels, which need a C++ compiler")
    parser.add_argument("--arch", nargs="+", default=[], metavar="SM", help="GPUs of the CUDA kernels, as sm_90")
    add_layer_options(parser, "with --arch: the weights, as 14336x4096", ("float16", "bfloat16", "float32"))
    parser.add_argument(
        "--weight-format", default="dense", metavar="NAME", help="of the weights: dense (default), fp8_row, ..."
    )
    parser.add_argument("--activation-format", default="dense", metavar="NAME", help="of x: dense (default), fp8_token")
    parser.add_argument("--activation", default="silu", metavar="NAME", help="default: silu")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Build the kernels and return the exit code. Raises UserError for problems that the user can fix."""
    from .backends import cpu
    from .backends.cache import cache_directory
    from .backends.cuda.compiler import CompileError, compile_cubin

    _check(options)
    try:
        folder = cache_directory() if options.out is None else options.out.resolve()
        is_new = not folder.exists()
        kernels = list(_kernels(options))
        if not options.no_cpu:
            cpu.build.load_library(cpu.library.Library, folder)
        for kernel in kernels:
            compile_cubin(*kernel, folder)
        if options.out is not None:
            _share(folder, is_new)
    except (cpu.BuildError, CompileError, OSError, ValueError) as error:
        raise UserError(str(error)) from error
    print(folder)
    return 0


def _share(folder: Path, is_new: bool) -> None:
    """Let all users read the kernels in a folder, since the folder may become part of a container image.

    A folder that is not new keeps its mode.
    """
    if is_new:
        folder.chmod(0o755)
    for path in folder.iterdir():
        if re.fullmatch(r"[\w-]+-[0-9a-f]{32}-[0-9a-f]{32}\.(so|cubin)", path.name):
            path.chmod(0o644)
    mode = stat.S_IMODE(folder.stat().st_mode)
    if ~mode & 0o005:
        say(f"{folder} keeps mode {mode:o}, so others cannot read it (chmod 755 lets them)")


def _check(options: argparse.Namespace) -> None:
    from .activations import ACTIVATIONS
    from .formats import check_activation_format, get_format
    from .nn.arguments import check_columns

    if bool(options.arch) != bool(options.shapes):
        raise UserError("--arch and --shapes: CUDA kernels are compiled for a GPU and for a layer; give both")
    if options.no_cpu and not options.arch:
        raise UserError("--no-cpu leaves nothing to build without --arch and --shapes")
    check_layer_options(options)
    if options.activation not in ACTIVATIONS:
        raise UserError(f"--activation: got {options.activation!r}, must be one of {', '.join(ACTIVATIONS)}")
    try:
        weight_format = get_format(options.weight_format)
        check_activation_format(options.activation_format, options.weight_format)
        for _, in_features in options.shapes:
            check_columns(weight_format, in_features)
    except ValueError as error:
        raise UserError(str(error)) from error


def _kernels(options: argparse.Namespace) -> Iterator[tuple[str, str, dict[str, int]]]:
    """Yield `(kernel, target, macros)` for the kernels that pack masks and the kernels that run the options' layers."""
    import torch

    from .backends.cuda.choice import choose
    from .backends.cuda.device import gpu_of_architecture
    from .backends.cuda.kernels import pack, quantize_x
    from .call import Call
    from .packaging.device_code import capability

    device, dtype = torch.device("cuda"), getattr(torch, options.dtype)
    for gpu in [gpu_of_architecture(capability(arch)) for arch in options.arch]:
        for n_masks in options.n_masks:
            for kind in pack.KINDS:
                yield pack.source(gpu.arch, kind, n_masks)
            for rows, columns in options.shapes:
                for tokens in options.tokens:
                    call = Call.contiguous(
                        device,
                        dtype,
                        n_masks,
                        tokens,
                        rows,
                        columns,
                        options.activation,
                        weight_format=options.weight_format,
                        activation_format=options.activation_format,
                    )
                    yield from (step.source for step in quantize_x.plan(choose(call, gpu).config, call, gpu))
