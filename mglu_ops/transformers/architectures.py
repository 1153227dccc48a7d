"""The models of this package: a table with one row per model, from which its classes are made and registered.

Each row is a call of `_classes` at the end of this file. It makes classes with the names of Transformers' classes and
MGLU in front. To add an architecture, add a row here and a row to the table in README.md. The tests take the models
from this file, and the sizes of tiny models from `tests/support/hf_models.py`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import transformers as hf
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers.utils.output_capturing import OutputRecorder

from .configuration import MGLUBalanceConfigMixin, MGLUConfigMixin
from .modeling import MGLUForCausalLMMixin, MGLUModelMixin, MGLUMoeForCausalLMMixin, MGLUMoeModelMixin


class Architecture(NamedTuple):
    """The classes of one architecture: the configuration with MGLU, and two pairs of decoder and language model."""

    config: type[Any]
    swiglu: tuple[type[Any], type[Any]]
    mglu: tuple[type[Any], type[Any]]


ARCHITECTURES: list[Architecture] = []

_DENSE = (MGLUBalanceConfigMixin, MGLUModelMixin, MGLUForCausalLMMixin)
_MIXTURE = (MGLUConfigMixin, MGLUMoeModelMixin, MGLUMoeForCausalLMMixin)


def _classes(name: str, decoder_name: str | None = None) -> tuple[type[Any], type[Any], type[Any]]:
    """Make the configuration, the decoder and the language model of an architecture, and register them.

    Args:
        name: the name of the language model in Transformers without `ForCausalLM`. Its only parts must be `model`, the
            decoder, and `lm_head`.
        decoder_name: the name of the configuration and the decoder in Transformers without `Config` and `Model`, if it
            differs from `name`. The feed-forward layers of the decoder must be `layers.N.mlp`. The tensor-parallel plan
            of the configuration tells whether these layers have experts.
    """
    config, decoder = (getattr(hf, (decoder_name or name) + kind) for kind in ("Config", "Model"))
    language_model = getattr(hf, f"{name}ForCausalLM")
    has_experts = any(layer.startswith("layers.*.mlp.experts") for layer in config.base_model_tp_plan)
    mixins = _MIXTURE if has_experts else _DENSE
    keys = {"model_type": f"mglu_{config.model_type}", **_plans(config.base_model_tp_plan, has_experts)}
    made = strict(_derived(mixins[0], config, f"with the keys of `{mixins[0].__name__}`", keys))
    layers = "with MGLU experts" if has_experts else "with MGLU feed-forward layers"
    parts: dict[str, Any] = {"config_class": made}
    if not has_experts:  # record the logits of mask routers; in a mixture, router_logits come from experts' routers
        recorder = OutputRecorder(nn.Linear, layer_name="router")
        parts["_can_record_outputs"] = {**decoder._can_record_outputs, "router_logits": recorder}
    own_decoder = _derived(mixins[1], decoder, layers, parts)
    own_model = _derived(mixins[2], language_model, layers, {"config_class": made, "decoder_class": own_decoder})
    hf.AutoConfig.register(made.model_type, made, exist_ok=True)
    hf.AutoModel.register(made, own_decoder, exist_ok=True)
    hf.AutoModelForCausalLM.register(made, own_model, exist_ok=True)
    ARCHITECTURES.append(Architecture(made, (decoder, language_model), (own_decoder, own_model)))
    return made, own_decoder, own_model


def _plans(plan: dict[str, str], has_experts: bool) -> dict[str, dict[str, str]]:
    """Make parallel plans from the tensor-parallel plan of a base configuration, with MGLU in place of SwiGLU."""
    own = {name: style for name, style in plan.items() if ".mlp." not in name}
    if "layers.*.mlp.gate_proj" in plan:
        own |= {"layers.*.mlp.mglu": "mglu_colwise", "layers.*.mlp.down_proj": "rowwise"}
    if not has_experts:
        return {"base_model_tp_plan": own}
    experts = "layers.*.mlp.experts"
    return {"base_model_tp_plan": {**own, experts: "mglu_expert_rows"}, "base_model_ep_plan": {experts: "mglu_experts"}}


def _derived(mixin: type[Any], base: type[Any], difference: str, attributes: dict[str, Any]) -> type[Any]:
    """Make a class called `MGLU<name of base>`. Pickle looks the class up in this module by this name."""
    doc = f"`{base.__name__}` {difference}."
    return type(f"MGLU{base.__name__}", (mixin, base), {"__module__": __name__, "__doc__": doc, **attributes})


MGLULlamaConfig, MGLULlamaModel, MGLULlamaForCausalLM = _classes("Llama")
MGLUQwen2Config, MGLUQwen2Model, MGLUQwen2ForCausalLM = _classes("Qwen2")
MGLUQwen3Config, MGLUQwen3Model, MGLUQwen3ForCausalLM = _classes("Qwen3")
MGLUGemma3TextConfig, MGLUGemma3TextModel, MGLUGemma3ForCausalLM = _classes("Gemma3", "Gemma3Text")
MGLUMistralConfig, MGLUMistralModel, MGLUMistralForCausalLM = _classes("Mistral")
MGLUQwen3MoeConfig, MGLUQwen3MoeModel, MGLUQwen3MoeForCausalLM = _classes("Qwen3Moe")
MGLUMixtralConfig, MGLUMixtralModel, MGLUMixtralForCausalLM = _classes("Mixtral")

__all__ = [cls.__name__ for row in ARCHITECTURES for cls in (row.config, *row.mglu)]
