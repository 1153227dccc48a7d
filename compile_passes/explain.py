"""`python -m mglu_ops explain FILE.py:FUNCTION`: what would fuse in a user's model, and what would have to change.

Light to import: torch comes with the command.
"""

from __future__ import annotations

import argparse
import copy
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from mglu_ops import factory

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
    parser.add_argument("model", metavar=factory.METAVAR, help=factory.HELP)
    parser.add_argument("--train", action="store_true", help="as it trains (default: as it infers, under no_grad)")
    parser.add_argument("--assume-binary", action="store_true", help="trust real masks to hold 0 and 1 only")
    parser.add_argument("--graphs", action="store_true", help="also print the graph of each layer, before and after")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report; 0 if all layers that were found fuse, 1 if not, 2 if the model cannot be had."""
    try:
        model, inputs = factory.load_model(options.model)
    except factory.FactoryError as error:
        print(f"python -m mglu_ops explain: error: {error}", file=sys.stderr)
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
