"""Structure 2:4: of each four consecutive columns, a mask has exactly two ones, or a weight keeps exactly two."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops import ops
from mglu_ops.activations import get_activation
from mglu_ops.nn import GLU, MGLU


def two_of_four(scores: Tensor) -> Tensor:
    """Choose the two largest of each four consecutive scores. Of equal scores, the earlier wins.

    Args:
        scores: floating `[..., columns]` without NaN, where columns are a multiple of 4.

    Returns:
        bool of the same shape.
    """
    columns = scores.unflatten(-1, (-1, 4)).unbind(-1)
    wins = [torch.zeros_like(columns[0], dtype=torch.int8) for _ in columns]
    for i, j in combinations(range(4), 2):
        is_earlier = columns[i] >= columns[j]
        wins[i] = wins[i] + is_earlier
        wins[j] = wins[j] + ~is_earlier
    return torch.stack([count >= 2 for count in wins], -1).flatten(-2)


class StructuredMGLU(MGLU):
    """MGLU whose masks have structure 2:4: ones are where the two largest of each four logits are.

    The gradient is straight-through: each logit gets the gradient of its mask bit. If `centered`, the mean of the four
    gradients is subtracted from each. The mean would move all four logits alike, which never changes a mask.
    """

    def __init__(self, *sizes: int, centered: bool = False, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.centered = centered

    def hard_logits(self) -> Tensor:
        """1 or -1 for each logit. The signs are the masks, and gradients go to the logits."""
        assert self.mask_logits is not None
        soft: Tensor = self.mask_logits
        hard = torch.where(two_of_four(soft.detach()), 1.0, -1.0)
        if self.centered:
            groups = soft.unflatten(-1, (-1, 4))
            soft = (groups - groups.mean(-1, keepdim=True)).flatten(-2)
        return hard + (soft - soft.detach())

    def _project(self, x: Tensor, mask_weights: Tensor | None, weight: Tensor, *_: Any) -> Tensor:
        return ops.forward_ste(x, weight, self.hard_logits(), self.activation, mask_weights)[0]


class PrunedGLU(GLU):
    """GLU whose two matrices keep the two largest of each four consecutive weights, by magnitude.

    The gradient is straight-through, so pruned weights get a gradient too. SR-STE (arXiv 2102.04010, eq. 9) adds
    `decay` times the pruned weights to the gradient. Pruned weights shrink, so the choice of kept weights settles.
    """

    def __init__(self, in_features: int, out_features: int, decay: float, activation: str = "silu") -> None:
        super().__init__(in_features, out_features, activation)
        self.decay = decay

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`."""
        assert self.gate_proj is not None
        gate, value = (F.linear(x, _Pruned.apply(one.weight, self.decay)) for one in (self.gate_proj, self.up_proj))
        return get_activation(self.activation).forward(gate) * value


class _Pruned(torch.autograd.Function):
    """Sets two of each four weights to 0, with the gradient of SR-STE."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, decay: float) -> Tensor:
        kept = weight * two_of_four(weight.abs())
        ctx.save_for_backward(weight - kept)
        ctx.decay = decay
        return kept

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (pruned,) = ctx.saved_tensors
        return grad + ctx.decay * pruned, None
