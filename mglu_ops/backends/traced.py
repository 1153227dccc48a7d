"""The products of `composite` without writes in place, for a compiler that fuses the operations between them.

Uncompiled, this is slower than `composite`. Compiled (`compile_passes.lowering`), each masked copy of the weight takes
one kernel, and one more computes the results from the products.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ..activations import get_activation
from ..layer_call import as_rows
from ..masks import n_masks_of
from .composite import matmul, operand_dtype, sum_dtype


def _mask(packed_masks: Tensor, index: int, in_features: int) -> Tensor:
    """Mask `index` as bool `[out_features, in_features]`. In a fused kernel it takes no memory."""
    shifts = torch.arange(8, dtype=torch.uint8, device=packed_masks.device)
    bits = (packed_masks[:, :, index].unsqueeze(-1) >> shifts) & 1
    return bits.reshape(packed_masks.shape[0], packed_masks.shape[1] * 8)[:, :in_features] != 0


def _gates_and_values(x: Tensor, weight: Tensor, packed_masks: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the gate and value of each mask in the dtype of the sums, computed as `composite` does."""
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


def forward_train(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str = "silu",
    route_weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`mglu::forward_train`."""
    act = get_activation(activation).forward
    rows = as_rows(x)
    gates, values, terms = [], [], []
    for i, (gate, value) in enumerate(_gates_and_values(rows, weight, packed_masks)):
        gates.append(gate.to(x.dtype))
        values.append(value.to(x.dtype))
        term = act(gate) * value
        terms.append(term if route_weights is None else term * as_rows(route_weights)[:, i : i + 1])
    shape = (*x.shape[:-1], weight.shape[0])
    result = sum(terms[1:], terms[0]).to(x.dtype).reshape(shape)
    saved = (n_masks_of(packed_masks), *shape)
    return result, torch.stack(gates).reshape(saved), torch.stack(values).reshape(saved)


def backward(
    grad_output: Tensor,
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    gates: Tensor,
    values: Tensor,
    activation: str,
    route_weights: Tensor | None,
    needs: Sequence[bool],
    logits_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`mglu::backward`; the equations are those of `composite.backward`."""
    needs_x, needs_weight, needs_route = needs
    operand, wide, act = operand_dtype(x), sum_dtype(x.dtype), get_activation(activation)
    rows, grad, w = as_rows(x).to(operand), as_rows(grad_output).to(wide), weight.to(operand)
    value_sum, grad_x, grad_weight = torch.zeros_like(grad), None, None
    grad_logits, grad_routes = [], []
    for i in range(n_masks_of(packed_masks)):
        gate, value = as_rows(gates[i]).to(wide), as_rows(values[i]).to(wide)
        activated, term_grad = act.forward(gate), grad
        if route_weights is not None:
            grad_routes.append((grad * activated * value).sum(-1))
            term_grad = grad * as_rows(route_weights)[:, i : i + 1]
        grad_value = term_grad * activated
        value_sum = value_sum + grad_value
        difference = (act.backward(term_grad * value, gate) - grad_value).to(operand)
        mask = _mask(packed_masks, i, weight.shape[1])
        if needs_x:
            part = matmul(difference, torch.where(mask, w, 0))
            grad_x = part if grad_x is None else grad_x + part
        if needs_weight or logits_dtype:
            product = matmul(difference.t(), rows)
            masked = torch.where(mask, product, 0)
            grad_weight = masked if grad_weight is None else grad_weight + masked
            if logits_dtype:
                grad_logits.append((product * weight).to(logits_dtype))
    value_sum = value_sum.to(operand)
    if grad_x is not None:
        grad_x = (grad_x + matmul(value_sum, w)).to(x.dtype).reshape(x.shape)
    if needs_weight and grad_weight is not None:
        grad_weight = (grad_weight + matmul(value_sum.t(), rows)).to(weight.dtype)
    route = None
    if needs_route and route_weights is not None:
        route = torch.stack(grad_routes, dim=-1).to(route_weights.dtype).reshape(route_weights.shape)
    return (
        x.new_empty(0) if grad_x is None else grad_x,
        grad_weight if needs_weight and grad_weight is not None else x.new_empty(0),
        torch.stack(grad_logits) if grad_logits else x.new_empty(0),
        x.new_empty(0) if route is None else route,
    )
