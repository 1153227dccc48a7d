"""The fit of an MGLU layer to a gated linear unit: each step solves its problem."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mglu_ops.nn import fitting
from mglu_ops.nn.fitting import FREE, Fit
from tests.support.fits import D, H, layer


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
    weight, shares = fitting.nearest(torch.stack((rows.gate, rows.value)), rows, n_masks, FREE)

    def error(weight, shares):
        return rows.a * (shares * weight - rows.gate).square() + rows.b * ((1 - shares) * weight - rows.value).square()

    tried = [error(w, p / n_masks) for p in range(n_masks + 1) for w in torch.linspace(-6, 6, 2001)]
    assert (error(weight, shares) <= torch.stack(tried).amin(0) + 1e-4).all()
    torch.testing.assert_close((shares * n_masks).round(), shares * n_masks)
    if n_masks == 1:
        assert torch.equal(shares == 1, rows.a * rows.gate.square() > rows.b * rows.value.square())


@pytest.mark.parametrize("n_masks", [1, 4])
def test_masks_have_the_shares(n_masks):
    rows, _ = layer()
    _, shares = fitting.nearest(torch.stack((rows.gate, rows.value)), rows, n_masks, FREE)
    masks = fitting.masks_of(shares, n_masks, FREE)
    torch.testing.assert_close(masks.float().mean(0), shares)
    assert len({mask.numpy().tobytes() for mask in masks}) == n_masks, "equal masks would stay equal in training"


def test_weights_for_given_shares_solve_the_least_squares_problem_of_each_row():
    rows, made = layer()
    covariance = made.x.T @ made.x / len(made.x) + 0.01 * torch.eye(H)
    shares = torch.randint(0, 4, (D, H), generator=torch.Generator().manual_seed(1)) / 3
    found = fitting.solve_weight(rows, covariance, shares, torch.zeros(D, H))
    for j in range(D):
        parts = (rows.a[j], shares[j], rows.gate[j]), (rows.b[j], 1 - shares[j], rows.value[j])
        matrix = sum(size * p[:, None] * covariance * p for size, p, _ in parts)
        right = sum(size * p * (covariance @ row) for size, p, row in parts)
        torch.testing.assert_close(found[j], torch.linalg.solve(matrix, right), rtol=1e-2, atol=1e-3)


def test_the_down_projection_is_the_best_of_all(monkeypatch):
    monkeypatch.setattr(fitting, "RIDGE", 0.0)
    rows, made = layer()
    fit = Fit(rows.gate, torch.rand(2, D, H, generator=torch.Generator().manual_seed(1)) < 0.5, rows.down)
    down = fitting.solve_down(fit, made)
    z = sum(F.silu(F.linear(made.x, fit.weight * m)) * F.linear(made.x, fit.weight * ~m) for m in fit.masks)
    torch.testing.assert_close(down.T, torch.linalg.lstsq(z, made.y).solution, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_products_of_joint_run_in_tf32_and_the_setting_of_the_caller_stays(precision, monkeypatch):
    rows, made = layer()
    seen, step = set(), torch.optim.Adam.step
    monkeypatch.setattr(fitting, "ADAM_STEPS", 2)
    monkeypatch.setattr(
        torch.optim.Adam, "step", lambda self: (seen.add(torch.backends.cuda.matmul.fp32_precision), step(self))
    )
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        fitting.joint(Fit(rows.gate, torch.rand(1, D, H) > 0.5, rows.down), made)
        assert torch.get_float32_matmul_precision() == precision
    finally:
        torch.set_float32_matmul_precision(before)
    assert seen == {"tf32"}
