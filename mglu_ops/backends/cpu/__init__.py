"""MGLU on CPUs: the kernels of `csrc/cpu`, built by a C++ compiler on first use and run on torch's threads.

For a few tokens the kernels read each weight once. For more tokens they write masked weights into the caches, from
which several products read them. Nothing is built or loaded before the first call that needs it. The same inputs give
the same bits in every call, with any number of threads. `backward` runs the backward pass in bfloat16 on CPUs that
multiply bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ...activations import ACTIVATIONS
from ...call import Call, Routing
from ...formats import get_format
from ...given import Given
from ...masks import packed_shape, packed_width
from .. import expert_loop
from ..base import NO_DOWN_GRADIENTS, Backend, Description, Prepared, Reason, Task, no_kernel
from . import backward, experts_down
from .build import BuildError
from .library import DTYPES, ISAS, Library, is_loaded, is_missing, load, packer

__all__ = ["BuildError", "Cpu", "is_loaded", "is_missing", "isa"]

_MASK_SOURCES = {torch.bool: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def isa(dtype: torch.dtype, tokens: int, n_masks: int, weight_format: str = "dense") -> str | None:
    """Return the instruction set that a call runs with: `amx`, `avx512_bf16`, `avx512`, `avx2` or `portable`.

    Returns None if the kernels could not be built.
    """
    library = load()
    return library.isa(dtype, tokens, n_masks, get_format(weight_format)) if isinstance(library, Library) else None


_LEAST_PACKED = 1 << 18
"""The least number of mask bits for which packing builds the kernels. Torch packs fewer bits in less than 1 ms."""


class Cpu(Backend):
    """The backend of `csrc/cpu`. `reason` and `prepare` build the kernels if they are missing."""

    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str | None] = "cpu"

    def reason(self, task: Task, call: Call) -> Reason | None:
        if call.device.type != "cpu":
            return Reason(f"x is on {call.device}, not on a CPU")
        if task == "down_backward":
            return NO_DOWN_GRADIENTS
        if call.dtype not in DTYPES:
            return no_kernel(call)
        if task == "backward":
            return backward.reason(call)
        if call.mask_weights_dtype is not None and call.mask_weights_dtype not in DTYPES:
            return Reason(f"no kernel for mask_weights {call.mask_weights_dtype}")
        if task == "train" and not call.in_features:
            return Reason("in_features is 0", is_loss=False)
        library = load()
        return Reason(library, is_passing=True) if isinstance(library, str) else None

    def describe(self, task: Task, call: Call) -> Description:
        if task == "backward":
            return Description("kernels of this package, instruction set avx512_bf16, and the library's products")
        chosen = isa(call.dtype, call.balanced_rows, call.n_masks, call.weight.format.name)
        return Description(f"kernels of this package, instruction set {chosen}")

    def prepare(self, task: Task, call: Call, launch: str | None = None) -> Prepared:
        """Prepare a supported call; `launch` forces an instruction set of `ISAS`.

        If n_masks is 0, as in `experts_down`, the result of `forward` is `x W^T` in float32.

        Raises:
            BuildError: the kernels could not be built.
        """
        if task == "down":
            return partial(experts_down.down, call, expert_loop.layers(self, "forward", call, launch))
        if task == "backward":
            of_experts = call.routing is not None
            return expert_loop.prepare(self, task, call, launch) if of_experts else partial(backward.run, _library())
        prepared = CpuCall(_library(), task, call, launch)
        if call.routing is not None and prepared.copies_weights:
            return expert_loop.prepare(self, task, call, launch)  # which copies the weights of experts that have rows
        return prepared

    def can_pack(self, masks: Tensor) -> bool:
        """True if `pack` takes the masks. It does not take small masks unless the kernels have been built already."""
        is_worth_it = masks.numel() >= _LEAST_PACKED or is_loaded()
        is_known = masks.is_cpu and masks.dim() == 3 and masks.dtype in _MASK_SOURCES
        return is_known and is_worth_it and isinstance(load(), Library)

    def pack(self, masks: Tensor) -> Tensor:
        """Pack bool masks or logits (`M = logits > 0`) in any strides.

        Raises:
            BuildError: the kernels could not be built.
        """
        n_masks, out_features, in_features = masks.shape
        packed = masks.new_empty(packed_shape(n_masks, out_features, in_features), dtype=torch.uint8)
        size = masks.element_size()
        pack = packer(
            "Pack",
            {
                "n_masks": n_masks,
                "out_features": out_features,
                "in_features": in_features,
                "mask_stride": masks.stride(0) * size,
                "row_stride": masks.stride(1) * size,
                "column_stride": masks.stride(2) * size,
                "source": _MASK_SOURCES[masks.dtype],
            },
        )
        _library().run("pack_masks", pack({"masks": masks.data_ptr(), "packed_masks": packed.data_ptr()}))
        return packed


def _library() -> Library:
    library = load()
    if isinstance(library, str):
        raise BuildError(library)
    return library


def _has_contiguous_rows(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if each row of a tensor is contiguous. `strides` begins with the dimension of rows, `sizes` after it."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides[1:]), strict=True):
        if size != 1 and stride != expected:
            return 0 in sizes
        expected *= size
    return True


class CpuCall:
    """A prepared `forward` or `train`, or the product `x W^T` in float32, for a layer or for experts. Thread-safe.

    A call first copies x, weight and packed masks if their rows are not contiguous. Most of the time goes into reading
    these tensors, and strides within a row would make each load inefficient.
    """

    def __init__(self, library: Library, task: Task, call: Call, launch: str | None) -> None:
        """Prepare a task; `launch` forces an instruction set of `ISAS`."""
        in_features, n_masks, width = call.in_features, call.n_masks, packed_width(call.in_features)
        layout, stored_columns = call.weight.layout, in_features // call.weight.format.packed
        layouts = {
            "x": (call.rows_of_x, (in_features,), call.x.strides),
            "weight": (call.out_features, (stored_columns,), layout.strides),
            "packed_masks": (call.out_features, (width, n_masks), call.masks.strides),
        }
        self._copied = {
            name
            for name, (rows, sizes, strides) in layouts.items()
            if rows and not _has_contiguous_rows(sizes, strides)
        }
        self._library = library
        self._shape, self._dtype = call.result_shape, call.dtype if call.n_masks else torch.float32
        self._partials_shape: tuple[int, ...] | None = None
        if task == "train":
            self._partials_shape = (*self._shape[:-1], call.n_partials, self._shape[-1])
        self._pack = packer(
            "Forward",
            {
                "tokens": call.rows_of_x,
                "out_features": call.out_features,
                "in_features": in_features,
                "n_masks": n_masks,
                "x_stride": in_features if "x" in self._copied else call.x.strides[0],
                "weight_stride": stored_columns if "weight" in self._copied else layout.strides[0],
                "mask_stride": width * n_masks if "packed_masks" in self._copied else call.masks.strides[0],
                "mask_weight_stride": call.mask_weights.strides[0],
                "mask_weight_mask_stride": call.mask_weights.strides[1],
                "out_stride": call.out_features,
                "dtype": DTYPES[call.dtype],
                "mask_weights_dtype": 0 if call.mask_weights_dtype is None else DTYPES[call.mask_weights_dtype],
                "weight_format": call.weight.format.code,
                "activation": ACTIVATIONS[call.activation].code,
                "isa": ISAS[launch or "best"],
            },
        )
        self._pack_experts = None if call.routing is None else packer("Experts", _experts(call, call.routing))

    @property
    def copies_weights(self) -> bool:
        """True if a call copies the weight or the packed masks, of all experts if there are experts."""
        return not self._copied.isdisjoint(("weight", "packed_masks"))

    def __call__(self, given: Given) -> Any:
        out = given.x.new_empty(self._shape, dtype=self._dtype)
        partials = None if self._partials_shape is None else given.x.new_empty(self._partials_shape)
        if self._copied:
            given = given._replace(**{name: getattr(given, name).contiguous() for name in self._copied})
        layer = self._pack(given.addresses(out) | {"partials": 0 if partials is None else partials.data_ptr()})
        if self._pack_experts is None:
            self._library.run("forward", layer)
        else:
            assert given.routing is not None
            self._library.run("forward_experts", layer, self._pack_experts({"index": given.routing.data_ptr()}))
        return out if partials is None else (out, partials)


def _experts(call: Call, routing: Routing) -> dict[str, int]:
    """The integers of the struct `Experts`, for weights and masks that are not copied."""
    scale_dtype = call.weight.format.scale_dtype
    return {
        "index_bytes": routing.index_dtype.itemsize,
        "is_sorted": int(routing.is_sorted),
        "experts": routing.experts,
        "rows": call.tokens,
        "top_k": routing.top_k or 1,
        "weight_bytes": routing.weight_stride * call.weight.dtype.itemsize,
        "mask_bytes": routing.masks_stride,
        "scale_bytes": 0 if scale_dtype is None else routing.scale_stride * scale_dtype.itemsize,
    }
