"""Checks of the packed masks in modules.

`load_state_dict` checks the masks of a checkpoint before it copies them. Other loaders (Transformers, accelerate)
assign tensors to modules or write into them, and unpickled modules bring their own tensors. Such masks are checked when
a module first uses them, or earlier by `check_masks`.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..formats import check_scale
from ..tensors import is_readable
from .arguments import check_model
from .masked_linear import PACKED, MaskedLinear, check_masks_of
from .stored_linear import SCALE, StoredLinear


def check_masks(model: nn.Module) -> None:
    """Check the packed masks and quantized weights of a model, after a loader other than `load_state_dict`.

    Each `MGLU` and `NaiveMGLU` checks its masks when it first uses them. It cannot do so where values cannot be read:
    while `torch.compile` or `torch.export` traces it, and while a CUDA graph is captured. So call this function before
    tracing or capturing. It synchronises with a GPU once for each layer whose `in_features` is not a multiple of 8 or
    whose weight is quantized.

    The masks are checked by `mglu_ops.check_packed_masks`, which documents what it cannot find. They must also have the
    module's n_masks. Quantized weights, also of `ExpertsDown`, must not have been replaced without their scales, and
    scales must be finite and above 0.

    Args:
        model: any module. Layers with learned masks, and models without MGLU layers, pass.

    Raises:
        TypeError: `model` is not an `nn.Module`, or packed masks are not uint8; the message has the module's name.
        ValueError: packed masks have the wrong shape, or their padding is not 0; or a quantized weight was replaced
            without its scales, or a scale is NaN, infinite, negative or 0.
    """
    check_model(model)
    for name, module in model.named_modules():
        path = f"model: {name}." if name else "model: "
        if isinstance(module, MaskedLinear) and module.packed_masks is not None:
            check_masks_of(module, module.packed_masks, (*module.leading, module.out_features), path + PACKED)
        if isinstance(module, StoredLinear) and module.weight_format != "dense":
            module.check_pair(path)
            if module.weight_scale is not None:
                check_scale(module.weight_scale, path + SCALE)


# Masks that have been checked. The keys are the tensor's id, in_features and n_masks. A check sets no attribute on a
# module or a tensor, because a copied or unpickled module would keep it, and would not be checked again.
_checked: WeakValueDictionary[tuple[int, int, int], Tensor] = WeakValueDictionary()


def check_masks_in_use(module: MaskedLinear, packed_masks: Tensor) -> None:
    """Check the packed masks of a call, once for each tensor. Where values cannot be read, check only n_masks.

    The operators check dtype and shape at each call. Writes into a tensor after its first use are not noticed.

    Raises:
        TypeError, ValueError: as in `check_masks_of`.
    """
    if not torch.compiler.is_compiling():
        key = id(packed_masks), module.in_features, module.n_masks
        if _checked.get(key) is packed_masks:
            return
        if is_readable(packed_masks):
            rows = module.weight.shape[:-1]  # unlike out_features, these are only the rows that this rank holds
            check_masks_of(module, packed_masks, rows, "packed_masks")
            _checked[key] = packed_masks
            return
    if packed_masks.shape[-1:] != (module.n_masks,):
        raise ValueError(
            f"packed_masks: got shape {list(packed_masks.shape)}, must have n_masks={module.n_masks} as its last size"
        )
