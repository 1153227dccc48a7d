"""The table of architectures: which classes of Transformers the classes of this package replace."""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from .modeling import (
    MGLULlamaForCausalLM,
    MGLUMistralForCausalLM,
    MGLUMixtralForCausalLM,
    MGLUQwen3ForCausalLM,
    MGLUQwen3MoeForCausalLM,
)


class Architecture(NamedTuple):
    """The configuration of one architecture with MGLU, and its decoder and language model with SwiGLU and with MGLU."""

    config: type[Any]
    swiglu: tuple[type[Any], type[Any]]
    mglu: tuple[type[Any], type[Any]]

    @classmethod
    def of(cls, model: type[Any]) -> Architecture:
        """The architecture of a language model with MGLU, whose last base is the class of Transformers."""
        decoder = model.decoder_class
        return cls(model.config_class, (decoder.__bases__[-1], model.__bases__[-1]), (decoder, model))


_DENSE = (MGLULlamaForCausalLM, MGLUQwen3ForCausalLM, MGLUMistralForCausalLM)
_MIXTURES = (MGLUQwen3MoeForCausalLM, MGLUMixtralForCausalLM)
ARCHITECTURES = tuple(map(Architecture.of, (*_DENSE, *_MIXTURES)))


def register() -> None:
    """Register every architecture with the Auto classes; a second call does no harm."""
    for architecture in ARCHITECTURES:
        decoder, language_model = architecture.mglu
        AutoConfig.register(architecture.config.model_type, architecture.config, exist_ok=True)
        AutoModel.register(architecture.config, decoder, exist_ok=True)
        AutoModelForCausalLM.register(architecture.config, language_model, exist_ok=True)
