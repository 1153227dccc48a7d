"""Modules of experts that are frozen, quantized, loaded, copied, sharded, counted, or of the user's own class."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Shard

from mglu_ops.formats import FORMATS
from mglu_ops.masks import check_packed_masks
from mglu_ops.nn import (
    MGLU,
    MaskStatistics,
    MGLUExperts,
    MGLUExpertsFeedForward,
    NaiveMGLUExperts,
    check_masks,
    flip_ratio,
    freeze,
    gate_ratio,
    quantize,
)
from mglu_ops.parallel import ColwiseMGLU, shard_placement_fn
from tests.support.budgets import assert_matches
from tests.support.modules import KINDS, each_kind, layer_of, learned_or_fixed, pair, results

STORED = [name for name in FORMATS if name != "dense"]


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


# --- Freezing and quantizing ------------------------------------------------------------------------------------------


def test_freeze_packs_the_masks_of_each_expert_and_fuses_the_loop():
    x, ids = torch.randn(5, 21), torch.randint(-1, 4, (5, 3))
    fused, naive = pair(4, 21, 12, n_masks=3, top_k=2, activation="gelu")
    expected, weight, logits = fused(x, ids), naive.weight, naive.mask_logits
    for layer in (freeze(fused), freeze(naive)):
        assert type(layer) is MGLUExperts
        assert set(layer.state_dict()) == {"weight", "packed_masks", "router.weight"}
        for expert in range(4):
            assert torch.equal(layer.packed_masks[expert], torch.ops.mglu.pack_logits(logits[expert]))
        with torch.no_grad():
            assert_matches(layer(x, ids), expected)
    assert naive.weight is weight
    ablation = NaiveMGLUExperts(4, 21, 12, bias=True, mask_gate=False)
    nn.init.normal_(ablation.gate_bias)
    expected = ablation(x, ids)
    assert type(freeze(ablation)) is NaiveMGLUExperts
    torch.testing.assert_close(ablation(x, ids), expected)


@pytest.mark.parametrize("weight_format", STORED)
def test_each_expert_is_quantized_alone(weight_format):
    """Each quantized expert has the results and gradients of a quantized MGLU with the expert's weight and masks.

    A checkpoint of the quantized experts can be loaded into new experts.
    """
    options = {"n_masks": 2, "top_k": 1}
    layer = freeze(MGLUExperts(3, 132, 140, **options))
    expected = [quantize(layer_of(layer, expert), weight_format) for expert in range(3)]
    assert quantize(layer, weight_format) is layer
    x, ids, grad = torch.randn(5, 132), torch.tensor([2, 0, 1, 2, 5]), torch.randn(5, 1, 140)
    got = results(layer, x, ids[:, None], grad)
    assert not got["y"][4].any()
    for expert, one in enumerate(expected):
        for name in ("weight", "weight_scale", "packed_masks"):
            assert torch.equal(getattr(layer, name)[expert].view(torch.uint8), getattr(one, name).view(torch.uint8))
        rows = ids == expert
        mine = x[rows].requires_grad_()
        y = one(mine)
        torch.testing.assert_close(got["y"][rows, 0], y)
        torch.testing.assert_close(got["x"][rows], torch.autograd.grad(y, mine, grad[rows, 0])[0])
    with torch.no_grad():
        y = layer(x, ids[:, None])
        for other in (
            MGLUExperts(3, 132, 140, learnable_masks=False, weight_format=weight_format, device="meta", **options),
            MGLUExperts(3, 132, 140, learnable_masks=False, weight_format=weight_format, **options),
        ):
            other.load_state_dict(saved_and_loaded(layer.state_dict(), weights_only=True), assign=True)
            check_masks(other)
            assert torch.equal(other(x, ids[:, None]), y)
    assert layer.half().weight.dtype == FORMATS[weight_format].dtype
    assert layer(x.half(), ids[:, None]).dtype is torch.float16


def test_a_new_quantized_layer_starts_as_dense_ones_do():
    torch.manual_seed(0)
    dense = MGLUExperts(3, 256, 20, learnable_masks=False)
    torch.manual_seed(0)
    stored = MGLUExperts(3, 256, 20, learnable_masks=False, weight_format="fp8_block")
    assert torch.equal(stored.weight.view(torch.uint8), quantize(dense, "fp8_block").weight.view(torch.uint8))
    assert stored.weight_scale.shape == (3, 1, 2)


# --- State dicts and other ways in ------------------------------------------------------------------------------------


@learned_or_fixed
def test_state_dicts_load_both_ways_and_are_refused_in_the_wrong_form(learnable_masks):
    fused, naive = pair(3, 21, 10, n_masks=2, top_k=1, weight_init="leveled", learnable_masks=learnable_masks)
    x, ids = torch.randn(4, 21), torch.randint(3, (4, 2))
    for one, other in ((fused, naive), (naive, fused)):
        fresh = type(other)(3, 21, 10, n_masks=2, top_k=1, learnable_masks=learnable_masks)
        fresh.load_state_dict(saved_and_loaded(one.state_dict()))
        assert fresh.weight_init == "leveled"
        assert_matches(fresh(x, ids), one(x, ids).detach())
        wrong = type(other)(3, 21, 10, n_masks=2, top_k=1, learnable_masks=not learnable_masks)
        with pytest.raises(RuntimeError, match=r"the checkpoint holds (packed masks|logits), but this"):
            wrong.load_state_dict(one.state_dict())
    assert torch.equal(fused.state_dict()["weight"], naive.weight)


WRONG_MASKS = {
    "of one layer": (lambda p: p[0], r"got shape \[10, 3, 2\], must be \[num_experts, .*\] = \[3, 10, 3, 2\]"),
    "of two experts": (lambda p: p[:2], r"got shape \[2, 10, 3, 2\], must be .* = \[3, 10, 3, 2\]"),
    "of one mask": (lambda p: p[..., :1], r"got shape \[3, 10, 3, 1\], must be"),
    "int8": (lambda p: p.view(torch.int8), r"got dtype torch\.int8, must be torch\.uint8"),
    "padding": (lambda p: p | 0x80, "padding bits past in_features=21 are set"),
}


@each_kind
@pytest.mark.parametrize("name", WRONG_MASKS)
def test_wrong_packed_masks_are_refused_however_they_are_loaded(kind, name):
    change, message = WRONG_MASKS[name]
    layer = kind(3, 21, 10, n_masks=2, learnable_masks=False)
    wrong = change(layer.packed_masks)
    with pytest.raises(RuntimeError, match=f"packed_masks: {message}"):
        layer.load_state_dict(layer.state_dict() | {"packed_masks": wrong}, strict=False)
    layer.packed_masks = wrong
    for use in (check_masks, lambda layer: layer(torch.randn(2, 21), torch.zeros(2, 1, dtype=torch.int64))):
        with pytest.raises((TypeError, ValueError), match=message):
            use(layer)


def test_a_quantized_checkpoint_is_refused_where_it_does_not_fit():
    stored = MGLUExperts(3, 256, 20, learnable_masks=False, weight_format="fp8_row")
    dense = MGLUExperts(3, 256, 20, learnable_masks=False)
    with pytest.raises(RuntimeError, match="weight_scale: the checkpoint holds a quantized weight"):
        dense.load_state_dict(stored.state_dict())
    with pytest.raises(RuntimeError, match=r"weight: got torch.float32 \[3, 20, 256\], must be torch.float8_e4m3fn"):
        stored.load_state_dict(dense.state_dict(), strict=False)
    scales = stored.state_dict() | {"weight_scale": torch.ones(20)}
    with pytest.raises(RuntimeError, match=r"weight_scale: got torch.float32 \[20\], must be torch.float32 \[3, 20\]"):
        stored.load_state_dict(scales)


@pytest.mark.parametrize("kind", [*KINDS, MGLUExpertsFeedForward])
@learned_or_fixed
def test_copies_and_modules_made_on_meta(kind, learnable_masks):
    sizes = (3, 19, 12, 2) if kind is MGLUExpertsFeedForward else (3, 19, 12)
    layer = kind(*sizes, n_masks=2, learnable_masks=learnable_masks)
    x = (torch.randn(4, 19),) if kind is MGLUExpertsFeedForward else (torch.randn(4, 19), torch.randint(3, (4, 2)))
    expected = layer(*x)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), saved_and_loaded(layer, weights_only=False)):
        assert type(other) is kind
        assert torch.equal(other(*x), expected)
    assert layer.to(torch.bfloat16)(x[0].bfloat16(), *x[1:]).dtype is torch.bfloat16
    meta = kind(*sizes, n_masks=2, learnable_masks=learnable_masks, device="meta")
    assert all(tensor.is_meta for tensor in [*meta.parameters(), *meta.buffers()])
    meta.to_empty(device="cpu")
    for tensor in [*meta.parameters(), *meta.buffers()]:
        tensor.data.fill_(255)
    meta.reset_parameters()
    assert all(parameter.abs().max() < 2 for parameter in meta.parameters())
    for packed_masks in meta.buffers():
        check_packed_masks(packed_masks.flatten(0, 1), 19)
        assert all((expert_masks != 255).any() for expert_masks in packed_masks)


# --- Helpers for training ---------------------------------------------------------------------------------------------


def test_mask_statistics_count_all_experts():
    model = nn.Sequential(MGLUExperts(4, 21, 10, n_masks=2), NaiveMGLUExperts(4, 21, 10, learnable_masks=False))
    statistics = MaskStatistics(model)
    layer = model[0]
    before = layer.mask_logits.detach().clone()
    with torch.no_grad():
        layer.mask_logits[1].neg_()
        layer.mask_logits[2, 0] = 1
    found = statistics.update()
    for i in range(2):
        masks, old = (logits.movedim(1, 0).flatten(1, 2) > 0 for logits in (layer.mask_logits, before))
        assert found[f"0/gate_ratio/{i}"] == pytest.approx(masks[i].double().mean().item())
        assert found[f"0/flips/{i}"] == pytest.approx((masks[i] != old[i]).double().mean().item())
    assert found["0/agreement"] == pytest.approx((masks[0] == masks[1]).double().mean().item())
    assert found["1/flips/0"] == 0
    assert torch.equal(gate_ratio(model[1].packed_masks.flatten(0, 1), 21), torch.tensor([found["1/gate_ratio/0"]]))
    assert flip_ratio(*2 * [model[1].packed_masks.flatten(0, 1)], 21).sum() == 0


class OwnExperts(nn.Module):
    """A user's own experts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.logits = nn.Parameter(torch.randn(3, 12, 21) / 4), nn.Parameter(torch.randn(3, 2, 12, 21))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        y = x.new_zeros(*ids.shape, 12)
        for expert in range(3):
            for place in (ids == expert).nonzero().tolist():
                row = x[tuple(place[:-1])]
                for m in (self.logits[expert] > 0).float():
                    w = self.weight[expert]
                    y[tuple(place)] += F.silu(F.linear(row, w * m)) * F.linear(row, w * (1 - m))
        return y


def test_freeze_replaces_experts_of_another_class():
    model = nn.ModuleList([OwnExperts()])
    assert MaskStatistics(model, mask_logits=["*.logits"]).update()["0.logits/flips/1"] == 0
    x, ids = torch.randn(4, 21), torch.randint(-1, 4, (4, 2))
    expected, weight = model[0](x, ids), model[0].weight
    freeze(model, replace={OwnExperts: lambda own: MGLUExperts.from_parameters(own.weight, own.logits)})
    assert model[0].weight is weight
    assert_matches(model[0](x, ids).detach(), expected.detach())


@each_kind
def test_what_shards_or_quantizes_one_layer_leaves_experts_alone(kind):
    layer = freeze(kind(3, 8, 8))
    with pytest.raises(TypeError, match="module: got MGLUExperts, must be an MGLU or a NaiveMGLU for ColwiseMGLU"):
        ColwiseMGLU()._apply(layer, None)
    torchao_class = type("Int8Tensor", (Tensor,), {"__module__": "torchao.quantization"})
    with pytest.raises(
        ValueError, match=r"weight: got torchao's Int8Tensor of shape \[3, 8, 8\], must be \[out_features"
    ):
        layer.weight = nn.Parameter(Tensor._make_subclass(torchao_class, layer.weight.detach()))
    assert layer(torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64)).shape == (2, 1, 8)


def test_fsdp_divides_logits_of_experts_as_their_weight():
    model = nn.ModuleList([MGLU(8, 8), MGLUExperts(3, 8, 8)])
    placement = shard_placement_fn(model)
    found = {name: placement(parameter) for name, parameter in model.named_parameters()}
    assert found == {"0.weight": None, "0.mask_logits": Shard(1), "1.weight": None, "1.mask_logits": None}
