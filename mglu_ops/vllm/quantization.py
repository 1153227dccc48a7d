"""vLLM's quantization config for models whose MGLU weights `mglu_ops.quantize` has quantized."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase

from ..checks import FLOATING

METHOD = "mglu"
"""The name of the method in a model's config, equal to `mglu_ops.transformers.quantization.METHOD`."""


class MGLUConfig(QuantizationConfig):
    """Keeps linear layers and embeddings in the model's dtype. `MGLUMLP` reads the format of its weight itself."""

    @classmethod
    def get_name(cls) -> Any:
        return METHOD

    @classmethod
    def get_supported_act_dtypes(cls) -> list[torch.dtype]:
        return list(FLOATING)

    @classmethod
    def get_min_capability(cls) -> int:
        return 0  # `mglu_ops` has a backend for every device

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> MGLUConfig:
        return cls()

    def get_quant_method(self, layer: nn.Module, prefix: str) -> QuantizeMethodBase | None:
        """Return the method that keeps a linear layer dense. vLLM calls this for each layer that it builds.

        Raises:
            ValueError: vLLM's Transformers backend runs the model, and would cast quantized weights to the model's
                dtype.
        """
        from vllm.config import get_current_vllm_config
        from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod

        model = get_current_vllm_config().model_config
        if model is not None and model.using_transformers_backend():
            raise ValueError(
                f"architectures: got {model.architecture!r}, the Transformers backend, which casts quantized weights; "
                "must be left out of hf_overrides for a model that mglu_ops.quantize has quantized"
            )

        return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
