"""`tile_wgmma` in training, where it also writes the partial derivatives of the result for backward.

csrc/cuda/training.md describes it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from ....call import Call
from ....sizes import ceil_div
from ..device import Gpu
from ..tensor_map import Matrix
from . import group_tokens
from .base import has_x_in_rows
from .tile_experts import MOST_SUMS, TileItems, sums_of, unstacked
from .tile_wgmma import TileWgmma, can_run
from .tile_wgmma_choice import filled, shapes, suits
from .tile_wgmma_costs import costs_of


@dataclass(frozen=True)
class TrainingTile(TileWgmma):
    """The launch configuration of `tile_wgmma` in training.

    Its plan also takes the address of `partials`. The result `[tokens, out_features]` and `partials` are
    contiguous and 16-byte aligned. `partials` is `[tokens, n_masks + 1, out_features]` in x's dtype, or
    `[tokens, 2 n_masks + 1, out_features]` with mask weights. For masks i = 1 to n_masks:

        partials[:, 0] = dy/dt, partials[:, i] = dy/df_i, partials[:, n_masks + i] = dy/dmask_weight_i

    `mglu_ops/backends/cuda/training.py` defines t and f_i.
    """

    box_tokens: int = 8
    """Tokens that TMA stores at once: a multiple of 8 that divides `block_tokens`."""
    weighted: bool = False
    """True if there are mask weights."""
    padded_masks: bool = False
    """True if rows of masks are padded to a multiple of 16 bytes, so that TMA can load them."""

    def _fixed_bytes(self, n_masks: int) -> int:
        """The bytes for two sets of boxes that TMA stores, and for exchanged sums.

        Warpgroups with the same rows exchange three sums per element of the result. The passes of a single warpgroup
        exchange two, because it keeps t in registers.
        """
        masks = ceil_div(n_masks // self.passes, self.mask_groups)
        boxes = masks * (2 if self.weighted else 1) + 2
        staging = self.row_groups * self.mask_groups * 2 * boxes * self.box_tokens * 128
        sums = 3 if self.mask_groups == 2 else 2 if self.passes > 1 else 0
        return staging + self.row_groups * self.block_tokens * 256 * sums

    def macros(self, call: Call) -> dict[str, int]:
        return super().macros(call) | {"MGLU_TRAIN": 1, "MGLU_BOX_TOKENS": self.box_tokens}

    def loads_masks(self, call: Call) -> bool:
        return self.padded_masks or super().loads_masks(call)

    def results(self, call: Call) -> dict[str, Matrix]:
        widths = {"out": call.out_features, "partials": call.n_partials * call.out_features}
        return {
            name: Matrix(2, width, call.tokens, 2 * width, 64, self.box_tokens, swizzle=True)
            for name, width in widths.items()
        }

    def _violations(self, call: Call, gpu: Gpu) -> Iterator[str]:
        yield from super()._violations(call, gpu)
        if self.sparse:
            yield "sparse: not in training"
        if self.weighted != (call.mask_weights_dtype is not None):
            yield f"weighted: got {self.weighted}, for mask weights {call.mask_weights_dtype}"
        if self.box_tokens % 8 or self.block_tokens % self.box_tokens:
            yield f"box_tokens: got {self.box_tokens}, must be a multiple of 8 that divides {self.block_tokens}"
        if self.padded_masks and call.masks.strides[0] % 16:
            yield f"padded_masks: got rows of {call.masks.strides[0]} bytes, must be a multiple of 16"
        if call.out_features % 8:
            yield f"training needs out_features that are a multiple of 8, got {call.out_features}"
        if call.n_partials * call.out_features >= 2**31:
            yield f"{call.n_partials} partial derivatives of {call.out_features} features pass 32-bit coordinates"


def training_choice(call: Call, gpu: Gpu) -> TrainingTile | None:
    """Return the fastest launch by the cost model, or None if the kernel cannot run the call in training."""
    if not can_run(call, gpu) or call.out_features % 8 or call.tokens == 0:
        return None
    must_permute = call.batch_invariant or not has_x_in_rows(call)
    found = launches(
        call.n_masks, call.weight.bits, call.mask_weights_dtype is not None, must_permute, gpu.shared_bytes_per_sm
    )
    costs = costs_of(gpu)
    fitting = (config for config in found if suits(config, call))
    fastest = min(fitting, key=lambda config: costs.microseconds(config, call, gpu))
    # Larger boxes need fewer barriers.
    larger = replace(fastest, box_tokens=16)
    return fastest if larger.violation(call, gpu) else larger


_MOST_SUMS_OF_EXPERTS = 160
"""The most registers of a thread for sums, which leaves enough for its item. `MOST_SUMS` is the limit in inference."""


def training_items(call: Call, gpu: Gpu) -> TileItems | None:
    """Return the fastest launch for experts by the cost model, or None if the kernel cannot train them."""
    layer = call.one
    if not can_run(layer, gpu) or layer.out_features % 8 or any(unstacked(call)):
        return None
    if call.routed.experts > group_tokens.MOST_EXPERTS or not 0 < call.tokens <= group_tokens.MOST_ROWS:
        return None
    costs = costs_of(gpu)
    fastest = min(_candidates(layer, gpu), key=lambda one: costs.microseconds_of_experts(one, call, gpu))
    fastest = replace(fastest, padded_masks=layer.masks.strides[0] % 16 == 0)
    boxes = (TileItems(replace(fastest, box_tokens=tokens), True) for tokens in (16, 8))
    return next((launch for launch in boxes if launch.violation(call, gpu) is None), None)


def _candidates(layer: Call, gpu: Gpu) -> Iterator[TrainingTile]:
    """Yield the launches to compare for experts. With many sums, registers hold the fragments of only two steps."""
    weighted, must_permute = layer.mask_weights_dtype is not None, not has_x_in_rows(layer)
    for one in launches(layer.n_masks, layer.weight.bits, weighted, must_permute, gpu.shared_bytes_per_sm):
        sums = sums_of(one, layer)
        if one.rows <= layer.out_features and sums <= _MOST_SUMS_OF_EXPERTS:
            yield replace(one, steps=min(one.steps, 2)) if sums > MOST_SUMS else one


@cache
def launches(
    n_masks: int, weight_bits: int, weighted: bool, must_permute: bool, shared_bytes_per_sm: int
) -> tuple[TrainingTile, ...]:
    """All launches for which a thread has enough registers, and shared memory holds at least three stages."""
    dense = (
        TrainingTile(**vars(shape), weighted=weighted) for shape in shapes(n_masks, must_permute) if not shape.sparse
    )
    found = (filled(tile, n_masks, weight_bits, shared_bytes_per_sm, least_stages=3) for tile in dense)
    return tuple(config for config in found if isinstance(config, TrainingTile) and config.stages >= 3)
