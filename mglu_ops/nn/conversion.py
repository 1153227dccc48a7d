"""An MGLU layer from the two matrices of a gated linear unit, as a start for training."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from .masked_linear import LOGITS_STD
from .mglu import MGLU

WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "magnitude": lambda gate, up: torch.where(gate.abs() >= up.abs(), gate, up),
    "average": lambda gate, up: (gate + up) / 2,
    "gate": lambda gate, up: gate,
    "up": lambda gate, up: up,
}
"""Ways to make one matrix of the gate matrix and the up matrix, by name."""


@torch.no_grad()
def take_over_glu(layer: MGLU, gate: Tensor, up: Tensor, init: str) -> None:
    """Make the weight of a layer with learned masks, and for `magnitude` also its masks, from the matrices of a GLU.

    `mglu_ops.transformers.from_swiglu` says what each `init` does. Only `magnitude` changes the masks. The layer's
    result is a sum over its masks, so the caller must divide the weights that read it by their number.

    Args:
        layer: the layer, or the experts, whose weight is replaced.
        gate: `[out_features, in_features]`, W_g; with num_experts in front for experts.
        up: `[out_features, in_features]`, W_u, likewise.
        init: a key of WEIGHTS.
    """
    assert layer.mask_logits is not None
    layer.weight = nn.Parameter(WEIGHTS[init](gate, up).clone())
    if init == "magnitude":
        # The logits become |W_g| - |W_u|, scaled as logits are, plus noise of that scale in all masks but the first.
        difference = gate.float().abs() - up.float().abs()
        size = difference.square().mean((-2, -1), keepdim=True).sqrt()
        scaled = difference * (LOGITS_STD / size.clamp(min=1e-30))
        masks = layer.mask_logits.movedim(-3, 0)
        masks[1:] += scaled
        # On ties, assign the weight to the gate, as `WEIGHTS` does.
        masks[0] = torch.where(difference >= 0, scaled.clamp(min=1e-6), scaled)
