"""The table of spellings at single nodes: modules, in-place forms, and the users that read a node's values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph
from torch.nn.modules.module import register_module_forward_hook

from compile_passes.symbols import Call, as_call, calls_read_once, is_identity_dropout, is_inplace_name, value_users

GRAPH = Graph()
X, Y = GRAPH.placeholder("x"), GRAPH.placeholder("y")


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (nn.SiLU(), Call("silu", (X,), is_whole=True)),
        (nn.SiLU(inplace=True), None),
        (nn.ReLU(), Call("relu", (X,), is_whole=True)),
        (nn.GELU("tanh"), Call("gelu", (X, "tanh"), is_whole=True)),
        (nn.Sigmoid(), Call("sigmoid", (X,), is_whole=True)),
        (nn.Tanh(), Call("tanh", (X,), is_whole=True)),
        (nn.Identity(), Call("alias", (X,))),
        (nn.Dropout(0.25).eval(), Call("dropout", (X, 0.25, False), is_whole=True)),
        (nn.Dropout(0.25), Call("dropout", (X, 0.25, True), is_whole=True)),
        (nn.Linear(2, 2), None),
    ],
)
def test_call_of_a_module(module: nn.Module, call: Call | None) -> None:
    node = Graph(nn.ModuleDict({"module": module})).create_node("call_module", "module", (X,))
    assert as_call(node) == call


@pytest.mark.parametrize(
    "change",
    [
        lambda module: module.register_forward_hook(lambda module, args, result: 2 * result),
        lambda module: module.register_forward_pre_hook(lambda module, args: (2 * args[0],)),
        lambda module: module.register_full_backward_hook(lambda module, given, grads: (2 * given[0],)),
        lambda module: module.register_full_backward_pre_hook(lambda module, grads: (2 * grads[0],)),
        lambda module: setattr(module, "forward", torch.relu),
        lambda module: register_module_forward_hook(lambda module, args, result: 2 * result),
    ],
)
def test_a_module_that_does_more_than_its_class_is_no_known_call(change: Callable[[nn.Module], Any]) -> None:
    module = nn.SiLU()
    handle = change(module)
    try:
        assert as_call(Graph(nn.ModuleDict({"module": module})).create_node("call_module", "module", (X,))) is None
    finally:
        if handle is not None:
            handle.remove()


def test_call_of_a_module_without_its_root() -> None:
    assert as_call(Graph().create_node("call_module", "module", (X,))) is None


@pytest.mark.parametrize(
    ("target", "args", "symbol"),
    [
        ("relu_", (X,), "relu"),
        (torch.relu_, (X,), "relu"),
        (torch.ops.aten.relu_.default, (X,), "relu"),
        (torch.ops.aten.mul_.Tensor, (X, Y), "mul"),
        ("__and__", (X, Y), "and"),
        (operator.and_, (X, Y), "and"),
        (operator.add, (X, Y), "add"),
        (F.silu, (X,), "silu"),
        (torch.add, (X, Y), "add"),
        (torch.ops.aten.add.Tensor, (X, Y), "add"),
        ("sin", (X,), None),
        (torch.rsub, (X,), None),
    ],
)
def test_symbol(target: Any, args: tuple[Any, ...], symbol: str | None) -> None:
    call = as_call(GRAPH.create_node("call_method" if isinstance(target, str) else "call_function", target, args))
    assert (call and call.symbol) == symbol


def test_nodes_that_are_not_calls() -> None:
    assert as_call(X) is None
    assert as_call("x") is None
    assert as_call(GRAPH.get_attr("relu")) is None


def test_alpha_makes_another_symbol() -> None:
    assert as_call(GRAPH.call_function(torch.add, (X, Y), {"alpha": 1})) == Call("add", (X, Y), is_whole=True)
    assert as_call(GRAPH.call_function(torch.add, (X, Y), {"alpha": 2})) == Call("scaled_add", (X, Y, 2), is_whole=True)


def test_a_call_is_read_once_in_a_block() -> None:
    node = Graph().call_function(torch.add, (X, Y), {"alpha": 2})
    with calls_read_once():
        assert as_call(node) == Call("scaled_add", (X, Y, 2), is_whole=True)
        assert as_call(node) is as_call(node)
    assert as_call(node) is not as_call(node)


@pytest.mark.parametrize(
    ("probability", "training", "is_identity"),
    [(0.5, False, True), (0.0, True, True), (0, True, True), (0.5, True, False), (X, True, False), (X, False, True)],
)
def test_dropout_that_returns_its_input(probability: Any, training: bool, is_identity: bool) -> None:
    assert is_identity_dropout(Call("dropout", (X, probability, training))) is is_identity


def test_name_of_an_inplace_operation() -> None:
    assert [is_inplace_name(name) for name in ("relu_", "relu", "__add__", "_")] == [True, False, False, True]


def test_users_that_read_only_the_shape_do_not_count() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.zeros_like, (x,))
    graph.call_method("size", (x, 0))
    reads = [graph.call_method("relu", (x,)), graph.call_method("sin", (x,))]
    assert value_users(x) == reads
