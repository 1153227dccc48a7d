"""The time of one layer of the size of a real model for one token.

The model of the demo is so small that the time of a call hides the time of reading its weights. This layer is not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (the field's name)
from torch import Tensor, nn

import mglu_ops

from ..accuracy import ERROR_BUDGET, relative_error
from ..timer import Replay, layers_for, milliseconds, times
from .errors import require
from .settings import Settings
from .table import Row, render
from .timing import COMPILED, FUSED, SWIGLU, compiled, compiled_without_fusion

N_MASKS = (1, 4)
DISTINCT_BYTES = 256 << 20
"""Bytes of distinct layers that each variant runs over, more than most caches hold."""
ROUNDS = 5


@dataclass(frozen=True)
class Variant:
    """A layer in several copies: `run(i)` computes copy i."""

    run: Callable[[int], Tensor]
    copies: int


def time_layer(settings: Settings) -> dict[str, Any] | str:
    """Time the naive layer (compiled), SwiGLU in its fastest form, and the fused layer, all in one run.

    Returns:
        The results, or in a sentence why this machine cannot measure them.

    Raises:
        Disagreement: the fused layer does not compute what the naive one does.
    """
    out_features, in_features = settings.layer
    x = torch.randn(1, in_features, device=settings.device, dtype=settings.dtype)
    needed, available = _bytes_needed(settings), _bytes_available(settings.device)
    if available is not None and available < needed:
        return f"it needs {needed / 2**30:.1f} GiB of memory, and {available / 2**30:.1f} GiB are free"
    with torch.no_grad():
        choice = _dispatched(settings, x)
        if choice.backend == "composite":
            return f"no kernel of this package can run it here ({choice.reason})"
        swiglu = _swiglu_variants(settings, x)
        variants = dict(swiglu)
        for n_masks in N_MASKS:
            variants |= _mglu_variants(settings, x, n_masks)
        found = _milliseconds(variants, settings.device)
    fastest = min(swiglu, key=lambda name: found[name])
    return {
        "layer": [out_features, in_features],
        "dtype": str(settings.dtype).removeprefix("torch."),
        "device": _device_name(settings.device),
        "backend": choice.backend,
        "swiglu": fastest,
        "milliseconds": {
            str(n_masks): {
                COMPILED: found[f"{COMPILED}, {n_masks}"],
                FUSED: found[f"{FUSED}, {n_masks}"],
                SWIGLU: found[fastest],
            }
            for n_masks in N_MASKS
        },
    }


def describe(results: dict[str, Any]) -> str:
    """The results as a table with a heading."""
    out_features, in_features = results["layer"]
    heading = (
        f"One layer of {out_features} x {in_features}, one token, {results['dtype']}, {results['device']}, no weight "
        f"in the cache.\nfused: the {results['backend']} backend. SwiGLU: its fastest form here, {results['swiglu']}."
    )
    rows = [
        Row(f"ms per layer, {n_masks} {'mask' if n_masks == '1' else 'masks'}", values, "{:.3f}", ratio=True)
        for n_masks, values in results["milliseconds"].items()
    ]
    columns = (COMPILED, FUSED, SWIGLU)
    return f"{heading}\n\n{render(rows, columns, ratios=(COMPILED, SWIGLU))}"


def _layer(settings: Settings, n_masks: int) -> mglu_ops.nn.NaiveMGLU:
    out_features, in_features = settings.layer
    layer = mglu_ops.nn.NaiveMGLU(
        in_features, out_features, n_masks=n_masks, device=settings.device, dtype=settings.dtype
    )
    return layer.eval().requires_grad_(False)


def _dispatched(settings: Settings, x: Tensor) -> Any:
    frozen = mglu_ops.freeze(_layer(settings, max(N_MASKS)))
    assert frozen.packed_masks is not None
    return mglu_ops.explain_dispatch(x, frozen.weight, frozen.packed_masks, frozen.activation)


def _apply(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x)


def _mglu_variants(settings: Settings, x: Tensor, n_masks: int) -> dict[str, Variant]:
    naive = _layer(settings, n_masks)
    naive_layers = _copies(naive)
    fused_layers = _copies(mglu_ops.freeze(deepcopy(naive)))
    naive_compiled = compiled_without_fusion(_apply)
    variants = {
        f"{COMPILED}, {n_masks}": Variant(lambda i: naive_compiled(naive_layers[i], x), len(naive_layers)),
        f"{FUSED}, {n_masks}": Variant(lambda i: fused_layers[i](x), len(fused_layers)),
    }
    outputs = [variant.run(0) for variant in variants.values()]
    error, budget = relative_error(outputs[1], outputs[0]), ERROR_BUDGET[settings.dtype]
    require(
        error <= budget,
        f"the fused layer of {n_masks} masks differs from the naive one by {error:.2e}; the budget is {budget:.0e}",
    )
    return variants


def _swiglu_variants(settings: Settings, x: Tensor) -> dict[str, Variant]:
    """Return SwiGLU as two products, as one product with the stacked weights, and the latter compiled."""
    out_features, in_features = settings.layer
    layer = nn.Linear(in_features, 2 * out_features, bias=False, device=settings.device, dtype=settings.dtype)
    weights = [copy.weight for copy in _copies(layer.requires_grad_(False))]

    def two_products(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = weight.chunk(2)
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    def one_product(x: Tensor, weight: Tensor) -> Tensor:
        gate, up = F.linear(x, weight).chunk(2, dim=-1)
        return F.silu(gate) * up

    forms = {
        "two products": two_products,
        "one stacked product": one_product,
        "one stacked product, compiled": compiled(one_product),
    }

    def variant(form: Callable[..., Tensor]) -> Variant:
        return Variant(lambda i: form(x, weights[i]), len(weights))

    return {name: variant(form) for name, form in forms.items()}


def _copies(layer: nn.Module) -> Sequence[Any]:
    return [layer, *(deepcopy(layer) for _ in range(layers_for(_bytes_of(layer), DISTINCT_BYTES) - 1))]


def _bytes_of(layer: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*layer.parameters(), *layer.buffers()))


def _milliseconds(variants: dict[str, Variant], device: torch.device) -> dict[str, float]:
    """The median over the rounds, per layer: of the GPU's time alone, or on a CPU by the wall clock."""
    for variant in variants.values():
        for i in range(variant.copies):
            variant.run(i)  # whatever compiles, compiles here
    if device.type == "cuda":
        with torch.cuda.device(device):
            found = times([Replay(variant.run, variant.copies) for variant in variants.values()], ROUNDS)
        return {name: statistics.median(one) / 1e3 for name, one in zip(variants, found, strict=True)}
    totals = milliseconds({name: _all_copies(variant) for name, variant in variants.items()}, device, ROUNDS, 1)
    return {name: totals[name] / variant.copies for name, variant in variants.items()}


def _all_copies(variant: Variant) -> Callable[[], object]:
    return lambda: [variant.run(i) for i in range(variant.copies)]


def _bytes_needed(settings: Settings) -> int:
    """The copies of every variant, and what the naive layers compute on the way."""
    out_features, in_features = settings.layer
    weight = out_features * in_features * settings.dtype.itemsize
    layers = [2 * weight, *((1 + n_masks) * weight for n_masks in N_MASKS), *(2 * weight for _ in N_MASKS)]
    return sum(max(DISTINCT_BYTES, 2 * layer) + layer for layer in layers)


def _bytes_available(device: torch.device) -> int | None:
    """Free memory of the device; None if this system does not say."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:")]
    return found[0] if found else None


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"CPU with {torch.get_num_threads()} threads"
