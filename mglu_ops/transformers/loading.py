"""Checks of a checkpoint while Transformers loads it: masks are loaded whole and in their own form, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from ..nn.masked_linear import LOGITS, MaskedLinear
from ..nn.packed_buffers import check_masks

_UINT8 = ("U8", "torch.uint8")


def check_loaded(model: nn.Module, info: Any, source: str) -> None:
    """Check what the loader of Transformers reports, before it draws at random what is missing.

    Args:
        model: the model, into which the checkpoint was loaded.
        info: the loader's `LoadStateDictInfo`.
        source: the name of the checkpoint, for the messages.

    Raises:
        ValueError: weights or masks of an MGLU are not in the checkpoint, or have other sizes; or packed masks have
            padding that is not 0.
    """
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MaskedLinear)}
    for key, found, expected in sorted(info.mismatched_keys):
        if _is_of(key, layers):
            raise ValueError(
                f"{source}: {key} has shape {list(found)}, but the configuration says {list(expected)}; check "
                "hidden_size, intermediate_size and n_masks (ignore_mismatched_sizes does not hold for MGLU layers)"
            )
    missing = sorted(key for key in info.missing_keys if _is_of(key, layers))
    if missing:
        others = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise ValueError(f"{source}: has no {missing[0]}{others}; {_reason(set(info.unexpected_keys))}")
    try:
        check_masks(model)
    except ValueError as error:
        raise ValueError(f"{source}: {str(error).removeprefix('model: ')}") from None


def check_dtypes(state_dict: Mapping[str, Any] | None, files: Iterable[str] | None, source: str) -> None:
    """Check that the packed masks of a checkpoint are uint8, because the loader would cast others silently.

    Raises:
        TypeError: packed masks have another dtype.
    """
    for key, dtype in _dtypes_of_masks(state_dict, files or ()):
        if dtype not in _UINT8:
            raise TypeError(f"{source}: {key} has dtype {dtype}, must be uint8 (U8)")


def _dtypes_of_masks(state_dict: Mapping[str, Any] | None, files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names and dtypes of the packed masks of a checkpoint; of a file of safetensors, only the head is read."""
    if state_dict is not None:
        yield from ((key, str(state_dict[key].dtype)) for key in filter(_names_masks, state_dict))
        return
    for file in map(str, files):
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                yield from ((key, tensors.get_slice(key).get_dtype()) for key in filter(_names_masks, tensors.keys()))
        elif file.endswith(".bin"):
            yield from _dtypes_of_masks(torch.load(file, map_location="meta", weights_only=True), ())


def _names_masks(key: str) -> bool:
    return key.endswith(".packed_masks")


def _is_of(key: str, layers: Mapping[str, nn.Module]) -> bool:
    """Whether a key names a tensor of one of the layers, or of its router."""
    owner = key.rpartition(".")[0]
    return owner in layers or owner.removesuffix(".router") in layers


def _reason(unexpected: set[str]) -> str:
    """What the tensors that the checkpoint has besides tell about its kind, and what to do."""

    def has(ending: str) -> bool:
        return any(key.endswith(ending) for key in unexpected)

    if has(f".{LOGITS}"):
        return (
            "it holds the logits of masks, and the configuration says learnable_masks=False: load it with "
            "learnable_masks=True, then pack the masks with mglu_ops.transformers.freeze(model)"
        )
    if has(".packed_masks"):
        return (
            "it holds packed masks, and the configuration says learnable_masks=True: load it with "
            "learnable_masks=False; logits cannot be made from packed masks"
        )
    if has(".gate_proj.weight"):
        return (
            "it is a SwiGLU model: load it with its own class, and make an MGLU model of it, which must be trained, "
            "with mglu_ops.transformers.from_swiglu(model, n_masks=...)"
        )
    return "masks and weights of MGLU layers are never drawn at random when a checkpoint is loaded"
