"""The check of `freeze(replace=...)`: a module and its replacement must give the same result for a random x."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .. import notices
from ..accuracy import ERROR_BUDGET
from .experts import MGLUExperts
from .masked_linear import MaskedLinear

_FACTOR = 4
"""How many times the error of one element may exceed `ERROR_BUDGET`, which limits the error of a whole result."""

_ADVICE = (
    "check that it passes the module's activation, weight and router, and masks as the module makes them: "
    "from_parameters takes logits for masks `logits > 0`, and bool masks for others, such as "
    "module.logits.sigmoid() > 0.5"
)


def check_same_results(old: nn.Module, new: nn.Module, name: str, stacklevel: int) -> None:
    """Check that a module and its replacement compute the same in evaluation mode. Warn if they cannot be compared.

    x is `[batch, sequence, in_features]` or `[tokens, in_features]`, in the dtype of the first MGLU layer in `new`. If
    `new` is an `MGLUExperts`, both modules also get random expert ids. Modules on the meta device are not compared.

    Args:
        old: the module.
        new: its replacement.
        name: the name of the module in messages.
        stacklevel: as in `warnings.warn`, counted from the caller of this function.

    Raises:
        ValueError: the results differ by more than rounding, or in their shapes.
    """
    layer = next((module for module in new.modules() if isinstance(module, MaskedLinear)), None)
    if layer is None:
        _warn(name, "it has no MGLU in it, whose in_features is the size of x", stacklevel + 1)
    elif not layer.weight.is_meta:
        try:
            expected, result = _results(old, new, layer)
        except Exception as error:  # user modules raise errors of any type for an x that they do not take
            _warn(name, f"{type(error).__name__}: {error}", stacklevel + 1)
        else:
            _compare(expected, result, name)


def _warn(name: str, reason: str, stacklevel: int) -> None:
    notices.warn(
        f"replace: the results of {name} and of what replaces it were not compared ({reason}); compare those of the "
        "model before and after freeze",
        stacklevel=stacklevel + 1,
    )


@torch.no_grad()
def _results(old: nn.Module, new: nn.Module, layer: MaskedLinear) -> tuple[Tensor, Tensor]:
    """The results of both modules for a random x with three dimensions, or with two if a module does not take three."""
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 4, layer.in_features, generator=generator).to(layer.weight)]
    if isinstance(new, MGLUExperts):
        ids = torch.randint(new.num_experts, (2, 4, 2), generator=generator)
        inputs.append(ids.to(layer.weight.device))
    try:
        return _evaluated(old, *inputs), _evaluated(new, *inputs)
    except Exception:
        inputs = [one.flatten(0, 1) for one in inputs]
        return _evaluated(old, *inputs), _evaluated(new, *inputs)


def _evaluated(module: nn.Module, *inputs: Tensor) -> Tensor:
    """Call a module in evaluation mode, and restore the mode of each submodule afterwards."""
    modes = {part: part.training for part in module.modules()}
    try:
        module.eval()
        result = module(*inputs)
    finally:
        for part, mode in modes.items():
            part.training = mode
    if not isinstance(result, Tensor):
        raise TypeError(f"the result is a {type(result).__name__}, not a tensor")
    return result


def _compare(expected: Tensor, result: Tensor, name: str) -> None:
    if expected.shape != result.shape:
        raise ValueError(
            f"replace: the function for {name} returned a module whose result has shape {list(result.shape)}, must be "
            f"that of {name}, {list(expected.shape)}"
        )
    limit = _FACTOR * _budget(expected)
    expected, result = (y.flatten(0, -2).double() for y in (expected, result))
    is_same = (result == expected) | (result.isnan() & expected.isnan())
    error = (result - expected).abs().masked_fill(is_same, 0)
    # Compare errors with the size of their own output feature, because a wrong mask bit changes only one feature.
    finite = expected.nan_to_num(0, 0, 0)
    size = finite.abs().amax(0) + finite.square().mean().sqrt()
    if not bool((is_same | (error <= limit * size)).all()):
        raise ValueError(
            f"replace: the function for {name} returned a module that computes something else: for a random x, its "
            f"results differ by up to {error.max().item():.3g} from those of {name}, which are up to "
            f"{expected.abs().max().item():.3g}; {_ADVICE}"
        )


def _budget(result: Tensor) -> float:
    dtype = result.dtype
    if dtype is torch.float32 and result.is_cuda and torch.get_float32_matmul_precision() != "highest":
        dtype = torch.float16  # matrix products may round to TF32, which has as many significant bits as float16
    return ERROR_BUDGET.get(dtype, ERROR_BUDGET[torch.float32])
