"""Checks the kernels of a training step, and whole layers, against float64 on any device.

tests/gpu/test_training_backend.py runs them on a GPU, and tests/cuda/test_training_steps.py with emulated kernels.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from mglu_ops.backends.cuda.kernels import training_steps as steps
from mglu_ops.call import Call
from mglu_ops.given import BackwardGiven, Given
from tests.support.budgets import relative_error
from tests.support.layers import naive, pack, rows_apart, unaligned

NAMES = ("x", "weight", "logits", "mask_weights")


def assert_rounded(found: Tensor, exact: Tensor, what: str) -> None:
    """Assert that each value is the exact value, rounded once.

    Values beyond the dtype's range, such as the square of 300 in float16, must be infinite.
    """
    assert found.shape == exact.shape, what
    eps = torch.finfo(found.dtype).eps
    overflows = exact.to(found.dtype).isinf()
    smallest = 1e-5 * float(exact.masked_fill(overflows, 0).abs().amax()) if exact.numel() else 0.0
    exact = torch.where(overflows, exact.sign() * torch.inf, exact)
    torch.testing.assert_close(
        found.double(), exact, rtol=0.51 * eps, atol=smallest, msg=lambda text: f"{what}: {text}"
    )


def products_of(x: Tensor, weight: Tensor, masks: Tensor) -> Tensor:
    """The products of x with W and, for each mask, with W negated where the mask is 1.

    They are float64 `[tokens, n_masks + 1, out_features]`.
    """
    x, weight = x.double(), weight.double()
    return torch.stack([x @ weight.t(), *(x @ torch.where(mask, -weight, weight).t() for mask in masks)], 1)


def exact_partials(products: Tensor, activation: str, mask_weights: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result and its partial derivatives P, Q_i and (with mask weights) R_i, by autograd in float64.

    The partial derivatives are `[tokens, entries, columns]`; `mglu_ops.ops` defines them.
    """
    products = products.detach().double().requires_grad_()
    t, f = products[:, :1], products[:, 1:]
    weights = torch.ones_like(f) if mask_weights is None else mask_weights.double()[..., None].expand_as(f)
    weights = weights.detach().clone().requires_grad_()
    y = (weights * ACTIVATIONS[activation].forward((t - f) / 2) * ((t + f) / 2)).sum(1)
    entries = torch.autograd.grad(y.sum(), [products] if mask_weights is None else [products, weights])
    return y.detach(), torch.cat(entries, 1)


# --- The kernels ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Steps:
    """Checks the kernels of a training step on one device, with matrices of several shapes.

    Operands are contiguous, or have padding of 8 or fewer elements between rows, or start unaligned.
    """

    device: str
    shapes: Sequence[tuple[int, int]]

    def normal(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, device=self.device).to(dtype)

    def poisoned(self, *shape: int, dtype: torch.dtype) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype, device=self.device)

    def masks(self, *shape: int) -> Tensor:
        return torch.rand(shape, device=self.device) < 0.5

    def flip_signs(self, n_masks: int, dtype: torch.dtype, *, with_weight: bool) -> None:
        for shape in self.shapes:
            weight, masks = self.normal(*shape, dtype=dtype), self.masks(n_masks, *shape)
            expected = torch.cat((weight[None][:with_weight], torch.where(masks, -weight, weight)))
            for w in (weight, rows_apart(weight), rows_apart(weight, 3), unaligned(weight)):
                assert torch.equal(steps.flip_signs(w, pack(masks), with_weight=with_weight), expected)

    def partials(
        self, n_masks: int, dtype: torch.dtype, activation: str, mask_weights_dtype: torch.dtype | None
    ) -> None:
        for (tokens, columns), products_dtype in itertools.product(self.shapes, (torch.float32, dtype)):
            mask_weights = None
            if mask_weights_dtype is not None:
                mask_weights = torch.rand(n_masks, tokens, device=self.device).to(mask_weights_dtype).t()
            products = 2 * self.normal(tokens, n_masks + 1, columns, dtype=products_dtype)
            for distance in (0, 8):
                self._partials_of(products, dtype, activation, mask_weights, distance)

    def partials_of_large_and_small_gates(self, activation: str, dtype: torch.dtype) -> None:
        size = torch.logspace(-4, 1.5, 1024, device=self.device)
        products = torch.stack([size * torch.randn_like(size) for _ in range(3)])[None]
        self._partials_of(products, dtype, activation, None, 0)

    def _partials_of(
        self, products: Tensor, dtype: torch.dtype, activation: str, mask_weights: Tensor | None, distance: int
    ) -> None:
        """Check `partials` for products `[tokens, n_masks + 1, columns]`.

        If the products have `dtype`, the partial derivatives overwrite them.
        """
        tokens, n_products, columns = products.shape
        n_entries = n_products if mask_weights is None else 2 * n_products - 1
        exact_result, exact = exact_partials(products, activation, mask_weights)
        entries = self.poisoned(tokens, n_entries, columns + distance, dtype=dtype)
        result = self.poisoned(tokens, columns + distance, dtype=dtype)
        partials = entries[:, :, :columns]
        if products.dtype is dtype:
            partials[:, :n_products] = products
            products = partials[:, :n_products]
        steps.partials(products, activation, mask_weights, partials, result[:, :columns])
        assert_rounded(result[:, :columns], exact_result, "result")
        assert_rounded(partials, exact, "partials")
        assert bool(entries[:, :, columns:].isnan().all())
        assert bool(result[:, columns:].isnan().all())

    def scale(self, entries: int, dtype: torch.dtype) -> None:
        """Check `scale`, which rounds once: the product of two 16-bit numbers is exact in float32."""
        for tokens, columns in self.shapes:
            grad = self.normal(tokens, columns, dtype=dtype)
            partials = self.normal(tokens, entries, columns, dtype=dtype)
            layouts = [(g, partials) for g in (grad, rows_apart(grad, 3), unaligned(grad), grad[:1].expand_as(grad))]
            layouts += [(grad, rows_apart(partials, distance)) for distance in (8, 5)]
            for g, p in layouts:
                assert torch.equal(steps.scale(g, p), (g.float()[:, None] * p.float()).to(dtype))

    def weight_gradients(
        self, n_masks: int, dtype: torch.dtype, weight_dtype: torch.dtype | None, logits_dtype: torch.dtype | None
    ) -> None:
        """Check gradients in the given dtypes, with separate outputs and in place. A dtype None means no gradient."""
        for shape in self.shapes:
            weight, total = self.normal(*shape, dtype=dtype), self.normal(*shape, dtype=dtype)
            masks, products = self.masks(n_masks, *shape), self.normal(n_masks, *shape, dtype=dtype)
            for w in (weight, rows_apart(weight), unaligned(weight)):
                for t in (total, total.float()):
                    grad_weight = None if weight_dtype is None else self.poisoned(*shape, dtype=weight_dtype)
                    grad_logits = None if logits_dtype is None else self.poisoned(n_masks, *shape, dtype=logits_dtype)
                    _check_weight_gradients(w, masks, t, products, grad_weight, grad_logits)
            if {weight_dtype, logits_dtype} <= {dtype, None}:
                in_place = total if weight_dtype else None, products if logits_dtype else None
                _check_weight_gradients(weight, masks, total, products, *in_place)

    def mask_weight_gradients(self, n_masks: int, dtype: torch.dtype, mask_weights_dtype: torch.dtype) -> None:
        for tokens, columns in self.shapes:
            grad = self.normal(tokens, columns, dtype=dtype)
            terms = self.normal(tokens, 2 * n_masks + 1, columns, dtype=dtype)[:, n_masks + 1 :]
            found = steps.mask_weight_gradients(grad, terms, mask_weights_dtype)
            assert found.dtype is mask_weights_dtype
            assert_rounded(found, (grad.double()[:, None] * terms.double()).sum(-1), "mask weights")


def _check_weight_gradients(
    weight: Tensor,
    masks: Tensor,
    total: Tensor,
    products: Tensor,
    grad_weight: Tensor | None,
    grad_logits: Tensor | None,
) -> None:
    exact_weight = total.double() + torch.where(masks, -products, products).double().sum(0)
    exact_logits = -2 * weight.double() * products.double()
    given = None if grad_weight is None else total
    steps.weight_gradients(given, products, weight, pack(masks), grad_weight, grad_logits)
    if grad_weight is not None:
        assert_rounded(grad_weight, exact_weight, "weight")
    if grad_logits is not None:
        assert torch.equal(grad_logits, exact_logits.to(grad_logits.dtype))


# --- Whole layers ---------------------------------------------------------------------------------------------------


@dataclass
class TrainingLayer:
    """The arguments of a layer with learned masks, and the gradient of its result.

    x is `[..., in_features]`. With `offs`, the layer has experts, and the rows of x are sorted by expert.
    """

    x: Tensor
    weight: Tensor
    logits: Tensor
    packed_masks: Tensor
    mask_weights: Tensor | None
    grad_output: Tensor
    activation: str = "silu"
    offs: Tensor | None = None

    @staticmethod
    def random(
        device: str,
        dtype: torch.dtype,
        tokens: Sequence[int],
        d: int,
        h: int,
        n_masks: int,
        *,
        loads: Sequence[int] | None = None,
        density: float = 0.5,
        logits_dtype: torch.dtype | None = None,
        mask_weights_dtype: torch.dtype | None = None,
        activation: str = "silu",
    ) -> TrainingLayer:
        """A random layer. A fraction `density` of the mask bits is 1.

        If there are loads, expert e has `loads[e]` rows. The rows after them have no expert, and are NaN.
        """

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, device=device)

        of_experts = () if loads is None else (len(loads),)
        masks = torch.rand(*of_experts, n_masks, d, h, device=device) < density
        size = 0.01 + normal(*of_experts, n_masks, d, h).abs()
        offs = None
        if loads is not None:
            offs = torch.tensor(list(itertools.accumulate(loads)), dtype=torch.int32, device=device)
        layer = TrainingLayer(
            normal(*tokens, h).to(dtype),
            (normal(*of_experts, d, h) / max(h, 1) ** 0.5).to(dtype),
            torch.where(masks, size, -size).to(logits_dtype or dtype),
            pack(masks),
            None if mask_weights_dtype is None else torch.rand(*tokens, n_masks, device=device).to(mask_weights_dtype),
            normal(*tokens, d).to(dtype),
            activation,
            offs,
        )
        for tensor in (layer.x, layer.grad_output, layer.mask_weights):
            if loads is not None and tensor is not None:
                tensor[sum(loads) :] = float("nan")
        return layer

    @staticmethod
    def of_experts(
        device: str,
        dtype: torch.dtype,
        loads: Sequence[int],
        d: int,
        h: int,
        n_masks: int,
        *,
        unowned: int = 0,
        **options: Any,
    ) -> TrainingLayer:
        """A random layer with `loads[e]` rows for expert e, followed by `unowned` rows without an expert."""
        return TrainingLayer.random(device, dtype, (sum(loads) + unowned,), d, h, n_masks, loads=loads, **options)

    @property
    def given(self) -> Given:
        return Given(self.x, self.weight, self.packed_masks, self.activation, self.mask_weights, offs=self.offs)

    @property
    def call(self) -> Call:
        return Call.of(self.given)

    def backward_arguments(self, partials: Tensor, needs: Sequence[bool] = (True,) * 4) -> BackwardGiven:
        """The arguments of a backward pass. `needs` has a flag for each gradient of `NAMES`."""
        logits_dtype = self.logits.dtype if needs[2] else None
        mask_weights_dtype = self.mask_weights.dtype if needs[3] and self.mask_weights is not None else None
        dtypes = logits_dtype, mask_weights_dtype
        return BackwardGiven(self.grad_output, *self.given[:3], partials, needs[:2], *dtypes, self.offs)

    def in_plain_torch(self, dtype: torch.dtype) -> dict[str, Tensor]:
        """The result `y` and all gradients of the naive layer, or of a loop over naive experts, computed in `dtype`."""
        masks = (self.logits > 0).to(dtype)
        operands = {"x": self.x, "weight": self.weight, "logits": masks, "mask_weights": self.mask_weights}
        leaves = {k: t.detach().to(dtype).requires_grad_() for k, t in operands.items() if t is not None}
        x, weight, masks, *weights = leaves.values()
        grad_output, wanted = self.grad_output.to(dtype), tuple(leaves.values())
        if self.offs is None:
            y = naive(x, weight, masks, self.activation, *weights)
            return {"y": y.detach(), **dict(zip(leaves, torch.autograd.grad(y, wanted, grad_output), strict=True))}
        y = torch.zeros_like(grad_output)
        grads = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        for expert, (start, end) in enumerate(itertools.pairwise([0, *self.offs.tolist()])):
            if start == end:
                continue
            rows = slice(start, end)
            part = naive(x[rows], weight[expert], masks[expert], self.activation, *(one[rows] for one in weights))
            y[rows] = part.detach()
            for total, grad in zip(grads.values(), torch.autograd.grad(part, wanted, grad_output[rows]), strict=True):
                total += grad
        return {"y": y, **grads}


def by_operator(given: Given) -> tuple[Tensor, Tensor]:
    """The results of `forward_train`, or of `grouped_forward_train` for a layer of experts."""
    if given.offs is None:
        return torch.ops.mglu.forward_train(*given[:5])
    return torch.ops.mglu.grouped_forward_train(*given[:3], given.offs, *given[3:5])


def gradients_by_operator(given: BackwardGiven) -> tuple[Tensor, ...]:
    """The results of `backward`, or of `grouped_backward` for a layer of experts."""
    if given.offs is None:
        return torch.ops.mglu.backward(*given[:8])
    return torch.ops.mglu.grouped_backward(*given[:4], given.offs, *given[4:8])


def take_step(
    layer: TrainingLayer,
    forward: Callable[..., Any] = by_operator,
    backward: Callable[..., Any] = gradients_by_operator,
    needs: Sequence[bool] = (True,) * 4,
) -> dict[str, Tensor]:
    """The result `y` and the needed gradients. Other gradients must be empty, and no two tensors may share memory."""
    y, partials = forward(layer.given)
    grads = backward(layer.backward_arguments(partials, needs))
    assert all(tensor.is_contiguous() for tensor in (y, partials, *grads))
    storages = [grad.untyped_storage().data_ptr() for grad in grads if grad.numel()]
    assert len(set(storages)) == len(storages)
    needed = [*needs[:3], needs[3] and layer.mask_weights is not None]
    assert all(grad.numel() == 0 for grad, is_needed in zip(grads, needed, strict=True) if not is_needed)
    return {"y": y, **dict(itertools.compress(zip(NAMES, grads, strict=True), needed))}


def assert_as_good_as_naive(
    found: dict[str, Tensor], layer: TrainingLayer, factor: float, *, half_epsilon: bool = False
) -> None:
    """Assert that each error against float64 is at most `factor` times the naive layer's error in x's dtype.

    The naive layer's gradients are first rounded to the dtypes of the checked gradients. With `half_epsilon`, a naive
    error that is by chance below half an epsilon of x's dtype counts as half an epsilon.
    """
    least = torch.finfo(layer.x.dtype).eps / 2 if half_epsilon else 0
    exact, naive = layer.in_plain_torch(torch.float64), layer.in_plain_torch(layer.x.dtype)
    for name, tensor in found.items():
        allowed = factor * max(relative_error(naive[name].to(tensor.dtype), exact[name]), least)
        error = relative_error(tensor, exact[name])
        assert error <= allowed, f"{layer.activation}, {name}: relative error {error:.3g}, allowed {allowed:.3g}"
        assert_zero_without_an_expert(name, tensor, layer)


def assert_zero_without_an_expert(name: str, tensor: Tensor, layer: TrainingLayer) -> None:
    """Assert that rows without an expert, and gradients of experts without rows, are zeros."""
    if layer.offs is None:
        return
    ends = [0, *layer.offs.tolist()]
    if name in ("weight", "logits"):
        for expert, (start, end) in enumerate(itertools.pairwise(ends)):
            assert start < end or not tensor[expert].count_nonzero(), f"{name} of expert {expert}"
    else:
        assert not tensor[ends[-1] :].count_nonzero(), f"{name} of rows without an expert"
