"""The benchmark of training a layer: what is measured, compared and shown, and how results are joined."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import pages, records, timing, train
from benchmarks.records import Row, read, read_table
from benchmarks.train import FUSED, GEMMS, MODULE, NAIVE, OPERATOR, RECOMPUTING, SWIGLU, TRICK
from mglu_ops.accuracy import ERROR_BUDGET
from tests.support.commands import row
from tests.support.families import quick_only_for

PROBLEM = train.Problem((24, 16), tokens=10, n_masks=2)
ALL = (NAIVE, TRICK, FUSED, OPERATOR, MODULE, RECOMPUTING)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)


def bench(problem: train.Problem) -> list[Row]:
    torch.manual_seed(0)
    return train.bench(problem, "cpu", rounds=2, load=0.0)


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("n_masks", quick_only_for([1], [1, 2]))
def test_every_form_is_timed_and_compared_with_float64(n_masks: int) -> None:
    rows = bench(replace(PROBLEM, n_masks=n_masks))
    assert [one.variant for one in rows] == [*ALL, *([SWIGLU] if n_masks == 1 else []), GEMMS]
    for one in rows:
        assert one.has_time
        assert (one.tokens, one.shape, one.n_masks, one.case) == (10, (24, 16), n_masks, "training step")
        if one.variant in ALL:
            errors: Any = one.extra["errors"]
            assert list(errors) == ["y", "grad_x", "grad_weight", "grad_logits"]
            assert 1e-4 < one.error == max(errors.values()) < ERROR_BUDGET[torch.bfloat16]
            assert one.extra["bits_repeat"] is True
        else:
            assert math.isnan(one.error)


@pytest.mark.long
def test_the_compiled_forms_compile() -> None:
    rows = bench(PROBLEM)
    assert all(one.has_time for one in rows)


def test_oracle_is_the_naive_layer_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only checked tokens have an upstream gradient, so gradients of parameters are sums over the checked tokens."""
    monkeypatch.setattr(train, "CHECKED_TOKENS", 4)
    torch.manual_seed(0)
    training = train.Training(PROBLEM, "cpu")
    oracle = train.Oracle(training)
    assert int(oracle.grad_output.any(dim=1).sum()) == 4
    wide = train.Training(PROBLEM, "cpu")
    wide.naive.load_state_dict(training.naive.state_dict())
    wide.naive.double()
    wide.x = training.x.detach().double().requires_grad_()
    exact = wide.results(wide.naive, oracle.grad_output.double())
    assert max(oracle.errors(exact).values()) < 1e-12
    for name in exact._fields:
        wrong = oracle.errors(exact._replace(**{name: 1.5 * getattr(exact, name)}))
        assert wrong.pop(name) == pytest.approx(0.5)
        assert max(wrong.values()) < 1e-12
    stray = exact.grad_x.clone()
    stray[oracle.others] += 1e-3  # changes tokens whose exact gradient is 0
    assert oracle.errors(exact._replace(grad_x=stray))["grad_x"] == math.inf


@pytest.mark.usefixtures("no_compiler")
def test_a_step_drops_the_gradients_of_the_one_before() -> None:
    training = train.Training(PROBLEM, "cpu")
    step = train.steps(training)[OPERATOR]
    step()
    first = [leaf.grad for leaf in training.leaves()]
    step()
    for leaf, grad in zip(training.leaves(), first, strict=True):
        assert grad is not None
        assert leaf.grad is not grad
        torch.testing.assert_close(leaf.grad, grad)
    step.drop_gradients()
    assert [leaf.grad for leaf in training.leaves()] == [None] * 3


def replace_layer(monkeypatch: pytest.MonkeyPatch, name: str, other: Callable[[train.Layer], train.Layer]) -> None:
    """Let `train` measure `other(layer)` instead of the layer of variant `name`."""
    whole = train.steps

    def steps(training: train.Training) -> dict[str, train.Step]:
        found = whole(training)
        layer = other(found[name].layer)
        return found | {name: train.Step(training, layer, training.naive.parameters())}

    monkeypatch.setattr(train, "steps", steps)


@pytest.mark.long
@pytest.mark.usefixtures("no_compiler")
def test_a_variant_that_does_not_fit_into_memory_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def too_large(x: Tensor) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    replace_layer(monkeypatch, NAIVE, lambda layer: too_large)
    rows = records.measure([PROBLEM], bench, tmp_path, "train", "by the clock")
    (naive,) = (one for one in rows if one.variant == NAIVE)
    assert (naive.extra["left_out"], naive.is_wrong, naive.has_time) == ("out of memory", False, False)
    assert all(one.has_time for one in rows if one is not naive)
    assert "left out" in str(naive)
    assert "| 10 | 2 | out of memory |" in pages.TABLES["train"](tmp_path)


def with_twice_the_gradient(y: Tensor) -> Tensor:
    y.register_hook(lambda gradient: 2 * gradient)
    return y


@pytest.mark.long
@pytest.mark.usefixtures("no_compiler")
def test_a_wrong_gradient_has_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_layer(monkeypatch, FUSED, lambda layer: lambda x: with_twice_the_gradient(layer(x)))
    (fused,) = (one for one in bench(PROBLEM) if one.variant == FUSED)
    assert fused.is_wrong
    errors: Any = fused.extra["errors"]
    assert errors["y"] < 0.01
    assert errors["grad_logits"] == pytest.approx(1.0, abs=0.01)


def test_peak_is_the_most_of_a_call_with_what_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    now, most = 5_000_000, 9_000_000

    def reset() -> None:
        nonlocal most
        most = now

    def call() -> None:
        nonlocal most
        most = now + 2_000_000

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: now)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: most)
    assert timing.allocated("cuda") == 5.0
    assert timing.peak(call, "cuda") == 7.0
    assert math.isnan(timing.peak(call, "cpu"))
    assert math.isnan(timing.allocated("cpu"))


def step(problem: train.Problem, variant: str, milliseconds: float, **extra: object) -> Row:
    changes = {"out_features": problem.shape[0], "in_features": problem.shape[1], "case": "training step"}
    return row(variant, 1000 * milliseconds, problem.n_masks, problem.tokens, **changes, extra=extra)


def test_a_resumed_run_measures_only_what_the_result_lacks(monkeypatch, tmp_path):
    problems = [replace(PROBLEM, tokens=tokens) for tokens in (10, 20, 30)]
    begun: list[int] = []

    def one_row(problem: train.Problem) -> list[Row]:
        if len(begun) == 1 and problem.tokens == 20:
            raise KeyboardInterrupt
        begun.append(problem.tokens)
        return [step(problem, FUSED, 1.0)]

    def measure(commit: str, protocol: str = "by the clock") -> list[Row]:
        monkeypatch.setenv("MGLU_COMMIT", commit)
        return records.measure(problems, one_row, tmp_path, "train", protocol, resume=True)

    with pytest.raises(KeyboardInterrupt):
        measure("1111111111")
    assert [one.tokens for one in read(tmp_path, "train")] == begun == [10]
    begun += [0]
    rows = measure("2222222222")
    assert begun == [10, 0, 20, 30]
    assert [one.tokens for one in rows] == [one.tokens for one in read(tmp_path, "train")] == [10, 20, 30]
    assert read_table(tmp_path / "train.csv")[0]["commit"] == "1111111111, 2222222222"
    assert "commit 1111111, 2222222." in pages.TABLES["train"](tmp_path)
    with pytest.raises(ValueError, match="has another protocol: 'by the clock' instead of 'by another clock'"):
        measure("2222222222", "by another clock")


def test_a_row_that_is_measured_again_replaces_the_earlier_one(tmp_path: Path) -> None:
    """For example, benchmarks/generate.py measures SwiGLU again when it measures more numbers of masks."""
    records.measure([PROBLEM], lambda one: [step(one, FUSED, 5.0), step(one, NAIVE, 6.0)], tmp_path, "train", "clock")
    more = replace(PROBLEM, n_masks=4)
    records.measure(
        [more], lambda one: [step(PROBLEM, NAIVE, 7.0), step(one, NAIVE, 8.0)], tmp_path, "train", "clock", True
    )
    found = [(one.variant, one.n_masks, one.microseconds) for one in read(tmp_path, "train")]
    assert found == [(FUSED, 2, 5000.0), (NAIVE, 2, 7000.0), (NAIVE, 4, 8000.0)]
