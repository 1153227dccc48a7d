"""The benchmark of training experts, on a small model on a CPU without a compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import train as bench
from benchmarks.train import NAIVE, OPERATOR, SWIGLU, TRICK

Layer = Callable[[Tensor], Tensor]
MODEL = bench.Model(experts=5, out_features=16, in_features=24, top_k=2)


def problem(routing: str, n_masks: int) -> bench.Problem:
    return bench.Problem((16, 24), 40, n_masks, f"small, {routing}", routing, MODEL)


@pytest.fixture(autouse=True)
def _small_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    torch.manual_seed(0)


@pytest.mark.parametrize(("loads", "n_masks"), [("balanced", 1), ("zipf", 2)])
def test_every_form_is_timed_and_compared_with_float64(monkeypatch, loads, n_masks):
    def with_twice_the_gradient(naive: bench.NaiveExperts) -> Layer:
        def layer(x: Tensor) -> Tensor:
            y: Tensor = naive(x)
            y.register_hook(lambda gradient: 2 * gradient)
            return y

        return layer

    monkeypatch.setattr(bench, "operator", with_twice_the_gradient)
    rows = bench.bench(problem(loads, n_masks), "cpu", rounds=1, load=0.0)
    found = {row.variant: row for row in rows}
    assert list(found) == [NAIVE, TRICK, OPERATOR, *([SWIGLU] if n_masks == 1 else [])]
    assert found.pop(OPERATOR).is_wrong
    for variant, row in found.items():
        assert row.has_time
        assert (row.case, row.shape, row.extra["experts"]) == (f"small, {loads}", (16, 24), 5)
        if variant != SWIGLU:
            errors: Any = row.extra["errors"]
            assert 1e-4 < min(errors.values()) <= max(errors.values()) < 1e-2
            assert row.extra["bits_repeat"]


def test_gradients_of_other_experts_are_wrong() -> None:
    training = bench.Training(problem("balanced", 1), "cpu")
    oracle = bench.Oracle(training)
    results = training.results(training.naive, oracle.grad_output)
    assert max(oracle.errors(results).values()) < 1e-2
    results.grad_weight[next(expert for expert in range(5) if expert not in oracle.checked)] += 1
    assert oracle.errors(results)["grad_weight"] == float("inf")
