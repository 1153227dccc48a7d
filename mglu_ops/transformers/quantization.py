"""What a configuration says of the weights that `mglu_ops.quantize` has stored in 8 or 4 bits."""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats import get_format
from ..nn.mask_logits import without_wrappers
from ..nn.masked_linear import MaskedLinear

METHOD = "mglu"
"""The `quant_method` of this package."""

_PLACES = ("quantization_config", "mglu_quantization_config")
"""The keys of a configuration that may hold ours: the second where a quantizer of linear layers has the first."""


@register_quantization_config(METHOD)
class MGLUQuantizationConfig(QuantizationConfigMixin):
    """The format of the stored weights of MGLU layers, which `save_pretrained` writes into `config.json`.

        "quantization_config": {"quant_method": "mglu", "weight_format": "fp8_row", "modules_to_not_convert": []}

    Layers of other classes are not quantized by it. If the model was loaded with another quantizer, for its linear
    layers, that one keeps the key `quantization_config`, and this is `mglu_quantization_config`.

    Args:
        weight_format: a name in `mglu_ops.formats`.
        modules_to_not_convert: names of MGLU layers whose weight is dense, as in `model.named_modules()`.

    Raises:
        ValueError: there is no such format.
    """

    def __init__(
        self, weight_format: str, modules_to_not_convert: list[str] | None = None, quant_method: str = METHOD
    ) -> None:
        self.quant_method: Any = quant_method
        self.weight_format = get_format(weight_format).name
        self.modules_to_not_convert = modules_to_not_convert or []

    def format_of(self, name: str) -> str:
        """The format of the MGLU layer of that name in the language model or in its decoder."""
        dense = {other.removeprefix("model.") for other in self.modules_to_not_convert}
        return "dense" if name.removeprefix("model.") in dense else self.weight_format


@register_quantizer(METHOD)
class MGLUQuantizer(HfQuantizer):
    """Tells Transformers that a model is quantized; the model itself builds its layers with stored weights.

    Raises:
        ValueError: the checkpoint is not quantized.
    """

    is_trainable = True  # adapters of other layers: the gradient of x is computed
    is_compileable = True

    def __init__(self, quantization_config: Any, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        if not self.pre_quantized:
            raise ValueError(
                f"quantization_config: got {METHOD!r} for a checkpoint that is not quantized; load it without "
                "quantization_config, freeze it, and call mglu_ops.quantize(model, "
                f"{quantization_config.weight_format!r})"
            )

    def is_serializable(self) -> bool:
        return True


def stored_weights(config: Any) -> MGLUQuantizationConfig:
    """What a configuration says of the weights of its MGLU layers; the format is `dense` if it says nothing."""
    for place in _PLACES:
        found = dict(getattr(config, place, None) or {})
        if found.get("quant_method") == METHOD:
            return MGLUQuantizationConfig(**found)
    return MGLUQuantizationConfig("dense")


def describe_stored_weights(model: nn.Module, config: Any) -> None:
    """Write the format of a model's weights into its configuration.

    Raises:
        ValueError: layers have different formats with 8 or 4 bits.
    """
    formats = {
        without_wrappers(name): module.weight_format
        for name, module in model.named_modules()
        if isinstance(module, MaskedLinear)
    }
    quantized = sorted(set(formats.values()) - {"dense"})
    if len(quantized) > 1:
        raise ValueError(
            f"model: some layers are quantized to {' and others to '.join(quantized)}, which no configuration "
            "describes; quantize all of them, or all but those in skip, to one format"
        )
    for weight_format in quantized:
        dense = [name for name, other in formats.items() if other == "dense"]
        place, beside = _PLACES
        other = dict(getattr(config, place, None) or {})
        is_ours = other.get("quant_method", METHOD) == METHOD
        setattr(config, place if is_ours else beside, MGLUQuantizationConfig(weight_format, dense).to_dict())
