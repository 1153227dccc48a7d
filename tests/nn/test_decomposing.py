"""`decompose` turns an exported program into one without operators of this package, which ONNX accepts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mglu_ops.nn import MGLU, SwiMGLU, decompose, freeze
from tests.support.budgets import assert_matches


def exported(model: nn.Module, x: torch.Tensor) -> Any:
    tokens = torch.export.Dim("tokens", min=1, max=64)
    return torch.export.export(model, (x,), dynamic_shapes=({0: tokens},))


def operators(program: Any) -> set[str]:
    return {str(node.target) for node in program.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize(
    ("activation", "top_k", "dtype"),
    [("gelu", 2, torch.float32), pytest.param("relu_squared", None, torch.bfloat16, marks=pytest.mark.long)],
)
def test_a_program_is_written_out_and_computes_the_same(activation: str, top_k: int | None, dtype: torch.dtype) -> None:
    # With 19 columns, the last byte of a row of packed masks has padding.
    layer = MGLU(19, 24, n_masks=3, activation=activation, top_k=top_k)
    model = freeze(nn.Sequential(nn.Linear(19, 19), layer).to(dtype))
    program = exported(model, torch.randn(3, 19, dtype=dtype))
    assert "mglu.forward.default" in operators(program)
    written_out = decompose(program)
    assert not any("mglu" in name for name in operators(written_out))
    assert written_out.state_dict["1.packed_masks"].dtype == torch.uint8
    for tokens in (1, 5):
        x = torch.randn(tokens, 19, dtype=dtype)
        assert_matches(written_out.module()(x), model(x))


def test_formats_of_weight_and_x_are_written_out() -> None:
    formats = {"weight_format": "fp8_block", "activation_format": "fp8_token"}
    model, x = MGLU(19, 24, n_masks=3, learnable_masks=False, **formats), torch.randn(5, 19)
    written_out = decompose(exported(model, x))
    assert not any("mglu" in name for name in operators(written_out))
    assert_matches(written_out.module()(x), model(x))


def test_learned_masks_and_other_things_are_refused() -> None:
    message = r"layers with learned masks; call mglu_ops\.freeze\(model\) before torch\.export"
    with pytest.raises(ValueError, match=message):
        decompose(exported(SwiMGLU(8, 8), torch.randn(3, 8)))
    with pytest.raises(TypeError, match=r"program: got MGLU, must be what torch\.export\.export returns"):
        decompose(MGLU(8, 8))


@pytest.mark.long
def test_onnx_accepts_the_program(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript", reason="the tests do not depend on ONNX")
    runtime = pytest.importorskip("onnxruntime", reason="the tests do not depend on ONNX")
    model = freeze(nn.Sequential(nn.LayerNorm(19), SwiMGLU(19, 24, n_masks=3, top_k=2))).eval()
    torch.onnx.export(decompose(exported(model, torch.randn(3, 19))), f=tmp_path / "model.onnx")
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    for tokens in (1, 5):
        x = torch.randn(tokens, 19)
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert_matches(torch.from_numpy(y), model(x), torch.float32)
