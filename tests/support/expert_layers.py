"""Random layers of experts and routings, and their results in float64.

The routing `[T, K]` has K slots for each token. A slot has the id of an expert, or an id out of range for no expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from hypothesis import strategies as st
from strategies import ACTIVATION_NAMES, laid_out, layouts, seeds
from torch import Tensor

from mglu_ops.backends import reference
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS, quantize_activation
from mglu_ops.given import DownGiven, Given

ROUTINGS = ("uniform", "skewed", "one expert", "no expert", "some out of range")


@dataclass(frozen=True)
class Experts:
    """The arguments of one call of `experts_forward`, and float64 copies of x and of the dequantized weight."""

    given: Given
    masks: Tensor
    """bool `[E, n_masks, d, h]`."""
    exact_x: Tensor
    exact_weight: Tensor

    @property
    def has_expert(self) -> Tensor:
        """True for each slot with an expert, bool `[T, K]`."""
        ids = self.given.routing
        return (ids >= 0) & (ids < len(self.masks))

    def forward(self) -> Tensor:
        x, weight, packed_masks, *rest, expert_ids, _ = self.given
        return torch.ops.mglu.experts_forward(x, weight, packed_masks, expert_ids, *rest)

    def oracle(self) -> Tensor:
        """The float64 result `[T, K, d]`: the output of each slot's expert, and zeros for slots without an expert."""
        given, ids = self.given, self.given.routing
        result = torch.zeros(*ids.shape, given.out_features, dtype=torch.float64)
        for t, k in self.has_expert.nonzero().tolist():
            expert = int(ids[t, k])
            weights = None if given.mask_weights is None else given.mask_weights[t, k]
            operands = self.exact_x[t], self.exact_weight[expert], self.masks[expert]
            result[t, k] = reference.forward(*operands, given.activation, weights)
        return result


def route(tokens: int, top_k: int, experts: int, routing: str, generator: torch.Generator) -> Tensor:
    """Expert ids `[tokens, top_k]`; `routing` is an entry of `ROUTINGS`."""
    random = torch.rand(tokens, top_k, generator=generator)
    if routing == "skewed":
        random = random**4
    ids = (random * experts).long()
    if routing == "one expert":
        ids[:] = experts - 1
    elif routing == "no expert":
        ids = torch.where(ids % 2 == 0, -1 - ids, experts + ids)
    elif routing == "some out of range":
        ids = torch.where(torch.rand(tokens, top_k, generator=generator) < 0.3, 2 * experts * ids - 1, ids)
    return ids


def make_experts(
    tokens: int = 6,
    top_k: int = 2,
    experts: int = 4,
    in_features: int = 24,
    out_features: int = 10,
    n_masks: int = 3,
    *,
    routing: str = "uniform",
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    index_dtype: torch.dtype = torch.int64,
    weighted: bool = False,
    weight_format: str = "dense",
    activation_format: str = "dense",
    seed: int = 0,
) -> Experts:
    """Random experts.

    The x of tokens without an expert and the mask weights of slots without an expert are NaN, because kernels must not
    read them.
    """
    generator, stored = torch.Generator().manual_seed(seed), FORMATS[weight_format]
    ids = route(tokens, top_k, experts, routing, generator)
    x = torch.randn(tokens, in_features, generator=generator).to(dtype)
    has_no_expert = (ids < 0) | (ids >= experts)
    x[has_no_expert.all(1)] = torch.nan
    dense = torch.randn(experts, out_features, in_features, generator=generator) / in_features**0.5
    weight, scale = dense.to(dtype), None
    exact_weight, exact_x = weight.double(), x.double()
    if not stored.is_dense:
        pairs = [stored.quantize(one) for one in dense]
        weight, scale = (torch.stack(part) for part in zip(*pairs, strict=True))
        exact_weight = torch.stack([stored.dequantize(*one, torch.float64) for one in pairs])
    if activation_format != "dense":
        rounded, scales = quantize_activation(x)
        exact_x = rounded.double() * scales.double()
    masks = torch.rand(experts, n_masks, out_features, in_features, generator=generator) < 0.5
    packed = torch.stack([torch.ops.mglu.pack_masks(one) for one in masks])
    mask_weights = torch.rand(tokens, top_k, n_masks, generator=generator) if weighted else None
    if mask_weights is not None:
        mask_weights[has_no_expert] = torch.nan
    rest = activation, mask_weights, scale, weight_format, activation_format
    given = Given.of_ids(x, weight, packed, ids.to(index_dtype), *rest)
    return Experts(given, masks, exact_x, exact_weight)


def sorted_rows(layer: Experts) -> tuple[Given, Tensor]:
    """Arguments of `grouped_forward` with a row per slot, sorted by expert, and the flat index of each row's slot."""
    given, (top_k, experts) = layer.given, (layer.given.routing.shape[1], len(layer.masks))
    ids = torch.where(layer.has_expert, given.routing, experts).flatten()
    pairs = torch.argsort(ids, stable=True)
    offs = torch.bincount(ids, minlength=experts)[:experts].cumsum(0).int()
    weights = None if given.mask_weights is None else given.mask_weights.flatten(0, 1)[pairs]
    return given._replace(x=given.x[pairs // top_k], mask_weights=weights, expert_ids=None, offs=offs), pairs


def slices(offs: Tensor) -> list[tuple[int, slice]]:
    """Each expert with the slice of its rows."""
    return [(expert, slice(*ends)) for expert, ends in enumerate(pairwise((0, *offs.tolist())))]


def make_down(layer: Experts, weight_format: str = "dense", dtype: torch.dtype = torch.float32) -> DownGiven:
    """Random arguments of `experts_down` for a layer's ids. y and expert weights are NaN in slots without an expert."""
    generator, (experts, _, d, h) = torch.Generator().manual_seed(1), layer.masks.shape
    ids, stored = layer.given.routing, FORMATS[weight_format]
    y = torch.randn(*ids.shape, d, generator=generator).to(layer.given.x.dtype)
    y[~layer.has_expert] = torch.nan
    pairs = [stored.quantize(one) for one in torch.randn(experts, h, d, generator=generator) / d**0.5]
    weight = torch.stack([one for one, _ in pairs])
    scale = None if stored.is_dense else torch.stack([one for _, one in pairs])  # type: ignore[misc]
    weight = weight.to(y.dtype) if stored.is_dense else weight
    expert_weights = torch.rand(ids.shape, generator=generator).to(dtype)
    expert_weights[~layer.has_expert] = torch.nan
    return DownGiven(y, weight, ids, expert_weights, scale, weight_format)


def arguments_of_experts(op: str, layer: Experts) -> dict[str, Any]:
    """The arguments of an operator over experts, by name. The layer has mask weights; the partials are random."""
    given, (rows, _) = layer.given, sorted_rows(layer)
    generator = torch.Generator().manual_seed(1)
    down = {key: value for key, value in make_down(layer)._asdict().items() if "weight_" not in key}
    logits = {"mask_logits": torch.where(layer.masks, 0.5, -0.5)}
    shared = {"x": rows.x, "weight": rows.weight, "offs": rows.offs}
    layers = {**shared, "activation": rows.activation, "mask_weights": rows.mask_weights}
    if op == "experts_down":
        return down
    if op == "experts_down_backward":
        grad_output = torch.randn(len(given.x), given.in_features, generator=generator)
        return {"grad_output": grad_output, **down, "needs": [True, True, True]}
    if op == "pack_expert_logits":
        return logits
    if op == "experts_forward":
        return {key: value for key, value in given._asdict().items() if key != "offs"}
    if op == "grouped_backward":
        grad_output = torch.randn(len(rows.x), given.out_features, generator=generator)
        partials = torch.randn(len(rows.x), 2 * given.n_masks + 1, given.out_features, generator=generator)
        tensors = {"grad_output": grad_output, **shared, "packed_masks": rows.packed_masks, "partials": partials}
        return {**tensors, "needs": [True, True], "logits_dtype": torch.float32, "mask_weights_dtype": torch.float32}
    return {**layers, **(logits if op == "grouped_forward_ste" else {"packed_masks": rows.packed_masks})}


def down_oracle(given: DownGiven) -> Tensor:
    """The float64 result of `experts_down`."""
    y, weight, ids, expert_weights, scale, name = given
    result = torch.zeros(y.shape[0], weight.shape[1], dtype=torch.float64)
    for t, k in ((ids >= 0) & (ids < len(weight))).nonzero().tolist():
        expert = int(ids[t, k])
        exact = FORMATS[name].dequantize(weight[expert], None if scale is None else scale[expert], torch.float64)
        result[t] += expert_weights[t, k].double() * (exact @ y[t, k].double())
    return result


@st.composite
def expert_layers(draw: st.DrawFn, dtypes: tuple[torch.dtype, ...], weight_format: str | None = None) -> Experts:
    """Draw experts of various sizes, memory layouts, formats and routings."""
    name, dtype = weight_format or draw(st.sampled_from(list(FORMATS))), draw(st.sampled_from(dtypes))
    choices = [one for one, formats in ACTIVATION_FORMATS.items() if name in formats]
    choices = choices if dtype is not torch.float64 else ["dense"]
    packed = FORMATS[name].packed
    options: dict[str, Any] = {
        "routing": draw(st.sampled_from(ROUTINGS)),
        "activation": draw(st.sampled_from(ACTIVATION_NAMES)),
        "dtype": dtype,
        "index_dtype": draw(st.sampled_from([torch.int32, torch.int64])),
        "weighted": draw(st.booleans()),
        "weight_format": name,
        "activation_format": draw(st.sampled_from(choices)),
        "seed": draw(seeds),
    }
    layer = make_experts(
        draw(st.integers(0, 40)),
        draw(st.integers(1, 4)),
        draw(st.integers(1, 9)),
        packed * draw(st.integers(1, 150 // packed)),
        draw(st.integers(1, 140)),
        draw(st.integers(1, 16)),
        **options,
    )
    given = layer.given
    moved = {name: laid_out(getattr(given, name), draw(_laid_out)) for name in ("x", "weight", "packed_masks")}
    return Experts(given._replace(**moved), layer.masks, layer.exact_x, layer.exact_weight)


_laid_out = layouts.filter(lambda layout: layout != "expanded")  # expanding changes values
