"""The keys that MGLU models add to the configurations of Transformers, as mixins, and the checks of these keys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..nn.arguments import check_flags, check_masks, check_weight_init

ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "linear": "identity",
    "relu2": "relu_squared",
}
"""The activations of Transformers, each with its name in `mglu_ops`."""


@dataclass(kw_only=True, repr=False)
class MGLUConfigMixin:
    """The keys that an MGLU configuration adds to its base.

    Attributes:
        n_masks: number of masks of each feed-forward layer, 1 to 16.
        mask_top_k: number of masks that a token keeps, 1 to n_masks; None for no router. (It is not called `top_k`,
            because Transformers would take such a key for an option of `generate`.)
        learnable_masks: True for masks that are learned, as logits; False for packed masks, with one bit per weight.
        weight_init: how new weights of MGLU layers are drawn: with `paper`, as Transformers draws linear layers; with
            `leveled`, they are also multiplied by the factor of `mglu_ops.nn.MGLU`.
        needs_import: the module that registers the `model_type`, for people who read `config.json`; no code reads it.
    """

    n_masks: int = 1
    mask_top_k: int | None = None
    learnable_masks: bool = True
    weight_init: str = "paper"
    needs_import: str = "mglu_ops.transformers"

    def validate_masks(self) -> None:
        """Check the keys of this class, and that the other keys fit an MGLU.

        huggingface_hub's decorator `strict` calls all methods named `validate_*` after `__init__`.

        Raises:
            ValueError: a value is out of range, or there is a bias, which MGLU does not have.
        """
        check_flags(learnable_masks=self.learnable_masks)
        check_weight_init(self.weight_init)
        check_masks(self.n_masks, True, self.mask_top_k, "mask_top_k")
        check_feed_forward(self)


@dataclass(kw_only=True, repr=False)
class MGLUBalanceConfigMixin(MGLUConfigMixin):
    """The keys that MGLU adds to a configuration without experts.

    Mixtures have the key `router_aux_loss_coef` already. It applies to the routers of their experts.

    Attributes:
        router_aux_loss_coef: factor of the load-balancing loss of the routers of masks, which is added to the loss in
            training; 0 for none.
    """

    router_aux_loss_coef: float = 0.0

    def validate_balance(self) -> None:
        """Check the keys of this class.

        Raises:
            ValueError: a value is out of range, or there is a load-balancing loss but no router.
        """
        check_mask_keys(self.n_masks, self.mask_top_k, self.router_aux_loss_coef)


def check_mask_keys(n_masks: int, mask_top_k: object, router_aux_loss_coef: object) -> None:
    """Check the values of the keys `n_masks`, `mask_top_k` and `router_aux_loss_coef` of a configuration.

    Raises:
        ValueError: a value is out of range, or there is a load-balancing loss but no router.
    """
    check_masks(n_masks, True, mask_top_k, "mask_top_k")
    coefficient = router_aux_loss_coef
    if not (isinstance(coefficient, (int, float)) and math.isfinite(coefficient) and coefficient >= 0):
        raise ValueError(f"router_aux_loss_coef: got {coefficient!r}, must be a finite number of at least 0")
    if coefficient > 0 and mask_top_k is None:
        raise ValueError(f"router_aux_loss_coef: got {coefficient} without mask_top_k, must be 0 without a router")


def activation_key(config: Any) -> str:
    """Return the name of the key for the activation of the feed-forward layers. Gemma has another name for it."""
    return "hidden_activation" if hasattr(config, "hidden_activation") else "hidden_act"


def check_feed_forward(config: Any) -> None:
    """Check that the feed-forward layers of a configuration can be MGLU layers.

    Raises:
        ValueError: the layers have biases, or an activation that `mglu_ops` does not know, or differ from each other.
    """
    key = activation_key(config)
    if getattr(config, key) not in ACTIVATIONS:
        raise ValueError(f"{key}: got {getattr(config, key)!r}, must be one of {', '.join(ACTIVATIONS)}")
    if getattr(config, "mlp_bias", False):
        raise ValueError("mlp_bias: got True, must be False; an MGLU layer has no bias")
    if getattr(config, "is_heterogeneous", False):
        raise ValueError("per_layer_config: got a value, must be None; all MGLU layers of a model are alike")
