"""`python -m mglu_ops explain FILE:FACTORY`: what would fuse in a user's model, and what would have to change.

Light to import: torch comes with the command.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .report import FusionReport

DESCRIPTION = (
    "Captures a model with Dynamo, as torch.compile does, and reports which layers the fusion pass would fuse and why "
    "it would leave others. Nothing is compiled. Exits with 1 if a layer is missed or none is found."
)


def add_parser(subparsers: Any) -> None:
    """Add `explain` to the commands."""
    parser = subparsers.add_parser("explain", help="what would fuse in a model, and why not", description=DESCRIPTION)
    parser.add_argument(
        "model",
        metavar="FILE:FACTORY",
        help="a Python file and a function in it that returns the model and a tuple of example inputs",
    )
    parser.add_argument("--train", action="store_true", help="as it trains (default: as it infers, under no_grad)")
    parser.add_argument("--assume-binary", action="store_true", help="trust real masks to hold 0 and 1 only")
    parser.add_argument("--graphs", action="store_true", help="also print the graph of each layer, before and after")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; 0 if all layers that were found fuse, 1 if not, 2 if the model cannot be had."""
    try:
        model, inputs = load_factory(options.model)()
    except (OSError, ImportError, AttributeError, TypeError, ValueError) as error:
        print(f"python -m mglu_ops explain: error: {options.model}: {error}", file=sys.stderr)
        return 2
    report = explain(model, *inputs, train=options.train, assume_binary=options.assume_binary)
    if options.json:
        print(report.to_json())
    else:
        print(report)
        for site in (*report.fused, *report.missed) if options.graphs else ():
            print("\n" + site.picture())
    return 0 if report.fused and not report.missed else 1


def explain(model: Callable[..., Any], *inputs: Any, train: bool = False, assume_binary: bool = False) -> FusionReport:
    """The report of fusing a model, which is neither changed nor compiled: its graphs run as they are.

    Args:
        model: a module or function.
        *inputs: example inputs.
        train: as it trains; else as it infers, in eval mode under `torch.no_grad()`.
        assume_binary: as of `mglu_ops.enable_fusion`.
    """
    import torch
    from torch import nn

    from .fusion import fuse_graph
    from .report import FusionReport

    report = FusionReport()

    def capture(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        import copy

        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                graph = copy.deepcopy(module.graph)
                graph.owning_module = module
                fuse_graph(graph, report, assume_binary=assume_binary)
        return gm.forward

    was_training = isinstance(model, nn.Module) and model.training
    torch._dynamo.reset()
    try:
        if isinstance(model, nn.Module):
            model.train(train)
        with torch.enable_grad() if train else torch.no_grad():
            torch.compile(model, backend=capture)(*inputs)
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)
        torch._dynamo.reset()
    return report


def load_factory(name: str) -> Callable[[], Any]:
    """The function that `FILE:FUNCTION` names.

    Raises:
        ValueError: the name has not this form.
        FileNotFoundError: there is no such file.
        AttributeError: the file has no such function.
    """
    file, _, function = name.rpartition(":")
    if not file or not function:
        raise ValueError(f"got {name!r}, must be FILE:FACTORY, as model.py:make")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"no file {file}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module  # (as an import of it would, for pickling and for Dynamo)
    sys.path.insert(0, str(path.parent.resolve()))
    spec.loader.exec_module(module)
    factory = getattr(module, function)
    if not callable(factory):
        raise TypeError(f"{function} is a {type(factory).__name__}, must be a function")
    return factory
