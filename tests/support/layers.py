"""Random layers, with and without experts, in any memory layout, and their results in float64."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends import reference
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS, quantize_activation
from mglu_ops.given import DownGiven, Given
from mglu_ops.masks import pack, unpack
from tests.support.budgets import relative_error

ACTIVATION_NAMES = sorted(ACTIVATIONS)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
LAYOUTS = ("contiguous", "strided", "transposed", "offset", "expanded")

n_masks = st.integers(1, 16)
in_features = st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 24, 64]))
out_features = st.integers(1, 12)
leading = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**16)


def examples(count: int) -> settings:
    """Hypothesis settings: `count` examples in a full run. Other profiles scale this number (conftest.py)."""
    full_run = settings.get_profile("ci").max_examples
    return settings(max_examples=max(1, count * settings.default.max_examples // full_run))


def laid_out(tensor: Tensor, layout: str) -> Tensor:
    """A copy in another memory layout. The layout `expanded` repeats the first entry of the first dimension."""
    if layout == "strided":
        wide = tensor.new_zeros(*tensor.shape[:-1], 2 * tensor.shape[-1])
        wide[..., ::2] = tensor
        return wide[..., ::2]
    if layout == "transposed" and tensor.dim() > 1:
        return tensor.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "offset":
        flat = tensor.new_zeros(tensor.numel() + 3)
        flat[3:] = tensor.flatten()
        return flat[3:].view(tensor.shape)
    if layout == "expanded" and tensor.dim() > 1:
        return tensor[:1].contiguous().expand_as(tensor)
    return tensor.contiguous()


@dataclass(frozen=True)
class Layer:
    """The arguments of one call, with bool masks and packed masks."""

    x: Tensor
    weight: Tensor
    masks: Tensor
    packed_masks: Tensor
    activation: str
    mask_weights: Tensor | None

    @property
    def logits(self) -> Tensor:
        """float32 logits whose signs are the masks."""
        return torch.where(self.masks, 0.5, -0.5) + torch.linspace(0, 0.4, self.masks.numel()).view(self.masks.shape)

    def forward(self) -> Tensor:
        return torch.ops.mglu.forward(self.x, self.weight, self.packed_masks, self.activation, self.mask_weights)

    def oracle(self) -> Tensor:
        """The float64 result."""
        return reference.forward(self.x, self.weight, self.masks, self.activation, self.mask_weights)

    def with_(self, **changes: object) -> Layer:
        """A copy with some fields changed. New `masks` are packed, unless `packed_masks` is given."""
        if "masks" in changes and "packed_masks" not in changes:
            changes["packed_masks"] = torch.ops.mglu.pack_masks(changes["masks"])
        return replace(self, **changes)


def make_layer(
    leading: tuple[int, ...] = (5,),
    in_features: int = 24,
    out_features: int = 10,
    n_masks: int = 3,
    *,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    density: float = 0.5,
    weighted: bool = False,
    seed: int = 0,
) -> Layer:
    """A layer of normally distributed numbers, scaled so that gates and values have a variance of about 1."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*leading, in_features, generator=generator).to(dtype)
    weight = (torch.randn(out_features, in_features, generator=generator) / in_features**0.5).to(dtype)
    masks = torch.rand(n_masks, out_features, in_features, generator=generator) < density
    mask_weight = torch.rand(*leading, n_masks, generator=generator).to(dtype) if weighted else None
    return Layer(x, weight, masks, torch.ops.mglu.pack_masks(masks), activation, mask_weight)


OPS = ("pack_masks", "pack_logits", "unpack_masks", "forward", "forward_ste", "forward_train", "backward")


def arguments_of(op: str, layer: Layer) -> dict[str, Any]:
    """The arguments of operator `op` for a layer, by name. The partials that `backward` takes are random."""
    if op == "pack_masks":
        return {"masks": layer.masks}
    if op == "pack_logits":
        return {"mask_logits": layer.logits}
    if op == "unpack_masks":
        return {"packed_masks": layer.packed_masks, "in_features": layer.x.shape[-1]}
    masks = {"mask_logits": layer.logits} if op == "forward_ste" else {"packed_masks": layer.packed_masks}
    args = {"x": layer.x, "weight": layer.weight, **masks}
    if op != "backward":
        return args | {"activation": layer.activation, "mask_weights": layer.mask_weights}
    (*leading, _), (out_features, _), n_masks = layer.x.shape, layer.weight.shape, len(layer.masks)
    rows = n_masks + 1 if layer.mask_weights is None else 2 * n_masks + 1
    generator = torch.Generator().manual_seed(1)
    grad_output = torch.randn(*leading, out_features, generator=generator).to(layer.x.dtype)
    partials = torch.randn(*leading, rows, out_features, generator=generator).to(layer.x.dtype)
    mask_weights_dtype = None if layer.mask_weights is None else layer.mask_weights.dtype
    dtypes = {"logits_dtype": torch.float32, "mask_weights_dtype": mask_weights_dtype}
    return {"grad_output": grad_output, **args, "partials": partials, "needs": [True, True], **dtypes}


@st.composite
def layers(draw: st.DrawFn, dtype: torch.dtype | None = None, activation: str | None = None) -> Layer:
    """Draw layers of various sizes, memory layouts, dtypes and activations."""
    layer = make_layer(
        draw(leading),
        draw(in_features),
        draw(out_features),
        draw(n_masks),
        activation=activation or draw(st.sampled_from(ACTIVATION_NAMES)),
        dtype=dtype or draw(st.sampled_from(DTYPES)),
        density=draw(st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0])),
        weighted=draw(st.booleans()),
        seed=draw(seeds),
    )
    packed = laid_out(layer.packed_masks, draw(layouts))
    mask_weight = layer.mask_weights
    return layer.with_(
        x=laid_out(layer.x, draw(layouts)),
        weight=laid_out(layer.weight, draw(layouts)),
        packed_masks=packed,
        masks=torch.ops.mglu.unpack_masks(packed, layer.x.shape[-1]),
        mask_weights=None if mask_weight is None else laid_out(mask_weight, draw(layouts)),
    )


def naive(
    x: Tensor, weight: Tensor, masks: Tensor, activation: str = "silu", mask_weights: Tensor | None = None
) -> Tensor:
    """The layer that the operators replace: Algorithm 2 of the paper, in the dtype of its arguments."""
    act = ACTIVATIONS[activation].forward
    masks = masks if masks.is_floating_point() else masks.to(weight.dtype)
    result = None
    for i, mask in enumerate(masks):
        term = act(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask))
        if mask_weights is not None:
            term = term * mask_weights[..., i : i + 1]
        result = term if result is None else result + term
    return result


def straight_through(logits: Tensor, dtype: torch.dtype) -> Tensor:
    """`logits > 0` in `dtype`, with the gradient of the identity."""
    hard = (logits > 0).to(dtype)
    return hard + (logits - logits.detach()).to(dtype)


# --- Memory layouts ---------------------------------------------------------------------------------------------------

BAND = 4096
"""The number of elements before a tensor that `between` returns, and the number after it."""


def unaligned(tensor: Tensor, offset: int = 1) -> Tensor:
    """A contiguous copy that starts `offset` elements past a multiple of 16 bytes."""
    return tensor.new_empty(tensor.numel() + offset)[offset:].view(tensor.shape).copy_(tensor)


def rows_apart(tensor: Tensor, distance: int = 8) -> Tensor:
    """A copy with `distance` elements between its rows. These elements are NaN or the largest integer."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + distance)
    return tensor.new_full(shape, _poison(tensor))[..., : tensor.shape[-1]].copy_(tensor)


def spaced(tensor: Tensor) -> Tensor:
    """A copy with one element between neighbouring elements. These elements are NaN or the largest integer."""
    return torch.stack((tensor, torch.full_like(tensor, _poison(tensor))), -1)[..., 0]


def transposed(tensor: Tensor) -> Tensor:
    """A copy whose first two dimensions are swapped in memory."""
    return tensor.transpose(0, 1).contiguous().transpose(0, 1)


def mask_major(tensor: Tensor) -> Tensor:
    """A copy of packed masks whose last dimension, the masks, is outermost in memory."""
    return tensor.movedim(-1, 0).contiguous().movedim(0, -1)


def between(tensor: Tensor, fill: float) -> Tensor:
    """A contiguous copy with `BAND` elements of `fill` before and after it."""
    storage = tensor.new_full((tensor.numel() + 2 * BAND,), fill)
    return storage[BAND:-BAND].view(tensor.shape).copy_(tensor)


def bands_of(tensor: Tensor) -> Tensor:
    """The bands around a tensor that `between` returned."""
    storage = tensor.as_strided((tensor.numel() + 2 * BAND,), (1,), tensor.storage_offset() - BAND)
    return torch.cat((storage[:BAND], storage[-BAND:]))


def _poison(tensor: Tensor) -> float:
    if tensor.is_floating_point():
        return float("nan")
    return 1 if tensor.dtype is torch.bool else torch.iinfo(tensor.dtype).max


# --- Weights in 8 and 4 bits ------------------------------------------------------------------------------------------


def forward(*given: Any) -> Tensor:
    """The result of `mglu::forward` for the fields of a `Given`. The fields for experts are left out or None."""
    assert all(routing is None for routing in given[8:])
    return torch.ops.mglu.forward(*given[:8])


def stored_layer(
    weight_format: str,
    dtype: torch.dtype,
    tokens: int,
    d: int,
    h: int,
    n_masks: int,
    device: str = "cpu",
    activation_format: str = "dense",
) -> tuple[Given, Tensor]:
    """The arguments of a random layer with mask weights, and its float64 result from the dequantized x and weight."""
    generator = torch.Generator().manual_seed(tokens + d)
    chosen = FORMATS[weight_format]
    x = torch.randn(tokens, h, generator=generator).to(dtype)
    stored, scale = chosen.quantize(torch.randn(d, h, generator=generator) / h**0.5)
    masks = torch.rand(n_masks, d, h, generator=generator) < 0.5
    weights = torch.rand(tokens, n_masks, generator=generator)
    exact = chosen.dequantize(stored, scale, torch.float64)
    tensors = (None if tensor is None else tensor.to(device) for tensor in (x, stored, pack(masks), weights, scale))
    x_there, stored, packed, weights_there, scale = tensors
    rest = scale, weight_format, activation_format
    given = Given(x_there, stored, packed, "silu", weights_there, *rest)  # type: ignore[arg-type]
    if activation_format != "dense":
        rounded, scales = quantize_activation(x)
        x = rounded.double() * scales.double()
    return given, reference.forward(x, exact, masks, "silu", weights)


def naive_error(given: Given) -> tuple[Tensor, float]:
    """A layer's float64 result, and the relative error of a naive layer that rounds x to fp8 with scale amax / 448."""
    x, scale = given.x.double(), given.weight_scale
    weight = FORMATS[given.weight_format].dequantize(given.weight, scale, torch.float64)
    masks = unpack(given.packed_masks, given.in_features)
    exact = reference.forward(x, weight, masks, given.activation, given.mask_weights)
    scales = x.abs().amax(-1, keepdim=True) / 448
    rounded = (x / scales).to(torch.float8_e4m3fn).double() * scales
    naive = reference.forward(rounded, weight, masks, given.activation, given.mask_weights)
    return exact, relative_error(naive, exact)


class StoredLayers(nn.Module):
    """The sum of several layers: one for each quantized weight format that an activation format allows."""

    def __init__(self, in_features: int, out_features: int, n_masks: int, activation_format: str = "dense") -> None:
        super().__init__()
        self.activation_format = activation_format
        self.formats = [name for name in ACTIVATION_FORMATS[activation_format] if not FORMATS[name].is_dense]
        for name in self.formats:
            weight, scale = FORMATS[name].quantize(torch.randn(out_features, in_features) / in_features**0.5)
            self.register_buffer(name, weight)
            self.register_buffer(f"{name}_scale", scale)
            self.register_buffer(f"{name}_masks", pack(torch.rand(n_masks, out_features, in_features) < 0.5))

    def forward(self, x: Tensor) -> Tensor:
        results = []
        for name in self.formats:
            weight, scale, masks = (getattr(self, name + suffix) for suffix in ("", "_scale", "_masks"))
            layer = x, weight, masks, "gelu", None, scale, name, self.activation_format
            results.append(torch.ops.mglu.forward(*layer))
        return torch.stack(results).sum(0)


def every_stored_value(
    weight_format: str, column: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu", h: int = 32
) -> tuple[Given, Tensor]:
    """A layer with one row for each number that a format can store, and its result for one token.

    A row stores its number in `column`, and 1 in the last column, with scale 3. So its gate is 3 times the number, and
    its value is 3.
    """
    chosen = FORMATS[weight_format]
    octets = torch.arange(16 if chosen.packed == 2 else 256, dtype=torch.uint8)
    one = torch.ones((), dtype=chosen.dtype).view(torch.uint8)
    stored = torch.full((len(octets), h), 8 if chosen.packed == 2 else 0, dtype=torch.uint8)
    stored[:, column], stored[:, -1] = octets, 9 if chosen.packed == 2 else one
    if chosen.packed == 2:
        stored, numbers = stored[:, ::2] | stored[:, 1::2] << 4, octets.float() - 8
    else:
        assert chosen.dtype is not None
        stored, numbers = stored.view(chosen.dtype), octets.view(chosen.dtype).float()
    x, masks = torch.zeros(1, h, dtype=dtype), torch.zeros(1, len(octets), h, dtype=torch.bool)
    x[:, [column, -1]], masks[:, :, column] = 1, True
    scale = torch.full(chosen.scale_shape(len(octets), h), 3.0, dtype=chosen.scale_dtype)
    tensors = (tensor.to(device) for tensor in (x, stored, pack(masks), scale))
    x, stored, packed, scale = tensors
    expected = (9 * numbers).to(dtype).to(device)
    return Given(x, stored, packed, "identity", None, scale, weight_format), expected


# --- Experts ----------------------------------------------------------------------------------------------------------

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
