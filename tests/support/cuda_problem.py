"""A call of the CUDA backend with random inputs, and its float64 result."""

from __future__ import annotations

from typing import Any

import torch
from backend_calls import run_on, unsupported
from budgets import assert_matches
from torch import Tensor

from mglu_ops.backends import reference
from mglu_ops.backends.cuda import LaunchConfig
from mglu_ops.call import Call
from mglu_ops.given import Given


def pack(masks: Tensor) -> Tensor:
    """Pack bool masks `[n, d, h]` without the package's own code."""
    n, d, h = masks.shape
    padded = torch.zeros(n, d, -(-h // 8) * 8, dtype=torch.uint8, device=masks.device)
    padded[:, :, :h] = masks
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=masks.device)
    return (padded.view(n, d, -(-h // 8), 8) * weights).sum(-1, dtype=torch.uint8).permute(1, 2, 0).contiguous()


class Problem:
    """Random inputs of one call, and its float64 result."""

    def __init__(
        self,
        tokens: int,
        d: int,
        h: int,
        n_masks: int,
        dtype: torch.dtype = torch.float16,
        activation: str = "silu",
        mask_weights_dtype: torch.dtype | None = None,
    ) -> None:
        self.x = torch.randn(tokens, h, device="cuda").to(dtype)
        self.weight = (torch.randn(d, h, device="cuda") / max(h, 1) ** 0.5).to(dtype)
        self.masks = torch.rand(n_masks, d, h, device="cuda") < 0.5
        self.packed = pack(self.masks)
        self.activation = activation
        self.mask_weights = (
            None if mask_weights_dtype is None else torch.rand(tokens, n_masks, device="cuda").to(mask_weights_dtype)
        )

    @property
    def given(self) -> Given:
        return Given(self.x, self.weight, self.packed, self.activation, self.mask_weights)

    @property
    def call(self) -> Call:
        return Call.of(self.given)

    def run(self, config: LaunchConfig | None = None) -> Tensor:
        return run_on("cuda", *self.given[:5], launch=config)

    def launch(self, sequence: Any, out: Tensor, workspace: Tensor, **addresses: int) -> None:
        """Launch prepared kernels on the current stream. They write to the test's tensors `out` and `workspace`."""
        pointers = self.given.addresses(out) | addresses
        sequence(torch.cuda.current_stream().cuda_stream, pointers, workspace.data_ptr())

    def oracle(self) -> Tensor:
        """The float64 result, summed mask by mask to save memory."""
        result = torch.zeros(len(self.x), len(self.weight), dtype=torch.float64, device=self.x.device)
        for i, mask in enumerate(self.masks):
            weights = None if self.mask_weights is None else self.mask_weights[:, i : i + 1]
            result += reference.forward(self.x, self.weight, mask[None], self.activation, weights)
        return result

    def check(self, config: LaunchConfig | None = None) -> None:
        assert unsupported("cuda", *self.given[:5]) is None
        assert_matches(self.run(config), self.oracle(), self.x.dtype)
