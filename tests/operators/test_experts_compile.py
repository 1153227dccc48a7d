"""The operators over experts in graphs: opcheck, torch.compile with several routings, and export."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from tests.support.families import family, quick_only_for
from tests.support.layers import DTYPES, ROUTINGS, make_down, make_experts, sorted_rows

mglu = torch.ops.mglu
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def opcheck(op: str, *args: object) -> None:
    report = torch.library.opcheck(getattr(mglu, op).default, args, test_utils=CHECKS)
    assert report == dict.fromkeys(CHECKS, "SUCCESS")


def leaf(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else torch.nan_to_num(tensor).requires_grad_()


@pytest.mark.parametrize(
    ("dtype", "weighted", "routing", "index_dtype"),
    family(DTYPES, [False, True], ROUTINGS, [torch.int32, torch.int64], most=2, one_in=3),
)
def test_opcheck(dtype: torch.dtype, weighted: bool, routing: str, index_dtype: torch.dtype) -> None:
    layer = make_experts(routing=routing, dtype=dtype, weighted=weighted, index_dtype=index_dtype)
    given, (rows, _) = layer.given, sorted_rows(layer)
    logits, masks = torch.where(layer.masks, 0.5, -0.5).requires_grad_(), given.packed_masks
    opcheck("experts_forward", leaf(given.x), given.weight, masks, given.routing, "gelu", leaf(given.mask_weights))
    x, weight, weights = leaf(rows.x), leaf(given.weight), leaf(rows.mask_weights)
    opcheck("grouped_forward", x, weight, masks, rows.offs, "gelu", weights)
    opcheck("grouped_forward_ste", x, weight, logits, rows.offs, "gelu", weights)
    opcheck("pack_expert_logits", logits)
    y, down, ids, expert_weights, *_ = make_down(layer)
    opcheck("experts_down", leaf(y), leaf(down), ids, leaf(expert_weights))


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("needs", quick_only_for([[True, True]], [[True, True], [True, False], [False, False]]))
@pytest.mark.parametrize("logits_dtype", [None, torch.float32])
def test_opcheck_below_autograd(weighted: bool, needs: list[bool], logits_dtype: torch.dtype | None) -> None:
    layer = make_experts(weighted=weighted)
    given, _ = sorted_rows(layer)
    args = (given.x, given.weight, given.packed_masks, given.offs)
    if logits_dtype is None and all(needs):
        opcheck("grouped_forward_train", *args, "silu", given.mask_weights)
    result, partials = mglu.grouped_forward_train(*args, "silu", given.mask_weights)
    weights_dtype = torch.float32 if weighted else None
    opcheck("grouped_backward", result, *args, partials, needs, logits_dtype, weights_dtype)
    if logits_dtype is None:
        y, down, ids, expert_weights, *_ = make_down(layer)
        opcheck("experts_down_backward", torch.ones(6, 24), y, down, ids, expert_weights, [*needs, weighted])


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


def tensors(tokens: int) -> dict[str, Tensor]:
    layer = make_experts(tokens, seed=tokens)
    generator = torch.Generator().manual_seed(tokens)
    return {
        "x": layer.given.x,
        "weight": layer.given.weight,
        "masks": layer.given.packed_masks,
        "down": torch.randn(4, 24, 10, generator=generator),
        "router": torch.randn(4, 24, generator=generator),
    }


@pytest.mark.parametrize("backend", quick_only_for(["aot_eager"], ["aot_eager", "inductor"]))
def test_one_graph_serves_all_loads_and_numbers_of_tokens(backend: str) -> None:
    counter = CompileCounterWithBackend(backend)
    compiled = torch.compile(whole_layer, backend=counter, fullgraph=True, dynamic=True)
    for tokens in (9, 2, 300):
        given = tensors(tokens)
        torch.testing.assert_close(compiled(**given), whole_layer(**given))
    assert counter.frame_count == 1


def test_a_compiled_training_step_has_the_gradients_of_eager_mode() -> None:
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(trained_layer, backend=counter, fullgraph=True, dynamic=True)
    for routing in ROUTINGS:
        layer = make_experts(9, routing=routing)
        given, _ = sorted_rows(layer)
        args = given.x, given.weight, torch.where(layer.masks, 0.5, -0.5), given.offs
        torch.testing.assert_close(with_gradients(compiled, *args), with_gradients(trained_layer, *args))
    assert counter.frame_count == 1


def test_an_exported_layer_takes_any_number_of_tokens() -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: Tensor, weight: Tensor, masks: Tensor, down: Tensor, router: Tensor) -> Tensor:
            return whole_layer(x, weight, masks, down, router)

    shapes = {name: {0: torch.export.Dim("tokens")} if name == "x" else None for name in tensors(9)}
    program = torch.export.export(Layer(), (), tensors(9), dynamic_shapes=shapes)
    for tokens in (2, 33):
        given = tensors(tokens)
        torch.testing.assert_close(program.module()(**given), whole_layer(**given))
