"""Finds the mask logits of a model, by class in this package's modules and by name in other modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import Tensor, nn
from torch.nn.utils import parametrize

from .masked_linear import LOGITS, MaskedLinear

Selection = Iterable[str] | Callable[[str, nn.Parameter], bool]
"""Names of parameters, with the wildcards of `fnmatch`, or a function of a name and a parameter."""

_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
"""Components that `torch.compile`, FSDP and checkpoint wrappers insert into the names of modules and parameters."""


def without_wrappers(name: str) -> str:
    """The name that a module or a parameter had before the model was compiled or wrapped."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def parameters_with_owners(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Parameter]]:
    """Yield `(name, module, parameter)` for every parameter of every module. The names are `without_wrappers`."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            yield without_wrappers(f"{prefix}.{name}" if prefix else name), module, parameter


def logits_of_modules(model: nn.Module) -> dict[nn.Parameter, MaskedLinear]:
    """Map the mask logits of every `MGLU` and `NaiveMGLU` to their layers.

    If a parametrization or `torch.nn.utils.prune` computes the logits, the keys are the parameters from which they are
    computed.
    """
    return {
        parameter: module
        for module in model.modules()
        if isinstance(module, MaskedLinear)
        for parameter in _parameters_of_logits(module)
    }


def _parameters_of_logits(module: MaskedLinear) -> Iterator[nn.Parameter]:
    if parametrize.is_parametrized(module, LOGITS):
        yield from module.parametrizations[LOGITS].parameters()  # type: ignore[union-attr, index]
    for name, parameter in module.named_parameters(recurse=False):
        if name == LOGITS or name.startswith(f"{LOGITS}_"):  # the hooks of torch.nn.utils append a suffix
            yield parameter


def value_now(owner: nn.Module, name: str) -> Tensor:
    """The current value of a module's tensor, where `name` is its attribute or the parameter it is computed from.

    The attribute of a tensor that `torch.nn.utils.prune` has pruned changes only in the forward pass, so its value is
    computed here.
    """
    if isinstance(owner, parametrize.ParametrizationList):
        return owner()
    name = name.removesuffix("_orig")
    original = owner._parameters.get(f"{name}_orig")
    return getattr(owner, name) if original is None else original * getattr(owner, f"{name}_mask", 1)


def selected(model: nn.Module, selection: Selection) -> dict[str, nn.Module]:
    """Map the names of the selected parameters to the modules that hold them.

    Raises:
        TypeError: the selection is neither a list of names nor a function.
        ValueError: a name fits no parameter.
    """
    if isinstance(selection, str) or not (callable(selection) or isinstance(selection, Iterable)):
        raise TypeError(
            f"mask_logits: got {selection!r}, must be a list of names of parameters, or a function "
            "(name, parameter) -> bool"
        )
    every = list(parameters_with_owners(model))
    if callable(selection):
        return {name: owner for name, owner, parameter in every if selection(name, parameter)}
    found: dict[str, nn.Module] = {}
    for pattern in selection:
        if not isinstance(pattern, str):
            raise TypeError(f"mask_logits: got {pattern!r} in the list, must be a str, the name of a parameter")
        fitting = {name: owner for name, owner, _ in every if fnmatchcase(name, pattern)}
        if not fitting:
            known = ", ".join(sorted({name for name, _, _ in every})[:20])
            raise ValueError(f"mask_logits: no parameter has the name {pattern!r}; the model has {known} ...")
        found |= fitting
    return found
