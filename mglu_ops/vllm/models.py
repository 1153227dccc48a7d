"""vLLM's Llama, Qwen3 and Mistral with MGLU feed-forward layers, and Qwen3-MoE and Mixtral with MGLU experts.

vLLM imports this module when it loads such a model. Each decoder layer is vLLM's own, with its feed-forward layer
replaced. The decoder layer is built from a config in which its first feed-forward layer is as small as possible, so
that the discarded weights take little memory. Qwen3-MoE uses Qwen3's decoder layers, and Mixtral uses Mistral's. They
differ from the decoder layers of vLLM's mixtures only in the feed-forward layer. vLLM's own mixtures would register
their experts, and thus keep the discarded weights.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.models.llama import LlamaDecoderLayer, LlamaForCausalLM
from vllm.model_executor.models.mistral import MistralDecoderLayer, MistralForCausalLM
from vllm.model_executor.models.qwen2 import Qwen2Model
from vllm.model_executor.models.qwen3 import Qwen3DecoderLayer, Qwen3Model

from ..transformers.quantization import stored_weights
from .experts import MGLUMoE, has_experts
from .kernels import compile_in_background, steps
from .layers import MGLUMLP, check_loaded

if TYPE_CHECKING:
    from transformers import PretrainedConfig
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.quantization import QuantizationConfig

_STACKED = {"qkv_proj": ["q_proj", "k_proj", "v_proj"]}
"""The projections that vLLM stacks in these models. MGLU has no gate and up projections, which vLLM stacks too."""


def _with_small_mlp(config: PretrainedConfig) -> PretrainedConfig:
    """Copy a config so that vLLM's feed-forward layer, which is then replaced, has only 128 channels per rank.

    Some quantization configs refuse fewer than 128 channels.
    """
    small: Any = copy.copy(config)
    small.intermediate_size, small.hidden_act = 128 * get_tensor_model_parallel_world_size(), "silu"
    return small


def _feed_forward(config: PretrainedConfig, quant_config: QuantizationConfig | None, prefix: str) -> MGLUMLP | MGLUMoE:
    return (MGLUMoE if has_experts(config, prefix) else MGLUMLP)(config, quant_config, prefix)


class MGLULlamaDecoderLayer(LlamaDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: PretrainedConfig | None = None) -> None:
        config = config or vllm_config.model_config.hf_config
        super().__init__(vllm_config, prefix=prefix, config=_with_small_mlp(config))
        self.mlp = _feed_forward(config, vllm_config.quant_config, f"{prefix}.mlp")


class MGLUMistralDecoderLayer(MistralDecoderLayer):
    def __init__(self, vllm_config: VllmConfig, prefix: str = "", config: PretrainedConfig | None = None) -> None:
        config = config or vllm_config.model_config.hf_config
        super().__init__(vllm_config, prefix=prefix, config=_with_small_mlp(config))
        self.mlp = _feed_forward(config, vllm_config.quant_config, f"{prefix}.mlp")


class MGLUQwen3DecoderLayer(Qwen3DecoderLayer):
    def __init__(self, config: PretrainedConfig, *args: Any, prefix: str = "", **settings: Any) -> None:
        super().__init__(_with_small_mlp(config), *args, prefix=prefix, **settings)
        self.mlp = _feed_forward(config, settings.get("quant_config"), f"{prefix}.mlp")


class MGLUQwen3Model(Qwen3Model):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        # Qwen3Model's own method only names the class of the layers, which in vLLM 0.26 nobody can change.
        layers = {"decoder_layer_type": MGLUQwen3DecoderLayer}
        Qwen2Model.__init__(self, vllm_config=vllm_config, prefix=prefix, **layers)


def compile_kernels(model: nn.Module, vllm_config: VllmConfig) -> None:
    """Compile the kernels of all steps in the background, for layers on a GPU."""
    layers = {tuple(one.calls(1)): one for one in model.modules() if isinstance(one, (MGLUMLP, MGLUMoE))}
    if not any(call.device.type == "cuda" for calls in layers for _, call in calls):
        return
    captured = vllm_config.compilation_config.cudagraph_capture_sizes or ()
    sizes = steps(captured, vllm_config.scheduler_config.max_num_batched_tokens)
    compile_in_background(pair for tokens in sizes for layer in layers.values() for pair in layer.calls(tokens))


class _LoadedWhole(LlamaForCausalLM):
    """A model that refuses a checkpoint in which tensors of its MGLU layers are missing."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "", **settings: Any) -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, **settings)
        has_layers = self.model.start_layer < self.model.end_layer  # a stage of a pipeline may have none
        if has_layers and not any(isinstance(module, (MGLUMLP, MGLUMoE)) for module in self.modules()):
            raise TypeError(f"{type(self).__name__}: this version of vLLM has built its own layers in place of MGLU's")
        if vllm_config.parallel_config.pipeline_parallel_size == 1:
            stored = stored_weights(vllm_config.model_config.hf_config)
            stored.check_names(name for name, module in self.named_modules() if hasattr(module, "weight_format"))
        self.loaded_names: set[str] = set()
        compile_kernels(self, vllm_config)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded = super().load_weights(weights)
        self.loaded_names |= loaded
        check_loaded(self, self.loaded_names)
        return loaded


class MGLULlamaForCausalLM(_LoadedWhole):
    """Llama with an MGLU feed-forward layer."""

    packed_modules_mapping = _STACKED

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=MGLULlamaDecoderLayer)


class MGLUMistralForCausalLM(_LoadedWhole, MistralForCausalLM):
    """Mistral with an MGLU feed-forward layer."""

    packed_modules_mapping = _STACKED

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix, layer_type=MGLUMistralDecoderLayer)


class MGLUQwen3ForCausalLM(_LoadedWhole):
    """Qwen3 with an MGLU feed-forward layer.

    vLLM's Qwen3ForCausalLM has no argument for the class of its layers. This class therefore derives from
    LlamaForCausalLM, which differs from Qwen3ForCausalLM only in the inner model, and overrides the method that makes
    the inner model.
    """

    packed_modules_mapping = _STACKED
    hf_to_vllm_mapper = Qwen3Model.hf_to_vllm_mapper

    def _init_model(
        self, vllm_config: VllmConfig, prefix: str = "", layer_type: type[nn.Module] = MGLUQwen3DecoderLayer
    ) -> MGLUQwen3Model:
        if getattr(vllm_config.model_config.hf_config, "attention_bias", False):
            raise ValueError("attention_bias: got True, must be False for Qwen3: vLLM ignores the bias of o_proj")
        return MGLUQwen3Model(vllm_config=vllm_config, prefix=prefix)


class MGLUQwen3MoeForCausalLM(MGLUQwen3ForCausalLM):
    """Qwen3-MoE with MGLU experts; layers without experts have an MGLU feed-forward layer."""


class MGLUMixtralForCausalLM(MGLUMistralForCausalLM):
    """Mixtral with MGLU experts."""
