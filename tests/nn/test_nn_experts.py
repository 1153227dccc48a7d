"""Experts of a mixture: against the loop over experts, MGLU layers of their slices, and PyTorch's operations."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import NAIVE_FACTOR, assert_matches, relative_error
from hypothesis import given
from hypothesis import strategies as st
from strategies import ACTIVATION_NAMES, examples
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
    decompose,
    flip_ratio,
    freeze,
    gate_ratio,
    parameter_groups,
    quantize,
)
from mglu_ops.parallel import ColwiseMGLU, shard_placement_fn

KINDS = [MGLUExperts, NaiveMGLUExperts]
each_kind = pytest.mark.parametrize("kind", KINDS)
learned_or_fixed = pytest.mark.parametrize("learnable_masks", [True, False], ids=["learned", "fixed"])
STORED = [name for name in FORMATS if name != "dense"]
F64 = torch.float64


def pair(*args: Any, seed: int = 0, **options: Any) -> list[nn.Module]:
    """An MGLUExperts and a NaiveMGLUExperts whose parameters are drawn from the same seed, and so are equal."""
    layers = []
    for kind in KINDS:
        torch.manual_seed(seed)
        layers.append(kind(*args, **options))
    return layers


def results(layer: nn.Module, x: Tensor, ids: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = layer(x, ids)
    named = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(y, [x, *named.values()], grad)
    return {"y": y.detach(), "x": grads[0]} | dict(zip(named, grads[1:], strict=True))


def layer_of(layer: nn.Module, expert: int, kind: type[nn.Module] = MGLU) -> nn.Module:
    """One expert as a layer of its own."""
    options = {"weight_format": layer.weight_format, "top_k": layer.top_k, "activation": layer.activation}
    sizes = {"n_masks": layer.n_masks, "learnable_masks": layer.learnable_masks, "dtype": layer.weight.dtype}
    sizes |= {} if layer.weight_format == "dense" else {"dtype": None}
    one = kind(layer.in_features, layer.out_features, **options, **sizes)
    state = layer.state_dict()
    one.load_state_dict({name: t if name.startswith("router") else t[expert] for name, t in state.items()})
    return one


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


# --- Results and gradients --------------------------------------------------------------------------------------------


@given(
    num_experts=st.integers(1, 6),
    in_features=st.integers(1, 33),
    out_features=st.integers(1, 9),
    n_masks=st.integers(1, 5),
    leading=st.lists(st.integers(0, 4), max_size=2),
    experts_of_a_token=st.integers(1, 3),
    learnable=st.booleans(),
    saved=st.booleans(),
    seed=st.integers(0, 2**16),
    data=st.data(),
)
@examples(60)
def test_any_shape_and_load_matches_the_loop_over_experts(
    num_experts, in_features, out_features, n_masks, leading, experts_of_a_token, learnable, saved, seed, data
):
    activation = data.draw(st.sampled_from([name for name in ACTIVATION_NAMES if name != "relu"]), label="activation")
    options = {"n_masks": n_masks, "learnable_masks": learnable, "activation": activation, "dtype": F64}
    options["top_k"] = data.draw(st.none() | st.integers(1, n_masks), label="top_k")
    fused, naive = pair(num_experts, in_features, out_features, seed=seed, **options)
    fused.save_activations = saved
    # Ids from -1 to num_experts, or of one expert that has all rows.
    ids = torch.randint(-1, num_experts + 1, (*leading, experts_of_a_token))
    if data.draw(st.booleans(), label="one expert"):
        ids[...] = num_experts - 1
    ids = ids.to(data.draw(st.sampled_from([torch.int32, torch.int64]), label="dtype of the ids"))
    x = torch.randn(*leading, in_features, dtype=F64)
    grad = torch.randn(*ids.shape, out_features, dtype=F64)
    expected, got = results(naive, x, ids, grad), results(fused, x, ids, grad)
    assert got.keys() == expected.keys()
    for name in expected:
        torch.testing.assert_close(got[name], expected[name], rtol=1e-11, atol=1e-13)
    with torch.no_grad():
        torch.testing.assert_close(freeze(fused)(x, ids), expected["y"], rtol=1e-11, atol=1e-13)


@learned_or_fixed
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_results_and_gradients_in_fewer_bits(dtype, learnable_masks):
    fused, naive = pair(5, 67, 48, n_masks=3, learnable_masks=learnable_masks, dtype=dtype)
    exact = copy.deepcopy(naive).double()
    ids = torch.randint(-1, 6, (3, 11, 2))
    x, grad = torch.randn(3, 11, 67, dtype=dtype), torch.randn(3, 11, 2, 48, dtype=dtype)
    expected, got, got_naive = (
        results(exact, x.double(), ids, grad.double()),
        *(results(layer, x, ids, grad) for layer in (fused, naive)),
    )
    for name, want in expected.items():
        assert got[name].dtype == dtype
        assert_matches(got[name], want, dtype, name)
    naive_error = relative_error(got_naive["y"], expected["y"])
    assert relative_error(got["y"], expected["y"]) <= NAIVE_FACTOR * naive_error


@each_kind
@learned_or_fixed
def test_an_expert_is_an_mglu(kind, learnable_masks):
    """So its gradients are that layer's, and those of an expert without rows are zeros."""
    layer = kind(4, 21, 12, n_masks=3, top_k=2, learnable_masks=learnable_masks, activation="gelu", dtype=F64)
    x, ids, grad = torch.randn(6, 21, dtype=F64), torch.tensor([0, 3, 0, 1, 3, 3]), torch.randn(6, 12, dtype=F64)
    got = results(layer, x, ids[:, None], grad[:, None])
    for expert in range(4):
        rows = ids == expert
        one, mine = layer_of(layer, expert), x[rows].requires_grad_()
        y = one(mine)
        torch.testing.assert_close(got["y"][rows, 0], y)
        y.backward(grad[rows])
        torch.testing.assert_close(got["x"][rows], mine.grad)
        for name, parameter in one.named_parameters():
            if name != "router.weight":
                torch.testing.assert_close(got[name][expert], parameter.grad)
    assert not got["weight"][2].any()


@learned_or_fixed
def test_rows_of_no_expert_are_never_read(learnable_masks):
    layer = MGLUExperts(3, 16, 8, n_masks=2, learnable_masks=learnable_masks)
    x = torch.randn(4, 16)
    x[2] = torch.nan
    ids = torch.tensor([[0, 1], [2, -1], [3, -1], [7, 0]])
    got = results(layer, x, ids, torch.ones(4, 2, 8))
    outside = (ids < 0) | (ids > 2)
    assert all(tensor.isfinite().all() for tensor in got.values())
    assert not got["y"][outside].any()
    assert got["y"][~outside].any(1).all()
    assert not got["x"][2].any()
    with torch.no_grad():
        torch.testing.assert_close(freeze(layer)(x, ids), got["y"])


def test_training_follows_the_loop_over_experts():
    """Three steps of AdamW with the recommended groups, with a router that learns where tokens go."""
    losses = []
    for kind in KINDS:
        torch.manual_seed(0)
        block = MGLUExpertsFeedForward(6, 20, 24, 2, n_masks=2, mask_top_k=1, weight_init="leveled", dtype=F64)
        if kind is NaiveMGLUExperts:
            naive = kind(6, 20, 24, n_masks=2, top_k=1, weight_init="leveled", dtype=F64)
            naive.load_state_dict(block.experts.state_dict())
            block.experts = naive
        groups = parameter_groups(block, lr=0.03, weight_decay=0.1)
        assert [group["name"] for group in groups] == ["weights", "mask_logits"]
        assert groups[1]["params"] == [block.experts.mask_logits]
        assert groups[1]["lr"] == pytest.approx(0.009)
        optimizer = torch.optim.AdamW(groups)
        torch.manual_seed(1)
        x, target = torch.randn(2, 50, 20, dtype=F64), torch.randn(2, 50, 20, dtype=F64)
        for _ in range(3):
            y, logits = block(x, output_router_logits=True)
            loss = F.mse_loss(y, target) + 0.01 * logits.square().mean()
            losses.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert losses[2] < losses[0]
    assert losses[:3] == pytest.approx(losses[3:], rel=1e-9)


@learned_or_fixed
def test_autocast_gives_bfloat16_results_and_float32_gradients(learnable_masks):
    block = MGLUExpertsFeedForward(4, 33, 16, 2, n_masks=2, learnable_masks=learnable_masks)
    x = torch.randn(7, 33)
    exact = block(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = block(x)
    assert y.dtype is torch.bfloat16
    assert relative_error(y, exact) < 0.1  # a token's experts may differ in a near tie
    y.sum().backward()
    assert {parameter.grad.dtype for parameter in block.parameters()} == {torch.float32}


# --- The feed-forward layer -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("norm_topk_prob", [True, False])
def test_the_feed_forward_layer_routes_as_qwen_and_mixtral_do(norm_topk_prob):
    block = MGLUExpertsFeedForward(5, 12, 20, 2, norm_topk_prob=norm_topk_prob, n_masks=2, dtype=F64)
    x = torch.randn(3, 4, 12, dtype=F64)
    y, logits = block(x, output_router_logits=True)
    assert torch.equal(block(x), y)
    torch.testing.assert_close(logits, x @ block.gate.weight.T)
    ones = [layer_of(block.experts, expert) for expert in range(5)]
    for token in range(12):
        row, probabilities = x.view(12, 12)[token], logits.view(12, 5)[token].softmax(0)
        chosen = probabilities.sort(descending=True).indices[:2].tolist()
        total = probabilities[chosen].sum() if norm_topk_prob else 1
        expected = sum(probabilities[e] / total * (ones[e](row) @ block.down_proj[e].T) for e in chosen)
        torch.testing.assert_close(y.view(12, 12)[token], expected)
    assert torch.equal(block(x[0, 0]), block(x[:1, :1])[0, 0])


def test_the_feed_forward_layer_has_the_names_and_initial_values_of_its_parts():
    block = MGLUExpertsFeedForward(4, 300, 200, 2, n_masks=4, mask_top_k=2)
    names = {"gate.weight", "down_proj", *(f"experts.{name}" for name in ("weight", "mask_logits", "router.weight"))}
    assert set(block.state_dict()) == names
    for weight, columns in ((block.experts.weight, 300), (block.down_proj, 200), (block.gate.weight, 300)):
        assert weight.abs().max() <= columns**-0.5  # as nn.Linear draws each expert's
        assert weight.std().item() == pytest.approx((3 * columns) ** -0.5, rel=0.05)
    leveled = MGLUExpertsFeedForward(4, 300, 200, 2, weight_init="leveled").experts.weight
    assert leveled.std().item() == pytest.approx(10**0.25 * 900**-0.5, rel=0.02)


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
    """To an MGLU of its slices; the gradient of x is that layer's, and a checkpoint loads into a new layer."""
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
        assert all((of_one != 255).any() for of_one in packed_masks)


# --- Compiling and exporting ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["learned", "fixed", "frozen", "quantized"])
@pytest.mark.parametrize("mask_top_k", [None, 1])
def test_a_layer_compiles_as_one_graph_for_all_loads(case, mask_top_k):
    block = MGLUExpertsFeedForward(
        4,
        16,
        24,
        2,
        n_masks=2,
        mask_top_k=mask_top_k,
        learnable_masks=case != "fixed",
        save_activations=case == "fixed",
    )
    if case in ("frozen", "quantized"):
        freeze(block).requires_grad_(False)
    if case == "quantized":
        quantize(block, "fp8_row")
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
        for shift in (0, 3):
            x = torch.randn(6, 16) + shift
            (y, _), (expected, _) = compiled(x, output_router_logits=True), block(x, output_router_logits=True)
            assert_matches(y.detach(), expected.detach())
            parameters = [parameter for parameter in block.parameters() if parameter.requires_grad]
            if parameters:
                grads, wanted = (torch.autograd.grad(one.sum(), parameters, allow_unused=True) for one in (y, expected))
                for grad, want in zip(grads, wanted, strict=True):
                    torch.testing.assert_close(grad, want, rtol=1e-4, atol=1e-5)


def test_an_exported_layer_takes_any_number_of_tokens_and_is_not_decomposed():
    block = freeze(MGLUExpertsFeedForward(4, 16, 24, 2, n_masks=2)).eval().requires_grad_(False)
    tokens = {"x": {0: torch.export.Dim("tokens", min=1, max=512)}, "output_router_logits": None}
    program = torch.export.export(block, (torch.randn(5, 16), False), dynamic_shapes=tokens)
    for count in (1, 5, 9):
        x = torch.randn(count, 16)
        torch.testing.assert_close(program.module()(x, False), block(x))
    with pytest.raises(ValueError, match="program: it has experts"):
        decompose(program)


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


def test_freeze_replaces_experts_of_another_class_and_names_them_without_replace():
    model = nn.ModuleList([OwnExperts()])
    with pytest.warns(
        UserWarning, match=r"OwnExperts looks like .*weight \[E, d, h\], logits \[E, n, d, h\].*MGLUExperts\."
    ):
        freeze(model)
    with pytest.warns(UserWarning, match=r'name its logits: mask_logits=\["\*.logits"\]'):
        parameter_groups(model, lr=1.0, weight_decay=0.0)
    assert MaskStatistics(model, mask_logits=["*.logits"]).update()["0.logits/flips/1"] == 0
    x, ids = torch.randn(4, 21), torch.randint(-1, 4, (4, 2))
    expected, weight = model[0](x, ids), model[0].weight
    with pytest.raises(ValueError, match="a module that computes something else"):
        freeze(model, replace={OwnExperts: lambda own: MGLUExperts.from_parameters(own.weight, own.logits < 0)})
    freeze(model, replace={OwnExperts: lambda own: MGLUExperts.from_parameters(own.weight, own.logits)})
    assert model[0].weight is weight
    assert_matches(model[0](x, ids).detach(), expected.detach())


# --- Errors -----------------------------------------------------------------------------------------------------------


@each_kind
@pytest.mark.parametrize(
    ("x", "ids", "error", "message"),
    [
        ((4, 8), [[0]] * 4, TypeError, "expert_ids: got list, must be a tensor"),
        ((4, 8), torch.zeros(4, 2), TypeError, "expert_ids: got dtype torch.float32, must be torch.int32 or"),
        (
            (4, 8),
            torch.zeros(4, dtype=torch.int64),
            ValueError,
            r"got shape \[4\], must be \[4, K\] with K of at least 1",
        ),
        ((2, 3, 8), torch.zeros(3, 2, 1, dtype=torch.int64), ValueError, r"shape \[3, 2, 1\], must be \[2, 3, K\]"),
        (
            (4, 8),
            torch.zeros(4, 2, dtype=torch.int64, device="meta"),
            ValueError,
            "expert_ids: got device meta, must be",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_named(kind, x, ids, error, message):
    with pytest.raises(error, match=message):
        kind(3, 8, 8)(torch.randn(x), ids)


def test_x_of_another_size_is_named():
    for top_k in (None, 1):
        with pytest.raises(ValueError, match=r"x: got .*8"):
            MGLUExperts(3, 8, 8, top_k=top_k)(torch.randn(4, 7), torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="x: got "):
        MGLUExpertsFeedForward(3, 8, 8, 1, mask_top_k=1)(torch.randn(4, 7))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MGLUExperts(0, 8, 8), "num_experts: got 0, must be an int of at least 1"),
        (lambda: NaiveMGLUExperts(2.0, 8, 8), r"num_experts: got 2\.0"),
        (lambda: MGLUExperts(2, 8, 0), "out_features: got 0"),
        (lambda: NaiveMGLUExperts(2, 8, 8, weight_format="fp8_row"), "weight_format: got 'fp8_row', must be 'dense'"),
        (lambda: MGLUExpertsFeedForward(4, 8, 8, 5), "top_k: got 5, must be an int from 1 to num_experts=4"),
        (lambda: MGLUExpertsFeedForward(4, 8, 8, 2, norm_topk_prob=1), "norm_topk_prob: got 1, must be True or False"),
        (
            lambda: MGLUExpertsFeedForward(4, 8, 8, 2, mask_top_k=2),
            "top_k: got 2, must be None or an int from 1 to n_masks=1",
        ),
        (lambda: MGLUExpertsFeedForward(4, 8, 8, 2, dtype=torch.int8), "dtype: got torch.int8"),
        (
            lambda: MGLUExperts.from_parameters(torch.ones(8, 8), torch.ones(1, 8, 8)),
            r"weight: got shape \[8, 8\], must be \[num_experts, out_features, in_features\]",
        ),
        (
            lambda: MGLUExperts.from_parameters(torch.ones(2, 4, 8), torch.ones(3, 2, 4, 8)),
            r"masks: got shape \[3, 2, 4, 8\], must be \[2, n_masks, 4, 8\] beside a weight of shape \[2, 4, 8\]",
        ),
        (
            lambda: MGLUExperts.from_parameters(torch.ones(2, 4, 8), torch.ones(2, 4, 8)),
            r"masks: got shape \[2, 4, 8\], must be \[num_experts, n_masks, out_features, in_features\]",
        ),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@each_kind
def test_what_shards_or_quantizes_one_layer_leaves_experts_alone(kind):
    layer = freeze(kind(3, 8, 8))
    with pytest.raises(TypeError, match="module: got MGLUExperts, must be an MGLU or a NaiveMGLU for ColwiseMGLU"):
        ColwiseMGLU()._apply(layer, None)
    of_torchao = type("Int8Tensor", (Tensor,), {"__module__": "torchao.quantization"})
    with pytest.raises(
        ValueError, match=r"weight: got torchao's Int8Tensor of shape \[3, 8, 8\], must be \[out_features"
    ):
        layer.weight = nn.Parameter(Tensor._make_subclass(of_torchao, layer.weight.detach()))
    assert layer(torch.randn(2, 8), torch.zeros(2, 1, dtype=torch.int64)).shape == (2, 1, 8)


def test_fsdp_divides_logits_of_experts_as_their_weight():
    model = nn.ModuleList([MGLU(8, 8), MGLUExperts(3, 8, 8)])
    placement = shard_placement_fn(model)
    found = {name: placement(parameter) for name, parameter in model.named_parameters()}
    assert found == {"0.weight": None, "0.mask_logits": Shard(1), "1.weight": None, "1.mask_logits": None}


@each_kind
def test_repr_names_the_number_of_experts(kind):
    start = f"{kind.__name__}(num_experts=3, in_features=19, out_features=12, n_masks=2, activation='silu', "
    assert repr(kind(3, 19, 12, n_masks=2)).startswith(start)
    assert "top_k=2, norm_topk_prob=True" in repr(MGLUExpertsFeedForward(4, 8, 8, 2))
