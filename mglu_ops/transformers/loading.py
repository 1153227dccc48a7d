"""Checks checkpoints while Transformers loads them, and refuses missing masks or masks in the wrong form or dtype."""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightRenaming, rename_source_key

from .. import notices
from ..checks import FLOATING
from ..formats import check_scale, get_format
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
"""The dtypes of masks, stored weights and scales, each with its name in safetensors files."""


class _Stored(NamedTuple):
    """A tensor of a checkpoint, whose values may not have been read yet."""

    key: str
    dtype: str
    shape: list[int]
    values: Any
    """A Tensor, or a slice object of safetensors, whose values `values[:]` reads from the file."""


def check_tensors(
    model: PreTrainedModel,
    state_dict: Mapping[str, Any] | None,
    files: Iterable[str] | None,
    load_config: Any,
    source: str,
) -> None:
    """Check the tensors of a checkpoint before Transformers loads them, because its loader accepts wrong tensors.

    The loader casts tensors of wrong dtypes. It compares no shapes if the model has a quantizer. It never compares the
    shapes of tensors that `device_map` places on "disk", since the model does not hold them after loading. Before this
    function looks up a tensor's name, it renames the tensor as the loader does.

    Args:
        model: the model, which may be on the meta device.
        state_dict: the checkpoint, or None for `files`.
        files: the files of the checkpoint.
        load_config: a `LoadStateDictConfig`.
        source: the name of the checkpoint in messages.

    Raises:
        TypeError: packed masks of MGLU layers are not uint8, logits are not floating, or a weight or its scales do not
            have the dtype of the layer's format.
        ValueError: a tensor of an MGLU layer, or of another layer whose shapes the loader does not compare, has another
            shape than the configuration says; or scales are NaN, infinite, negative or 0. A quantizer that is not
            `MGLUQuantizer` must check the shapes of other layers itself.
    """
    layers, targets = _layers(model), model.state_dict(keep_vars=True)
    renamings = [one for one in load_config.weight_mapping or () if isinstance(one, WeightRenaming)]
    quantizer, is_on_disk = load_config.hf_quantizer, "disk" in (load_config.device_map or {}).values()
    if quantizer is None:
        are_all_compared = is_on_disk and not load_config.ignore_mismatched_sizes
    else:
        are_all_compared = quantizer.quantization_config.quant_method == METHOD
    for stored in _tensors(state_dict, files or ()):
        name, _ = rename_source_key(stored.key, renamings, [], model.base_model_prefix, targets)
        layer = layers.get(_owner(_short(name, model)))
        if layer is not None and _is_of_linear_quantizer(name, layer, stored):
            continue
        if layer is not None:
            _check_dtype(name, stored, layer, source)
        target = targets.get(name)
        if isinstance(target, Tensor) and (layer is not None or are_all_compared):
            expected = list(getattr(target, "ds_shape", target.shape))  # DeepSpeed empties the tensors that it divides
            if stored.shape != expected:
                raise ValueError(
                    f"{source}: {stored.key} has shape {stored.shape}, but the configuration says {expected}; check "
                    "hidden_size, n_masks, intermediate_size and in mixtures also the number and the sizes of experts "
                    "(ignore_mismatched_sizes does not hold for MGLU layers and quantized models)"
                )
        if layer is not None and layer.weight_format != "dense" and name.endswith(f".{SCALE}"):
            check_scale(stored.values[:], f"{source}: {stored.key}")


def check_loaded(model: PreTrainedModel, info: Any, source: str) -> None:
    """Check the `LoadStateDictInfo` of Transformers' loader, before Transformers initialises missing tensors at random.

    Raises:
        ValueError: weights or masks of an MGLU are not in the checkpoint; the checkpoint has a layer, or tensors of an
            MGLU or of its feed-forward layer, that the model does not have; or packed masks have padding that is not 0.
    """
    layers = _layers(model)
    if missing := sorted(key for key in info.missing_keys if _owner(_short(key, model)) in layers):
        # Logits or packed masks of layers that the model lacks do not explain why its own masks are missing.
        unexpected = {_short(key, model) for key in info.unexpected_keys}
        telling = {key for key in unexpected if _owner(key) in layers or not key.endswith((LOGITS, PACKED))}
        masked = sum(isinstance(layer, MaskedLinear) for layer in layers.values())
        reason = _reason(telling, len(set(map(_owner, missing))) < masked)
        raise ValueError(f"{source}: has no {_first_of(missing)}; {reason}")
    surplus, unused = _not_in_model(model, info.unexpected_keys)
    if surplus:
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


def check_adapter(model: PreTrainedModel, info: Any, expected: Iterable[str], source: str) -> None:
    """Check that a checkpoint of an adapter has all tensors of MGLU layers that the loader expects in it.

    Raises:
        ValueError: weights or masks are missing. This happens if the adapter has them as `modules_to_save`, which
            PEFT loads and Transformers does not.
    """
    layers = _layers(model)
    keys = set(expected) & set(info.missing_keys)
    if missing := sorted(key for key in keys if _owner(_short(key, model)) in layers):
        raise ValueError(
            f"{source}: Transformers cannot load {_first_of(missing)} of an adapter with modules_to_save; load the "
            "base model, and then the adapter with peft.PeftModel.from_pretrained(base_model, folder)"
        )


def warn_of_quantizer(model: PreTrainedModel, quantizer: Any) -> None:
    """Warn that a quantizer of Transformers, which replaces linear layers, leaves the weights of MGLU layers alone."""
    has_dense = any(layer.weight_format == "dense" for layer in _layers(model).values())
    method = quantizer.quantization_config.quant_method
    if has_dense and method != METHOD:
        notices.warn(
            f"quantization_config: {getattr(method, 'value', method)} quantizes linear layers only, and leaves the "
            "weight of MGLU layers in the dtype of the model; mglu_ops.quantize quantizes those of a frozen model",
            stacklevel=2,
        )


def _tensors(state_dict: Mapping[str, Any] | None, files: Iterable[str]) -> Iterator[_Stored]:
    """Yield the tensors of a checkpoint. The values of a tensor in a file can be read until the next is yielded."""
    for key, value in (state_dict or {}).items():
        if isinstance(value, Tensor):
            yield _Stored(key, str(value.dtype), list(value.shape), value)
    for file in map(str, files if state_dict is None else ()):
        if file.endswith(".safetensors"):
            with safe_open(file, framework="pt") as tensors:
                for key in sorted(tensors.keys()):
                    header = tensors.get_slice(key)
                    yield _Stored(key, header.get_dtype(), header.get_shape(), header)
        elif file.endswith(".bin"):
            # A file that is not a zip archive is of an old version of torch, and cannot be mapped into memory.
            yield from _tensors(torch.load(file, mmap=zipfile.is_zipfile(file), weights_only=True), ())


def _is_of_linear_quantizer(name: str, layer: StoredLinear, stored: _Stored) -> bool:
    """True if a tensor belongs to a router that a quantizer of linear layers stores in its own form."""
    router = getattr(layer, "router", None)
    has_other_router = router is not None and type(router) is not nn.Linear
    return has_other_router and ".router." in name and stored.dtype not in _FLOATING


def _check_dtype(name: str, stored: _Stored, layer: StoredLinear, source: str) -> None:
    """Check the dtype of a tensor of an MGLU layer."""
    (owner, _, tensor_name), dtype = name.rpartition("."), stored.dtype
    chosen = get_format(layer.weight_format)
    of_weight = None if owner.endswith(".router") else chosen.dtype
    expected = {PACKED: torch.uint8, SCALE: chosen.scale_dtype, "weight": of_weight}.get(tensor_name)
    if expected is not None and dtype not in (_NAMES[expected], str(expected)):
        which = "" if tensor_name == PACKED else f" for the weight_format {chosen.name} in quantization_config"
        expected_name = str(expected).removeprefix("torch.")
        raise TypeError(
            f"{source}: {stored.key} has dtype {dtype}, must be {expected_name} ({_NAMES[expected]}){which}"
        )
    if expected is None and tensor_name in ("weight", LOGITS) and dtype not in _FLOATING:
        raise TypeError(
            f"{source}: {stored.key} has dtype {dtype}, must be one of {', '.join(_FLOATING)}; only for a model that "
            "mglu_ops.quantize has quantized, and whose configuration says so in quantization_config, it may differ"
        )


def _not_in_model(model: PreTrainedModel, unexpected: Iterable[str]) -> tuple[list[str], list[str]]:
    """Find the unexpected keys without which the model would compute something else than the saved one.

    Returns:
        The unexpected keys of decoder layers that the model does not have, and the unexpected keys in feed-forward
        layers that the model has. The second list omits keys in linear layers outside of MGLU layers, such as the
        tensors of a quantizer, because Transformers deals with them.
    """
    layers = _layers(model)
    blocks, feed_forwards = ({_part(name, depth) for name in layers} - {""} for depth in (0, 1))
    kinds = set(map(_kind, blocks))
    leaves = {_short(name, model) for name, module in model.named_modules() if not any(module.children())}
    surplus, unused = [], []
    for key in sorted(unexpected):
        name = _short(key, model)
        block, module_name = _part(name, 0), name.rpartition(".")[0]
        if _kind(block) in kinds and block not in blocks:
            surplus.append(key)
        elif _part(name, 1) in feed_forwards and (_owner(name) in layers or module_name not in leaves):
            unused.append(key)
    return surplus, unused


def _layers(model: PreTrainedModel) -> dict[str, StoredLinear]:
    """The layers whose weight may be stored in 8 or 4 bits, by the names that `_short` gives them."""
    return {_short(name, model): one for name, one in model.named_modules() if isinstance(one, StoredLinear)}


def _short(name: str, model: PreTrainedModel) -> str:
    """Remove the decoder's prefix (`model.`) from a name, because a checkpoint and a model may differ in it."""
    return name.removeprefix(f"{model.base_model_prefix}.")


def _owner(key: str) -> str:
    """The name of the layer that has a tensor, directly or in its router."""
    return key.rpartition(".")[0].removesuffix(".router")


def _part(name: str, depth: int) -> str:
    """The parts of a name up to its first number, and `depth` more parts; empty if the name has fewer parts."""
    found = re.match(rf"(.*?\.)?\d+(\.[^.]+){{{depth}}}(?=\.|$)", name)
    return found[0] if found else ""


def _kind(name: str) -> str:
    """A name with `*` in place of numbers, which is equal for all layers of one kind."""
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
"""Maps the end of an unexpected tensor's name to what the tensor tells about the checkpoint, and what to do."""


def _reason(unexpected: set[str], is_in_some_layers: bool) -> str:
    """Say why MGLU tensors are missing, judging by the unexpected keys.

    `is_in_some_layers` is True if some layers have the missing tensors.
    """
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
