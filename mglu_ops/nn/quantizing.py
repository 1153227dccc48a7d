"""`quantize` stores the weights of frozen layers in 8 or 4 bits, for inference; `dequantize` makes them dense again."""

from __future__ import annotations

import math
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..checks import FLOATING
from ..formats import FORMATS, WeightFormat, check_activation_format, get_format
from ..tensors import is_readable, whole
from .arguments import check_columns, check_columns_of_ranks, check_dtype, check_model
from .freezing import refuse_managed
from .mask_logits import without_wrappers
from .masked_linear import MaskedLinear
from .mglu import MGLU
from .stored_linear import StoredLinear, dequantized, quantized

ModelT = TypeVar("ModelT", bound=nn.Module)


@torch.no_grad()
def quantize(
    model: ModelT, weight_format: str, *, activation_format: str = "dense", skip: Iterable[str] = ()
) -> ModelT:
    """Store the weights of all MGLU layers in `model` in 8 or 4 bits, in place. Call `freeze` first.

        mglu_ops.quantize(mglu_ops.freeze(model), "fp8_row")

    Each weight is rounded to the nearest number that the format has (`mglu_ops.formats`). It stays a Parameter, in the
    format's dtype and with `requires_grad=False`, and the Parameter `weight_scale` holds its scales. x keeps its dtype,
    which may be float16, bfloat16 or float32, and which `model.to(dtype)` may change without touching the quantized
    weights. Gradients of x are computed, for example for adapters of other layers; the weight has no gradient.

    Only `MGLU` changes, and of a mixture of experts `MGLUExperts` and `ExpertsDown`, their down projections. Experts
    are quantized one by one. The down projection of `MGLUFeedForward`, attention and all other layers stay what they
    are, for a quantizer of linear layers. `skip=["*.down_proj"]` leaves the down projections of experts, too.

    torchao's `quantize_` takes only linear layers, unless it is told of others. With `Float8WeightOnlyConfig` and
    `Int8WeightOnlyConfig`, it then quantizes an `MGLU` to `fp8_row` and `int8_row`, and with `IntxWeightOnlyConfig` of
    torch.int4, `PerGroup(128)` and scales in bfloat16 to `int4_group`. Other configs are refused, among them
    `Int4WeightOnlyConfig`, whose weights have zero points:

        quantize_(model, Float8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, (nn.Linear, MGLU)))

    With `activation_format="fp8_token"`, x is rounded too, at each call: to float8_e4m3fn with one scale a token. This
    is for prompts and large batches, on GPUs whose kernels multiply in fp8; other kernels take the rounded x in its own
    dtype. Such a layer is for inference only, and refuses tensors that require a gradient. The down projections of
    experts do not round their input.

    Modules keep their identity, hooks, masks and router. Layers that share a weight share the quantized one. A layer
    that has this format already keeps its weight, and takes the activation format. Either all layers that `skip` does
    not name are quantized, or there is an error and none is. An optimizer created before holds the former weights:
    create a new one if training continues.

    A model on the meta device is quantized without values, to load the state dict of a quantized one with
    `assign=True`.

    Args:
        model: any module; the root may itself be an `MGLU`.
        weight_format: `fp8_row`, `fp8_block`, `int8_row`, or `int4_group`, which needs an even in_features.
        activation_format: `dense` to multiply x itself, or `fp8_token`, for `fp8_row` and `fp8_block`.
        skip: names of modules as in `model.named_modules()`, in which `*` stands for anything. An `MGLU` of that name,
            or in a module of that name, keeps its weight. Names have no `_orig_mod`, which `torch.compile` inserts.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `skip` is not a list of names.
        ValueError: there is no such format, or the two do not go together; a name in `skip` fits no `MGLU`; the model
            has no `MGLU`; or one that `skip` does not name learns its masks, is a `NaiveMGLU`, has another format
            already, computes its weight from other tensors, has an in_features that the format does not take, is
            sharded by FSDP, is offloaded by accelerate, or has a weight that is NaN or infinite in float32.
    """
    check_model(model)
    stored = [one.name for one in FORMATS.values() if not one.is_dense]
    if weight_format not in stored:
        raise ValueError(f"weight_format: got {weight_format!r}, must be one of {', '.join(stored)}")
    chosen = get_format(weight_format)
    check_activation_format(activation_format, weight_format)
    layers = _layers(model, skip)
    for name, layer in layers.items():
        _check_layer(name or "it", layer, chosen)
    refuse_managed(model, set(layers.values()), "weight", "quantize")
    for name, layer in layers.items():
        if layer.weight_format != chosen.name:
            _check_values(name or "it", layer.weight)
    tied: dict[nn.Parameter, list[StoredLinear]] = {}
    for layer in layers.values():
        if layer.weight_format != chosen.name:
            tied.setdefault(layer.weight, []).append(layer)
    while tied:  # so that a dense weight is freed before the next one is quantized
        _store(*tied.popitem(), chosen)
    for layer in layers.values():
        if isinstance(layer, MaskedLinear):
            layer.activation_format = activation_format
    return model


@torch.no_grad()
def dequantize(model: ModelT, *, dtype: torch.dtype | None = None, skip: Iterable[str] = ()) -> ModelT:
    """Make the weights that `quantize` has stored dense again, in place: the way back, for all modules that it changes.

        mglu_ops.dequantize(model)

    Use it to merge adapters into the weights, or to go to another format. Each weight becomes the Parameter
    `[out_features, in_features]`, of experts `[num_experts, out_features, in_features]`, of the products of stored
    numbers and scales, rounded to `dtype`, with `requires_grad=True`. `weight_scale` becomes None, and the formats of
    weight and activations `dense`. What `quantize` has rounded stays rounded.

    In float32, quantizing the result to the same format gives the bits that `quantize` had stored.

    Modules keep their identity, hooks, masks and router. Layers that share a weight share the dense one. Layers with a
    dense weight do not change. Either all layers that `skip` does not name become dense, or there is an error and none
    does. An optimizer created before does not train the new weights. On the meta device, weights have no values.

    Args:
        model: any module; the root may itself be an `MGLU`.
        dtype: float16, bfloat16, float32 or float64, of the dense weights. None for that of the model's first other
            floating-point parameter, such as an embedding; without one, for torch's default dtype.
        skip: names of modules that keep their stored weight, as in `quantize`.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `skip` is not a list of names.
        ValueError: `dtype` is another one; a name in `skip` fits no `MGLU`; the model has no `MGLU`; or a layer with a
            stored weight that `skip` does not name computes its weight from other tensors, has another weight's scales,
            is sharded by FSDP or is offloaded by accelerate.
    """
    check_model(model)
    check_dtype(dtype)
    layers = {name: layer for name, layer in _layers(model, skip).items() if layer.weight_format != "dense"}
    for name, layer in layers.items():
        _check_own_weight(name or "it", layer)
        layer.check_pair(f"model: {name}." if name else "model: ")
    refuse_managed(model, set(layers.values()), "weight", "dequantize")
    dtype = dtype or _dtype_of(model)
    tied: dict[tuple[nn.Parameter, nn.Parameter | None], list[StoredLinear]] = {}
    for layer in layers.values():
        tied.setdefault((layer.weight, layer.weight_scale), []).append(layer)
    while tied:  # so that a stored weight is freed before the next one is made dense
        (stored, scale), own = tied.popitem()
        assert scale is not None
        weight = nn.Parameter(dequantized(get_format(own[0].weight_format), stored, scale, dtype))
        for layer in own:
            layer.weight, layer.weight_scale, layer.weight_format = weight, None, "dense"
            if isinstance(layer, MaskedLinear):
                layer.activation_format = "dense"
    return model


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter other than stored weights and scales, or torch's default."""
    stored = {
        parameter
        for module in model.modules()
        if isinstance(module, StoredLinear) and module.weight_format != "dense"
        for parameter in (module.weight, module.weight_scale)
    }
    others = (one.dtype for one in model.parameters() if one not in stored and one.dtype in FLOATING)
    return next(others, torch.get_default_dtype())


def _layers(model: nn.Module, skip: Iterable[str]) -> dict[str, StoredLinear]:
    """The layers of a model that `skip` does not name, by their first names."""
    if isinstance(skip, str) or not isinstance(skip, Iterable):
        raise TypeError(f"skip: got {skip!r}, must be a list of names of modules")
    every = [
        (without_wrappers(name), module)
        for name, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, StoredLinear)
    ]
    if not every:
        raise ValueError(f"model: got a {type(model).__name__} without an MGLU, must have one whose masks are frozen")
    skipped: set[StoredLinear] = set()
    for pattern in skip:
        if not isinstance(pattern, str):
            raise TypeError(f"skip: got {pattern!r} in the list, must be a str, the name of a module")
        fitting = {one for name, one in every if fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}.*")}
        if not fitting:
            known = ", ".join(name for name, _ in every[:20])
            raise ValueError(f"skip: no MGLU has the name {pattern!r} or is in a module of that name; it has {known}")
        skipped |= fitting
    names = {module: name for name, module in reversed(every) if module not in skipped}
    return {name: module for module, name in reversed(names.items())}


def _check_layer(name: str, layer: StoredLinear, chosen: WeightFormat) -> None:
    """Check that a layer can be quantized, before any layer is."""
    if isinstance(layer, MaskedLinear) and layer.learnable_masks:
        raise ValueError(
            f"model: {name} learns its masks, must be frozen before it is quantized: call mglu_ops.freeze(model) first"
            ", or name it in skip"
        )
    if isinstance(layer, MaskedLinear) and not isinstance(layer, MGLU):
        raise ValueError(
            f"model: {name} is a {type(layer).__name__}, whose loop over the masks takes a dense weight only; name it "
            "in skip"
        )
    if layer.weight_format not in ("dense", chosen.name):
        raise ValueError(
            f"model: {name} is quantized to {layer.weight_format} already, and would be rounded twice; name it in skip,"
            f" or quantize the dense model to {chosen.name}"
        )
    _check_own_weight(name, layer)
    own: Tensor = getattr(layer.weight, "to_local", lambda: layer.weight)()  # what this rank holds of a DTensor
    try:
        check_columns(chosen, layer.in_features)
        check_columns_of_ranks("in_features", layer.in_features, layer.weight.shape[-1] // own.shape[-1], chosen.name)
    except ValueError as error:
        raise ValueError(f"model: {name}: {error}; name it in skip") from None


def _check_own_weight(name: str, layer: StoredLinear) -> None:
    if layer._parameters.get("weight") is None:
        raise ValueError(
            f"model: {name} computes its weight from other tensors (torch.nn.utils.parametrize or prune); remove them "
            "first, leaving the weight"
        )


def _check_values(name: str, weight: Tensor) -> None:
    """Check that all weights are finite in float32, so that their scales are."""
    if weight.is_meta or not is_readable(weight):
        return
    largest = float(whole(torch.linalg.vector_norm(weight, math.inf)).float())
    if not largest < math.inf:
        raise ValueError(
            f"model: {name}.weight: got {largest} in float32, must be finite: other weights share its scale; name it "
            "in skip"
        )


def _store(weight: nn.Parameter, layers: list[StoredLinear], chosen: WeightFormat) -> None:
    """Give layers that share a weight the same stored weight and scales."""
    stored, scale = (
        None if tensor is None else nn.Parameter(tensor, requires_grad=False) for tensor in quantized(chosen, weight)
    )
    assert stored is not None
    for layer in layers:
        layer.weight, layer.weight_scale, layer.weight_format = stored, scale, chosen.name
