"""The command line of `export` and `build-runtime`. Importing it does not import torch."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .. import factory
from ..errors import UserError

EXPORT = "Compiles a model into a package for inference, with the masks of its MGLU layers packed."
BUILD = (
    "Builds libmglu_ops.so, with which a C++ program runs packages without Python. Needs CMake (pip install cmake) and "
    "a C++20 compiler, and no CUDA."
)


def add_parser(subparsers: Any) -> None:
    """Add `export` and `build-runtime` to the commands."""
    parser = subparsers.add_parser("export", help="compile a model into a package", description=EXPORT)
    parser.add_argument("model", metavar=factory.METAVAR, help=factory.HELP)
    parser.add_argument("path", type=Path, metavar="PACKAGE", help="the .pt2 file to write")
    parser.add_argument(
        "--backend",
        default="auto",
        help="auto (default), cpu or cuda (the operator), triton or composite (code in the package)",
    )
    parser.add_argument("--static", action="store_true", help="take no other shapes than those of the example")
    parser.add_argument("--weights", type=Path, metavar="FILE", help="keep the tensors in FILE, for packages to share")
    parser.add_argument("--strict", action="store_true", help="fail if a layer that is recognised cannot be fused")
    parser.set_defaults(run=run_export)

    parser = subparsers.add_parser("build-runtime", help="build the C++ operator library", description=BUILD)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the library")
    parser.add_argument("--program", action="store_true", help="also build run_package, which runs a package")
    parser.add_argument("--compiler", metavar="COMMAND", help="default: $CXX, else c++, g++ or clang++")
    parser.add_argument("--flag", action="append", default=[], metavar="FLAG", help="for the compiler, as --flag=-g")
    parser.add_argument(
        "--arch", action="append", default=[], metavar="SM", help="compile kernels for this GPU now, as sm_90"
    )
    parser.add_argument(
        "--package",
        action="append",
        default=[],
        type=Path,
        metavar="PACKAGE",
        help="a package for whose layers to compile kernels",
    )
    parser.add_argument(
        "--kernels-only", action="store_true", help="write the kernels to DIR, for CMake's MGLU_KERNELS"
    )
    parser.set_defaults(run=run_build)


def run_export(options: argparse.Namespace) -> int:
    """Run `export`. Raises UserError for errors that the user can fix."""
    from ..backends.cpu.build import BuildError
    from ..passes import FusionError
    from .export import export
    from .seal import PackageError

    try:
        model, inputs = factory.load_model(options.model)
        with _without_logs_of_torch():
            info = export(
                model,
                inputs,
                options.path,
                dynamic_tokens=not options.static,
                backend=options.backend,
                weights=options.weights,
                strict=options.strict,
            )
    except (ValueError, OSError, BuildError, FusionError, PackageError) as error:
        raise UserError(str(error)) from error
    print(info)
    return 0


@contextmanager
def _without_logs_of_torch() -> Iterator[None]:
    """Keep torch's logs off standard error, where the command writes one line, unless `TORCH_LOGS` asks for them."""
    logging.disable(logging.NOTSET if "TORCH_LOGS" in os.environ else logging.ERROR)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def run_build(options: argparse.Namespace) -> int:
    """Run `build-runtime`. Raises UserError for errors that the user can fix."""
    from ..backends.cpu.build import BuildError
    from .library import build_runtime, write_kernels
    from .seal import PackageError

    try:
        if options.kernels_only:
            write_kernels(options.out, options.arch, options.package)
            print(options.out)
            return 0
        library = build_runtime(
            options.out,
            compiler=options.compiler,
            flags=options.flag,
            archs=options.arch,
            packages=options.package,
            program=options.program,
        )
    except (BuildError, PackageError, OSError, ValueError) as error:
        raise UserError(str(error)) from error
    print(library)
    return 0
