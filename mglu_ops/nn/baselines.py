"""The layers that MGLU is compared with: a gated linear unit, and a linear layer with an activation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..activations import get_activation
from .arguments import check_dtype, check_flags, check_sizes, check_x, weight_of_linear


class GLU(nn.Module):
    """`act(x W_g^T + b_g) * (x W_u^T + b_u)`, the gated linear unit; with `silu` it is the projection of SwiGLU.

    With `shared`, gate and value share W and bias. That is the paper's 'SwiGLU (shared)', its ablation without masks.

    Args:
        in_features: last size of x, at least 1.
        out_features: last size of the result, at least 1.
        activation: as in `MGLU`.
        shared: use one product for gate and value.
        bias: add biases to the products.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        gate_proj: `nn.Linear(in_features, out_features, bias)`, W_g and b_g; None if shared.
        up_proj: `nn.Linear(in_features, out_features, bias)`, W_u and b_u.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str = "silu",
        *,
        shared: bool = False,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, out_features, activation, bias, dtype)
        check_flags(shared=shared)
        super().__init__()
        self.activation = activation
        self.gate_proj = None if shared else nn.Linear(in_features, out_features, bias, device, dtype)
        self.up_proj = nn.Linear(in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        for projection in (self.gate_proj, self.up_proj):
            if projection is not None:
                projection.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`.

        Raises:
            TypeError: x is not a tensor, or without autocast its dtype differs from the weights'.
            ValueError: x is on another device than the weights, or its last size is not in_features.
        """
        _check_x(x, self.up_proj)
        value = self.up_proj(x)
        gate = value if self.gate_proj is None else self.gate_proj(x)
        return get_activation(self.activation).forward(gate) * value

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}, shared={self.gate_proj is None}"


class LU(nn.Module):
    """`act(x W^T + b)`, a linear layer with an activation and without a gate. The arguments are as in `GLU`.

    Attributes:
        up_proj: `nn.Linear(in_features, out_features, bias)`, W and b.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str = "gelu",
        *,
        bias: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, out_features, activation, bias, dtype)
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        self.up_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`.

        Raises:
            TypeError, ValueError: as in `GLU`.
        """
        _check_x(x, self.up_proj)
        return get_activation(self.activation).forward(self.up_proj(x))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _check(in_features: int, out_features: int, activation: str, bias: bool, dtype: torch.dtype | None) -> None:
    check_sizes(in_features=in_features, out_features=out_features)
    get_activation(activation)
    check_flags(bias=bias)
    check_dtype(dtype)


def _check_x(x: object, projection: nn.Module) -> None:
    if not isinstance(x, torch.fx.Proxy):  # a Proxy of torch.fx.symbolic_trace has no values
        check_x(x, weight_of_linear(projection), getattr(projection, "in_features", None))
