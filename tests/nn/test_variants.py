"""The variants of the paper (arXiv 2506.23225), compared with its code and its equations in float64."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mglu_ops
from compile_passes.explain import explain
from mglu_ops import activations
from mglu_ops.nn import GLU, LU, MGLU, NaiveMGLU, SwiMGLU
from tests.support.families import family

F64 = torch.float64
ACTIVATIONS = {"silu": F.silu, "gelu": F.gelu, "relu": F.relu, "relu_squared": lambda gate: F.relu(gate) ** 2}


def layer_and_x(**options: object) -> tuple[NaiveMGLU, Tensor]:
    torch.manual_seed(0)
    layer = NaiveMGLU(10, 6, dtype=F64, **options)
    for bias in (layer.gate_bias, layer.value_bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    return layer, torch.randn(3, 5, 10, dtype=F64)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("n_masks", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("mask_gate", "mask_value"), [(True, True), (False, True), (True, False)])
def test_masks_on_gates_or_values_alone_and_biases(activation, n_masks, bias, mask_gate, mask_value):
    options = {"bias": bias, "mask_gate": mask_gate, "mask_value": mask_value}
    layer, x = layer_and_x(n_masks=n_masks, activation=activation, **options)
    expected = torch.zeros(3, 5, 6, dtype=F64)
    for mask in layer.mask_logits > 0:
        gate = x @ (layer.weight * mask if mask_gate else layer.weight).t()
        value = x @ (layer.weight * ~mask if mask_value else layer.weight).t()
        if bias:
            gate, value = gate + layer.gate_bias, value + layer.value_bias
        expected += ACTIVATIONS[activation](gate) * value
    torch.testing.assert_close(layer(x), expected)
    layer(x).sum().backward()
    assert all(bool(parameter.grad.abs().sum() > 0) for parameter in layer.parameters())


class Algorithm2(nn.Linear):
    """The paper's own code of a layer with one mask (Algorithm 2)."""

    def __init__(self, in_features, out_features):
        super().__init__(in_features, out_features, False)
        self.register_parameter("mask", nn.Parameter(0.01 * torch.randn(out_features, in_features), requires_grad=True))

    def ste_mask(self, soft_mask):
        hard_mask = (soft_mask > 0).to(soft_mask.dtype)
        return (hard_mask - soft_mask).detach() + soft_mask

    def forward(self, x):
        hard_mask = self.ste_mask(self.mask)
        e1 = F.linear(x, self.weight * hard_mask)
        e2 = F.linear(x, self.weight * (1.0 - hard_mask))
        return e1, e2


@pytest.mark.parametrize("kind", [MGLU, NaiveMGLU])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_one_mask_equals_algorithm_2_from_initial_values_to_gradients(kind, activation):
    paper = Algorithm2(64, 48)
    torch.manual_seed(0)
    ours = kind(64, 48, activation=activation)
    torch.testing.assert_close(ours.weight, paper.weight, rtol=0, atol=0)
    torch.testing.assert_close(ours.mask_logits[0], paper.mask)
    x, grad = torch.randn(5, 64, dtype=F64), torch.randn(5, 48, dtype=F64)
    paper, ours = paper.double(), ours.double()
    e1, e2 = paper(x)
    (ACTIVATIONS[activation](e1) * e2).backward(grad)
    y = ours(x)
    y.backward(grad)
    torch.testing.assert_close(y, ACTIVATIONS[activation](e1) * e2)
    torch.testing.assert_close(ours.weight.grad, paper.weight.grad)
    torch.testing.assert_close(ours.mask_logits.grad[0], paper.mask.grad)


@pytest.mark.parametrize("options", [{"bias": True}, {"mask_gate": False}, {"mask_value": False}])
def test_a_variant_is_not_fused_and_freeze_packs_its_masks_and_leaves_its_class(options):
    layer, x = layer_and_x(n_masks=2, **options)
    assert not explain(layer, x).fused
    expected = layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mglu_ops.freeze(layer)
    assert type(layer) is NaiveMGLU
    assert layer.mask_logits is None
    torch.testing.assert_close(layer(x), expected)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [False, True])
def test_a_glu_whose_matrices_are_shared(activation, bias):
    layer, x = GLU(10, 6, activation, shared=True, bias=bias, dtype=F64), torch.randn(4, 10, dtype=F64)
    product = F.linear(x, layer.up_proj.weight, layer.up_proj.bias)
    torch.testing.assert_close(layer(x), ACTIVATIONS[activation](product) * product)
    assert [name for name, _ in layer.named_parameters()] == ["up_proj.weight", "up_proj.bias"][: 1 + bias]
    layer.reset_parameters()
    assert "shared=True" in repr(layer)


@pytest.mark.parametrize("bias", [False, True])
def test_the_baselines_compute_their_equations(bias):
    x = torch.randn(4, 10, dtype=F64)
    glu, lu = GLU(10, 6, bias=bias, dtype=F64), LU(10, 6, bias=bias, dtype=F64)
    gate, up = (F.linear(x, part.weight, part.bias) for part in (glu.gate_proj, glu.up_proj))
    torch.testing.assert_close(glu(x), F.silu(gate) * up)
    torch.testing.assert_close(lu(x), F.gelu(F.linear(x, lu.up_proj.weight, lu.up_proj.bias)))
    names = ["gate_proj.weight", "gate_proj.bias", "up_proj.weight", "up_proj.bias"]
    assert [name for name, _ in glu.named_parameters()] == names[:: 1 if bias else 2]
    assert [name for name, _ in lu.named_parameters()] == names[2 :: 1 if bias else 2]


def test_biases_are_initialised_with_zero_and_saved():
    layer = NaiveMGLU(10, 6, bias=True)
    assert set(layer.state_dict()) == {"weight", "mask_logits", "gate_bias", "value_bias"}
    torch.nn.init.ones_(layer.gate_bias)
    layer.reset_parameters()
    assert not torch.cat((layer.gate_bias, layer.value_bias)).any()
    assert "bias=True, mask_gate=True, mask_value=True" in repr(layer)
    assert "bias" not in repr(NaiveMGLU(10, 6))


@pytest.mark.parametrize("kind", [MGLU, NaiveMGLU])
@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"n_masks": 1}, 10 ** (1 / 4)),
        ({"n_masks": 2}, (20 / 6) ** (1 / 4)),
        ({"n_masks": 4}, 1.0),
        ({"n_masks": 16, "learnable_masks": False}, (20 / 272) ** (1 / 4)),
        ({"n_masks": 4, "top_k": 1}, 10 ** (1 / 4)),
        ({"n_masks": 8, "top_k": 4}, 16 ** (1 / 4)),
        ({"n_masks": 1, "activation": "sigmoid"}, 10 ** (1 / 2)),
        ({"n_masks": 1, "activation": "relu_squared"}, 10 ** (1 / 6)),
    ],
    ids=str,
)
def test_leveled_weights_are_the_papers_times_a_factor(kind, options, factor):
    states = []
    for weight_init in ("paper", "leveled"):
        layer = kind(24, 32, weight_init=weight_init, device="meta", **options).to_empty(device="cpu")
        torch.manual_seed(0)
        layer.reset_parameters()
        states.append(layer.state_dict())
    torch.testing.assert_close(states[1].pop("weight"), factor * states[0].pop("weight"))
    assert all(torch.equal(states[0][name], tensor) for name, tensor in states[1].items())
    assert kind(24, 32, **options).weight_init == "paper"


@pytest.mark.parametrize(
    ("activation", "options"),
    family(activations.ACTIVATIONS, [{"n_masks": 1}, {"n_masks": 16}, {"n_masks": 8, "top_k": 2}], most=1, one_in=1),
)
def test_leveled_sums_are_as_large_as_with_four_masks(activation, options):
    """For activations curved near 0, sums differ by up to a quarter. Without leveling, they would differ threefold."""
    x = F.rms_norm(torch.randn(256, 128), (128,))
    layers = [
        MGLU(128, 2048, activation=activation, weight_init="leveled", **sizes) for sizes in ({"n_masks": 4}, options)
    ]
    if layers[1].router is not None:
        torch.nn.init.zeros_(layers[1].router.weight)  # all kept masks have the same weight
    four, other = (layer(x).std().item() for layer in layers)
    assert 0.75 < other / four < 1.25


def test_an_ablation_takes_no_leveled_weights_and_a_block_does():
    for ablation in ({"mask_gate": False}, {"mask_value": False}):
        with pytest.raises(ValueError, match="weight_init: got 'leveled' without masks on gates and values"):
            NaiveMGLU(8, 8, weight_init="leveled", **ablation)
    assert SwiMGLU(8, 8, weight_init="leveled").mglu.weight_gain == pytest.approx(10 ** (1 / 4))
