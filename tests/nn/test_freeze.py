"""`freeze` turns learned masks into packed bits. Layers load packed masks, and refuse those that do not fit."""

from __future__ import annotations

import copy
import io
import warnings

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from mglu_ops.nn import GLU, MGLU, NaiveMGLU, SwiMGLU, freeze
from tests.support.budgets import assert_matches
from tests.support.layers import DTYPES

MASKED = [MGLU, NaiveMGLU]
each_kind = pytest.mark.parametrize("kind", MASKED)


def state_keys(module: nn.Module) -> set[str]:
    return set(module.state_dict())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("top_k", [None, 2])
def test_frozen_mglu_is_bit_equal(dtype, top_k):
    layer = MGLU(45, 16, n_masks=3, top_k=top_k, dtype=dtype)
    with torch.no_grad():
        edges = [0.0, -0.0, torch.nan, torch.inf, -torch.inf, 1e-7, -1e-7]
        layer.mask_logits[0, 0, : len(edges)] = torch.tensor(edges)
    x = torch.randn(2, 7, 45, dtype=dtype)
    logits, with_grad = layer.mask_logits.detach().clone(), layer(x).detach()
    with torch.no_grad():
        without_grad = layer(x)
    assert freeze(layer) is layer
    assert layer.mask_logits is None
    assert not layer.learnable_masks
    assert torch.equal(layer(x), with_grad)
    with torch.no_grad():
        assert torch.equal(layer(x), without_grad)
    assert torch.equal(torch.ops.mglu.unpack_masks(layer.packed_masks, 45), logits > 0)
    assert state_keys(layer) == {"weight", "packed_masks"} | ({"router.weight"} if top_k else set())


@pytest.mark.parametrize("learnable_masks", [True, False], ids=["learned", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_freezing_a_naive_layer_gives_an_mglu(learnable_masks, dtype):
    layer = NaiveMGLU(45, 16, n_masks=3, top_k=2, learnable_masks=learnable_masks, dtype=dtype).eval()
    weight, router, x = layer.weight, layer.router, torch.randn(7, 45, dtype=dtype)
    before = layer(x)
    frozen = freeze(layer)
    assert type(frozen) is MGLU
    assert frozen.weight is weight
    assert frozen.router is router
    assert not frozen.training
    assert_matches(frozen(x), before, dtype)
    assert "mask_logits" not in state_keys(frozen)


@each_kind
def test_freezing_twice_changes_nothing(kind):
    layer = freeze(kind(12, 8, n_masks=2))
    packed = layer.packed_masks
    assert freeze(layer) is layer
    assert layer.packed_masks is packed


def test_a_model_with_nothing_to_freeze_is_returned_with_a_warning():
    model = nn.Sequential(nn.Linear(4, 4), GLU(4, 4))
    keys = state_keys(model)
    words = "freeze: Sequential has no MGLU or NaiveMGLU, so no masks were packed"
    with pytest.warns(UserWarning, match=words) as caught:
        assert freeze(model) is model
    assert [warning.filename for warning in caught] == [__file__]
    assert state_keys(model) == keys


@each_kind
def test_pruned_logits_are_packed_by_their_current_value(kind):
    layer, x = kind(12, 8, n_masks=2), torch.randn(3, 12)
    prune.custom_from_mask(layer, "mask_logits", torch.arange(192).view(2, 8, 12) % 3)
    with torch.no_grad():
        layer.mask_logits_orig.neg_()  # the attribute `mask_logits` is updated at the next forward
    kept = (layer.mask_logits_orig > 0) & (torch.arange(192).view(2, 8, 12) % 3 > 0)
    freeze(layer)
    assert torch.equal(torch.ops.mglu.unpack_masks(layer.packed_masks, 12), kept)
    assert state_keys(layer) == {"weight", "packed_masks"}
    layer(x)
    assert layer.mask_logits is None


def test_freeze_refuses_what_is_not_a_module():
    for wrong in (lambda x: x, {"a": torch.ones(1)}, None):
        with pytest.raises(TypeError, match=f"model: got {type(wrong).__name__}, must be a torch.nn.Module"):
            freeze(wrong)


class Tree(nn.Module):
    """A layer with two names, layers that share a weight, and layers in a list, a dict and a feed-forward block."""

    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.first = kind(16, 16, n_masks=2)
        self.again = self.first
        self.tied = kind(16, 16, n_masks=3, learnable_masks=False)
        self.tied.weight = self.first.weight
        self.blocks = nn.ModuleList([SwiMGLU(16, 24, n_masks=2), nn.ModuleDict({"inner": kind(16, 16)})])
        self.glu = GLU(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        x = self.again(self.first(x)) + self.tied(x)
        return self.glu(self.blocks[1]["inner"](self.blocks[0](x)))


@each_kind
def test_every_layer_of_a_tree_is_frozen_and_shared_weights_stay_shared(kind):
    model = Tree(kind).double()
    x = torch.randn(5, 16, dtype=torch.float64)
    before = model(x)
    freeze(model)
    assert not any("mask_logits" in key for key in state_keys(model))
    assert not any(isinstance(module, NaiveMGLU) for module in model.modules())
    assert model.again is model.first
    assert model.tied.weight is model.first.weight
    assert torch.equal(model.first.packed_masks, model.again.packed_masks)
    torch.testing.assert_close(model(x), before, rtol=1e-12, atol=1e-14)
    if kind is MGLU:
        assert torch.equal(model(x), before)


def test_shared_logits_become_shared_masks():
    first, second, other = (MGLU(16, 8, n_masks=2) for _ in range(3))
    second.mask_logits = first.mask_logits
    freeze(nn.ModuleList([first, second, other]))
    assert second.packed_masks is first.packed_masks
    assert not torch.equal(other.packed_masks, first.packed_masks)


@each_kind
def test_hooks_and_requires_grad_are_kept(kind):
    layer = kind(12, 8, n_masks=2)
    layer.weight.requires_grad_(False)
    calls = []
    layer.register_forward_hook(lambda module, args, result: calls.append(result.shape))
    layer = freeze(layer)
    layer(torch.randn(3, 12))
    assert calls == [(3, 8)]
    assert [(name, parameter.requires_grad) for name, parameter in layer.named_parameters()] == [("weight", False)]


@each_kind
@pytest.mark.parametrize("in_place", [True, False], ids=["Module.compile", "torch.compile"])
def test_freeze_reaches_into_a_compiled_model(kind, in_place):
    layer = kind(21, 12, n_masks=2)
    options = {"backend": "aot_eager", "fullgraph": True}
    compiled = layer if in_place else torch.compile(layer, **options)
    if in_place:
        layer.compile(**options)
    x = torch.randn(5, 21)
    before = compiled(x)
    assert freeze(compiled) is compiled
    assert type(layer) is MGLU
    assert layer.packed_masks is not None
    assert_matches(compiled(x), before)
    # The compiled model runs the frozen layer, and not the old graph.
    layer.packed_masks.zero_()
    assert torch.equal(compiled(x), torch.zeros(5, 12))


@each_kind
@pytest.mark.parametrize("names", [("weight",), ("mask_logits",), ("weight", "mask_logits")], ids=str)
def test_parametrized_tensors_are_frozen_by_their_value(kind, names):
    layer = kind(20, 12, n_masks=2, dtype=torch.float64)
    for name in names:
        parametrize.register_parametrization(layer, name, nn.Softsign())
    original, x = copy.deepcopy(layer), torch.randn(5, 20, dtype=torch.float64)
    before = layer(x)
    freeze(layer)
    assert isinstance(layer, MGLU)
    assert not isinstance(layer, NaiveMGLU)
    assert parametrize.is_parametrized(layer) == ("weight" in names)
    assert not any("mask_logits" in key for key in state_keys(layer))
    torch.testing.assert_close(layer(x), before, rtol=1e-12, atol=1e-14)
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))
    assert torch.equal(original(x), before), "freezing touched a deepcopy made before"


class Biased(NaiveMGLU):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


class Scaled(MGLU):
    def forward(self, x: Tensor) -> Tensor:
        return 3 * super().forward(x)


@pytest.mark.parametrize("kind", [Biased, Scaled])
def test_a_subclass_keeps_its_class_and_one_of_the_naive_layer_causes_a_warning(kind):
    model = nn.Sequential(nn.Identity(), kind(12, 8, n_masks=2))
    x = torch.randn(3, 12)
    before = model(x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        freeze(model)
    assert type(model[1]) is kind
    assert state_keys(model) == {"1.weight", "1.packed_masks"}
    assert torch.equal(model(x), before)
    assert len(caught) == (kind is Biased)
    if caught:
        assert "1 is a Biased, a subclass of NaiveMGLU" in str(caught[0].message)
        assert caught[0].filename == __file__


def test_a_model_frozen_on_meta_loads_a_frozen_checkpoint():
    source = freeze(SwiMGLU(12, 20, n_masks=2))
    target = freeze(SwiMGLU(12, 20, n_masks=2, device="meta"))
    target.load_state_dict(source.state_dict(), assign=True)
    x = torch.randn(3, 12)
    assert torch.equal(target(x), source(x))


def through_torch(state: dict[str, Tensor], path) -> dict[str, Tensor]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_safetensors(state: dict[str, Tensor], path) -> dict[str, Tensor]:
    safetensors.torch.save_file(state, path / "model.safetensors")
    return safetensors.torch.load_file(path / "model.safetensors")


@pytest.mark.parametrize("through", [through_torch, through_safetensors])
@pytest.mark.parametrize("source_kind", MASKED)
@pytest.mark.parametrize("target_kind", MASKED)
@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
def test_checkpoints_load_into_naive_and_fused_layers(through, source_kind, target_kind, assign, tmp_path):
    for learnable_masks in (True, False):
        options = {"n_masks": 3, "learnable_masks": learnable_masks, "top_k": 2, "dtype": torch.float64}
        source, target = source_kind(21, 10, **options), target_kind(21, 10, **options)
        target.load_state_dict(through(source.state_dict(), tmp_path), assign=assign)
        for name, tensor in source.state_dict().items():
            assert torch.equal(target.state_dict()[name], tensor)
            assert target.state_dict()[name].dtype == tensor.dtype
        x = torch.randn(4, 21, dtype=torch.float64)
        assert_matches(target(x), source(x))


@each_kind
@pytest.mark.parametrize("strict", [True, False])
def test_frozen_checkpoint_into_a_learnable_layer_says_what_to_do(kind, strict):
    state = {f"0.{key}": value for key, value in freeze(MGLU(12, 8)).state_dict().items()}
    model = nn.Sequential(kind(12, 8))
    words = r"0\.packed_masks: the checkpoint holds packed masks.*learnable_masks=False.*freeze\(model\) before"
    with pytest.raises(RuntimeError, match=words) as raised:
        model.load_state_dict(state, strict=strict)
    assert "Missing" not in str(raised.value)
    assert "Unexpected" not in str(raised.value)
    # What the error advises works.
    x = torch.randn(3, 12)
    fixed = nn.Sequential(kind(12, 8, learnable_masks=False))
    fixed.load_state_dict(state)
    freeze(model).load_state_dict(state)
    assert_matches(fixed(x), model(x))


@pytest.mark.parametrize("strict", [True, False])
def test_learnable_checkpoint_into_a_frozen_layer_says_what_to_do(strict):
    source = MGLU(12, 8)
    words = r"mask_logits: the checkpoint holds logits.*learnable_masks=True, load, and then call mglu_ops\.freeze"
    with pytest.raises(RuntimeError, match=words) as raised:
        freeze(MGLU(12, 8)).load_state_dict(source.state_dict(), strict=strict)
    assert "Missing" not in str(raised.value)
    assert "Unexpected" not in str(raised.value)
    # What the error advises works.
    learnable, x = MGLU(12, 8), torch.randn(3, 12)
    learnable.load_state_dict(source.state_dict())
    assert torch.equal(freeze(learnable)(x), source(x))


def test_missing_masks_and_logits_of_another_shape_are_reported_as_usual():
    state = MGLU(12, 8).state_dict()
    del state["mask_logits"]
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "mask_logits"'):
        MGLU(12, 8).load_state_dict(state)
    with pytest.raises(RuntimeError, match=r'Missing key\(s\) in state_dict: "packed_masks"'):
        MGLU(12, 8, learnable_masks=False).load_state_dict(state)
    assert MGLU(12, 8).load_state_dict(state, strict=False).missing_keys == ["mask_logits"]
    with pytest.raises(RuntimeError, match=r"size mismatch for mask_logits.*\[2, 8, 12\].*\[3, 8, 12\]"):
        MGLU(12, 8, n_masks=3).load_state_dict(MGLU(12, 8, n_masks=2).state_dict())
