"""The activation functions of MGLU: their names, their codes in compiled code, and their derivatives.

`ACTIVATIONS` is the only list of activations in Python. `csrc` has the same list with the formulas of the CPU and CUDA
kernels. A test compares the lists, and runs each activation on every backend.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor

_aten = torch.ops.aten


@dataclass(frozen=True)
class Activation:
    """A pointwise function and its vector-Jacobian product."""

    code: int
    """The value of the activation in the enumerations of `csrc/cuda/activation.cuh` and `csrc/cpu/activation.h`."""
    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    """The function `(grad_output, x) -> grad_x`."""


# A dict, because Dynamo cannot guard a MappingProxyType in the graphs that vLLM captures.
ACTIVATIONS: Mapping[str, Activation] = {
    "silu": Activation(0, F.silu, lambda grad, x: _aten.silu_backward(grad, x)),
    "gelu": Activation(1, F.gelu, lambda grad, x: _aten.gelu_backward(grad, x)),
    "gelu_tanh": Activation(
        2,
        lambda x: F.gelu(x, approximate="tanh"),
        lambda grad, x: _aten.gelu_backward(grad, x, approximate="tanh"),
    ),
    "relu": Activation(3, torch.relu, lambda grad, x: _aten.threshold_backward(grad, x, 0)),
    "sigmoid": Activation(4, torch.sigmoid, lambda grad, x: _aten.sigmoid_backward(grad, torch.sigmoid(x))),
    "tanh": Activation(5, torch.tanh, lambda grad, x: _aten.tanh_backward(grad, torch.tanh(x))),
    "identity": Activation(6, lambda x: x, lambda grad, x: grad),
    "relu_squared": Activation(
        7,
        lambda x: torch.relu(x).square(),
        lambda grad, x: _aten.threshold_backward(grad * (2 * torch.relu(x)), x, 0),
    ),
}


def get_activation(name: str) -> Activation:
    """The activation called `name`.

    Raises:
        ValueError: `name` is not in `ACTIVATIONS`.
    """
    try:
        return ACTIVATIONS[name]
    except (KeyError, TypeError):
        raise ValueError(f"activation: got {name!r}, must be one of {', '.join(ACTIVATIONS)}") from None
