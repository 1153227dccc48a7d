"""The kernel for any call: a warp multiplies one row of W by a few tokens with scalar FMAs (csrc/cuda/plain.cu)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ....call import Call
from ....sizes import ceil_div
from ..device import Gpu
from .base import LaunchConfig, common_macros

_MOST_GRID_Y = 65535

MOST_TOKENS = 4 * _MOST_GRID_Y
"""The most tokens of a grid whose blocks have 4 tokens each."""


@dataclass(frozen=True)
class Plain(LaunchConfig):
    """The launch configuration of `plain`. A block of 8 warps computes 8 rows of W for `block_tokens` tokens."""

    kernel = "plain"
    overlaps = False

    block_tokens: int = 1
    """Tokens that share a read of W, 1 to 8."""

    @property
    def threads(self) -> int:
        return 256

    def shared_bytes(self, call: Call) -> int:
        return 0

    def grid(self, call: Call, gpu: Gpu) -> tuple[int, int]:
        return ceil_div(call.out_features, self.threads // 32), ceil_div(call.tokens, self.block_tokens)

    def macros(self, call: Call) -> dict[str, int]:
        return common_macros(call) | {"MGLU_TOKENS": self.block_tokens}

    def _violations(self, call: Call, gpu: Gpu) -> Iterator[str]:
        if self.block_tokens > 8:
            yield f"block_tokens: got {self.block_tokens}, must be 1 to 8"
        if self.grid(call, gpu)[1] > _MOST_GRID_Y:
            yield f"{call.tokens} tokens are more than a grid of blocks of {self.block_tokens} holds"


def choose(call: Call, gpu: Gpu) -> Plain:
    """Choose one or four tokens per block. These sum in different orders, so batch-invariant calls always use four."""
    return Plain(block_tokens=1 if call.tokens == 1 and not call.batch_invariant else 4)
