"""Checks of a checkpoint while Transformers loads it: masks are loaded whole and in their own form, or refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn

from .. import notices
from ..checks import FLOATING
from ..formats import get_format
from ..nn.masked_linear import LOGITS, PACKED, MaskedLinear
from ..nn.packed_buffers import check_masks
from ..nn.stored_linear import SCALE, StoredLinear
from .quantization import METHOD

_FLOATING = ("F16", "BF16", "F32", "F64", *map(str, FLOATING))
"""The names of floating dtypes in files of safetensors, and in torch."""

_NAMES = {
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
}
"""The names in files of safetensors of the dtypes of masks, stored weights and their scales."""


def check_loaded(model: nn.Module, info: Any, source: str) -> None:
    """Check a `LoadStateDictInfo` of the loader of Transformers, before it draws at random what is missing.

    Raises:
        ValueError: weights or masks of an MGLU are not in the checkpoint, or have other sizes; the checkpoint has an
            MGLU, or tensors of one, that the model does not have; or packed masks have padding that is not 0.
    """
    layers = _layers(model)
    for key, found, expected in sorted(info.mismatched_keys):
        if _is_of(key, layers):
            raise ValueError(
                f"{source}: {key} has shape {list(found)}, but the configuration says {list(expected)}; check "
                "hidden_size, n_masks, intermediate_size and in mixtures also the number and the sizes of experts "
                "(ignore_mismatched_sizes does not hold for MGLU layers)"
            )
    if missing := sorted(key for key in info.missing_keys if _is_of(key, layers)):
        # Masks of other layers than the model's do not tell in which form its own are.
        telling = {key for key in info.unexpected_keys if _is_of(key, layers) or not key.endswith((LOGITS, PACKED))}
        masked = sum(isinstance(layer, MaskedLinear) for layer in layers.values())
        reason = _reason(telling, len(set(map(_owner, missing))) < masked)
        raise ValueError(f"{source}: has no {_first_of(missing)}; {reason}")
    kinds = set(map(_kind, layers))
    unused = sorted(key for key in info.unexpected_keys if _is_of(_kind(key), kinds))
    if surplus := [key for key in unused if not _is_of(key, layers)]:
        raise ValueError(
            f"{source}: has {_first_of(surplus)}, of a layer that the configuration does not have; check "
            "num_hidden_layers: without its last layers, the model would compute something else than the saved one"
        )
    if unused:
        raise ValueError(
            f"{source}: has {_first_of(unused)}, which the configuration does not mention: without it, the model would "
            "compute something else than the saved one; check mask_top_k, learnable_masks and quantization_config"
        )
    try:
        check_masks(model)
    except ValueError as error:
        raise ValueError(f"{source}: {str(error).removeprefix('model: ')}") from None


def check_adapter(model: nn.Module, info: Any, expected: Iterable[str], source: str) -> None:
    """Check that a checkpoint of an adapter has all tensors of MGLU layers that the loader expects in it.

    Raises:
        ValueError: weights or masks are missing. Transformers loads no `modules_to_save`, unlike PEFT.
    """
    layers = _layers(model)
    if missing := sorted(key for key in set(expected) & set(info.missing_keys) if _is_of(key, layers)):
        raise ValueError(
            f"{source}: Transformers cannot load {_first_of(missing)} of an adapter with modules_to_save; load the "
            "base model, and then the adapter with peft.PeftModel.from_pretrained(base_model, folder)"
        )


def check_dtypes(
    model: nn.Module, state_dict: Mapping[str, Any] | None, files: Iterable[str] | None, source: str
) -> None:
    """Check the dtypes of a checkpoint's MGLU layers, because the loader would cast wrong ones silently.

    Raises:
        TypeError: packed masks are not uint8, logits are not floating, or a weight or its scales do not have the dtype
            of the layer's format.
    """
    layers = _layers(model)
    kinds = set(map(_kind, layers))
    for key, dtype in _dtypes(state_dict, files or ()):
        if not _is_of(_kind(key), kinds):
            continue
        weight_format = next((layer.weight_format for name, layer in layers.items() if _is_of(key, [name])), "dense")
        stored, (owner, _, tensor_name) = get_format(weight_format), key.rpartition(".")
        of_weight = None if owner.endswith(".router") else stored.dtype
        expected = {PACKED: torch.uint8, SCALE: stored.scale_dtype, "weight": of_weight}.get(tensor_name)
        if expected is not None and dtype not in (_NAMES[expected], str(expected)):
            which = "" if key.endswith(PACKED) else f" for the weight_format {weight_format} in quantization_config"
            name = str(expected).removeprefix("torch.")
            raise TypeError(f"{source}: {key} has dtype {dtype}, must be {name} ({_NAMES[expected]}){which}")
        if expected is None and key.endswith((".weight", LOGITS)) and dtype not in _FLOATING:
            raise TypeError(
                f"{source}: {key} has dtype {dtype}, must be one of {', '.join(_FLOATING)}; only for a model that "
                "mglu_ops.quantize has quantized, and whose configuration says so in quantization_config, it may differ"
            )


def shapes_of_layers(model: nn.Module) -> dict[str, torch.Size]:
    """The shapes of the tensors of a model's MGLU layers, without their routers, by their names."""
    return {
        f"{name}.{key}": tensor.shape
        for name, module in _layers(model).items()
        for tensors in (module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for key, tensor in tensors
    }


def warn_of_quantizer(model: nn.Module, quantizer: Any) -> None:
    """Warn that a quantizer of Transformers, which replaces linear layers, leaves the weights of MGLU layers alone."""
    has_dense = any(layer.weight_format == "dense" for layer in _layers(model).values())
    method = quantizer.quantization_config.quant_method
    if has_dense and method != METHOD:
        notices.warn(
            f"quantization_config: {getattr(method, 'value', method)} quantizes linear layers only, and leaves the "
            "weight of MGLU layers in the dtype of the model; mglu_ops.quantize quantizes those of a frozen model",
            stacklevel=2,
        )


def _dtypes(state_dict: Mapping[str, Any] | None, files: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names and dtypes of the tensors of a checkpoint; reads only the header of a safetensors file."""
    if state_dict is not None:
        yield from ((key, str(value.dtype)) for key, value in state_dict.items() if isinstance(value, Tensor))
        return
    for file in map(str, files):
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                yield from ((key, tensors.get_slice(key).get_dtype()) for key in tensors.keys())  # noqa: SIM118 (no dict)
        elif file.endswith(".bin"):
            yield from _dtypes(torch.load(file, map_location="meta", weights_only=True), ())


def _layers(model: nn.Module) -> dict[str, StoredLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, StoredLinear)}


def _owner(key: str) -> str:
    """The name of the layer to which a tensor, or the router that has it, belongs."""
    return key.rpartition(".")[0].removesuffix(".router")


def _is_of(key: str, layers: Iterable[str]) -> bool:
    """Whether a key names a tensor of one of the layers, or of its router.

    A checkpoint's keys may begin with the name of the decoder in a language model where the model's do not, or the
    other way round.
    """
    owner = f".{_owner(key)}"
    return any(owner.endswith(f".{name}") or f".{name}".endswith(owner) for name in layers)


def _kind(name: str) -> str:
    """A name with `*` for its numbers, which layers of the same kind share."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _first_of(keys: list[str]) -> str:
    return f"{keys[0]} and {len(keys) - 1} more" if len(keys) > 1 else keys[0]


_SWIGLU = (
    "it is a SwiGLU model: load it with its own class, and make an MGLU model of it, which must be trained, with "
    "mglu_ops.transformers.from_swiglu(model, n_masks=...)"
)
_REASONS = {
    LOGITS: "it holds the logits of masks, and the configuration says learnable_masks=False: load it with "
    "learnable_masks=True, then pack the masks with mglu_ops.transformers.freeze(model)",
    PACKED: "it holds packed masks, and the configuration says learnable_masks=True: load it with "
    "learnable_masks=False; logits cannot be made from packed masks",
    **dict.fromkeys(("gate_proj.weight", "w1.weight", "gate_up_proj"), _SWIGLU),
}
"""What a tensor that the model does not have tells about the kind of a checkpoint, and what to do."""


def _reason(unexpected: set[str], is_in_some_layers: bool) -> str:
    """Why a checkpoint with these unexpected tensors lacks others, which it may have for some layers."""
    found = {name for key in unexpected for name in _REASONS if key.endswith(f".{name}")}
    if is_in_some_layers and found & {LOGITS, PACKED}:
        return (
            "some layers hold packed masks and others the logits of masks, which no configuration describes: pack "
            "the logits of the others with torch.ops.mglu.pack_logits, and save the model with learnable_masks=False"
        )
    for name, reason in _REASONS.items():
        if name in found:
            return reason
    return "masks and weights of MGLU layers are never drawn at random when a checkpoint is loaded"
