"""`freeze` replaces learned masks by packed bits, for inference."""

from __future__ import annotations

import warnings
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from .masked_linear import MaskedLinear
from .mglu import MGLU
from .naive import NaiveMGLU

ModelT = TypeVar("ModelT", bound=nn.Module)


def freeze(model: ModelT) -> ModelT:
    """Turn the learned masks of every `MGLU` and `NaiveMGLU` in `model` into packed bits, in place.

    The buffer `packed_masks` with `M = logits > 0` replaces `mask_logits`, which becomes None, and every `NaiveMGLU`
    becomes an `MGLU`. On the CPU, the results of an `MGLU` stay the same bit for bit. The results of a former
    `NaiveMGLU` stay the same up to the rounding of its dtype, because it now runs the fused operator.

    No module is replaced by a new one. Every module keeps its identity, and so its position in the model (also as the
    root, or in several positions), its hooks, training flag and router, its `weight` Parameter (tied weights stay tied)
    and the parametrizations of the weight. Therefore `freeze` also works on modules inside `torch.compile`, which
    recompiles at the next call. Parametrizations of `mask_logits` are evaluated and removed. Modules that share one
    `mask_logits` share the packed masks. A model that is frozen already, or has no such modules, is returned unchanged.

    An instance of a subclass keeps its class, which may do more than its base. Its masks are packed; a subclass of
    `NaiveMGLU` still runs the naive loop then, and a warning says so. So does, without a warning, a `NaiveMGLU` with
    biases or without masks on gates or values, which no fused operator computes.

    An optimizer created before `freeze` still holds the logits: create a new one if training continues.

    Args:
        model: any module; the root may itself be an `MGLU`, a `NaiveMGLU` or a `torch.compile`d module.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is not an `nn.Module`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, must be a torch.nn.Module")
    packed: dict[Tensor, Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, MaskedLinear):
            _pack_masks(module, packed)
        if isinstance(module, NaiveMGLU):
            _become_fused(module, name)
    return model


def _pack_masks(module: MaskedLinear, packed: dict[Tensor, Tensor]) -> None:
    if not module.learnable_masks:
        return
    if parametrize.is_parametrized(module, "mask_logits"):
        # remove_parametrizations deletes a property of the class, and copies made by deepcopy share the class.
        _parametrized_class(module, type(module).__bases__)
        parametrize.remove_parametrizations(module, "mask_logits", leave_parametrized=True)
    logits = module.mask_logits
    assert logits is not None
    if logits not in packed:
        packed[logits] = torch.ops.mglu.pack_logits(logits)
    module.mask_logits = None
    module.packed_masks = packed[logits]


def _become_fused(module: NaiveMGLU, name: str) -> None:
    """Change the class of a `NaiveMGLU` to `MGLU`, which computes the same but has no biases or other variants."""
    cls = type(module)
    if not module.is_mglu:
        return
    if cls is NaiveMGLU:
        module.__class__ = MGLU  # type: ignore[assignment]
    elif parametrize.is_parametrized(module) and cls.__bases__ == (NaiveMGLU,):
        _parametrized_class(module, (MGLU,))
    else:
        warnings.warn(
            f"freeze: {name or 'the model'} is a {cls.__qualname__}, a subclass of NaiveMGLU: its masks are packed, "
            "but it still runs the naive loop of its class; derive the class from mglu_ops.nn.MGLU to fuse it",
            UserWarning,
            stacklevel=3,  # freeze's caller
        )


def _parametrized_class(module: nn.Module, bases: tuple[type, ...]) -> None:
    """Give `module` a copy, derived from `bases`, of the class that torch made for its parametrizations."""
    own = ("__dict__", "__weakref__")
    namespace = {key: value for key, value in vars(type(module)).items() if key not in own}
    module.__class__ = type(f"Parametrized{bases[0].__name__}", bases, namespace)
