"""Checks of the packed masks that modules hold, whichever way they came in.

`load_state_dict` checks the masks of a checkpoint before it takes them. Other loaders assign tensors to modules
(Transformers, accelerate) or write into them, and a module that is unpickled brings its tensors along. Such masks are
checked when a module first uses them, or earlier by `check_masks`.
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
    """Check the packed masks of every `MGLU` and `NaiveMGLU` in a model, after a loader other than `load_state_dict`.

    A module makes the same check when it first uses a tensor of masks, but it cannot do so where values cannot be read:
    in a graph that `torch.compile` or `torch.export` traces, and while a CUDA graph is captured. Call this function
    before that. It synchronises with a GPU for each layer whose `in_features` is not a multiple of 8, or whose weight
    is in 8 or 4 bits.

    This runs `mglu_ops.check_packed_masks`, which documents what it cannot find, and compares `n_masks` with the
    module's. It also checks of each weight in 8 or 4 bits, of these layers and of `ExpertsDown`, that no loader has
    replaced it without its scales, and that these are finite and above 0.

    Args:
        model: any module; one without such layers, or whose masks are learned, passes.

    Raises:
        TypeError: `model` is not an `nn.Module`, or packed masks are not uint8; the message has the module's name.
        ValueError: packed masks have another shape than the module's, or their padding is not 0; or a weight in 8 or 4
            bits was replaced without its scales, or has scales that are NaN, infinite, negative or 0.
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


# The tensors of masks that were checked, by their identity and the in_features and n_masks that they were checked for.
# They are not attributes of modules or tensors, so that copies and unpickled modules are checked again.
_checked: WeakValueDictionary[tuple[int, int, int], Tensor] = WeakValueDictionary()


def check_masks_in_use(module: MaskedLinear, packed_masks: Tensor) -> None:
    """Check the packed masks that a module uses now, once for each tensor; where values cannot be read, only n_masks.

    The operators check dtype and shape at each call. Writes into a tensor after its first use are not noticed.

    Raises:
        TypeError, ValueError: as in `check_masks_of`.
    """
    if not torch.compiler.is_compiling():
        key = id(packed_masks), module.in_features, module.n_masks
        if _checked.get(key) is packed_masks:
            return
        if is_readable(packed_masks):
            rows = module.weight.shape[:-1]  # a rank may hold a part of the module's rows
            check_masks_of(module, packed_masks, rows, "packed_masks")
            _checked[key] = packed_masks
            return
    if packed_masks.shape[-1:] != (module.n_masks,):
        raise ValueError(
            f"packed_masks: got shape {list(packed_masks.shape)}, must have n_masks={module.n_masks} as its last size"
        )
