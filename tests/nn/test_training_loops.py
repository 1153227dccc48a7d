"""Training runs of naive and fused layers from one seed, in 16 bits, with loss scaling and accumulated gradients."""

from __future__ import annotations

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mglu_ops
from mglu_ops.nn import MGLU, NaiveMGLU
from tests.support.budgets import assert_matches
from tests.support.modules import (
    Run,
    assert_as_good_as_naive,
    assert_learned,
    assert_same_training,
    batches,
    optimizer_of,
    student,
    train,
)


@cache
def naive_run(n_masks: int) -> Run:
    return train(student(NaiveMGLU, n_masks))


@pytest.mark.parametrize(
    ("n_masks", "save_activations"),
    [(1, True), *(pytest.param(*case, marks=pytest.mark.long) for case in ((1, False), (3, True), (3, False)))],
)
def test_a_fused_run_follows_the_naive_run(n_masks: int, save_activations: bool) -> None:
    """With one mask, a logit is within 1e-9 of 0 at step 63. From this step on, the masks of the runs may differ."""
    fused = train(student(MGLU, n_masks, save_activations=save_activations))
    assert_same_training(fused, naive_run(n_masks))


@pytest.mark.parametrize("n_masks", [1, pytest.param(3, marks=pytest.mark.long)])
def test_a_fused_run_in_float64_equals_the_naive_run(n_masks: int) -> None:
    fused, naive = (train(student(kind, n_masks).double()) for kind in (MGLU, NaiveMGLU))
    assert_learned(naive)
    torch.testing.assert_close(fused.losses, naive.losses, rtol=1e-12, atol=0)
    assert torch.equal(fused.logits > 0, naive.logits > 0)


@pytest.mark.long
@pytest.mark.parametrize("n_masks", [1, 3])
def test_compiled_runs_follow_the_naive_run(n_masks: int) -> None:
    """Compiled runs of MGLU, and of naive layers that the pass fuses, follow a compiled run without the pass."""
    naive = student(NaiveMGLU, n_masks)
    want = train(naive, torch.compile(naive, fullgraph=True))
    for save_activations in (True, False):
        torch._dynamo.reset()
        model = student(MGLU, n_masks, save_activations=save_activations)
        assert_same_training(train(model, torch.compile(model, fullgraph=True)), want)
    torch._dynamo.reset()
    model = student(NaiveMGLU, n_masks)
    with mglu_ops.fusion(strict=True) as report:
        got = train(model, torch.compile(model, fullgraph=True))
    assert [site.operator for site in report.fused] == ["forward_ste"] * 2
    assert_same_training(got, want)


def run_in_16_bits(kind: type[MGLU | NaiveMGLU], n_masks: int, how: str) -> Run:
    model = student(kind, n_masks)
    if how == "autocast to float16, with a scaler":
        return train(model, autocast=torch.float16, scaler=torch.amp.GradScaler("cpu"))
    if how == "autocast to bfloat16":
        return train(model, autocast=torch.bfloat16)
    model.to(torch.bfloat16)
    for module in model.modules():
        if how == "bfloat16 with float32 logits" and isinstance(module, MGLU):
            module.mask_logits.data = module.mask_logits.data.float()
    return train(model)


@pytest.mark.long
@pytest.mark.parametrize("n_masks", [1, 3])
@pytest.mark.parametrize(
    "how", ["autocast to float16, with a scaler", "autocast to bfloat16", "bfloat16", "bfloat16 with float32 logits"]
)
def test_training_in_16_bits_is_as_good_as_the_naive_layers(how: str, n_masks: int) -> None:
    fused, naive = (run_in_16_bits(kind, n_masks, how) for kind in (MGLU, NaiveMGLU))
    assert_as_good_as_naive(fused, naive, naive_run(n_masks))


def loss_of(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.float16):
        result = model(x)
    return F.mse_loss(result.float(), target)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


@pytest.mark.parametrize("save_activations", [True, False])
def test_scaled_gradients_equal_the_gradients_of_the_loss(save_activations: bool) -> None:
    """The loss scale also keeps gradients that float16 would round to 0."""
    (x, target), *_ = batches(1)
    model = student(MGLU, save_activations=save_activations)
    exact = student(NaiveMGLU).double()
    factor = 1e-6  # makes gradients smaller than the smallest float16, 6e-8
    (F.mse_loss(exact(x.double()), target.double()) * factor).backward()
    (loss_of(model, x, target) * factor).backward()
    lost = sum(int((grad == 0).sum()) for grad in gradients(model).values())
    model.zero_grad()
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**20), optimizer_of(model)
    scaler.scale(loss_of(model, x, target) * factor).backward()
    scaler.unscale_(optimizer)
    found = gradients(model)
    kept = sum(int((grad == 0).sum()) for grad in found.values())
    assert lost > 10 * kept
    for name, parameter in exact.named_parameters():
        assert_matches(found[name], parameter.grad, torch.float16, name)


def test_a_step_with_infinite_gradients_is_skipped_and_the_next_is_taken() -> None:
    (x, target), *_ = batches(1)
    model = student(MGLU)
    scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=2.0**40, backoff_factor=2.0**-30), optimizer_of(model)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for scale_after, is_taken in ((2.0**10, False), (2.0**10, True)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, x, target)).backward()
        assert all(grad.isfinite().all() for grad in gradients(model).values()) == is_taken
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == scale_after
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, before[name]) != is_taken, name


def test_accumulation_trains_as_the_whole_batch_does() -> None:
    """Masks are packed again for each part of the batch, and do not change between two optimizer steps."""
    whole, parts = student(MGLU).double(), student(MGLU, save_activations=False).double()
    steps = [(model, optimizer_of(model)) for model in (whole, parts)]
    for x, target in batches(20):
        x, target = x.double(), target.double()
        for model, optimizer in steps:
            count = 1 if model is whole else 4
            optimizer.zero_grad()
            for part, wanted in zip(x.chunk(count), target.chunk(count), strict=True):
                (F.mse_loss(model(part), wanted) / count).backward()
            optimizer.step()
    start = student(MGLU).double()
    for (name, found), expected, first in zip(
        parts.named_parameters(), whole.parameters(), start.parameters(), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11, msg=name)
        if name.endswith("mask_logits"):
            assert torch.equal(found > 0, expected > 0)
            assert ((found > 0) != (first > 0)).any()
