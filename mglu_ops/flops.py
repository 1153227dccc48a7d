"""The operators' formula for `torch.utils.flop_counter`.

A product of X with a matrix of W's shape has 2 * tokens * out_features * in_features FLOPs. Forward counts n_masks + 1
of them, and backward twice as many. For experts, each row of the result counts as a token, also a row without an
expert.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .given import OPERATORS
from .registering import names_of


def _flops(names: list[str], *args: Any, **kwargs: Any) -> int:
    """The FLOPs of a call, whose arguments have these names. In place of tensors, it has their shapes."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    is_down = "y" in given
    product = 2 * math.prod(given["y" if is_down else "x"]) * given["weight"][-2]
    if "expert_ids" in given and not is_down:
        product *= given["expert_ids"][1]
    n_masks = 0 if is_down else given["mask_logits"][-3] if "mask_logits" in given else given["packed_masks"][-1]
    if "needs" not in given:
        return (n_masks + 1) * product
    needs_x, needs_weight, *others = given["needs"]
    if is_down:
        return (needs_x or others[0]) * product + needs_weight * product
    of_weight = n_masks + 1 if needs_weight else n_masks if given["logits_dtype"] else 0
    return (needs_x * (n_masks + 1) + of_weight) * product


for _name in (*OPERATORS, "experts_down_backward"):
    _op = getattr(torch.ops.mglu, _name)
    register_flop_formula(_op)(partial(_flops, names_of(_op.default)))
