"""The second half of a layer of experts: each pair's product with its expert's weight, and the sum over a token's pairs.

The kernels are csrc/cuda/experts_down.cu and csrc/cuda/combine_experts.cu, described in csrc/cuda/experts_down.md.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

from ....expert_calls import ExpertCall
from ....sizes import ceil_div, round_up
from ..device import RESERVED_SHARED_BYTES_PER_BLOCK, Gpu
from ..driver import Launch
from ..launch import load_kernel, parameters
from .base import ELEMENTS, weight_is_vectorizable

NAME, COMBINE = "experts_down", "combine_experts"

_COLUMNS = 128
_COMBINE_THREADS = 128
_MOST_ROWS_OF_EXPERT = 96
"""The most rows an expert, on average, for which this kernel is faster than library products of sorted rows."""
_MOST_ROWS = 2**14
"""Rows whose order fits into shared memory."""


@dataclass(frozen=True)
class ExpertsDown:
    """The launch of csrc/cuda/experts_down.cu.

    A block has `teams` of `row_warps` warps. Each warp takes `row_tiles` tiles of 16 rows of W.
    """

    block_tokens: int
    """Pairs of one expert that share a read of W: 8 or a multiple, or 1 where the block adds all experts of one token."""
    row_tiles: int = 1
    row_warps: int = 4
    teams: int = 1
    """Groups of warps that divide the stages of one token."""
    stages: int = 4
    """Stages of 128 columns in the ring of each team."""
    blocks_per_sm: int = 1
    read_once: bool = True

    def __str__(self) -> str:
        return f"{NAME}({', '.join(f'{field.name}={getattr(self, field.name)}' for field in fields(self))})"

    @property
    def threads(self) -> int:
        return 32 * self.row_warps * self.teams

    @property
    def rows(self) -> int:
        """Rows of W in a unit of work."""
        return 16 * self.row_tiles * self.row_warps

    def stage_bytes(self, call: ExpertCall) -> int:
        """Bytes of one stage of a ring."""
        weight = call.layer.weight
        scales = 4 * self.rows if weight.format.columns else 0
        return round_up(_COLUMNS // 8 * self.rows * weight.bits + 2 * _COLUMNS * self.block_tokens + scales, 256)

    def shared_bytes(self, call: ExpertCall) -> int:
        """Bytes of dynamic shared memory that a block uses."""
        rings = self.teams * self.stages * self.stage_bytes(call)
        sums = 4 * self.teams * self.rows if self.block_tokens == 1 else 0
        counts = 0 if self.block_tokens == 1 else 4 * min(self.threads // 32, 4) * call.experts
        return rings + sums + 8 * self._most_items(call) + counts + 4 + 2 * call.rows

    def grid(self, call: ExpertCall, gpu: Gpu) -> tuple[int, int]:
        """Blocks in x and in y: those that are resident, at most."""
        units = ceil_div(call.layer.out_features, self.rows)
        if self.block_tokens > 1:
            units = min(units * self._most_items(call), gpu.multiprocessors * self.blocks_per_sm)
        return units, 1

    def _most_items(self, call: ExpertCall) -> int:
        return min(call.rows, call.rows // self.block_tokens + call.experts)

    def macros(self, call: ExpertCall) -> dict[str, int]:
        """The macros of the source."""
        return _common_macros(call) | {
            "MGLU_WEIGHT_FORMAT": call.layer.weight.format.code,
            "MGLU_BLOCK_TOKENS": self.block_tokens,
            "MGLU_ROW_TILES": self.row_tiles,
            "MGLU_ROW_WARPS": self.row_warps,
            "MGLU_TEAMS": self.teams,
            "MGLU_STAGES": self.stages,
            "MGLU_BLOCKS_PER_SM": self.blocks_per_sm,
            "MGLU_READ_ONCE": int(self.read_once),
        }


def _common_macros(call: ExpertCall) -> dict[str, int]:
    assert call.expert_weights_dtype is not None
    return {
        "MGLU_ELEMENT": ELEMENTS[call.layer.dtype],
        "MGLU_ID_BYTES": call.index_dtype.itemsize,
        "MGLU_EXPERT_WEIGHTS": ELEMENTS[call.expert_weights_dtype],
    }


def combine_macros(call: ExpertCall) -> dict[str, int]:
    """The macros of csrc/cuda/combine_experts.cu."""
    assert call.top_k is not None
    return _common_macros(call) | {"MGLU_TOP_K": call.top_k, "MGLU_VECTOR": _vector(call)}


def _vector(call: ExpertCall) -> int:
    return 4 if call.layer.out_features % 4 == 0 else 1


def sources(config: ExpertsDown, call: ExpertCall, gpu: Gpu) -> list[tuple[str, str, dict[str, int]]]:
    """Everything that is compiled for a call, as `(kernel, target, macros)`."""
    target = f"sm_{gpu.arch[0]}{gpu.arch[1]}"
    found = [(NAME, target, config.macros(call))]
    return found if config.block_tokens == 1 else [*found, (COMBINE, target, combine_macros(call))]


def unsupported_reason(call: ExpertCall, gpu: Gpu) -> str | None:
    """Why the kernel does not take a call, or is slower than library products of sorted rows; None if it takes it."""
    layer, rows = call.layer, min(call.rows, call.experts)
    if layer.dtype not in (torch.float16, torch.bfloat16):
        return f"no kernel for y {layer.dtype}"
    if call.expert_weights_dtype not in ELEMENTS:
        return f"no kernel for expert_weights {call.expert_weights_dtype}"
    if gpu.arch < (8, 0):
        return f"compute capability {gpu.arch} is below 8.0"
    if layer.in_features == 0 or not weight_is_vectorizable(layer):
        return "the rows of weight are not whole aligned vectors of 16 bytes"
    if layer.out_features < 16:
        return f"out_features {layer.out_features} is below 16"
    if call.rows > _MOST_ROWS or call.rows > rows * _MOST_ROWS_OF_EXPERT:
        return f"{call.rows} rows of {call.experts} experts, for which library products are faster"
    return None if choose(call, gpu) is not None else "the ids of so many experts do not fit into shared memory"


def choose(call: ExpertCall, gpu: Gpu) -> ExpertsDown | None:
    """Choose the launch of a call; None if none fits into shared memory."""
    tiles = ceil_div(call.layer.out_features, 16)
    if call.rows == call.top_k:
        row_warps = next(warps for warps in (1, 2, 4, 8) if warps == 8 or tiles <= 2 * warps * gpu.multiprocessors)
        return _fit(ExpertsDown(1, 1, min(row_warps, tiles), 8 // row_warps, 6, 1), call, gpu)
    rows = call.rows / min(call.rows, call.experts)
    tokens = 8 if rows <= 4 else 16 if rows <= 10 else 32 if rows <= 24 else 64
    return _fit(ExpertsDown(tokens, 1 if tokens <= 16 else 2, min(4, tiles), 1, 4, 3 if tokens <= 16 else 2), call, gpu)


def _fit(config: ExpertsDown, call: ExpertCall, gpu: Gpu) -> ExpertsDown | None:
    return config


def launches(
    config: ExpertsDown, call: ExpertCall, gpu: Gpu, device: int
) -> tuple[Launch, Launch | None]:
    """Compile, load and describe the launches of a call on `device`, the current device."""
    layer, overlap = call.layer, gpu.arch >= (9, 0)
    (main, *rest) = [load_kernel(device, *source) for source in sources(config, call, gpu)]
    first = Launch(
        main,
        config.grid(call, gpu),
        config.threads,
        config.shared_bytes(call),
        overlap=overlap,
        parameters=parameters(f"{NAME}.cu", "DownParams"),
        integers={
            "weight_stride": call.weight_stride,
            "weight_row_stride": layer.weight.layout.strides[0],
            "scale_stride": call.scale_stride,
            "pairs": call.rows,
            "experts": call.experts,
            "out_features": layer.out_features,
            "in_features": layer.in_features,
        },
    )
    if not rest:
        return first, None
    assert call.top_k is not None
    return first, Launch(
        rest[0],
        (ceil_div(layer.out_features, _COMBINE_THREADS * _vector(call)), call.rows // call.top_k),
        _COMBINE_THREADS,
        0,
        overlap=overlap,
        parameters=parameters(f"{COMBINE}.cu", "CombineParams"),
        integers={"experts": call.experts, "out_features": layer.out_features},
    )
