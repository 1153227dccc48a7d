"""The operators in graphs: opcheck, torch.compile, export, fake and meta tensors, and data-dependent sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.decorators import mark_unbacked
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch.partitioners import default_partition, min_cut_rematerialization_partition
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental import _config as symbolic_config

from tests.support import layers as s
from tests.support.budgets import assert_matches
from tests.support.families import family, quick_cases, quick_only_for
from tests.support.layers import (
    DTYPES,
    LOADS,
    OPS,
    OPS_OF_EXPERTS,
    Layer,
    arguments_of,
    leaf,
    make_down,
    make_layer,
    routing_of,
)

mglu = torch.ops.mglu


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


def opcheck(op: str, *args: object) -> None:
    report = torch.library.opcheck(getattr(mglu, op).default, args, test_utils=CHECKS)
    assert report == dict.fromkeys(CHECKS, "SUCCESS")


@pytest.mark.parametrize("dtype", quick_only_for([torch.bool], [torch.bool, torch.uint8, torch.int64, *DTYPES]))
@pytest.mark.parametrize("shape", [(3, 5, 12), (4, 8)])
def test_opcheck_packing(shape, dtype):
    masks = (torch.rand(shape) < 0.5).to(dtype)
    opcheck("pack_masks", masks)
    opcheck("unpack_masks", mglu.pack_masks(masks), shape[-1])


@pytest.mark.parametrize("dtype", quick_only_for([torch.float32], DTYPES))
def test_opcheck_packing_of_logits(dtype):
    opcheck("pack_logits", torch.randn(3, 5, 12, dtype=dtype))
    opcheck("pack_logits", torch.randn(3, 5, 12, dtype=dtype, requires_grad=True))


@pytest.mark.parametrize("leading", quick_only_for([(2, 3)], [(5,), (2, 3), ()]))
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", quick_only_for([torch.float32], DTYPES))
def test_opcheck_layer(dtype, weighted, leading):
    layer = make_layer(leading, in_features=12, out_features=6, dtype=dtype, weighted=weighted)
    x, weight, mask_weight = leaf(layer.x), leaf(layer.weight), leaf(layer.mask_weights)
    opcheck("forward", x, weight, layer.packed_masks, "gelu", mask_weight)
    opcheck("forward_ste", x, weight, leaf(layer.logits), "gelu", mask_weight)


@pytest.mark.parametrize(
    ("dtype", "weighted", "loads", "index_dtype"),
    family(DTYPES, [False, True], LOADS, [torch.int32, torch.int64], most=2, one_in=3),
)
def test_opcheck_experts(dtype: torch.dtype, weighted: bool, loads: str, index_dtype: torch.dtype) -> None:
    layer = make_layer((6,), routing="ids", loads=loads, dtype=dtype, weighted=weighted, index_dtype=index_dtype)
    rows, masks = layer.sorted_by_expert()[0], layer.packed_masks
    opcheck("experts_forward", leaf(layer.x), layer.weight, masks, layer.expert_ids, "gelu", leaf(layer.mask_weights))
    x, weight, weights = leaf(rows.x), leaf(layer.weight), leaf(rows.mask_weights)
    opcheck("grouped_forward", x, weight, masks, rows.offs, "gelu", weights)
    opcheck("grouped_forward_ste", x, weight, leaf(layer.logits), rows.offs, "gelu", weights)
    opcheck("pack_expert_logits", leaf(layer.logits))
    y, down, ids, expert_weights, *_ = make_down(layer)
    opcheck("experts_down", leaf(y), leaf(down), ids, leaf(expert_weights))


@pytest.mark.parametrize("needs", quick_only_for([[True, True]], [[True, True], [True, False], [False, False]]))
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(
    ("routing", "dtype"),
    quick_cases(
        [(None, torch.float32), ("offs", torch.float32)],
        [*((None, dtype) for dtype in DTYPES), ("offs", torch.float32)],
    ),
)
def test_opcheck_below_autograd(routing, dtype, weighted, logits_dtype, needs):
    layer = make_layer((5,), 12, 6, routing=routing, dtype=dtype, weighted=weighted)
    prefix, offs = ("", ()) if routing is None else ("grouped_", (layer.offs,))
    args = (layer.x, layer.weight, layer.packed_masks, *offs)
    if logits_dtype is None and all(needs):
        opcheck(f"{prefix}forward_train", *args, "silu", layer.mask_weights)
    result, partials = layer.result_of("forward_train")
    opcheck(f"{prefix}backward", result, *args, partials, needs, logits_dtype, dtype if weighted else None)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("needs", quick_only_for([[True, True]], [[True, True], [True, False], [False, False]]))
def test_opcheck_gradients_of_experts_down(weighted: bool, needs: list[bool]) -> None:
    y, down, ids, expert_weights, *_ = make_down(make_layer((6,), routing="ids"))
    opcheck("experts_down_backward", torch.ones(6, 24), y, down, ids, expert_weights, [*needs, weighted])


def function_of(name: str, layer: Layer) -> Callable[..., Tensor]:
    """A function `(x, weight, mask_weight) -> y` that calls an operator, or a linear layer to compare with."""
    logits, packed = layer.logits, layer.packed_masks
    if name == "linear":
        return lambda x, weight, mask_weight=None: F.linear(x, weight).relu()
    if name == "forward":
        return lambda x, weight, mask_weight=None: mglu.forward(x, weight, packed, "silu", mask_weight)
    return lambda x, weight, mask_weight=None: mglu.forward_ste(x, weight, logits, "silu", mask_weight)[0]


def frames(
    name: str,
    sizes: tuple[int, ...],
    *,
    backend: str = "aot_eager",
    training: bool = False,
    weighted: bool = False,
    prepare: Callable[[Tensor], None] = lambda x: None,
) -> list[int]:
    """Compile a function with dynamic=True, call it once per size, and return the number of graphs after each call.

    Each call's result and gradients are compared with eager mode.
    """
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    function = function_of(name, make_layer())
    compiled = torch.compile(function, backend=counter, fullgraph=True, dynamic=True)
    counts = []
    for tokens in sizes:
        layer = make_layer((tokens,), weighted=weighted, seed=tokens)
        args = [tensor for tensor in (layer.x, layer.weight, layer.mask_weights) if tensor is not None]
        eager_args = [tensor.clone().requires_grad_(training) for tensor in args]
        args = [tensor.clone().requires_grad_(training) for tensor in args]
        for tensor in (args[0], *args[2:]):
            prepare(tensor)
        result, expected = compiled(*args), function(*eager_args)
        torch.testing.assert_close(result, expected)
        if training:
            result.square().sum().backward()
            expected.square().sum().backward()
            for got, want in zip(args, eager_args, strict=True):
                torch.testing.assert_close(got.grad, want.grad)
        counts.append(counter.frame_count)
    return counts


LAYERS = ("forward", "forward_ste")
ORDERS = ((1, 2, 1000, 0, 8), (8, 1, 1000, 0, 2))


@pytest.mark.parametrize("order", quick_only_for(ORDERS[:1], ORDERS), ids=["from-1", "from-8"])
@pytest.mark.parametrize("training", quick_only_for([True], [False, True]), ids=["inference", "training"])
def test_an_operator_compiles_as_many_graphs_as_a_linear_layer(training, order):
    """With dynamic=True, torch compiles any function three times: for 0 tokens, 1 token, and all other numbers."""
    linear = frames("linear", order, training=training)
    assert linear[-1] == 3
    for name in LAYERS:
        assert frames(name, order, training=training) == linear


@pytest.mark.parametrize(
    ("backend", "name", "training", "weighted", "how"),
    [
        *(("aot_eager", name, False, False, "unbacked") for name in LAYERS),
        *(("inductor", name, True, True, "unbacked") for name in LAYERS),
        *(("aot_eager", name, training, True, "oblivious") for name in LAYERS for training in (False, True)),
    ],
)
def test_one_graph_serves_every_number_of_tokens_if_torch_does_not_specialise(backend, name, training, weighted, how):
    """`mark_unbacked` and `backed_size_oblivious` ask torch not to specialise for 0 and 1 tokens.

    The operators must not add guards that specialise. With `backed_size_oblivious`, Inductor of torch 2.13 sometimes
    adds guards itself, even for a linear layer.
    """
    prepare = (lambda x: mark_unbacked(x, 0)) if how == "unbacked" else (lambda x: None)
    for order in ORDERS:
        with symbolic_config.patch(backed_size_oblivious=how == "oblivious"):
            counts = frames(name, order, training=training, weighted=weighted, backend=backend, prepare=prepare)
        assert counts == [1] * len(order)


def test_data_dependent_sizes_compile_in_one_graph():
    layer = make_layer((9,), weighted=True)

    @torch.compile(backend="aot_eager", fullgraph=True)
    def selected(x: Tensor, mask_weight: Tensor, keep: Tensor) -> Tensor:
        rows = keep.nonzero().squeeze(1)
        return mglu.forward(x[rows], layer.weight, layer.packed_masks, "silu", mask_weight[rows])

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for count in (4, 1, 0, 9):
            keep = torch.arange(9) < count
            torch.testing.assert_close(selected(layer.x, layer.mask_weights, keep), layer.forward()[:count])


@pytest.mark.parametrize(
    ("dtype", "backend"),
    quick_cases(  # the tests above already compile both operators with Inductor
        [(torch.bfloat16, "aot_eager")],
        [*((dtype, "aot_eager") for dtype in DTYPES), (torch.float32, "inductor"), (torch.bfloat16, "inductor")],
    ),
)
def test_compiled_results_and_gradients_equal_eager_ones(dtype, backend):
    layer = make_layer((3, 4), 19, 7, 5, dtype=dtype, weighted=True, activation="gelu_tanh")

    def step(x: Tensor, weight: Tensor, logits: Tensor, mask_weight: Tensor) -> tuple[Tensor, Tensor]:
        result, packed = mglu.forward_ste(x * 2, weight, logits, "gelu_tanh", mask_weight.softmax(-1))
        return result + 1, mglu.unpack_masks(packed, 19)

    args = [leaf(tensor) for tensor in (layer.x, layer.weight, layer.logits, layer.mask_weights)]
    eager_args = [leaf(tensor) for tensor in args]
    result, masks = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)(*args)
    expected, _ = step(*eager_args)
    assert torch.equal(masks, layer.masks)
    assert_matches(result, expected, dtype)
    result.sum().backward()
    expected.sum().backward()
    for got, want in zip(args, eager_args, strict=True):
        assert_matches(got.grad, want.grad, max(dtype, got.dtype, key=lambda dtype: torch.finfo(dtype).eps))


@pytest.mark.parametrize("layout", s.LAYOUTS[1:])
def test_compiled_functions_take_any_strides(layout):
    layer = make_layer()
    compiled = torch.compile(lambda x, w, p: mglu.forward(x, w, p), backend="aot_eager", fullgraph=True)
    args = [s.laid_out(tensor, layout) for tensor in (layer.x, layer.weight, layer.packed_masks)]
    torch.testing.assert_close(compiled(*args), mglu.forward(*args))


def test_compiled_autocast_equals_eager_autocast():
    layer = make_layer((16,), 64, 32, weighted=True)
    args = [leaf(tensor) for tensor in (layer.x, layer.weight, layer.logits)]

    def function(x: Tensor, weight: Tensor, logits: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return mglu.forward_ste(x, weight, logits, "silu", layer.mask_weights)[0]

    result = torch.compile(function, backend="aot_eager", fullgraph=True)(*args)
    assert result.dtype is torch.bfloat16
    assert torch.equal(result, function(*args))
    grads = torch.autograd.grad(result.float().sum(), args)
    expected = torch.autograd.grad(function(*args).float().sum(), args)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("partition", [default_partition, min_cut_rematerialization_partition])
def test_a_graph_holds_one_node_for_each_operator_call(partition):
    """In training, the nodes are forward_train and backward, for any number of masks. Nothing is recomputed."""
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    layer = make_layer(n_masks=16)
    weight = leaf(layer.weight)
    compiled = torch.compile(
        lambda w: mglu.forward(layer.x, w, layer.packed_masks),
        backend=aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=partition),
        fullgraph=True,
    )
    compiled(weight).sum().backward()
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes if node.op == "call_function"]
    assert [target for target in targets if target.startswith("mglu.")] == [
        "mglu.forward_train.default",
        "mglu.backward.default",
    ]
    assert not [target for target in targets if "mm" in target or "where" in target]


@pytest.mark.parametrize("transform", ["grad", "vmap", "vmap-grad"])
def test_functions_transformed_by_torch_func_compile(transform):
    layer = make_layer(dtype=torch.float64)

    def loss(weight: Tensor, x: Tensor) -> Tensor:
        return mglu.forward(x, weight, layer.packed_masks).sum()

    transformed = {
        "grad": torch.func.grad(loss),
        "vmap": torch.vmap(loss, (None, 0)),
        "vmap-grad": torch.vmap(torch.func.grad(loss), (None, 0)),
    }[transform]
    compiled = torch.compile(lambda w, x: transformed(w, x), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(layer.weight, layer.x), transformed(layer.weight, layer.x))
    if transform != "vmap":  # torch.compile traces the derivative of results that require a gradient
        advice = r"call that code under torch\.no_grad\(\)"
        if torch.__version__ < "2.12":  # torch 2.11 fails before it calls the operator
            advice = "anomaly metadata"
        with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match=advice):
            compiled(leaf(layer.weight), layer.x)
        with torch.no_grad():
            found = compiled(leaf(layer.weight), layer.x)
        torch.testing.assert_close(found, transformed(layer.weight, layer.x))


@pytest.mark.parametrize("leading", [(5,), (), (0,), (2, 3)])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_and_meta_results_have_the_shape_strides_and_dtype_of_real_ones(dtype, weighted, leading):
    for op in OPS + OPS_OF_EXPERTS:
        routing = routing_of(op)
        if routing is not None and len(leading) != 1:
            continue
        args = arguments_of(op, make_layer(leading, 13, routing=routing, weighted=weighted, dtype=dtype))

        def described(convert: Callable[[Tensor], Tensor], op: str = op, args: dict[str, Any] = args) -> list[Any]:
            results = getattr(mglu, op)(**{k: convert(v) if isinstance(v, Tensor) else v for k, v in args.items()})
            results = results if isinstance(results, tuple) else (results,)
            return [(result.shape, result.stride(), result.dtype) for result in results]

        real = described(lambda tensor: tensor)
        assert described(lambda tensor: tensor.to("meta")) == real, op
        with FakeTensorMode() as mode:
            assert described(mode.from_tensor) == real, op


def test_meta_tensors_get_gradients_of_the_right_shape():
    layer = make_layer(weighted=True)
    args = [leaf(t.to("meta")) for t in (layer.x, layer.weight, layer.logits, layer.mask_weights)]
    result, packed = mglu.forward_ste(args[0], args[1], args[2], "silu", args[3])
    assert packed.shape == (10, 3, 3)
    result.sum().backward()
    assert [arg.grad.shape for arg in args] == [arg.shape for arg in args]


# --- Layers of experts ------------------------------------------------------------------------------------------------


def whole_layer(x: Tensor, weight: Tensor, masks: Tensor, down: Tensor, router: Tensor) -> Tensor:
    """A mixture-of-experts layer in inference."""
    top = (x @ router.T).softmax(-1).topk(2)
    y = mglu.experts_forward(x, weight, masks, top.indices)
    return mglu.experts_down(y, down, top.indices, top.values)


def trained_layer(x: Tensor, weight: Tensor, logits: Tensor, offs: Tensor) -> Tensor:
    return mglu.grouped_forward_ste(x, weight, logits, offs, "gelu")[0]


def with_gradients(function: Callable[..., Tensor], *args: Tensor) -> tuple[Tensor, ...]:
    """The result, and the gradients of all arguments except the last."""
    leaves = [leaf(one) for one in args[:-1]]
    y = function(*leaves, args[-1])
    return y, *torch.autograd.grad(y.square().sum(), leaves)


def tensors_of_layer(tokens: int) -> dict[str, Tensor]:
    layer = make_layer((tokens,), routing="ids", seed=tokens)
    generator = torch.Generator().manual_seed(tokens)
    return {
        "x": layer.x,
        "weight": layer.weight,
        "masks": layer.packed_masks,
        "down": torch.randn(4, 24, 10, generator=generator),
        "router": torch.randn(4, 24, generator=generator),
    }


@pytest.mark.parametrize("backend", quick_only_for(["aot_eager"], ["aot_eager", "inductor"]))
def test_one_graph_serves_all_loads_and_numbers_of_tokens(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(whole_layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (9, 2, 300):
        given = tensors_of_layer(tokens)
        torch.testing.assert_close(compiled(**given), whole_layer(**given))
    assert counter.frame_count == 1


def test_a_compiled_training_step_has_the_gradients_of_eager_mode() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(trained_layer, backend=counter, fullgraph=True, dynamic=True)
    for loads in LOADS:
        layer = make_layer((9,), routing="offs", loads=loads)
        args = layer.x, layer.weight, layer.logits, layer.offs
        torch.testing.assert_close(with_gradients(compiled, *args), with_gradients(trained_layer, *args))
    assert counter.frame_count == 1


def test_an_exported_layer_takes_any_number_of_tokens() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, masks: Tensor, down: Tensor, router: Tensor) -> Tensor:
            return whole_layer(x, weight, masks, down, router)

    shapes = {name: {0: torch.export.Dim("tokens")} if name == "x" else None for name in tensors_of_layer(9)}
    program = torch.export.export(Layer(), (), tensors_of_layer(9), dynamic_shapes=shapes)
    for tokens in (2, 33):
        given = tensors_of_layer(tokens)
        torch.testing.assert_close(program.module()(**given), whole_layer(**given))
