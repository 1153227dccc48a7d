"""Masks and weights of structure 2:4 in the experiments about learning, and runs that are paired by seed."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch
import torch.nn.functional as F

from benchmarks.learning import experiments, schedule, train, training
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.structure import PrunedGLU, StructuredMGLU, two_of_four
from mglu_ops.nn import MGLU
from tests.support.learning import VOCABULARY, rows_of, tiny_run

pytest_plugins = ["tests.support.learning"]
pytestmark = pytest.mark.usefixtures("tiny")

STRUCTURED = [
    {"structure": "2:4", "n_masks": 2},
    {"structure": "2:4", "n_masks": 1, "centered": True},
    {"structure": "2:4", "layer": "glu", "decay": 1e-3},
]


def test_two_of_four_are_the_largest_and_of_equal_ones_the_earlier():
    scores = torch.tensor(list(product((-1.0, 0.0, 2.0, 3.0), repeat=4)))  # with all kinds of ties
    expected = torch.zeros_like(scores, dtype=torch.bool)
    for row, own in zip(expected, scores.tolist(), strict=True):
        row[sorted(range(4), key=lambda i: (-own[i], i))[:2]] = True
    assert torch.equal(two_of_four(scores), expected)
    assert torch.equal(two_of_four(scores.view(16, 64)), expected.view(16, 64))


@pytest.mark.parametrize("centered", [False, True])
def test_a_structured_mask_has_the_straight_through_gradient(centered):
    layer = StructuredMGLU(24, 40, n_masks=2, activation="relu", centered=centered).double()
    x, grad = torch.randn(7, 24, dtype=torch.float64), torch.randn(7, 40, dtype=torch.float64)
    masks = two_of_four(layer.mask_logits.detach())
    assert torch.equal(masks.view(-1, 4).sum(1), torch.full((2 * 40 * 6,), 2))
    same = MGLU.from_parameters(layer.weight, torch.where(masks, 1.0, -1.0).double(), activation="relu")
    found = layer(x)
    assert torch.equal(found, same(x))
    grad_weight, grad_logits = torch.autograd.grad(found, [layer.weight, layer.mask_logits], grad)
    soft = masks.double().requires_grad_()
    oracle = sum(F.relu(F.linear(x, layer.weight * m)) * F.linear(x, layer.weight * (1 - m)) for m in soft.unbind())
    expected = torch.autograd.grad(oracle, [layer.weight, soft], grad)
    torch.testing.assert_close(grad_weight, expected[0])
    groups = expected[1].view(-1, 4)
    wanted = groups - groups.mean(1, keepdim=True) if centered else groups
    torch.testing.assert_close(grad_logits.view(-1, 4), wanted)


def test_pruned_matrices_have_the_gradient_of_sr_ste():
    layer = PrunedGLU(24, 40, 0.25, "relu").double()
    x, grad = torch.randn(7, 24, dtype=torch.float64), torch.randn(7, 40, dtype=torch.float64)
    weights = [layer.gate_proj.weight, layer.up_proj.weight]
    masks = [two_of_four(weight.detach().abs()) for weight in weights]
    kept = [(weight * mask).detach().requires_grad_() for weight, mask in zip(weights, masks, strict=True)]
    assert all(torch.equal((one != 0).view(-1, 4).sum(1), torch.full((240,), 2)) for one in kept)
    oracle = F.relu(F.linear(x, kept[0])) * F.linear(x, kept[1])
    found = layer(x)
    torch.testing.assert_close(found, oracle)
    expected = torch.autograd.grad(oracle, kept, grad)
    for one, other, weight, mask in zip(
        torch.autograd.grad(found, weights, grad), expected, weights, masks, strict=True
    ):
        torch.testing.assert_close(one, other + 0.25 * weight * ~mask)


@pytest.mark.parametrize(
    "wrong",
    [
        {"structure": "4:8"},
        {"structure": "2:4", "layer": "lu"},
        {"structure": "2:4", "learned": False},
        {"structure": "2:4", "continuous": 0.5},
        {"structure": "2:4", "layer": "glu", "experts": 4},
        {"structure": "2:4", "experts": 4, "start": "joint"},
        {"centered": True},
        {"decay": 0.1, "layer": "glu"},
        {"decay": 0.1, "structure": "2:4"},
    ],
    ids=str,
)
def test_a_wrong_structure_is_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe(**wrong)


@pytest.mark.parametrize("options", STRUCTURED, ids=str)
def test_layers_of_structure_learn(options, text, tmp_path):
    one = tiny_run(text, 20, paired=True, **options)
    assert train.run(one, text, tmp_path, "cpu", compiled=False)
    losses = [float(row["held_out"]) for row in rows_of(tmp_path, one)]
    assert losses[-1] < losses[0]
    if one.has_masks:
        assert 0 < float(rows_of(tmp_path, one)[-1]["flipped"]) < 0.7


def test_flips_of_a_structured_mask_are_those_of_its_bits(text):
    run = training.Training(tiny_run(text, 8, **STRUCTURED[0]), text, "cpu", compiled=False)
    before = [two_of_four(layer.mask_logits.detach()) for layer in training.masked_layers(run.model)]
    run.advance(8)
    after = [two_of_four(layer.mask_logits.detach()) for layer in training.masked_layers(run.model)]
    flips = [float((a != b).float().mean()) for a, b in zip(before, after, strict=True)]
    assert run.progress.rows[-1]["flipped"] == pytest.approx(sum(flips) / 2, rel=1e-4)
    assert sum(flips) > 0


@pytest.mark.long
@pytest.mark.parametrize("options", STRUCTURED, ids=str)
def test_a_compiled_layer_of_structure_follows_the_eager_one(options, text, tmp_path):
    one = tiny_run(text, 20, **options)
    for compiled in (False, True):
        assert train.run(one, text, tmp_path / str(compiled), "cpu", compiled=compiled)
    for first, second in zip(rows_of(tmp_path / "False", one), rows_of(tmp_path / "True", one), strict=True):
        assert float(first["held_out"]) == pytest.approx(float(second["held_out"]), rel=0.02)


def test_paired_layers_start_alike_and_read_the_same_text(text):
    """With `paired`, layers with the same seed share parameters and text. Else later draws depend on the layer."""
    several = [replace(one, vocabulary=VOCABULARY, seed=3) for one in experiments.STRUCTURE]
    starts = [dict(one.model().named_parameters()) for one in several]
    shared = [name for name in starts[0] if ".projection." not in name]
    assert all(torch.equal(starts[0][name], start[name]) for start in starts for name in shared)
    first = "blocks.1.projection.{}weight"
    swiglu, lu = (starts[i][first.format(f"{name}_proj.")] for i, name in ((0, "gate"), (5, "up")))
    free, masked = (starts[i][first.format("")] for i in (1, 2))
    for weight, one in ((free, several[1]), (lu, several[5])):
        torch.testing.assert_close(weight, swiglu * one.weight_gain)
    assert torch.equal(free, masked)
    logits = "blocks.1.projection.mask_logits"
    assert torch.equal(starts[1][logits], starts[2][logits])
    unpaired = [dict(replace(one, paired=False).model().named_parameters()) for one in (several[0], several[5])]
    assert not torch.equal(*(start["blocks.1.down.weight"] for start in unpaired))
    batches = [
        training.Training(one, text, "cpu", compiled=False).windows.batch(0)
        for one in (*several[:2], replace(several[0], seed=4), Recipe("glu", seed=3), Recipe("glu", seed=4))
    ]
    assert [torch.equal(batches[0], batch) for batch in batches[1:]] == [True, False, False, False]
    assert torch.equal(batches[3], batches[4])


def test_points_before_the_last_evaluate_a_part_of_long_text(text, monkeypatch):
    run = training.Training(tiny_run(text, 2), text, "cpu", compiled=False)
    whole = run.losses()
    monkeypatch.setattr(training, "MOST_TOKENS", len(text.held_out) / 3)
    part = run.losses()
    assert part != whole
    assert part["held_out"] == pytest.approx(whole["held_out"], rel=0.02)
    run.progress.step = run.steps
    assert run.losses() == whole
    every, third = (
        torch.cat([*schedule.held_out_batches(text.held_out, "cpu", most)]) for most in (1e9, len(text.held_out) / 3)
    )
    assert torch.equal(third[:4], every[:4])
    assert torch.equal(third[4:8], every[12:16])


@pytest.mark.parametrize("last", [0.0, 0.5])
def test_rates_end_at_the_fraction_that_the_recipe_says(last, text):
    run = training.Training(tiny_run(text, 20, n_masks=1, last_rate=last), text, "cpu", compiled=False)
    for _ in range(run.steps):
        run.step()
    assert run.rate(2) == 1
    assert [group["lr"] for group in run.groups] == pytest.approx([1e-2 * last] * 3, abs=1e-4)


def test_a_corpus_with_more_tokens_than_the_model_is_refused(text):
    with pytest.raises(ValueError, match="vocabulary: got 256, must be at least the corpus's 300"):
        training.Training(tiny_run(text, 2, vocabulary=256), text, "cpu", compiled=False)
