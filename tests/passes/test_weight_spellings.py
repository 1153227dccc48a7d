"""Weights that are computed from parameters, parametrized modules, and weights and masks in other layouts."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.families import family
from tests.support.programs.compiled import OfSource, parameter
from tests.support.programs.graphs import Capture, assert_same, masked_products, model_results, results
from tests.support.programs.kinds import (
    KINDS,
    MAIN_KINDS,
    MODES,
    N_MASKS,
    PAIRS,
    SAME,
    D,
    H,
    Kind,
    More,
    activated,
    fuses_to_one,
    sum_of,
    tensors,
)
from tests.support.programs.spellings import term_of_weights

EXPRESSIONS: dict[str, Callable[[Tensor, More], Tensor]] = {
    "q * scale[:, None]": lambda w, more: w * more["scale"][:, None],
    "int8 * scale": lambda w, more: more["q"].to(more["scale"].dtype) * more["scale"][:, None],
    "B @ A": lambda w, more: more["left"] @ more["right"],
    "W + B @ A": lambda w, more: w + more["left"] @ more["right"],
    "W + 0.5 * B @ A": lambda w, more: w + 0.5 * (more["left"] @ more["right"]),
    "W * delta": lambda w, more: w * more["delta"],
    "normalize": lambda w, more: F.normalize(w),
    "W / norm": lambda w, more: w / w.norm(dim=1, keepdim=True),
    "tanh": lambda w, more: torch.tanh(w),
    "softmax": lambda w, more: w.softmax(dim=-1),
    "sign": lambda w, more: torch.sign(w),
    "trained sign": lambda w, more: (torch.sign(w) - w).detach() + w,
    "scaled sign": lambda w, more: torch.sign(w) * w.abs().mean(),
    "1 or -1": lambda w, more: torch.where(w > 0, 1.0, -1.0).to(w.dtype),
    "to float64": lambda w, more: more["narrow"].to(torch.float64),
    "clone": lambda w, more: w.clone(),
    "view of a flat parameter": lambda w, more: more["flat"].view(D, H),
    "slice of a larger parameter": lambda w, more: torch.cat([w, more["delta"]])[:D],
    "dropout of 0": lambda w, more: F.dropout(w, 0.0),
}


@pytest.mark.parametrize(
    ("name", "pair", "kind", "mode"),
    family(EXPRESSIONS, [None, "w - w * m", "total - gate"], ["float", "logits"], MODES),
)
def test_weight_is_an_expression(name: str, pair: str | None, kind: str, mode: str) -> None:
    """If `pair` is given, gate and value share one computed weight. Otherwise each of them computes the weight."""

    def term(x: Tensor, w: Tensor, m: Tensor, more: More) -> Tensor:
        weight, complement = EXPRESSIONS[name](w, more), KINDS[kind].complement(m)
        if pair is None:
            return term_of_weights(x, weight * m, EXPRESSIONS[name](w, more) * complement)
        return activated(PAIRS[pair](x, weight, m, complement))

    fuses_to_one(sum_of(term), KINDS[kind], mode)


# --- Modules ---------------------------------------------------------------------------------------------------------


class Symmetric(nn.Module):
    """A custom parametrization, which makes a weight symmetric."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).transpose(-1, -2)


class Masked(nn.Module):
    """A layer made of modules: `nn.Linear` for the weight, dropouts, and masks of one kind."""

    def __init__(self, kind: Kind, dropout: float = 0.0) -> None:
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(H, D, bias=False, dtype=torch.float64)
        self.dropout = nn.Dropout(dropout)
        self.activation = nn.SiLU()
        given = tensors(kind, training=False)["masks"]
        if kind.trains:
            self.masks = nn.Parameter(given)
        else:
            self.register_buffer("masks", given)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = 0
        for given in self.masks:
            m = self.kind.mask(given)
            gate = F.linear(x, self.linear.weight * m)
            value = F.linear(x, self.linear.weight * self.kind.complement(m))
            y = y + self.dropout(self.activation(self.dropout(gate))) * value
        return y


MODULES: dict[str, Callable[[Kind], nn.Module]] = {
    "Dropout(0.0)": Masked,
    "Dropout in eval": lambda kind: Masked(kind, 0.5).eval(),
    "parametrization": lambda kind: _parametrized(kind, Symmetric()),
    "weight_norm": lambda kind: _with_linear(kind, torch.nn.utils.parametrizations.weight_norm),
    "spectral_norm in eval": lambda kind: _with_linear(kind, torch.nn.utils.parametrizations.spectral_norm).eval(),
}


def _parametrized(kind: Kind, parametrization: nn.Module) -> nn.Module:
    return _with_linear(kind, lambda m: nn.utils.parametrize.register_parametrization(m, "weight", parametrization))


def _with_linear(kind: Kind, change: Callable[[nn.Module], Any]) -> nn.Module:
    model = Masked(kind)
    change(model.linear)
    return model


@pytest.mark.parametrize(("name", "kind"), family(MODULES, MAIN_KINDS))
def test_module(name: str, kind: str) -> None:
    torch.manual_seed(0)
    model = MODULES[name](KINDS[kind])
    x = torch.randn(5, H, dtype=torch.float64)
    for training in (True, False):
        copied = copy.deepcopy(model).requires_grad_(training)
        parameters = dict(copied.named_parameters())
        capture = Capture(assume_binary=KINDS[kind].assume_binary)
        compiled = capture.compile(copied)
        named = {"x": x.clone().requires_grad_(training)}
        assert_same(results(compiled, named, parameters), results(copied, named, parameters), SAME)
        assert capture.reasons == []
        assert [site.n_masks for site in capture.report.fused] == [N_MASKS]


# --- Weights and masks in memory -------------------------------------------------------------------------------------


@pytest.mark.parametrize("square", [True, False])
@pytest.mark.parametrize("spelling", ["stored [h, d]", "transposed then masked", "where of transposed"])
def test_weight_stored_transposed(spelling: str, square: bool) -> None:
    """Masks have the layout of the tensor that they multiply, even if it is square."""
    d, h = (8, 8) if square else (12, 8)

    def layer(x: Tensor, weight: Tensor, bits: Tensor) -> Tensor:
        if spelling == "where of transposed":
            return F.silu(x @ torch.where(bits, weight.t(), 0)) * (x @ torch.where(bits, 0, weight.t()))
        w = weight if spelling == "stored [h, d]" else weight.T
        return F.silu(x @ (w * bits)) * (x @ (w * ~bits))

    shape = (h, d) if spelling == "stored [h, d]" else (d, h)
    named = {"x": torch.randn(5, h), "weight": torch.randn(shape), "bits": torch.randn(h, d) > 0}
    named = {k: v.double().requires_grad_() if v.is_floating_point() else v for k, v in named.items()}
    capture = Capture(strict=True)
    found = results(capture.compile(layer), named)
    assert_same(found, results(layer, named), SAME)
    assert capture.calls["mglu.forward"] == 1
    assert masked_products(capture.calls) == 0


def _compiled(model: nn.Module) -> Counter[str]:
    """Check the results and gradients of a model, and count the calls of each operation in its graph."""
    model, x, capture = model.double(), torch.randn(4, 16, dtype=torch.float64), Capture(strict=True)
    assert_same(model_results(model, x, capture.compile(model)), model_results(model, x), SAME)
    return capture.calls


@pytest.mark.parametrize("masks", ["(m0, m1, m2)", "m", "m.unbind()", "[m[i] for i in range(3)]"])
def test_mask_buffers(masks: str) -> None:
    """Slices of one tensor are packed together; separate masks are stacked first."""
    bits = torch.rand(3, 12, 16) > 0.5
    named = {f"m{i}": one.clone() for i, one in enumerate(bits)} if "m0" in masks else {"m": bits}
    model = OfSource(f"sum(gated(x, w, one, ~one) for one in {masks})", w=parameter(12, 16), **named)
    stacks = {"stack": 1} if "m0" in masks else {}
    assert _compiled(model) == {"mglu.pack_masks": 1, "mglu.forward": 1} | stacks


def test_one_parameter_per_mask() -> None:
    logits = {f"l{i}": parameter(12, 16) for i in range(3)}
    calls = _compiled(OfSource("sum(gated(x, w, ste(l)) for l in (l0, l1, l2))", w=parameter(12, 16), **logits))
    assert [calls["mglu.forward_ste"], masked_products(calls)] == [1, 0]
