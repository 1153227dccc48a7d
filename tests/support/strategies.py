"""Random layers of any size, memory layout, masks and values, and the naive layer to compare with."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends import reference

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
