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
