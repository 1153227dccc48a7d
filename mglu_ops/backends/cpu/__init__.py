"""MGLU on CPUs: the kernels of `csrc/cpu`, built by a C++ compiler on first use and run on torch's threads.

For a few tokens the kernels read each weight once. For more tokens they unpack masked weights into the caches, and read
them from the caches in products. Nothing is built or loaded before the first call that needs it. The same inputs give
the same bits in every call, with any number of threads. `backward` runs the backward pass in bfloat16 on CPUs that
multiply bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from ...activations import ACTIVATIONS
from ...expert_calls import ExpertCall
from ...formats import get_format
from ...layer_call import LayerArguments, LayerCall
from ...masks import packed_shape, packed_width
from .. import expert_loop
from ..base import (
    Backend,
    PreparedBackward,
    PreparedCall,
    PreparedExperts,
    PreparedForwardTrain,
    PreparedGroupedBackward,
    PreparedGroupedForwardTrain,
)
from . import backward
from .build import BuildError
from .experts_down import CpuDown
from .library import (
    DTYPES,
    ISAS,
    Library,
    is_loaded,
    is_missing,
    load,
    packer,
)

__all__ = ["BuildError", "Cpu", "is_loaded", "is_missing", "isa"]

_MASK_SOURCES = {torch.bool: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def isa(dtype: torch.dtype, tokens: int, n_masks: int, weight_format: str = "dense") -> str | None:
    """Return the instruction set that a call runs with: `amx`, `avx512_bf16`, `avx512`, `avx2` or `portable`.

    Returns None if the kernels could not be built.
    """
    library = load()
    return library.isa(dtype, tokens, n_masks, get_format(weight_format)) if isinstance(library, Library) else None


class Cpu(Backend):
    """The backend of `csrc/cpu`. `unsupported_reason` and `prepare` build the kernels if they are missing."""

    name: ClassVar[str] = "cpu"

    def unsupported_reason(self, call: LayerCall) -> str | None:
        if call.device.type != "cpu":
            return f"x is on {call.device}, not on a CPU"
        if call.dtype not in DTYPES:
            return f"no kernel for x {call.dtype}"
        if call.mask_weights_dtype is not None and call.mask_weights_dtype not in DTYPES:
            return f"no kernel for mask_weights {call.mask_weights_dtype}"
        if call.activation not in ACTIVATIONS:
            return f"no kernel for activation {call.activation!r}"
        library = load()
        return library if isinstance(library, str) else None

    def prepare(self, call: LayerCall, launch: str | None = None) -> PreparedCall:
        """Prepare a supported call; `launch` forces an instruction set of `ISAS`.

        If n_masks is 0, as in `experts_down`, the result is `x W^T` in float32.

        Raises:
            BuildError: the kernels could not be built.
        """
        return CpuCall(_library(), call, launch)

    def can_train_forward(self, call: LayerCall) -> bool:
        return call.in_features > 0 and self.supports(call)

    def prepare_forward_train(self, call: LayerCall, launch: str | None = None) -> PreparedForwardTrain:
        """Prepare a supported call with in_features > 0; `launch` as in `prepare`."""
        return CpuForwardTrain(_library(), call, launch)

    def can_pack(self, masks: Tensor) -> bool:
        return masks.is_cpu and masks.dtype in _MASK_SOURCES and isinstance(load(), Library)

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
        _library().pack(pack({"masks": masks.data_ptr(), "packed_masks": packed.data_ptr()}))
        return packed

    def can_train_backward(self, call: LayerCall) -> bool:
        return backward.can_run(call)

    def prepare_backward(self, call: LayerCall) -> PreparedBackward:
        """Prepare a supported backward pass. Raises what `prepare` raises."""
        return backward.Backward(call, _library())

    def unsupported_experts_reason(self, call: ExpertCall) -> str | None:
        return self.unsupported_reason(call.layer)

    def prepare_experts(self, call: ExpertCall, launch: str | None = None) -> PreparedExperts:
        """Prepare a supported call; `launch` and errors as in `prepare`."""
        prepare = partial(self.prepare, launch=launch)
        return partial(expert_loop.forward, expert_loop.layers(prepare, call), call)

    def prepare_down(self, call: ExpertCall, launch: str | None = None) -> CpuDown:
        """Prepare a supported call of `mglu::experts_down`; `launch` and errors as in `prepare`."""
        return CpuDown(call, partial(self.prepare, launch=launch))

    def can_train_experts_forward(self, call: ExpertCall) -> bool:
        return self.can_train_forward(call.layer)

    def can_train_experts_backward(self, call: ExpertCall) -> bool:
        return self.can_train_backward(call.layer)

    def prepare_grouped_forward_train(self, call: ExpertCall) -> PreparedGroupedForwardTrain:
        return partial(expert_loop.forward_train, expert_loop.layers(self.prepare_forward_train, call), call)

    def prepare_grouped_backward(self, call: ExpertCall) -> PreparedGroupedBackward:
        return partial(expert_loop.backward, expert_loop.layers(self.prepare_backward, call))


def _library() -> Library:
    library = load()
    if isinstance(library, str):
        raise BuildError(library)
    return library


def _has_contiguous_rows(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if each row of a tensor is contiguous. `strides` has all dimensions, `sizes` all but the first, the rows."""
    expected = 1
    for size, stride in zip(reversed(sizes), reversed(strides[1:]), strict=True):
        if size != 1 and stride != expected:
            return 0 in sizes
        expected *= size
    return True


class _Call:
    """A prepared call of the kernels. Thread-safe.

    A call first copies x, weight and packed masks if their rows are not contiguous. Most of the time goes into reading
    these tensors, and strides within a row would make each load inefficient.
    """

    def __init__(self, library: Library, call: LayerCall, launch: str | None) -> None:
        """Prepare a call; `launch` forces an instruction set of `ISAS`."""
        in_features, n_masks, width = call.in_features, call.n_masks, packed_width(call.in_features)
        layout, stored_columns = call.weight.layout, in_features // call.weight.format.packed
        layouts = {
            "x": (call.tokens, (in_features,), call.x.strides),
            "weight": (call.out_features, (stored_columns,), layout.strides),
            "packed_masks": (call.out_features, (width, n_masks), call.masks.strides),
        }
        self._copied = {
            name
            for name, (rows, sizes, strides) in layouts.items()
            if rows and not _has_contiguous_rows(sizes, strides)
        }
        self._library = library
        self._shape = call.result_shape
        self._pack = packer(
            "Forward",
            {
                "tokens": call.tokens,
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

    def _run(self, given: LayerArguments, out: Tensor, partials: int) -> None:
        """Write the result, and the partial derivatives if `partials`, their address, is not 0."""
        if self._copied:
            given = given._replace(**{name: getattr(given, name).contiguous() for name in self._copied})
        self._library.forward(self._pack(given.addresses(out) | {"partials": partials}))


class CpuCall(_Call):
    """A prepared call of `mglu::forward`, or of the product `x W^T` in float32."""

    def __init__(self, library: Library, call: LayerCall, launch: str | None) -> None:
        super().__init__(library, call, launch)
        self._out_dtype = call.dtype if call.n_masks else torch.float32

    def __call__(self, given: LayerArguments) -> Tensor:
        out = given.x.new_empty(self._shape, dtype=self._out_dtype)
        self._run(given, out, 0)
        return out


class CpuForwardTrain(_Call):
    """A prepared call of `mglu::forward_train`."""

    def __init__(self, library: Library, call: LayerCall, launch: str | None) -> None:
        super().__init__(library, call, launch)
        entries = call.n_masks + 1 if call.mask_weights_dtype is None else 2 * call.n_masks + 1
        self._partials_shape = (*self._shape[:-1], entries, self._shape[-1])

    def __call__(self, given: LayerArguments) -> tuple[Tensor, Tensor]:
        out, partials = given.x.new_empty(self._shape), given.x.new_empty(self._partials_shape)
        self._run(given, out, partials.data_ptr())
        return out, partials
