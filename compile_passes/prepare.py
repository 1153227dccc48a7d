"""Prepares graphs that do not come from Dynamo: records example values, and inlines the bodies of `torch.no_grad()`."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake, maybe_get_fake_mode
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._pytree import tree_leaves

from mglu_ops.words import described

from .calls import calls_of_bodies, tensors_in
from .memory import Memory
from .shapes import equal_sizes, example, submodule, tensor_example

_set_grad_enabled = torch.ops.higher_order.wrap_with_set_grad_enabled
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_NUMBER = (bool, int, float, *_SYMBOLIC)


def record_examples(gm: GraphModule, inputs: Sequence[Any] | None = None) -> None:
    """Record the value of each node on fake tensors, as Dynamo does.

    The values that `torch.export` records never require a gradient, so they do not show which masks are trained. So
    this function runs the graph again, unless Dynamo has recorded the whole graph for inputs like `inputs`.

    Args:
        gm: the graph module, whose nodes receive `meta["example_value"]`.
        inputs: one real or fake input per placeholder. If None, the values recorded at the placeholders are the inputs.

    Raises:
        ValueError: `inputs` are missing, too few or too many, or the module rejects them.
    """
    placeholders = gm.graph.find_nodes(op="placeholder")
    recorded = [example(node) for node in placeholders]
    if inputs is None:
        if any(value is None for value in recorded):
            raise ValueError("example_inputs: tracing recorded none at the graph's placeholders; they must be given")
        inputs = recorded
    if len(inputs) != len(placeholders):
        raise ValueError(f"example_inputs: got {len(inputs)}, must be {len(placeholders)}, one per placeholder")
    if not all(map(_is_like, inputs, recorded)):
        _run(gm, inputs if any(map(is_fake, inputs)) else list(map(_as_number, inputs)), anew=True)
    elif not _is_recorded(gm.graph):
        _run(gm, recorded, anew=not _has_current_gradients(gm.graph))  # `recorded` has symbolic sizes, unlike `inputs`


def recorded_bodies(gm: GraphModule) -> Iterator[GraphModule]:
    """Record the value of each node in the bodies of higher-order operators, such as `checkpoint` and `cond`.

    Args:
        gm: a graph module whose values are recorded.

    Yields:
        Each body after the bodies in it. A body is left out if it fails on the operands of its calls, or if its inputs
        are not the last operands of its calls. Then nothing tells which of its inputs require a gradient.
    """
    for body, calls in calls_of_bodies(gm.graph).items():
        try:
            with _entered(calls[0]):
                record_examples(body, _inputs_of_a_body(body, calls))
        except ValueError:
            continue
        yield from recorded_bodies(body)
        yield body


def _inputs_of_a_body(body: GraphModule, calls: Sequence[Node]) -> list[Any]:
    """A value for each input of a body, of which all calls pass an operand."""
    placeholders = body.graph.find_nodes(op="placeholder")
    operands = [[item for item in tree_leaves(call.args) if submodule(call.graph, item) is None] for call in calls]
    if any(len(given) < len(placeholders) for given in operands):
        raise ValueError("a body has more inputs than its call has operands")
    last = zip(*(given[len(given) - len(placeholders) :] for given in operands), strict=True)
    pairs = zip(map(example, placeholders), last, strict=True)
    return [_input_of_a_body(recorded, list(map(example, given))) for recorded, given in pairs]


def _input_of_a_body(recorded: Any, given: Sequence[Any]) -> Any:
    """The value of a body's input, from the value that tracing recorded and the operands of the body's calls."""
    if not isinstance(recorded, Tensor):
        return recorded
    value, *_ = given
    if any(not isinstance(item, Tensor) for item in given) or value.dim() - recorded.dim() not in (0, 1):
        raise ValueError("an input of a body is not an operand of its call")
    is_slice = value.dim() > recorded.dim()  # `scan` and `map` pass slices of the operand
    is_symbolic = _is_like(value.detach(), recorded.detach()) and not equal_sizes(value.shape, recorded.shape)
    if is_slice or is_symbolic:  # in the body of a loop a size may be symbolic
        if value.dtype != recorded.dtype:
            raise ValueError("the body was traced with another dtype")
        value = recorded
    return value.detach().requires_grad_(any(item.requires_grad for item in given))


def _entered(call: Node) -> AbstractContextManager[Any]:
    """The mode that a higher-order operator enters before it runs its body."""
    arguments: Any = call.args
    if call.target is torch.ops.higher_order.wrap_with_autocast:
        return torch.autocast(*arguments[:4])  # the device type, the dtype, and if autocast and its cache are on
    return torch.set_grad_enabled(arguments[0]) if call.target is _set_grad_enabled else nullcontext()


def _is_like(given: Any, recorded: Any) -> bool:
    """True if an input is like the recorded value.

    Two tensors are alike if dtype, device, shape and `requires_grad` agree; a symbolic size fits any size. A symbolic
    number fits any number. Other values must be equal.
    """
    if isinstance(recorded, _SYMBOLIC):
        return isinstance(given, _NUMBER)
    if not isinstance(recorded, torch.Tensor):
        return recorded is not None and type(given) is type(recorded) and bool(given == recorded)
    if not isinstance(given, torch.Tensor) or given.dim() != recorded.dim():
        return False
    is_same = all(getattr(given, name) == getattr(recorded, name) for name in ("dtype", "device", "requires_grad"))
    sizes = zip(given.shape, recorded.shape, strict=True)
    return is_same and all(isinstance(b, torch.SymInt) or statically_known_true(a == b) for a, b in sizes)


def _is_recorded(graph: Graph) -> bool:
    """True if Dynamo recorded a value for every node that is read, and did so under the current grad mode.

    Nodes that switch the grad mode or autocast need no value, because only the nodes that switch back read them.
    """
    computed = [node for node in graph.nodes if node.op == "output" or "example_value" in node.meta]
    read = {node for user in computed for node in user.all_input_nodes}
    bodies = {node for node in read if node.op == "get_attr" and submodule(graph, node) is not None}
    return all("example_value" in node.meta for node in read - bodies) and _has_current_gradients(graph)


def _has_current_gradients(graph: Graph) -> bool:
    """True if the recorded results require gradients as they would in the current grad mode."""
    leaves = [node for node in graph.nodes if node.op in ("placeholder", "get_attr")]
    given = (value for node in leaves for value in tensors_in(example(node)))
    wanted = torch.is_grad_enabled() and any(value.requires_grad for value in given)
    results = [value for node in _recorded_results(graph) for value in tensors_in(example(node))]
    has_floating = any(value.is_floating_point() for value in results)
    return not has_floating or any(value.requires_grad for value in results) == wanted


def _recorded_results(graph: Graph) -> list[Node]:
    """The results of a graph that have example values.

    Another pass may have added a result without a value. It is replaced by its nearest inputs that have values.
    """
    found: list[Node] = []
    pending, seen = [graph.output_node()], set()
    while pending:
        for node in pending.pop().all_input_nodes:
            if "example_value" in node.meta:
                found.append(node)
            elif node not in seen:
                seen.add(node)
                pending.append(node)
    return found


def _as_number(value: Any) -> Any:
    """The value of a symbolic number during tracing, if it is known; any other value unchanged."""
    hint = value.node.hint if isinstance(value, _SYMBOLIC) else None
    return value if hint is None else hint


def _run(gm: GraphModule, inputs: Sequence[Any], *, anew: bool) -> None:
    """Compute the values of all nodes; without `anew`, only the missing ones."""
    modes = [mode for mode in map(maybe_get_fake_mode, inputs) if mode is not None]
    mode = modes[0] if modes else FakeTensorMode()
    try:
        with _without_side_effects(mode), mode:
            _Recorder(gm, mode, anew).run(*(_as_fake(mode, value) for value in inputs))
        return
    except Exception as error:  # any error of the graph's operators
        reason, *_ = str(error).strip().splitlines() or [type(error).__name__]
    raise ValueError(f"example_inputs: the module does not take {described(inputs)}: {reason}")


@contextmanager
def _without_side_effects(mode: FakeTensorMode) -> Iterator[None]:
    """Run a graph in the fake mode of another tracer without adding guards or changing the grad mode."""
    allowed = mode.allow_non_fake_inputs
    mode.allow_non_fake_inputs = True  # for example parameters of modules that the graph calls
    try:
        with ExitStack() as stack:
            stack.enter_context(torch.set_grad_enabled(torch.is_grad_enabled()))
            if mode.shape_env is not None:
                stack.enter_context(mode.shape_env.suppress_guards())
                stack.enter_context(mode.shape_env.ignore_fresh_unbacked_symbols())
            yield
    finally:
        mode.allow_non_fake_inputs = allowed


def _as_fake(mode: FakeTensorMode, value: Any) -> Any:
    """The fake version of a real tensor (the same tensor at every call); any other value unchanged."""
    is_real = isinstance(value, torch.Tensor) and not is_fake(value)
    return mode.from_tensor(value, static_shapes=True) if is_real else value


class _Recorder(Interpreter):
    def __init__(self, gm: GraphModule, mode: FakeTensorMode, anew: bool) -> None:
        super().__init__(gm, garbage_collect_values=False)
        self._mode, self._anew = mode, anew

    def get_attr(self, target: Any, args: Any, kwargs: Any) -> Any:
        return _as_fake(self._mode, super().get_attr(target, args, kwargs))

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        module = self.fetch_attr(target)
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        # The module may write to its state, so it runs on fake tensors.
        state = {name: _as_fake(self._mode, tensor) for name, tensor in tensors.items()}
        return torch.func.functional_call(module, state, args, kwargs)

    def run_node(self, n: Node) -> Any:
        if not self._anew and "example_value" in n.meta:
            return n.meta["example_value"]
        value = super().run_node(n)
        n.meta["example_value"] = value
        return value


# --- Bodies of torch.no_grad() ---------------------------------------------------------------------------------------


def inline_no_grad(module: GraphModule, *, trains: bool) -> None:
    """Move the bodies of `torch.no_grad()` into the graph that calls them, unless this changes a result or gradient.

    A program that `torch.export` traced with grad mode on has `wrap_with_set_grad_enabled(False, body, *operands)`
    where the model turned gradients off. The pass reads one graph at a time, so it would not see a mask that such a
    body computes. The most common straight-through mask contains such a body: a hard mask under `no_grad`, plus
    `logits - logits.detach()`.

    The bodies of other higher-order operators are treated alike.

    Args:
        module: a graph module. Its graph, its registered submodules and the bodies that stay are changed in place, but
            not the bodies of `torch.no_grad()`.
        trains: True if gradients of the graph's results are needed. Then an inlined body reads detached operands, so
            that the body still records no gradient. A body that turns gradients on is not inlined, because the graph
            does not tell if gradients are on around the call.
            If False, bodies that turn gradients on are inlined too. Only a body that writes in place reads detached
            operands, because the body may write to a parameter.
    """
    kept: set[Node] = set()
    without_gradient: set[Node] = set()  # the nodes of inlined bodies, which record no gradient
    while calls := [call for call in _calls(module.graph) if call not in kept]:
        call = calls[0]  # calls inside of its body follow in later iterations, when they are in the graph of `module`
        if _can_inline(call, without_gradient if trains else None):
            _inline(module, call, without_gradient if trains or _writes(call) else None)
        else:
            kept.add(call)
    module.recompile()
    for body in calls_of_bodies(module.graph):
        inline_no_grad(body, trains=trains)


def _calls(graph: Graph) -> list[Node]:
    return graph.find_nodes(op="call_function", target=_set_grad_enabled)


def _can_inline(call: Node, without_gradient: set[Node] | None) -> bool:
    """True if the body of a call can be inlined.

    `without_gradient` is None if no gradients are needed. Otherwise it holds the nodes of the bodies inlined so far,
    and the body of this call must record no gradient. Operands that may have to be detached need example values.
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
    """True if a user takes one result of a body by its index, and that result is a node."""
    index: Any = user.args[1] if user.target is operator.getitem else None
    return isinstance(index, int) and isinstance(results[index], Node)


def _turns_gradients_on(body: GraphModule) -> bool:
    """True if a body, or a body that it calls, turns gradients on or sets the grad mode in an unknown way."""
    graphs = [inner.graph for inner in body.modules() if isinstance(inner, GraphModule)]
    if any(call.args[0] is not False for graph in graphs for call in _calls(graph)):
        return True
    return any(getattr(node.target, "__name__", "") == "_set_grad_enabled" for graph in graphs for node in graph.nodes)


def _inline(module: GraphModule, call: Node, without_gradient: set[Node] | None) -> None:
    """Replace a call by the nodes of its body.

    If `without_gradient` is a set, the body reads detached operands, and its nodes are added to the set.
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
    """An operand, detached if it may require a gradient."""
    value = tensor_example(operand) if isinstance(operand, Node) else None
    if value is None or operand in without_gradient or not (value.is_floating_point() or value.is_complex()):
        return operand
    detached = graph.call_function(torch.ops.aten.detach.default, (operand,))
    detached.meta = {key: item.detach() if isinstance(item, Tensor) else item for key, item in operand.meta.items()}
    return detached


def _adopt(module: GraphModule, body: GraphModule, name: str) -> str:
    """Add to the module a body that an inlined body calls, under an unused name. Returns that name."""
    numbered = (f"{name}_{number}" for number in itertools.count())
    free = next(other for other in numbered if not hasattr(module, other))
    module.add_module(free, getattr(body, name))
    return free
