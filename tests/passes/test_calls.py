"""Side effects of calls: what they write to, whose memory they share, and if they draw random numbers or multiply."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from compile_passes.calls import NONE, Effect, Watcher
from compile_passes.memory import effect_of_bodies
from compile_passes.prepare import record_examples

INPUTS: dict[str, Tensor] = {
    "a": torch.ones(2, 2),
    "b": torch.ones(2, 2),
    "transposed": torch.ones(2, 2).t(),
    "mean": torch.zeros(2),
    "variance": torch.ones(2),
    "bits": torch.ones(2, 2, dtype=torch.bool),
    "empty": torch.ones(0, 2, dtype=torch.int64),
}


def call(target: Any, *args: Any, op: str = "", root: nn.Module | None = None, **kwargs: Any) -> Node:
    """A call in a graph of its own. Strings name the `INPUTS`; `unknown` is an input without an example value."""
    graph, inputs = Graph(root), {}

    def held(argument: Any) -> Any:
        if isinstance(argument, list):
            return [held(item) for item in argument]
        if not isinstance(argument, str) or argument not in (*INPUTS, "unknown"):
            return argument
        if argument not in inputs:
            inputs[argument] = graph.placeholder(argument)
            inputs[argument].meta["example_value"] = INPUTS.get(argument)
        return inputs[argument]

    op = op or ("call_method" if isinstance(target, str) else "call_function")
    return graph.create_node(op, target, tuple(map(held, args)), {name: held(value) for name, value in kwargs.items()})


def effect_of(node: Node) -> Effect:
    return Watcher(effect_of_bodies).effect(node)


def unknown_function(*tensors: Tensor) -> None:
    """Stand for a function of another library, which may do anything."""


FIRST, BOTH = frozenset({0}), frozenset({0, 1})
WRITES = Effect(writes=FIRST, shares=FIRST, returns_target=True)
RESHAPES = Effect(writes=FIRST, shares=FIRST, changes_metadata=True)
SHARES = Effect(shares=FIRST)
DRAWS = Effect(draws=True)
MULTIPLIES = Effect(multiplies=True)
UNKNOWN = Effect(FIRST, FIRST, draws=True, is_known=False)


@pytest.mark.parametrize(
    ("node", "effect"),
    [
        (call(torch.add, "a", "b"), NONE),
        (call(operator.and_, "bits", "bits"), NONE),  # not in place: `and_` ends in `_` because `and` is a keyword
        # Writes
        (call("add_", "a", "b"), WRITES),
        (call(operator.iadd, "a", "b"), WRITES),
        (call(F.relu, "a", inplace=True), WRITES),
        (call(torch.ops.aten.mul_.Tensor, "a", "b"), WRITES),
        (call(operator.setitem, "a", 0, 1), Effect(writes=FIRST)),
        (call(operator.setitem, "empty", slice(None), 1), Effect(writes=FIRST)),
        (call("neg_", "empty"), WRITES),
        (call(operator.invert, "empty"), NONE),
        (call(torch.add, "a", 1, out="b"), Effect(writes=frozenset({1}), shares=frozenset({1}))),
        (call(torch._foreach_add_, ["a", "b"], 1.0), Effect(writes=BOTH, shares=BOTH, returns_target=True)),
        (call(F.batch_norm, "a", "mean", "variance", training=True), Effect(frozenset({1, 2}), draws=True)),
        (call(F.batch_norm, "a", "mean", "variance"), DRAWS),  # it makes empty tensors, whose memory is uninitialised
        (call(torch.native_batch_norm, "a", None, None, "mean", "variance", True, 0, 0), Effect(frozenset({1, 2}))),
        (call("t_", "a"), RESHAPES),
        (call("detach_", "a"), RESHAPES),
        (call("requires_grad_", "a"), RESHAPES),
        # Memory
        (call("view", "a", 4), SHARES),
        (call("reshape", "a", 4), SHARES),
        (call("reshape", "transposed", 4), NONE),
        (call("chunk", "a", 2), SHARES),
        (call(getattr, "a", "T"), SHARES),
        (call(torch._C._functorch._add_batch_dim, "a", 0, 1), SHARES),
        # Random numbers and products
        (call(torch.bernoulli, "a"), DRAWS),
        (call("new_empty", "a", 3), DRAWS),
        (call(F.dropout, "a", 0.5, False), SHARES),
        (call(torch.mm, "a", "b"), MULTIPLIES),
        (call(torch.mv, "a", "mean"), MULTIPLIES),
        (call(torch.dot, "mean", "variance"), MULTIPLIES),
        (call(torch.linalg.vecdot, "a", "b"), MULTIPLIES),
        # No effect
        (call("a", op="placeholder"), NONE),
        (call("weight", op="get_attr", root=nn.Linear(2, 2)), NONE),
        (call(torch._C._set_grad_enabled, False), NONE),
        # Unknown calls
        (call(unknown_function, "a"), UNKNOWN),
        (call(unknown_function, "a", "b"), Effect(BOTH, BOTH, draws=True, is_known=False)),
        (call(torch.autograd.backward, "a"), UNKNOWN),
        (call("unknown_function", "a"), UNKNOWN),
        # Calls that cannot be run, whose schemas tell the effects
        (call(torch.add, "a", "unknown"), Effect(shares=BOTH)),
        (call(torch.add, "a", 1, out="unknown"), Effect(writes=BOTH, shares=BOTH)),
        (call("add_", "unknown", 1), Effect(writes=FIRST, shares=FIRST)),
        (call(torch.ops.aten.add.Tensor, "unknown", 1), SHARES),
        (call(torch.bernoulli, "unknown"), Effect(shares=FIRST, draws=True)),
        (call(torch.mm, "a", "unknown"), Effect(shares=BOTH, multiplies=True)),
        (call("t_", "unknown"), Effect(FIRST, FIRST, changes_metadata=True)),
        (call("__eq__", "unknown", None), UNKNOWN),
    ],
)
def test_effect(node: Node, effect: Effect) -> None:
    assert effect_of(node) == effect


def test_a_call_without_inputs_that_returns_a_tensor() -> None:
    node = call(torch.rand, 2)
    node.meta["example_value"] = INPUTS["mean"]
    assert effect_of(node) == DRAWS


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((F.dropout, "a", 0.5, False), (F.dropout, "a", 0.5, True)),
        (("clamp", "a", 1), ("clamp_", "a", 1)),
        (("reshape", "a", 4), ("reshape", "transposed", 4)),
        (("to", "a", torch.float32), ("to", "bits", torch.float32)),
    ],
)
def test_calls_that_differ_have_effects_of_their_own(first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    watcher = Watcher(effect_of_bodies)
    assert watcher.effect(call(*first)) != watcher.effect(call(*second))


# --- Modules and bodies ----------------------------------------------------------------------------------------------


class UnknownModule(nn.Linear):
    """Stand for a module of another library, which may do anything."""


def body(function: Callable[[Tensor], Any]) -> GraphModule:
    """The graph of a function of one tensor, with example values."""
    gm = torch.fx.symbolic_trace(function)
    record_examples(gm, [torch.ones(2, 2)])
    return gm


@pytest.mark.parametrize(
    ("module", "effect"),
    [
        (nn.Linear(2, 2), MULTIPLIES),
        (nn.Dropout(), DRAWS),
        (nn.ReLU(inplace=True), WRITES),
        (UnknownModule(2, 2), UNKNOWN),
        (body(lambda a: a.neg_()), Effect(writes=FIRST, shares=FIRST)),
    ],
)
def test_effect_of_a_module(module: nn.Module, effect: Effect) -> None:
    assert effect_of(call("module", "a", op="call_module", root=nn.ModuleDict({"module": module}))) == effect


def test_an_assertion_about_a_size_that_depends_on_data_holds() -> None:
    condition = Graph().placeholder("condition")
    condition.meta["example_value"] = ShapeEnv().create_unbacked_symint() <= 4
    node = condition.graph.call_function(torch.ops.aten._assert_scalar.default, (condition, "too many"))
    assert effect_of(node) == NONE


def test_a_module_with_a_hook_may_do_anything() -> None:
    module = nn.ReLU()
    module.register_forward_hook(lambda module, args, result: torch.rand_like(result))
    assert effect_of(call("module", "a", op="call_module", root=nn.ModuleDict({"module": module}))) == UNKNOWN


def test_the_guards_of_an_exported_program_have_no_effect() -> None:
    root = nn.ModuleDict({"_guards_fn": body(lambda a: a.neg_())})
    assert effect_of(call("_guards_fn", "a", op="call_module", root=root)) == NONE


@pytest.mark.parametrize(
    ("function", "effect"),
    [
        (lambda a: a + 1, NONE),
        (lambda a: a.neg_() + 1, Effect(writes=BOTH)),
        (lambda a: a + a.add(1).neg_(), NONE),
        (lambda a: a.view(4), Effect(shares=BOTH)),
        (lambda a: a.bernoulli(), DRAWS),
        (None, Effect(BOTH, BOTH, draws=True, is_known=False)),
    ],
)
def test_effect_of_an_operator_with_a_body(function: Callable[[Tensor], Any] | None, effect: Effect) -> None:
    root = nn.Module()
    root.body = nn.Linear(2, 2) if function is None else body(function)
    graph = Graph(root)
    a, named = graph.placeholder("a"), graph.get_attr("body")
    node = graph.call_function(torch.ops.higher_order.wrap_with_set_grad_enabled, (False, named, a))
    unused = effect_of(node)
    assert not unused.is_known, "an operator without users is called for its side effects"
    graph.output(node)
    assert effect_of(node) == effect
