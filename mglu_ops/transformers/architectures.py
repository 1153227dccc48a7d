"""The table of architectures: which classes of Transformers the classes of this package replace."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    LlamaForCausalLM,
    LlamaModel,
    MistralForCausalLM,
    MistralModel,
    Qwen3ForCausalLM,
    Qwen3Model,
)

from . import modeling


@dataclass(frozen=True)
class Architecture:
    """The classes of one architecture.

    Attributes:
        config: the configuration with MGLU.
        swiglu: the decoder and the language model of Transformers.
        mglu: the decoder and the language model with MGLU.
    """

    config: type[Any]
    swiglu: tuple[type[Any], type[Any]]
    mglu: tuple[type[Any], type[Any]]


ARCHITECTURES = (
    Architecture(
        modeling.MGLULlamaConfig,
        (LlamaModel, LlamaForCausalLM),
        (modeling.MGLULlamaModel, modeling.MGLULlamaForCausalLM),
    ),
    Architecture(
        modeling.MGLUQwen3Config,
        (Qwen3Model, Qwen3ForCausalLM),
        (modeling.MGLUQwen3Model, modeling.MGLUQwen3ForCausalLM),
    ),
    Architecture(
        modeling.MGLUMistralConfig,
        (MistralModel, MistralForCausalLM),
        (modeling.MGLUMistralModel, modeling.MGLUMistralForCausalLM),
    ),
)


def register() -> None:
    """Register every architecture with the Auto classes; a second call does no harm."""
    for architecture in ARCHITECTURES:
        decoder, language_model = architecture.mglu
        AutoConfig.register(architecture.config.model_type, architecture.config, exist_ok=True)
        AutoModel.register(architecture.config, decoder, exist_ok=True)
        AutoModelForCausalLM.register(architecture.config, language_model, exist_ok=True)
