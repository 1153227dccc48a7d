"""How a configuration describes the weights that `mglu_ops.quantize` has stored in 8 or 4 bits."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from transformers.quantizers import HfQuantizer
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from ..formats import check_activation_format, get_format
from ..nn.mask_logits import without_wrappers
from ..nn.masked_linear import MaskedLinear
from ..nn.quantizing import dequantize
from ..nn.stored_linear import StoredLinear

METHOD = "mglu"
"""The name of this package's method, the value of the key `quant_method`."""

_PLACES = ("quantization_config", "mglu_quantization_config")
"""The keys that may hold an `MGLUQuantizationConfig`: the second if a quantizer of linear layers has the first."""


@register_quantization_config(METHOD)
class MGLUQuantizationConfig(QuantizationConfigMixin):
    """The format of the stored weights of MGLU layers, which `save_pretrained` writes into `config.json`.

        "quantization_config": {"quant_method": "mglu", "weight_format": "fp8_row", "modules_to_not_convert": []}

    The weight format also holds for the down projections of experts, but the activation format does not. Layers of
    other classes are not quantized by this package. If the model was loaded with another quantizer for its linear
    layers, that quantizer keeps the key `quantization_config`, and `mglu_quantization_config` holds this entry.

    Args:
        weight_format: a name in `mglu_ops.formats`.
        modules_to_not_convert: names, as in `model.named_modules()`, of MGLU layers and down projections of experts
            whose weight is dense. A model refuses names of other modules when it is made.
        activation_format: the format, a name in `mglu_ops.formats`, to which the quantized MGLU layers round x. If it
            is `dense`, the dictionary does not contain it, so that versions without this argument can read it.

    Raises:
        ValueError: there is no such format, or the two formats do not go together; or an argument is missing, has
            another type or is unknown.
    """

    activation_format: str = "dense"

    def __init__(
        self,
        weight_format: str | None = None,
        modules_to_not_convert: list[str] | None = None,
        quant_method: str = METHOD,
        activation_format: str = "dense",
        **unknown: Any,
    ) -> None:
        # Raise a ValueError, not a TypeError as for a wrong call, because the arguments come from a configuration file.
        for name, value in unknown.items():
            raise ValueError(
                f"quantization_config: got {name}={value!r}, must have no keys but quant_method, weight_format, "
                "modules_to_not_convert and activation_format; a later version of mglu_ops may know it"
            )
        if quant_method != METHOD:
            raise ValueError(f"quant_method: got {quant_method!r}, must be {METHOD!r}")
        names = [] if modules_to_not_convert is None else modules_to_not_convert
        if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
            raise ValueError(f"modules_to_not_convert: got {names!r}, must be a list of names of modules, each a str")
        self.quant_method: Any = quant_method
        self.weight_format = get_format(weight_format).name  # type: ignore[arg-type] # None is refused
        check_activation_format(activation_format, self.weight_format)
        if activation_format != "dense":
            self.activation_format = activation_format
        self.modules_to_not_convert = list(names)

    def check_names(self, layers: Iterable[str]) -> None:
        """Check that `modules_to_not_convert` names layers of a decoder.

        Raises:
            ValueError: a name is none of `layers`, the names of all layers that have a format.
        """
        known = {_in_decoder(name) for name in layers}
        for name in self.modules_to_not_convert:
            if _in_decoder(name) not in known:
                raise ValueError(
                    f"modules_to_not_convert: got {name!r}, must be names of layers with a weight_format, which are "
                    f"{', '.join(sorted(known)[:20])}"
                )

    def formats_of(self, name: str) -> tuple[str, str]:
        """The weight format and the activation format of a layer, by its name in the language model or the decoder."""
        is_dense = _in_decoder(name) in map(_in_decoder, self.modules_to_not_convert)
        return ("dense", "dense") if is_dense else (self.weight_format, self.activation_format)


def _in_decoder(name: str) -> str:
    """A layer's name in the decoder, from its name in the decoder or in the language model."""
    return name.removeprefix("model.")


@register_quantizer(METHOD)
class MGLUQuantizer(HfQuantizer):
    """Tells Transformers that a model is quantized; the model itself builds its layers with stored weights.

    Raises:
        ValueError: the checkpoint is not quantized.
    """

    is_trainable = True  # adapters of other layers can be trained, since MGLU layers compute the gradient of x
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

    def _dequantize(self, model: Any, dtype: Any = None) -> Any:
        # `save_pretrained` turns the dtype of a config into its name.
        return dequantize(model, dtype=getattr(torch, dtype) if isinstance(dtype, str) else dtype)


def stored_weights(config: Any) -> MGLUQuantizationConfig:
    """Read how a configuration describes the weights of its MGLU layers. Without a description, the format is `dense`.

    Raises:
        ValueError: the value of `quantization_config` or `mglu_quantization_config` is not a dictionary, or not one
            that `MGLUQuantizationConfig` accepts.
    """
    own = _own_entry(config)
    return MGLUQuantizationConfig("dense") if own is None else MGLUQuantizationConfig(**own[1])


def _own_entry(config: Any) -> tuple[str, dict[str, Any]] | None:
    """The key and the value of this package's entry in a configuration; None if there is none."""
    for place in _PLACES:
        found = getattr(config, place, None)
        if found is None:
            continue
        if not isinstance(found, (Mapping, QuantizationConfigMixin)):
            raise ValueError(f"{place}: got {found!r}, must be a dictionary with the key quant_method, or None")
        entries = dict(found)
        if place == _PLACES[1] or entries.get("quant_method") == METHOD:
            return place, entries
    return None


def describe_stored_weights(model: nn.Module, config: Any) -> None:
    """Write the format of a model's weights into its configuration.

    Raises:
        ValueError: quantized layers have different weight formats or different activation formats.
    """
    layers = {
        without_wrappers(name): module for name, module in model.named_modules() if isinstance(module, StoredLinear)
    }
    stored = {module for module in layers.values() if module.weight_format != "dense"}
    formats = {(one.weight_format, one.activation_format) for one in stored if isinstance(one, MaskedLinear)}
    # Down projections of experts have no activation format, so they do not conflict with an MGLU layer of the same
    # weight format.
    others = {one.weight_format for one in stored} - {weight_format for weight_format, _ in formats}
    quantized = sorted(formats | {(weight_format, "dense") for weight_format in others})
    if len(quantized) > 1:
        names = (weight if x == "dense" else f"{weight} with x in {x}" for weight, x in quantized)
        raise ValueError(
            f"model: some layers are quantized to {' and others to '.join(names)}, which no configuration "
            "describes; quantize all of them, or all but those in skip, to one format"
        )
    own = _own_entry(config)
    if own is not None:  # it may be of weights that were dequantized since
        delattr(config, own[0])
    for weight_format, activation_format in quantized:
        dense = [name for name, module in layers.items() if module not in stored]
        described = MGLUQuantizationConfig(weight_format, dense, activation_format=activation_format)
        place = _PLACES[bool(getattr(config, _PLACES[0], None))]
        setattr(config, place, described.to_dict())
