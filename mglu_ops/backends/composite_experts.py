"""Experts by library GEMMs: a loop over experts on a CPU, and elsewhere batched GEMMs over blocks of rows.

A block has B slots for rows of one expert. The device assigns rows to slots, by sorting the rows by expert and counting
them. The number of blocks depends only on the numbers of rows and experts, so the host never waits. For some blocks,
called a chunk, the weights of their experts are gathered, masked as in `composite`, and multiplied by `torch.bmm`. An
unused slot holds a row of another expert, and its product is discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from ..activations import get_activation
from ..expert_calls import DownArguments, ExpertArguments, ExpertCall, inverse_of, sort_pairs
from ..formats import FORMATS
from ..masks import unpack_one
from ..sizes import ceil_div
from . import expert_loop
from .base import (
    GroupedBackwardArguments,
    PreparedDown,
    PreparedExperts,
    PreparedGroupedBackward,
    PreparedGroupedForwardTrain,
)
from .composite import (
    Composite,
    Products,
    forward_train,
    gradients,
    mask_weight_gradients,
    operand_dtype,
    sum_dtype,
)
from .cuda import experts_training
from .triton import device_reason

_MOST_GATHERED = 1 << 26
"""The most weights that are gathered at once, for a chunk of blocks."""


@dataclass
class _Blocks:
    """The assignment of rows to the slots of blocks. A block belongs to one expert.

    Attributes:
        experts: the expert of each block, int64 `[blocks]`; any expert for an unused block.
        pairs: the row of the result in each slot, int64 `[blocks, B]`; any row in an unused slot.
        is_used: True if a slot is used, bool `[blocks, B]`.
        slots: the slot of each row of the result, numbered over all blocks, int64 `[S]`.
        has_expert: True if a row has an expert, bool `[S]`.
    """

    experts: Tensor
    pairs: Tensor
    is_used: Tensor
    slots: Tensor
    has_expert: Tensor

    @staticmethod
    def of(expert_ids: Tensor | None, offs: Tensor | None, experts: int, rows: int) -> _Blocks:
        pairs: Tensor | None = None
        if offs is None:
            assert expert_ids is not None
            pairs, offs = sort_pairs(expert_ids, experts)
        size = _rows_of_a_block(rows, experts)
        blocks = min(rows, rows // size + experts)
        ends = offs.long().clamp(0, rows).cummax(0).values
        starts = torch.cat((ends.new_zeros(1), ends[:-1]))
        block_ends = ((ends - starts + (size - 1)) // size).cumsum(0)
        block_starts = torch.cat((block_ends.new_zeros(1), block_ends[:-1]))
        numbers = torch.arange(blocks, device=offs.device)
        block_experts = torch.searchsorted(block_ends, numbers, right=True).clamp_max(experts - 1)
        first = starts[block_experts] + (numbers - block_starts[block_experts]) * size
        sorted_rows = first[:, None] + torch.arange(size, device=offs.device)
        is_used = sorted_rows < ends[block_experts, None]
        sorted_rows = sorted_rows.clamp_max(rows - 1)
        row = torch.arange(rows, device=offs.device)
        expert = torch.searchsorted(ends, row, right=True)
        has_expert, expert = expert < experts, expert.clamp_max(experts - 1)
        slots = block_starts[expert] * size + (row - starts[expert])
        slots = torch.where(has_expert, slots, 0)
        if pairs is None:
            return _Blocks(block_experts, sorted_rows, is_used, slots, has_expert)
        back = inverse_of(pairs)
        return _Blocks(block_experts, pairs[sorted_rows], is_used, slots[back], has_expert[back])

    def chunks(self, weights_per_expert: int) -> Iterator[slice]:
        """Yield chunks of blocks whose experts have at most `_MOST_GATHERED` weights together."""
        step = max(1, _MOST_GATHERED // max(1, weights_per_expert))
        for start in range(0, len(self.experts), step):
            yield slice(start, start + step)

    def rows(self, results: Sequence[Tensor], factors: Tensor | None = None) -> Tensor:
        """Return the rows `[S, ...]` of the blocks' results `[blocks, B, ...]`, which come in chunks.

        Rows are multiplied by `factors` `[S, 1]`. Rows without an expert are zeros.
        """
        found = torch.cat(list(results)).flatten(0, 1)[self.slots]
        if factors is not None:
            found.mul_(factors)  # before zeros are written, as the factor of a row without an expert may be NaN
        return torch.where(self.has_expert[:, None], found, 0)


def _rows_of_a_block(rows: int, experts: int) -> int:
    """The next power of two above the rows of an expert with balanced routing, clamped to 16 .. 128."""
    balanced = ceil_div(rows, max(1, min(rows, experts)))
    return min(128, max(16, 1 << balanced.bit_length()))


def forward(call: ExpertCall, given: ExpertArguments) -> Tensor:
    """Run `experts_forward` or `grouped_forward` without reading a value on the host."""
    x, weight, packed_masks, activation, mask_weights, scale, weight_format, *_ = given
    layer = call.layer
    if not call.rows or not layer.out_features:
        return x.new_zeros(call.result_shape)
    blocks = _Blocks.of(given.expert_ids, given.offs, call.experts, call.rows)
    act, dtype = get_activation(activation).forward, operand_dtype(x)
    results = []
    for chunk in blocks.chunks(layer.out_features * layer.in_features):
        experts, pairs = blocks.experts[chunk], blocks.pairs[chunk]
        rows = x[pairs // (call.top_k or 1)].to(dtype)
        expert_weight = _decode(weight[experts], None if scale is None else scale[experts], weight_format, dtype)
        masks = packed_masks[experts].flatten(0, 1)
        weights = None if mask_weights is None else mask_weights[pairs].to(sum_dtype(x.dtype))
        result: Tensor | None = None
        for i in range(layer.n_masks):
            masked = expert_weight * unpack_one(masks, i, layer.in_features).view(expert_weight.shape)
            term = act(_matmul(rows, masked)) * _matmul(rows, expert_weight - masked)
            if weights is not None:
                term *= weights[..., i : i + 1]
            result = term if result is None else result.add_(term)
        assert result is not None
        results.append(result.to(x.dtype))
    return torch.ops.aten._unsafe_view(blocks.rows(results), call.result_shape)


def down(given: DownArguments) -> Tensor:
    """Run `experts_down` without reading a value on the host."""
    y, weight, ids, expert_weights, scale, weight_format = given
    (tokens, top_k, d), (experts, out_features, _) = y.shape, weight.shape
    if not tokens or not out_features:
        return y.new_zeros(tokens, out_features)
    blocks, rows_of_y = _Blocks.of(ids, None, experts, tokens * top_k), y.flatten(0, 1)
    dtype, results = operand_dtype(y), []
    for chunk in blocks.chunks(out_features * d):
        chosen = blocks.experts[chunk]
        expert_weight = _decode(weight[chosen], None if scale is None else scale[chosen], weight_format, dtype)
        results.append(_matmul(rows_of_y[blocks.pairs[chunk]].to(dtype), expert_weight))
    terms = blocks.rows(results, expert_weights.view(-1, 1))
    return expert_loop.sum_in_order(terms.view(tokens, top_k, out_features)).to(y.dtype)


def _decode(weight: Tensor, scale: Tensor | None, weight_format: str, dtype: torch.dtype) -> Tensor:
    return FORMATS[weight_format].dequantize(weight, scale, dtype)


def _matmul(rows: Tensor, weight: Tensor) -> Tensor:
    """`rows @ weight^T` of each block, summed and returned in float32 at least."""
    if rows.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(rows, weight.mT, out_dtype=torch.float32)
    return torch.bmm(rows, weight.mT)


def down_backward(grad_output: Tensor, given: DownArguments, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of y, weight and expert_weights of `experts_down`; empty if not needed."""
    y, weight = given.y, given.weight
    if not y.numel() or not weight.numel():
        tensors = zip((y, weight, given.expert_weights), needs, strict=True)
        return tuple(one.new_zeros(one.shape if is_needed else 0) for one, is_needed in tensors)  # type: ignore[return-value]
    if y.is_cpu:
        return down_backward_on_cpu(grad_output, given, needs)
    if untrainable_reason(y.device, y.dtype) is None:
        return down_backward_by_grouped_products(grad_output, given, needs)
    return down_backward_in_blocks(grad_output, given, needs)


def down_backward_in_blocks(
    grad_output: Tensor, given: DownArguments, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """`down_backward` for every dtype and device, without reading a value on the host."""
    y, weight, ids, expert_weights, *_ = given
    (tokens, top_k, d), (experts, out_features, _), wide = y.shape, weight.shape, sum_dtype(y.dtype)
    blocks, rows_of_y = _Blocks.of(ids, None, experts, tokens * top_k), y.flatten(0, 1)
    dtype, weights = operand_dtype(y), expert_weights.view(-1, 1).to(wide)
    grad_y, grad_expert_weights = [], []  # one tensor for each chunk of blocks
    grad_weight = y.new_zeros(weight.shape if needs[1] else 0, dtype=wide)
    for chunk in blocks.chunks(out_features * d):
        chosen, pairs, is_used = blocks.experts[chunk], blocks.pairs[chunk], blocks.is_used[chunk, :, None]
        # A GEMM that sums over rows includes the unused slots, so the unused slots must be zeros.
        grad = torch.where(is_used, grad_output[pairs // top_k], 0).to(dtype)
        rows = torch.where(is_used, rows_of_y[pairs], 0).to(dtype)
        factors = torch.where(is_used, weights[pairs], 0)
        if needs[0] or needs[2]:
            back = _matmul(grad, weight[chosen].mT.to(dtype))  # the gradient of y before its expert weight is applied
            grad_y.append((back * factors).to(y.dtype))
            grad_expert_weights.append((back * rows).sum(-1, keepdim=True))
        if needs[1]:
            products = _matmul((grad * factors).to(dtype).mT, rows.mT)
            for expert, product in zip(chosen.split(1), products.split(1), strict=True):  # in a fixed order
                grad_weight.index_add_(0, expert, product)
    return (
        blocks.rows(grad_y).view(y.shape) if needs[0] else y.new_empty(0),
        grad_weight.to(weight.dtype),
        blocks.rows(grad_expert_weights).view(ids.shape).to(expert_weights.dtype)
        if needs[2]
        else expert_weights.new_empty(0),
    )


def down_backward_by_grouped_products(
    grad_output: Tensor, given: DownArguments, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """`down_backward` by grouped GEMMs of rows sorted by expert."""
    y, weight, ids, expert_weights, *_ = given
    pairs, offs = sort_pairs(ids, weight.shape[0])
    back, has_expert = inverse_of(pairs), (torch.arange(len(pairs), device=y.device) < offs[-1])[:, None]
    rows, grad = y.flatten(0, 1)[pairs], grad_output[pairs // ids.shape[1]]
    weights = expert_weights.view(-1, 1)[pairs].float()
    grad_y, grad_weight, grad_expert_weights = y.new_empty(0), y.new_empty(0), expert_weights.new_empty(0)
    if needs[0] or needs[2]:
        products = experts_training.product(grad, weight.contiguous(), offs)  # undefined in rows without an expert
        if needs[0]:
            grad_y = torch.where(has_expert, _times(products, weights), 0)[back].view(y.shape)
        if needs[2]:
            sums = (products.float() * rows).sum(-1, keepdim=True)
            grad_expert_weights = torch.where(has_expert, sums, 0)[back].view(ids.shape).to(expert_weights.dtype)
    if needs[1]:
        grad_weight = experts_training.product(_times(grad, weights).t(), rows, offs)
    return grad_y, grad_weight, grad_expert_weights


def _times(rows: Tensor, weights: Tensor) -> Tensor:
    """`rows * weights` in the dtype of rows, rounded once, without an intermediate tensor in float32."""
    return torch.mul(rows, weights, out=torch.empty_like(rows))


# --- A training step on a GPU ----------------------------------------------------------------------------------------


def untrainable_reason(device: torch.device, dtype: torch.dtype) -> str | None:
    """The reason why experts cannot train on a device without synchronising; None if they can."""
    if device.type == "cpu":
        return None
    if dtype is torch.float64:
        return "the grouped products in Triton sum in float32, which is too narrow for float64"
    return device_reason(device)


class GroupedProducts(Products):
    """The GEMMs of experts for rows sorted by expert, in float32. Results of rows without an expert are undefined.

    `weight` is `[experts, out_features, in_features]`; `x` and `grad` have the rows of all experts.
    """

    has_float64 = False

    def __init__(self, offs: Tensor, rows: int) -> None:
        self._ends = experts_training.ascending(offs, rows)
        self._expert = torch.searchsorted(self._ends, torch.arange(rows, device=offs.device), right=True)
        self.has_no_expert = self._expert == len(offs)

    def project(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        from .triton.grouped import grouped_products  # imported here, because it imports Triton

        out = x.new_empty(x.shape[0], weight.shape[1], dtype=torch.float32) if out is None else out
        return grouped_products(x, weight.mT, self._ends, out)

    def back(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        from .triton.grouped import grouped_products

        out = grad.new_zeros(grad.shape[0], weight.shape[2], dtype=torch.float32) if total is None else total
        return grouped_products(grad, weight, self._ends, out, add=total is not None)

    def weight_product(self, grad: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        from .triton.grouped import products_over_rows

        shape = len(self._ends), grad.shape[1], x.shape[1]
        out = grad.new_empty(shape, dtype=torch.float32) if total is None else total
        return products_over_rows(grad, x, self._ends, out, add=total is not None)

    def count_ones(self, mask: Tensor) -> Tensor:
        return mask.sum((-2, -1), keepdim=True)

    def per_row(self, numbers: Tensor) -> Tensor:
        return numbers.view(-1, 1)[self._expert.clamp_max(len(self._ends) - 1)]


def grouped_forward_train(given: ExpertArguments) -> tuple[Tensor, Tensor]:
    """Run `mglu::grouped_forward_train` in any dtype but float64, without reading a value on the host."""
    products = GroupedProducts(given.routing, given.x.shape[0])
    y, partials = forward_train(given, products)
    return (
        y.masked_fill_(products.has_no_expert[:, None], 0),
        partials.masked_fill_(products.has_no_expert[:, None, None], 0),
    )


def grouped_backward(arguments: GroupedBackwardArguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Run `mglu::grouped_backward` in any dtype but float64, without reading a value on the host."""
    grad_output, x, _, packed_masks, offs, partials, *_, dtype = arguments
    products = GroupedProducts(offs, x.shape[0])
    found = gradients(arguments, products)
    if dtype is None:
        return (*found, x.new_empty(0))
    grad_mask_weights = mask_weight_gradients(grad_output, partials[:, 1 + packed_masks.shape[-1] :], dtype)
    return (*found, grad_mask_weights.masked_fill_(products.has_no_expert[:, None], 0))


class CompositeExperts(Composite):
    """The backend `composite`, with the experts of this module."""

    def unsupported_experts_reason(self, call: ExpertCall) -> str | None:
        return None

    def prepare_experts(self, call: ExpertCall, launch: None = None) -> PreparedExperts:
        if call.layer.device.type != "cpu":
            return partial(forward, call)
        return partial(expert_loop.forward, expert_loop.layers(self.prepare, call), call)

    def prepare_down(self, call: ExpertCall, launch: None = None) -> PreparedDown:
        return down_on_cpu if call.layer.device.type == "cpu" else down

    def can_train_experts_forward(self, call: ExpertCall) -> bool:
        return untrainable_reason(call.layer.device, call.layer.dtype) is None

    def can_train_experts_backward(self, call: ExpertCall) -> bool:
        return self.can_train_experts_forward(call)

    def prepare_grouped_forward_train(self, call: ExpertCall) -> PreparedGroupedForwardTrain:
        if call.layer.device.type != "cpu":
            return grouped_forward_train
        return partial(expert_loop.forward_train, expert_loop.layers(self.prepare_forward_train, call), call)

    def prepare_grouped_backward(self, call: ExpertCall) -> PreparedGroupedBackward:
        if call.layer.device.type != "cpu":
            return grouped_backward
        return partial(expert_loop.backward, expert_loop.layers(self.prepare_backward, call))


# --- On a CPU --------------------------------------------------------------------------------------------------------


def down_on_cpu(given: DownArguments) -> Tensor:
    """Run `experts_down`."""
    _, weight, _, _, scale, weight_format = given
    dtype = sum_dtype(given.y.dtype)

    def product(expert: int, rows: Tensor) -> Tensor:
        expert_scale = None if scale is None else scale[expert]
        return rows.to(dtype) @ _decode(weight[expert], expert_scale, weight_format, dtype).t()

    return expert_loop.down(product, given)


def down_backward_on_cpu(
    grad_output: Tensor, given: DownArguments, needs: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `down_backward` by a loop over the experts."""
    y, weight, ids, expert_weights, *_ = given
    (_, top_k, d), wide = y.shape, sum_dtype(y.dtype)
    rows_of_y, weights = y.flatten(0, 1), expert_weights.flatten().to(wide)
    grad_y, grad_weight, grad_expert_weights = (
        tensor.new_zeros(tensor.shape if is_needed else 0)
        for tensor, is_needed in zip((y, weight, expert_weights), needs, strict=True)
    )
    for expert, rows in expert_loop.pairs_of_experts(ids, weight.shape[0]):
        grad = grad_output[rows // top_k].to(wide)
        if needs[0] or needs[2]:
            back = grad @ weight[expert].to(wide)  # the gradient of y before its expert weight is applied
        if needs[0]:
            grad_y.view(-1, d)[rows] = (back * weights[rows, None]).to(y.dtype)
        if needs[2]:
            grad_expert_weights.view(-1)[rows] = (back * rows_of_y[rows]).sum(-1).to(expert_weights.dtype)
        if needs[1]:
            grad_weight[expert] = ((grad * weights[rows, None]).t() @ rows_of_y[rows].to(wide)).to(weight.dtype)
    return grad_y, grad_weight, grad_expert_weights
