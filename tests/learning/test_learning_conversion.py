"""Fits of MGLU layers to a trained SwiGLU model."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from benchmarks.learning import conversion, cost, experiments, train, training
from benchmarks.learning.conversion import Fit, Rows, Sample
from benchmarks.learning.recipe import Recipe
from mglu_ops.activations import get_activation
from tests.support.families import sample
from tests.support.learning import rows_of, tiny_run

pytest_plugins = ["tests.support.learning"]
pytestmark = pytest.mark.usefixtures("tiny")
D, H = 12, 8


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(conversion, "ADAM_STEPS", 60)
    monkeypatch.setattr(conversion, "ADAM_TOKENS", 64)


def layer(seed: int = 0) -> tuple[Rows, Sample]:
    """A random teacher's layer with 12 neurons, and correlated hidden states of 8 elements."""
    generator = torch.Generator().manual_seed(seed)
    gate, value = torch.randn(2, D, H, generator=generator)
    x, down = (torch.randn(*shape, generator=generator) for shape in ((400, H), (H, D)))
    x = x @ torch.randn(H, H, generator=generator) / 3
    act = get_activation("silu")
    made = Sample(x, F.linear(F.silu(F.linear(x, gate)) * F.linear(x, value), down), act)
    return Rows(gate, value, down, *conversion.sensitivities(gate, value, made)), made


def test_sensitivities_are_squared_derivatives():
    rows, made = layer()
    gate, value = (F.linear(made.x, one).requires_grad_() for one in (rows.gate, rows.value))
    for found, derivative in zip(
        (rows.a, rows.b), torch.autograd.grad((F.silu(gate) * value).sum(), (gate, value)), strict=True
    ):
        torch.testing.assert_close(found[:, 0], derivative.square().mean(0))


@pytest.mark.parametrize("n_masks", [1, 3])
def test_the_nearest_weight_and_shares_are_the_best_of_all(n_masks):
    rows, _ = layer()
    weight, shares = conversion.nearest(torch.stack((rows.gate, rows.value)), rows, n_masks, "free")

    def error(weight, shares):
        return rows.a * (shares * weight - rows.gate).square() + rows.b * ((1 - shares) * weight - rows.value).square()

    tried = [error(w, p / n_masks) for p in range(n_masks + 1) for w in torch.linspace(-6, 6, 2001)]
    assert (error(weight, shares) <= torch.stack(tried).amin(0) + 1e-4).all()
    torch.testing.assert_close((shares * n_masks).round(), shares * n_masks)
    if n_masks == 1:
        assert torch.equal(shares == 1, rows.a * rows.gate.square() > rows.b * rows.value.square())


@pytest.mark.parametrize("structure", ["free", "2:4"])
@pytest.mark.parametrize("n_masks", [1, 4])
def test_masks_have_the_shares_and_the_structure(n_masks, structure):
    rows, _ = layer()
    _, shares = conversion.nearest(torch.stack((rows.gate, rows.value)), rows, n_masks, structure)
    masks = conversion.masks_of(shares, n_masks, structure)
    torch.testing.assert_close(masks.float().mean(0), shares)
    assert len({mask.numpy().tobytes() for mask in masks}) == n_masks, "equal masks would stay equal in training"
    if structure == "2:4":
        assert (masks.unflatten(-1, (-1, 4)).sum(-1) == 2).all()
    if (n_masks, structure) == (1, "2:4"):
        difference = rows.a * rows.gate.square() - rows.b * rows.value.square()
        assert torch.equal(masks[0], conversion.two_of_four(difference))


def test_weights_for_given_shares_solve_the_least_squares_problem_of_each_row():
    rows, made = layer()
    covariance = made.x.T @ made.x / len(made.x) + 0.01 * torch.eye(H)
    shares = torch.randint(0, 4, (D, H), generator=torch.Generator().manual_seed(1)) / 3
    found = conversion.solve_weight(rows, covariance, shares, torch.zeros(D, H))
    for j in range(D):
        parts = (rows.a[j], shares[j], rows.gate[j]), (rows.b[j], 1 - shares[j], rows.value[j])
        matrix = sum(size * p[:, None] * covariance * p for size, p, _ in parts)
        right = sum(size * p * (covariance @ row) for size, p, row in parts)
        torch.testing.assert_close(found[j], torch.linalg.solve(matrix, right), rtol=1e-2, atol=1e-3)


def test_the_down_projection_is_the_best_of_all(monkeypatch):
    monkeypatch.setattr(conversion, "RIDGE", 0.0)
    rows, made = layer()
    fit = Fit(rows.gate, torch.rand(2, D, H, generator=torch.Generator().manual_seed(1)) < 0.5, rows.down)
    down = conversion.solve_down(fit, made)
    z = sum(F.silu(F.linear(made.x, fit.weight * m)) * F.linear(made.x, fit.weight * ~m) for m in fit.masks)
    torch.testing.assert_close(down.T, torch.linalg.lstsq(z, made.y).solution, rtol=1e-2, atol=1e-3)


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


@pytest.mark.parametrize("options", [*sample(FITTED, 4), {"n_masks": 1, "width": 1.25}], ids=str)
def test_each_step_of_a_fit_lowers_the_error(options, text):
    one = tiny_run(text, 4, layer="mglu", start="joint", skip=0.001, paired=True, **options)
    teacher = one.teacher.model()
    for block in teacher.blocks:  # as after training; random neurons of nn.Linear are nearly linear
        block.projection.gate_proj.weight.data *= 4
    made = training.fitted(one, text, teacher.state_dict(), "cpu")
    for errors in made["errors"]:
        magnitude, alternation, down, joint = errors.values()
        assert list(errors) == ["magnitude", *conversion.STEPS]
        assert 0 < joint < down < alternation
        assert alternation < magnitude or one.n_masks == 4, "the errors of several masks' products only cancel later"
    run = training.Training(one, text, "cpu", False, teacher.state_dict(), made)
    batch = run.windows.batch(run.skipped)
    with torch.no_grad():
        x = teacher.embedding(batch[:, :-1])
        x = x + teacher.blocks[0].attention(teacher.blocks[0].attention_norm(x), (teacher.cosine, teacher.sine))
        x = teacher.blocks[0].projection_norm(x)
        wanted, found = (model.blocks[0].down(model.blocks[0].projection(x)) for model in (teacher, run.model))
    error = float((found - wanted).square().sum() / wanted.square().sum())
    assert error == pytest.approx(made["errors"][0]["joint"], rel=0.5), "another quarter of the sample"
    assert torch.equal(run.model.embedding.weight, teacher.embedding.weight)


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
        if one.start is not None:
            assert replace(baseline, start="teacher", vocabulary=256, paired=True) in runs
            assert one.teacher == replace(experiments.STRUCTURE[0], size=one.size, seed=one.seed)
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
