"""The MGLU projection on the fused operators."""

from __future__ import annotations

from torch import Tensor

from .. import ops
from .masked_linear import MaskedLinear


class MGLU(MaskedLinear):
    """The gated projection of a Masked Gated Linear Unit (arXiv 2506.23225, eq. 3), without bias.

        y = sum_i route_i(x) * act(x (M_i * W)^T) * (x ((1 - M_i) * W)^T),   i = 1 .. n_masks

    Learnable masks are `M = mask_logits > 0` with the straight-through gradient. Fixed masks are packed, one bit per
    weight and mask (`mglu_ops.masks`). `mglu_ops.freeze` turns learnable masks into fixed ones. With `top_k`, each
    token keeps its `top_k` largest router logits: `route = softmax(top_k(x R^T))`, and 0 for the other masks. Without
    `top_k`, every route is 1.

    The `state_dict` holds `weight`, either `mask_logits` or `packed_masks`, and `router.weight` if there is a router;
    that of `NaiveMGLU` is the same. `load_state_dict` raises an error for packed masks of another shape and for
    packed masks with corrupted padding.

    Args:
        in_features: last size of x, at least 1.
        out_features: last size of the result, at least 1.
        n_masks: number of masks, 1 to 16.
        activation: `silu`, `gelu`, `gelu_tanh`, `relu`, `sigmoid`, `tanh` or `identity`.
        learnable_masks: whether the masks are learned; if False, they are random, fixed and packed.
        top_k: number of masks that a token keeps, 1 to n_masks; None for no router.
        device: device of parameters and buffers; on `meta`, call `to_empty` and `reset_parameters` before use.
        dtype: dtype of weight, mask_logits and router: float16, bfloat16, float32 or float64.

    Attributes:
        weight: Parameter `[out_features, in_features]`, initialised as in `nn.Linear`.
        mask_logits: Parameter `[n_masks, out_features, in_features]`, drawn from 0.01 * N(0, 1); None if fixed.
        packed_masks: buffer `uint8 [out_features, ceil(in_features / 8), n_masks]`; None if learnable.
        router: `nn.Linear(in_features, n_masks, bias=False)`; None without `top_k`.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`, in x's dtype or under autocast in autocast's.

        Raises:
            TypeError: the dtype of x is not that of weight.
            ValueError: x is on another device than weight, or its last size is not in_features.
        """
        route_weights = self.route_weights(x)
        if self.packed_masks is None:
            return ops.forward_ste(x, self.weight, self.mask_logits, self.activation, route_weights)[0]
        return ops.forward(x, self.weight, self.packed_masks, self.activation, route_weights)
