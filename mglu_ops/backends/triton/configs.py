"""The launch configurations of the Triton kernels, from measurements on an H200.

The comment after a configuration gives its times in microseconds, first for a weight of 14336 x 4096 in float16, and
then for 8192 x 2048. They were measured by CUDA graph replay over more than 1 GB of weights. A kernel that only reads
the weight and the masks takes, in microseconds,

| masks | 1 | 2 | 4 | 8 | 16 |
|---|---|---|---|---|---|
| 14336 x 4096 | 28.5 | 30.1 | 33.3 | 39.7 | 52.4 |
| 8192 x 2048 | 9.2 | 9.7 | 10.6 | 12.4 | 16.1 |
"""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOKENS = 64


@dataclass(frozen=True)
class MatvecConfig:
    """The launch of `matvec_kernel`. A program computes one row for one token, in steps of 8 * `groups` weights."""

    groups: int
    num_warps: int = 1


@dataclass(frozen=True)
class MatmulConfig:
    """The launch of `matmul_kernel`. A program computes a tile of rows and tokens, in steps of `block_k` columns."""

    block_rows: int
    block_k: int
    block_tokens: int
    num_warps: int
    num_stages: int

    def __post_init__(self) -> None:
        # With whole warpgroups, Triton uses `wgmma` for products of at least 64 rows and `mma` for smaller ones. In
        # Triton 3.6, kernels with both gave wrong sums (relative error 1e-2 for 8 and 16 masks).
        if self.num_warps % 4 == 0 and self.block_rows < 64:
            raise ValueError(f"MatmulConfig: got {self.num_warps} warps, fewer than 64 rows must have 1 or 2")


Config = MatvecConfig | MatmulConfig


def choose(n_masks: int, tokens: int, *, wide: bool) -> Config:
    """Choose the launch configuration. `wide` is True for float32, which tensor cores would round."""
    masks = 1 << (n_masks - 1).bit_length()
    if tokens <= _MATVEC_TOKENS[masks] or wide:
        return _MATVEC[masks]
    return next(config for config in _MATMUL[masks] if tokens <= config.block_tokens or config is _MATMUL[masks][-1])


# The keys of the tables are the number of masks, rounded up to a power of two.

# A program has one warp. Several warps would sum through shared memory with a barrier: for 4 masks, two warps take
# 41 us and four take 46 us, but one takes 38 us. With 128 groups, each thread has four 16-byte loads in flight. With 64
# groups, a program needs fewer registers for its sums, so more warps run at once.
_MATVEC = {
    1: MatvecConfig(groups=128),  # 30.6, 10.3
    2: MatvecConfig(groups=128),  # 32.6, 11.1
    4: MatvecConfig(groups=64),  # 38.5, 13.5
    8: MatvecConfig(groups=64),  # 51.0, 17.8
    16: MatvecConfig(groups=128),  # 93.0, 31.2
}

# The most tokens for `matvec_kernel`. With 2 tokens, a second program finds the row of W in the cache. This is faster
# than a nearly empty tile of 8 or 16 tokens for 1 mask (37.9, 13.3) and for 2 masks (44.4, 15.9). For 4 masks,
# both kernels take equally long (62.7, 21.5).
_MATVEC_TOKENS = {1: 2, 2: 2, 4: 1, 8: 1, 16: 1}

# The configurations of a key are in order of block_tokens. The last one is also for all larger numbers of tokens.
#
# For one mask, and for two masks and 32 tokens, a tile has 64 rows, for which Triton uses `wgmma`: 36.6 us for one
# mask, instead of 67.8 us with `mma`. For more masks `wgmma` waits for its operands (245 us for 4 masks), so a tile has
# 16 or 32 rows. Its one or two warps hold the accumulators, (masks + 1) * rows * tokens / threads registers in each
# thread. Every tile fits into 99 KB of shared memory, the limit on compute capabilities 8.6, 8.9 and 12.0.
_MATMUL = {
    1: (
        MatmulConfig(64, 128, 16, num_warps=4, num_stages=3),  # 36.6, 16.7
        MatmulConfig(64, 128, 32, num_warps=4, num_stages=3),  # 39.3, 18.3
        MatmulConfig(64, 64, 64, num_warps=4, num_stages=4),  # 53.8, 22.6
    ),
    2: (
        MatmulConfig(32, 128, 8, num_warps=2, num_stages=3),  # 68.0, 19.4
        MatmulConfig(32, 128, 16, num_warps=2, num_stages=3),  # 70.7, 21.6
        MatmulConfig(64, 128, 32, num_warps=8, num_stages=3),  # 64.3, 23.1
        MatmulConfig(32, 64, 64, num_warps=2, num_stages=3),  # 118.6, 37.4 (101.7, 30.1 if 133 KB were allowed)
    ),
    4: (
        MatmulConfig(32, 64, 8, num_warps=2, num_stages=4),  # 66.1, 20.7
        MatmulConfig(32, 128, 16, num_warps=2, num_stages=3),  # 75.9, 24.8
        MatmulConfig(32, 64, 32, num_warps=2, num_stages=4),  # 99.5, 31.0; 64 tokens 192.7, 52.3
    ),
    8: (
        MatmulConfig(32, 64, 8, num_warps=2, num_stages=4),  # 77.5, 24.9
        MatmulConfig(32, 64, 16, num_warps=2, num_stages=3),  # 103.1, 36.6; 64 tokens 357.0, 104.8
    ),
    16: (
        MatmulConfig(16, 32, 8, num_warps=1, num_stages=4),  # 105.2, 36.2
        MatmulConfig(16, 32, 16, num_warps=2, num_stages=4),  # 183.5, 46.6; 64 tokens 590.8, 175.7
    ),
}
