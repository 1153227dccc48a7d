"""Mixins that add MGLU to the model classes of Transformers. All architectures share them.

Attention, norms, caches, losses and the routing of tokens to experts come from the Transformers classes that the models
derive from (`architectures.py`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple

from .. import nn as mglu_nn
from .. import notices
from ..nn import MGLU, MGLUFeedForward
from ..nn.stored_linear import StoredLinear
from .configuration import MGLUConfigMixin
from .feed_forward import feed_forward, narrow
from .loading import check_adapter, check_loaded, check_tensors, warn_of_quantizer
from .quantization import describe_stored_weights, stored_weights
from .routing import load_balancing_loss

if TYPE_CHECKING:  # each model class derives from the mixins and from a PreTrainedModel
    from transformers import PreTrainedModel as _Model
else:
    _Model = object

ModelT = TypeVar("ModelT", bound=nn.Module)


class MGLUPreTrainedMixin(_Model):
    """How the weights of MGLU layers are initialised, loaded and saved."""

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw weights as Transformers does in linear layers, multiplied by `weight_gain`, and masks as `MGLU` does."""
        if not isinstance(module, StoredLinear):
            super()._init_weights(module)
            return
        if module.weight_format != "dense":
            module.reset_parameters()
            return
        init.normal_(module.weight, std=self.config.initializer_range * module.weight_gain)
        if isinstance(module, MGLU):
            module.reset_masks()

    @staticmethod
    def _load_pretrained_model(
        model: nn.Module, state_dict: Any, checkpoint_files: Any, load_config: Any, expected_keys: Any = None
    ) -> Any:
        """Load a checkpoint as Transformers does. `loading.py` refuses masks and weights that do not fit the model."""
        loader = PreTrainedModel._load_pretrained_model
        source = str(load_config.pretrained_model_name_or_path or "state_dict")
        if expected_keys is not None:  # Transformers loads the weights of an adapter
            info, offload_index = loader(model, state_dict, checkpoint_files, load_config, expected_keys)
            check_adapter(model, info, expected_keys, source)
            return info, offload_index
        if load_config.hf_quantizer is not None:
            warn_of_quantizer(model, load_config.hf_quantizer)
        check_tensors(model, state_dict, checkpoint_files, load_config, source)
        info, offload_index = loader(model, state_dict, checkpoint_files, load_config)
        check_loaded(model, info, source)
        for module in model.modules():
            if not isinstance(module, StoredLinear):
                continue
            # Keep Transformers from initialising the layer. The checkpoint has all its tensors, but a weight that is
            # offloaded to the disk stays on the meta device, as if it had not been loaded.
            setattr(module, "_is_hf_initialized", True)  # noqa: B010 (nn.Module's annotations allow tensors only)
            if module.weight_scale is not None:  # the loader sets requires_grad of every floating tensor
                module.weight.requires_grad_(False)
                module.weight_scale.requires_grad_(False)
        return info, offload_index

    def save_pretrained(self, save_directory: str | os.PathLike[str], *args: Any, **kwargs: Any) -> None:
        """Save as Transformers does; the configuration says how masks and weights are stored.

        This also works after `mglu_ops.freeze` and `mglu_ops.quantize`. A folder without README.md gets a model card,
        which says what to import before loading.

        Raises:
            ValueError: some layers have packed masks and others learn theirs, or their weights are quantized to
                different formats.
        """
        update_config(self)
        super().save_pretrained(save_directory, *args, **kwargs)
        if (args[0] if args else kwargs.get("is_main_process", True)) and Path(save_directory).is_dir():
            _write_model_card(self, Path(save_directory))

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "peft_config":  # PEFT sets this attribute when it has put its adapters into the model
            self._warn_of_untrained_weights()

    def _warn_of_untrained_weights(self) -> None:
        """Warn if an adapter trains `down_proj` of MGLU layers and not their weight.

        PEFT finds linear layers by class or name, as with `target_modules="all-linear"`, and wraps them. The weight of
        MGLU is a parameter, which only `target_parameters` names.
        """
        layers = [module for module in self.modules() if isinstance(module, MGLUFeedForward)]
        missed = [one.mglu for one in layers if not isinstance(one.down_proj, nn.Linear) and isinstance(one.mglu, MGLU)]
        if missed:
            is_stored = any(mglu.weight_format != "dense" for mglu in missed)
            before = "call mglu_ops.dequantize(model) before, and " if is_stored else ""
            notices.warn(
                "peft: the adapter trains down_proj of the MGLU layers, but not their weight, which replaces gate_proj "
                f'and up_proj and is not a linear layer; {before}add target_parameters=["mglu.weight"] to the adapter '
                "configuration",
                stacklevel=2,
            )


def freeze(model: ModelT) -> ModelT:
    """Pack the learned masks of a model for inference, in place, and update its configuration.

    `save_pretrained` then writes one bit for each weight and mask, and `from_pretrained`, also of
    `AutoModelForCausalLM`, loads the same model. See `mglu_ops.freeze` for what happens to the modules.

    Args:
        model: a model of `mglu_ops.transformers`, which may be compiled. Merge an adapter of PEFT first, with
            `merge_and_unload()`.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is of another class.
    """
    inner = getattr(model, "_orig_mod", model)
    if not isinstance(inner, MGLUPreTrainedMixin):
        raise TypeError(
            f"model: got {type(inner).__name__}, must be a model of mglu_ops.transformers; "
            "merge an adapter before (merge_and_unload), and pack the masks of other modules with mglu_ops.freeze"
        )
    mglu_nn.freeze(model)
    update_config(inner)
    return model


def update_config(model: Any) -> None:
    """Set `learnable_masks` and the format of the weights in a model's configuration to what its layers have.

    Raises:
        ValueError: some layers have packed masks and others learn theirs, or their weights are quantized to different
            formats.
    """
    learnable = {module.learnable_masks for module in model.modules() if isinstance(module, MGLU)}
    if len(learnable) > 1:
        raise ValueError(
            "model: some layers have packed masks and others learn theirs, which no configuration describes; "
            "pack all masks with mglu_ops.transformers.freeze(model)"
        )
    for value in learnable:
        model.config.learnable_masks = value
    describe_stored_weights(model, model.config)


class MGLUModelMixin(MGLUPreTrainedMixin):
    """A decoder with MGLU feed-forward layers. In the list of bases, put it before the model class of Transformers.

    Raises:
        TypeError: the configuration is not one of this package.
        ValueError: its `quantization_config` does not describe the layers.
    """

    def __init__(self, config: Any) -> None:
        if not isinstance(config, MGLUConfigMixin):
            raise TypeError(f"config: got {type(config).__name__}, must be a configuration of mglu_ops.transformers")
        with narrow(config):
            super().__init__(config)
        stored = stored_weights(config)
        for index, layer in enumerate(self.layers):
            layer.mlp = feed_forward(layer.mlp, f"layers.{index}.mlp", config, stored)
        stored.check_names(name for name, module in self.named_modules() if isinstance(module, StoredLinear))
        self.post_init()


class MGLULanguageModelMixin(MGLUPreTrainedMixin):
    """A language model with a decoder of `MGLUModelMixin`. In the list of bases, put it before Transformers' class.

    Attributes:
        decoder_class: the class of the decoder.
    """

    decoder_class: ClassVar[type[Any]]

    def __init__(self, config: Any) -> None:
        PreTrainedModel.__init__(self, config)  # because `super().__init__` would build a decoder with SwiGLU
        self.model = self.decoder_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()


class MGLUForCausalLMMixin(MGLULanguageModelMixin):
    """A language model without experts. In training it adds the load-balancing loss of the mask routers to its loss."""

    @can_return_tuple  # type: ignore[untyped-decorator]
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> Any:
        """Run the model as its base class does.

        The cache is among `kwargs`, because the name of its argument depends on the version of Transformers.

        In training, with `labels` and `router_aux_loss_coef > 0`, the result is a `MoeCausalLMOutputWithPast`:
        `aux_loss` is the load-balancing loss, and `loss` the language model's loss plus
        `router_aux_loss_coef * aux_loss`. In evaluation, `loss` is the language model's alone.
        """
        inputs: dict[str, Any] = {
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
            "use_cache": use_cache,
            **kwargs,
        }
        if labels is None or not self.training or self.config.router_aux_loss_coef == 0:
            return super().forward(labels=labels, logits_to_keep=logits_to_keep, **inputs)
        config: Any = self.config
        outputs = self.model(**inputs, output_router_logits=True, return_dict=True)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept, :])
        limit = getattr(config, "final_logit_softcapping", None)  # a key of Gemma
        if limit is not None:
            logits = torch.tanh(logits / limit) * limit
        loss = self.loss_function(logits=logits, labels=labels, vocab_size=config.vocab_size, **kwargs)
        balance = load_balancing_loss(outputs.router_logits, config.n_masks, config.mask_top_k, attention_mask)
        # Trainer divides the language model's loss by the number of tokens in all batches whose gradients it
        # accumulates. Scale the balance loss by this batch's share of these tokens.
        in_all = kwargs.get("num_items_in_batch")
        share = 1 if in_all is None else (labels[:, 1:] != -100).sum() / in_all
        rest = {name: value for name, value in outputs.items() if name != "last_hidden_state"}
        return MoeCausalLMOutputWithPast(
            loss=loss + config.router_aux_loss_coef * share * balance.to(loss.device),
            aux_loss=balance,
            logits=logits,
            **rest,
        )


class MGLUMoePreTrainedMixin(_Model):
    """A model whose experts always run on the operators of `mglu_ops`. Put it before the other mixins."""

    def get_correct_experts_implementation(self, requested_experts: str | None) -> str:
        """Return `eager`, with which Transformers calls the forward of the experts' class.

        Raises:
            ValueError: another implementation was requested. All other implementations read SwiGLU's two matrices.
        """
        if requested_experts not in (None, "eager"):
            raise ValueError(
                f"experts_implementation: got {requested_experts!r}, must be None or 'eager': experts with MGLU run on "
                "the operators of mglu_ops"
            )
        return "eager"


class MGLUMoeModelMixin(MGLUMoePreTrainedMixin, MGLUModelMixin):
    """A decoder with MGLU experts. In the list of bases, put it before the model class of Transformers.

    Raises:
        TypeError: the configuration is not one of this package.
        ValueError: vLLM is about to replace the experts by its own, which have SwiGLU.
    """

    def __init__(self, config: Any) -> None:
        for architecture in getattr(config, "architectures", None) or ():
            if architecture.startswith("TransformersMoE"):
                raise ValueError(
                    f"architectures: got {architecture!r}, with which vLLM replaces experts by its own with SwiGLU; "
                    "must be left out of hf_overrides, or be TransformersForCausalLM"
                )
        super().__init__(config)


class MGLUMoeForCausalLMMixin(MGLUMoePreTrainedMixin, MGLULanguageModelMixin):
    """A language model with MGLU experts. It inherits `forward` from Transformers' class."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok


_CARD = """\
---
library_name: transformers
tags:
- mglu
---

# {model}

A model with Masked Gated Linear Units (arXiv 2506.23225) in place of SwiGLU. Transformers alone does not know its
`model_type`, `{model_type}`, and an upgrade does not help. Install `mglu_ops` (in a clone of it,
`pip install ".[transformers]"`), and import it first:

```python
import mglu_ops.transformers  # registers the model with AutoConfig, AutoModel and AutoModelForCausalLM
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("{folder}")
```

vLLM finds the model automatically where `mglu_ops` is installed too, if its plugin has the architecture.
"""


def _write_model_card(model: Any, folder: Path) -> None:
    """Write README.md into the folder of a checkpoint, unless it has one."""
    card = folder / "README.md"
    if not card.exists():
        names = {"model": type(model).__name__, "model_type": model.config.model_type, "folder": folder.name}
        card.write_text(_CARD.format(**names))
