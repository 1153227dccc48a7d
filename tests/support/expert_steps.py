"""Layers of experts with learned masks, for rows of x that are sorted by expert, and a training step in plain torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.budgets import relative_error
from tests.support.calls import pack
from tests.support.layers import naive

NAMES = ("x", "weight", "logits", "mask_weights")


@dataclass
class ExpertLayer:
    """The arguments of `grouped_forward_train`, with mask logits and the gradient of the result."""

    x: Tensor
    weight: Tensor
    logits: Tensor
    packed_masks: Tensor
    offs: Tensor
    mask_weights: Tensor | None
    grad_output: Tensor
    activation: str = "silu"

    @staticmethod
    def random(
        device: str,
        dtype: torch.dtype,
        loads: Sequence[int],
        d: int,
        h: int,
        n_masks: int,
        *,
        unowned: int = 0,
        density: float = 0.5,
        logits_dtype: torch.dtype | None = None,
        mask_weights_dtype: torch.dtype | None = None,
        activation: str = "silu",
    ) -> ExpertLayer:
        """A layer with `loads[e]` rows for expert e, followed by `unowned` rows of NaN without an expert.

        A fraction `density` of the mask bits is 1.
        """

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        experts, rows = len(loads), sum(loads) + unowned
        masks = torch.rand(experts, n_masks, d, h, device=device) < density
        size = 0.01 + normal(experts, n_masks, d, h).abs()
        layer = ExpertLayer(
            normal(rows, h).to(dtype),
            (normal(experts, d, h) / max(h, 1) ** 0.5).to(dtype),
            torch.where(masks, size, -size).to(logits_dtype or dtype),
            torch.stack([pack(one) for one in masks]),
            torch.tensor(list(itertools.accumulate(loads)), dtype=torch.int32, device=device),
            None if mask_weights_dtype is None else torch.rand(rows, n_masks, device=device).to(mask_weights_dtype),
            normal(rows, d).to(dtype),
            activation,
        )
        for tensor in (layer.x, layer.grad_output, layer.mask_weights):
            if tensor is not None:
                tensor[sum(loads) :] = float("nan")
        return layer

    def step(
        self, forward: Callable[..., Any], backward: Callable[..., Any], needs: Sequence[bool] = (True,) * 4
    ) -> dict[str, Tensor]:
        """The result `y` and the needed gradients of `NAMES`. Other gradients must be empty, and none share memory."""
        operands = self.x, self.weight, self.packed_masks, self.offs
        needed = [*needs[:3], needs[3] and self.mask_weights is not None]
        dtypes = [tensor.dtype if tensor is not None else None for tensor in (self.logits, self.mask_weights)]
        logits_dtype, weights_dtype = (
            dtype if is_needed else None for dtype, is_needed in zip(dtypes, needed[2:], strict=True)
        )
        y, partials = forward(*operands, self.activation, self.mask_weights)
        grads = backward(self.grad_output, *operands, partials, needed[:2], logits_dtype, weights_dtype)
        assert all(tensor.is_contiguous() for tensor in (y, partials, *grads))
        storages = [grad.untyped_storage().data_ptr() for grad in grads if grad.numel()]
        assert len(set(storages)) == len(storages)
        assert all(grad.numel() == 0 for grad, is_needed in zip(grads, needed, strict=True) if not is_needed)
        return {"y": y, **dict(itertools.compress(zip(NAMES, grads, strict=True), needed))}

    def in_plain_torch(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The result `y` and all gradients by a loop over the experts in plain torch, computed in `dtype`."""
        operands = {"x": self.x, "weight": self.weight, "logits": self.logits > 0, "mask_weights": self.mask_weights}
        leaves = {k: t.detach().to(dtype).requires_grad_() for k, t in operands.items() if t is not None}
        x, weight, masks, *mask_weights = leaves.values()
        y, grad_output = torch.zeros_like(self.grad_output, dtype=dtype), self.grad_output.to(dtype)
        grads = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for expert, (start, end) in enumerate(itertools.pairwise([0, *self.offs.tolist()])):
            if start == end:
                continue
            rows = slice(start, end)
            expert_y = naive(
                x[rows], weight[expert], masks[expert], self.activation, *(tensor[rows] for tensor in mask_weights)
            )
            y[rows] = expert_y.detach()
            expert_grads = torch.autograd.grad(expert_y, tuple(leaves.values()), grad_output[rows])
            for name, grad in zip(leaves, expert_grads, strict=True):
                grads[name] += grad
        return {"y": y, **grads}


def assert_as_good_as_naive(found: dict[str, Tensor], layer: ExpertLayer, factor: float) -> None:
    """Assert that each error against float64 is at most `factor` times a naive loop's error in the layer's dtype."""
    exact, naive_loop = layer.in_plain_torch(torch.float64), layer.in_plain_torch(layer.x.dtype)
    for name, tensor in found.items():
        allowed = factor * relative_error(naive_loop[name].to(tensor.dtype), exact[name])
        error = relative_error(tensor, exact[name])
        assert error <= allowed, f"{name}: relative error {error:.3g}, allowed {allowed:.3g}"
        assert_zero_without_an_expert(name, tensor, layer)


def assert_zero_without_an_expert(name: str, tensor: Tensor, layer: ExpertLayer) -> None:
    """Assert that rows without an expert, and gradients of experts without rows, are zeros."""
    ends = [0, *layer.offs.tolist()]
    if name in ("weight", "logits"):
        for expert, (start, end) in enumerate(itertools.pairwise(ends)):
            assert start < end or not tensor[expert].count_nonzero(), f"{name} of expert {expert}"
    else:
        assert not tensor[ends[-1] :].count_nonzero(), f"{name} of rows without an expert"
