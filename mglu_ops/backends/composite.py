"""MGLU as n_masks + 1 library GEMMs: right on every device and dtype, and fast where there are many tokens.

With `t = x W^T` and `f_i = x (W with the sign flipped where M_i = 1)^T`, `gate_i = (t - f_i) / 2` and
`value_i = (t + f_i) / 2`. Against `s_i = x (M_i * W)^T`, `value_i = t - s_i` the flip spreads the rounding evenly:
a value of few weights is not the small difference of two large sums.
With one mask both products are taken as they stand (`_both_products`). In float32 the sums are no wider than the
operands, so that the error of a total would enter every gate and value: there the CPU takes a float64 total
(`_smaller_parts`), and a GPU, of which many have no float64 to speak of, both products.

Masking is a product with 0 and 1, and differences of what it leaves: exact, and several times faster than
`torch.where` on a CPU. Sums are float32 at least; where the library has no 16-bit GEMM with a float32 result, the
operands are widened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..activations import get_activation
from ..layer_call import LayerCall, as_rows
from ..masks import n_masks_of, unpack_one
from .base import Backend, PreparedCall

_FEW_TOKENS = 32
"""With fewer tokens than this, a float64 copy of the weight costs more than the products that it saves."""


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the GEMMs' operands: x's own where the library can return wider sums, else that of the sums."""
    return x.dtype if x.is_cuda else sum_dtype(x.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which products of `dtype` are summed."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`, summed and returned in float32 at least."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


def _matmul_into(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`matmul`, without a new tensor where the library can."""
    return torch.mm(a, b, out=out) if a.dtype == out.dtype else out.copy_(matmul(a, b))


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """`total += a @ b`, summed in total's dtype."""
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, out=total)
    else:
        total += matmul(a, b)


def _gates_and_values(
    x: Tensor, weight: Tensor, packed_masks: Tensor, gates: Tensor, values: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gate_i and value_i `[tokens, out_features]` of each mask, in the dtype of the sums.

    They are written to `gates[i]` and `values[i]`, or where those have but one entry, to that one each time.
    """
    n_masks, in_features = n_masks_of(packed_masks), weight.shape[1]
    narrow_sums, tokens = x.dtype is torch.float32, x.shape[0]
    dtype = operand_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    masks = (unpack_one(packed_masks, i, in_features) for i in range(n_masks))
    buffers = ((gates[i % len(gates)], values[i % len(values)]) for i in range(n_masks))
    if n_masks == 1 or (narrow_sums and (n_masks == 2 or tokens < _FEW_TOKENS or x.is_cuda)):
        project = _both_products
    else:
        project = _smaller_parts if narrow_sums else _sign_flips
    yield from project(x, weight, zip(masks, buffers, strict=True))


_Masks = Iterable[tuple[Tensor, tuple[Tensor, Tensor]]]


def _both_products(x: Tensor, weight: Tensor, masks: _Masks) -> Iterator[tuple[Tensor, Tensor]]:
    """Compute both products, as the naive layer does, so that no difference loses digits."""
    for mask, (gate, value) in masks:
        masked = weight * mask
        _matmul_into(gate, x, masked.t())
        _matmul_into(value, x, (weight - masked).t())
        yield gate, value


def _sign_flips(x: Tensor, weight: Tensor, masks: _Masks) -> Iterator[tuple[Tensor, Tensor]]:
    half_total = matmul(x, weight.t()).mul_(0.5)
    for mask, (gate, value) in masks:
        flipped = _matmul_into(gate, x, torch.sub(weight, weight * mask, alpha=2).t())
        torch.add(half_total, flipped, alpha=0.5, out=value)
        torch.sub(half_total, flipped, alpha=0.5, out=gate)
        yield gate, value


def _smaller_parts(x: Tensor, weight: Tensor, masks: _Masks) -> Iterator[tuple[Tensor, Tensor]]:
    """The part of fewer weights is a product, the other is what it leaves of a float64 total.

    Sign flips measured 2 to 4 times the naive layer's error in float32, this 0.4 to 1.2 times.
    """
    wide = x.double() @ weight.double().t()
    total = wide.float()
    remainder = wide.sub_(total).float()
    del wide
    for mask, (gate, value) in masks:
        gate_is_small = bool(mask.count_nonzero() <= mask.numel() // 2)
        part, rest = (gate, value) if gate_is_small else (value, gate)
        masked = weight * mask
        _matmul_into(part, x, (masked if gate_is_small else weight - masked).t())
        torch.sub(total, part, out=rest).add_(remainder)
        yield gate, value


class Composite(Backend):
    """The backend of this module, which can run every call."""

    name: ClassVar[str] = "composite"

    def unsupported_reason(self, call: LayerCall) -> str | None:
        return None

    def prepare(self, call: LayerCall, launch: None = None) -> PreparedCall:
        activation, shape = call.activation, call.result_shape

        def prepared(x: Tensor, weight: Tensor, packed_masks: Tensor, route_weights: Tensor | None) -> Tensor:
            return _forward(x, weight, packed_masks, activation, route_weights, saved=None).view(shape)

        return prepared


def forward_train(
    x: Tensor, weight: Tensor, packed_masks: Tensor, activation: str, route_weights: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The result, and the gates and values `[n_masks, ..., out_features]` in x's dtype that backward needs."""
    shape = (n_masks_of(packed_masks), *x.shape[:-1], weight.shape[0])
    gates, values = x.new_empty(shape), x.new_empty(shape)
    result = _forward(x, weight, packed_masks, activation, route_weights, saved=(gates, values))
    return result, gates, values


def _forward(
    x: Tensor,
    weight: Tensor,
    packed_masks: Tensor,
    activation: str,
    route_weights: Tensor | None,
    saved: tuple[Tensor, Tensor] | None,
) -> Tensor:
    act = get_activation(activation).forward
    n_masks, rows, dtype = n_masks_of(packed_masks), as_rows(x), sum_dtype(x.dtype)
    shape = (rows.shape[0], weight.shape[0])
    result = rows.new_zeros(shape, dtype=dtype)
    in_place = saved is not None and x.dtype == dtype
    if saved is not None:
        saved = (saved[0].view(n_masks, *shape), saved[1].view(n_masks, *shape))
    if saved is not None and in_place:
        gates, values = saved
    else:
        gates, values = (rows.new_empty(1, *shape, dtype=dtype) for _ in range(2))
    for i, (gate, value) in enumerate(_gates_and_values(rows, weight, packed_masks, gates, values)):
        if saved is not None and not in_place:
            saved[0][i].copy_(gate)
            saved[1][i].copy_(value)
        activated = act(gate)
        if route_weights is not None:
            activated = activated * as_rows(route_weights)[:, i : i + 1]
        result.addcmul_(activated, value)
    return result.to(x.dtype).view(*x.shape[:-1], weight.shape[0])


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
    """The gradients of x, weight, mask logits and route weights; those not asked for are empty.

    With `dg_i`, `dv_i` the gradients at gate_i and value_i, `D_i = (dg_i - dv_i)^T x` and `S = sum_i dv_i`:
    `dx = sum_i (dg_i - dv_i) (M_i * W) + S W`, `dW = sum_i M_i * D_i + S^T x`, `dM_i = D_i * W`:
    2 (n_masks + 1) GEMMs.
    """
    needs_x, needs_weight, needs_route = needs
    operand, wide = operand_dtype(x), sum_dtype(x.dtype)
    act = get_activation(activation)
    n_masks = n_masks_of(packed_masks)
    rows, grad = as_rows(x).to(operand), as_rows(grad_output).to(wide)
    w = weight.to(operand)

    grad_x = grad.new_zeros(rows.shape) if needs_x else x.new_empty(0)
    grad_weight = grad.new_zeros(weight.shape) if needs_weight else x.new_empty(0)
    grad_logits = x.new_empty((n_masks, *weight.shape) if logits_dtype else 0, dtype=logits_dtype or x.dtype)
    if route_weights is None or not needs_route:
        needs_route, grad_route = False, x.new_empty(0)
    else:
        grad_route = route_weights.new_empty(rows.shape[0], n_masks)
    value_sum = torch.zeros_like(grad)

    for i in range(n_masks):
        gate, value = as_rows(gates[i]).to(wide), as_rows(values[i]).to(wide)
        activated = act.forward(gate)
        term_grad = grad
        if route_weights is not None:
            if needs_route:
                grad_route[:, i] = (grad * activated * value).sum(-1)
            term_grad = grad * as_rows(route_weights)[:, i : i + 1]
        grad_value = term_grad * activated
        value_sum += grad_value
        grad_gate = act.backward(term_grad * value, gate)
        difference = torch.sub(grad_gate, grad_value, out=grad_value).to(operand)
        mask = unpack_one(packed_masks, i, weight.shape[1])
        if needs_x:
            _add_matmul(grad_x, difference, w * mask)
        if needs_weight or logits_dtype:
            product = matmul(difference.t(), rows)
            if needs_weight:
                grad_weight += product * mask
            if logits_dtype:
                grad_logits[i] = product * weight

    value_sum = value_sum.to(operand)
    if needs_x:
        _add_matmul(grad_x, value_sum, w)
        grad_x = grad_x.to(x.dtype).view(x.shape)
    if needs_weight:
        _add_matmul(grad_weight, value_sum.t(), rows)
        grad_weight = grad_weight.to(weight.dtype)
    if needs_route:
        grad_route = grad_route.view(*x.shape[:-1], n_masks)
    return grad_x, grad_weight, grad_logits, grad_route
