"""Calls of the CPU backend with an instruction set, what they should give, and a library of emulated instructions."""

from __future__ import annotations

import hashlib
import math
import shlex
from pathlib import Path

import pytest
import torch
from backend_calls import run_on
from budgets import BUDGET, relative_error
from strategies import ACTIVATIONS, Layer
from torch import Tensor

from mglu_ops.backends import BACKENDS, reference
from mglu_ops.backends.cpu import Cpu, build, library
from mglu_ops.layer_call import LayerArguments, LayerCall

EMULATION = Path(__file__).parents[1] / "cpu" / "cpu_avx512_emulation.h"


def emulated_library() -> library.Library:
    """The kernels built with emulated intrinsics, so that every x86-64 machine has all instruction sets."""
    version = hashlib.sha256(EMULATION.read_bytes()).hexdigest()[:16]  # the options are part of the cache's key
    options = (f'-DMGLU_EMULATE_AVX512="{EMULATION.name}"', f"-DMGLU_EMULATION={version}", f"-I{EMULATION.parent}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "FLAGS", tuple("-O1" if flag == "-O2" else flag for flag in build.FLAGS))
        patch.setenv("CXX", shlex.join((*build.find_compiler(), *options)))
        return build.load_library(library.Library)


def run(layer: Layer, isa: str = "best") -> Tensor:
    x = layer.x.reshape(math.prod(layer.x.shape[:-1]), layer.x.shape[-1])
    mask_weight = layer.mask_weights
    mask_weight = None if mask_weight is None else mask_weight.reshape(len(x), mask_weight.shape[-1])
    result = run_on("cpu", x, layer.weight, layer.packed_masks, layer.activation, mask_weight, launch=isa)
    return result.view(*layer.x.shape[:-1], layer.weight.shape[0])


def oracle(layer: Layer) -> Tensor:
    return reference.forward(layer.x, layer.weight, layer.masks, layer.activation, layer.mask_weights)


def forward_train(layer: Layer, isa: str | None = None) -> tuple[Tensor, Tensor]:
    """The result and the partial derivatives of a layer whose x is `[tokens, in_features]`."""
    cpu = BACKENDS["cpu"]
    assert isinstance(cpu, Cpu)
    given = LayerArguments(layer.x, layer.weight, layer.packed_masks, layer.activation, layer.mask_weights)
    return cpu.prepare_forward_train(LayerCall.of(given), isa)(given)


def exact_partials(layer: Layer) -> Tensor:
    """The partial derivatives of the result, by autograd in float64."""
    x, weight, masks = layer.x.double(), layer.weight.double(), layer.masks
    t = (x @ weight.T).requires_grad_()
    flipped = [(x @ torch.where(mask, -weight, weight).T).requires_grad_() for mask in masks]
    ones = torch.ones(len(masks), *t.shape, dtype=torch.float64)
    term_weights = ones if layer.mask_weights is None else layer.mask_weights.T.double()[..., None] * ones
    term_weights = list(term_weights.detach().clone().requires_grad_())
    act = ACTIVATIONS[layer.activation].forward
    y = sum(r * act((t - f) / 2) * ((t + f) / 2) for r, f in zip(term_weights, flipped, strict=True))
    assert isinstance(y, Tensor)
    wanted = [t, *flipped] if layer.mask_weights is None else [t, *flipped, *term_weights]
    return torch.stack(torch.autograd.grad(y.sum(), wanted), 1)


def assert_trains(layer: Layer, isa: str | None, what: str) -> None:
    """Assert that the result and each partial derivative are within the budget of their dtype."""
    y, partials = forward_train(layer, isa)
    assert y.dtype is partials.dtype is layer.x.dtype
    assert y.is_contiguous()
    assert partials.is_contiguous()
    assert relative_error(y, oracle(layer)) <= BUDGET[y.dtype], what
    exact = exact_partials(layer)
    assert partials.shape == exact.shape
    for entry in range(exact.shape[1]):
        assert relative_error(partials[:, entry], exact[:, entry]) <= BUDGET[y.dtype], f"{what}, {entry=}"
