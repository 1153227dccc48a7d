"""The prepared call of `mglu::experts_down`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...call import Call
from ...given import DownGiven
from ...routing import inverse_of, sort_pairs
from .current import current_device, current_stream, empty
from .device import gpu_of
from .driver import Launch
from .kernels.experts_down import ExpertsDown, launch_for, library_steps, plan
from .kernels.group_tokens import Order, order_words
from .launch import load

_NOT_READ = dict.fromkeys(("x", "packed_masks", "mask_weights"), 0)
"""Null pointers for the fields of `Params` that the kernel `decode_weight` does not read."""


class CudaDown:
    """A prepared call of `experts_down`. Thread-safe.

    It runs a plan, or multiplies by torch's `grouped_mm`. `grouped_mm` takes rows sorted by expert and a weight in y's
    dtype, and returns the products of sorted rows, so kernels run before and after it.

    Attributes:
        launches: the loaded plan; None if `grouped_mm` multiplies.
        steps: the loaded `LibrarySteps`, the launches around `grouped_mm`; None if a plan runs.
    """

    __slots__ = ("_device", "launches", "steps")

    def __init__(self, call: Call, launch: ExpertsDown | None, device: int) -> None:
        """Prepare a supported call on `device`, the current device. `launch` is None for the backend's own choice."""
        gpu, self._device = gpu_of(device), device
        config = launch or launch_for(call, gpu)
        self.launches = None if config is None else load(plan(config, call, gpu), device)
        self.steps: list[Launch | None] | None = None
        if config is None:
            self.steps = [None if step is None else step.load(device) for step in library_steps(call, gpu)]

    def __call__(self, given: DownGiven) -> Tensor:
        device = self._device
        if device != current_device():
            with torch.cuda.device(device):
                return self(given)
        y, weight, expert_ids, expert_weights, scale, _ = given
        if y.data_ptr() % 16:
            y = y.clone()
        (tokens, _, columns), (experts, out_features, _) = y.shape, weight.shape
        out = empty((tokens, out_features), (out_features, 1), y.dtype, device)
        pointers = {
            "y": y.data_ptr(),
            "weight": weight.data_ptr(),
            "weight_scale": 0 if scale is None else scale.data_ptr(),
            "expert_ids": expert_ids.data_ptr(),
            "expert_weights": expert_weights.data_ptr(),
            "places": 0,
            "out": out.data_ptr(),
        }
        stream = current_stream(device)
        # The workspace and the products are freed on return. `CudaCall.__call__` says why this is safe.
        if self.launches is not None:
            nbytes = self.launches.workspace_bytes
            workspace = empty((nbytes,), (1,), torch.uint8, device) if nbytes else None
            self.launches(stream, pointers, 0 if workspace is None else workspace.data_ptr())
            return out
        assert self.steps is not None
        decode, order, combine = self.steps
        assert combine is not None
        rows, places, offs = self._order_of(order, expert_ids, experts)
        if decode is not None:
            weight = empty((experts, out_features, columns), (out_features * columns, columns, 1), y.dtype, device)
            decode(stream, {**_NOT_READ, **pointers, "out": weight.data_ptr()})
        products = functional.grouped_mm(y.flatten(0, 1)[rows], weight.mT, offs=offs)
        combine(stream, {**pointers, "products": products.data_ptr(), "places": places.data_ptr()})
        return out

    def _order_of(self, launch: Launch | None, expert_ids: Tensor, experts: int) -> Order:
        if launch is None:
            pairs, offs = sort_pairs(expert_ids, experts)
            return Order(pairs, inverse_of(pairs), offs)
        rows = expert_ids.numel()
        memory = expert_ids.new_empty(order_words(rows, experts), dtype=torch.int64)
        launch(current_stream(self._device), {"expert_ids": expert_ids.data_ptr(), "out": memory.data_ptr()})
        return Order.of(memory, rows, experts)
