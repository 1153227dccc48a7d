"""Alternatives to AdamW on float32 mask logits with a hard threshold.

Continuous masks, a budget of flips, and optimizers that keep fewer bytes for a logit.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mglu_ops.activations import get_activation
from mglu_ops.nn import MGLU
from mglu_ops.nn.masked_linear import LOGITS_STD

WIDTH = 0.05
"""Initial tau of `ContinuousMGLU`. Initial logits have a standard deviation of 0.01, so nearly all masks start between
0 and 1."""
FITTED_WIDTH = 2 * LOGITS_STD
"""Initial tau of a fitted layer. Its logits are LOGITS_STD or -LOGITS_STD, so its masks start as 0 and 1, at the ends
of the range in which they are continuous."""


BETAS, EPS = (0.9, 0.99), 1e-8
"""The numbers of AdamW in all runs."""
LOGIT_BYTES = {"adamw": 12, "rmsprop": 8, "adamw_8bit": 6, "bfloat16": 6, "adafactor": 4, "every_second": 12}
"""How logits are optimized -> the bytes that a logit and its state take, without its gradient.

`adamw`: the logit and two moments in float32. `rmsprop`: without the first moment. `adamw_8bit`: moments in 8 bits, of
torchao. `bfloat16`: logit and moments in bfloat16. `adafactor`: without the first moment, and with a second one of each
row and column only. `every_second`: AdamW that only every second step changes the logits."""


def optimizers(groups: list[dict[str, Any]], logits: str, fused: bool) -> list[torch.optim.Optimizer]:
    """The optimizers of parameter groups: AdamW, and another one for the group `mask_logits` if `logits` says so.

    Raises:
        ModuleNotFoundError: `adamw_8bit` needs torchao.
    """
    adamw = partial(torch.optim.AdamW, betas=BETAS, eps=EPS, fused=fused)
    if logits in ("adamw", "bfloat16"):
        return [adamw(groups)]
    makers: dict[str, Callable[..., torch.optim.Optimizer]] = {
        "rmsprop": partial(torch.optim.RMSprop, alpha=BETAS[1], eps=EPS),
        # Adafactor multiplies a rate by the larger of the parameter's size and its second eps; logits are below 1.
        "adafactor": partial(torch.optim.Adafactor, eps=(1e-15, 1.0)),
        "every_second": adamw,
    }
    if logits == "adamw_8bit":
        from torchao.optim import AdamW8bit

        makers[logits] = partial(AdamW8bit, betas=BETAS, eps=EPS)
    own = [group for group in groups if group["name"] == "mask_logits"]
    return [adamw([group for group in groups if group["name"] != "mask_logits"]), makers[logits](own)]


class ContinuousMGLU(MGLU):
    """MGLU whose forward pass uses `clamp(logit / tau + 1/2, 0, 1)` for the masks if tau > 0, and hard masks for tau 0.

    The gradient of a logit is the gradient of its mask where the mask is between 0 and 1, and 0 elsewhere: the exact
    gradient times tau. The factor tau does not change the steps of AdamW. Gradients are clipped by their norm, and with
    this factor the norm is as large as with hard masks.

    Plain PyTorch computes the layer with `n_masks + 1` products, as many as the fused operator needs.
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

    def _project(  # type: ignore[override] # the others, packed masks and scales, are None
        self, x: Tensor, mask_weights: Tensor | None, weight: Tensor, mask_logits: Tensor, *others: None
    ) -> Tensor:
        if not self.is_continuous:
            return super()._project(x, mask_weights, weight, mask_logits, *others)
        logits = mask_logits.detach()
        masks = (logits / self.tau + (mask_logits - logits) + 0.5).clamp(0, 1)
        gates = F.linear(x, (weight * masks).flatten(0, 1)).unflatten(-1, (self.n_masks, -1))
        values = F.linear(x, weight).unsqueeze(-2) - gates
        return (get_activation(self.activation).forward(gates) * values).sum(-2)


@torch.no_grad()
def start_accumulators(logits: Tensor, gate_ratio: float) -> None:
    """Draw initial accumulators a: random signs, and `P(|a| < z) = z^2`, their distribution after many random steps."""
    signs = torch.where(torch.rand_like(logits) < gate_ratio, 1.0, -1.0)
    logits.copy_((1 - torch.rand_like(logits)).sqrt() * signs)  # never 0


@torch.no_grad()
def step_accumulators(logits: Tensor, grad: Tensor, share: float) -> None:
    """Take a step of learning masks with one accumulator for each mask bit, in place of a logit and AdamW's state.

    The sign of an accumulator is the mask bit, and its magnitude, at most 1, is the distance to the next flip. A step
    subtracts the gradient divided by a threshold, which is the same for the whole tensor. An accumulator that reaches 0
    flips its bit and restarts at a magnitude of 1. A random walk that starts at 1, cannot exceed 1 and has steps of
    variance v reaches 0 after 1 / v steps on average. So with the threshold `rms(grad) / sqrt(share)`, independent
    gradients flip the fraction `share` of the bits per step. Gradients that agree from step to step flip more bits.

    Args:
        logits: the accumulators, of any shape; changed in place.
        grad: the gradient of the masks, of the same shape.
        share: flips per step, as a fraction of all bits.
    """
    rms = grad.square().mean().sqrt().clamp_min(torch.finfo(grad.dtype).tiny)
    moved = logits - grad * (share**0.5 / rms)
    logits.copy_(torch.where(moved * logits <= 0, -logits.sign(), moved).clamp_(-1, 1))
