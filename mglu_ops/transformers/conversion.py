"""`from_swiglu`: an MGLU model from a SwiGLU model, as a start for training."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.mixtral.modeling_mixtral import MixtralExperts
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from ..nn.conversion import WEIGHTS, take_over_glu
from .architectures import ARCHITECTURES
from .configuration import MGLUBalanceConfigMixin, check_feed_forward, check_mask_keys

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
    """Make an MGLU model from a SwiGLU model: **a start for training, not an equivalent model**.

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
    `n_masks`. In a mixture, this is done in each expert.

    Everything else is copied: embeddings (tied ones stay tied), attention, norms, the routers of experts, the
    configuration, the generation configuration, device, dtype, and whether the model is in training mode. Masks are
    learned, and in float32.

    Args:
        model: a `LlamaForCausalLM`, `Qwen3ForCausalLM`, `MistralForCausalLM`, `Qwen3MoeForCausalLM` or
            `MixtralForCausalLM`, or the decoder of one, on one device.
        n_masks: number of masks, 1 to 16.
        init: how the weight is made, as in the table.
        mask_top_k: number of masks that a token keeps; None for no router. A router starts at random.
        router_aux_loss_coef: factor of the load-balancing loss; 0 for a mixture, whose configuration has the factor of
            its experts' routers under this name.

    Returns:
        A model of the MGLU class that corresponds to the class of `model`.

    Raises:
        TypeError: `model` is of another class, or its feed-forward layers have other projections or experts than
            Transformers makes, such as an adapter's.
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
    has_balance = issubclass(architecture.config, MGLUBalanceConfigMixin)
    if router_aux_loss_coef and not has_balance:
        raise ValueError(
            f"router_aux_loss_coef: got {router_aux_loss_coef} for a {type(model).__name__}, must be 0: its "
            "configuration has the factor of the experts' routers under this name, which is copied"
        )
    layers = model.base_model.layers
    matrices = [_matrices(layer.mlp, f"model: layers.{index}.mlp") for index, layer in enumerate(layers)]
    device = _device_of(model)

    left_out = ("model_type", "architectures", "transformers_version")
    kept = {key: value for key, value in source.to_dict().items() if key not in left_out}
    balance = {"router_aux_loss_coef": router_aux_loss_coef} if has_balance else {}
    config = architecture.config(**kept, **balance, n_masks=n_masks, mask_top_k=mask_top_k)
    factory = AutoModelForCausalLM if type(model) is architecture.swiglu[1] else AutoModel
    with torch.device(device):
        result = factory.from_config(config, dtype=model.dtype, attn_implementation=source._attn_implementation)
    _take_over(model, result)
    for (gate, up, down), layer in zip(matrices, result.base_model.layers, strict=True):
        new = getattr(layer.mlp, "experts", layer.mlp)
        take_over_glu(new.mglu, gate, up, init)
        new.down_proj.weight = nn.Parameter(down.clone() if mask_top_k is not None else down / n_masks)
    return result


def _matrices(mlp: nn.Module, name: str) -> tuple[Tensor, Tensor, Tensor]:
    """The weights of the gate, up and down projections of a feed-forward layer, stacked if it has experts."""
    if hasattr(mlp, "experts"):
        experts: Any = mlp.experts
        if type(experts) not in (Qwen3MoeExperts, MixtralExperts) or not experts.gate_up_proj.is_floating_point():
            raise TypeError(
                f"{name}.experts: got {type(experts).__name__}, must be the experts of Transformers in a floating "
                "dtype; merge adapters and undo quantization before"
            )
        return *experts.gate_up_proj.chunk(2, dim=1), experts.down_proj
    weights: list[Tensor] = []
    for projection in _PROJECTIONS:
        linear = getattr(mlp, projection, None)
        if type(linear) is not nn.Linear or not linear.weight.is_floating_point():
            raise TypeError(
                f"{name}.{projection}: got {type(linear).__name__}, must be a torch.nn.Linear; merge adapters and "
                "undo quantization before"
            )
        if linear.bias is not None:
            raise ValueError(f"{name}.{projection}: got a bias, must have none; an MGLU layer has no bias")
        weights.append(linear.weight)
    gate, up, down = weights
    return gate, up, down


def _device_of(model: PreTrainedModel) -> torch.device:
    devices = {parameter.device for parameter in model.parameters()}
    if len(devices) != 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"model: got parameters on {names}, must be on one device, and not on meta")
    return devices.pop()


def _take_over(model: PreTrainedModel, result: Any) -> None:
    """Copy the settings of `model` to `result`, and all its tensors but gate, up and down projections."""
    state = {key: value.clone() for key, value in model.state_dict().items() if _is_copied(key)}
    missing, unexpected = result.load_state_dict(state, strict=False, assign=True)
    assert not unexpected, unexpected
    assert not any(map(_is_copied, missing)), missing
    result.tie_weights()
    for name, parameter in result.named_parameters():
        if _is_copied(name):
            parameter.requires_grad_(model.get_parameter(name).requires_grad)
    if model.can_generate():
        result.generation_config = copy.deepcopy(model.generation_config)
    result.train(model.training)


def _is_copied(key: str) -> bool:
    """Whether a tensor of this name is the same in both models; of a feed-forward layer, the router of its experts."""
    return ".mlp." not in key or ".mlp.gate." in key
