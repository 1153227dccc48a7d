"""Checks of the arguments of modules. Each error names the argument, its value and the values that it may have."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..checks import FLOATING
from ..formats import WeightFormat, get_format
from ..masks import MAX_MASKS
from ..sizes import same_sizes

WEIGHT_INITS = ("paper", "leveled")


def check_int(name: str, value: object, highest: float, allowed: str) -> None:
    """Check that a value is an int from 1 to `highest`; the message says that it must be `allowed`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= highest:
        raise ValueError(f"{name}: got {value!r}, must be {allowed}")


def check_sizes(**sizes: object) -> None:
    """Check that numbers of features are ints of at least 1."""
    for name, value in sizes.items():
        check_int(name, value, math.inf, "an int of at least 1")


def check_flags(**flags: object) -> None:
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{name}: got {value!r}, must be True or False")


def check_dtype(dtype: torch.dtype | None) -> None:
    if dtype is not None and dtype not in FLOATING:
        raise ValueError(f"dtype: got {dtype!r}, must be None or one of {', '.join(map(str, FLOATING))}")


def check_weight_init(weight_init: object) -> None:
    if weight_init not in WEIGHT_INITS:
        raise ValueError(f"weight_init: got {weight_init!r}, must be one of {', '.join(WEIGHT_INITS)}")


def check_columns(weight_format: WeightFormat, in_features: int) -> None:
    """Check that a format can store weights with `in_features` columns."""
    if in_features % weight_format.packed:
        raise ValueError(
            f"weight_format: got {weight_format.name!r} with in_features={in_features}, which must be a multiple of "
            f"{weight_format.packed} for it"
        )


def check_rows_of_ranks(name: str, rows: int, ranks: int, weight_format: str) -> None:
    """Check that every rank gets the same number of rows, and that no block of rows with one scale is cut."""
    _check_of_ranks(name, rows, ranks, weight_format, get_format(weight_format).rows, "rows")


def check_columns_of_ranks(name: str, columns: int, ranks: int, weight_format: str) -> None:
    """Check that every rank gets the same number of columns, and that no group of columns with one scale is cut."""
    _check_of_ranks(name, columns, ranks, weight_format, get_format(weight_format).columns or 1, "columns")


def _check_of_ranks(name: str, size: int, ranks: int, weight_format: str, together: int, what: str) -> None:
    if size % ranks:
        raise ValueError(f"{name}: got {size}, must be a multiple of the number of ranks, {ranks}")
    if ranks > 1 and size % (ranks * together):
        raise ValueError(
            f"{name}: got {size}, must be a multiple of {ranks * together} with {ranks} ranks and a weight in "
            f"{weight_format}, of which {together} {what} share their scales"
        )


def check_masks(n_masks: int, learnable_masks: object, top_k: object, name_of_top_k: str = "top_k") -> None:
    check_int("n_masks", n_masks, MAX_MASKS, f"an int from 1 to {MAX_MASKS}")
    check_flags(learnable_masks=learnable_masks)
    if top_k is not None:
        check_int(name_of_top_k, top_k, n_masks, f"None or an int from 1 to n_masks={n_masks}")


def check_options(module: nn.Module, options: Mapping[str, object], known: type) -> None:
    """Check the keyword arguments that a constructor passes on, so that the error names the class that the user called.

    Args:
        module: the module whose constructor was called.
        options: the keyword arguments.
        known: a TypedDict with the names of all allowed arguments.

    Raises:
        TypeError: an argument is not in `known`.
    """
    names = known.__optional_keys__  # type: ignore[attr-defined] # a TypedDict has it
    unknown = [name for name in options if name not in names]
    if unknown:
        constructors = [vars(cls)["__init__"] for cls in type(module).__mro__ if "__init__" in vars(cls)]
        parameters = [one for init in constructors for one in inspect.signature(init).parameters.values()]
        allowed = sorted(names | {one.name for one in parameters if one.kind is one.KEYWORD_ONLY})
        raise TypeError(
            f"{type(module).__name__}: got an unknown argument {unknown[0]}={options[unknown[0]]!r}, must be one of "
            f"{', '.join(allowed)}"
        )


def check_x(
    x: object,
    weight: Tensor | None,
    in_features: int | None,
    *,
    takes_dtype: bool = True,
    name: str = "x",
    name_of_size: str = "in_features",
) -> None:
    """Check the input of a layer here, because torch's error for a wrong input would blame the weight.

    Args:
        x: the input.
        weight: the weight; None if it is not known before the layer is called.
        in_features: the required last size of x; None if it is checked elsewhere.
        takes_dtype: require the weight's dtype, unless autocast is enabled.
        name: the name of x in messages.
        name_of_size: the name of `in_features` in messages.

    Raises:
        TypeError: x is not a tensor, or its dtype is not the weight's.
        ValueError: x is not on the weight's device, or its last size is not in_features.
    """
    if not isinstance(x, Tensor):  # torch's own message would contain all values of a list or an array
        raise TypeError(f"{name}: got {'None' if x is None else type(x).__name__}, must be a tensor")
    if weight is not None:
        if x.device != weight.device:
            raise ValueError(f"{name}: got device {x.device}, must be the module's device {weight.device}")
        if takes_dtype and x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
            raise TypeError(f"{name}: got dtype {x.dtype}, must be the module's dtype {weight.dtype}, or use autocast")
    if in_features is not None and not same_sizes(x.shape[-1:], (in_features,)):
        raise ValueError(f"{name}: got shape {list(x.shape)}, must be [..., {name_of_size}] = [..., {in_features}]")


def weight_of_linear(linear: nn.Module | None) -> Tensor | None:
    """The weight of an `nn.Linear`, or None if a call of the module may use another tensor.

    FSDP gathers the weight, accelerate loads it, and adapters change it only when the module is called.
    """
    if type(linear) is not nn.Linear or linear._forward_pre_hooks or "forward" in vars(linear):
        return None
    weight = linear._parameters.get("weight")
    return weight if type(weight) is nn.Parameter and weight.dtype in FLOATING else None


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, must be a torch.nn.Module")


def check_weight_and_masks(weight: Tensor, masks: Tensor, leading: Sequence[str] = ()) -> None:
    """Check a weight `[out_features, in_features]`, and logits or bool masks `[n_masks, out_features, in_features]`.

    Weight and masks begin with the dimensions that `leading` names. If `leading` is empty, `masks` may be a single mask
    `[out_features, in_features]`.
    """
    before = "".join(f"{name}, " for name in leading)
    rank = len(leading) + 2
    ranks_of_masks = (rank + 1,) if leading else (rank, rank + 1)
    for name, tensor, ranks, also, form in (
        ("weight", weight, (rank,), (), f"[{before}out_features, in_features]"),
        ("masks", masks, ranks_of_masks, (torch.bool,), f"[{before}n_masks, out_features, in_features]"),
    ):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: got {type(tensor).__name__}, must be a tensor")
        if tensor.dtype not in (*FLOATING, *also):
            allowed = " or ".join([", ".join(map(str, FLOATING)), *map(str, also)])
            raise TypeError(f"{name}: got dtype {tensor.dtype}, must be one of {allowed}")
        if tensor.dim() not in ranks:
            raise ValueError(f"{name}: got shape {list(tensor.shape)}, must be {form}")
    experts, sizes = weight.shape[:-2], weight.shape[-2:]
    if masks.shape[: len(experts)] != experts or masks.shape[-2:] != sizes:
        expected = ", ".join(map(str, (*experts, "n_masks", *sizes)))
        raise ValueError(
            f"masks: got shape {list(masks.shape)}, must be [{expected}] beside a weight of shape {list(weight.shape)}"
        )
    if masks.device != weight.device:
        raise ValueError(f"masks: got device {masks.device}, must be weight's device {weight.device}")


def check_router(router: object, in_features: int, n_masks: int) -> None:
    """Check a router. An adapter around an `nn.Linear` is accepted, and its sizes are not checked."""
    if not isinstance(router, nn.Module):
        raise TypeError(f"router: got {type(router).__name__}, must be an nn.Linear")
    if isinstance(router, nn.Linear) and (router.in_features, router.out_features) != (in_features, n_masks):
        raise ValueError(f"router: got {router!r}, must be nn.Linear({in_features}, {n_masks})")


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """Return the tensor itself if it is a Parameter, and otherwise a Parameter that shares its memory."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach(), tensor.requires_grad)
