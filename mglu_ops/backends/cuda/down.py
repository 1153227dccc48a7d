"""The prepared call of `mglu::experts_down`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ...given import DownGiven
from ...routing import inverse_of, sort_pairs
from .current import current_device, current_stream, empty
from .driver import Launch
from .kernels.group_tokens import Order, order_words

_NOT_READ = dict.fromkeys(("x", "packed_masks", "mask_weights"), 0)
"""The pointers of `Params` that `decode_weight` does not read."""


class CudaDown:
    """A prepared call of `experts_down`. Thread-safe.

    There are three ways to run a call:

    - For a single token, `products` computes the result.
    - `products` writes the product of each (token, expert) pair in float32, and `combine` adds the products.
    - The library multiplies the rows, sorted by expert, in their dtype, and `combine` adds the products.

    Attributes:
        products: the launch of the products; None if the library multiplies.
        combine: the launch that adds the products of each token; None for a single token.
        pair_bytes: the bytes that `products` writes per pair for `combine`.
        decode: the launch that copies a weight in 8 or 4 bits to y's dtype for the library; None for a dense weight.
        order: the launch that sorts the rows for the library; None if torch sorts them.
    """

    __slots__ = ("_device", "combine", "decode", "order", "pair_bytes", "products")

    def __init__(
        self,
        products: Launch | None,
        combine: Launch | None,
        pair_bytes: int,
        decode: Launch | None,
        order: Launch | None,
        device: int,
    ) -> None:
        self.products = products
        self.combine = combine
        self.pair_bytes = pair_bytes
        self.decode = decode
        self.order = order
        self._device = device

    def __call__(self, given: DownGiven) -> Tensor:
        device = self._device
        if device != current_device():
            with torch.cuda.device(device):
                return self(given)
        y, weight, expert_ids, expert_weights, scale, _ = given
        if y.data_ptr() % 16:
            y = y.clone()
        (tokens, top_k, _), (experts, out_features, _) = y.shape, weight.shape
        out = empty((tokens, out_features), (out_features, 1), y.dtype, device)
        pointers = {
            "y": y.data_ptr(),
            "weight": weight.data_ptr(),
            "weight_scale": 0 if scale is None else scale.data_ptr(),
            "expert_ids": expert_ids.data_ptr(),
            "expert_weights": expert_weights.data_ptr(),
            "out": out.data_ptr(),
        }
        stream = current_stream(device)
        if self.combine is None:
            assert self.products is not None
            self.products(stream, pointers)
            return out
        # The products are freed on return, like the workspace in CudaCall.
        if self.products is None:
            rows, places, offs = self._order_of(expert_ids, experts)
            if self.decode is not None:
                columns = y.shape[2]
                weight = empty((experts, out_features, columns), (out_features * columns, columns, 1), y.dtype, device)
                self.decode(stream, {**_NOT_READ, **pointers, "out": weight.data_ptr()})
            products = functional.grouped_mm(y.flatten(0, 1)[rows], weight.mT, offs=offs)
            self.combine(stream, {**pointers, "products": products.data_ptr(), "places": places.data_ptr()})
        else:
            products = empty((tokens * top_k * self.pair_bytes,), (1,), torch.uint8, device)
            self.products(stream, {**pointers, "out": products.data_ptr()})
            self.combine(stream, {**pointers, "products": products.data_ptr(), "places": 0})
        return out

    def _order_of(self, expert_ids: Tensor, experts: int) -> Order:
        if self.order is None:
            pairs, offs = sort_pairs(expert_ids, experts)
            return Order(pairs, inverse_of(pairs), offs)
        rows = expert_ids.numel()
        memory = expert_ids.new_empty(order_words(rows, experts), dtype=torch.int64)
        self.order(current_stream(self._device), {"expert_ids": expert_ids.data_ptr(), "out": memory.data_ptr()})
        return Order.of(memory, rows, experts)
