"""Two alternatives to learning masks by AdamW on logits with a hard threshold: continuous masks, a budget of flips."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.activations import get_activation
from mglu_ops.nn import MGLU

WIDTH = 0.05
"""The first tau of continuous masks. Initial logits have a standard deviation of 0.01, so nearly all masks start
between 0 and 1."""


class ContinuousMGLU(MGLU):
    """MGLU whose forward pass uses `clamp(logit / tau + 1/2, 0, 1)` for the masks while tau > 0, and hard masks at 0.

    A logit has the gradient of its mask where the mask is between 0 and 1, and 0 elsewhere. This is the exact
    gradient times tau. The factor does not change the steps of AdamW. It keeps the norm of all gradients, which is
    clipped, as large as with hard masks.

    Plain PyTorch computes it with `n_masks + 1` products, as many as the fused operator.
    """

    tau: Tensor

    def __init__(self, *sizes: int, **options: Any) -> None:
        super().__init__(*sizes, **options)
        self.register_buffer("tau", torch.tensor(WIDTH), persistent=False)
        self.is_continuous = True

    def set_tau(self, tau: float) -> None:
        """Set the width in logits over which a mask goes from 0 to 1; 0 for hard masks."""
        self.tau.fill_(tau)
        self.is_continuous = tau > 0

    def _project(self, x: Tensor, mask_weights: Tensor | None) -> Tensor:
        if not self.is_continuous:
            return super()._project(x, mask_weights)
        assert self.mask_logits is not None
        logits = self.mask_logits.detach()
        masks = (logits / self.tau + (self.mask_logits - logits) + 0.5).clamp(0, 1)
        gates = F.linear(x, (self.weight * masks).flatten(0, 1)).unflatten(-1, (self.n_masks, -1))
        values = F.linear(x, self.weight).unsqueeze(-2) - gates
        return (get_activation(self.activation).forward(gates) * values).sum(-2)


@torch.no_grad()
def start_accumulators(logits: Tensor, gate_ratio: float) -> None:
    """Draw accumulators with their distribution after many steps of noise: random signs, and `P(|a| < z) = z^2`."""
    signs = torch.where(torch.rand_like(logits) < gate_ratio, 1.0, -1.0)
    logits.copy_((1 - torch.rand_like(logits)).sqrt() * signs)  # never 0


@torch.no_grad()
def step_accumulators(logits: Tensor, grad: Tensor, share: float) -> None:
    """Let masks learn with nothing but one accumulator for each bit, which takes the place of its logit.

    The sign of an accumulator is the mask. Its size, at most 1, is the distance to the next flip. A step subtracts the
    gradient, divided by a threshold that all accumulators of the tensor share. An accumulator that reaches 0 flips its
    mask and starts again at a distance of 1. A random walk of steps with variance v that is held at 1 crosses 0 after
    1 / v steps on average. So with the threshold `rms(grad) / sqrt(share)`, independent gradients flip the fraction
    `share` of the bits per step. Gradients that agree from step to step flip more bits.

    Args:
        logits: the accumulators, of any shape; changed in place.
        grad: the gradient of the masks, of the same shape.
        share: flips a step, as a fraction of all bits.
    """
    rms = grad.square().mean().sqrt().clamp_min(torch.finfo(grad.dtype).tiny)
    moved = logits - grad * (share**0.5 / rms)
    logits.copy_(torch.where(moved * logits <= 0, -logits.sign(), moved).clamp_(-1, 1))
