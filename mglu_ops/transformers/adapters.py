"""Adapters of PEFT: which layers of a model they train, and which they miss."""

from __future__ import annotations

from torch import nn

from .. import notices
from ..nn import MGLU, MGLUFeedForward


def warn_of_untrained_weights(model: nn.Module) -> None:
    """Warn if an adapter trains `down_proj` of MGLU layers and not their weight.

    PEFT finds linear layers by class or name, as with `target_modules="all-linear"`, and wraps them. The weight of MGLU
    is a parameter, which only `target_parameters` names.
    """
    layers = [module for module in model.modules() if isinstance(module, MGLUFeedForward)]
    if any(not isinstance(layer.down_proj, nn.Linear) and isinstance(layer.mglu, MGLU) for layer in layers):
        notices.warn(
            "peft: the adapter trains down_proj of the MGLU layers, but not their weight, which replaces gate_proj and "
            'up_proj and is not a linear layer; add target_parameters=["mglu.weight"] to the adapter configuration',
            stacklevel=2,
        )
