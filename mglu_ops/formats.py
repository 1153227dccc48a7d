"""The formats in which the weight of a layer is stored; `csrc/cuda/weight_formats.cuh` lists the same for C++.

A mask selects whole elements of W, so it is the same in every format. The kernels decode W in registers, once for all
masks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class WeightFormat:
    """A format.

    Attributes:
        name: as the operators take it.
        code: its number in `csrc/cuda/weight_formats.cuh`.
        dtype: of the stored tensor; None for x's.
    """

    name: str
    code: int
    dtype: torch.dtype | None = None

    def stored_dtype(self, of_x: torch.dtype) -> torch.dtype:
        """The dtype of the stored tensor of a layer whose x has the dtype `of_x`."""
        return self.dtype or of_x


FORMATS = {one.name: one for one in (WeightFormat("dense", 0),)}
"""The formats by their names."""
