"""The MGLU layer in plain PyTorch: a loop over the masks, as in Algorithm 2 of the paper (arXiv 2506.23225)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..activations import get_activation
from .arguments import check_flags, check_options
from .masked_linear import MaskedLinear, MaskedOptions
from .packed_buffers import check_masks_in_use

if TYPE_CHECKING:
    from typing_extensions import Unpack


class NaiveMGLU(MaskedLinear):
    """`MGLU` in plain PyTorch: two products for each mask, each with a masked copy of the weight.

        y = sum_i r_i(x) * act(x (M_i * W)^T + b_g) * (x ((1 - M_i) * W)^T + b_v),   i = 1 .. n_masks

    `MGLU` explains the symbols other than b_g and b_v. Constructor and `state_dict` are like `MGLU`'s, and there are
    options for variants that no fused operator computes. The layer is a baseline, and an example of code that the
    fusion pass recognises, so nothing in it is tuned. `mglu_ops.freeze` turns the layer into an `MGLU`. A variant that
    `MGLU` lacks stays a `NaiveMGLU`, with packed masks.

    Args:
        in_features, out_features: as in `MGLU`, like all arguments that are not listed here. `weight_format` must be
            `dense`.
        bias: add the biases b_g and b_v, which all masks share.
        mask_gate: mask the gates. If False, a gate is `act(x W^T)`, the paper's ablation 'no gate mask'.
        mask_value: mask the values. If False, a value is `x W^T`, the ablation 'no value mask'. A layer without masks
            on gates and values is `GLU(shared=True)`, and is refused here.

    Attributes:
        gate_bias, value_bias: Parameters `[out_features]`, b_g and b_v, initialised with 0; None without `bias`.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    gate_bias: nn.Parameter | None
    value_bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        mask_gate: bool = True,
        mask_value: bool = True,
        **options: Unpack[MaskedOptions],
    ) -> None:
        check_options(self, options, MaskedOptions)
        check_flags(bias=bias, mask_gate=mask_gate, mask_value=mask_value)
        if not (mask_gate or mask_value):
            raise ValueError("mask_gate, mask_value: got False for both, must be True for one; see GLU(shared=True)")
        if options.get("weight_init") == "leveled" and not (mask_gate and mask_value):
            raise ValueError("weight_init: got 'leveled' without masks on gates and values, must be 'paper'")
        if options.get("weight_format", "dense") != "dense":
            raise ValueError(
                f"weight_format: got {options['weight_format']!r}, must be 'dense' for NaiveMGLU; see MGLU"
            )
        super().__init__(in_features, out_features, **options)
        self.mask_gate, self.mask_value = mask_gate, mask_value
        for name in ("gate_bias", "value_bias"):
            zeros = self.weight.new_zeros(*self.leading, out_features) if bias else None
            self.register_parameter(name, None if zeros is None else nn.Parameter(zeros))

    @property
    def is_mglu(self) -> bool:
        """True if the fused operators compute this layer: it has no biases, and masks on gates and values."""
        return self.mask_gate and self.mask_value and self.gate_bias is None

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise as `MGLU` does, with biases of 0."""
        super().reset_parameters()
        for bias in (getattr(self, "gate_bias", None), getattr(self, "value_bias", None)):
            if bias is not None:
                bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`.

        Raises:
            TypeError, ValueError: as in `MGLU`.
        """
        if not isinstance(x, torch.fx.Proxy):  # a Proxy of torch.fx.symbolic_trace has no values
            self.check_input(x)
        if self.packed_masks is not None:
            check_masks_in_use(self, self.packed_masks)
        return self._project(x, self.mask_weights(x))

    def _project(self, x: Tensor, mask_weights: Tensor | None, expert: int | None = None) -> Tensor:
        """The result of the layer, or of expert number `expert` of a stack of layers."""
        tensors = (self.weight, self.packed_masks, self.gate_bias, self.value_bias)
        weight, packed_masks, gate_bias, value_bias = (
            tensor if tensor is None or expert is None else tensor[expert] for tensor in tensors
        )
        assert weight is not None
        fixed = None if packed_masks is None else torch.ops.mglu.unpack_masks(packed_masks, self.in_features)
        act = get_activation(self.activation).forward
        y: Any = 0
        for i in range(self.n_masks):
            m = self._straight_through(i, expert) if fixed is None else fixed[i].to(weight.dtype)
            gate = F.linear(x, weight * m if self.mask_gate else weight, gate_bias)
            value = F.linear(x, weight * (1 - m) if self.mask_value else weight, value_bias)
            term = act(gate) * value
            y = y + (term if mask_weights is None else mask_weights[..., i : i + 1] * term)
        return y

    def _straight_through(self, i: int, expert: int | None = None) -> Tensor:
        """Return mask i, which is 0 or 1 in the forward pass and has the straight-through gradient of its logits."""
        assert self.mask_logits is not None
        soft = self.mask_logits[i] if expert is None else self.mask_logits[expert, i]
        hard = (soft > 0).to(soft.dtype)
        return (hard - soft).detach() + soft

    def extra_repr(self) -> str:
        if self.is_mglu:
            return super().extra_repr()
        return (
            f"{super().extra_repr()}, bias={self.gate_bias is not None}, mask_gate={self.mask_gate}, "
            f"mask_value={self.mask_value}"
        )
