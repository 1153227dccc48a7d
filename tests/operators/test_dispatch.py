"""The choice of a backend: pure, overridable, and never silently slow."""

from __future__ import annotations

import warnings

import pytest
import torch

import mglu_ops
from mglu_ops import dispatch


def call(tokens: int = 3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(tokens, 16), torch.randn(8, 16), torch.ops.mglu.pack_masks(torch.rand(2, 8, 16) > 0.5)


def test_cpu_runs_its_kernels_and_says_so() -> None:
    choice = mglu_ops.explain(*call())
    assert (choice.backend, choice.is_fallback) == ("cpu", False)
    assert "instruction set" in str(choice)
    choice = mglu_ops.explain(*(t.double() if t.is_floating_point() else t for t in call()))
    assert (choice.backend, choice.is_fallback) == ("composite", False)
    assert "torch.float64" in str(choice)


def test_an_override_that_cannot_run_says_why() -> None:
    with pytest.raises(ValueError, match=r"backend: got 'cuda', which cannot take this call: x is on cpu"):
        dispatch.forward(*call(), "silu", None, backend="cuda")
    with pytest.raises(ValueError, match=r"backend: got 'fast', must be composite, cpu, cuda or triton"):
        dispatch.forward(*call(), "silu", None, backend="fast")


def test_an_override_is_obeyed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows, routes and the result's shape, as a backend of few tokens sees them."""
    seen = []

    def record(x: torch.Tensor, weight: torch.Tensor, *rest: object) -> torch.Tensor:
        seen.append((x.shape, rest[-1].shape))  # type: ignore[attr-defined]
        return x.new_ones(x.shape[0], weight.shape[0])

    monkeypatch.setattr(dispatch.cuda, "unsupported_reason", lambda *arguments: None)
    monkeypatch.setattr(dispatch.cuda, "forward", record)
    x, weight, packed = call(6)
    result = dispatch.forward(x.view(2, 3, 16), weight, packed, "silu", torch.ones(2, 3, 2), backend="cuda")
    assert seen == [((6, 16), (6, 2))]
    assert torch.equal(result, torch.ones(2, 3, 8))


def test_a_fallback_warns_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = dispatch.Choice("composite", "library GEMMs: no compiler in this test", is_fallback=True)
    monkeypatch.setattr(dispatch, "choose", lambda *arguments: choice)
    with pytest.warns(UserWarning, match="no compiler in this test"):
        torch.ops.mglu.forward(*call())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.ops.mglu.forward(*call())
