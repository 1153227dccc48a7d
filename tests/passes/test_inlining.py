"""Bodies of `torch.no_grad()` in exported graphs are inlined without changing values, gradients or writes."""

from __future__ import annotations

import copy
from operator import getitem

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

import mglu_ops
from compile_passes.exported import fuse_exported, layers_of
from compile_passes.prepare import inline_no_grad
from compile_passes.report import FusionReport
from tests.support.programs.compiled import Masked, OfSource, parameter
from tests.support.programs.spellings import from_source

_set_grad_enabled = torch.ops.higher_order.wrap_with_set_grad_enabled


@torch.no_grad()
def hard(logits: Tensor) -> Tensor:
    return (logits > 0).float()


def two_bodies(logits: Tensor) -> Tensor:
    with torch.no_grad():
        mask = logits > 0
        with torch.enable_grad():
            soft = logits * 1
        mask = mask.float()
    return mask + soft - soft.detach()


MASKS = {
    "under no_grad": from_source("l", "with torch.no_grad(): m = (l > 0).float(); m + l - l.detach()", {}),
    "decorated": lambda logits: hard(logits) + logits - logits.detach(),
    "two bodies": two_bodies,
    # The body returns an operand unchanged, with its gradient.
    "with its operand": from_source("l", "with torch.no_grad(): m, l = (l > 0).float(), l; m + l - l.detach()", {}),
}


def layer(kind: str) -> Masked:
    torch.manual_seed(0)
    return Masked(torch.randn(6, 20), MASKS[kind], parameter=True)


def bodies_in(module: GraphModule) -> list[torch.fx.Node]:
    return module.graph.find_nodes(op="call_function", target=_set_grad_enabled)


def value_and_gradients(module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    result = module(*inputs)
    wanted = [*module.parameters(), *(item for item in inputs if item.requires_grad)]
    return [result.detach(), *torch.autograd.grad(result.square().sum(), wanted)]


@pytest.mark.parametrize("kind", MASKS)
def test_hard_mask_in_a_training_graph_is_found(kind: str) -> None:
    """The inlined graph has the module's results and gradients, and its layer is fused with trained masks."""
    module, x = layer(kind), torch.randn(5, 20, requires_grad=True)
    inlined = torch.export.export(module, (x,)).module()
    assert bodies_in(inlined)
    inline_no_grad(inlined, trains=True)
    inlined.graph.lint()
    assert not bodies_in(inlined)
    assert not [name for name, _ in inlined.named_children() if "submod" in name]
    wanted = value_and_gradients(module, x)
    for found, expected in zip(value_and_gradients(inlined, x), wanted, strict=True):
        assert torch.equal(found, expected)
    report = FusionReport()
    fused = mglu_ops.fuse(inlined, report=report, strict=True)
    assert [site.operator for site in report.fused] == ["forward_ste"]
    for found, expected in zip(value_and_gradients(fused, x), wanted, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("strict", [False, True], ids=["make_fx", "dynamo"])
@pytest.mark.parametrize("kind", MASKS)
def test_hard_mask_in_an_exported_program_is_found(kind: str, strict: bool) -> None:
    module, x = layer(kind), torch.randn(5, 20)
    program = torch.export.export(module, (x,), strict=strict)
    fused = fuse_exported(program, strict=True)
    assert len(layers_of(fused.graph)) == 1
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    torch.testing.assert_close(fused.module()(x), module(x))


def hand_made(turns_on: bool, inner_turns_on: bool | None = None) -> GraphModule:
    """A graph that computes `y = x * w` in a body and returns `y * w`.

    If `inner_turns_on` is not None, the body calls another body, which computes `y = y * w`. `turns_on` and
    `inner_turns_on` are the grad modes of the two bodies.
    """

    def body(call: GraphModule | None) -> GraphModule:
        graph = torch.fx.Graph()
        x, w = graph.placeholder("x"), graph.placeholder("w")
        y = graph.call_function(torch.mul, (x, w))
        root = nn.Module()
        if call is not None:
            root.add_module("body", call)
            inner = graph.get_attr("body")
            called = graph.call_function(_set_grad_enabled, (inner_turns_on, inner, y, w))
            y = graph.call_function(torch.ops.aten.alias, (graph.call_function(getitem, (called, 0)),))
        graph.output((y,))
        return GraphModule(root, graph)

    root = nn.Module()
    root.add_module("body", body(None if inner_turns_on is None else body(None)))
    root.register_parameter("w", nn.Parameter(torch.tensor([2.0, 3.0])))
    graph = torch.fx.Graph()
    x, w = graph.placeholder("x"), graph.get_attr("w")
    called = graph.call_function(_set_grad_enabled, (turns_on, graph.get_attr("body"), x, w))
    y = graph.call_function(getitem, (called, 0))
    graph.output(graph.call_function(torch.mul, (y, w)))
    module = GraphModule(root, graph)
    for node in module.graph.nodes:
        if node.op == "placeholder" or node.target == "w":
            node.meta["val"] = torch.empty(2, device="meta")
    return module


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize("inner_turns_on", [None, False, True])
@pytest.mark.parametrize("turns_on", [False, True])
def test_bodies_that_record_a_gradient_are_inlined_for_inference_only(
    turns_on: bool, inner_turns_on: bool | None, trains: bool
) -> None:
    module, x = hand_made(turns_on, inner_turns_on), torch.tensor([5.0, 7.0], requires_grad=True)
    inlined = hand_made(turns_on, inner_turns_on)
    inline_no_grad(inlined, trains=trains)
    inlined.graph.lint()
    is_kept = trains and bool(turns_on or inner_turns_on)
    assert (len(bodies_in(inlined)), len(list(inlined.children()))) == (is_kept, is_kept)
    for mode in (True, False) if trains else (False,):
        with torch.set_grad_enabled(mode):
            result, expected = inlined(x), module(x)
        assert torch.equal(result, expected)
        assert result.requires_grad == expected.requires_grad
        if result.requires_grad:
            gradients = [
                torch.autograd.grad(y.sum(), [x, m.w], allow_unused=True)
                for y, m in ((result, inlined), (expected, module))
            ]
            torch.testing.assert_close(gradients[0], gradients[1], rtol=0, atol=0)


class Autocast(nn.Module):
    """A `no_grad` block that contains an autocast block, whose body is not inlined."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 6)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = x * 2
            with torch.autocast("cpu", torch.bfloat16):
                z = self.layer(y)
            return z.float() + 1


def test_bodies_of_autocast_are_kept() -> None:
    module, x = Autocast(), torch.randn(5, 20)
    program = torch.export.export(module, (x,))
    inlined = program.module()
    inline_no_grad(inlined, trains=True)
    assert not bodies_in(inlined)
    assert inlined.graph.find_nodes(op="call_function", target=torch.ops.higher_order.wrap_with_autocast)
    assert torch.equal(inlined(x), module(x))
    assert torch.equal(fuse_exported(program).module()(x), module(x))


@pytest.mark.parametrize("trains", [False, True])
def test_inlined_body_may_write_to_a_parameter(trains: bool) -> None:
    module, x = OfSource("with torch.no_grad(): w[0].mul_(0.5); linear(x, w)", w=parameter(6, 20)), torch.randn(5, 20)
    inlined = torch.export.export(copy.deepcopy(module), (x,)).module()
    inline_no_grad(inlined, trains=trains)
    assert not bodies_in(inlined)
    for _ in range(3):
        for found, expected in zip(value_and_gradients(inlined, x), value_and_gradients(module, x), strict=True):
            assert torch.equal(found, expected)


class Body(nn.Module):
    """The body of a `no_grad` block, which reads only its operand, calls a module, or reads a parameter."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(4, 4), kind

    def forward(self, x: Tensor) -> tuple[Tensor]:
        if self.kind == "input":
            return (x * 2,)
        return (self.linear(x) if self.kind == "module" else x * self.linear.weight,)


@pytest.mark.parametrize(
    ("body", "options", "is_inlined"),
    [
        (torch.fx.symbolic_trace(Body("input")), {}, True),
        (torch.fx.symbolic_trace(Body("input")), {"option": 1}, False),
        (torch.fx.symbolic_trace(Body("module")), {}, False),
        (torch.fx.symbolic_trace(Body("parameter")), {}, False),
        (Body("input"), {}, False),
    ],
)
def test_body_that_cannot_be_moved_stays(body: nn.Module, options: dict[str, int], is_inlined: bool) -> None:
    root = nn.Module()
    root.body = body
    graph = Graph(root)
    x, named = graph.placeholder("x"), graph.get_attr("body")
    call = graph.call_function(_set_grad_enabled, (False, named, x), options)
    graph.output(graph.call_function(getitem, (call, 0)))
    module = GraphModule(root, graph)
    inline_no_grad(module, trains=False)
    assert len(bodies_in(module)) == (0 if is_inlined else 1)
