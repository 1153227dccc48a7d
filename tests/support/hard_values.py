"""Arguments that are not finite, or of very different sizes, and bounds on the results."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import assume
from hypothesis import strategies as st
from torch import Tensor

from mglu_ops.activations import ACTIVATIONS
from tests.support.budgets import DIFFERENCE_ERROR, NAIVE_FACTOR, relative_error
from tests.support.layers import ACTIVATION_NAMES, Layer, make_layer, naive

# --- NaN and infinity -------------------------------------------------------------------------------------------------


def assert_right_or_not_finite(
    y: Tensor, x: Tensor, weight: Tensor, masks: Tensor, activation: str, mask_weights: Tensor | None = None
) -> None:
    """Check y `[tokens, out_features]` of a layer with bool masks `[n_masks, out_features, in_features]`.

    An element must be NaN if its row of x, of W or of the mask weights has a NaN. Finite elements must be close to the
    formula, in which gates and values skip the weights that their mask excludes.
    """
    act = ACTIVATIONS[activation].forward
    products = x.double()[:, None, :] * weight.double()  # [tokens, out_features, in_features]
    exact, size = torch.zeros(y.shape, dtype=torch.float64), torch.zeros(y.shape, dtype=torch.float64)
    for i, mask in enumerate(masks.cpu()):
        gate, value = (torch.where(part, products.cpu(), 0).sum(-1) for part in (mask, ~mask))
        term = act(gate) * value
        if mask_weights is not None:
            term = term * mask_weights.double().cpu()[:, i : i + 1]
        exact, size = exact + term, size + term.abs()
    y = y.detach().cpu().double()
    reads_nan = x.isnan().any(-1).cpu()[:, None] | weight.isnan().any(-1).cpu()
    if mask_weights is not None:
        reads_nan = reads_nan | mask_weights.isnan().any(-1).cpu()[:, None]
    assert y[reads_nan].isnan().all(), "a NaN is hidden"
    number = y.isfinite()
    wrong = number & ~((y - exact).abs() <= 0.05 * (1 + size))
    assert not wrong.any(), f"{y[wrong]} must be {exact[wrong]}, or not finite"
    ordinary = (products.abs() < 1e4).all(-1).cpu()
    if mask_weights is not None:
        ordinary &= mask_weights.isfinite().all(-1).cpu()[:, None]
    assert number[ordinary].all(), "a number is missing where all is finite"


# --- Outliers ---------------------------------------------------------------------------------------------------------

TOKENS = (1, 2, 4, 5, 33)
# Hypothesis tries the first entries first.
_DENSITIES = (0.5, 0.1, 0.9, 0.01, 0.99, 0.0, 1.0)
_SHARES = (0.5, 0.02, 0.0)  # fractions of columns with outliers; at least one column has them
_BITS = (16, 20, 13, 10, 5, 0)  # an outlier is 2**bits times as large as other numbers


@st.composite
def outlier_layers(
    draw: st.DrawFn,
    dtype: torch.dtype,
    *,
    out_features: int = 16,
    in_features: Sequence[int] = (16, 67, 256, 1024),
    n_masks: Sequence[int] = (1, 2, 3, 4, 8, 16),
    activations: Sequence[str] = ACTIVATION_NAMES,
) -> Layer:
    """Draw layers of any scale and density with outliers in x or W. Only gates, only values, or both read the outliers.

    Numbers are normally distributed, or all equal except for the outliers. Rounding errors of equal numbers add up.
    """
    columns, seed = draw(st.sampled_from(in_features)), draw(st.integers(0, 2**16))
    layer = make_layer(
        (draw(st.sampled_from(TOKENS)),),
        columns,
        out_features,
        draw(st.sampled_from(n_masks)),
        activation=draw(st.sampled_from(activations)),
        density=draw(st.sampled_from(_DENSITIES)),
        seed=seed,
    )
    x, weight, masks = layer.x, layer.weight, layer.masks.clone()
    if draw(st.booleans()):
        x, weight = torch.ones_like(x), torch.full_like(weight, 0.07)
    count = max(1, int(draw(st.sampled_from(_SHARES)) * columns))
    outliers = torch.zeros(columns, dtype=torch.bool)
    outliers[torch.randperm(columns, generator=torch.Generator().manual_seed(seed))[:count]] = True
    bits = draw(st.sampled_from(_BITS))
    large = 2.0 ** min(bits, 6)  # float16 has no room for more
    sizes = torch.where(outliers, large, large / 2**bits)
    if draw(st.booleans()):
        x = x * sizes
    else:
        weight = weight * sizes
    side = draw(st.sampled_from((True, False, None)))
    if side is not None:
        masks[:, :, outliers] = side
    x, weight = (x * 2.0 ** draw(st.integers(-4, 3))).to(dtype), weight.to(dtype)
    layer = layer.with_(x=x, weight=weight, masks=masks)
    assume(_naive(layer).isfinite().all())
    return layer


def layer_of_large_gates(dtype: torch.dtype, tokens: int, n_masks: int) -> Layer:
    """A layer with gates of 32 * 900 and values of 32 / 1000. Gate times value is 921.6, up to rounding of weights."""
    layer = make_layer((tokens,), 64, 8, n_masks, activation="identity", dtype=dtype)
    masks = torch.zeros_like(layer.masks)
    masks[:, :, :32] = True
    weight = torch.where(masks[0], 900, 1e-3).to(dtype)
    return layer.with_(x=torch.ones_like(layer.x), weight=weight, masks=masks)


def assert_loses_no_more_than_naive(result: Tensor, layer: Layer, slack: float = 0.0, what: str = "result") -> None:
    """Assert that the relative error of `result` is at most `NAIVE_FACTOR` times the naive layer's, plus `slack`.

    If the naive layer's error is by chance below half an epsilon of the result's dtype, half an epsilon counts instead.
    """
    oracle = layer.oracle()
    naive_error = relative_error(_naive(layer), oracle)
    limit = NAIVE_FACTOR * max(naive_error, torch.finfo(result.dtype).eps / 2) + slack
    error = relative_error(result, oracle)
    assert error <= limit, (
        f"{what}: relative error {error:.3g}, above {limit:.3g}; the naive layer has {naive_error:.3g}"
    )


def slack_of_differences(layer: Layer) -> float:
    """The relative error of the result if each gate and value has the additional error `DIFFERENCE_ERROR`."""
    x, weight = layer.x.double(), layer.weight.double()
    error = DIFFERENCE_ERROR * (x.abs() @ weight.abs().T)
    activation, effect = ACTIVATIONS[layer.activation], torch.zeros_like(error)
    for mask in layer.masks:
        gate, value = x @ (weight * mask).T, x @ (weight * ~mask).T
        largest = activation.forward(gate).abs().maximum(activation.forward(gate + error).abs())
        slope = (activation.forward(gate + error) - activation.forward(gate - error)).abs()
        effect += largest * error + slope * (value.abs() + error)
    norm = layer.oracle().norm()
    return float(effect.norm() / norm) if norm > 0 else float(effect.norm())


def _naive(layer: Layer) -> Tensor:
    return naive(layer.x, layer.weight, layer.masks, layer.activation)
