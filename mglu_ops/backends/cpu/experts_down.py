"""`mglu::experts_down` on a CPU, by the kernel of layers without masks, whose result is the product in float32.

For many rows of a dense weight, the library's product takes less time. It is rounded to y's dtype, in which it may
overflow in float16, so that the kernel takes all rows there.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ...expert_calls import DownArguments, ExpertCall
from ...layer_call import LayerArguments, LayerCall
from .. import expert_loop
from ..base import PreparedCall

_MOST_ROWS = 8
"""The most rows of an expert that the kernel multiplies with a dense weight. On a Xeon with AVX512-BF16 it takes less
time than the library's product up to 16 rows in float32 and bfloat16 (2048 x 768 and 2048 x 4096, two cores)."""


class CpuDown:
    """A prepared call. Thread-safe."""

    def __init__(self, call: ExpertCall, prepare: Callable[[LayerCall], PreparedCall]) -> None:
        layer = call.layer
        self._products = expert_loop.layers(prepare, call)
        self._has_library = layer.weight.format.is_dense and layer.dtype is not torch.float16
        self._no_masks = torch.empty(layer.out_features, 0, 0, dtype=torch.uint8)

    def __call__(self, given: DownArguments) -> Tensor:
        _, weight, _, _, scale, weight_format = given

        def product(expert: int, rows: Tensor) -> Tensor:
            if self._has_library and len(rows) > _MOST_ROWS:
                return F.linear(rows, weight[expert])
            of_expert = None if scale is None else scale[expert]
            return self._products(len(rows))(
                LayerArguments(rows, weight[expert], self._no_masks, "identity", None, of_expert, weight_format)
            )

        return expert_loop.down(product, given)
