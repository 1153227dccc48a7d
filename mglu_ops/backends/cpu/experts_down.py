"""`mglu::experts_down` on a CPU. With n_masks = 0, the CPU kernel returns the products with an expert's weight.

For many rows and a dense weight, torch's GEMM is faster than the kernel. The kernel's result is in float32. The GEMM
rounds its result to y's dtype, in which float16 may overflow, so float16 always uses the kernel.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

from ...call import Call
from ...given import DownGiven, Given
from .. import expert_loop
from ..base import Prepared

_MOST_ROWS = 8
"""The most rows of an expert for which the kernel multiplies a dense weight. On two cores of a Xeon with AVX512-BF16,
the kernel is faster than torch's GEMM for up to 16 rows (float32 and bfloat16, weights 2048 x 768 and 2048 x 4096)."""


def down(call: Call, products: Callable[[int], Prepared], given: DownGiven) -> Tensor:
    """Run `mglu::experts_down`. Thread-safe."""
    _, weight, _, _, scale, weight_format = given
    has_library = call.weight.format.is_dense and call.dtype is not torch.float16
    no_masks = torch.empty(call.out_features, 0, 0, dtype=torch.uint8)

    def product(expert: int, rows: Tensor) -> Tensor:
        if has_library and len(rows) > _MOST_ROWS:
            return F.linear(rows, weight[expert])
        expert_scale = None if scale is None else scale[expert]
        layer = Given(rows, weight[expert], no_masks, "identity", None, expert_scale, weight_format)
        return products(len(rows))(layer)

    return expert_loop.down(product, given)
