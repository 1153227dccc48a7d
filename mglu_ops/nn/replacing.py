"""Replaces a user's own modules for `freeze(replace=...)`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from torch import nn
from torch.nn.utils import parametrize

Replacements = Mapping[type[nn.Module], Callable[..., nn.Module]]
"""Maps classes of modules to functions that take an instance and return its replacement."""


def replace_modules(model: nn.Module, replace: Replacements) -> nn.Module:
    """Replace the modules whose classes are in `replace`, as `freeze` describes. If there is an error, replace none."""
    _check(replace)
    places = [place for place in _places(model) if _class_of(place[2]) in replace]
    _check_places(places, replace)
    replaced: dict[nn.Module, nn.Module] = {}
    for _, _, module in places:
        if module not in replaced:
            replaced[module] = _replacement(module, replace[_class_of(module)])
    for parent, name, module in places:  # after all checks, so that an error leaves the model unchanged
        if parent is not None:
            setattr(parent, name, replaced[module])
    return replaced.get(model, model)


_class_of = parametrize.type_before_parametrizations


def _check_places(places: list[tuple[nn.Module | None, str, nn.Module]], replace: Replacements) -> None:
    """Check that the model has modules of each class, and that none is the root of a compiled model."""
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
    """Yield (parent, name, module) for each module and each of its parents. The parent of the model itself is None."""
    for path, module in model.named_modules(remove_duplicate=False):
        parent, _, name = path.rpartition(".")
        yield model.get_submodule(parent) if path else None, name, module


def _replacement(module: nn.Module, function: Callable[..., nn.Module]) -> nn.Module:
    new = function(module)
    if not isinstance(new, nn.Module):
        raise TypeError(
            f"replace: the function for {_class_of(module).__qualname__} returned {type(new).__name__}, must return a "
            "torch.nn.Module"
        )
    return new.train(module.training)
