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
from .freezing import refuse_adapters, refuse_managed
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

    Each weight is rounded to the nearest number of the format (`mglu_ops.formats`). It stays a Parameter, in the
    format's dtype and with `requires_grad=False`. The Parameter `weight_scale` holds its scales. x may be float16,
    bfloat16 or float32, and `model.to(dtype)` does not convert quantized weights. Gradients of x are computed, for
    example for adapters in other layers. The weight has no gradient.

    Only `MGLU`, `MGLUExperts` and `ExpertsDown` (the down projections of experts) change, and each expert is quantized
    alone. All other layers stay as they are, such as attention and the down projection of `MGLUFeedForward`; use a
    quantizer of linear layers for them. `skip=["*.down_proj"]` keeps the down projections of experts dense.

    torchao's `quantize_` quantizes an `MGLU` too if its `filter_fn` selects it: to `fp8_row` with
    `Float8WeightOnlyConfig`, to `int8_row` with `Int8WeightOnlyConfig`, and to `int4_group` with `IntxWeightOnlyConfig`
    of torch.int4, `PerGroup(128)` and scales in bfloat16. Other configs are refused, among them `Int4WeightOnlyConfig`,
    because its weights have zero points. An example:

        quantize_(model, Float8WeightOnlyConfig(), filter_fn=lambda module, _: isinstance(module, (nn.Linear, MGLU)))

    With `activation_format="fp8_token"`, each call also rounds x to float8_e4m3fn with one scale per token. This is for
    prompts and large batches on GPUs whose kernels multiply in fp8; other kernels take the rounded x in its own dtype.
    Such a layer is for inference only, and refuses tensors that require a gradient. The down projections of experts do
    not round their input.

    Modules keep their identity, hooks, masks and router. Layers that share a weight share the quantized weight. A layer
    that is quantized to `weight_format` already keeps its weight, and gets the activation format. If there is an error,
    no layer is quantized. An optimizer created before the call still holds the dense weights: create a new one if
    training continues.

    A model on the meta device gets the format without values, so that it can load the state dict of a quantized model
    with `assign=True`.

    Args:
        model: any module; the root may itself be an `MGLU`.
        weight_format: `fp8_row`, `fp8_block`, `int8_row`, or `int4_group`, which needs an even in_features.
        activation_format: `dense` to multiply x itself, or `fp8_token`, for `fp8_row` and `fp8_block`.
        skip: names of modules as in `model.named_modules()`, in which `*` matches anything. An `MGLU` of that name, or
            in a module of that name, keeps its weight. Omit the `_orig_mod` that `torch.compile` inserts into names.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `skip` is not a list of names.
        ValueError: there is no such format, or the two formats do not fit; a name in `skip` matches no `MGLU`; the
            model has no `MGLU`; or a layer that is not in `skip` learns its masks, is a `NaiveMGLU`, has another format
            already, computes its weight from other tensors, has an adapter of its weight or an in_features that the
            format cannot store, is sharded by FSDP, is offloaded by accelerate, or has a weight that is NaN or infinite
            in float32.
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
    refuse_adapters(model, set(layers.values()), "weight", "quantize")
    for name, layer in layers.items():
        if layer.weight_format != chosen.name:
            _check_values(name or "it", layer.weight)
    tied: dict[nn.Parameter, list[StoredLinear]] = {}
    for layer in layers.values():
        if layer.weight_format != chosen.name:
            tied.setdefault(layer.weight, []).append(layer)
    while tied:  # pop, so that a dense weight is freed before the next one is quantized
        _store(*tied.popitem(), chosen)
    for layer in layers.values():
        if isinstance(layer, MaskedLinear):
            layer.activation_format = activation_format
    return model


@torch.no_grad()
def dequantize(model: ModelT, *, dtype: torch.dtype | None = None, skip: Iterable[str] = ()) -> ModelT:
    """Undo `quantize`: make quantized weights dense again, in place.

        mglu_ops.dequantize(model)

    Use it to merge adapters into the weights, or to change the format. Each weight becomes a dense Parameter with
    `requires_grad=True`: the stored numbers times their scales, rounded to `dtype`. `weight_scale` becomes None, and
    `weight_format` and `activation_format` become `dense`. The precision that `quantize` has lost stays lost. In
    float32, quantizing the result to the same format gives the same stored bits.

    Modules keep their identity, hooks, masks and router. Layers that share a weight share the dense one. Layers with a
    dense weight do not change. If there is an error, no layer changes. An optimizer created before the call does not
    train the new weights. On the meta device, weights have no values.

    Args:
        model: any module; the root may itself be an `MGLU`.
        dtype: the dtype of the dense weights: float16, bfloat16, float32 or float64. None takes the dtype of the first
            floating-point parameter that is neither quantized nor a scale, such as an embedding. If the model has no
            such parameter, None takes torch's default dtype.
        skip: names of modules that stay quantized, as in `quantize`.

    Returns:
        `model`, the same object.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `skip` is not a list of names.
        ValueError: `dtype` is none of these; a name in `skip` matches no `MGLU`; the model has no `MGLU`; or a
            quantized layer that is not in `skip` computes its weight from other tensors, has another weight's scales,
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
    while tied:  # pop, so that a stored weight is freed before the next one is made dense
        (stored, scale), own = tied.popitem()
        assert scale is not None
        weight = nn.Parameter(dequantized(get_format(own[0].weight_format), stored, scale, dtype))
        for layer in own:
            layer.weight, layer.weight_scale, layer.weight_format = weight, None, "dense"
            if isinstance(layer, MaskedLinear):
                layer.activation_format = "dense"
    return model


def _dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of the first floating-point parameter that is neither quantized nor a scale, or torch's default."""
    stored = {
        parameter
        for module in model.modules()
        if isinstance(module, StoredLinear) and module.weight_format != "dense"
        for parameter in (module.weight, module.weight_scale)
    }
    others = (one.dtype for one in model.parameters() if one not in stored and one.dtype in FLOATING)
    return next(others, torch.get_default_dtype())


def _layers(model: nn.Module, skip: Iterable[str]) -> dict[str, StoredLinear]:
    """Map names to the layers that are not in `skip`. A layer with several names has the first one."""
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
    """Check that a layer can be quantized. All layers are checked before the first one is quantized."""
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
    own: Tensor = getattr(layer.weight, "to_local", lambda: layer.weight)()  # the local part of a DTensor
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
    """Check that all weights are finite in float32, because otherwise their scales would not be finite."""
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
