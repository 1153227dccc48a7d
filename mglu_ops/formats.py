"""The formats in which the weight of a layer is stored. `csrc/cuda/weight_formats.cuh` lists the same formats for C++.

With d = out_features and h = in_features:

| format | weight | weight_scale | bits a weight |
|---|---|---|---|
| `dense` | x's dtype `[d, h]` | None | as x's dtype |
| `fp8_row` | float8_e4m3fn `[d, h]` | float32 `[d]` | 8 |
| `fp8_block` | float8_e4m3fn `[d, h]` | float32 `[ceil(d / 128), ceil(h / 128)]` | 8 |
| `int8_row` | int8 `[d, h]` | float32 `[d]` | 8 |
| `int4_group` | uint8 `[d, h / 2]` | bfloat16 `[d, ceil(h / 128)]` | 4.125 |

A weight is its stored number times the scale of its row, of its 128 x 128 block, or of its group of 128 columns. In
`int4_group`, a byte holds the numbers of two neighbouring columns, with 8 added to each. The number of the even column
is in the low four bits of the byte, and the number of the odd column in the high four bits.

A mask selects whole elements of W, so it is the same in every format. The kernels decode W once for all masks.

In inference, x can be rounded to 8 bits as well. `activation_format` names its format:

| format | x that is multiplied | scale | weight formats |
|---|---|---|---|
| `dense` | x itself | None | every format |
| `fp8_token` | float8_e4m3fn `[..., h]` | float32, one per token, a power of two | `fp8_row`, `fp8_block` |
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from .sizes import ceil_div
from .tensors import is_readable

_BLOCK = 128


@dataclass(frozen=True)
class WeightFormat:
    """A format of stored weights.

    Attributes:
        name: the value of the operators' argument `weight_format`.
        code: the value of the format in `csrc/cuda/weight_formats.cuh`.
        dtype: the dtype of the stored weight; None for x's dtype.
        scale_dtype: the dtype of the scales; None without scales.
        rows: the number of rows that share a scale.
        columns: the number of columns that share a scale; None for a whole row.
        largest: the largest stored number. `quantize` maps the largest of the weights with one scale to this number.
        packed: the number of neighbouring weights in one element of the stored weight.
    """

    name: str
    code: int
    dtype: torch.dtype | None = None
    scale_dtype: torch.dtype | None = None
    rows: int = 1
    columns: int | None = None
    largest: float = 1.0
    packed: int = 1

    @property
    def is_dense(self) -> bool:
        """True if the weight is stored in x's dtype, without scales."""
        return self.dtype is None

    def scale_shape(self, out_features: int, in_features: int) -> tuple[int, ...]:
        """The shape of the scales of a weight `[out_features, in_features]`."""
        rows = ceil_div(out_features, self.rows)
        return (rows,) if self.columns is None else (rows, ceil_div(in_features, self.columns))

    def quantize(self, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Round a weight to the nearest stored numbers.

        Args:
            weight: floating `[out_features, in_features]`; `int4_group` needs an even in_features.

        Returns:
            The stored weight, and its scales; None for `dense`.
        """
        if self.dtype is None or self.scale_dtype is None:
            return weight, None
        wide = weight.to(torch.float32)
        scale = self._largest_weights(wide).clamp_min(torch.finfo(torch.float32).tiny * self.largest) / self.largest
        scale = scale.to(self.scale_dtype)
        stored = (wide / self.of_weights(scale.float(), *weight.shape)).clamp(-self.largest, self.largest)
        if not self.dtype.is_floating_point:
            stored = stored.round()
        return self.pack(stored), scale

    def pack(self, numbers: Tensor) -> Tensor:
        """Store numbers `[out_features, in_features]` that the format can represent, without scales."""
        if self.packed == 2:
            numbers = numbers + 8
            numbers = numbers[:, ::2] + 16 * numbers[:, 1::2]
        return numbers if self.dtype is None else numbers.to(self.dtype)

    def dequantize(self, weight: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Decode a stored weight and its scales to `[..., out_features, in_features]`, rounded to `dtype`."""
        if scale is None:
            return weight.to(dtype)
        if self.packed == 2:
            # `// 16`, because `>> 4` returns its argument unchanged for a DTensor in torch 2.13.
            weight = torch.stack((weight & 15, weight // 16), -1).flatten(-2).to(torch.int8) - 8
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        return (weight.to(wide) * self.of_weights(scale.to(wide), *weight.shape[-2:])).to(dtype)

    def _largest_weights(self, weight: Tensor) -> Tensor:
        """The largest absolute value of the weights that share each scale, in the shape of the scales."""
        if self.columns is None:
            return weight.abs().amax(1) if weight.shape[1] else weight.new_zeros(weight.shape[0])
        (rows, columns), shape = weight.shape, self.scale_shape(*weight.shape)
        padding = (0, shape[1] * self.columns - columns, 0, shape[0] * self.rows - rows)
        return F.pad(weight.abs(), padding).view(shape[0], self.rows, shape[1], self.columns).amax((1, 3))

    def of_weights(self, scale: Tensor, out_features: int, in_features: int) -> Tensor:
        """Expand the scales so that they broadcast to the weights."""
        if self.columns is None:
            return scale[..., None]
        repeated = scale.repeat_interleave(self.rows, -2)[..., :out_features, :]
        return repeated.repeat_interleave(self.columns, -1)[..., :in_features]


_FP8, _FP8_LARGEST = torch.float8_e4m3fn, torch.finfo(torch.float8_e4m3fn).max

FORMATS = {
    one.name: one
    for one in (
        WeightFormat("dense", 0),
        WeightFormat("fp8_row", 1, _FP8, torch.float32, largest=_FP8_LARGEST),
        WeightFormat("fp8_block", 2, _FP8, torch.float32, _BLOCK, _BLOCK, _FP8_LARGEST),
        WeightFormat("int8_row", 3, torch.int8, torch.float32, largest=127),
        WeightFormat("int4_group", 4, torch.uint8, torch.bfloat16, 1, _BLOCK, 7, packed=2),
    )
}
"""The formats by their names."""


def get_format(name: str) -> WeightFormat:
    """The format called `name`.

    Raises:
        ValueError: there is no such format.
    """
    if not isinstance(name, str) or name not in FORMATS:
        raise ValueError(f"weight_format: got {name!r}, must be one of {', '.join(FORMATS)}")
    return FORMATS[name]


def check_scale(scale: Tensor, name: str) -> None:
    """Check that the scales of a stored weight are finite and above 0, as `WeightFormat.quantize` writes them.

    This synchronises with a GPU, so call it where weights are loaded. Scales whose values cannot be read, such as meta
    tensors, pass.

    Args:
        scale: the scales. Each rank checks its own shard of a DTensor.
        name: the name of the scales in the message.

    Raises:
        ValueError: a scale is NaN, infinite, negative or 0.
    """
    if scale.is_meta or not is_readable(scale):
        return
    own: Tensor = getattr(scale, "to_local", lambda: scale)()
    wrong = ~((own > 0) & (own < math.inf))
    if bool(wrong.any()):
        raise ValueError(
            f"{name}: got {own[wrong][0].item()} among {scale.numel()} scales, must be finite and above 0; the "
            "tensor is damaged, or the weight had values that are not finite when it was quantized"
        )


# --- Activations ------------------------------------------------------------------------------------------------------

ACTIVATION_FORMATS: Mapping[str, tuple[str, ...]] = {
    "dense": tuple(FORMATS),
    "fp8_token": ("fp8_row", "fp8_block"),
}
"""The activation formats by name, each with the weight formats that allow it."""


def check_activation_format(name: str, weight_format: str) -> None:
    """Check that `name` is an activation format, and that weights in `weight_format` allow it.

    Raises:
        ValueError: there is no such activation format, or the weight format does not allow it.
    """
    if not isinstance(name, str) or name not in ACTIVATION_FORMATS:
        raise ValueError(f"activation_format: got {name!r}, must be one of {', '.join(ACTIVATION_FORMATS)}")
    if weight_format not in ACTIVATION_FORMATS[name]:
        allowed = ", ".join(one for one, formats in ACTIVATION_FORMATS.items() if weight_format in formats)
        raise ValueError(f"activation_format: got {name!r}, must be {allowed} for weight_format={weight_format!r}")


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to the activation format `fp8_token`.

    The scale s of a token is the smallest power of two with `max |x| <= 448 s`, but at least 2^-126. It is 1 for a
    token of zeros. Each x / s is rounded to the nearest float8_e4m3fn number, ties to even. If a token holds NaN or an
    infinity, its scale and all its numbers are NaN.

    Args:
        x: float16, bfloat16 or float32 `[..., in_features]`.

    Returns:
        float8_e4m3fn `[..., in_features]`, and the scales, float32 `[..., 1]`.
    """
    if not x.shape[-1]:
        return x.to(_FP8), torch.ones((*x.shape[:-1], 1), dtype=torch.float32, device=x.device)
    amax = torch.linalg.vector_norm(x, math.inf, -1, keepdim=True, dtype=torch.float32)
    # Let amax / 256 = 2^e (1 + f). As 448 s = 1.75 * 256 s, the scale s is 2^(e + 1) if f > 0.75, and 2^e otherwise.
    # Adding 0.25 minus one ulp to the fraction f carries into the exponent exactly if f > 0.75.
    least = (amax.masked_fill(amax == 0, 256) / 256).clamp_min(torch.finfo(torch.float32).tiny)
    scale = ((least.view(torch.int32) + 0x1FFFFF) & ~0x7FFFFF).view(torch.float32)
    scale = scale.masked_fill(~(amax < math.inf), math.nan)
    return (x / scale).to(_FP8), scale


def round_activation(x: Tensor) -> Tensor:
    """Round x to `fp8_token` (`quantize_activation`), and return it in its own dtype.

    x's dtype holds the rounded values exactly, except that values above its largest finite number become this number.
    """
    stored, scale = quantize_activation(x)
    largest = torch.finfo(x.dtype).max
    return (stored.to(torch.float32) * scale).clamp(-largest, largest).to(x.dtype)
