"""`freeze` for models of this package."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from .. import nn as mglu_nn
from .modeling import MGLUPreTrainedMixin, update_config

ModelT = TypeVar("ModelT", bound=nn.Module)


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
