"""The layer as the paper writes it: Algorithm 2 of arXiv 2506.23225, a loop over the masks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import get_activation
from .masked_linear import MaskedLinear
from .packed_buffers import check_masks_in_use


class NaiveMGLU(MaskedLinear):
    """`MGLU` in plain PyTorch: two products for each mask, each with a masked copy of the weight.

    Constructor and `state_dict` are those of `MGLU`. It serves as a baseline and as a spelling that the fusion pass
    recognises, so nothing in it is tuned. `mglu_ops.freeze` turns it into an `MGLU`.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`."""
        act = get_activation(self.activation).forward
        route_weights = self.route_weights(x)
        fixed = None
        if self.packed_masks is not None:
            check_masks_in_use(self, self.packed_masks)
            fixed = torch.ops.mglu.unpack_masks(self.packed_masks, self.in_features)
        y: Any = 0
        for i in range(self.n_masks):
            m = self._straight_through(i) if fixed is None else fixed[i].to(self.weight.dtype)
            gate = F.linear(x, self.weight * m)
            value = F.linear(x, self.weight * (1 - m))
            if route_weights is None:
                y = y + act(gate) * value
            else:
                y = y + route_weights[..., i : i + 1] * (act(gate) * value)
        return y

    def _straight_through(self, i: int) -> Tensor:
        """Return mask i: 0 or 1 in the forward pass, the identity of its logits in the backward pass."""
        assert self.mask_logits is not None
        soft = self.mask_logits[i]
        hard = (soft > 0).to(soft.dtype)
        return (hard - soft).detach() + soft
