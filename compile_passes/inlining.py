"""Inlines the bodies of `with torch.no_grad()`, which `torch.export` moves to graphs of their own.

A program that was traced with grad mode on has `wrap_with_set_grad_enabled(False, body, *operands)` where the model
turned gradients off. The pass reads one graph at a time, so it would not see a mask that such a body makes; the
commonest straight-through mask is a hard mask made under `no_grad`, plus `logits - logits.detach()`.
"""

from __future__ import annotations

import itertools
import operator
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from .memory import Memory
from .shapes import example, submodule, tensor_example

_set_grad_enabled = torch.ops.higher_order.wrap_with_set_grad_enabled


def inline_no_grad(module: GraphModule, *, trains: bool) -> None:
    """Move the bodies of `torch.no_grad()` into the graph that calls them, wherever that changes no result or gradient.

    Args:
        module: a graph module, whose graph and registered bodies are changed in place; the bodies are not changed.
        trains: whether gradients of the graph's results are needed. If so, an inlined body reads detached operands, so
            that it records no gradient, as before; and a body that turns gradients on is not inlined, because the graph
            does not tell whether they are on around it. If not, bodies of both kinds are inlined, and only a body that
            writes in place reads detached operands, because it may write to a parameter.
    """
    kept: set[Node] = set()
    without_gradient: set[Node] = set()  # nodes of inlined bodies
    while calls := [call for call in _calls(module.graph) if call not in kept]:
        call = calls[0]  # calls in its body follow once they are in the graph of `module`
        if _can_inline(call, without_gradient if trains else None):
            _inline(module, call, without_gradient if trains or _writes(call) else None)
        else:
            kept.add(call)
    module.recompile()


def _calls(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=_set_grad_enabled)


def _can_inline(call: Node, without_gradient: set[Node] | None) -> bool:
    """Whether a body can be inlined.

    If gradients are needed, `without_gradient` holds the nodes of bodies inlined so far; then the body must record no
    gradient, and all operands that may need to be detached must have examples.
    """
    turns_on, body_node, *operands = call.args
    body = submodule(call.graph, body_node)
    if body is None or call.kwargs or any(node.op == "call_module" for node in body.graph.nodes):
        return False
    if any(submodule(body.graph, named) is None for named in body.graph.find_nodes(op="get_attr")):
        return False
    results: Any = body.graph.output_node().args[0]
    if not isinstance(results, (tuple, list)) or not all(_takes_a_node(user, results) for user in call.users):
        return False
    if without_gradient is None:
        return True
    if turns_on is not False or _turns_gradients_on(body):
        return False
    return all(not isinstance(item, Node) or item in without_gradient or example(item) is not None for item in operands)


def _writes(call: Node) -> bool:
    body = submodule(call.graph, call.args[1])
    return body is not None and Memory(body.graph).writes_inputs


def _takes_a_node(user: Node, results: Any) -> bool:
    """Whether a user takes one result of a body by its index, and that result is a node."""
    index: Any = user.args[1] if user.target is operator.getitem else None
    return isinstance(index, int) and isinstance(results[index], Node)


def _turns_gradients_on(body: GraphModule) -> bool:
    """Whether a body, or a body that it calls, turns gradients on or sets the grad mode in an unknown way."""
    graphs = [inner.graph for inner in body.modules() if isinstance(inner, GraphModule)]
    if any(call.args[0] is not False for graph in graphs for call in _calls(graph)):
        return True
    return any(getattr(node.target, "__name__", "") == "_set_grad_enabled" for graph in graphs for node in graph.nodes)


def _inline(module: GraphModule, call: Node, without_gradient: set[Node] | None) -> None:
    """Replace a call by the nodes of its body.

    With `without_gradient`, the body reads detached operands, and its nodes are added to that set.
    """
    graph = module.graph
    _, body_node, *operands = call.args
    body = submodule(graph, body_node)
    assert body is not None, "checked before"
    assert isinstance(body_node, Node)
    placeholders = body.graph.find_nodes(op="placeholder")
    given = dict(zip(placeholders, operands, strict=True))
    results: Any = body.graph.output_node().args[0]
    with graph.inserting_before(call):
        copies: dict[Node, Any] = {
            placeholder: operand if without_gradient is None else _detached(graph, operand, without_gradient)
            for placeholder, operand in given.items()
            if set(placeholder.users) - {body.graph.output_node()}
        }
        for inner in body.graph.nodes:
            if inner.op == "get_attr":
                copies[inner] = graph.get_attr(_adopt(module, body, str(inner.target)))
                copies[inner].meta = dict(inner.meta)
            elif inner.op not in ("placeholder", "output"):
                copies[inner] = graph.node_copy(inner, copies.__getitem__)
            if without_gradient is not None and inner in copies and isinstance(copies[inner], Node):
                without_gradient.add(copies[inner])
    for user in list(call.users):
        index: Any = user.args[1]
        result = results[index]
        user.replace_all_uses_with(given[result] if result in given else copies[result])
        graph.erase_node(user)
    graph.erase_node(call)
    if not body_node.users:
        graph.erase_node(body_node)
    if all(named.target != body_node.target for named in graph.find_nodes(op="get_attr")):
        delattr(module, str(body_node.target))


def _detached(graph: Graph, operand: Any, without_gradient: set[Node]) -> Any:
    """An operand, detached if it may have a gradient."""
    value = tensor_example(operand) if isinstance(operand, Node) else None
    if value is None or operand in without_gradient or not (value.is_floating_point() or value.is_complex()):
        return operand
    detached = graph.call_function(torch.ops.aten.detach.default, (operand,))
    detached.meta = {key: item.detach() if isinstance(item, Tensor) else item for key, item in operand.meta.items()}
    return detached


def _adopt(module: GraphModule, body: GraphModule, name: str) -> str:
    """Register with the module a body that an inlined body calls; returns the unused name that it received."""
    numbered = (f"{name}_{number}" for number in itertools.count())
    free = next(other for other in numbered if not hasattr(module, other))
    module.add_module(free, getattr(body, name))
    return free
