"""Layers whose activations are recomputed, by `save_activations=False` or by `torch.utils.checkpoint`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import mglu_ops
from mglu_ops import dispatch
from mglu_ops.nn import MGLU, GeMGLU, MGLUExperts, MGLUFeedForward, NaiveMGLU, ReMGLU, SwiMGLU, freeze
from tests.support.budgets import assert_matches
from tests.support.families import quick_only_for

mglu, aten = torch.ops.mglu, torch.ops.aten
each_kind_of_masks = pytest.mark.parametrize(
    "options", [{}, {"top_k": 2}, {"learnable_masks": False}], ids=["learned", "routed", "fixed"]
)
BACKENDS = [None, "aot_eager", "inductor"]


def compiled(module: Callable[..., Any], backend: str | None) -> Any:
    torch._dynamo.reset()
    return module if backend is None else torch.compile(module, backend=backend, fullgraph=True)


def gradients(
    forward: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, autocast: bool = False
) -> dict[str, Tensor]:
    """The result, and the gradients of x and all parameters. The loss is a linear function of the result."""
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        result = forward(x)
    result.backward(torch.linspace(-1, 1, result.numel(), dtype=result.dtype).view(result.shape))
    named = {name: parameter.grad for name, parameter in module.named_parameters()}
    return {"result": result.detach(), "x": x.grad, **named}


def assert_equal(found: dict[str, Tensor], want: dict[str, Tensor]) -> None:
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A list that gets an entry whenever a backend runs the forward pass that saves activations."""
    found: list[str] = []
    run = dispatch.train

    def counted(*args: Any) -> Any:
        found.append("train")
        return run(*args)

    monkeypatch.setattr(dispatch, "train", counted)
    return found


def saved_bytes(forward: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """The bytes that a forward pass saves for its backward pass, without parameters. Each storage counts once."""
    kept: dict[int, int] = {}

    def remember(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(remember, lambda tensor: tensor):
        forward(x)
    return sum(kept.values())


@pytest.mark.parametrize("backend", quick_only_for([None], BACKENDS))
@each_kind_of_masks
@pytest.mark.parametrize("dtype", [torch.float32, "autocast", pytest.param(torch.bfloat16, marks=pytest.mark.long)])
def test_recomputing_runs_forward_twice_and_gives_the_same_bits(runs, backend, options, dtype) -> None:
    autocast = dtype == "autocast"
    dtype = torch.float32 if autocast else dtype
    layer = MGLU(33, 20, n_masks=3, dtype=dtype, **options)
    x = torch.randn(2, 7, 33, dtype=dtype)
    found = {}
    for save in (True, False):
        layer.save_activations = save
        forward = compiled(layer, backend)
        gradients(forward, layer, x, autocast)
        runs.clear()
        found[save] = gradients(forward, layer, x, autocast)
        assert found[save]["result"].dtype is (torch.bfloat16 if autocast else dtype)
        assert len(runs) == (1 if save else 2)
    assert_equal(found[False], found[True])


@each_kind_of_masks
def test_recomputing_layers_have_gradients_of_torch_func(options: dict[str, Any]) -> None:
    layer, x = MGLU(16, 12, n_masks=3, save_activations=False, **options), torch.randn(2, 5, 16)
    expected = gradients(layer, layer, x)
    parameters = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    grad_output = torch.linspace(-1, 1, 120).view(2, 5, 12)

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return (torch.func.functional_call(layer, parameters, (x,)) * grad_output).sum()

    of_parameters, of_x = torch.func.grad(loss, argnums=(0, 1))(parameters, x)
    del expected["result"]
    torch.testing.assert_close({"x": of_x, **of_parameters}, expected)


def test_recomputing_keeps_no_activations() -> None:
    """A layer that saves activations keeps at least n_masks + 1 tensors of the result's size.

    A layer that recomputes them keeps only x and the tensors of the router.
    """
    x = torch.randn(40, 16)
    for top_k in (None, 2):
        saving, recomputing = (MGLU(16, 64, n_masks=3, top_k=top_k, save_activations=save) for save in (True, False))
        activations = 4 * 40 * 64 * 4
        assert saved_bytes(saving, x.clone()) > activations
        assert saved_bytes(recomputing, x.clone()) < activations / 4


@pytest.mark.parametrize("weight_learns", [True, False])
def test_recomputing_experts_with_fixed_masks_keep_no_activations(weight_learns: bool) -> None:
    ids = torch.randint(2, (40, 2), generator=torch.Generator().manual_seed(0))
    kept, activations = {}, 2 * 2 * 40 * 64 * 4  # n_masks + 1 tensors of 80 rows
    for save in (True, False):
        layer = MGLUExperts(2, 16, 64, learnable_masks=False, save_activations=save)
        layer.weight.requires_grad_(weight_learns)
        x = torch.randn(40, 16).requires_grad_()
        kept[save] = saved_bytes(lambda x, layer=layer: layer(x, ids), x)  # type: ignore[misc] # mypy cannot infer it
    assert kept[True] > activations
    assert kept[False] < activations / 4


@pytest.mark.parametrize("changed", ["functional_call", "parametrization"])
@pytest.mark.parametrize("experts", [False, True])
def test_recomputing_reads_the_tensors_that_forward_has_read(experts: bool, changed: str) -> None:
    """Backward runs when the module holds other tensors again, or a parametrization would compute others."""
    gradients = []
    for save in (True, False):
        torch.manual_seed(0)
        layer = MGLUExperts(2, 8, 16, save_activations=save) if experts else MGLU(8, 16, save_activations=save)
        args = (torch.randn(3, 8), torch.tensor([[0], [1], [1]])) if experts else (torch.randn(3, 8),)
        if changed == "parametrization":
            torch.nn.utils.parametrize.register_parametrization(layer, "mask_logits", torch.nn.Dropout(0.5))
        given = {name: torch.randn_like(of).requires_grad_() for name, of in layer.named_parameters()}
        torch.func.functional_call(layer, given, args).square().sum().backward()
        gradients.append([of.grad for of in given.values()])
    for saved, recomputed in zip(*gradients, strict=True):
        assert saved is not None
        torch.testing.assert_close(saved, recomputed)


def test_recomputing_refuses_a_weight_that_was_written_to() -> None:
    layer = MGLU(8, 16, save_activations=False)
    loss = layer(torch.randn(3, 8)).sum()
    with torch.no_grad():
        layer.mask_logits.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_recomputing_without_gradients_runs_only_forward(runs: list[str]) -> None:
    layer, x = MGLU(16, 8, n_masks=2, save_activations=False), torch.randn(5, 16)
    with torch.no_grad():
        result = layer(x)
        layer.save_activations = True
        assert torch.equal(layer(x), result)
    assert not runs


def test_the_switch_is_passed_on_printed_and_not_in_the_state_dict() -> None:
    for kind in (MGLUFeedForward, SwiMGLU, GeMGLU, ReMGLU):
        assert kind(8, 8).mglu.save_activations is True
        assert kind(8, 8, save_activations=False).mglu.save_activations is False
    layer = MGLU(8, 8, save_activations=False)
    assert "save_activations=False" in repr(layer)
    assert set(layer.state_dict()) == {"weight", "mask_logits"}
    frozen = freeze(NaiveMGLU(8, 8))
    assert frozen.save_activations is True
    frozen.save_activations = False
    frozen(torch.randn(2, 8)).sum().backward()


def test_recomputing_layers_are_exported() -> None:
    layer = MGLU(16, 8, n_masks=2, save_activations=False)
    x = torch.randn(3, 16)
    program = torch.export.export(layer, (x,))
    assert mglu.forward_ste.default in {node.target for node in program.graph.nodes}
    assert_matches(program.module()(x), layer(x))


@pytest.mark.long
def test_a_recomputing_layer_beside_layers_that_are_fused() -> None:
    model = nn.Sequential(MGLU(16, 16, n_masks=2, save_activations=False), NaiveMGLU(16, 16, n_masks=2))
    x = torch.randn(5, 16)
    want = gradients(model, model, x)
    with mglu_ops.fusion(strict=True) as report:
        found = gradients(torch.compile(model, fullgraph=True), model, x)
    assert [site.operator for site in report.fused] == ["forward_ste"]
    for name, tensor in want.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-5, msg=name)


class Checkpointed(nn.Module):
    def __init__(self, block: nn.Module, **options: Any) -> None:
        super().__init__()
        self.block, self.options = block, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.block, x, **self.options)


@pytest.mark.parametrize("backend", quick_only_for([None, "aot_eager"], BACKENDS))
@pytest.mark.parametrize("save_activations", [True, False])
@each_kind_of_masks
def test_a_checkpoint_gives_the_same_bits(backend: str | None, save_activations: bool, options: dict[str, Any]) -> None:
    """A checkpoint around a block changes no bit, even if the layer in the block recomputes its activations too."""
    block = SwiMGLU(24, 40, n_masks=3, save_activations=save_activations, **options)
    x = torch.randn(2, 5, 24)
    want = gradients(compiled(block, backend), block, x)
    found = gradients(compiled(Checkpointed(block, use_reentrant=False), backend), block, x)
    assert_equal(found, want)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@each_kind_of_masks
def test_a_reentrant_checkpoint_gives_the_same_gradients(runs, dtype, options):
    """The result may be rounded differently: the first forward pass records no gradients, so it runs other kernels."""
    block = SwiMGLU(24, 40, n_masks=3, dtype=dtype, **options)
    x = torch.randn(2, 5, 24, dtype=dtype)
    want = gradients(block, block, x)
    runs.clear()
    found = gradients(Checkpointed(block, use_reentrant=True), block, x)
    assert len(runs) == 1
    assert_matches(found.pop("result"), want.pop("result"), dtype)
    assert_equal(found, want)


def save(*operators: Any) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in operators else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@pytest.mark.parametrize("backend", quick_only_for([None], BACKENDS))
@pytest.mark.parametrize(
    ("policy", "times", "learnable_masks"),
    [
        ([mglu.forward_train.default], 1, True),
        ([mglu.forward_train.default], 1, False),
        (save(mglu.forward_train.default, aten.mm.default), 1, True),
        # With gradients, forward_ste runs as pack_logits and forward_train, so naming forward_ste saves nothing.
        ([mglu.forward_ste.default], 2, True),
        (save(aten.mm.default), 2, True),
    ],
)
def test_policies_save_what_they_name(runs, backend, policy, times, learnable_masks):
    block = SwiMGLU(24, 40, n_masks=2, learnable_masks=learnable_masks)
    x = torch.randn(5, 24)
    want = gradients(compiled(block, backend), block, x)
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    forward = compiled(Checkpointed(block, use_reentrant=False, context_fn=contexts), backend)
    forward(x)
    runs.clear()
    found = gradients(forward, block, x)
    assert len(runs) == times
    assert_equal(found, want)
