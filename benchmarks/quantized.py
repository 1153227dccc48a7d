"""SwiGLU with weights in 8 and 4 bits, in the ways that plain torch offers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import OPTIONS, swiglu
from benchmarks.harness import Variant
from benchmarks.layers import Layers
from mglu_ops.formats import FORMATS, WeightFormat
from mglu_ops.nn import GLU

Weights = tuple[Tensor, ...]
"""The weights and scales of one layer."""


def decoded_swiglu(
    format: WeightFormat, x: Tensor, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor
) -> Tensor:
    """SwiGLU that decodes each weight just before its product. torch.compile fuses the decoding."""
    gate, up = format.dequantize(gate, gate_scale, x.dtype), format.dequantize(up, up_scale, x.dtype)
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def row_scaled(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A product with a weight that has one scale per row."""
    return F.linear(x, weight.to(x.dtype)) * scale.to(x.dtype)


def row_scaled_swiglu(x: Tensor, gate: Tensor, gate_scale: Tensor, up: Tensor, up_scale: Tensor) -> Tensor:
    """SwiGLU with one scale per row. The scales multiply the products instead of the weights."""
    return F.silu(row_scaled(x, gate, gate_scale)) * row_scaled(x, up, up_scale)


def in_fp8_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round x to float8_e4m3fn. Return the rounded x and one scale per token, `[tokens, 1]`."""
    scale = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (x / scale).to(torch.float8_e4m3fn), scale


def scaled_mm(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A product with torch._scaled_mm and x in fp8."""
    stored, x_scale = in_fp8_tokens(x)
    return torch._scaled_mm(stored, weight.t(), x_scale, scale[None], out_dtype=x.dtype, use_fast_accum=True)


def scaled_mm_swiglu(x: Tensor, both: Tensor, scale: Tensor) -> Tensor:
    """SwiGLU with torch._scaled_mm, x in fp8, and one weight `[2 d, h]`."""
    gate, up = scaled_mm(x, both, scale).chunk(2, -1)
    return F.silu(gate) * up


def int4_swiglu(x: Tensor, both: Tensor, scales: Tensor) -> Tensor:
    """SwiGLU with torch's kernel for int4, and one weight `[2 d, h]`."""
    gate, up = torch._weight_int4pack_mm(x, both, 128, scales).chunk(2, -1)
    return F.silu(gate) * up


def int4_packed(weight: Tensor, scale: Tensor) -> Weights:
    """Convert the weight and scales of `int4_group` to the layout of torch's kernel for int4."""
    swapped = (weight << 4) | (weight >> 4)  # torch stores even columns in the upper four bits
    zeros = torch.zeros_like(scale)  # `int4_group` and torch store w + 8; torch also adds a zero point
    return torch._convert_weight_to_int4pack(swapped, 8), torch.stack((scale, zeros), -1).transpose(0, 1).contiguous()


def quantized_swiglu_variants(layers: Layers) -> list[Variant]:
    """SwiGLU in the layers' format. A SwiGLU layer takes the weights of two MGLU layers."""
    format, weights, scales = layers.format, layers.weights, layers.scales
    found: list[Variant] = []
    pairs: list[Weights] = [
        (weights[i], scales[i], weights[i + 1], scales[i + 1]) for i in range(0, len(weights) - 1, 2)
    ]
    stacks = [(torch.cat((one[0], one[2])), torch.cat((one[1], one[3]))) for one in pairs]

    def oracle_of_fp8_x(i: int) -> Tensor:
        x, scale = in_fp8_tokens(layers.x)
        return swiglu(x.double() * scale.double(), *(layers.weight(j, torch.float64) for j in (2 * i, 2 * i + 1)))

    def add(
        name: str,
        form: Callable[..., Tensor],
        tensors: Sequence[Weights],
        oracle: Callable[[int], Tensor] = layers.swiglu_oracle,
    ) -> None:
        compiled = torch.compile(form, fullgraph=True, dynamic=False, options=OPTIONS["coordinate descent"])
        found.append(Variant(f"SwiGLU {name}", lambda i: compiled(layers.x, *tensors[i]), len(tensors), oracle))

    add("decoded, coordinate descent", partial(decoded_swiglu, format), pairs)
    if format.columns is None:
        add("scaled, coordinate descent", row_scaled_swiglu, pairs)
    if format.name == "fp8_row":
        add("torch._scaled_mm, compiled", scaled_mm_swiglu, stacks, oracle_of_fp8_x)
    if format.name == "int4_group" and layers.x.dtype is torch.bfloat16:
        add("int4pack_mm, compiled", int4_swiglu, [int4_packed(*one) for one in stacks])
    return found


class Fp8Linear(nn.Module):
    """A linear layer without bias whose weight is in fp8 with one scale per row.

    It runs in the fastest way that plain torch has for inference. One token is multiplied by the decoded weight, and
    torch.compile fuses the decoding. Several tokens are rounded to fp8, unless they are in float64.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        stored, scale = FORMATS["fp8_row"].quantize(weight.detach())
        assert scale is not None
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        product = row_scaled if x.shape[0] == 1 or x.dtype is torch.float64 else scaled_mm
        return product(x, self.weight, self.scale)


class Fp8GLU(nn.Module):
    """SwiGLU with both weights in one `Fp8Linear`. For one token it makes two products, because this is faster."""

    def __init__(self, glu: GLU) -> None:
        super().__init__()
        assert glu.gate_proj is not None
        self.both = Fp8Linear(torch.cat((glu.gate_proj.weight, glu.up_proj.weight)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            gate, up = self.both(x).chunk(2, -1)
            return F.silu(gate) * up
        (gate, up), (gate_scale, up_scale) = self.both.weight.chunk(2), self.both.scale.chunk(2)
        return row_scaled_swiglu(x, gate, gate_scale, up, up_scale)


def store_in_fp8(model: nn.Module) -> None:
    """Replace all linear layers and `GLU`s in a module by `Fp8Linear` and `Fp8GLU`."""
    for name, child in model.named_children():
        if isinstance(child, GLU):
            setattr(model, name, Fp8GLU(child))
        elif isinstance(child, nn.Linear):
            setattr(model, name, Fp8Linear(child.weight))
        else:
            store_in_fp8(child)
