"""Fits the layers of an MGLU model to a trained SwiGLU model, one after the other, on hidden states of real text.

`mglu_ops.nn.fitting` fits a layer. Here, layers may be wider than the teacher's, and masks may have structure 2:4.

If the converted layer is wider, the neurons with the largest errors are split in two of half the output each. Their
masks favour the gate in one half and the value in the other.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.decoder import Block
from benchmarks.language_model import LanguageModel
from benchmarks.learning.mixture import GLUExperts, Mixture
from benchmarks.learning.structure import two_of_four
from mglu_ops.activations import get_activation
from mglu_ops.nn import GLU, MGLU, MGLUExperts
from mglu_ops.nn.conversion import GatedUnit
from mglu_ops.nn.experts import route
from mglu_ops.nn.fitted_conversion import fit_experts
from mglu_ops.nn.fitting import FREE, Fit, Rows, Sample, Structure, alternation, covariance_of, fit, sensitivities
from mglu_ops.nn.masked_linear import LOGITS_STD

SPLIT = 4.0
"""The factor by which a half of a split neuron favours its gate or its value."""


@torch.no_grad()
def fit_model(
    model: LanguageModel, teacher: LanguageModel, tokens: Tensor, last: str, structure: str = "free"
) -> list[dict[str, float]]:
    """Fit each feed-forward layer of an MGLU model to the layer of its teacher. Copy all other parameters.

    Args:
        model: the model, with MGLU layers that have learned masks and no router; changed in place.
        teacher: the SwiGLU model.
        tokens: the text of the sample, int64 `[sequences, length]`.
        last: the last step of the fit, one of STEPS.
        structure: the structure of the masks, a key of STRUCTURES.

    Returns:
        For each layer, the error `E |y' - y|^2 / E |y|^2` of conversion by magnitude and after each step.
    """
    kept = {name: one for name, one in teacher.state_dict().items() if ".projection." not in name}
    kept = {name: one for name, one in kept.items() if not name.endswith(".down.weight")}
    model.load_state_dict(kept, strict=False)
    rotation = model.cosine[: tokens.shape[1]], model.sine[: tokens.shape[1]]
    x, errors = model.embedding(tokens), []
    for block, own in zip(teacher.blocks, model.blocks, strict=True):
        assert isinstance(block, Block)
        assert isinstance(own, Block)
        x = torch.cat([part + block.attention(block.attention_norm(part), rotation) for part in x.split(8)])
        normed = block.projection_norm(x).flatten(0, 1)
        teacher_layer = block.projection
        if isinstance(teacher_layer, Mixture):
            assert isinstance(own.projection, Mixture)
            errors.append(fit_mixture(own.projection, teacher_layer, normed))
            with torch.autocast(x.device.type, torch.bfloat16):  # as in training; grouped products want 16 bits
                x = x + own.projection(normed).view_as(x)
            continue
        assert isinstance(teacher_layer, GLU)
        assert isinstance(own.projection, MGLU)
        assert teacher_layer.gate_proj is not None
        sample = Sample(normed, block.down(teacher_layer(normed)), get_activation(teacher_layer.activation))
        gate, value = teacher_layer.gate_proj.weight, teacher_layer.up_proj.weight
        rows = Rows(gate, value, block.down.weight, *sensitivities(gate, value, sample))
        layer, of = fit_layer(rows, sample, own.projection, last, STRUCTURES[structure])
        own.projection.weight.copy_(layer.weight)
        assert own.projection.mask_logits is not None
        own.projection.mask_logits.copy_(torch.where(layer.masks, LOGITS_STD, -LOGITS_STD))
        own.down.weight.copy_(layer.down)
        x = x + F.linear(layer.neurons(normed, sample.act), layer.down).view_as(x)
        errors.append(of)
    return errors


def fit_mixture(own: Mixture, teacher: Mixture, x: Tensor) -> dict[str, float]:
    """Fit a mixture's experts to its teacher's experts, and copy the router. Return the mean errors of experts."""
    assert isinstance(own.projection, MGLUExperts)
    assert isinstance(teacher.projection, GLUExperts)
    assert teacher.projection.up_proj is not None
    own.router.load_state_dict(teacher.router.state_dict())
    _, ids = route(teacher.router(x), teacher.active, norm_topk_prob=True)
    matrices = teacher.projection.gate_proj.weight, teacher.projection.up_proj.weight, teacher.down.weight
    unit = GatedUnit(*matrices, own.projection.activation)
    weight, masks, down, errors = fit_experts(unit, x, own.projection.n_masks, ids)
    own.projection.weight.copy_(weight)
    assert own.projection.mask_logits is not None
    own.projection.mask_logits.copy_(torch.where(masks, LOGITS_STD, -LOGITS_STD))
    own.down.weight.copy_(down)
    return errors


def fit_layer(rows: Rows, sample: Sample, layer: MGLU, last: str, structure: Structure) -> tuple[Fit, dict[str, float]]:
    """Fit a layer with the sizes of `layer` to a teacher's neurons, as `fit_model` does."""
    if layer.out_features > len(rows.gate):
        z = sample.act.forward(F.linear(sample.x, rows.gate)) * F.linear(sample.x, rows.value)
        plain = alternation(rows, covariance_of(sample), 1, structure)
        rows = split(rows, plain.neurons(sample.x, sample.act) - z, layer.out_features)
    return fit(rows, sample, layer.n_masks, last, structure)


def split(rows: Rows, errors: Tensor, width: int) -> Rows:
    """Split the neurons with the largest errors in two, so that there are `width`.

    `errors` are `z' - z` `[tokens, d]`. One half weights errors of the gate by SPLIT, the other half weights errors of
    the value.
    """
    count = width - len(rows.gate)
    if count > len(rows.gate):
        raise ValueError(f"width: got {width}, must be at most twice the teacher's {len(rows.gate)}")
    size = errors.square().mean(0) * rows.down.square().sum(0)
    chosen = size.argsort(descending=True)[:count]
    factor = torch.ones_like(size)
    factor[chosen] = 0.5
    down, b = rows.down * factor, rows.b.clone()
    b[chosen] *= SPLIT
    return Rows(
        torch.cat((rows.gate, rows.gate[chosen])),
        torch.cat((rows.value, rows.value[chosen])),
        torch.cat((down, down[:, chosen]), 1),
        torch.cat((rows.a, rows.a[chosen] * SPLIT)),
        torch.cat((b, rows.b[chosen])),
    )


def _pairs_of_shares(gains: Tensor, levels: Tensor) -> Tensor:
    """Shares that are 1, p, 1 - p and 0 in each four columns.

    The gate's gain exceeds the value's gain by most where the share is 1, and by least where it is 0.
    """
    order = (gains[-1] - gains[0]).unflatten(-1, (-1, 4)).argsort(-1, descending=True)
    sorted_gains = gains.unflatten(-1, (-1, 4)).gather(-1, order.expand(len(gains), -1, -1, -1))
    p = levels[(sorted_gains[..., 1] + sorted_gains[..., 2].flip(0)).argmax(0)]
    ranked = torch.stack((torch.ones_like(p), p, 1 - p, torch.zeros_like(p)), -1)
    return torch.empty_like(ranked).scatter_(-1, order, ranked).flatten(-2)


def pairs_of_four(counts: Tensor, n_masks: int) -> Tensor:
    """Masks `[n_masks, d', h]` of structure 2:4 that are 1 `counts` times at each element."""
    masks, left = [], counts
    for _ in range(n_masks):
        masks.append(two_of_four(left))
        left = left - masks[-1].to(left)
    return torch.stack(masks)


STRUCTURES = {"free": FREE, "2:4": Structure(_pairs_of_shares, pairs_of_four, 4)}
"""Name of the structure of masks -> how the fit chooses them."""
