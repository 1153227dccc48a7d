"""Calls of the CPU backend with an instruction set, and what they should give."""

from __future__ import annotations

import math

from backend_calls import run_on
from strategies import Layer
from torch import Tensor

from mglu_ops.backends import reference


def run(layer: Layer, isa: str = "best") -> Tensor:
    x = layer.x.reshape(math.prod(layer.x.shape[:-1]), layer.x.shape[-1])
    route = layer.route_weights
    route = None if route is None else route.reshape(len(x), route.shape[-1])
    result = run_on("cpu", x, layer.weight, layer.packed_masks, layer.activation, route, launch=isa)
    return result.view(*layer.x.shape[:-1], layer.weight.shape[0])


def oracle(layer: Layer) -> Tensor:
    return reference.forward(layer.x, layer.weight, layer.masks, layer.activation, layer.route_weights)
