"""The models' feed-forward layers: an MGLU layer, or MGLU experts in the block in which Transformers routes tokens."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..nn import MGLU, ExpertsDown, MGLUExperts, MGLUFeedForward
from ..nn.experts import OnRank
from ..nn.masked_linear import PACKED
from .configuration import ACTIVATIONS, activation_key
from .quantization import MGLUQuantizationConfig


class MGLUMoeExperts(OnRank, nn.Module):
    """The experts of a mixture, with the arguments with which Transformers calls experts.

    Args:
        num_experts: number of experts.
        hidden: size of a token.
        intermediate: size of the hidden layer of an expert.
        down_format: the format of the weight of `down_proj`, a name in `mglu_ops.formats`.
        options: the keyword arguments of `MGLUExperts`.

    Attributes:
        mglu: `MGLUExperts(num_experts, hidden, intermediate, ...)`.
        down_proj: `ExpertsDown(num_experts, intermediate, hidden)`.
    """

    def __init__(
        self, num_experts: int, hidden: int, intermediate: int, down_format: str = "dense", **options: Any
    ) -> None:
        super().__init__()
        self.mglu = MGLUExperts(num_experts, hidden, intermediate, **options)
        kind: dict[str, Any] = {"device": self.mglu.weight.device, "dtype": options.get("dtype")}
        self.down_proj = ExpertsDown(num_experts, intermediate, hidden, weight_format=down_format, **kind)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums `[tokens, hidden_size]` of the results of each token's experts.

        Args:
            hidden_states: `[tokens, hidden_size]`.
            top_k_index: int32 or int64 `[tokens, K]`: the experts of each token. An id outside of
                `0 ... num_experts - 1` contributes nothing.
            top_k_weights: floating `[tokens, K]`.
        """
        if self.first_expert:
            top_k_index = top_k_index - self.first_expert  # the ids of other ranks' experts are then out of range
        y = self.mglu(hidden_states, top_k_index)
        return self.down_proj(y, top_k_index, self.on_rank(top_k_weights))


@contextmanager
def narrow(config: Any) -> Iterator[None]:
    """Set the intermediate sizes to 1 while a base class builds its SwiGLU layers, which are replaced afterwards."""
    names = ("intermediate_size", "moe_intermediate_size")
    sizes = {name: getattr(config, name) for name in names if hasattr(config, name)}
    for name in sizes:
        setattr(config, name, 1)
    try:
        yield
    finally:
        for name, size in sizes.items():
            setattr(config, name, size)


def feed_forward(mlp: nn.Module, name: str, config: Any, stored: MGLUQuantizationConfig) -> nn.Module:
    """Return the module that replaces a feed-forward layer of Transformers.

    Args:
        mlp: the layer, with SwiGLU. If it routes tokens to experts, its experts are replaced in place, and it is
            returned.
        name: the layer's name in the decoder.
        config: the configuration of the decoder.
        stored: what the configuration says of the weights.
    """
    has_experts = hasattr(mlp, "experts")
    weight_format, activation_format = stored.formats_of(f"{name}.experts.mglu" if has_experts else f"{name}.mglu")
    options: dict[str, Any] = {
        "n_masks": config.n_masks,
        "activation": ACTIVATIONS[getattr(config, activation_key(config))],
        "learnable_masks": config.learnable_masks,
        "top_k": config.mask_top_k,
        "weight_init": config.weight_init,
        "weight_format": weight_format,
        "activation_format": activation_format,
    }
    if has_experts:
        down_format, _ = stored.formats_of(f"{name}.experts.down_proj")
        # If a configuration has both sizes, intermediate_size belongs to the layers without experts.
        has_both = "moe_intermediate_size" in type(config).__dataclass_fields__
        intermediate = config.moe_intermediate_size if has_both else config.intermediate_size
        experts = MGLUMoeExperts(config.num_experts, config.hidden_size, intermediate, down_format, **options)
        mlp.experts = experts
        _set_up_masks(experts.mglu, config)
        return mlp
    layer = MGLUFeedForward(config.hidden_size, config.intermediate_size, **options)
    _set_up_masks(layer.mglu, config)
    return layer


def _set_up_masks(mglu: MGLU, config: Any) -> None:
    """Convert 16-bit logits to float32, and make packed masks a parameter in vLLM's Transformers backend."""
    logits, masks = mglu.mask_logits, mglu.packed_masks
    if logits is not None:  # training steps would not change 16-bit logits, and float16 would round some to 0
        mglu.mask_logits = nn.Parameter(logits.to(torch.promote_types(logits.dtype, torch.float32)))
    if masks is not None and config._attn_implementation == "vllm":
        # vLLM checks that parameters were loaded, but not buffers. `register_parameter` would make it a buffer again.
        del mglu.packed_masks
        mglu._parameters[PACKED] = nn.Parameter(masks, requires_grad=False)
