"""Common models without an MGLU layer: nothing is fused, and nothing is reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from budgets import BUDGET
from graphs import Capture, assert_same, results
from torch import Tensor, nn

SAME = 10 * BUDGET[torch.float64]
D = H = 8  # square, so that no shape tells what is transposed


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(H, D), nn.Linear(H, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.gate(x)) * self.up(x)


class Gating(nn.Module):
    """`(1 - z) * h + z * n`."""

    def __init__(self) -> None:
        super().__init__()
        self.z, self.n = nn.Linear(H, H), nn.Linear(H, H)

    def forward(self, x: Tensor) -> Tensor:
        z, n = torch.sigmoid(self.z(x)), torch.tanh(self.n(x))
        return (1 - z) * x + z * n


class LoRA(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, H))
        self.a, self.b = nn.Parameter(torch.randn(2, H)), nn.Parameter(torch.randn(D, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + self.b @ self.a
        return F.silu(F.linear(x, weight)) * (F.linear(x, self.weight) + F.linear(F.linear(x, self.a), self.b))


class ScaledSwiGLU(nn.Module):
    """Weights times scales: by row, by element, and pruned by masks of their own."""

    def __init__(self, scale: str) -> None:
        super().__init__()
        self.gate, self.up = nn.Parameter(torch.randn(D, H)), nn.Parameter(torch.randn(D, H))
        shape = (D, 1) if scale == "row" else (D, H)
        for name in ("gate_scale", "up_scale"):
            value = torch.randn(shape) > 0 if scale == "pruned" else torch.randn(shape)
            self.register_buffer(name, value)

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(F.linear(x, self.gate * self.gate_scale)) * F.linear(x, self.up * self.up_scale)


class OneMask(nn.Module):
    """Two weights pruned by one mask: the buffer of an autoregressive or sparse layer, or a mask of DropConnect."""

    def __init__(self, kind: str, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.kind, self.activation = kind, activation
        self.gate, self.up = nn.Parameter(torch.randn(D, H)), nn.Parameter(torch.randn(D, H))
        mask = torch.ones(D, H).tril()
        self.register_buffer("mask", mask.bool() if kind == "bool" else mask)

    def forward(self, x: Tensor) -> Tensor:
        m = self.mask
        if self.kind == "DropConnect":  # with a probability at which eager and compiled masks are equal
            m = torch.rand_like(self.gate) < 2
        if self.kind == "dropout":
            m = F.dropout(torch.ones_like(self.gate), 0.0)
        return F.silu(F.linear(x, self.gate * m)) * self.activation(F.linear(x, self.up * m))


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(H, 3)
        self.experts = nn.ModuleList(SwiGLU() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        route = self.router(x).softmax(-1)
        return sum(route[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class MaskedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(H, 3 * H)
        self.register_buffer("causal", torch.ones(5, 5).tril().bool())

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        scores = (q @ k.t()).masked_fill(~self.causal, float("-inf"))
        scores = scores + torch.where(self.causal, 0.0, float("-inf")) + (1.0 - self.causal.float()) * -1e4
        return (scores.softmax(-1) * (1 - 0 * self.causal.float())) @ v


ORDINARY: dict[str, Callable[[], nn.Module]] = {
    "SwiGLU": SwiGLU,
    "gating": Gating,
    "LoRA": LoRA,
    "scaled by row": lambda: ScaledSwiGLU("row"),
    "scaled by element": lambda: ScaledSwiGLU("element"),
    "pruned": lambda: ScaledSwiGLU("pruned"),
    **{
        f"one mask, {kind}": partial(OneMask, kind, lambda u: u) for kind in ("float", "bool", "DropConnect", "dropout")
    },
    "one mask, no value": partial(OneMask, "float", torch.sigmoid),
    "experts": Experts,
    "attention": MaskedAttention,
    "batch norm": lambda: nn.Sequential(nn.Linear(H, D), nn.BatchNorm1d(D), nn.ReLU(inplace=True), nn.Dropout(0.0)),
    "LSTM cell": lambda: nn.LSTMCell(H, H),
    "GRU cell": lambda: nn.GRUCell(H, H),
}


@pytest.mark.parametrize("name", list(ORDINARY))
def test_ordinary_models_have_no_candidates(name: str) -> None:
    torch.manual_seed(0)
    model, x = ORDINARY[name]().double(), torch.randn(5, H, dtype=torch.float64)
    capture = Capture()
    compiled = capture.compile(model)

    def run(call: Callable[..., Any]) -> dict[str, Tensor | None]:
        return results(lambda x, **_: call(x), {"x": x.clone().requires_grad_(), **dict(model.named_parameters())})

    wanted = run(model)
    assert_same(run(compiled), wanted, SAME)
    assert (capture.report.fused, capture.report.missed) == ([], [])
    assert capture.report.graphs > 0
