"""MGLU by torch's GEMMs, on every device and in every dtype; fast for many tokens.

Experts are a loop over those that have rows (`expert_loop`). On a GPU, the host therefore waits for the ids or offsets.
The backends `cuda` and `triton`, which come first there, do not wait.
"""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..call import Call
from ..formats import FORMATS
from ..given import DownGiven, Given
from . import expert_loop, experts_down, formula
from .base import Backend, Description, Prepared, Reason, Task
from .formula import matmul, operand_dtype, sum_dtype


class Composite(Backend):
    """The backend of this module, which runs every call."""

    name: ClassVar[str] = "composite"
    device_type: ClassVar[str | None] = None

    def reason(self, task: Task, call: Call) -> Reason | None:
        return None

    def describe(self, task: Task, call: Call) -> Description:
        waits = call.routing is not None and call.device.type != "cpu"
        slow_reason = "the host waits for the device, to read which rows each expert has" if waits else None
        return Description("library GEMMs", slow_reason=slow_reason)

    def prepare(self, task: Task, call: Call, launch: Any = None) -> Prepared:
        if task == "down":
            return _down
        if task == "down_backward":
            return partial(experts_down.backward, _grouped_product)
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


def _grouped_product(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
    """Compute `torch.nn.functional.grouped_mm` by a loop over the experts, in the dtype of the sums."""
    dtype, out_dtype = operand_dtype(a), sum_dtype(a.dtype)
    if b.dim() == 3:
        out = a.new_empty(len(a), b.shape[2], dtype=out_dtype)
        for expert, rows in expert_loop.slices_of_experts(offs, len(a)):
            out[rows] = matmul(a[rows].to(dtype), b[expert].to(dtype))
        return out
    out = a.new_zeros(len(offs), len(a), b.shape[1], dtype=out_dtype)
    for expert, rows in expert_loop.slices_of_experts(offs, len(b)):
        out[expert] = matmul(a[:, rows].to(dtype), b[rows].to(dtype))
    return out
