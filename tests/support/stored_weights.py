"""Layers whose weight is stored in another format than x's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from mglu_ops.backends import reference
from mglu_ops.formats import FORMATS
from mglu_ops.layer_call import LayerArguments
from mglu_ops.masks import pack


def stored_layer(
    weight_format: str, dtype: torch.dtype, tokens: int, d: int, h: int, n_masks: int, device: str = "cpu"
) -> tuple[LayerArguments, Tensor]:
    """The arguments of a random layer with mask weights, and its result in float64 from the dequantised weight."""
    generator = torch.Generator().manual_seed(tokens + d)
    chosen = FORMATS[weight_format]
    x = torch.randn(tokens, h, generator=generator).to(dtype)
    stored, scale = chosen.quantize(torch.randn(d, h, generator=generator) / h**0.5)
    masks = torch.rand(n_masks, d, h, generator=generator) < 0.5
    weights = torch.rand(tokens, n_masks, generator=generator)
    exact = chosen.dequantize(stored, scale, torch.float64)
    tensors = (None if tensor is None else tensor.to(device) for tensor in (x, stored, pack(masks), weights, scale))
    x_there, stored, packed, weights_there, scale = tensors
    given = LayerArguments(x_there, stored, packed, "silu", weights_there, scale, weight_format)  # type: ignore[arg-type]
    return given, reference.forward(x, exact, masks, "silu", weights)


def every_stored_value(weight_format: str, device: str = "cpu") -> tuple[LayerArguments, Tensor]:
    """A layer with each number that a format can store as the gate of a row with scale 3, and the result of a token."""
    chosen = FORMATS[weight_format]
    octets = torch.arange(256, dtype=torch.uint8)
    if chosen.packed == 2:  # the second weight of each row is 1, or 9 with the 8 that is added
        stored, numbers = (octets[:16] | 9 << 4)[:, None], octets[:16].float() - 8
    else:
        assert chosen.dtype is not None
        column = octets.view(chosen.dtype)
        stored, numbers = torch.stack((column, torch.ones(256).to(chosen.dtype)), 1), column.float()
    scale = torch.full(chosen.scale_shape(len(numbers), 2), 3.0, dtype=chosen.scale_dtype)
    packed = pack(torch.tensor([[[True, False]]]).expand(1, len(numbers), 2))
    x, stored, packed, scale = (tensor.to(device) for tensor in (torch.ones(1, 2), stored, packed, scale))
    return LayerArguments(x, stored, packed, "identity", None, scale, weight_format), (9 * numbers).to(device)
