"""The layers that MGLU is compared with: a gated linear unit with two weights, and a linear layer with activation."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..activations import get_activation
from .arguments import check_activation, check_dtype, check_size


class GLU(nn.Module):
    """`act(x W_g^T) * (x W_u^T)`: the gated linear unit; with `silu`, the projection of SwiGLU. No bias.

    Args:
        in_features: last size of x, at least 1.
        out_features: last size of the result, at least 1.
        activation: as in `MGLU`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Attributes:
        gate_proj: `nn.Linear(in_features, out_features, bias=False)`, W_g.
        up_proj: `nn.Linear(in_features, out_features, bias=False)`, W_u.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str = "silu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, out_features, activation, dtype)
        super().__init__()
        self.activation = activation
        self.gate_proj = nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype)
        self.up_proj = nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.gate_proj.reset_parameters()
        self.up_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`."""
        return get_activation(self.activation).forward(self.gate_proj(x)) * self.up_proj(x)

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


class LU(nn.Module):
    """`act(x W^T)`: the linear unit without a gate. No bias.

    Args:
        in_features: last size of x, at least 1.
        out_features: last size of the result, at least 1.
        activation: as in `MGLU`.
        device: device of the parameter.
        dtype: dtype of the parameter.

    Attributes:
        up_proj: `nn.Linear(in_features, out_features, bias=False)`, W.

    Raises:
        ValueError: an argument is out of range or of another type.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        activation: str = "gelu",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        _check(in_features, out_features, activation, dtype)
        super().__init__()
        self.activation = activation
        self.up_proj = nn.Linear(in_features, out_features, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        self.up_proj.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        """Map x `[..., in_features]` to `[..., out_features]`."""
        return get_activation(self.activation).forward(self.up_proj(x))

    def extra_repr(self) -> str:
        return f"activation={self.activation!r}"


def _check(in_features: int, out_features: int, activation: str, dtype: torch.dtype | None) -> None:
    check_size("in_features", in_features)
    check_size("out_features", out_features)
    check_activation(activation)
    check_dtype(dtype)
