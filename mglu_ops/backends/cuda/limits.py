"""What a configuration has to keep to: the static assertions of its kernel's source, and what a block may have."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .config import RESERVED_PER_BLOCK, LaunchConfig, shared_limit

_MOST_THREADS = 1024
_THREADS_PER_SM = {(8, 0): 2048, (8, 7): 2048, (9, 0): 2048, (10, 0): 2048, (10, 3): 2048}
_THREADS_PER_SM_OTHER = 1536


@dataclass(frozen=True)
class Case:
    """A problem as launches are measured for it: of contiguous tensors, whatever the activation and the routing."""

    device: str
    arch: tuple[int, int]
    multiprocessors: int
    dtype: torch.dtype
    n_masks: int
    tokens: int
    out_features: int
    in_features: int

    def __str__(self) -> str:
        shape = f"{self.out_features} x {self.in_features}"
        return f"{str(self.dtype)[6:]}, n_masks {self.n_masks}, {self.tokens} tokens, {shape}"


def violation(config: LaunchConfig, case: Case) -> str | None:
    """Why a configuration cannot run a case whose tensors are contiguous and aligned, or None if it can."""
    return next(_violations(config, case), None)


def _violations(config: LaunchConfig, case: Case) -> Iterator[str]:
    counts = {name: value for name, value in config.settings().items() if not isinstance(value, bool)}
    for name, value in counts.items():
        if value < 1:
            yield f"{name}: got {value}, must be at least 1"
            return
    yield from _KERNELS[config.kernel](config, case)
    if config.threads > _MOST_THREADS:
        yield f"{config.threads} threads a block, more than {_MOST_THREADS}"
    threads_per_sm = _THREADS_PER_SM.get(case.arch, _THREADS_PER_SM_OTHER)
    if config.threads * config.blocks_per_sm > threads_per_sm:
        yield f"{config.threads * config.blocks_per_sm} threads an SM, more than {threads_per_sm}"
    need = config.shared_bytes(case.n_masks, case.tokens, case.in_features) + RESERVED_PER_BLOCK
    if need > shared_limit(case.arch):
        yield f"{need} bytes of shared memory a block, more than {shared_limit(case.arch)}"


def _plain(config: LaunchConfig, case: Case) -> Iterator[str]:
    if config.block_tokens > 8:
        yield f"block_tokens: got {config.block_tokens}, must be 1 to 8"
    if -(-case.tokens // config.block_tokens) > 65535:
        yield f"{case.tokens} tokens are more than a grid of blocks of {config.block_tokens} holds"


def _fast(config: LaunchConfig, case: Case) -> Iterator[str]:
    if case.dtype is torch.float32:
        yield f"{config.kernel} has no float32"
    if case.in_features % 8 or not case.in_features:
        yield f"{config.kernel} needs in_features that are a multiple of 8, got {case.in_features}"
    if case.out_features < config.rows:
        yield f"rows: got {config.rows}, must be at most out_features {case.out_features}"


def _decode_mma(config: LaunchConfig, case: Case) -> Iterator[str]:
    yield from _fast(config, case)
    if config.rows != 16:
        yield f"rows: got {config.rows}, must be 16"
    if config.block_tokens > 16:
        yield f"block_tokens: got {config.block_tokens}, must be 1 to 16"
    if config.cluster > 1 and (config.cluster > 2 or case.arch != (9, 0) or case.tokens > config.block_tokens):
        yield f"cluster: got {config.cluster}, must be 1, or 2 on compute capability 9.0 where a block has all tokens"
    if config.sub not in (1, 2, 4):
        yield f"sub: got {config.sub}, must be 1, 2 or 4"
    swizzled = config.sub * case.n_masks % 16 == 0
    whole_words = config.mask_group in (4, 8, 16) or (config.mask_group == case.n_masks and not swizzled)
    if case.n_masks % config.mask_group or not whole_words:
        yield f"mask_group: got {config.mask_group}, must divide n_masks {case.n_masks} into whole words"


def _tile_wgmma(config: LaunchConfig, case: Case) -> Iterator[str]:
    yield from _fast(config, case)
    if case.arch != (9, 0):
        yield f"tile_wgmma is for compute capability 9.0, got {case.arch[0]}.{case.arch[1]}"
    if config.rows % 16 or config.rows < 64:
        yield f"rows: got {config.rows}, must be a multiple of 16, at least 64"
    if config.block_tokens % 8:
        yield f"block_tokens: got {config.block_tokens}, must be a multiple of 8"
    if config.cluster > 2:
        yield f"cluster: got {config.cluster}, must be 1 or 2"
    if config.turned and config.sparse:
        yield "turned: not with sparse products, which spread x as it is"
    if config.steps not in (1, 2, 4):
        yield f"steps: got {config.steps}, must be 1, 2 or 4"
    if config.mask_groups not in (1, 2):
        yield f"mask_groups: got {config.mask_groups}, must be 1 or 2"
    if config.row_groups * config.mask_groups > 4:
        yield f"{config.row_groups * config.mask_groups} warpgroups that multiply, more than 4"
    if config.passes > 1 and case.n_masks % (4 * config.passes):
        yield f"passes: got {config.passes}, must part n_masks {case.n_masks} into multiples of 4"
    masks = case.n_masks // config.passes
    if config.mask_groups > masks:
        yield f"mask_groups: got {config.mask_groups}, more than the masks of a pass"
    elif not config.sparse and config.sub * (4 // config.steps) * ((masks + 1) // config.mask_groups) < 2:
        yield f"steps: got {config.steps}, must be less where a stage is one group of wgmmas"
    if case.n_masks % 2 and config.sub % 2:
        yield f"sub: got {config.sub}, must be even for an odd number of masks"


_KERNELS = {"plain": _plain, "decode_mma": _decode_mma, "tile_wgmma": _tile_wgmma}
