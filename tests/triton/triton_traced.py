"""What a compiler sees of mglu::forward on a GPU, traced without one: test_triton.py runs this file."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensorMode, dispatch_functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from mglu_ops.backends import triton as backend
from mglu_ops.backends.triton.tracing import functional_rule

library = torch.library.Library("mglu_traced", "FRAGMENT")
library.define(
    'forward(Tensor x, Tensor weight, Tensor packed_masks, str activation="silu", Tensor? route_weights=None) -> Tensor'
)
torch.library.register_fake(
    "mglu_traced::forward", lambda x, weight, *_: x.new_empty((*x.shape[:-1], weight.shape[0])), lib=library
)
torch.library.register_torch_dispatch("mglu_traced::forward", FunctionalTensorMode, functional_rule, lib=library)


def trace(tokens: tuple[int, ...], dtype: torch.dtype) -> str:
    def layer(x: Tensor, weight: Tensor, packed_masks: Tensor) -> Tensor:
        return torch.ops.mglu_traced.forward(x, weight, packed_masks) * 2

    with FakeTensorMode():
        x = torch.empty(*tokens, 64, device="cuda", dtype=dtype)
        weight = torch.empty(32, 64, device="cuda", dtype=dtype)
        packed_masks = torch.empty(32, 8, 4, device="cuda", dtype=torch.uint8)
        return str(make_fx(dispatch_functionalize(layer))(x, weight, packed_masks).code)


@pytest.fixture(autouse=True)
def _some_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_device_reason", lambda device: None)


@pytest.mark.parametrize("tokens", [(1,), (2, 3), (64,), ()])
def test_the_launch_takes_the_place_of_the_op(tokens: tuple[int, ...]) -> None:
    code = trace(tokens, torch.float16)
    assert code.count("triton_kernel_wrapper_functional") >= 1
    assert "mglu_traced" not in code


@pytest.mark.parametrize(("tokens", "dtype"), [((65,), torch.float16), ((1,), torch.float64)])
def test_what_the_backend_cannot_take_stays_the_op(tokens: tuple[int, ...], dtype: torch.dtype) -> None:
    code = trace(tokens, dtype)
    assert "triton_kernel_wrapper" not in code
    assert "mglu_traced.forward" in code
