"""Captures graphs before and after the pass, compares their results, and finds conflicts between rules."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import Graph, GraphModule, Node

from compile_passes import view
from compile_passes.evaluate import Evaluation
from compile_passes.fusion import _no_new_guards, fuse_graph
from compile_passes.memory import Memory, Surroundings
from compile_passes.report import FusionReport
from compile_passes.rules import PRECEDENCE
from compile_passes.rules.base import Rule, RulesBySymbol
from compile_passes.symbols import as_call, calls_read_once
from compile_passes.values import Value
from compile_passes.view import View
from tests.support.budgets import BUDGET, relative_error


class RuleConflict(Exception):  # noqa: N818 (a conflict is a property of the rules, not of the program)
    """Two rules give a node different values, and `rules.PRECEDENCE` has no entry for the pair."""


def check_rules(graph: Graph) -> set[tuple[Rule, Rule]]:
    """Apply all rules to all nodes of a graph, without changing it.

    Returns:
        The pairs of `PRECEDENCE` that decided about a node.

    Raises:
        RuleConflict: two rules disagree about a node, and the pair is not in `PRECEDENCE`.
    """
    view = View(graph)
    try:
        with calls_read_once():
            return _AskAll(view).decided
    finally:
        view.discard()


class _AskAll(Evaluation):
    """An evaluation that tries all rules of a symbol, and does not stop at the first one that gives a value."""

    def __init__(self, view: View) -> None:
        self.decided: set[tuple[Rule, Rule]] = set()
        super().__init__(view)

    def _evaluate(self, node: Node, rules: RulesBySymbol, otherwise: Callable[[Node], Value]) -> Value:
        call = as_call(node)
        answers: list[tuple[Rule, Value]] = []
        if call is not None:
            answers = [(rule, rule.function(self, node, call)) for rule in rules.get(call.symbol, ())]
        known = [(rule, value) for rule, value in answers if value is not None]
        for rule, value in known[1:]:
            first, decided = known[0]
            if value != decided:
                if (first, rule) not in PRECEDENCE:
                    raise RuleConflict(
                        f"rules `{first.name}` and `{rule.name}` know different values of `{node.format_node()}`: "
                        f"{decided} and {value}; make one of them refuse such a node, or add the pair to PRECEDENCE in "
                        "compile_passes/rules/__init__.py with the reason why the first is right"
                    )
                self.decided.add((first, rule))
        return known[0][1] if known else otherwise(node)


@dataclass
class Capture:
    """A Dynamo backend that fuses each graph, keeps the graphs from before and after, and runs the fused graph.

    With `check`, `check_rules` raises an error if two rules of the pass disagree about a node. With `fuse=False`, the
    graph runs unchanged.
    """

    strict: bool = False
    assume_binary: bool = False
    fuse: bool = True
    check: bool = True
    report: FusionReport = field(default_factory=FusionReport)
    before: list[Graph] = field(default_factory=list)
    after: list[Graph] = field(default_factory=list)
    decided: set[tuple[Rule, Rule]] = field(default_factory=set)
    """The pairs of `rules.PRECEDENCE` that decided about a node."""

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.before.extend(copy.deepcopy(graph) for graph in _graphs(gm))
        if self.fuse:
            surroundings = Surroundings(gm)
            for graph in _graphs(gm):
                with _memory_read_once(graph) if self.check else nullcontext():
                    if self.check:
                        self.decided |= check_rules(graph)
                    fuse_graph(
                        graph,
                        self.report,
                        strict=self.strict,
                        assume_binary=self.assume_binary,
                        surroundings=surroundings,
                    )
                assert not (self.check and self.report.errors), self.report.errors
                graph.lint()
            _recompile(gm)
        self.after.extend(_graphs(gm))
        return gm.forward

    def compile(self, function: Any, **options: Any) -> Any:
        """`torch.compile` with this backend, after a reset of Dynamo."""
        torch._dynamo.reset()
        return torch.compile(function, backend=self, fullgraph=True, **options)

    @property
    def calls(self) -> Counter[str]:
        """How often the graphs after the pass call each operation, by `call_name`."""
        return calls(self.after)

    @property
    def calls_before(self) -> Counter[str]:
        return calls(self.before)

    @property
    def reasons(self) -> list[str]:
        return [site.reason or "" for site in self.report.missed]


@contextmanager
def _memory_read_once(graph: Graph) -> Iterator[None]:
    """Compute a graph's `Memory` once for all views of the graph, because this takes longer than fusing the graph."""
    with _no_new_guards(graph):
        memory = Memory(graph)
    # The body of a higher-order operator is another graph and has its own Memory.
    with patch.object(view, "Memory", lambda of: memory if of is graph else Memory(of)):
        yield


def _graphs(gm: GraphModule) -> list[Graph]:
    """The graphs of a module and of its higher-order operators' bodies, in Inductor's order."""
    return [module.graph for module in gm.modules() if isinstance(module, GraphModule)]


def _recompile(gm: GraphModule) -> None:
    for module in gm.modules():
        if isinstance(module, GraphModule):
            module.recompile()


def calls(graphs: list[Graph]) -> Counter[str]:
    return Counter(call_name(node) for graph in graphs for node in graph.nodes if node.op.startswith("call"))


def packings(counts: Counter[str]) -> int:
    """The number of operators that pack masks."""
    return counts["mglu.pack_masks"] + counts["mglu.pack_logits"]


def masked_products(counts: Counter[str]) -> int:
    """The number of products with a weight. A fused layer leaves none."""
    return counts["linear"] + counts["matmul"]


def call_name(node: torch.fx.Node) -> str:
    """The name of a call's operator.

    It is `mglu.forward` or similar for our operators, a symbol (`linear`, `mul`) for calls that the pass knows, and the
    name of the target for others.
    """
    if isinstance(node.target, torch._ops.OpOverload) and node.target.namespace == "mglu":
        return f"mglu.{node.target._schema.name.split('::')[1]}"
    call = as_call(node)
    return call.symbol if call else str(getattr(node.target, "__name__", node.target))


def known_of_shapes(mode: FakeTensorMode | None) -> dict[str, list[str]]:
    """The guards of a shape environment, and the sizes that it assumes to be equal or known."""
    if mode is None or mode.shape_env is None:
        return {}
    env = mode.shape_env
    return {
        "guards": [str(guard.expr) for guard in env.guards],
        "equal": sorted(map(str, env.replacements.items())),
        "bounds": sorted(map(str, env.var_to_range.items())),
        "asserts": sorted(
            f"{symbol}: {[str(one.expr) for one in asserts]}"
            for symbol, asserts in env.deferred_runtime_asserts.items()
        ),
        "pending": list(map(str, env.pending_fresh_unbacked_symbols)),
    }


def results(
    function: Callable[..., Any], tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor | None]:
    """The results of `function(**tensors)`, and gradients of all `tensors` and `parameters` that require a gradient.

    The loss is a weighted sum of all results. A tensor on which no result depends has the gradient None.
    """
    output = function(**tensors)
    outputs = output if isinstance(output, tuple) else (output,)
    found: dict[str, Tensor | None] = {f"result {i}": y.detach() for i, y in enumerate(outputs)}
    wanted = {name: t for name, t in {**tensors, **(parameters or {})}.items() if t.requires_grad}
    recorded = [y for y in outputs if y.requires_grad]
    if wanted and recorded:
        # Weights differ from element to element and have both signs, so that errors do not cancel.
        weights = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape) for y in recorded]
        grads = torch.autograd.grad(recorded, list(wanted.values()), weights, allow_unused=True)
        found |= dict(zip(wanted, grads, strict=True))
    return found


def model_results(model: nn.Module, x: Tensor, call: Callable[..., Tensor] | None = None) -> dict[str, Tensor | None]:
    """The result of `call(x)` (by default `model(x)`), and the gradients of x and of all parameters, by name."""
    function = model if call is None else call
    parameters = dict(model.named_parameters())
    return results(lambda x, **_: function(x), {"x": x.detach().requires_grad_(), **parameters})


def assert_same(found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], budget: float) -> None:
    """Check that two `results` agree within a relative error. A missing gradient equals a gradient of 0."""
    assert found.keys() == wanted.keys()
    for name in wanted:
        a, b = found[name], wanted[name]
        if a is None or b is None:
            present = b if a is None else a
            assert present is None or not present.any(), f"{name}: a gradient on one side only"
            continue
        assert a.dtype == b.dtype, f"{name}: {a.dtype}, must be {b.dtype}"
        error = relative_error(a, b)
        assert error <= budget, f"{name}: relative error {error:.3g} above {budget:.3g}"


def assert_same_where_finite(
    found: Mapping[str, Tensor | None], wanted: Mapping[str, Tensor | None], budget: float
) -> None:
    """Check that two `results` agree wherever `wanted` is finite.

    Tensors narrower than float64, such as a weight that the program widens, have the budget of their dtype.
    """
    assert found.keys() == wanted.keys()
    for name, b in wanted.items():
        a = found[name]
        if a is not None and b is not None:
            assert a.shape == b.shape, f"{name}: shape {tuple(a.shape)}, must be {tuple(b.shape)}"
            a, b = a[b.isfinite()], b[b.isfinite()]
        narrow = 0.0 if b is None else BUDGET.get(b.dtype, 0.0)
        assert_same({name: a}, {name: b}, max(budget, narrow))


def compare(
    function: Callable[..., Any], make: Callable[[], dict[str, Tensor]], budget: float, **options: Any
) -> Capture:
    """Compile a function, compare its results and gradients with eager's, and return the capture.

    `make()` returns new tensors at each call, since the function may write to them. `options` are passed to `Capture`.
    """
    wanted = results(function, make())
    capture = Capture(**options)
    assert_same_where_finite(results(capture.compile(function), make()), wanted, budget)
    return capture


def assert_says_why(capture: Capture) -> None:
    """Check that the report mentions the layer as fused, or gives a reason why it is not."""
    assert capture.report.fused or capture.report.missed, "neither fused nor reported"
    assert all(reason.strip() for reason in capture.reasons)
