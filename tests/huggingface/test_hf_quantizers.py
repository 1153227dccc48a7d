"""Quantizers of Transformers, which replace linear layers and leave the weight of MGLU layers unchanged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hf_models import logits, tiny
from transformers import AutoModelForCausalLM
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING, AUTO_QUANTIZER_MAPPING
from transformers.utils.quantization_config import QuantizationConfigMixin


class NothingConfig(QuantizationConfigMixin):
    def __init__(self) -> None:
        self.quant_method: Any = "nothing"


class Nothing(HfQuantizer):
    """A quantizer that quantizes no layer."""

    requires_calibration = False
    is_trainable = False

    def is_serializable(self) -> bool:
        return False


def test_a_quantizer_that_leaves_the_weight_alone_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(AUTO_QUANTIZATION_CONFIG_MAPPING, "nothing", NothingConfig)
    monkeypatch.setitem(AUTO_QUANTIZER_MAPPING, "nothing", Nothing)
    tiny().save_pretrained(tmp_path)
    words = "quantization_config: nothing quantizes linear layers only, and leaves the weight of MGLU"
    with pytest.warns(UserWarning, match=words):
        model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=NothingConfig())
    assert torch.equal(logits(model), logits(tiny()))
