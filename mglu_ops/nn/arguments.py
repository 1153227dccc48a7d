"""Checks of constructor arguments. Each error names the argument, what it was and what it must be."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from ..checks import FLOATING
from ..formats import WeightFormat, get_format
from ..masks import MAX_MASKS

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
    """Check that a weight with that many columns can be stored in a format."""
    if in_features % weight_format.packed:
        raise ValueError(
            f"weight_format: got {weight_format.name!r} with in_features={in_features}, which must be a multiple of "
            f"{weight_format.packed} for it"
        )


def check_rows_of_ranks(name: str, rows: int, ranks: int, weight_format: str) -> None:
    """Check that every rank gets the same number of rows, and whole blocks of rows that share their scales."""
    _check_of_ranks(name, rows, ranks, weight_format, get_format(weight_format).rows, "rows")


def check_columns_of_ranks(name: str, columns: int, ranks: int, weight_format: str) -> None:
    """Check that every rank gets the same number of columns, and whole groups of columns that share their scales."""
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


def check_model(model: object) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, must be a torch.nn.Module")


def check_weight_and_masks(weight: Tensor, masks: Tensor, leading: Sequence[str] = ()) -> None:
    """Check a weight `[out_features, in_features]`, and logits or bool masks `[n_masks, out_features, in_features]`.

    Both have the sizes called `leading` before these. Masks without them may lack n_masks.
    """
    before = "".join(f"{name}, " for name in leading)
    rank = len(leading) + 2
    for name, tensor, ranks, also, form in (
        ("weight", weight, (rank,), (), f"[{before}out_features, in_features]"),
        (
            "masks",
            masks,
            (rank + 1,) if leading else (rank, rank + 1),
            (torch.bool,),
            f"[{before}n_masks, out_features, in_features]",
        ),
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
    """Check a router. The sizes of one that is not an `nn.Linear`, such as an adapter around it, are not known."""
    if not isinstance(router, nn.Module):
        raise TypeError(f"router: got {type(router).__name__}, must be an nn.Linear")
    if isinstance(router, nn.Linear) and (router.in_features, router.out_features) != (in_features, n_masks):
        raise ValueError(f"router: got {router!r}, must be nn.Linear({in_features}, {n_masks})")


def as_parameter(tensor: Tensor) -> nn.Parameter:
    """The tensor itself if it is a Parameter, else a Parameter that shares its memory."""
    return tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor.detach(), tensor.requires_grad)
