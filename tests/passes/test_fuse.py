"""`mglu_ops.fuse` on graph modules: inside a custom Dynamo backend, exported, and traced by `torch.fx`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
import torch.nn.functional as F
from torch import Tensor, nn
from torch._guards import TracingContext
from torch._higher_order_ops import associative_scan, while_loop
from torch._higher_order_ops.scan import scan
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import disable_saved_tensors_hooks, saved_tensors_hooks
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import mglu_ops
from compile_passes import prepare
from compile_passes.fusion import FusionError
from compile_passes.report import FusionReport
from mglu_ops.nn import MGLU, NaiveMGLU
from tests.support.budgets import relative_error
from tests.support.families import family
from tests.support.programs.compiled import SAME, OfSource, layer, parameter
from tests.support.programs.graphs import assert_same, calls, known_of_shapes, results


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# --- Inside a custom backend -----------------------------------------------------------------------------------------


def _omitted(inputs: list[Any]) -> None:
    """Omit the inputs, as in `fuse(gm)`."""


def _real(inputs: list[Any]) -> list[Any]:
    """Return the real inputs that Dynamo passes to its backend."""
    return inputs


def _fake(inputs: list[Any]) -> list[Any]:
    """Return fake inputs, as AOTAutograd makes them."""
    mode = TracingContext.get().fake_mode
    assert mode is not None
    return [mode.from_tensor(value) if isinstance(value, Tensor) else value for value in inputs]


class Backend:
    """A backend that fuses each graph with the example inputs that `inputs` returns, and passes the graph to `then`."""

    def __init__(
        self,
        inputs: Callable[[list[Any]], list[Any] | None] = _omitted,
        before: Callable[[GraphModule], None] | None = None,
        then: Callable[[GraphModule, list[Any]], Any] = lambda gm, _: gm.forward,
    ) -> None:
        self.inputs, self.before, self.then = inputs, before, then
        self.report, self.fused = FusionReport(), list[GraphModule]()

    def __call__(self, gm: GraphModule, example_inputs: list[Any]) -> Any:
        if self.before is not None:
            self.before(gm)
        given, mode = self.inputs(example_inputs), TracingContext.get().fake_mode
        assert mode is not None
        known = known_of_shapes(mode)
        self.fused.append(mglu_ops.fuse(gm, given, report=self.report, strict=True))
        assert known_of_shapes(mode) == known, "fuse changed the shape environment"
        return self.then(self.fused[-1], example_inputs)

    @property
    def operators(self) -> list[str]:
        return [site.operator for site in self.report.fused]


def _check(backend: Backend, model: nn.Module, training: bool, **options: Any) -> None:
    """Compile a model, run it with three different numbers of tokens, and compare it with eager."""
    compiled = torch.compile(model, backend=backend, fullgraph=True, **options)
    with torch.set_grad_enabled(training):
        for tokens in (3, 7, 12):
            x = torch.randn(tokens, 16)
            found, wanted = (
                results(run, {"x": x}, dict(model.named_parameters())) for run in (lambda x: compiled(x), model)
            )
            assert_same(found, wanted, SAME)


def _add_a_node(gm: GraphModule) -> None:
    """Add a node without an example value, as a user's pass may do."""
    output = gm.graph.output_node()
    (result,) = output.args[0]
    with gm.graph.inserting_before(output):
        changed = gm.graph.call_function(torch.mul, (result, 1))
    output.args = ((changed,),)
    gm.recompile()


@pytest.mark.parametrize(
    ("inputs", "dynamic", "training", "before"),
    family([_omitted, _real, _fake], [True, None, False], [True, False], [None, _add_a_node], most=4),
)
def test_fuse_in_a_backend(
    inputs: Callable[..., Any], dynamic: bool | None, training: bool, before: Callable[[GraphModule], None] | None
) -> None:
    """A graph that another pass has changed is run again to record examples, and its shapes stay symbolic."""
    backend = Backend(inputs, before)
    _check(backend, layer(), training, dynamic=dynamic)
    graphs = {True: 1, None: 2, False: 3}[dynamic]  # with None, a size becomes dynamic when it changes
    assert backend.operators == ["forward_ste" if training else "forward"] * graphs
    if before is not None:
        (result,) = backend.fused[-1].graph.output_node().all_input_nodes
        assert isinstance(result.meta["example_value"].shape[0], torch.SymInt) == (dynamic is not False)


def test_what_dynamo_recorded_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph is not run again, although switches of autocast and bodies of higher-order operators have no values."""
    monkeypatch.setattr(prepare, "_run", lambda *_, **__: pytest.fail("the graph was run"))
    model = layer()

    def function(x: Tensor) -> Tensor:
        x = checkpoint(torch.sin, x, use_reentrant=False)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(x)

    backend = Backend()
    torch.compile(function, backend=backend, fullgraph=True)(torch.randn(3, 16))
    assert [site.dtype for site in backend.report.fused] == ["bfloat16"]


@pytest.mark.long
@pytest.mark.parametrize("training", [True, False])
def test_fuse_in_a_backend_before_inductor(training: bool) -> None:
    from torch._inductor.compile_fx import compile_fx

    backend = Backend(then=compile_fx)
    _check(backend, layer(), training, dynamic=True)
    assert backend.operators == ["forward_ste" if training else "forward"]


def test_fused_module_still_tells_which_inputs_are_parameters() -> None:
    seen = []

    def then(gm: GraphModule, _: Any) -> Any:
        seen.append((gm._param_name_to_source, gm.meta))
        return gm.forward

    torch.compile(layer(), backend=Backend(then=then))(torch.randn(3, 16))
    ((sources, meta),) = seen
    assert len(sources) == 2
    assert "dynamo_flat_name_to_original_fqn" in meta


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops the examples of the placeholders on a CPU")
@pytest.mark.parametrize("inputs", [_omitted, _real])
def test_fuse_in_a_backend_with_parameters_in_the_graph(inputs: Callable[..., Any]) -> None:
    """Freezing turns parameters into attributes of the graph."""

    def before(gm: GraphModule) -> None:
        assert len(gm.graph.find_nodes(op="get_attr")) == 2

    backend = Backend(inputs, before)
    with inductor_config.patch(freezing=True):
        _check(backend, layer().eval(), training=False, dynamic=True)
    assert backend.operators == ["forward"]


def test_fuse_in_a_backend_with_a_data_dependent_size() -> None:
    """The symbolic size has no example value. If `fuse` runs the graph again, a second symbol arises and is dropped."""

    class Selected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = layer()

        def forward(self, x: Tensor) -> Tensor:
            return self.mlp(x[x.sum(1) > 0])

    for before in (None, _add_a_node):
        torch._dynamo.reset()
        backend = Backend(before=before)
        with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
            _check(backend, Selected(), training=True)
        assert set(backend.operators) == {"forward_ste"}


# --- Captured first, fused later -------------------------------------------------------------------------------------


def _captured(model: Callable[[Tensor], Tensor], x: Tensor) -> tuple[GraphModule, list[Any]]:
    """The graph and the inputs that Dynamo passes to its backend."""
    found = []

    def backend(gm: GraphModule, inputs: list[Any]) -> Any:
        found.append((gm, list(inputs)))
        return gm.forward

    torch.compile(model, backend=backend, fullgraph=True)(x)
    (pair,) = found
    return pair


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize("captured", [True, False])
def test_fuse_uses_the_grad_mode_of_its_call(captured: bool, given: bool) -> None:
    model, x, report = layer(), torch.randn(3, 16), FusionReport()
    with torch.set_grad_enabled(captured):
        gm, inputs = _captured(model, x)
    for training in (True, False):
        with torch.set_grad_enabled(training):
            fused = mglu_ops.fuse(gm, inputs if given else None, report=report, strict=True)
            assert relative_error(fused(*inputs)[0], model(x)) <= SAME
    assert [site.operator for site in report.fused] == ["forward_ste", "forward"]


@pytest.mark.parametrize("given", [True, False])
def test_hooks_on_saved_tensors_do_not_see_the_pass(given: bool) -> None:
    """A `checkpoint` around the first call of a compiled model has such hooks, and counts what they see."""
    seen: list[Tensor] = []
    gm, inputs = _captured(layer(), torch.randn(3, 16))
    with saved_tensors_hooks(seen.append, lambda _: None):
        mglu_ops.fuse(gm, inputs if given else None, strict=True)
    with disable_saved_tensors_hooks("no hooks here"):
        mglu_ops.fuse(gm, inputs if given else None, strict=True)
    assert not seen


def test_fuse_with_inputs_that_differ_from_the_traced_ones() -> None:
    model, x, report = layer(), torch.randn(16, 16), FusionReport()
    gm, inputs = _captured(model, x)
    others = [
        [value.detach().double().requires_grad_(value.requires_grad) for value in inputs],
        [torch.randn(5, 16) if value is x else value for value in inputs],
        [torch.randn(16) if value is x else value for value in inputs],
        [value.detach() for value in inputs],
    ]
    for given in others:
        fused = mglu_ops.fuse(gm, given, report=report, strict=True)
        assert relative_error(fused(*given)[0], gm(*given)[0]) <= SAME
    assert [(site.dtype, site.operator) for site in report.fused] == [
        ("float64", "forward_ste"),
        ("float32", "forward_ste"),
        ("float32", "forward_ste"),
        ("float32", "forward"),
    ]


# --- Exported --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "dynamic", "training"), family(["left out", "real", "fake"], [True, False], [True, False])
)
def test_fuse_an_exported_program(kind: str, dynamic: bool, training: bool) -> None:
    model, x, report = layer(), torch.randn(3, 16), FusionReport()
    shapes = {"x": {0: torch.export.Dim.AUTO}} if dynamic else None
    with torch.set_grad_enabled(training):
        unfused = torch.export.export(model, (x,), dynamic_shapes=shapes).module()
        (recorded,) = (node.meta["val"] for node in unfused.graph.find_nodes(op="placeholder"))
        known = known_of_shapes(recorded.fake_mode)
        given = {"left out": None, "real": [x], "fake": [FakeTensorMode().from_tensor(x)]}[kind]
        fused = mglu_ops.fuse(unfused, given, report=report, strict=True)
        assert known_of_shapes(recorded.fake_mode) == known
        for tokens in (3, 5) if dynamic else (3,):
            x = torch.randn(tokens, 16)
            parameters = dict(unfused.named_parameters())
            found, wanted = (results(run.forward, {"x": x}, parameters) for run in (fused, unfused))
            assert_same(found, wanted, SAME)
    assert [site.operator for site in report.fused] == ["forward_ste" if training else "forward"]


def test_numbers_that_export_makes_attributes_are_known() -> None:
    """If a program writes a number to parts of a weight, `torch.export` makes the number an attribute."""
    source = "g, v = w.clone(), w.clone(); g[~m] = 0; v[m] = 0; term(x @ g.T, x @ v.T)"
    x, report, module = (
        torch.randn(3, 16),
        FusionReport(),
        OfSource(source, w=parameter(12, 16), m=torch.rand(12, 16) > 0.5),
    )
    with torch.no_grad():
        unfused = torch.export.export(module, (x,)).module()
        fused = mglu_ops.fuse(unfused, report=report, strict=True)
        assert relative_error(fused(x), unfused(x)) <= SAME
    assert len(report.fused) == 1


def test_fuse_a_graph_of_make_fx() -> None:
    """`make_fx` writes a product with x of three dimensions as `mm` and `_unsafe_view`.

    Torch 2.15 records `alias` for `detach`, so the mask is not a straight-through estimator.
    """
    source = "term(x @ (w * m).T, x @ (w * ~m).T)"
    model, x = OfSource(source, w=parameter(12, 16), m=torch.rand(12, 16) > 0.5), torch.randn(2, 3, 16)
    fused = mglu_ops.fuse(make_fx(model)(x), [x], strict=True)
    assert relative_error(fused(x), model(x)) <= SAME


# --- Bodies of higher-order operators --------------------------------------------------------------------------------

SQUARE = 16  # the number of features of a layer whose result is its input


class InBodies(nn.Module):
    """A layer in bodies of higher-order operators. `call` takes the layer as a function, and x."""

    def __init__(self, call: Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.call, self.layer = call, NaiveMGLU(SQUARE, SQUARE, n_masks=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self.layer, x)


def _cond(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: f(x) * 2, lambda x: f(x) + x, (x,))


def _scan(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return scan(lambda carry, row: (f(carry) * 0.1 + row, carry * 1), x[0], x)[1]


def _map(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return torch._higher_order_ops.map(lambda row: f(row), x)


def _while_loop(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    return while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, f(x) * 0.1), (torch.tensor(0), x))[1]


def _autocast(f: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return f(x)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("call", [_cond, _scan, _map, _while_loop, _autocast])
def test_fuse_an_exported_program_with_bodies(call: Callable[..., Tensor], training: bool) -> None:
    """`torch.export` records no gradients in bodies, so `fuse` takes them from the operands of the call."""
    x, report = torch.randn(4, SQUARE), FusionReport()
    with torch.set_grad_enabled(training):
        unfused = torch.export.export(InBodies(call), (x,)).module()
        code = [module.code for module in unfused.modules() if isinstance(module, GraphModule)]
        fused = mglu_ops.fuse(unfused, report=report, strict=True)
        assert [module.code for module in unfused.modules() if isinstance(module, GraphModule)] == code
        parameters = dict(unfused.named_parameters())
        found, wanted = (results(run.forward, {"x": x}, parameters) for run in (fused, unfused))
        assert_same(found, wanted, 0.02 if call is _autocast else SAME)
    operators = [site.operator for site in report.fused]
    assert operators == ["forward_ste" if training else "forward"] * (2 if call is _cond else 1)


@pytest.mark.parametrize("captured", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_fuse_the_body_of_a_checkpoint(training: bool, captured: bool) -> None:
    """Under the grad mode of the capture, the values that Dynamo recorded in the body hold; otherwise it runs again."""
    model = InBodies(lambda f, x: checkpoint(lambda x: checkpoint(f, x, use_reentrant=False), x, use_reentrant=False))
    x, report = torch.randn(4, SQUARE), FusionReport()
    with torch.set_grad_enabled(captured):
        gm, inputs = _captured(model, x)
    with torch.set_grad_enabled(training):
        fused = mglu_ops.fuse(gm, inputs, report=report, strict=True)
        parameters = dict(model.named_parameters())
        found, wanted = (results(lambda x: run(*inputs), {"x": x}, parameters) for run in (fused, gm))  # noqa: B023
        assert_same(found, wanted, SAME)
    assert [site.operator for site in report.fused] == ["forward_ste" if training else "forward"]


@pytest.mark.parametrize("captured", [True, False])
def test_a_write_after_a_body_prevents_fusing_in_it(captured: bool) -> None:
    """The tensor of a body that runs again is still known as the tensor of the graph around it."""
    weight, m, report = parameter(SQUARE, SQUARE), torch.rand(SQUARE, SQUARE) > 0.5, FusionReport()

    def function(x: Tensor) -> Tensor:
        w = weight * 1
        y: Tensor = checkpoint(lambda x, w: F.silu(F.linear(x, w * m)) * F.linear(x, w * ~m), x, w, use_reentrant=False)
        w.mul_(2)
        return y

    with torch.set_grad_enabled(captured):
        gm, inputs = _captured(function, torch.randn(4, SQUARE))
    mglu_ops.fuse(gm, inputs, report=report)
    assert "the graph around this one writes in place to `w`" in str(report)


def test_the_body_of_an_unknown_higher_order_operator_is_left_as_it_is() -> None:
    """Two rows of x are the inputs of a body of `associative_scan`, so that its inputs are not operands of the call."""
    x, w, m = torch.randn(4, SQUARE), torch.randn(SQUARE, SQUARE), torch.rand(SQUARE, SQUARE) > 0.5

    def function(x: Tensor) -> Tensor:
        return associative_scan(
            lambda a, b: F.silu(F.linear(a, w * m)) * F.linear(a, w * ~m) + b, x, 0, combine_mode="generic"
        )

    gm, inputs = _captured(function, x)
    assert torch.equal(mglu_ops.fuse(gm, inputs)(*inputs)[0], function(x))


# --- torch.fx --------------------------------------------------------------------------------------------------------


class Plain(nn.Module):
    """A layer for `torch.fx.symbolic_trace`, which does not trace into its norms and its activation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.logits = nn.Parameter(torch.randn(12, 16)), nn.Parameter(torch.randn(12, 16))
        self.norm, self.batch_norm, self.activation = nn.LayerNorm(16), nn.BatchNorm1d(12), nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        m = ((self.logits > 0).float() - self.logits).detach() + self.logits
        gate, value = x @ (self.weight * m).T, x @ (self.weight * (1 - m)).T
        return self.batch_norm(self.activation(gate) * value)


@pytest.mark.parametrize("is_fake", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_fuse_a_symbolically_traced_module(training: bool, is_fake: bool) -> None:
    model, x, report = Plain(), torch.randn(3, 16), FusionReport()
    gm = torch.fx.symbolic_trace(model)
    state = {name: tensor.clone() for name, tensor in gm.state_dict().items()}
    with torch.set_grad_enabled(training):
        given = FakeTensorMode().from_tensor(x) if is_fake else x
        fused = mglu_ops.fuse(gm, [given], report=report, strict=True)
        assert all(torch.equal(tensor, state[name]) for name, tensor in gm.state_dict().items()), "a buffer was written"
        parameters = dict(gm.named_parameters())
        assert_same(results(fused, {"x": x}, parameters), results(gm, {"x": x}, parameters), SAME)
    assert [site.operator for site in report.fused] == ["forward_ste" if training else "forward"]
    assert calls([gm.graph])["mul"] >= 3, "the original module was changed"


class NormedTwice(Plain):
    """A layer whose gate and value call the norm separately, with equal results."""

    def forward(self, x: Tensor) -> Tensor:
        m = (self.logits > 0).float()
        gate, value = self.norm(x) @ (self.weight * m).T, self.norm(x) @ (self.weight * (1 - m)).T
        return torch.nn.functional.silu(gate) * value


class MaskOfAModule(Plain):
    """A layer whose mask is computed by a module of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        m = self.relu(torch.sign(self.logits.detach()))
        return torch.nn.functional.silu(x @ (self.weight * m).T) * (x @ (self.weight * (1 - m)).T)


@pytest.mark.parametrize("model", [NormedTwice, MaskOfAModule])
def test_calls_of_a_module_of_torch_are_read_by_their_function(model: type[nn.Module]) -> None:
    x, report = torch.randn(3, 16), FusionReport()
    gm = torch.fx.symbolic_trace(model())
    fused = mglu_ops.fuse(gm, [x], report=report, strict=True)
    parameters = dict(gm.named_parameters())
    assert_same(results(fused, {"x": x}, parameters), results(gm, {"x": x}, parameters), SAME)
    assert [site.operator for site in report.fused] == ["forward"]


def test_hooks_of_modules_that_are_nodes_keep_their_effect() -> None:
    model, x = Plain(), torch.randn(3, 16)
    gm = torch.fx.symbolic_trace(model)
    assert mglu_ops.fuse(gm, [x], strict=True).code != gm.code
    model.activation.register_forward_hook(lambda module, args, result: 2 * result)
    fused, parameters = mglu_ops.fuse(gm, [x]), dict(gm.named_parameters())
    assert_same(results(fused, {"x": x}, parameters), results(gm, {"x": x}, parameters), SAME)


def test_strict_needs_a_layer_or_a_call_of_the_operator() -> None:
    x = torch.randn(3, 16)
    with torch.no_grad():
        called = torch.export.export(MGLU(16, 12), (x,)).module()
    assert mglu_ops.fuse(called, strict=True)(x).shape == (3, 12)
    with pytest.raises(FusionError, match="nothing was fused"):
        mglu_ops.fuse(torch.fx.symbolic_trace(nn.Linear(16, 12)), [x], strict=True)


def test_inputs_that_are_missing_or_do_not_fit_are_errors() -> None:
    gm, x = torch.fx.symbolic_trace(Plain()), torch.randn(3, 16)
    for given, message in (
        (None, "recorded none"),
        ([], "got 0, must be 1"),
        ([x, x], "got 2, must be 1"),
        ([x[:, :5]], r"example_inputs: the module does not take float32 \[3, 5\]: "),
        ([None], "the module does not take None"),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            mglu_ops.fuse(gm, given)
        assert "\n" not in str(caught.value)
    with pytest.raises(TypeError, match="example_inputs: got int, must be a list or a tuple"):
        mglu_ops.fuse(gm, 3)
    with pytest.raises(TypeError, match=r"gm: got Linear, must be a torch\.fx\.GraphModule"):
        mglu_ops.fuse(nn.Linear(3, 3))


def test_an_error_in_the_graph_restores_the_grad_mode() -> None:
    graph = Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    graph.call_function(torch._C._set_grad_enabled, (False,))
    product = graph.call_function(torch.mm, (x, y))
    graph.call_function(torch._C._set_grad_enabled, (True,))
    graph.output(product)
    with pytest.raises(ValueError, match="the module does not take float32"):
        mglu_ops.fuse(GraphModule(nn.Module(), graph), [torch.randn(3, 4), torch.randn(5, 6)])
    assert torch.is_grad_enabled()
