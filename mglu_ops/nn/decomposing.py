"""Writes out the fused operators in an exported program, for exporters that know only torch's operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..activations import get_activation
from ..formats import FORMATS, round_activation
from ..given import Given

if TYPE_CHECKING:
    from torch.export import ExportedProgram


def decompose(program: ExportedProgram) -> ExportedProgram:
    """Write the MGLU layers of an exported program in torch's operators, as in the paper's Algorithm 2.

    Use it for exporters such as ONNX's:

        program = torch.export.export(mglu_ops.freeze(model).eval(), (x,))
        torch.onnx.export(mglu_ops.nn.decompose(program), f="model.onnx")

    Each layer becomes 2 n_masks matrix products with masked copies of the weight, which each call makes from the packed
    masks. This takes more time and memory than the fused operators.

    Args:
        program: the program that `torch.export.export` returned for a model whose masks are fixed or frozen.

    Returns:
        A program without operators of this package. Its results equal those of `program` up to rounding.

    Raises:
        TypeError: `program` is not an `ExportedProgram`.
        ValueError: the masks of a layer are learned, or the model has experts.
    """
    from torch.export import ExportedProgram, default_decompositions  # takes long to import

    if not isinstance(program, ExportedProgram):
        raise TypeError(f"program: got {type(program).__name__}, must be what torch.export.export returns")
    used = {node.target for node in program.graph.nodes}
    if used & {torch.ops.mglu.forward_ste.default, torch.ops.mglu.grouped_forward_ste.default}:
        raise ValueError("program: it has layers with learned masks; call mglu_ops.freeze(model) before torch.export")
    if used & {
        getattr(torch.ops.mglu, name).default for name in ("experts_forward", "grouped_forward", "experts_down")
    }:
        raise ValueError(
            "program: it has experts, must have other MGLU layers only: an expert's rows are found from values, and "
            "would be a loop over all experts in torch's operators"
        )
    return program.run_decompositions({**default_decompositions(), torch.ops.mglu.forward.default: _forward})


def _forward(*args: Any, **kwargs: Any) -> Tensor:
    given = Given(*args, **kwargs)
    x, weight, packed_masks, activation, mask_weights, weight_scale, weight_format, activation_format, *_ = given
    if activation_format != "dense":
        x = round_activation(x)
    weight = FORMATS[weight_format].dequantize(weight, weight_scale, x.dtype)
    act = get_activation(activation).forward
    bits = torch.arange(8, dtype=torch.int32, device=packed_masks.device)
    terms: list[Tensor] = []
    for i, octets in enumerate(packed_masks.to(torch.int32).unbind(-1)):  # the ONNX exporter cannot shift uint8
        masks = (octets.unsqueeze(-1).bitwise_right_shift(bits) & 1).flatten(-2)[:, : weight.shape[1]].to(weight.dtype)
        term = act(F.linear(x, weight * masks)) * F.linear(x, weight * (1 - masks))
        if mask_weights is not None:
            term = term * mask_weights[..., i : i + 1]
        terms.append(term)
    return sum(terms[1:], terms[0])
