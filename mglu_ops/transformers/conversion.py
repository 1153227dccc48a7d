"""`from_swiglu`: an MGLU model from a SwiGLU model, as a start for training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from ..nn import MGLU
from ..nn.conversion import WEIGHTS, take_over_glu
from .architectures import ARCHITECTURES
from .configuration import check_feed_forward, check_mask_keys

_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@torch.no_grad()
def from_swiglu(
    model: PreTrainedModel,
    n_masks: int,
    *,
    init: str = "magnitude",
    mask_top_k: int | None = None,
    router_aux_loss_coef: float = 0.0,
) -> Any:
    """Make an MGLU model from a Llama, Qwen3 or Mistral model: **a start for training, not an equivalent model**.

    One matrix and masks cannot hold what two matrices hold, so that the result predicts badly at first. Train it
    further, or distil it from `model`, which is not changed and shares no tensor with the result
    (`examples/distill_from_swiglu.py`).

    Each layer's gate and up matrices, `W_g` and `W_u`, become one weight W:

    | `init` | W | masks at first |
    |---|---|---|
    | `magnitude` | elementwise, the one of `W_g` and `W_u` whose magnitude is larger | 1 where that is `W_g` |
    | `average` | `(W_g + W_u) / 2` | random |
    | `gate` | `W_g` | random |
    | `up` | `W_u` | random |

    With one mask, `magnitude` is the choice of W and M with the least `|W_g - M * W|^2 + |W_u - (1 - M) * W|^2`.
    Further masks differ from the first where the two magnitudes are close, because equal masks would stay equal in
    training. The result of MGLU is a sum over the masks; without a router, the down projection is therefore divided by
    `n_masks`.

    Everything else is copied: embeddings (tied ones stay tied), attention, norms, the configuration, the generation
    configuration, device, dtype, and whether the model is in training mode. Masks are learned, and in float32.

    Args:
        model: a `LlamaForCausalLM`, `Qwen3ForCausalLM`, `MistralForCausalLM`, or the decoder of one, on one device.
        n_masks: number of masks, 1 to 16.
        init: how the weight is made, as in the table.
        mask_top_k: number of masks that a token keeps; None for no router. A router starts at random.
        router_aux_loss_coef: factor of the load-balancing loss.

    Returns:
        A model of the MGLU class that corresponds to the class of `model`.

    Raises:
        TypeError: `model` is of another class, or a projection of its feed-forward layers is not an `nn.Linear`.
        ValueError: the layers have biases or an activation that MGLU does not know, the model is on several devices or
            has no data, or another argument is out of range.
    """
    architecture = next((one for one in ARCHITECTURES if type(model) in one.swiglu), None)
    if architecture is None:
        known = ", ".join(cls.__name__ for one in ARCHITECTURES for cls in one.swiglu)
        raise TypeError(f"model: got {type(model).__name__}, must be one of {known}")
    source = model.config
    if init not in WEIGHTS:
        raise ValueError(f"init: got {init!r}, must be one of {', '.join(WEIGHTS)}")
    check_mask_keys(n_masks, mask_top_k, router_aux_loss_coef)
    check_feed_forward(source)
    layers = model.base_model.layers
    for index, layer in enumerate(layers):
        _check_projections(layer.mlp, f"model: layers.{index}.mlp")
    device = _device_of(model)

    left_out = ("model_type", "architectures", "transformers_version")
    kept = {key: value for key, value in source.to_dict().items() if key not in left_out}
    config = architecture.config(
        **kept, n_masks=n_masks, mask_top_k=mask_top_k, router_aux_loss_coef=router_aux_loss_coef
    )
    factory = AutoModelForCausalLM if type(model) is architecture.swiglu[1] else AutoModel
    with torch.device(device):
        result = factory.from_config(config, dtype=model.dtype, attn_implementation=source._attn_implementation)
    _take_over(model, result)
    for old, new in zip(layers, result.base_model.layers, strict=True):
        mglu: MGLU = new.mlp.mglu
        take_over_glu(mglu, old.mlp.gate_proj.weight, old.mlp.up_proj.weight, init)
        down = old.mlp.down_proj.weight.clone()
        new.mlp.down_proj.weight = nn.Parameter(down if mglu.top_k is not None else down / mglu.n_masks)
    return result


def _check_projections(mlp: nn.Module, name: str) -> None:
    for projection in _PROJECTIONS:
        linear = getattr(mlp, projection, None)
        if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
            raise TypeError(
                f"{name}.{projection}: got {type(linear).__name__}, must be a torch.nn.Linear; merge adapters and "
                "undo quantization before"
            )
        if linear.bias is not None:
            raise ValueError(f"{name}.{projection}: got a bias, must have none; an MGLU layer has no bias")


def _device_of(model: PreTrainedModel) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model: got parameters on {names}, must be on one device, and not on meta")
    return devices.pop()


def _take_over(model: PreTrainedModel, result: Any) -> None:
    """Copy the settings of `model` to `result`, and all its tensors outside of feed-forward layers."""
    state = {key: value.clone() for key, value in model.state_dict().items() if ".mlp." not in key}
    missing, unexpected = result.load_state_dict(state, strict=False, assign=True)
    assert not unexpected, unexpected
    assert all(".mlp." in key for key in missing), missing
    result.tie_weights()
    for name, parameter in result.named_parameters():
        if ".mlp." not in name:
            parameter.requires_grad_(model.get_parameter(name).requires_grad)
    if model.can_generate():
        result.generation_config = copy.deepcopy(model.generation_config)
    result.train(model.training)
