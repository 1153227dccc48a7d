"""Fits of MGLU layers to a trained SwiGLU model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.learning import conversion, cost, experiments, train, training
from benchmarks.learning.recipe import Recipe
from mglu_ops.nn import fitting
from tests.support.families import sample
from tests.support.fits import D, layer
from tests.support.learning import rows_of, tiny_run

pytest_plugins = ["tests.support.learning"]
pytestmark = pytest.mark.usefixtures("tiny")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(fitting, "ADAM_STEPS", 60)
    monkeypatch.setattr(fitting, "ADAM_TOKENS", 64)


@pytest.mark.parametrize("n_masks", [1, 4])
def test_masks_of_structure_2_4_have_the_shares_and_the_structure(n_masks):
    rows, _ = layer()
    structure = conversion.STRUCTURES["2:4"]
    _, shares = fitting.nearest(torch.stack((rows.gate, rows.value)), rows, n_masks, structure)
    masks = fitting.masks_of(shares, n_masks, structure)
    torch.testing.assert_close(masks.float().mean(0), shares)
    assert len({mask.numpy().tobytes() for mask in masks}) == n_masks, "equal masks would stay equal in training"
    assert (masks.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    if n_masks == 1:
        difference = rows.a * rows.gate.square() - rows.b * rows.value.square()
        assert torch.equal(masks[0], conversion.two_of_four(difference))


def test_neurons_that_are_split_are_those_with_the_largest_errors():
    rows, made = layer()
    errors = torch.ones(400, D)
    errors[:, 5] = 100
    wider = conversion.split(rows, errors, D + 1)
    assert torch.equal(wider.gate[-1], rows.gate[5])
    assert torch.equal(wider.down[:, [5, -1]], rows.down[:, [5, 5]] / 2)
    assert (wider.a / wider.b)[-1] == pytest.approx(float(16 * (wider.a / wider.b)[5]))
    z = F.silu(F.linear(made.x, wider.gate)) * F.linear(made.x, wider.value)
    torch.testing.assert_close(F.linear(z, wider.down), made.y)
    with pytest.raises(ValueError, match="width: got 25, must be at most twice the teacher's 12"):
        conversion.split(rows, errors, 25)


FITTED = [{"n_masks": 1}, {"n_masks": 4}, {"n_masks": 1, "structure": "2:4"}, {"n_masks": 4, "structure": "2:4"}]


def first_inputs(model, run):
    """The inputs of the first feed-forward layer of a model for the first text that a run reads."""
    x, block = model.embedding(run.windows.batch(run.skipped)[:, :-1]), model.blocks[0]
    return block.projection_norm(x + block.attention(block.attention_norm(x), (model.cosine, model.sine)))


@pytest.mark.parametrize("options", [*sample(FITTED, 4), {"n_masks": 1, "width": 1.25}], ids=str)
def test_each_step_of_a_fit_lowers_the_error(options, text):
    one = tiny_run(text, 4, layer="mglu", start="joint", skip=0.001, paired=True, **options)
    teacher = one.teacher.model()
    for block in teacher.blocks:  # as after training; random neurons of nn.Linear are nearly linear
        block.projection.gate_proj.weight.data *= 4
    made = training.fitted(one, text, teacher.state_dict(), "cpu")
    for errors in made["errors"]:
        magnitude, alternation, down, joint = errors.values()
        assert list(errors) == ["magnitude", *fitting.STEPS]
        assert 0 < joint < down < alternation
        assert alternation < magnitude or one.n_masks == 4, "the errors of several masks' products only cancel later"
    run = training.Training(one, text, "cpu", False, teacher.state_dict(), made)
    with torch.no_grad():
        x = first_inputs(teacher, run)
        wanted, found = (model.blocks[0].down(model.blocks[0].projection(x)) for model in (teacher, run.model))
    error = float((found - wanted).square().sum() / wanted.square().sum())
    assert error == pytest.approx(made["errors"][0]["joint"], rel=0.5), "another quarter of the sample"
    assert torch.equal(run.model.embedding.weight, teacher.embedding.weight)


def test_a_mixture_is_converted_expert_by_expert(text):
    one = tiny_run(text, 4, n_masks=1, start="joint", skip=0.001, paired=True, experts=4, active=2)
    teacher = one.teacher.model()
    for block in teacher.blocks:
        block.projection.projection.gate_proj.weight.data *= 4
    made = training.fitted(one, text, teacher.state_dict(), "cpu")
    assert all(0 < errors["joint"] < errors["down"] < errors["magnitude"] for errors in made["errors"])
    run = training.Training(one, text, "cpu", False, teacher.state_dict(), made)
    with torch.no_grad():
        x = first_inputs(teacher, run)
        wanted, found = (model.blocks[0].projection(x) for model in (teacher, run.model))
    error = float((found - wanted).square().sum() / wanted.square().sum())
    assert error < 2 * made["errors"][0]["joint"]


def test_runs_share_a_fit_and_begin_with_the_teacher(text, tmp_path):
    teacher = tiny_run(text, 20, layer="glu")
    options = {"skip": teacher.megabytes, "paired": True}
    on = tiny_run(text, 8, layer="glu", start="teacher", **options)
    fits = [tiny_run(text, 8, n_masks=1, start="joint", distilled=distilled, **options) for distilled in (False, True)]
    for one in (on, *fits):
        while not train.run(one, text, tmp_path, "cpu", limit=0, compiled=False):
            pass
    assert len(list((tmp_path / "fits").glob("*.fit"))) == 1
    last = float(rows_of(tmp_path, on.teacher)[-1]["held_out"])
    assert float(rows_of(tmp_path, on)[0]["held_out"]) == pytest.approx(last, abs=1e-5)
    first = [rows_of(tmp_path, one)[0] for one in fits]
    assert first[0] == first[1]
    assert float(first[0]["held_out"]) == pytest.approx(last, abs=0.1)
    assert len(json.loads(first[0]["errors"])) == 2
    assert [int(row["step"]) for row in rows_of(tmp_path, fits[0])] == [0, 2, 4, 6, 8]
    soft = replace(fits[1], continuous=0.5)
    assert train.run(soft, text, tmp_path, "cpu", compiled=False)
    begin = float(rows_of(tmp_path, soft)[0]["held_out"])
    assert begin == pytest.approx(float(first[0]["held_out"]), abs=1e-3), "masks of a fit begin hard"
    short = replace(fits[0], megabytes=fits[0].megabytes / 2)
    assert train.run(short, text, tmp_path, "cpu", compiled=False)
    assert len(list((tmp_path / "fits").glob("*.fit"))) == 2, "less text is a smaller sample"


def test_the_experiment_compares_conversions_with_swiglu_trained_on_the_same_text():
    runs = experiments.chosen(["conversion"])
    assert [one.size for one in runs] == sorted(one.size for one in runs), "small models first"
    for one in runs:
        baseline = Recipe("glu", size=one.size, megabytes=one.megabytes, lr=one.lr, skip=60.0, seed=one.seed)
        baseline = replace(baseline, experts=one.experts, active=one.active)
        if one.start is not None:
            assert replace(baseline, start="teacher", vocabulary=256, paired=True) in runs
            experts = {"experts": one.experts, "active": one.active}
            assert one.teacher == replace(experiments.STRUCTURE[0], size=one.size, seed=one.seed, **experts)
        assert cost.layer_of(one).megabytes == Recipe.megabytes


@pytest.mark.parametrize("share", [0.0, 0.25, 1.0])
def test_the_target_is_a_mix_of_predictions_and_text(share, text):
    one = tiny_run(text, 4, n_masks=1, start="magnitude", skip=0.001, distilled=True, text_share=share)
    run = training.Training(one, text, "cpu", False, one.teacher.model().state_dict())
    batch = run.windows.batch(0)
    with torch.no_grad():
        target = run.teacher.logits(batch[:, :-1]).softmax(-1)
        target = (1 - share) * target + share * F.one_hot(batch[:, 1:], target.shape[-1])
        wanted = -(target * run.model.logits(batch[:, :-1]).log_softmax(-1)).sum(-1).mean()
        torch.testing.assert_close(run.loss(batch), wanted)


def test_masks_of_a_fit_begin_hard_soften_and_end_hard(text, tmp_path):
    one = tiny_run(text, 8, n_masks=1, start="joint", skip=0.001, continuous=0.5, mask_lr=1.0)
    run = training.Training(one, text, "cpu", False, one.teacher.model().state_dict())
    layer = training.masked_layers(run.model)[0]
    batch, soft = run.windows.batch(0), []
    layer.set_tau(0.0)
    with torch.no_grad():
        hard = run.model(batch)
    layer.set_tau(training.FITTED_WIDTH)
    with torch.no_grad():
        torch.testing.assert_close(run.model(batch), hard)
    for _ in range(8):
        run.step()
        soft.append(layer.is_continuous and bool((layer.mask_logits.abs() < layer.tau / 2).any()))
    assert soft == [True] * 4 + [False] * 4


@pytest.mark.parametrize(
    "wrong",
    [{"start": "teacher"}, {"start": "joint", "layer": "glu"}, {"start": "joint", "top_k": 1}],
    ids=str,
)
def test_a_wrong_start_is_named(wrong):
    with pytest.raises(ValueError, match="start: got"):
        Recipe(**wrong)
