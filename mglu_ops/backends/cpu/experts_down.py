"""`mglu::experts_down` on a CPU, by the kernels of one layer.

A layer whose only mask is zero everywhere has the gate 0 and the value `y W^T`. With the activation sigmoid, which is
1/2 there, and the mask weight 2 w, its result is `w y W^T`, for a weight in any format. One row of zeros stands for the
masks of all rows of W. For many rows of a dense weight, the library's product takes less time.

Each product is rounded to y's dtype before the sum over the experts of a token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ...expert_calls import DownArguments, ExpertCall
from ...layer_call import LayerArguments, LayerCall, Layout
from ...masks import packed_width
from .. import expert_loop
from ..base import PreparedCall

_MOST_ROWS = 4
"""The most rows of an expert for which the kernel of one layer takes less time than the library's product (bfloat16,
768 x 2048, Zen 4)."""


class CpuDown:
    """A prepared call. Thread-safe."""

    def __init__(self, call: ExpertCall, prepare: Callable[[LayerCall], PreparedCall]) -> None:
        layer = replace(
            call.layer,
            n_masks=1,
            activation="sigmoid",
            mask_weights_dtype=torch.float32,
            masks=Layout((0, 1, 1)),
        )
        self._layers = expert_loop.layers(prepare, replace(call, layer=layer))
        self._is_dense = layer.weight.format.is_dense
        self._zeros = torch.zeros(1, packed_width(layer.in_features), 1, dtype=torch.uint8)

    def __call__(self, given: DownArguments) -> Tensor:
        _, weight, _, _, scale, weight_format = given
        zeros = self._zeros.expand(weight.shape[1], -1, -1)

        def product(expert: int, rows: Tensor, weights: Tensor) -> Tensor:
            if self._is_dense and len(rows) > _MOST_ROWS:
                return F.linear(rows, weight[expert]) * weights
            of_expert = None if scale is None else scale[expert]
            return self._layers(len(rows))(
                LayerArguments(rows, weight[expert], zeros, "sigmoid", 2 * weights, of_expert, weight_format)
            )

        return expert_loop.down(product, given)
