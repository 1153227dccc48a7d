"""Finds modules that look like MGLU layers but are of other classes, so that functions can warn that they skip them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from torch import nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from .. import notices
from ..masks import MAX_MASKS
from .mask_logits import Selection, logits_of_modules, selected, without_wrappers
from .masked_linear import MaskedLinear


class Lookalike(NamedTuple):
    """A module of a class outside of this package that has a weight `[d, h]` and logits `[n, d, h]`, n from 1 to 16.

    With E experts, the weight is `[E, d, h]` and the logits are `[E, n, d, h]`.
    """

    name: str  # the module's name in the model, without wrappers; empty for the model itself
    cls: type[nn.Module]
    weight: str  # the module's attribute with the weight, or `NAME.weight` for an `nn.Linear` in it
    logits: str  # the module's attribute with the logits
    parameter_name: str  # the parameter that holds the logits, or from which they are computed
    parameter: nn.Parameter

    @property
    def is_of_experts(self) -> bool:
        return self.parameter.dim() == 4


def lookalikes(model: nn.Module) -> list[Lookalike]:
    """Find the modules that look like MGLU layers, with a parameter `[n, d, h]` and a parameter `[d, h]`.

    For experts, both have one more leading dimension. The second parameter may belong to an `nn.Linear` in the module.
    Parameters that `torch.nn.utils.parametrize` or `prune` has renamed also count.
    """
    found = []
    for name, module in model.named_modules():
        if isinstance(module, MaskedLinear):
            continue
        cls, own = parametrize.type_before_parametrizations(module), _parameters_by_attribute(module)
        children = [(key, child) for key, child in module.named_children() if isinstance(child, nn.Linear)]
        weights = {key: p for key, (_, p) in own.items()} | {f"{key}.weight": child.weight for key, child in children}
        pairs = [
            Lookalike(without_wrappers(name), cls, weight, logits, parameter_name, parameter)
            for logits, (parameter_name, parameter) in own.items()
            if (at := parameter.dim() - 3) in (0, 1)  # the dimension of the masks
            and parameter.shape[at] <= MAX_MASKS
            and parameter.is_floating_point()
            for weight, other in weights.items()
            if not is_lazy(other) and other.shape == parameter.shape[:at] + parameter.shape[at + 1 :]
        ]
        found += pairs[:1]
    return found


def _parameters_by_attribute(module: nn.Module) -> dict[str, tuple[str, nn.Parameter]]:
    """Map each attribute of a module to the parameter that determines its value, with the parameter's name."""
    found: dict[str, tuple[str, nn.Parameter]] = {}
    for name, parameter in module.named_parameters(recurse=False):
        if is_lazy(parameter):
            continue
        attribute = name.removesuffix("_orig")
        is_pruned = attribute != name and hasattr(module, f"{attribute}_mask")
        found[attribute if is_pruned else name] = (name, parameter)
    if parametrize.is_parametrized(module):
        for name, parametrizations in module.parametrizations.items():  # type: ignore[union-attr, operator]
            if (original := getattr(parametrizations, "original", None)) is not None:
                found[name] = (f"parametrizations.{name}.original", original)
    return found


def warn_of_lookalikes(
    caller: str, found: Iterable[Lookalike], consequence: Callable[[Lookalike], str], stacklevel: int
) -> None:
    """Warn once for each class of modules that look like MGLU layers.

    The message begins with `caller`, the function that the user called. It ends with the `consequence` for the first
    module of the class: what happens to it, and what to do. `stacklevel` counts from the caller of this function.
    """
    of_class: dict[type[nn.Module], list[Lookalike]] = {}
    for one in found:
        of_class.setdefault(one.cls, []).append(one)
    for cls, all_of_it in of_class.items():
        first, names = all_of_it[0], [one.name or "the model" for one in all_of_it]
        where = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
        experts = "E, " if first.is_of_experts else ""
        notices.warn(
            f"{caller}: {where}: a {cls.__qualname__} looks like an MGLU layer ({first.weight} [{experts}d, h], "
            f"{first.logits} [{experts}n, d, h]) but is not a module of mglu_ops, so {consequence(first)}",
            stacklevel=stacklevel + 1,
        )


def warn_of_unnamed_logits(
    caller: str, model: nn.Module, mask_logits: Selection, consequence: str, stacklevel: int
) -> None:
    """Warn of the lookalikes whose logits are trained and are not in `mask_logits`, as `warn_of_lookalikes` does."""
    named = {owner.get_parameter(name.rpartition(".")[2]) for name, owner in selected(model, mask_logits).items()}
    known = named | logits_of_modules(model).keys()
    found = [one for one in lookalikes(model) if one.parameter.requires_grad and one.parameter not in known]

    def advice(lookalike: Lookalike) -> str:
        name = f"*.{lookalike.parameter_name}" if lookalike.name else lookalike.parameter_name
        return f'{consequence}; if it is one, name its logits: mask_logits=["{name}"]'

    warn_of_lookalikes(caller, found, advice, stacklevel + 1)
