"""MGLU by torch's GEMMs, on every device and in every dtype; fast for many tokens.

Experts are a loop over those that have rows (`expert_loop`). On a GPU, the host therefore waits for the ids or offsets.
The backends `cuda` and `triton`, which come first there, do not wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..call import Call
from ..formats import FORMATS
from ..given import DownGiven, Given
from . import expert_loop, formula
from .base import Backend, Description, Prepared, Reason, Task
from .experts_down import gradients_of_rows
from .formula import matmul, operand_dtype, sum_dtype


class Composite(Backend):
    """The backend of this module, which runs every call."""

    name: ClassVar[str] = "composite"
    device_type: ClassVar[str | None] = None

    def reason(self, task: Task, call: Call) -> Reason | None:
        return None

    def describe(self, task: Task, call: Call) -> Description:
        waits = call.routing is not None and call.device.type not in ("cpu", "meta")
        slow_reason = "the host waits for the device, to read which rows each expert has" if waits else None
        return Description("library GEMMs", slow_reason=slow_reason)

    def prepare(self, task: Task, call: Call, launch: Any = None) -> Prepared:
        if task == "down":
            return _down
        if task == "down_backward":
            return _down_backward
        if call.routing is not None:
            return expert_loop.prepare(self, task, call)
        if task == "forward":
            return _layer(call)
        return formula.forward_train if task == "train" else formula.backward


def _layer(call: Call) -> Prepared:
    """Prepare `forward` for a layer without experts."""
    shape = call.result_shape

    def prepared(given: Given) -> Tensor:
        # The result must not be a view, since autograd does not allow detaching a view in place.
        return torch.ops.aten._unsafe_view(formula.forward(given.in_rows()), shape)

    return prepared


def _down(given: DownGiven) -> Tensor:
    """Run `experts_down`."""
    _, weight, _, _, scale, weight_format = given
    dtype = operand_dtype(given.y)

    def product(expert: int, rows: Tensor) -> Tensor:
        expert_scale = None if scale is None else scale[expert]
        expert_weight = FORMATS[weight_format].dequantize(weight[expert], expert_scale, dtype)
        return matmul(rows.to(dtype), expert_weight.t())

    return expert_loop.down(product, given)


def _down_backward(grad_output: Tensor, given: DownGiven, needs: Sequence[bool]) -> tuple[Tensor, Tensor, Tensor]:
    """Run `experts_down_backward`."""
    y, weight, ids, expert_weights, *_ = given
    (_, top_k, d), dtype = y.shape, operand_dtype(y)
    grad_y, grad_weight, grad_expert_weights = (grad.zero_() for grad in given.empty_gradients(needs))
    rows_of_y, factors = y.flatten(0, 1), expert_weights.view(-1, 1).to(sum_dtype(y.dtype))

    def product(a: Tensor, b: Tensor) -> Tensor:
        return matmul(a.to(dtype), b.to(dtype))

    for expert, pairs in expert_loop.pairs_of_experts(ids, len(weight)):
        grad, rows = grad_output[pairs // top_k].to(dtype), rows_of_y[pairs].to(dtype)
        of_y, of_weight, of_factors = gradients_of_rows(product, grad, rows, weight[expert], factors[pairs], needs)
        if of_y is not None:
            grad_y.view(-1, d)[pairs] = of_y.to(y.dtype)
        if of_weight is not None:
            grad_weight[expert] = of_weight
        if of_factors is not None:
            grad_expert_weights.view(-1, 1)[pairs] = of_factors.to(expert_weights.dtype)
    return grad_y, grad_weight, grad_expert_weights
