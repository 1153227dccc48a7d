"""The module `shapes`: slices, ranges, columns and repetitions in all spellings, and sizes and dimensions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Interpreter, Node, symbolic_trace
from torch.fx.experimental.proxy_tensor import make_fx

from compile_passes import shapes

aten = torch.ops.aten


class _Recorder(Interpreter):
    """Runs a graph and stores the value of each node as its example value, as tracing does."""

    def run_node(self, node: Node) -> Any:
        node.meta["val"] = super().run_node(node)
        return node.meta["val"]


def traced(function: Callable[[Tensor], Any]) -> tuple[Node, Node]:
    """The input x `[4, 6]` and the result of the graph of a function."""
    gm = symbolic_trace(function)
    _Recorder(gm).run(torch.randn(4, 6, generator=torch.Generator().manual_seed(0)))
    return ends(gm)


def ends(gm: GraphModule) -> tuple[Node, Node]:
    (x,) = gm.graph.find_nodes(op="placeholder")
    return x, gm.graph.output_node().args[0]


def value(node: Node) -> Tensor:
    return node.meta["val"]


# Functions of x `[4, 6]`, and what `shapes` reads from them: `slice` (dim, index), `range` (dim, start, stop), `column`
# (index), or `repeated` (a new dimension along which x is repeated).
NODES: dict[str, tuple[Callable[[Any], Any], dict[str, tuple[int, ...]]]] = {
    "select": (lambda x: x.select(1, 2), {"slice": (1, 2)}),
    "select from the end": (lambda x: x.select(-1, -2), {"slice": (1, 4)}),
    "select of the first, from the end": (lambda x: x.select(-2, -4), {"slice": (0, 0)}),
    "unbind": (lambda x: x.unbind()[0], {"slice": (0, 0)}),
    "unbind of the last dimension": (lambda x: x.unbind(-1)[-1], {"slice": (1, 5)}),
    "an index": (lambda x: x[1], {"slice": (0, 1)}),
    "an index from the end": (lambda x: x[-1], {"slice": (0, 3)}),
    "an index and whole dimensions": (lambda x: x[1, :], {"slice": (0, 1)}),
    "the second index": (lambda x: x[:, 0], {"slice": (1, 0)}),
    "the second index, after a step of 1": (lambda x: x[::1, 3], {"slice": (1, 3)}),
    "the last index": (lambda x: x[..., 3], {"slice": (1, 3)}),
    "an ellipsis that stands for nothing": (lambda x: x[:, ..., 3], {"slice": (1, 3)}),
    "two indices": (lambda x: x[1, 2], {}),
    "all": (lambda x: x[:, :], {}),
    "a step": (lambda x: x[::2, 1], {}),
    "a start": (lambda x: x[1:, 1], {}),
    "a stop": (lambda x: x[:3, 1], {}),
    "a new dimension": (lambda x: x[None, 1], {}),
    "only a new dimension": (lambda x: x[None], {"repeated": (0,)}),
    "True": (lambda x: x[True], {}),
    "False": (lambda x: x.unbind()[False], {}),
    "an index that is computed": (lambda x: x[x.argmax() % 4], {}),
    "an entry of a chunk": (lambda x: x.chunk(4)[1], {"range": (0, 1, 2)}),
    "a result of several": (lambda x: x.max(0)[0], {}),
    "several entries of unbind": (lambda x: x.unbind()[0:1], {}),
    "an index of two numbers": (lambda x: x[[0, 1]], {}),
    "x itself": (lambda x: x, {}),
    "narrow": (lambda x: x.narrow(1, 2, 3), {"range": (1, 2, 5)}),
    "narrow from the start": (lambda x: torch.narrow(x, -1, 0, 1), {"range": (1, 0, 1), "column": (0,)}),
    "aten.slice": (lambda x: aten.slice(x, -1, 1, 4), {"range": (1, 1, 4)}),
    "aten.slice of the first dimension": (lambda x: aten.slice.Tensor(x, 0, -3), {"range": (0, 1, 4)}),
    "a slice": (lambda x: x[1:3], {"range": (0, 1, 3)}),
    "a slice from the end": (lambda x: x[-3:-1], {"range": (0, 1, 3)}),
    "a slice that ends after the end": (lambda x: x[1:9], {"range": (0, 1, 4)}),
    "the second slice": (lambda x: x[:, 1:], {"range": (1, 1, 6)}),
    "the first slice": (lambda x: x[:2, :], {"range": (0, 0, 2)}),
    "an entry of a chunk, as a range": (lambda x: x.chunk(3, 1)[1], {"range": (1, 2, 4)}),
    "the last entry of a chunk": (lambda x: x.chunk(3, -1)[-1], {"range": (1, 4, 6)}),
    "an entry of a split": (lambda x: x.split([1, 2, 3], 1)[2], {"range": (1, 3, 6)}),
    "the first entry of a split": (lambda x: x.split(3)[0], {"range": (0, 0, 3)}),
    "an empty slice": (lambda x: x[2:2], {}),
    "a step of 2": (lambda x: x[0:3:2], {}),
    "two slices": (lambda x: x[1:2, 1:2], {}),
    "a slice and an index": (lambda x: x[1:3, 0], {}),
    "a slice and a new dimension": (lambda x: x[None, 1:3], {}),
    "narrow from the end": (lambda x: x.narrow(0, -1, 1), {}),
    "narrow to a size that is computed": (lambda x: x.narrow(0, 0, x.size(0) - 1), {}),
    "narrow from a number that is computed": (lambda x: x.narrow(0, x.size(0) - 1, 1), {}),
    "a stop that is computed": (lambda x: x[: x.size(0) - 1], {}),
    "several entries of a chunk": (lambda x: x.chunk(3)[0:2], {}),
    "a slice of the entries of unbind": (lambda x: x.unbind()[1:2], {}),
    "a slice, as a column": (lambda x: x[:, 1:2], {"range": (1, 1, 2), "column": (1,)}),
    "the last slice, as a column": (lambda x: x[..., 5:], {"range": (1, 5, 6), "column": (5,)}),
    "an entry of a chunk, as a column": (lambda x: x.chunk(6, 1)[4], {"range": (1, 4, 5), "column": (4,)}),
    "an index and a new dimension": (lambda x: x[:, 1, None], {"column": (1,)}),
    "an ellipsis, an index and a new dimension": (lambda x: x[..., -1, None], {"column": (5,)}),
    "an index, unsqueezed": (lambda x: x[..., 0].unsqueeze(-1), {"column": (0,), "repeated": (1,)}),
    "a row, unsqueezed": (lambda x: x[1].unsqueeze(-1), {"repeated": (1,)}),
    "a row and a new dimension": (lambda x: x[1, None], {}),
    "an index, unsqueezed before": (lambda x: x[:, 1].unsqueeze(0), {"repeated": (0,)}),
    "an element": (lambda x: x[0, 1, None], {}),
    "an element of some rows": (lambda x: x[:2, 1, None], {}),
    "True, as a column": (lambda x: x[:, True, None], {}),
    "x with a new dimension": (lambda x: x.unsqueeze(-1), {"repeated": (2,)}),
    "an index in the middle": (lambda x: x[None][..., 1, :].unsqueeze(-1), {"repeated": (2,)}),
    "a row of a stack": (lambda x: x[None][:, 1, None], {}),
    "unsqueeze": (lambda x: x.unsqueeze(1), {"repeated": (1,)}),
    "the last None": (lambda x: x[:, :, None], {"repeated": (2,)}),
    "expand": (lambda x: x.expand(3, -1, -1), {"repeated": (0,)}),
    "repeat": (lambda x: x.repeat(3, 1, 1), {"repeated": (0,)}),
    "expand_as": (lambda x: x.expand_as(x.new_zeros(3, 4, 6)), {"repeated": (0,)}),
    "unsqueeze, expand": (lambda x: x.unsqueeze(1).expand(4, 3, 6), {"repeated": (1,)}),
    "None, repeat": (lambda x: x[:, None].repeat(1, 3, 1), {"repeated": (1,)}),
    "expand, expand": (lambda x: x[None].expand(3, 4, 6).expand(3, 4, 6), {"repeated": (0,)}),
    "repeat along an old dimension": (lambda x: x.repeat(2, 1), {}),
    "repeat along two dimensions": (lambda x: x.repeat(2, 2, 1), {}),
    "a dimension of x, expanded": (lambda x: x[:, :1].expand(4, 6), {}),
    "two new dimensions": (lambda x: x[None, None], {}),
    "a new dimension of some rows": (lambda x: x[None, 1:], {}),
    "rows that are chosen": (lambda x: x[torch.zeros(3, 4, dtype=torch.int64)], {}),
    "expand to more dimensions": (lambda x: x.expand(2, 3, 4, 6), {}),
    "a stack": (lambda x: torch.stack([x, x]), {}),
    "zeros": (lambda x: torch.zeros(1, 4, 6), {}),
}
SPELLED: dict[str, Callable[..., Tensor]] = {
    "slice": torch.select,
    "range": lambda x, dim, start, stop: x.narrow(dim, start, stop - start),
    "column": lambda x, index: x[..., index : index + 1],
    "repeated": torch.unsqueeze,
}


@pytest.mark.parametrize("name", NODES)
def test_what_a_node_is_of_x(name: str) -> None:
    function, wanted = NODES[name]
    x, node = traced(function)
    found = {"slice": shapes.slice_of(node), "range": shapes.range_of(node), "column": shapes.column_of(node)}
    if shapes.repeated(node) != (node, None):
        found["repeated"] = shapes.repeated(node)
    assert {kind: (*numbers,) for kind, one in found.items() if one is not None for _, *numbers in [one]} == wanted
    for kind, numbers in wanted.items():
        source, *_ = found[kind]
        assert source is x or kind == "repeated"
        assert torch.equal(value(node), SPELLED[kind](value(source), *numbers).expand_as(value(node)))


# --- Symbolic sizes --------------------------------------------------------------------------------------------------


def symbolic(function: Callable[[Tensor], Any]) -> tuple[Node, Node]:
    """The input and the result of a graph in which the sizes of x are symbolic."""
    return ends(make_fx(function, tracing_mode="symbolic")(torch.zeros(4, 6)))


def test_what_a_symbolic_size_tells() -> None:
    x, node = symbolic(lambda x: x.select(0, 1))
    assert shapes.slice_of(node) == (x, 0, 1)
    assert shapes.size(x, 0) is None
    for function in (lambda x: x.select(0, -1), lambda x: x.select(1, -2)):
        assert shapes.slice_of(symbolic(function)[1]) is None
    for function in (lambda x: aten.slice(x, 0, 1, 3), lambda x: x.chunk(2)[1], lambda x: x.split(2)[0]):
        assert shapes.range_of(symbolic(function)[1]) is None
    x, node = symbolic(lambda x: x.unsqueeze(0))
    assert shapes.repeated(node) == (x, 0)
    assert shapes.same_shape(x, x)
    assert not shapes.same_shape(x, symbolic(lambda x: x.t())[1])


# --- Example values, sizes and dimensions ----------------------------------------------------------------------------


def test_nodes_without_examples() -> None:
    """Nothing is known of a graph that was traced without inputs."""
    x, node = ends(symbolic_trace(lambda x: x.chunk(2, 1)[0]))
    assert shapes.range_of(node) is None
    assert shapes.range_of(ends(symbolic_trace(lambda x: x[:2]))[1]) is None
    assert shapes.repeated(ends(symbolic_trace(lambda x: x[None]))[1])[1] is None
    assert shapes.slice_of(ends(symbolic_trace(lambda x: x[..., 0]))[1]) is None
    assert (shapes.dtype_of(x), shapes.dims(x), shapes.size(x, 0), shapes.unusual_kind(x)) == (None, -1, None, None)
    assert not shapes.same_shape(x, x)
    assert not shapes.broadcasts_to(x, torch.zeros(2))
    assert not shapes.broadcasts_to(torch.zeros(2), x)
    assert not shapes.requires_grad(x)
    for end in (0, 1):
        nodes = traced(lambda x: x[None])
        nodes[end].meta.clear()
        assert shapes.repeated(nodes[1])[1] is None


def test_an_example_of_dynamo_is_read_before_one_of_export() -> None:
    x, _ = traced(lambda x: x)
    x.meta["example_value"] = torch.zeros(2)
    assert shapes.dims(x) == 1
    x.meta["example_value"] = None
    assert shapes.dims(x) == -1


def test_size() -> None:
    x, _ = traced(lambda x: x)
    assert [shapes.size(x, dim) for dim in range(-3, 4)] == [None, 4, 6, 4, 6, None, None]


def test_dimension() -> None:
    x, _ = traced(lambda x: x)
    assert [shapes.dimension(dim, x) for dim in range(-3, 4)] == [None, 0, 1, 0, 1, None, None]
    assert [shapes.dimension(dim, x) for dim in ([1], (-1,), (0, 1), [], True, None, x)] == [1, 1, *[None] * 5]


def test_is_matrix() -> None:
    found = [shapes.is_matrix(traced(f)[1]) for f in (lambda x: x, lambda x: x[0], lambda x: x[None])]
    assert found == [True, False, False]


BROADCASTS = {
    ((6,), (4, 6)): True,
    ((1, 6), (4, 6)): True,
    ((4, 1), (4, 6)): True,
    ((), (4, 6)): True,
    ((4, 6), (4, 6)): True,
    ((4,), (4, 6)): False,
    ((6,), (1,)): False,
    ((4, 6), (6,)): False,
    ((1, 6), (6,)): False,
}


@pytest.mark.parametrize(("small", "large"), BROADCASTS)
def test_broadcasts_to(small: tuple[int, ...], large: tuple[int, ...]) -> None:
    assert shapes.broadcasts_to(torch.zeros(small), torch.zeros(large)) == BROADCASTS[small, large]


def test_same_shape() -> None:
    a, b = torch.zeros(4, 6), torch.ones(4, 6)
    assert shapes.same_shape(a, b, a)
    for other in (torch.zeros(4), torch.zeros(4, 1), torch.zeros(6, 4), 1.0, None):
        assert not shapes.same_shape(a, other)
        assert not shapes.same_shape(other, a)
        assert not shapes.same_shape(a, b, other)


def test_dtype_that_holds_another() -> None:
    assert shapes.holds(torch.float32, torch.bfloat16)
    assert shapes.holds(torch.float32, torch.float32)
    assert not shapes.holds(torch.bfloat16, torch.float16)
    assert not shapes.holds(torch.float16, torch.float32)


def test_kinds_of_tensors() -> None:
    plain = torch.ones(2, 2)
    jagged = torch.nested.nested_tensor([plain], layout=torch.jagged)
    found = [shapes.unusual_kind(tensor) for tensor in (plain, plain.to_sparse(), jagged, 1.0)]
    assert found == [None, "tensor of layout torch.sparse_coo", "nested tensor", None]


def test_submodule() -> None:
    graph, module, body = Graph(), torch.nn.Module(), GraphModule({}, Graph())
    named, called, relu = graph.get_attr("body"), graph.call_module("body"), graph.call_function(torch.relu)
    relu.target = "body"
    assert shapes.submodule(graph, named) is None
    module.body, module.relu = body, torch.nn.ReLU()
    graph.owning_module = module
    assert [shapes.submodule(graph, node) for node in (named, called, relu, "body")] == [body, body, None, None]
    called.target = "relu"
    assert shapes.submodule(graph, called) is None
