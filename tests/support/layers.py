"""Random layers with any routing, size, memory layout and format of weights, and their results in float64.

The routing is an axis: `None` for a layer without experts, "ids" for `experts_forward`, whose tokens have slots with
the id of an expert, and "offs" for `grouped_forward`, whose rows are sorted by expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.formats import ACTIVATION_FORMATS, FORMATS, quantize_activation
from mglu_ops.given import DownGiven, Given
from mglu_ops.masks import unpack
from tests.support import reference
from tests.support.budgets import BUDGET, relative_error

ACTIVATION_NAMES = sorted(ACTIVATIONS)
DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
ROUTINGS = (None, "ids", "offs")
LOADS = ("uniform", "skewed", "one expert", "no expert", "some out of range")
"""How the ids of experts are distributed."""


def pack(masks: Tensor) -> Tensor:
    """Pack bool masks `[..., n_masks, d, h]` without the package's own code."""
    padded = F.pad(masks.to(torch.uint8), (0, -masks.shape[-1] % 8)).unflatten(-1, (-1, 8))
    weights = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=masks.device)
    return (padded * weights).sum(-1, dtype=torch.uint8).movedim(-3, -1).contiguous()


@dataclass(eq=False)
class Layer:
    """The arguments of one call, as in `mglu_ops.given.Given`, and bool masks `[(E,) n_masks, d, h]`."""

    x: Tensor
    weight: Tensor
    masks: Tensor
    packed_masks: Tensor
    activation: str = "silu"
    mask_weights: Tensor | None = None
    weight_scale: Tensor | None = None
    weight_format: str = "dense"
    activation_format: str = "dense"
    expert_ids: Tensor | None = None
    offs: Tensor | None = None

    @property
    def given(self) -> Given:
        return Given(*(getattr(self, name) for name in Given._fields))

    @property
    def logits(self) -> Tensor:
        """float32 logits whose signs are the masks."""
        size = torch.linspace(0, 0.4, self.masks.numel(), device=self.masks.device).view(self.masks.shape)
        return torch.where(self.masks, 0.5, -0.5) + size

    @property
    def has_expert(self) -> Tensor:
        """True for each row of the result that an expert computes, bool `[...]`. All other rows must be zeros."""
        if self.offs is not None:
            return torch.arange(len(self.x), device=self.offs.device) < self.offs[-1]
        ids = self.expert_ids
        if ids is None:
            return torch.ones(self.x.shape[:-1], dtype=torch.bool, device=self.x.device)
        return (ids >= 0) & (ids < len(self.weight))

    def with_(self, **changes: Any) -> Layer:
        """A copy with some fields changed. New `masks` are packed, unless `packed_masks` is given."""
        if "masks" in changes and "packed_masks" not in changes:
            changes["packed_masks"] = pack(changes["masks"])
        return Layer(**(vars(self) | changes))

    def to(self, device: str) -> Layer:
        return self.with_(**{name: t.to(device) for name, t in vars(self).items() if isinstance(t, Tensor)})

    def result_of(self, name: str = "forward", masks: Tensor | None = None) -> Any:
        """The result of `forward`, `forward_ste` or `forward_train`, or of the operator for this layer's routing."""
        given, prefix = self.given, "" if self.offs is None else "grouped_"
        name = "experts_forward" if self.expert_ids is not None else prefix + name
        if masks is None:
            masks = self.logits if name.endswith("_ste") else given.packed_masks
        routing = () if given.routing is None else (given.routing,)
        rest = given[3:8] if name.endswith("_forward") or name == "forward" else given[3:5]
        return getattr(torch.ops.mglu, name)(given.x, given.weight, masks, *routing, *rest)

    def forward(self) -> Tensor:
        return self.result_of("forward")

    def parts(self) -> Iterator[tuple[Layer, Any]]:
        """Each expert as a layer without experts, with the index of its rows in the result."""
        if self.given.routing is None:
            yield self, ...
            return
        ends = [] if self.offs is None else list(pairwise((0, *self.offs.tolist())))
        for expert in range(len(self.weight)):
            where: Any = slice(*ends[expert]) if ends else (self.expert_ids == expert).nonzero(as_tuple=True)
            part = self.with_(
                x=self.x[where if ends else where[0]],
                weight=self.weight[expert],
                masks=self.masks[expert],
                packed_masks=self.packed_masks[expert],
                mask_weights=None if self.mask_weights is None else self.mask_weights[where],
                weight_scale=None if self.weight_scale is None else self.weight_scale[expert],
                expert_ids=None,
                offs=None,
            )
            yield part, where

    def in_parts(self, result: Any, dtype: torch.dtype) -> Tensor:
        """The result in `dtype` if `result(part)` computes each expert's rows. Other rows are zeros."""
        found = torch.zeros(*self.given.leading, self.given.out_features, dtype=dtype, device=self.x.device)
        for part, where in self.parts():
            found[where] = result(part)
        return found

    def exact(self) -> tuple[Tensor, Tensor]:
        """X as it is rounded, and the decoded weight of a layer without experts, in float64."""
        x = self.x.double()
        if self.activation_format != "dense":
            rounded, scales = quantize_activation(self.x)
            x = rounded.double() * scales.double()
        if self.weight_scale is None:
            return x, self.weight.double()
        return x, FORMATS[self.weight_format].dequantize(self.weight, self.weight_scale, torch.float64)

    def oracle(self) -> Tensor:
        """The float64 result, summed mask by mask to save memory."""

        def result(part: Layer) -> Tensor:
            x, weight = part.exact()
            total = x.new_zeros(*x.shape[:-1], len(weight))
            for i, mask in enumerate(part.masks):
                weights = None if part.mask_weights is None else part.mask_weights[..., i : i + 1]
                total += reference.forward(x, weight, mask[None], part.activation, weights)
            return total

        return self.in_parts(result, torch.float64)

    def sorted_by_expert(self) -> tuple[Layer, Tensor]:
        """A layer with a row for each slot, sorted by expert, and the flat index of each row's slot."""
        ids, experts = self.expert_ids, len(self.weight)
        assert ids is not None
        of_slots = torch.where(self.has_expert, ids, experts).flatten()
        pairs = torch.argsort(of_slots, stable=True)
        offs = torch.bincount(of_slots, minlength=experts)[:experts].cumsum(0).int()
        weights = None if self.mask_weights is None else self.mask_weights.flatten(0, 1)[pairs]
        x = self.x[pairs // ids.shape[1]]
        return self.with_(x=x, mask_weights=weights, expert_ids=None, offs=offs), pairs


def route(tokens: int, top_k: int, experts: int, loads: str, generator: torch.Generator) -> Tensor:
    """Expert ids `[tokens, top_k]`; `loads` is an entry of `LOADS`."""
    random = torch.rand(tokens, top_k, generator=generator, device=generator.device)
    if loads == "skewed":
        random = random**4
    ids = (random * experts).long()
    if loads == "one expert":
        ids[:] = experts - 1
    elif loads == "no expert":
        ids = torch.where(ids % 2 == 0, -1 - ids, experts + ids)
    elif loads == "some out of range":
        wrong = torch.rand(tokens, top_k, generator=generator, device=generator.device) < 0.3
        ids = torch.where(wrong, 2 * experts * ids - 1, ids)
    return ids


def make_layer(
    leading: tuple[int, ...] = (5,),
    in_features: int = 24,
    out_features: int = 10,
    n_masks: int = 3,
    *,
    routing: str | None = None,
    experts: int = 4,
    top_k: int = 2,
    loads: str = "uniform",
    index_dtype: torch.dtype = torch.int64,
    activation: str = "silu",
    dtype: torch.dtype = torch.float32,
    density: float = 0.5,
    weighted: bool = False,
    mask_weights_dtype: torch.dtype | None = None,
    weight_format: str = "dense",
    activation_format: str = "dense",
    seed: int = 0,
    device: str = "cpu",
) -> Layer:
    """A layer of normally distributed numbers, scaled so that gates and values have a variance of about 1.

    With a routing, `leading` is the number of tokens, each with `top_k` slots. What kernels must not read is NaN: x of
    tokens without an expert, and mask weights of slots without one. `weighted` adds mask weights in x's dtype, or in
    float32 with experts.
    """
    generator, stored = torch.Generator(device).manual_seed(seed), FORMATS[weight_format]
    sizes = (out_features, in_features)
    of_experts, slots = ((), leading) if routing is None else ((experts,), (*leading, top_k))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    x, weight, scale = normal(*leading, in_features).to(dtype), normal(*of_experts, *sizes), None
    weight /= max(in_features, 1) ** 0.5
    if stored.is_dense:
        weight = weight.to(dtype)
    elif routing is None:
        weight, scale = stored.quantize(weight)
    else:
        weight, scale = (torch.stack(part) for part in zip(*map(stored.quantize, weight), strict=True))
    masks = torch.rand(*of_experts, n_masks, *sizes, generator=generator, device=device) < density
    mask_weights = None
    if weighted or mask_weights_dtype is not None:
        mask_weights = torch.rand(*slots, n_masks, generator=generator, device=device)
        mask_weights = mask_weights.to(mask_weights_dtype or (dtype if routing is None else torch.float32))
    layer = Layer(x, weight, masks, pack(masks), activation, mask_weights, scale, weight_format, activation_format)
    if routing is None:
        return layer
    layer.expert_ids = route(*leading, top_k, experts, loads, generator).to(index_dtype)
    x[~layer.has_expert.any(1)] = torch.nan
    if mask_weights is not None:
        mask_weights[~layer.has_expert] = torch.nan
    return layer if routing == "ids" else layer.sorted_by_expert()[0]


def make_down(layer: Layer, weight_format: str = "dense", dtype: torch.dtype = torch.float32) -> DownGiven:
    """Random arguments of `experts_down` for a layer's ids. y and expert weights are NaN in slots without an expert."""
    ids, stored, (experts, _, d, h) = layer.expert_ids, FORMATS[weight_format], layer.masks.shape
    assert ids is not None
    generator = torch.Generator().manual_seed(1)
    y = torch.randn(*ids.shape, d, generator=generator).to(layer.x.dtype)
    y[~layer.has_expert] = torch.nan
    pairs = [stored.quantize(one) for one in torch.randn(experts, h, d, generator=generator) / d**0.5]
    weight = torch.stack([one for one, _ in pairs])
    scale = None if stored.is_dense else torch.stack([one for _, one in pairs])  # type: ignore[misc]
    weight = weight.to(y.dtype) if stored.is_dense else weight
    expert_weights = torch.rand(ids.shape, generator=generator).to(dtype)
    expert_weights[~layer.has_expert] = torch.nan
    return DownGiven(y, weight, ids, expert_weights, scale, weight_format)


def down_oracle(given: DownGiven) -> Tensor:
    """The float64 result of `experts_down`."""
    y, weight, ids, expert_weights, scale, name = given
    result = torch.zeros(len(y), weight.shape[1], dtype=torch.float64, device=y.device)
    for expert, stored in enumerate(weight):
        exact = FORMATS[name].dequantize(stored, None if scale is None else scale[expert], torch.float64)
        tokens, k = (ids == expert).nonzero(as_tuple=True)
        terms = expert_weights[tokens, k, None].double() * (y[tokens, k].double() @ exact.t())
        result.index_add_(0, tokens, terms)
    return result


OPS = ("pack_masks", "pack_logits", "unpack_masks", "forward", "forward_ste", "forward_train", "backward")
OPS_OF_EXPERTS = ("pack_expert_logits", "experts_forward", "experts_down", "experts_down_backward")
OPS_OF_EXPERTS += ("grouped_forward", "grouped_forward_ste", "grouped_forward_train", "grouped_backward")


def routing_of(op: str) -> str | None:
    return "offs" if op.startswith("grouped_") else "ids" if "expert" in op else None


def arguments_of(op: str, layer: Layer) -> dict[str, Any]:
    """The arguments of operator `op` for a layer of its routing, by name. The partials of `backward` are random."""
    generator = torch.Generator().manual_seed(1)
    x, kind = layer.x, op.removeprefix("grouped_")
    if op == "pack_masks":
        return {"masks": layer.masks}
    if op in ("pack_logits", "pack_expert_logits"):
        return {"mask_logits": layer.logits}
    if op == "unpack_masks":
        return {"packed_masks": layer.packed_masks, "in_features": x.shape[-1]}
    if "down" in op:
        down = {key: value for key, value in make_down(layer)._asdict().items() if "weight_" not in key}
        grad = torch.randn(len(x), layer.masks.shape[-1], generator=generator).to(x.dtype)
        return down if op == "experts_down" else {"grad_output": grad, **down, "needs": [True, True, True]}
    if op == "experts_forward":
        return {key: value for key, value in layer.given._asdict().items() if key != "offs"}
    masks = {"mask_logits": layer.logits} if kind == "forward_ste" else {"packed_masks": layer.packed_masks}
    args = {"x": x, "weight": layer.weight, **masks, **({} if layer.offs is None else {"offs": layer.offs})}
    if kind != "backward":
        return args | {"activation": layer.activation, "mask_weights": layer.mask_weights}
    leading, d, n_masks = x.shape[:-1], layer.given.out_features, layer.given.n_masks
    rows = n_masks + 1 if layer.mask_weights is None else 2 * n_masks + 1
    grad_output = torch.randn(*leading, d, generator=generator).to(x.dtype)
    partials = torch.randn(*leading, rows, d, generator=generator).to(x.dtype)
    mask_weights_dtype = None if layer.mask_weights is None else layer.mask_weights.dtype
    dtypes = {"logits_dtype": torch.float32, "mask_weights_dtype": mask_weights_dtype}
    return {"grad_output": grad_output, **args, "partials": partials, "needs": [True, True], **dtypes}


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


def assert_within_condition(result: Tensor, layer: Layer) -> None:
    """Assert that each element is within the budget, relative to the sum of the absolute values of all terms.

    Unlike the relative error of the whole tensor, this bound also holds for single elements in which terms cancel. Rows
    without an expert must be zeros.
    """
    assert result.shape == (*layer.given.leading, layer.given.out_features)
    assert not result[~layer.has_expert].count_nonzero()
    for part, where in layer.parts():
        x, weight = part.exact()
        total = x.abs() @ weight.abs().T
        mask_weights = part.mask_weights
        terms = len(part.masks) if mask_weights is None else mask_weights.double().sum(-1, keepdim=True)
        limit = BUDGET[result.dtype] * terms * total * (total + 1) + torch.finfo(result.dtype).tiny
        assert ((result[where].double() - part.oracle()).abs() <= limit).all()


def leaf(tensor: Tensor | None) -> Tensor | None:
    """A copy that requires a gradient, with 0 for NaN."""
    return None if tensor is None else torch.nan_to_num(tensor.detach()).clone().requires_grad_()


# --- Weights in 8 and 4 bits -----------------------------------------------------------------------------------------


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
    formats = {"weight_format": weight_format, "activation_format": activation_format}
    layer = make_layer(
        (tokens,), h, d, n_masks, dtype=dtype, mask_weights_dtype=torch.float32, seed=tokens + d, **formats
    )
    return layer.to(device).given, layer.oracle()


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


# --- Memory layouts ---------------------------------------------------------------------------------------------------

LAYOUTS = ("contiguous", "strided", "transposed", "offset", "expanded")
BAND = 4096
"""The number of elements before a tensor that `between` returns, and the number after it."""


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


# --- Strategies -----------------------------------------------------------------------------------------------------

n_masks = st.integers(1, 16)
in_features = st.one_of(st.integers(1, 40), st.sampled_from([8, 16, 24, 64, 150]))
out_features = st.one_of(st.integers(1, 12), st.integers(1, 140))
leading = st.lists(st.integers(1, 4), min_size=0, max_size=3).map(tuple)
layouts = st.sampled_from(LAYOUTS)
seeds = st.integers(0, 2**16)


def examples(count: int) -> settings:
    """Hypothesis settings: `count` examples in a full run. Other profiles scale this number (conftest.py)."""
    full_run = settings.get_profile("ci").max_examples
    return settings(max_examples=max(1, count * settings.default.max_examples // full_run))


@st.composite
def layers(
    draw: st.DrawFn,
    routing: str | None = None,
    *,
    dtypes: tuple[torch.dtype, ...] = DTYPES,
    activation: str | None = None,
    weight_format: str = "dense",
) -> Layer:
    """Draw layers of various sizes, memory layouts, dtypes, activations and formats, and with any loads of experts.

    Only dense layers without experts also have any density of masks, and equal rows.
    """
    is_plain = routing is None and weight_format == "dense"
    packed, dtype = FORMATS[weight_format].packed, draw(st.sampled_from(dtypes))
    formats = [name for name, weights in ACTIVATION_FORMATS.items() if weight_format in weights]
    layer = make_layer(
        draw(leading if routing is None else st.tuples(st.integers(0, 40))),
        packed * -(-draw(in_features) // packed),
        draw(out_features),
        draw(n_masks),
        routing=routing,
        experts=draw(st.integers(1, 9)),
        top_k=draw(st.integers(1, 4)),
        loads=draw(st.sampled_from(LOADS)),
        index_dtype=draw(st.sampled_from([torch.int32, torch.int64])),
        activation=activation or draw(st.sampled_from(ACTIVATION_NAMES)),
        dtype=dtype,
        density=draw(st.sampled_from([0.5, 0.0, 0.1, 0.9, 1.0])) if is_plain else 0.5,
        weighted=draw(st.booleans()),
        weight_format=weight_format,
        activation_format="dense" if dtype is torch.float64 else draw(st.sampled_from(formats)),
        seed=draw(seeds),
    )
    choices = layouts if is_plain else st.sampled_from(LAYOUTS[:-1])  # expanding changes values
    moved = {name: laid_out(getattr(layer, name), draw(choices)) for name in ("x", "weight", "packed_masks")}
    if layer.mask_weights is not None and routing is None:
        moved["mask_weights"] = laid_out(layer.mask_weights, draw(layouts))
    if routing is None:
        moved["masks"] = torch.ops.mglu.unpack_masks(moved["packed_masks"], layer.x.shape[-1])
    return layer.with_(**moved)
