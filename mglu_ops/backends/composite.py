"""MGLU by torch's GEMMs, on every device and in every dtype; fast for many tokens.

Experts are a loop over experts on a CPU, and elsewhere batched GEMMs over blocks of rows. A block has B slots for rows
of one expert (`_rows_of_a_block`). The device assigns rows to slots, by sorting the rows by expert and counting them.
The number of blocks depends only on the number of rows S and the number of experts E, so the host reads no value and
never waits. For a chunk of blocks, the weights of their experts are gathered, masked as in `formula`, and multiplied by
`torch.bmm`. Unused slots hold rows of other experts, whose products are discarded.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..activations import get_activation
from ..call import Call
from ..formats import FORMATS
from ..given import DownGiven, Given
from ..masks import unpack_one
from ..routing import inverse_of, sort_pairs
from ..sizes import ceil_div
from . import expert_loop, formula
from .base import Backend, Description, Prepared, Reason, Task
from .formula import operand_dtype, sum_dtype

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


# --- One layer -------------------------------------------------------------------------------------------------------


def _layer(call: Call) -> Prepared:
    """Prepare `forward` for a layer without experts."""
    shape = call.result_shape

    def prepared(given: Given) -> Tensor:
        # The result must not be a view, since autograd does not allow detaching a view in place.
        return torch.ops.aten._unsafe_view(formula.forward(given.in_rows()), shape)

    return prepared


# --- Experts, without reading a value on the host ---------------------------------------------------------------------


def _experts(call: Call, given: Given) -> Tensor:
    """Run `experts_forward` or `grouped_forward` without reading a value on the host."""
    x, weight, packed_masks, activation, mask_weights, scale, weight_format, *_ = given
    routing = call.routed
    if not call.tokens or not call.out_features:
        return x.new_zeros(call.result_shape)
    blocks = _Blocks.of(given.expert_ids, given.offs, routing.experts, call.tokens)
    act, dtype = get_activation(activation).forward, operand_dtype(x)
    results = []
    for chunk in blocks.chunks(call.out_features * call.in_features):
        experts, pairs = blocks.experts[chunk], blocks.pairs[chunk]
        rows = x[pairs // (routing.top_k or 1)].to(dtype)
        expert_weight = _decode(weight[experts], None if scale is None else scale[experts], weight_format, dtype)
        masks = packed_masks[experts].flatten(0, 1)
        weights = None if mask_weights is None else mask_weights[pairs].to(sum_dtype(x.dtype))
        result: Tensor | None = None
        for i in range(call.n_masks):
            masked = expert_weight * unpack_one(masks, i, call.in_features).view(expert_weight.shape)
            term = act(_matmul(rows, masked)) * _matmul(rows, expert_weight - masked)
            if weights is not None:
                term *= weights[..., i : i + 1]
            result = term if result is None else result.add_(term)
        assert result is not None
        results.append(result.to(x.dtype))
    return torch.ops.aten._unsafe_view(blocks.rows(results), call.result_shape)


def _down(given: DownGiven) -> Tensor:
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
    """Return `rows @ weight^T` of each block, summed in float32 at least, in the dtype of the sums."""
    if rows.dtype in (torch.float16, torch.bfloat16):
        return torch.bmm(rows, weight.mT, out_dtype=torch.float32)
    return torch.bmm(rows, weight.mT)


def _down_backward(grad_output: Tensor, given: DownGiven, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Run `down_backward` without reading a value on the host."""
    y, weight, ids, expert_weights, *_ = given
    (tokens, top_k, d), (experts, out_features, _), wide = y.shape, weight.shape, sum_dtype(y.dtype)
    blocks, rows_of_y = _Blocks.of(ids, None, experts, tokens * top_k), y.flatten(0, 1)
    dtype, weights = operand_dtype(y), expert_weights.view(-1, 1).to(wide)
    grad_y, grad_expert_weights = [], []  # one tensor for each chunk of blocks
    grad_weight = y.new_zeros(weight.shape if needs[1] else 0, dtype=wide)
    for chunk in blocks.chunks(out_features * d):
        chosen, pairs, is_used = blocks.experts[chunk], blocks.pairs[chunk], blocks.is_used[chunk, :, None]
        # A GEMM over rows also sums the unused slots, so these must be zeros.
        grad = torch.where(is_used, grad_output[pairs // top_k], 0).to(dtype)
        rows = torch.where(is_used, rows_of_y[pairs], 0).to(dtype)
        factors = torch.where(is_used, weights[pairs], 0)
        if needs[0] or needs[2]:
            back = _matmul(grad, weight[chosen].mT.to(dtype))  # times the expert weight, this is the gradient of y
            grad_y.append((back * factors).to(y.dtype))
            grad_expert_weights.append((back * rows).sum(-1, keepdim=True))
        if needs[1]:
            products = _matmul((grad * factors).to(dtype).mT, rows.mT)
            for expert, product in zip(chosen.split(1), products.split(1), strict=True):  # one by one, in a fixed order
                grad_weight.index_add_(0, expert, product)
    return (
        blocks.rows(grad_y).view(y.shape) if needs[0] else y.new_empty(0),
        grad_weight.to(weight.dtype),
        blocks.rows(grad_expert_weights).view(ids.shape).to(expert_weights.dtype)
        if needs[2]
        else expert_weights.new_empty(0),
    )


# --- On a CPU --------------------------------------------------------------------------------------------------------


def _down_on_cpu(given: DownGiven) -> Tensor:
    """Run `experts_down` by a loop over the experts."""
    _, weight, _, _, scale, weight_format = given
    dtype = sum_dtype(given.y.dtype)

    def product(expert: int, rows: Tensor) -> Tensor:
        expert_scale = None if scale is None else scale[expert]
        return rows.to(dtype) @ _decode(weight[expert], expert_scale, weight_format, dtype).t()

    return expert_loop.down(product, given)


def _down_backward_on_cpu(
    grad_output: Tensor, given: DownGiven, needs: Sequence[bool]
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
            back = grad @ weight[expert].to(wide)  # times the expert weight, this is the gradient of y
        if needs[0]:
            grad_y.view(-1, d)[rows] = (back * weights[rows, None]).to(y.dtype)
        if needs[2]:
            grad_expert_weights.view(-1)[rows] = (back * rows_of_y[rows]).sum(-1).to(expert_weights.dtype)
        if needs[1]:
            grad_weight[expert] = ((grad * weights[rows, None]).t() @ rows_of_y[rows].to(wide)).to(weight.dtype)
    return grad_y, grad_weight, grad_expert_weights


# --- The backend -----------------------------------------------------------------------------------------------------


class Composite(Backend):
    """The backend of this module, which runs every call but the training of experts on a GPU."""

    name: ClassVar[str] = "composite"
    device_type: ClassVar[str | None] = None

    def reason(self, task: Task, call: Call) -> Reason | None:
        if task in ("train", "backward") and call.routing is not None and call.device.type != "cpu":
            return Reason("library GEMMs of the rows of experts would wait for the GPU")
        return None

    def describe(self, task: Task, call: Call) -> Description:
        return Description("library GEMMs")

    def prepare(self, task: Task, call: Call, launch: Any = None) -> Prepared:
        is_cpu = call.device.type == "cpu"
        if task == "down":
            return _down_on_cpu if is_cpu else _down
        if task == "down_backward":
            return _down_backward_of(is_cpu)
        if call.routing is not None:
            return expert_loop.prepare(self, task, call) if is_cpu else partial(_experts, call)
        if task == "forward":
            return _layer(call)
        return formula.forward_train if task == "train" else formula.backward


def _down_backward_of(is_cpu: bool) -> Prepared:
    run = _down_backward_on_cpu if is_cpu else _down_backward

    def prepared(grad_output: Tensor, given: DownGiven, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
        if given.y.numel() and given.weight.numel():
            return run(grad_output, given, needs)
        tensors = zip((given.y, given.weight, given.expert_weights), needs, strict=True)
        return tuple(one.new_zeros(one.shape if is_needed else 0) for one, is_needed in tensors)  # type: ignore[return-value]

    return prepared
