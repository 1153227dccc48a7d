"""The formula of a layer and its derivatives in operations of torch, on every device and in every dtype.

Let F_i be -1 where M_i = 1 and +1 elsewhere, t = x W^T and f_i = x (F_i * W)^T. The gate and the value of a mask are
computed in one of three ways:

- Sign flips (`_sign_flips`, n_masks + 1 GEMMs): gate_i = (t - f_i) / 2 and value_i = (t + f_i) / 2. A simpler formula,
  gate_i = x (M_i * W)^T and value_i = t - gate_i, would compute a value of few weights as the small difference of two
  large sums. Sign flips do so only if x or W has outliers (see the bound in `mglu_ops.ops`).
- Separate products (`_both_products`, 2 n_masks GEMMs), as in the naive layer: for one mask; for inference on a CPU
  except in float64, so that outliers cost no digits; and in float32 on a GPU or for two masks or few tokens.
- A float64 t (`_smaller_parts`): for all other training in float32 on a CPU. The error of a float32 t would enter every
  gate and value.

The gradients are 2 (n_masks + 1) GEMMs of grad_output times the partial derivatives that training keeps (`gradients`).
On a CPU, most calls do not come here: the backend `cpu` runs forward, also in training, and backward in bfloat16.

A mask is applied by a product with 0 and 1, or with 1 and -1: exact, and several times faster than `torch.where` on a
CPU. Sums are in float32 at least. Where torch has no 16-bit GEMM with a float32 result, the operands are widened.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import ClassVar

import torch
from torch import Tensor

from ..activations import get_activation
from ..formats import FORMATS
from ..given import BackwardGiven, Given
from ..masks import unpack_one

_FEW_TOKENS = 32
"""With fewer tokens than this, a float64 copy of the weight costs more than the GEMMs that it saves."""

_MOST_MASKS_OF_NARROW_TOTALS = 4
"""With up to this many masks, the terms of dt are summed in float32, and only the sum is converted to float64. With a
float64 sum, every term would be converted."""

_FAST_FLOAT64 = {(7, 0), (8, 0), (9, 0), (10, 0)}
"""The compute capabilities whose float64 GEMMs are about as fast as float32 ones: V100, A100, H100 and B200."""


def operand_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the GEMMs' operands: x's dtype if torch can return wider sums, else the dtype of the sums."""
    return x.dtype if x.is_cuda else sum_dtype(x.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which GEMMs of `dtype` sum."""
    return torch.float64 if dtype is torch.float64 else torch.float32


def _total_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which forward sums dy/dt over all masks: float64 for a float32 x on a CPU."""
    return torch.float64 if x.dtype is torch.float32 and x.is_cpu else sum_dtype(x.dtype)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return `a @ b`, summed in float32 at least, in the dtype of the sums."""
    if a.dtype in (torch.float16, torch.bfloat16):
        return torch.mm(a, b, out_dtype=torch.float32)
    return torch.mm(a, b)


class Products:
    """The GEMMs of a layer, by torch. `triton.experts` has a subclass whose GEMMs are for experts.

    Sums and results are in float32 at least. `weight` is `[out_features, in_features]`, `x` is `[tokens, in_features]`
    and `grad` is `[tokens, out_features]`. If `total` is given, the product is added to it in place.
    """

    has_float64: ClassVar[bool] = True

    def project(self, x: Tensor, weight: Tensor, out: Tensor | None = None) -> Tensor:
        """Return `x @ weight^T`, written to `out` if it is given."""
        if out is None or out.dtype != x.dtype:
            product = matmul(x, weight.t())
            return product if out is None else out.copy_(product)
        return torch.mm(x, weight.t(), out=out)

    def back(self, grad: Tensor, weight: Tensor, total: Tensor | None = None) -> Tensor:
        """Return `grad @ weight`, or add it to `total`."""
        return _add_matmul(total, grad, weight)

    def weight_product(self, grad: Tensor, x: Tensor, total: Tensor | None = None) -> Tensor:
        """Return `grad^T @ x`, or add it to `total`."""
        return _add_matmul(total, grad.t(), x)

    def count_ones(self, mask: Tensor) -> Tensor:
        """Count the ones of a layer's mask, or of each expert's mask. The result broadcasts to the mask."""
        return mask.count_nonzero()

    def per_row(self, numbers: Tensor) -> Tensor:
        """Expand one number per layer or expert, in the shape of `count_ones`, to the rows of x."""
        return numbers


def _add_matmul(total: Tensor | None, a: Tensor, b: Tensor) -> Tensor:
    if total is None:
        return matmul(a, b)
    return torch.addmm(total, a, b, out=total) if a.dtype == total.dtype else total.add_(matmul(a, b))


_LAYER = Products()


# --- Forward ---------------------------------------------------------------------------------------------------------


def _gates_and_values(
    x: Tensor, weight: Tensor, packed_masks: Tensor, *, apart: bool, products: Products = _LAYER
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield gate_i and value_i `[tokens, out_features]` of each mask, in the dtype of the sums.

    The next mask overwrites the yielded tensors. If `apart` is True, gate and value are separate products.
    """
    n_masks, tokens, narrow_sums = packed_masks.shape[-1], x.shape[0], x.dtype is torch.float32
    gate, value = (x.new_empty(tokens, weight.shape[-2], dtype=sum_dtype(x.dtype)) for _ in range(2))
    dtype = operand_dtype(x)
    x, weight = x.to(dtype), weight.to(dtype)
    masks = (_mask(packed_masks, i, weight) for i in range(n_masks))
    is_narrow = x.is_cuda or not products.has_float64
    if apart or n_masks == 1 or (narrow_sums and (n_masks == 2 or tokens < _FEW_TOKENS or is_narrow)):
        project = _both_products
    else:
        project = _smaller_parts if narrow_sums else _sign_flips
    for _ in project(products, x, weight, masks, gate, value):
        yield gate, value


def _mask(packed_masks: Tensor, index: int, weight: Tensor) -> Tensor:
    """Unpack one mask to bool in the shape of the weight, which may have a leading dimension of experts."""
    return unpack_one(packed_masks.flatten(0, -3), index, weight.shape[-1]).view(weight.shape)


def _both_products(
    products: Products, x: Tensor, weight: Tensor, masks: Iterable[Tensor], gate: Tensor, value: Tensor
) -> Iterator[None]:
    """Compute gate and value as separate products, as the naive layer does."""
    for mask in masks:
        masked = weight * mask
        products.project(x, masked, gate)
        products.project(x, weight - masked, value)
        yield


def _sign_flips(
    products: Products, x: Tensor, weight: Tensor, masks: Iterable[Tensor], gate: Tensor, value: Tensor
) -> Iterator[None]:
    half_total = products.project(x, weight).mul_(0.5)
    for mask in masks:
        flipped = products.project(x, torch.sub(weight, weight * mask, alpha=2), gate)
        torch.add(half_total, flipped, alpha=0.5, out=value)
        torch.sub(half_total, flipped, alpha=0.5, out=gate)
        yield


def _smaller_parts(
    products: Products, x: Tensor, weight: Tensor, masks: Iterable[Tensor], gate: Tensor, value: Tensor
) -> Iterator[None]:
    """Compute the gate or the value, whichever has fewer weights, as a product, and the other as t minus that product.

    t is float64. The measured error in float32 is 0.4 to 1.2 times the naive layer's; with sign flips 2 to 4 times.
    """
    wide = x.double() @ weight.double().t()
    total = wide.float()
    remainder = wide.sub_(total).float()
    del wide
    for mask in masks:
        gate_is_small = _is_sparse(mask)
        part, rest = (gate, value) if gate_is_small else (value, gate)
        masked = weight * mask
        products.project(x, masked if gate_is_small else weight - masked, part)
        torch.sub(total, part, out=rest).add_(remainder)
        yield


def _is_sparse(mask: Tensor) -> bool:
    """True if at most half of a mask is 1. For CPU tensors only: it would synchronise with a GPU."""
    return bool(mask.count_nonzero() <= mask.numel() // 2)


def forward(given: Given, products: Products = _LAYER) -> Tensor:
    """Return y `[tokens, out_features]`. `given` is a result of `in_rows`, so x is two-dimensional."""
    x, weight, packed_masks, activation, mask_weights, scale, weight_format, *_ = given
    act, dtype = get_activation(activation).forward, sum_dtype(x.dtype)
    if scale is not None:
        weight = FORMATS[weight_format].dequantize(weight, scale, operand_dtype(x))
    result = x.new_zeros(x.shape[0], given.out_features, dtype=dtype)
    term_weights = None if mask_weights is None else mask_weights.to(dtype)
    apart = x.is_cpu and x.dtype is not torch.float64
    for i, (gate, value) in enumerate(_gates_and_values(x, weight, packed_masks, apart=apart, products=products)):
        activated = act(gate)
        result.addcmul_(activated if term_weights is None else activated * term_weights[:, i : i + 1], value)
    return result.to(x.dtype)


# --- Training --------------------------------------------------------------------------------------------------------


def forward_train(given: Given, products: Products = _LAYER) -> tuple[Tensor, Tensor]:
    """Return y and its partial derivatives: P, all Q_i and, with mask weights, all R_i."""
    x, weight, packed_masks, activation, mask_weights = given[:5]
    act, dtype, n_masks = get_activation(activation), sum_dtype(x.dtype), packed_masks.shape[-1]
    tokens, out_features = x.shape[0], given.out_features
    result = x.new_zeros(tokens, out_features, dtype=dtype)
    term_weights = result.new_ones(1, n_masks) if mask_weights is None else mask_weights.to(dtype)
    term_weights, kinds = term_weights.expand(tokens, n_masks), 1 if mask_weights is None else 2
    partials = x.new_empty(tokens, 1 + kinds * n_masks, out_features)
    total_partial = torch.zeros_like(result, dtype=_total_dtype(x) if n_masks > 1 else dtype)
    pairs = _gates_and_values(x, weight, packed_masks, apart=False, products=products)
    for i, (gate, value) in enumerate(pairs):
        for rows in _chunks(result):
            g, v, mask_weight, kept = gate[rows], value[rows], term_weights[rows, i : i + 1], partials[rows]
            activated, slope = act.forward(g), act.backward(v, g)  # act(g_i), act'(g_i) v_i
            if mask_weights is not None:
                torch.mul(activated, v, out=kept[:, 1 + n_masks + i])
            result[rows].addcmul_(activated if mask_weights is None else activated * mask_weight, v)
            half = mask_weight * 0.5
            total_partial[rows].add_(torch.add(activated, slope).mul_(half))
            torch.mul(activated.sub(slope), half, out=kept[:, 1 + i])
    partials[:, 0] = total_partial
    return result.to(x.dtype), partials


def _chunks(result: Tensor) -> list[slice]:
    """Divide the tokens of a result into slices, to limit the size of temporary tensors.

    A slice has about 2^20 elements on a CPU, to keep its tensors in the caches, and 2^24 on a GPU, to keep it busy.
    """
    tokens, out_features = result.shape
    step = max(1, (1 << (20 if result.is_cpu else 24)) // max(1, out_features))
    return [slice(start, start + step) for start in range(0, tokens, step)]


def gradients(arguments: BackwardGiven, products: Products = _LAYER) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight and mask logits; a gradient that is not needed is empty.

    They follow the equations of `mglu_ops.ops`, but in float32 the terms of `dt W + sum_i b_i (F_i * W)` nearly cancel
    if masks are sparse or dense. Therefore F_i is split into a constant, 1 or -1, and a rest that is zero for most
    weights; b_i times the constant is added to dt. Measured errors of dx and dW, as multiples of the naive layer's:

    - without the split: up to 5;
    - with it, and GEMMs of dt in float32: up to 2.1;
    - with it, and GEMMs of dt in float64, as on a CPU (`_backward_total_dtype`): 0.7 to 1.7.

    With one mask, gate and value are separate products (`_gradients_of_both_products`).
    """
    grad_output, x, weight, packed_masks = arguments[:4]
    partials, (needs_x, needs_weight), logits_dtype = arguments.partials, arguments.needs, arguments.logits_dtype
    needs_total, needs_products = needs_x or needs_weight, needs_weight or logits_dtype is not None
    operand, wide, n_masks = operand_dtype(x), sum_dtype(x.dtype), packed_masks.shape[-1]
    if not (needs_total or needs_products):
        return x.new_empty(0), x.new_empty(0), x.new_empty(0)
    if n_masks == 1 and x.dtype is torch.float32 and needs_total and (needs_weight or logits_dtype is None):
        return _gradients_of_both_products(arguments, products)
    grad_x = x.new_zeros(x.shape if needs_x else 0, dtype=wide)
    grad_weight = x.new_zeros(weight.shape if needs_weight else 0, dtype=wide)
    logits_shape = (*weight.shape[:-2], n_masks, *weight.shape[-2:])
    grad_logits = x.new_empty(logits_shape if logits_dtype else 0, dtype=logits_dtype or x.dtype)
    splits = x.dtype is torch.float32 and not rounds_to_tf32(x)
    total_dtype = _backward_total_dtype(x) if products.has_float64 else torch.float32
    x, w, grad = x.to(operand), weight.to(operand), grad_output.to(operand)
    if needs_total:
        total = grad * partials[:, 0]
        if splits and n_masks > _MOST_MASKS_OF_NARROW_TOTALS:
            total = total.to(total_dtype)
    b = None
    for i in range(n_masks):
        b = torch.mul(grad, partials[:, 1 + i], out=b)  # overwrites b of the previous mask
        if needs_total:
            mask = _mask(packed_masks, i, weight)
            flips = mask.to(operand).mul_(-2).add_(1)
            if splits:
                # The constant stays on the device, because reading it would synchronise with a GPU.
                half = weight.shape[-2:].numel() // 2
                constant = torch.where(products.count_ones(mask) <= half, 1.0, -1.0)
                flips.sub_(constant)
                total.addcmul_(b, products.per_row(constant))
        if needs_x:
            products.back(b, w * flips, grad_x)
        if needs_products:
            product = products.weight_product(b, x)
            if needs_weight:
                grad_weight.addcmul_(product, flips)
            if logits_dtype:
                torch.mul(product.mul_(-2), w, out=grad_logits.select(-3, i))
    if needs_total and splits:
        total = total.to(total_dtype)
    if needs_x:
        products.back(total, w.to(total.dtype), grad_x)
    if needs_weight:
        products.weight_product(total, x.to(total.dtype), grad_weight)
    return grad_x.to(weight.dtype), grad_weight.to(weight.dtype), grad_logits


def rounds_to_tf32(x: Tensor) -> bool:
    """True if float32 GEMMs use TF32, whose error dwarfs all others."""
    return x.is_cuda and torch.backends.cuda.matmul.fp32_precision == "tf32"


def _backward_total_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the GEMMs of dt for an x in float32: float64 on CPUs, and on GPUs where it is as fast."""
    is_fast = x.is_cpu or (x.is_cuda and torch.cuda.get_device_capability(x.device) in _FAST_FLOAT64)
    return torch.float64 if is_fast else torch.float32


def _gradients_of_both_products(arguments: BackwardGiven, products: Products) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of a layer with one mask as the naive layer does: from the gradients of gate and value."""
    grad_output, x, weight, packed_masks = arguments[:4]
    partials, needs, logits_dtype = arguments.partials, arguments.needs, arguments.logits_dtype
    mask = _mask(packed_masks, 0, weight).to(weight.dtype)
    grad_gate, grad_value = (
        change(partials[:, 0], partials[:, 1]).mul_(grad_output) for change in (torch.sub, torch.add)
    )
    grad_x, grad_weight, grad_logits = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    masked = weight * mask
    if needs[0]:
        grad_x = products.back(grad_value, weight - masked, products.back(grad_gate, masked))
    if needs[1]:
        from_gate, from_value = products.weight_product(grad_gate, x), products.weight_product(grad_value, x)
        grad_weight = (from_gate * mask).addcmul_(from_value, mask.neg_().add_(1))
        if logits_dtype:
            grad_logits = from_gate.sub_(from_value).mul_(weight).to(logits_dtype).unsqueeze(-3)
    return grad_x, grad_weight, grad_logits


def _mask_weight_gradients(grad_output: Tensor, terms: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum `grad_output * R_i` over out_features. Return `[tokens, n_masks]` in `dtype`.

    `terms` holds all R_i, `[tokens, n_masks, out_features]`.
    """
    grad = grad_output.to(sum_dtype(grad_output.dtype))
    result = grad.new_empty(terms.shape[:2], dtype=dtype)
    for i in range(terms.shape[1]):
        result[:, i] = (grad * terms[:, i]).sum(-1)
    return result


def backward(given: BackwardGiven, products: Products = _LAYER) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of x, weight, mask logits and mask weights; empty if not needed."""
    found, dtype = gradients(given, products), given.mask_weights_dtype
    if dtype is None:
        return (*found, given.x.new_empty(0))
    terms = given.partials[:, 1 + given.packed_masks.shape[-1] :]
    return (*found, _mask_weight_gradients(given.grad_output, terms, dtype))
