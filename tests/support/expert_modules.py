"""Modules of experts: pairs of equal modules, their results, and one expert as a layer of its own."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mglu_ops.nn import MGLU, MGLUExperts, NaiveMGLUExperts

KINDS = [MGLUExperts, NaiveMGLUExperts]
each_kind = pytest.mark.parametrize("kind", KINDS)
learned_or_fixed = pytest.mark.parametrize("learnable_masks", [True, False], ids=["learned", "fixed"])


def pair(*args: Any, seed: int = 0, **options: Any) -> list[nn.Module]:
    """An MGLUExperts and a NaiveMGLUExperts with the same parameters, drawn from one seed."""
    layers = []
    for kind in KINDS:
        torch.manual_seed(seed)
        layers.append(kind(*args, **options))
    return layers


def results(layer: nn.Module, x: Tensor, ids: Tensor, grad: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    y = layer(x, ids)
    named = {name: parameter for name, parameter in layer.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(y, [x, *named.values()], grad)
    return {"y": y.detach(), "x": grads[0]} | dict(zip(named, grads[1:], strict=True))


def layer_of(layer: nn.Module, expert: int, kind: type[nn.Module] = MGLU) -> nn.Module:
    """One expert as a layer of its own."""
    options = {"weight_format": layer.weight_format, "top_k": layer.top_k, "activation": layer.activation}
    sizes = {"n_masks": layer.n_masks, "learnable_masks": layer.learnable_masks, "dtype": layer.weight.dtype}
    sizes |= {} if layer.weight_format == "dense" else {"dtype": None}
    one = kind(layer.in_features, layer.out_features, **options, **sizes)
    state = layer.state_dict()
    one.load_state_dict({name: t if name.startswith("router") else t[expert] for name, t in state.items()})
    return one


def saved_and_loaded(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)
