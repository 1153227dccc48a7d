"""From the metadata of a call to a loaded kernel: everything that does not depend on the pointers, done once."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from . import launch_tables
from .choice import choose
from .compiler import compile_cubin
from .config import LaunchConfig
from .driver import Kernel, Launch
from .limits import Case
from .tensor_map import MAP_BYTES, Matrix, TensorMaps

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
    """Whether 16-byte loads of x are aligned and contiguous."""
    strides: tuple[int, ...]
    """Of x, weight, packed_masks and route_weights, in a row."""
    multiprocessors: int
    device: str = ""
    """The GPU's name, by which tables of launches know it."""
    batch_invariant: bool = False
    """Whether a row's result must not depend on the number of tokens."""


@dataclass(frozen=True)
class Decision:
    """How a problem is launched, and where that comes from."""

    config: LaunchConfig
    origin: str
    problem: str | None = None
    """Why none of the fast kernels of 16 bits can have it, so that the plain one runs several times slower."""


@dataclass(frozen=True)
class Plan:
    """Kernels that only wait for a stream and pointers."""

    kernel: Launch
    config: LaunchConfig
    turn: Launch | None = None
    """What makes the copy of x that `tile_wgmma` reads where it is turned."""
    workspace: int = 0
    """Bytes of that copy: memory that the caller provides, aligned to 16 bytes."""
    maps: TensorMaps | None = None
    """Where `tile_wgmma` finds W and the masks."""
    x_maps: TensorMaps | None = None
    """Where it finds x if that is not turned: apart, since x is at many addresses, and each layer has its own W."""

    def launch(self, stream: int, workspace: int, x: int, weight: int, masks: int, route: int, out: int) -> None:
        """All but the stream are addresses."""
        maps = None
        if self.maps is not None:
            maps = self.maps(weight, masks)
            if self.x_maps is not None:
                maps = self.x_maps(x) + maps
        if self.turn is not None:
            self.turn(stream, x, 0, 0, 0, workspace)
            x = workspace
        self.kernel(stream, x, weight, masks, route, out, maps=maps)


def describe(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    arch: tuple[int, int],
    multiprocessors: int,
    device: str,
    batch_invariant: bool,
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
        device=device,
        batch_invariant=batch_invariant,
    )


def _aligned(problem: Problem) -> bool:
    return problem.weight_aligned and problem.mask_alignment >= 4 and problem.in_features > 0


def _x_in_rows(problem: Problem) -> bool:
    """Whether the copy engine can take x as it is: rows of 16-byte vectors that do not overlap."""
    return problem.x_vectorizable and (problem.tokens == 1 or problem.strides[0] >= problem.in_features)


def decide(problem: Problem) -> Decision:
    """How a problem is launched if nothing else is asked for: as a table says that measured it, else by the model.

    Raises:
        TableError: a table of launches cannot be read.
    """
    p = problem
    if _aligned(p) and _x_in_rows(p) and not p.batch_invariant:
        case = Case(p.device, p.arch, p.multiprocessors, p.dtype, p.n_masks, p.tokens, p.out_features, p.in_features)
        measured = launch_tables.find(case)
        if measured is not None:
            return Decision(measured.entry.config, str(measured))
    origin = "the batch-invariant order" if p.batch_invariant else "the model of costs"
    config = model_choice(p)
    return Decision(config, origin, _slow_reason(p) if config.kernel == "plain" else None)


def model_choice(problem: Problem) -> LaunchConfig:
    """The configuration of a problem where no table is asked."""
    p = problem
    return choose(
        p.arch,
        p.dtype,
        p.n_masks,
        p.tokens,
        p.out_features,
        p.in_features,
        _aligned(p),
        p.multiprocessors,
        p.batch_invariant,
        _x_in_rows(p),
    )


def _slow_reason(problem: Problem) -> str | None:
    """Why a problem in 16 bits gets the plain kernel; None for one in 32 bits, which has no other."""
    p = problem
    if p.dtype is torch.float32:
        return None
    if p.in_features % 8 or p.in_features == 0:
        return f"in_features {p.in_features} is not a multiple of 8"
    if not p.weight_aligned:
        return "the rows of weight are not contiguous, or do not start at multiples of 16 bytes"
    if p.mask_alignment < 4:
        return "the rows of packed_masks are not contiguous, or do not start at multiples of 4 bytes"
    if p.out_features < 16:
        return f"out_features {p.out_features} is below 16"
    return "no fast kernel fits into the shared memory"


def choice(problem: Problem) -> LaunchConfig:
    """The configuration that a problem runs with if none is given."""
    return decide(problem).config


def load_kernel(device: int, name: str, target: str, defines: dict[str, int]) -> Kernel:
    """The kernel of `csrc/cuda/<name>.cu` in the context of `device`, which is the current one: loaded once a process.

    Raises:
        CompileError: NVRTC refused it.
        LaunchError: the driver refused it.
    """
    return _load_kernel(device, name, target, tuple(sorted(defines.items())))


@cache
def _load_kernel(device: int, name: str, target: str, defines: tuple[tuple[str, int], ...]) -> Kernel:
    return Kernel(compile_cubin(name, target, dict(defines)), f"mglu_{name}", device)


def build(problem: Problem, override: LaunchConfig | None = None) -> Plan:
    """Chooses, compiles (or finds in the cache) and loads the kernel of a problem on the current device."""
    p = problem
    config = override or choice(p)
    fast = config.kernel != "plain"
    if fast and not _aligned(p):
        raise ValueError(f"{config.kernel} needs aligned rows of weight and packed_masks")
    tile = config.kernel == "tile_wgmma"
    if tile and not config.turned and not _x_in_rows(p):
        raise ValueError(f"{config} needs rows of x that are aligned and do not overlap")
    device = torch.cuda.current_device()
    constants = CONSTANTS.pack(*p.strides, p.tokens, p.out_features, p.in_features, int(p.x_vectorizable))
    overlap = fast and p.arch >= (9, 0)
    kernel = Launch(
        load_kernel(device, config.kernel, target(p.arch, config), defines(p, config)),
        config.grid(p.tokens, p.out_features, p.multiprocessors),
        config.threads,
        config.reserved_bytes(p.arch, p.n_masks, p.tokens, p.in_features),
        overlap=overlap,
        constants=constants + bytes(3 * MAP_BYTES if tile else 0),
    )
    if not tile:
        return Plan(kernel, config)
    x, *weights = matrices(p, config)
    maps = TensorMaps(*weights)
    if x is not None:
        return Plan(kernel, config, maps=maps, x_maps=TensorMaps(x))
    turn = Launch(
        load_kernel(device, "permute_x", target(p.arch, config), turn_defines(config)),
        (config.turn_blocks(p.tokens, p.in_features), 1),
        256,
        0,
        overlap=overlap,
        constants=constants,
    )
    return Plan(kernel, config, turn, config.turned_bytes(p.tokens, p.in_features), maps)


def matrices(problem: Problem, config: LaunchConfig) -> tuple[Matrix | None, Matrix, Matrix | None]:
    """What `tile_wgmma` copies in boxes: x if it is not turned, W, and the masks if the copy engine takes them."""
    p = problem
    x = None
    if not config.turned:
        pitch = 2 * (p.strides[0] if p.tokens > 1 else p.in_features)
        x = Matrix(2, p.in_features, p.tokens, pitch, 64, min(config.block_tokens, p.tokens), swizzle=True)
    rows = config.rows // config.cluster
    weight = Matrix(2, p.in_features, p.out_features, p.strides[2] * 2, 64, rows, swizzle=True)
    if p.mask_alignment < 16:
        return x, weight, None
    width, box = p.in_features // 8 * p.n_masks, config.mask_row_bytes(p.n_masks)
    return x, weight, Matrix(1, width, p.out_features, p.strides[4], box, rows, swizzle=p.n_masks == 16)


def target(arch: tuple[int, int], config: LaunchConfig) -> str:
    """What a kernel is compiled for: wgmma is in the architecture's own set of instructions."""
    return f"sm_{arch[0]}{arch[1]}" + ("a" if config.kernel == "tile_wgmma" else "")


def turn_defines(config: LaunchConfig) -> dict[str, int]:
    """The macros of `permute_x`."""
    return {"MGLU_TOKEN_COLUMNS": config.block_tokens, "MGLU_SUB": config.sub}


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
    if config.kernel == "tile_wgmma":
        return common | {
            "MGLU_TOKEN_COLUMNS": config.block_tokens,
            "MGLU_BLOCK_ROWS": config.rows,
            "MGLU_MASK_GROUPS": config.mask_groups,
            "MGLU_PASSES": config.passes,
            "MGLU_STAGES": config.stages,
            "MGLU_SUB": config.sub,
            "MGLU_STEPS": config.steps,
            "MGLU_BULK_MASKS": int(p.mask_alignment == 16),
            "MGLU_SPARSE": int(config.sparse),
            "MGLU_PERMUTED": int(config.turned),
            "MGLU_CLUSTER": config.cluster,
        }
    return common | {
        "MGLU_TILES": config.tiles,
        "MGLU_SPLIT_K": config.split_k,
        "MGLU_STAGES": config.stages,
        "MGLU_MASK_VECTOR": min(config.mask_vector(p.n_masks), p.mask_alignment),
        "MGLU_BLOCKS_PER_SM": config.blocks_per_sm,
        "MGLU_SUB": config.sub,
        "MGLU_MASK_GROUP": config.mask_group,
        "MGLU_TOKEN_TILES": config.token_tiles,
        "MGLU_BLOCK_TOKENS": config.block_tokens,
        "MGLU_TOKEN_COLUMNS": config.token_columns(p.tokens),
        "MGLU_READ_ONCE": int(p.tokens <= config.block_tokens),
        "MGLU_CLUSTER": config.cluster,
    }
