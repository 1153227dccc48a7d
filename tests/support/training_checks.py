"""Checks of the kernels of a training step and of whole layers against float64, on any device.

tests/gpu/test_training_backend.py runs them on a GPU, tests/cuda/test_training_steps.py with the emulated kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from budgets import relative_error
from cuda_problem import pack
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cuda.kernels import training_steps as steps

NAMES = ("x", "weight", "logits", "mask_weights")


def unaligned(tensor: Tensor) -> Tensor:
    """A contiguous copy that starts one element past a multiple of 16 bytes."""
    return tensor.new_empty(tensor.numel() + 1)[1:].view(tensor.shape).copy_(tensor)


def rows_apart(tensor: Tensor, distance: int = 8) -> Tensor:
    """A copy whose rows have `distance` elements between them, which hold NaN or 255."""
    shape = (*tensor.shape[:-1], tensor.shape[-1] + distance)
    between = float("nan") if tensor.is_floating_point() else 255
    wide = torch.full(shape, between, dtype=tensor.dtype, device=tensor.device)
    return wide[..., : tensor.shape[-1]].copy_(tensor)


def assert_rounded(found: Tensor, exact: Tensor, what: str, steps: float = 0.51) -> None:
    """Assert that each value is the exact one after one rounding, or within a few more steps of the dtype's precision.

    A value beyond the range of the dtype must be infinite, such as the square of 300 in float16.
    """
    assert found.shape == exact.shape, what
    eps = torch.finfo(found.dtype).eps
    overflows = exact.to(found.dtype).isinf()
    smallest = 1e-5 * float(exact.masked_fill(overflows, 0).abs().amax()) if exact.numel() else 0.0
    exact = torch.where(overflows, exact.sign() * torch.inf, exact)
    torch.testing.assert_close(
        found.double(), exact, rtol=steps * eps, atol=smallest, msg=lambda text: f"{what}: {text}"
    )


# --- The kernels ----------------------------------------------------------------------------------------------------


def check_flip_signs(weight: Tensor, masks: Tensor, *, with_weight: bool = True) -> None:
    found = steps.flip_signs(weight, pack(masks), with_weight=with_weight)
    expected = torch.where(masks, -weight, weight)
    if with_weight:
        expected = torch.cat((weight[None], expected))
    assert torch.equal(found, expected)


def exact_partials(products: Tensor, activation: str, mask_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result, and P, Q_i and (with mask weights) R_i `[tokens, entries, columns]`, in float64 from t and f_i."""
    t, f = products.double().split([1, products.shape[1] - 1], dim=1)
    gate, value = (t - f) / 2, (t + f) / 2
    activated = ACTIVATIONS[activation].forward(gate)
    slope = ACTIVATIONS[activation].backward(torch.ones_like(gate), gate)
    mask_weight = 1.0 if mask_weights is None else mask_weights.double()[..., None]
    terms = activated * value
    by_total = (mask_weight * (slope * value + activated)).sum(1, keepdim=True) / 2
    by_flipped = mask_weight * (activated - slope * value) / 2
    entries = (by_total, by_flipped) if mask_weights is None else (by_total, by_flipped, terms)
    return (mask_weight * terms).sum(1), torch.cat(entries, 1)


def check_partials(
    products: Tensor, dtype: torch.dtype, activation: str, mask_weights: Tensor | None, *, rows_apart: int = 0
) -> None:
    """Check `partials` for products `[tokens, n_masks + 1, columns]`; it runs in place if they have `dtype`."""
    tokens, n_products, columns = products.shape
    n_entries = n_products if mask_weights is None else 2 * n_products - 1
    exact_result, exact = exact_partials(products, activation, mask_weights)
    entries = torch.full((tokens, n_entries, columns + rows_apart), float("nan"), dtype=dtype, device=products.device)
    partials = entries[:, :, :columns]
    if products.dtype is dtype:
        partials[:, :n_products] = products
        products = partials[:, :n_products]
    result = torch.full((tokens, columns + rows_apart), float("nan"), dtype=dtype, device=products.device)
    steps.partials(products, activation, mask_weights, partials, result[:, :columns])
    assert_rounded(result[:, :columns], exact_result, "result")
    assert_rounded(partials, exact, "partials")
    assert bool(entries[:, :, columns:].isnan().all())
    assert bool(result[:, columns:].isnan().all())


def check_scale(grad_output: Tensor, partials: Tensor) -> None:
    """The product of two 16-bit numbers is exact in float32, so that there is one rounding."""
    found = steps.scale(grad_output, partials)
    assert torch.equal(found, (grad_output.float()[:, None] * partials.float()).to(partials.dtype))


def check_weight_gradients(
    weight: Tensor,
    masks: Tensor,
    total: Tensor,
    products: Tensor,
    weight_dtype: torch.dtype | None,
    logits_dtype: torch.dtype | None,
    *,
    in_place: bool = False,
) -> None:
    def output(operand: Tensor, dtype: torch.dtype | None) -> Tensor | None:
        if dtype is None:
            return None
        return operand if in_place else torch.full(operand.shape, float("nan"), dtype=dtype, device=operand.device)

    exact_weight = total.double() + torch.where(masks, -products, products).double().sum(0)
    exact_logits = -2 * weight.double() * products.double()
    grad_weight, grad_logits = output(total, weight_dtype), output(products, logits_dtype)
    given = None if weight_dtype is None else total
    steps.weight_gradients(given, products, weight, pack(masks), grad_weight, grad_logits)
    if grad_weight is not None:
        assert_rounded(grad_weight, exact_weight, "weight")
    if grad_logits is not None:
        assert torch.equal(grad_logits, exact_logits.to(grad_logits.dtype))


def check_mask_weight_gradients(grad_output: Tensor, terms: Tensor, dtype: torch.dtype) -> None:
    found = steps.mask_weight_gradients(grad_output, terms, dtype)
    assert found.dtype is dtype
    assert_rounded(found, (grad_output.double()[:, None] * terms.double()).sum(-1), "mask weights")


# --- Whole layers ---------------------------------------------------------------------------------------------------


@dataclass
class Layer:
    """The arguments of a layer with learned masks, `[..., in_features]`, and the gradient of its result.

    The masks have ones at a fraction `density` of the weights.
    """

    x: Tensor
    weight: Tensor
    logits: Tensor
    mask_weights: Tensor | None
    grad_output: Tensor
    activation: str = "silu"

    @staticmethod
    def random(
        device: str,
        dtype: torch.dtype,
        tokens: Sequence[int],
        d: int,
        h: int,
        n_masks: int,
        *,
        density: float = 0.5,
        logits_dtype: torch.dtype | None = None,
        mask_weights_dtype: torch.dtype | None = None,
        activation: str = "silu",
    ) -> Layer:
        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        ones = torch.rand(n_masks, d, h, device=device) < density
        logits = torch.where(ones, 0.01 + normal(n_masks, d, h).abs(), -0.01 - normal(n_masks, d, h).abs())
        return Layer(
            normal(*tokens, h).to(dtype),
            (normal(d, h) / max(h, 1) ** 0.5).to(dtype),
            logits.to(logits_dtype or dtype),
            None if mask_weights_dtype is None else torch.rand(*tokens, n_masks, device=device).to(mask_weights_dtype),
            normal(*tokens, d).to(dtype),
            activation,
        )

    @property
    def packed_masks(self) -> Tensor:
        return pack(self.logits > 0)

    def in_plain_torch(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The result `y` and all gradients of the naive layer, computed in `dtype`."""
        act = ACTIVATIONS[self.activation].forward
        x, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in (self.x, self.weight))
        masks = (self.logits > 0).to(dtype).requires_grad_()
        term_weights = None if self.mask_weights is None else self.mask_weights.detach().to(dtype).requires_grad_()
        y: Tensor | float = 0.0
        for i in range(len(masks)):
            gate = torch.nn.functional.linear(x, weight * masks[i])
            value = torch.nn.functional.linear(x, weight * (1 - masks[i]))
            term = act(gate) * value
            y = y + (term if term_weights is None else term_weights[..., i : i + 1] * term)
        assert isinstance(y, Tensor)
        inputs = [x, weight, masks] if term_weights is None else [x, weight, masks, term_weights]
        grads = torch.autograd.grad(y, inputs, self.grad_output.to(dtype))
        return {"y": y.detach(), **dict(zip(NAMES, grads, strict=False))}


def assert_as_good_as_naive(found: dict[str, Tensor], layer: Layer, factor: float) -> None:
    """Assert that no error against float64 is larger than `factor` times the naive layer's in 16 bits.

    The naive layer's gradients are rounded to the dtypes of the found ones.
    """
    exact, naive = layer.in_plain_torch(torch.float64), layer.in_plain_torch(layer.x.dtype)
    for name, tensor in found.items():
        allowed = factor * relative_error(naive[name].to(tensor.dtype), exact[name])
        error = relative_error(tensor, exact[name])
        assert error <= allowed, f"{name}: relative error {error:.3g}, allowed {allowed:.3g}"
