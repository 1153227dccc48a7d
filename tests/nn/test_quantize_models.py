"""`quantize` and `dequantize` of whole models: which layers they take, what `skip` leaves, and what they refuse."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import mglu_ops
from mglu_ops.nn import MGLU, MGLUFeedForward, NaiveMGLU, SwiMGLU, freeze, quantize

FROZEN = freeze(SwiMGLU(16, 24))


class Blocks(nn.Module):
    """A layer with two names, layers that share a weight, and blocks that `skip` can name."""

    def __init__(self) -> None:
        super().__init__()
        self.first = MGLU(16, 16, n_masks=2)
        self.again = self.first
        self.tied = MGLU(16, 16, n_masks=3, learnable_masks=False)
        self.tied.weight = self.first.weight
        self.blocks = nn.ModuleList(SwiMGLU(16, 24) for _ in range(3))


def formats_of(model: nn.Module) -> list[str]:
    return [module.weight_format for module in model.modules() if isinstance(module, MGLU)]


def test_every_layer_is_quantized_and_shared_weights_stay_shared() -> None:
    model = freeze(Blocks())
    calls: list[Any] = []
    model.first.register_forward_hook(lambda *_: calls.append(1))
    quantize(model, "int4_group")
    assert formats_of(model) == ["int4_group"] * 5
    assert model.again is model.first
    assert model.tied.weight is model.first.weight
    assert model.tied.weight_scale is model.first.weight_scale
    model.again(torch.randn(2, 16))
    assert calls
    weights = [module.weight for module in model.modules() if isinstance(module, MGLU)]
    quantize(model, "int4_group")
    assert all(a is b for a, b in zip(weights, (m.weight for m in model.modules() if isinstance(m, MGLU)), strict=True))
    assert "weight_format='int4_group'" in repr(model.first)
    assert "weight_format" not in repr(MGLU(8, 8))


@pytest.mark.parametrize(
    ("skip", "kept"),
    [
        (["blocks.1"], [3]),
        (["blocks.*.mglu"], [2, 3, 4]),
        (["again"], [0]),
        (("tied", "blocks.2.mglu"), [1, 4]),
        (["*"], [0, 1, 2, 3, 4]),
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_skipped_layers_stay_dense(skip: Any, kept: list[int], compiled: bool) -> None:
    model = freeze(Blocks())
    quantize(torch.compile(model) if compiled else model, "fp8_block", skip=skip)
    assert [i for i, name in enumerate(formats_of(model)) if name == "dense"] == kept


def test_dequantizing_keeps_what_skip_names_and_what_is_shared() -> None:
    model = quantize(freeze(Blocks()), "fp8_row", activation_format="fp8_token")
    mglu_ops.dequantize(model, skip=["blocks.1"])
    assert formats_of(model) == ["dense"] * 3 + ["fp8_row", "dense"]
    assert [module.activation_format for module in model.modules() if isinstance(module, MGLU)].count("dense") == 4
    assert model.tied.weight is model.first.weight
    with pytest.raises(ValueError, match=r"skip: no MGLU has the name 'nowhere'"):
        mglu_ops.dequantize(model, skip=["nowhere"])
    with pytest.raises(TypeError, match=r"model: got int, must be a torch\.nn\.Module"):
        mglu_ops.dequantize(3)
    with pytest.raises(ValueError, match=r"dtype: got torch\.int8, must be"):
        mglu_ops.dequantize(model, dtype=torch.int8)


def _with_weight(layer: MGLU, value: float) -> MGLU:
    layer.weight.data[1, 2] = value
    return layer


def _own_weight(layer: MGLU) -> MGLU:
    parametrize.register_parametrization(layer, "weight", nn.Identity())
    return layer


# Name -> a layer that cannot be quantized to int4_group, and the error.
REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "learned": (lambda: MGLU(16, 8), r"1\.mglu learns its masks, must be frozen .* mglu_ops\.freeze\(model\) first"),
    "naive": (lambda: freeze(NaiveMGLU(16, 8, bias=True)), r"1\.mglu is a NaiveMGLU, .* name it in skip"),
    "another format": (
        lambda: MGLU(16, 8, learnable_masks=False, weight_format="int8_row"),
        r"1\.mglu is quantized to int8_row already, .* or quantize the dense model to int4_group",
    ),
    "parametrized": (lambda: _own_weight(freeze(MGLU(16, 8))), r"1\.mglu computes its weight from other tensors"),
    "NaN": (
        lambda: _with_weight(freeze(MGLU(16, 8)), torch.nan),
        r"1\.mglu\.weight: got nan in float32, must be finite",
    ),
    "infinite": (lambda: _with_weight(freeze(MGLU(16, 8)), -torch.inf), r"1\.mglu\.weight: got inf in float32, must"),
    "too large": (
        lambda: _with_weight(freeze(MGLU(16, 8, dtype=torch.float64)), 1e300),
        r"1\.mglu\.weight: got inf in float32, must be finite: other weights share its scale; name it in skip",
    ),
    "odd": (
        lambda: freeze(MGLU(15, 8)),
        r"1\.mglu: weight_format: got 'int4_group' with in_features=15, which must be a multiple of 2",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_all_layers_are_quantized_or_none(name: str) -> None:
    make, words = REFUSED[name]
    model = nn.Sequential(freeze(MGLU(16, 16)), nn.ModuleDict({"mglu": make()}))
    with pytest.raises(ValueError, match=f"^model: {words}"):
        quantize(model, "int4_group")
    assert model[0].weight_format == "dense"
    quantize(model, "int4_group", skip=["1.mglu"])
    assert model[0].weight_format == "int4_group"


@pytest.mark.parametrize(
    ("model", "weight_format", "options", "error", "words"),
    [
        (nn.Linear(2, 2), "fp8_row", {}, ValueError, "model: got a Linear without an MGLU, must have one"),
        ("model", "fp8_row", {}, TypeError, r"model: got str, must be a torch\.nn\.Module"),
        (MGLU(8, 8), "fp8_row", {}, ValueError, r"model: it learns its masks, must be frozen"),
        (FROZEN, "dense", {}, ValueError, "weight_format: got 'dense', must be one of fp8_row, fp8_block"),
        (FROZEN, "fp8", {}, ValueError, "weight_format: got 'fp8', must be one of fp8_row, .*, int4_group$"),
        (FROZEN, ["fp8_row"], {}, ValueError, r"weight_format: got \['fp8_row'\], must be one of fp8_row, fp8_block"),
        (FROZEN, "fp8_row", {"skip": "mglu"}, TypeError, "skip: got 'mglu', must be a list of names of modules"),
        (FROZEN, "fp8_row", {"skip": [1]}, TypeError, "skip: got 1 in the list, must be a str"),
        (
            FROZEN,
            "fp8_row",
            {"skip": ["down_proj"]},
            ValueError,
            "skip: no MGLU has the name 'down_proj'.*it has mglu",
        ),
    ],
)
def test_wrong_arguments_are_refused(model, weight_format, options, error, words):
    with pytest.raises(error, match=words):
        mglu_ops.quantize(model, weight_format, **options)


def test_wrong_constructor_arguments_are_refused() -> None:
    for make in (MGLU, MGLUFeedForward):
        with pytest.raises(
            ValueError, match=r"weight_format: got 'fp8_row' with learnable_masks=True, must be 'dense'"
        ):
            make(16, 16, weight_format="fp8_row")
        with pytest.raises(ValueError, match=r"weight_format: got 'int4_group' with in_features=15"):
            make(15, 16, weight_format="int4_group", learnable_masks=False)
        with pytest.raises(ValueError, match=r"weight_format: got 'int3', must be one of dense, fp8_row"):
            make(16, 16, weight_format="int3", learnable_masks=False)
    with pytest.raises(ValueError, match=r"weight_format: got 'fp8_row', must be 'dense' for NaiveMGLU"):
        NaiveMGLU(16, 16, weight_format="fp8_row", learnable_masks=False)
