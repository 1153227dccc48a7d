"""State dicts remember how weights were initialized, and refuse dtypes that weights or logits cannot have."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

from mglu_ops.nn import MGLU, NaiveMGLU, SwiMGLU, freeze, parameter_groups

MASKED = pytest.mark.parametrize("kind", [MGLU, NaiveMGLU])


def saved_and_loaded(state: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@MASKED
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_takes_weight_init_with_the_weight(kind: type[nn.Module], assign: bool) -> None:
    """After loading, the masks' learning rate is the one for the loaded weights."""
    leveled = nn.ModuleDict({"layer": kind(8, 8, weight_init="leveled")})
    state = leveled.state_dict()
    assert set(state) == {"layer.weight", "layer.mask_logits"}
    layer = nn.ModuleDict({"layer": kind(8, 8)})
    layer.load_state_dict(saved_and_loaded(state), assign=assign)
    assert layer["layer"].weight_init == "leveled"
    assert parameter_groups(layer, lr=1.0, weight_decay=0.0)[-1]["lr"] == pytest.approx(0.3)
    layer.load_state_dict(nn.ModuleDict({"layer": kind(8, 8)}).state_dict())
    assert layer["layer"].weight_init == "paper"


def test_other_copies_keep_weight_init() -> None:
    layer = SwiMGLU(8, 8, weight_init="leveled")
    assert copy.deepcopy(layer).mglu.weight_init == "leveled"
    assert freeze(copy.deepcopy(layer)).mglu.weight_init == "leveled"
    assert freeze(NaiveMGLU(8, 8, weight_init="leveled")).weight_init == "leveled"
    # A checkpoint without this metadata changes nothing. Safetensors files and older checkpoints have no metadata.
    layer.load_state_dict(dict(SwiMGLU(8, 8).state_dict()))
    assert layer.mglu.weight_init == "leveled"
    masks_alone = MGLU(8, 8).state_dict()
    del masks_alone["weight"]
    layer.mglu.load_state_dict(masks_alone, strict=False)
    assert layer.mglu.weight_init == "leveled"


@MASKED
@pytest.mark.parametrize("name", ["weight", "mask_logits"])
@pytest.mark.parametrize("options", [{}, {"strict": False}, {"assign": True}])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_dtypes_that_would_be_cast_are_refused(kind, name, options, dtype):
    layer = nn.ModuleDict({"layer": kind(8, 8)})
    before = {key: value.clone() for key, value in layer.state_dict().items()}
    state = {**kind(8, 8).state_dict(), name: torch.ones_like(getattr(layer["layer"], name)).to(dtype)}
    message = rf"layer\.{name}: got dtype {dtype}, must be one of torch\.float16"
    with pytest.raises(RuntimeError, match=message) as caught:
        layer.load_state_dict({f"layer.{key}": value for key, value in state.items()}, **options)
    assert "Missing" not in str(caught.value)
    assert str(caught.value).count("got dtype") == 1
    assert torch.equal(layer["layer"].get_parameter(name), before[f"layer.{name}"])


@pytest.mark.parametrize("is_frozen", [False, True])
def test_a_layer_with_both_forms_of_masks_is_refused(is_frozen: bool) -> None:
    """It would go on using the packed masks, which are random if only the logits were loaded."""
    learned, frozen = MGLU(8, 8), freeze(MGLU(8, 8))
    both = {**learned.state_dict(), **frozen.state_dict()}
    layer, problem = (frozen, "holds logits") if is_frozen else (learned, "holds packed masks")
    with pytest.raises(RuntimeError, match=rf"the checkpoint {problem}, but this MGLU"):
        layer.load_state_dict(both, strict=False)
    if is_frozen:
        with pytest.raises(ValueError, match="mask_logits: got a parameter, must be None in a MGLU with packed masks"):
            layer.mask_logits = nn.Parameter(torch.ones(1, 8, 8))
        options = StateDictOptions(full_state_dict=True, strict=False)
        with pytest.raises(RuntimeError, match="holds logits"):
            set_model_state_dict(layer, learned.state_dict(), options=options)
