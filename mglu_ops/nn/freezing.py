"""`freeze`: learned masks become packed bits, for inference."""

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

    `mask_logits` (None from then on) gives way to the buffer `packed_masks`, `M = logits > 0`, and every
    `NaiveMGLU` becomes an `MGLU`. An `MGLU` gives bit for bit what it gave before on the CPU; a former
    `NaiveMGLU` agrees with itself to the rounding of its dtype, as it now runs the fused operator.

    Nothing is replaced by a new module: an object keeps its identity and with it its place in the tree (or at
    the root, or in several places), hooks, training flag, router, the very `weight` Parameter (tied weights
    stay tied) and parametrizations of the weight. So it also reaches modules inside `torch.compile`, which
    compiles anew at the next call. Parametrizations of `mask_logits` are evaluated and removed. Modules that
    share one `mask_logits` share the packed masks. A model already frozen, or without such modules, is
    returned as it is.

    A subclass keeps its class, as it may do more than its base: its masks are packed, and for a subclass of
    `NaiveMGLU`, which then still runs the naive loop, a warning says so.

    An optimizer made before still holds the logits: make it anew if training goes on.

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
        # It deletes a property of the class, which copies of this object made by deepcopy have in common.
        _parametrized_class(module, type(module).__bases__)
        parametrize.remove_parametrizations(module, "mask_logits", leave_parametrized=True)
    logits = module.mask_logits
    assert logits is not None
    if logits not in packed:
        packed[logits] = torch.ops.mglu.pack_logits(logits)
    module.mask_logits = None
    module.packed_masks = packed[logits]


def _become_fused(module: NaiveMGLU, name: str) -> None:
    """Give a `NaiveMGLU` the class `MGLU`: the two differ in their forward and in nothing else."""
    cls = type(module)
    if cls is NaiveMGLU:
        module.__class__ = MGLU  # type: ignore[assignment]
    elif parametrize.is_parametrized(module) and cls.__bases__ == (NaiveMGLU,):
        _parametrized_class(module, (MGLU,))
    else:
        warnings.warn(
            f"freeze: {name or 'the model'} is a {cls.__qualname__}, a subclass of NaiveMGLU: its masks are "
            "packed, but it keeps its class and the naive loop; derive it from mglu_ops.nn.MGLU to fuse it",
            UserWarning,
            stacklevel=3,  # freeze's caller
        )


def _parametrized_class(module: nn.Module, bases: tuple[type, ...]) -> None:
    """Rebuild over `bases` the class torch made for `module`, whose properties are its parametrizations."""
    own = ("__dict__", "__weakref__")
    namespace = {key: value for key, value in vars(type(module)).items() if key not in own}
    module.__class__ = type(f"Parametrized{bases[0].__name__}", bases, namespace)
