"""`quantize` stores the weights of frozen layers in 8 or 4 bits, for inference."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import TypeVar

import torch
from torch import Tensor, nn

from ..formats import FORMATS, WeightFormat, check_activation_format, get_format
from .arguments import check_columns, check_columns_of_ranks, check_model
from .freezing import refuse_managed
from .mask_logits import without_wrappers
from .masked_linear import MaskedLinear
from .mglu import MGLU
from .stored_linear import StoredLinear, quantized

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
            sharded by FSDP or is offloaded by accelerate.
    """
    check_model(model)
    chosen = get_format(weight_format)
    if chosen.is_dense:
        allowed = ", ".join(one.name for one in FORMATS.values() if not one.is_dense)
        raise ValueError(f"weight_format: got {weight_format!r}, must be one of {allowed}")
    check_activation_format(activation_format, weight_format)
    layers = _layers(model, skip)
    for name, layer in layers.items():
        _check_layer(name or "it", layer, chosen)
    refuse_managed(model, set(layers.values()), "weight", "quantize")
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
    if layer._parameters.get("weight") is None:
        raise ValueError(
            f"model: {name} computes its weight from other tensors (torch.nn.utils.parametrize or prune); remove them "
            "first, leaving the weight"
        )
    own: Tensor = getattr(layer.weight, "to_local", lambda: layer.weight)()  # what this rank holds of a DTensor
    try:
        check_columns(chosen, layer.in_features)
        check_columns_of_ranks("in_features", layer.in_features, layer.weight.shape[-1] // own.shape[-1], chosen.name)
    except ValueError as error:
        raise ValueError(f"model: {name}: {error}; name it in skip") from None


def _store(weight: nn.Parameter, layers: list[StoredLinear], chosen: WeightFormat) -> None:
    """Give layers that share a weight the same stored weight and scales."""
    stored, scale = (
        None if tensor is None else nn.Parameter(tensor, requires_grad=False) for tensor in quantized(chosen, weight)
    )
    assert stored is not None
    for layer in layers:
        layer.weight, layer.weight_scale, layer.weight_format = stored, scale, chosen.name
