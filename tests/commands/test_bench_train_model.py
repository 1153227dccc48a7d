"""The benchmark of a whole training step: its model, its steps and its table."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks import decoder, train_model
from benchmarks.decoder import Sizes
from benchmarks.language_model import LanguageModel, count, share_tensors
from mglu_ops.nn import GLU, MGLU, NaiveMGLU

SIZES = Sizes(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=50, context=16)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", lambda module, **_: None)


@torch.no_grad()
def test_loss_equals_the_loss_of_a_decoder_of_one_token_at_a_time() -> None:
    torch.manual_seed(0)
    model = LanguageModel(SIZES, GLU)
    other = decoder.Decoder(SIZES, GLU)
    ours = model.state_dict()
    for name, parameter in other.named_parameters():
        parameter.copy_(ours[name.replace("start.embedding", "embedding").replace("head.norm", "loss.norm")])
    tokens = torch.randint(0, SIZES.vocabulary, (2, 7))
    losses = []
    for sequence in tokens:
        for i in range(6):
            logits = other(sequence[i : i + 1].clone(), torch.tensor([i]))
            losses.append(F.cross_entropy(logits, sequence[i + 1 : i + 2]))
    torch.testing.assert_close(model(tokens), torch.stack(losses).mean())


def test_the_fused_model_is_another_form_of_the_naive_one() -> None:
    torch.manual_seed(0)
    naive = train_model.build(SIZES, partial(NaiveMGLU, n_masks=2), "cpu", "autocast")
    fused = train_model.build(SIZES, partial(MGLU, n_masks=2), "meta", "autocast")
    share_tensors(naive, fused)
    pairs = zip(naive.parameters(), fused.parameters(), strict=True)
    assert all(ours is theirs for ours, theirs in pairs)
    tokens = torch.randint(0, SIZES.vocabulary, (2, 9))
    losses = [model(tokens) for model in (fused, naive)]
    torch.testing.assert_close(*losses)
    gradients = [
        torch.autograd.grad(loss, list(model.parameters())) for loss, model in zip(losses, (fused, naive), strict=True)
    ]
    assert train_model.distance(zip(*gradients, strict=True)) < 1e-5
    assert train_model.distance(zip([2 * one for one in gradients[0]], gradients[1], strict=True)) == pytest.approx(1.0)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("precision", train_model.PRECISIONS)
def test_every_model_is_trained(precision: train_model.Precision) -> None:
    torch.manual_seed(0)
    problem = train_model.Problem("350M", train_model.Model(SIZES, batch=2), precision, 2)
    rows = train_model.bench(problem, "cpu", rounds=1, load=0.0)
    assert [one.variant for one in rows] == ["SwiGLU", "naive", "fused"]
    for one in rows:
        assert one.has_time
        assert (one.case, one.tokens, one.shape, one.n_masks) == (f"350M, {precision}", 32, (96, 64), 2)
    assert math.isnan(rows[0].error)
    assert 1e-4 < rows[2].error < 0.03


@pytest.mark.usefixtures("no_compiler")
def test_a_model_of_wrong_gradients_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong(MGLU):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return -super().forward(x)

    monkeypatch.setattr(train_model, "MGLU", Wrong)
    problem = train_model.Problem("350M", train_model.Model(SIZES, batch=2), "autocast", 1)
    rows = train_model.bench(problem, "cpu", rounds=1, load=0.0)
    assert [one.is_wrong for one in rows] == [False, False, True]


def test_a_step_updates_every_parameter() -> None:
    torch.manual_seed(0)
    model = train_model.build(SIZES, partial(NaiveMGLU, n_masks=1), "cpu", "autocast")
    before = [parameter.detach().clone() for parameter in model.parameters()]
    tokens = torch.randint(0, SIZES.vocabulary, (2, 9))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    model.compile_parts = lambda: None  # type: ignore[method-assign]
    train_model.Training(model, optimizer, tokens, autocast=True).step()
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert parameter.grad is None
        assert not torch.equal(parameter, old)


def test_models_have_the_sizes_of_their_names() -> None:
    millions = {}
    for name, (sizes, _) in train_model.MODELS.items():
        with torch.device("meta"):
            millions[name] = [
                count(LanguageModel(sizes, projection)) / 1e6 for projection in (GLU, partial(NaiveMGLU, n_masks=1))
            ]
    assert millions["Llama-3.2 1B"] == [pytest.approx(1236, abs=1)] * 2  # one mask has as many logits as a weight
    assert millions["350M"] == [pytest.approx(341, abs=1)] * 2
