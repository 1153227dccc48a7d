"""Exporting with the Triton backend replaces mglu::forward by the kernel's launch. test_triton.py runs this file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

import mglu_ops  # noqa: F401 (registers the operators)
from mglu_ops.packaging.export import _layers_as_code


def trace(backend: str, tokens: tuple[int, ...], dtype: torch.dtype) -> str:
    def layer(x: Tensor, weight: Tensor, packed_masks: Tensor) -> Tensor:
        return torch.ops.mglu.forward(x, weight, packed_masks) * 2

    with FakeTensorMode(), _layers_as_code(backend):
        x = torch.empty(*tokens, 64, device="cuda", dtype=dtype)
        weight = torch.empty(32, 64, device="cuda", dtype=dtype)
        packed_masks = torch.empty(32, 8, 4, device="cuda", dtype=torch.uint8)
        return str(make_fx(dispatch_functionalize(layer))(x, weight, packed_masks).code)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [(1,), (2, 3), (64,), (100,), ()])
def test_the_launch_takes_the_place_of_the_operator(tokens: tuple[int, ...], dtype: torch.dtype) -> None:
    code = trace("triton", tokens, dtype)
    assert "triton_kernel_wrapper_functional" in code
    assert "mglu.forward" not in code


def test_the_operator_stays_for_the_backends_of_compiled_code() -> None:
    code = trace("cuda", (3,), torch.float16)
    assert "triton_kernel_wrapper" not in code
    assert "mglu.forward" in code
