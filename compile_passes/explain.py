"""`python -m mglu_ops report FILE.py:FUNCTION` says which layers of a model would fuse, and what prevents the others.

Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mglu_ops import factory
from mglu_ops.errors import UserError
from mglu_ops.words import described

if TYPE_CHECKING:
    from torch.fx import GraphModule

    from .report import FusionReport

DESCRIPTION = (
    "Captures a model with Dynamo, as torch.compile does, and reports which layers the fusion pass would fuse and why "
    "it would leave others. Nothing is compiled. Exits with 1 if a layer is missed or none is found."
)

NOTHING_FOUND = """
No MGLU layer was found. The pass looks for an input x that is multiplied by one weight under a mask and under the
complement of that mask, for example

    F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask))

What to try:
- Check that the example inputs reach the layer, and that no graph break separates the two products:
  TORCH_LOGS=graph_breaks shows the breaks.
- Pass --train if the model takes another path when it trains.
- Compare the model with the spellings that compile_passes/README.md lists, or use mglu_ops.nn.NaiveMGLU."""


def add_parser(subparsers: Any) -> None:
    """Add `report` to the commands."""
    help_text = "say which layers of a model would fuse, and why not"
    parser = subparsers.add_parser("report", help=help_text, description=DESCRIPTION)
    parser.add_argument("model", metavar=factory.METAVAR, help=factory.HELP)
    parser.add_argument("--train", action="store_true", help="run it in training mode (default: eval, under no_grad)")
    parser.add_argument("--assume-binary", action="store_true", help="trust that real-valued masks hold only 0 and 1")
    parser.add_argument("--graphs", action="store_true", help="also print the graph of each layer, before and after")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Print the report of a model.

    Returns:
        The exit code: 0 if layers were found, and all of them fuse or call the operator already; else 1.

    Raises:
        UserError: the model cannot be imported, or it fails on its example inputs.
    """
    model, inputs = factory.load_model(options.model)
    try:
        report = explain(model, *inputs, train=options.train, assume_binary=options.assume_binary)
    except ValueError as error:
        raise UserError(f"{options.model}: {error}") from error
    if options.json:
        print(report.to_json())
    else:
        print(report)
        for site in (*report.fused, *report.missed) if options.graphs else ():
            print("\n" + site.picture())
        if not report.fused and not report.missed and not report.present:
            print(NOTHING_FOUND)
    return 0 if (report.fused or report.present) and not report.missed else 1


def explain(model: Callable[..., Any], *inputs: Any, train: bool = False, assume_binary: bool = False) -> FusionReport:
    """Report what the fusion pass would do to a model. The model is neither changed nor compiled.

    Args:
        model: a module or function.
        *inputs: example inputs; the captured graphs run on them.
        train: run the model in training mode; otherwise in eval mode, under `torch.no_grad()`.
        assume_binary: as in `mglu_ops.enable_fusion`.

    Raises:
        ValueError: `model` is neither a module nor a function, it fails on `inputs`, or Dynamo cannot capture it.
    """
    import torch

    from .fusion import fuse_graph
    from .report import FusionReport

    if not callable(model):
        raise ValueError(f"model: got {type(model).__name__}, must be a torch.nn.Module or a function")
    report = FusionReport()

    def capture(gm: GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        for module in gm.modules():
            if isinstance(module, torch.fx.GraphModule):
                graph = copy.deepcopy(module.graph)
                graph.owning_module = module
                fuse_graph(graph, report, assume_binary=assume_binary)
        return gm.forward

    torch._dynamo.reset()
    try:
        with _mode(model, train):
            torch.compile(model, backend=capture)(*inputs)
        return report
    except Exception as error:  # the user's model may raise anything
        problem = error
    finally:
        torch._dynamo.reset()
    try:  # if the model fails without Dynamo too, raise its own error: Dynamo's report of the same error has 200 lines
        with _mode(model, train):
            model(*inputs)
    except Exception as error:
        raise ValueError(f"inputs: the model failed on {described(inputs)}: {factory.describe(error)}") from error
    raise ValueError(f"model: Dynamo cannot capture it: {factory.describe(problem)}") from problem


@contextmanager
def _mode(model: Callable[..., Any], train: bool) -> Iterator[None]:
    """Run a model in training mode, or in eval mode under `torch.no_grad()`; restore its own mode afterwards."""
    import torch
    from torch import nn

    was_training = isinstance(model, nn.Module) and model.training
    try:
        if isinstance(model, nn.Module):
            model.train(train)
        with torch.set_grad_enabled(train):
            yield
    finally:
        if isinstance(model, nn.Module):
            model.train(was_training)
