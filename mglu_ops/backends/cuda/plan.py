"""From the metadata of a call to a loaded kernel: everything that does not depend on the pointers, done once."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from .compiler import compile_cubin
from .config import LaunchConfig, choose
from .driver import Function

# What follows the pointers in `Params` of csrc/cuda/params.cuh: strides, then sizes.
CONSTANTS = struct.Struct("9q4i")

ELEMENTS = {torch.float16: 0, torch.bfloat16: 1, torch.float32: 2}
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4, "tanh": 5, "identity": 6}


@dataclass(frozen=True)
class Problem:
    """What a plan depends on: shapes, dtypes, and how vectors line up."""

    arch: tuple[int, int]
    dtype: torch.dtype
    n_masks: int
    tokens: int
    out_features: int
    in_features: int
    activation: str
    route_dtype: torch.dtype | None
    weight_aligned: bool
    mask_alignment: int
    """The largest of 16, 8, 4, 1 that divides the address of every mask row; 0 if octets are not contiguous."""
    x_vectorizable: bool
    strides: tuple[int, ...]
    """Of x, weight, packed_masks and route_weights, in a row."""
    multiprocessors: int


@dataclass(frozen=True)
class Plan:
    """A kernel that only waits for a stream and pointers."""

    launch: Function
    config: LaunchConfig


def describe(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    arch: tuple[int, int],
    multiprocessors: int,
) -> Problem:
    """The problem of a call. x is 2-D; nothing is read from the device."""
    tokens, in_features = x.shape
    out_features, _, n_masks = packed_masks.shape
    itemsize = x.element_size()
    weight_aligned = (
        in_features % 8 == 0
        and weight.stride(1) == 1
        and weight.data_ptr() % 16 == 0
        and weight.stride(0) * itemsize % 16 == 0
        and weight.stride(0) < 2**26
    )
    row, octet, mask = packed_masks.stride()
    mask_alignment = 0
    if (mask == 1 or n_masks == 1) and octet == n_masks and row < 2**26:
        length = in_features // 8 * n_masks  # whole vectors must not reach past the last row's end
        mask_alignment = next(a for a in (16, 8, 4, 1) if (packed_masks.data_ptr() | row | length) % a == 0)
    x_vectorizable = x.stride(1) == 1 and x.data_ptr() % 16 == 0 and (tokens == 1 or x.stride(0) * itemsize % 16 == 0)
    route_strides = (0, 0) if route_weights is None else route_weights.stride()
    return Problem(
        arch=arch,
        dtype=x.dtype,
        n_masks=n_masks,
        tokens=tokens,
        out_features=out_features,
        in_features=in_features,
        activation=activation,
        route_dtype=None if route_weights is None else route_weights.dtype,
        weight_aligned=weight_aligned,
        mask_alignment=mask_alignment,
        x_vectorizable=x_vectorizable,
        strides=(*x.stride(), *weight.stride(), *packed_masks.stride(), *route_strides),
        multiprocessors=multiprocessors,
    )


def build(problem: Problem, override: LaunchConfig | None = None) -> Plan:
    """Chooses, compiles (or finds in the cache) and loads the kernel of a problem on the current device."""
    p = problem
    aligned = p.weight_aligned and p.mask_alignment >= 4 and p.in_features > 0
    config = override or choose(
        p.arch, p.dtype, p.n_masks, p.tokens, p.out_features, p.in_features, aligned, p.multiprocessors
    )
    fast = config.kernel != "plain"
    if fast and not aligned:
        raise ValueError(f"{config.kernel} needs aligned rows of weight and packed_masks")
    launch = Function(
        compile_cubin(config.kernel, f"sm_{p.arch[0]}{p.arch[1]}", defines(p, config)),
        f"mglu_{config.kernel}",
        config.grid(p.tokens, p.out_features, p.multiprocessors),
        config.threads,
        config.shared_bytes(p.n_masks, p.tokens, p.in_features),
        overlap=fast and p.arch >= (9, 0),
        constants=CONSTANTS.pack(*p.strides, p.tokens, p.out_features, p.in_features, int(p.x_vectorizable)),
    )
    return Plan(launch, config)


def defines(problem: Problem, config: LaunchConfig) -> dict[str, int]:
    """The macros that a kernel's source is compiled with."""
    p = problem
    common = {
        "MGLU_ELEMENT": ELEMENTS[p.dtype],
        "MGLU_N_MASKS": p.n_masks,
        "MGLU_ACTIVATION": ACTIVATIONS[p.activation],
        "MGLU_ROUTE": -1 if p.route_dtype is None else ELEMENTS[p.route_dtype],
    }
    if config.kernel == "plain":
        return common | {"MGLU_TOKENS": config.block_tokens}
    common |= {
        "MGLU_TILES": config.tiles,
        "MGLU_SPLIT_K": config.split_k,
        "MGLU_STAGES": config.stages,
        "MGLU_MASK_VECTOR": min(config.mask_vector(p.n_masks), p.mask_alignment),
        "MGLU_BLOCKS_PER_SM": config.blocks_per_sm,
        "MGLU_EARLY_WEIGHTS": int(config.early_weights),
    }
    if config.kernel == "decode_fma":
        return common | {"MGLU_ROWS": config.rows, "MGLU_SUB": config.sub, "MGLU_CHAINS": config.chains}
    return common | {
        "MGLU_SUB": config.sub,
        "MGLU_MASK_GROUP": config.mask_group,
        "MGLU_TOKEN_TILES": config.token_tiles,
        "MGLU_BLOCK_TOKENS": config.block_tokens,
        "MGLU_TOKEN_COLUMNS": config.token_columns(p.tokens),
    }


__all__ = ["CONSTANTS", "Plan", "Problem", "build", "defines", "describe"]
