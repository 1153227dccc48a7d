"""The part of `freeze` for modules of other classes: it replaces them, or warns that they look like MGLU layers."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.utils import parametrize

from ..masks import MAX_MASKS
from .mask_logits import without_wrappers
from .masked_linear import MaskedLinear

Replacements = Mapping[type[nn.Module], Callable[..., nn.Module]]
"""Classes of modules, each with a function that takes an instance and returns the module in its place."""


def replace_modules(model: nn.Module, replace: Replacements) -> nn.Module:
    """Replace the modules of the given classes; see `freeze` for what stays shared.

    Returns:
        `model`, or what replaces it if it is of one of the classes itself.

    Raises:
        TypeError: `replace` is not such a mapping, or a function returned no module.
        ValueError: a class occurs nowhere in the model, or the module is the root of a compiled model.
    """
    _check(replace)
    places = [place for place in _places(model) if _class_of(place[2]) in replace]
    _check_places(places, replace)
    replaced: dict[nn.Module, nn.Module] = {}
    for parent, name, module in places:
        if module not in replaced:
            replaced[module] = _replacement(module, replace[_class_of(module)])
        if parent is not None:
            setattr(parent, name, replaced[module])
    return replaced.get(model, model)


_class_of = parametrize.type_before_parametrizations


def _check_places(places: list[tuple[nn.Module | None, str, nn.Module]], replace: Replacements) -> None:
    """Check, before anything is replaced, that each class occurs, and not as the root of a compiled model."""
    if missing := set(replace) - {_class_of(module) for _, _, module in places}:
        names = ", ".join(sorted(cls.__qualname__ for cls in missing))
        raise ValueError(f"replace: got {names}, but no module of the model is of this class; subclasses do not count")
    for _, name, module in places:
        if name == "_orig_mod":
            raise ValueError(
                f"replace: {_class_of(module).__qualname__} is compiled already; call freeze first and torch.compile "
                "after"
            )


def _check(replace: object) -> None:
    if not isinstance(replace, Mapping):
        raise TypeError(f"replace: got {type(replace).__name__}, must be a dict from classes of modules to functions")
    for cls, function in replace.items():
        if not (isinstance(cls, type) and issubclass(cls, nn.Module)):
            raise TypeError(f"replace: got the key {cls!r}, must be a subclass of torch.nn.Module")
        if not callable(function):
            raise TypeError(f"replace: got {function!r} for {cls.__qualname__}, must be a function of the module")


def _places(model: nn.Module) -> Iterator[tuple[nn.Module | None, str, nn.Module]]:
    """Yield each module with its name in each parent, a shared one several times; the model itself has no parent."""
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        yield model.get_submodule(parent) if path else None, name, module


def _replacement(module: nn.Module, function: Callable[..., nn.Module]) -> nn.Module:
    new = function(module)
    if not isinstance(new, nn.Module):
        name = _class_of(module).__qualname__
        raise TypeError(
            f"replace: the function for {name} returned {type(new).__name__}, must return a torch.nn.Module"
        )
    return new.train(module.training)


def warn_of_lookalikes(model: nn.Module, stacklevel: int) -> None:
    """Warn of modules that look like MGLU layers and are none of ours: their masks are not packed.

    Such a module holds a parameter `[n_masks, d, h]` with 1 to 16 masks, and a parameter `[d, h]` of its own or of an
    `nn.Linear` in it. There is one warning for each class.
    """
    found: dict[type[nn.Module], list[str]] = {}
    parameters: dict[type[nn.Module], tuple[str, str]] = {}
    for name, module in model.named_modules():
        names = _weight_and_logits(module)
        if names is not None:
            found.setdefault(type(module), []).append(without_wrappers(name) or "the model")
            parameters.setdefault(type(module), names)
    for cls, modules in found.items():
        weight, logits = parameters[cls]
        where = ", ".join(modules[:3]) + (f" and {len(modules) - 3} more" if len(modules) > 3 else "")
        function = f"lambda module: mglu_ops.nn.MGLU.from_parameters(module.{weight}, module.{logits})"
        warnings.warn(
            f"freeze: {where}: a {cls.__qualname__} looks like an MGLU layer ({weight} [d, h], {logits} [n, d, h]) but "
            "is no module of mglu_ops, so its masks were not packed; if it is one, call "
            f"freeze(model, replace={{{cls.__name__}: {function}}}) with its activation",
            UserWarning,
            stacklevel=stacklevel + 1,
        )


def _weight_and_logits(module: nn.Module) -> tuple[str, str] | None:
    """The names of the weight and of the logits in a module that looks like an MGLU layer and is none, or None."""
    if isinstance(module, MaskedLinear):
        return None
    own = dict(module.named_parameters(recurse=False))
    logits = {name: p for name, p in own.items() if p.dim() == 3 and p.shape[0] <= MAX_MASKS and p.is_floating_point()}
    if not logits:
        return None
    linear = {f"{name}.weight": child.weight for name, child in module.named_children() if isinstance(child, nn.Linear)}
    weights = {name: p for name, p in (own | linear).items() if p.dim() == 2}
    pairs = ((w, l) for w, p in weights.items() for l, q in logits.items() if q.shape[1:] == p.shape)
    return next(pairs, None)
