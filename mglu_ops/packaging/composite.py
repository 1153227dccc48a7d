"""`mglu::forward` in torch operators, which Inductor compiles into a package with `backend="composite"`.

It computes what the backend `composite` computes, but writes nothing in place and reads no mask on the host. Inductor
generates one kernel for each masked copy of the weight, and one that computes the result from the products. Without
Inductor, it is slower than the backend.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ..activations import get_activation
from ..backends.formula import matmul, operand_dtype
from ..formats import FORMATS, round_activation
from ..given import Given, as_rows
from ..masks import n_masks_of


def forward(given: Given) -> Tensor:
    """Compute `mglu::forward`. The result is `[..., out_features]` in x's dtype."""
    x, weight, packed_masks, activation, mask_weights, weight_scale, weight_format, activation_format, *_ = given
    if activation_format != "dense":
        x = round_activation(x)
    if weight_scale is not None:
        weight = FORMATS[weight_format].dequantize(weight, weight_scale, operand_dtype(x))
    act = get_activation(activation).forward
    terms = [act(gate) * value for gate, value in _gates_and_values(as_rows(x), weight, packed_masks)]
    if mask_weights is not None:
        terms = [term * as_rows(mask_weights)[:, i : i + 1] for i, term in enumerate(terms)]
    return sum(terms[1:], terms[0]).to(x.dtype).reshape(*x.shape[:-1], weight.shape[0])


def _gates_and_values(x: Tensor, weight: Tensor, packed_masks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the gate and the value `[tokens, out_features]` of each mask, in the dtype of the sums."""
    both_products = n_masks_of(packed_masks) == 1 or x.dtype is torch.float32
    dtype = operand_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    half_total = None if both_products else matmul(x, weight.t()) * 0.5
    for i in range(n_masks_of(packed_masks)):
        mask = _mask(packed_masks, i, weight.shape[1])
        if half_total is None:
            masked = torch.where(mask, weight, 0)
            yield matmul(x, masked.t()), matmul(x, (weight - masked).t())
        else:
            half_flipped = matmul(x, torch.where(mask, -weight, weight).t()) * 0.5
            yield half_total - half_flipped, half_total + half_flipped


def _mask(packed_masks: Tensor, index: int, in_features: int) -> Tensor:
    """Return mask `index` as bool `[out_features, in_features]`. Inductor computes it in the kernel that reads it."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed_masks.device)
    bits = (packed_masks[:, :, index].unsqueeze(-1) >> shifts) & 1
    return bits.reshape(packed_masks.shape[0], packed_masks.shape[1] * 8)[:, :in_features] != 0
