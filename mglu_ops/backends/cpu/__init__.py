"""MGLU on CPUs: kernels of `csrc/cpu`, built by a C++ compiler where they first run, on torch's own threads.

Each weight is read once for a handful of tokens; for more, masked weights are unpacked into the caches and multiplied
there. Nothing is built or loaded before the first call that needs it. The same inputs give the same bits on every call
and with any number of threads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...masks import packed_width
from .build import BuildError
from .library import DTYPES, ISAS, Library, load, pack_constants, pack_packing_call, pack_pointers

__all__ = ["BuildError", "Call", "can_pack", "forward", "isa", "pack", "plan_call", "unsupported_reason"]

_ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3, "sigmoid": 4, "tanh": 5, "identity": 6}


def isa(dtype: torch.dtype, tokens: int, n_masks: int) -> str | None:
    """The instruction set that a call runs with (`amx`, `avx512_bf16`, `avx512`, `avx2`, `portable`), or None where
    nothing could be built.
    """
    library = load()
    return library.isa(dtype, tokens, n_masks) if isinstance(library, Library) else None


_MASK_SOURCES = {torch.bool: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3}


def can_pack(masks: Tensor) -> bool:
    """Whether `pack` takes bool masks or logits. Builds the kernels if they are missing."""
    return masks.is_cpu and masks.dtype in _MASK_SOURCES and isinstance(load(), Library)


def pack(masks: Tensor) -> Tensor:
    """The packed masks of bool masks, or of logits by `M = logits > 0`, in any strides.

    Args:
        masks: `[n_masks, out_features, in_features]`, bool, float16, bfloat16 or float32.

    Raises:
        BuildError: the kernels could not be built.
    """
    library = load()
    if isinstance(library, str):
        raise BuildError(library)
    n_masks, out_features, in_features = masks.shape
    packed = masks.new_empty((out_features, packed_width(in_features), n_masks), dtype=torch.uint8)
    size = masks.element_size()
    library.pack(
        pack_packing_call(
            masks.data_ptr(), packed.data_ptr(), n_masks, out_features, in_features,
            *(stride * size for stride in masks.stride()), _MASK_SOURCES[masks.dtype],
        )
    )  # fmt: skip
    return packed


def unsupported_reason(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> str | None:
    """Why `forward` cannot take a call, or None if it can. Reads no value; builds the kernels if they are missing."""
    if x.device.type != "cpu":
        return f"x is on {x.device}, not on a CPU"
    if x.dtype not in DTYPES or weight.dtype != x.dtype:
        return f"no kernel for x {x.dtype} and weight {weight.dtype}"
    if activation not in _ACTIVATIONS:
        return f"no kernel for activation {activation!r}"
    if not 1 <= packed_masks.shape[2] <= 16:
        return f"n_masks is {packed_masks.shape[2]}, outside 1 to 16"
    if route_weights is not None and route_weights.dtype not in DTYPES:
        return f"no kernel for route_weights {route_weights.dtype}"
    library = load()
    return library if isinstance(library, str) else None


def forward(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    *,
    isa: str = "best",
) -> Tensor:
    """`sum_i route_i * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T)` for any number of tokens.

    Args:
        x: `[tokens, in_features]`, float16, bfloat16 or float32, any strides.
        weight: `[out_features, in_features]`, the dtype of x, any strides.
        packed_masks: uint8 `[out_features, ceil(in_features / 8), n_masks]`, any strides.
        activation: a name of `mglu_ops.activations.ACTIVATIONS`.
        route_weights: `[tokens, n_masks]` in float16, bfloat16 or float32, or None.
        isa: the instruction set to insist on, for tests and tuning.

    Returns:
        `[tokens, out_features]` in x's dtype.

    Raises:
        BuildError: the kernels could not be built.
        RuntimeError: the machine lacks the instruction set, or the memory for scratch space.
    """
    # A copy where a row is not contiguous: reading x and W is most of the work, and a stride would spoil each load.
    x, weight, packed_masks = (t if _is_in_rows(t) else t.contiguous() for t in (x, weight, packed_masks))
    call = plan_call(x, weight, packed_masks, activation, route_weights, isa=isa)
    assert call is not None
    return call(x, weight, packed_masks, route_weights)


def _is_in_rows(tensor: Tensor) -> bool:
    """Whether what follows the first dimension lies in one piece, row by row; so does nothing."""
    expected = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != expected:
            return tensor.numel() == 0
        expected *= size
    return True


class Call:
    """A call with all settled but its tensors, which may be any of the same metadata. Thread-safe.

    Attributes:
        shape: of the result.
    """

    __slots__ = ("_constants", "_library", "shape")

    def __init__(self, library: Library, constants: bytes, shape: tuple[int, ...]) -> None:
        self.shape = shape
        self._library = library
        self._constants = constants

    def with_shape(self, shape: tuple[int, ...]) -> Call:
        """The same with a result of another shape."""
        return Call(self._library, self._constants, shape)

    def __call__(self, x: Tensor, weight: Tensor, packed_masks: Tensor, route_weights: Tensor | None) -> Tensor:
        out = x.new_empty(self.shape)
        route = 0 if route_weights is None else route_weights.data_ptr()
        pointers = pack_pointers(x.data_ptr(), weight.data_ptr(), packed_masks.data_ptr(), route, out.data_ptr())
        self._library.forward(pointers + self._constants)
        return out


def plan_call(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    *,
    isa: str = "best",
) -> Call | None:
    """What runs such a call; arguments and errors as of `forward`. None where something has to be copied before."""
    library = load()
    if isinstance(library, str):
        raise BuildError(library)
    if not (_is_in_rows(x) and _is_in_rows(weight) and _is_in_rows(packed_masks)):
        return None
    tokens, in_features = x.shape
    out_features, _, n_masks = packed_masks.shape
    route: tuple[int, ...] = (0, 0)
    route_dtype = 0
    if route_weights is not None:
        route, route_dtype = route_weights.stride(), DTYPES[route_weights.dtype]
    constants = pack_constants(
        tokens, out_features, in_features, n_masks,
        x.stride(0), weight.stride(0), packed_masks.stride(0), *route, out_features,
        DTYPES[x.dtype], route_dtype, _ACTIVATIONS[activation], ISAS[isa],
    )  # fmt: skip
    return Call(library, constants, (tokens, out_features))
