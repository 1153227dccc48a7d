"""Layers with quantized weights."""

from __future__ import annotations

from typing import Any

import torch
from budgets import relative_error
from torch import Tensor, nn

from mglu_ops.backends import reference
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS, quantize_activation
from mglu_ops.given import Given
from mglu_ops.masks import pack, unpack


def forward(*given: Any) -> Tensor:
    """The result of `mglu::forward` for the fields of a `Given`. The fields for experts are left out or None."""
    assert all(routing is None for routing in given[8:])
    return torch.ops.mglu.forward(*given[:8])


def stored_layer(
    weight_format: str,
    dtype: torch.dtype,
    tokens: int,
    d: int,
    h: int,
    n_masks: int,
    device: str = "cpu",
    activation_format: str = "dense",
) -> tuple[Given, Tensor]:
    """The arguments of a random layer with mask weights, and its float64 result from the dequantized x and weight."""
    generator = torch.Generator().manual_seed(tokens + d)
    chosen = FORMATS[weight_format]
    x = torch.randn(tokens, h, generator=generator).to(dtype)
    stored, scale = chosen.quantize(torch.randn(d, h, generator=generator) / h**0.5)
    masks = torch.rand(n_masks, d, h, generator=generator) < 0.5
    weights = torch.rand(tokens, n_masks, generator=generator)
    exact = chosen.dequantize(stored, scale, torch.float64)
    tensors = (None if tensor is None else tensor.to(device) for tensor in (x, stored, pack(masks), weights, scale))
    x_there, stored, packed, weights_there, scale = tensors
    rest = scale, weight_format, activation_format
    given = Given(x_there, stored, packed, "silu", weights_there, *rest)  # type: ignore[arg-type]
    if activation_format != "dense":
        rounded, scales = quantize_activation(x)
        x = rounded.double() * scales.double()
    return given, reference.forward(x, exact, masks, "silu", weights)


def naive_error(given: Given) -> tuple[Tensor, float]:
    """A layer's float64 result, and the relative error of a naive layer that rounds x to fp8 with scale amax / 448."""
    x, scale = given.x.double(), given.weight_scale
    weight = FORMATS[given.weight_format].dequantize(given.weight, scale, torch.float64)
    masks = unpack(given.packed_masks, given.in_features)
    exact = reference.forward(x, weight, masks, given.activation, given.mask_weights)
    scales = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scales).to(torch.float8_e4m3fn).double() * scales
    naive = reference.forward(rounded, weight, masks, given.activation, given.mask_weights)
    return exact, relative_error(naive, exact)


class StoredLayers(nn.Module):
    """The sum of several layers: one for each quantized weight format that an activation format allows."""

    def __init__(self, in_features: int, out_features: int, n_masks: int, activation_format: str = "dense") -> None:
        super().__init__()
        self.activation_format = activation_format
        self.formats = [name for name in ACTIVATION_FORMATS[activation_format] if not FORMATS[name].is_dense]
        for name in self.formats:
            weight, scale = FORMATS[name].quantize(torch.randn(out_features, in_features) / in_features**0.5)
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_masks", pack(torch.rand(n_masks, out_features, in_features) < 0.5))

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for name in self.formats:
            weight, scale, masks = (getattr(self, name + suffix) for suffix in ("", "_scale", "_masks"))
            layer = x, weight, masks, "gelu", None, scale, name, self.activation_format
            results.append(torch.ops.mglu.forward(*layer))
        return torch.stack(results).sum(0)


def every_stored_value(
    weight_format: str, column: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu", h: int = 32
) -> tuple[Given, Tensor]:
    """A layer with one row for each number that a format can store, and its result for one token.

    A row stores its number in `column`, and 1 in the last column, with scale 3. So its gate is 3 times the number, and
    its value is 3.
    """
    chosen = FORMATS[weight_format]
    octets = torch.arange(16 if chosen.packed == 2 else 256, dtype=torch.uint8)
    one = torch.ones((), dtype=chosen.dtype).view(torch.uint8)
    stored = torch.full((len(octets), h), 8 if chosen.packed == 2 else 0, dtype=torch.uint8)
    stored[:, column], stored[:, -1] = octets, 9 if chosen.packed == 2 else one
    if chosen.packed == 2:
        stored, numbers = stored[:, ::2] | stored[:, 1::2] << 4, octets.float() - 8
    else:
        assert chosen.dtype is not None
        stored, numbers = stored.view(chosen.dtype), octets.view(chosen.dtype).float()
    x, masks = torch.zeros(1, h, dtype=dtype), torch.zeros(1, len(octets), h, dtype=torch.bool)
    x[:, [column, -1]], masks[:, :, column] = 1, True
    scale = torch.full(chosen.scale_shape(len(octets), h), 3.0, dtype=chosen.scale_dtype)
    tensors = (tensor.to(device) for tensor in (x, stored, pack(masks), scale))
    x, stored, packed, scale = tensors
    expected = (9 * numbers).to(dtype).to(device)
    return Given(x, stored, packed, "identity", None, scale, weight_format), expected
