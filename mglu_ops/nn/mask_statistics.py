"""Statistics about packed masks for the log of a training run: gate ratios, agreement between masks, and flips."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..masks import N_MASKS_DIM, check_layout, count_ones, n_masks_of
from ..tensors import whole
from .arguments import check_model
from .mask_logits import Selection, logits_of_modules, selected, value_now, without_wrappers
from .masked_linear import MaskedLinear, packed_logits


def gate_ratio(packed_masks: Tensor, in_features: int) -> Tensor:
    """The fraction of ones in each mask, which is the fraction of the weights that feed the gate.

    Args:
        packed_masks: `uint8 [out_features, ceil(in_features / 8), n_masks]`.
        in_features: the number of columns of the masks; padding does not count.

    Returns:
        float32 `[n_masks]` on the device of the masks, from 0 to 1. The call does not synchronise with a GPU.

    Raises:
        TypeError: the dtype is not uint8.
        ValueError: the shape does not fit `in_features`.
    """
    check_layout(packed_masks, in_features)
    return _fraction(count_ones(packed_masks), packed_masks, in_features)


def mask_agreement(packed_masks: Tensor, in_features: int) -> Tensor:
    """The fraction of equal bits of each pair of masks.

    Independent masks with as many ones as zeros agree in half of their bits. Masks that agree in all bits compute the
    same term twice. Masks that agree in no bit exchange gate and value.

    Arguments and errors are as in `gate_ratio`.

    Returns:
        float32 `[n_masks, n_masks]`, symmetric, with ones on the diagonal, on the device of the masks. The call does
        not synchronise with a GPU.
    """
    check_layout(packed_masks, in_features)
    n_masks = n_masks_of(packed_masks)
    differing = packed_masks.new_zeros((n_masks, n_masks), dtype=torch.int64)
    # Comparing the masks with a copy that is rotated by `shift` counts all pairs (i, i + shift) at once. Indices past
    # the last mask continue at mask 0, so the shifts up to n_masks / 2 reach every pair.
    for shift in range(1, n_masks // 2 + 1):
        counts = count_ones(packed_masks ^ packed_masks.roll(-shift, N_MASKS_DIM))
        inside, around = counts.split([n_masks - shift, shift])
        for sign in (1, -1):
            differing.diagonal(sign * shift).copy_(inside)
            differing.diagonal(sign * (shift - n_masks)).copy_(around)
    return 1 - _fraction(differing, packed_masks, in_features)


def flip_ratio(before: Tensor, packed_masks: Tensor, in_features: int) -> Tensor:
    """The fraction of bits in which each mask differs from its earlier state, float32 `[n_masks]`.

    Args:
        before: the earlier masks, in the format and the shape of `packed_masks`.
        packed_masks: as in `gate_ratio`.
        in_features: as in `gate_ratio`.

    Raises:
        TypeError, ValueError: as in `gate_ratio`, or `before` has another dtype or shape than `packed_masks`.
    """
    check_layout(packed_masks, in_features)
    if before.dtype is not torch.uint8:
        raise TypeError(f"before: got dtype {before.dtype}, must be torch.uint8")
    if before.shape != packed_masks.shape:
        raise ValueError(
            f"before: got shape {list(before.shape)}, must be that of packed_masks, {list(packed_masks.shape)}"
        )
    return _fraction(count_ones(before ^ packed_masks), packed_masks, in_features)


def _fraction(bits: Tensor, packed_masks: Tensor, in_features: int) -> Tensor:
    """Divide numbers of bits by the bits of a mask, in float32: torch divides integers in its default dtype."""
    return bits.float() / (packed_masks.shape[0] * in_features)


class MaskStatistics:
    """Statistics about the masks of every MGLU layer of a model, for the log of a training run.

        statistics = MaskStatistics(model)
        for step, batch in enumerate(batches):
            ...
            optimizer.step()
            if step % 100 == 99:
                log(statistics.update())

    `update()` returns these fractions, from 0 to 1, for each layer:

    | key | value |
    |---|---|
    | `LAYER/gate_ratio/I` | ones in mask I (`gate_ratio`) |
    | `LAYER/flips/I` | bits of mask I that differ from the last `update()`, or from construction (`flip_ratio`) |
    | `LAYER/agreement` | equal bits, averaged over the pairs of masks (`mask_agreement`); absent with one mask |
    | `LAYER/nan` | logits that are NaN. Their mask bits are 0, so the loss may not reveal them |

    LAYER is the name of the module in the model, without the `_orig_mod` of `torch.compile`, or the name of a parameter
    that `mask_logits` selects. If the model itself is the layer, the keys have no `LAYER/`. I counts from 0. Layers
    with fixed masks are included, and have no flips and no NaN. The keys are the same at every call.

    The object keeps the packed masks of the last call, n_masks bits per weight, on the device of the model. A call
    reads all logits twice, which takes little time compared with a training step, and then waits for the device. With
    sharded parameters (`fully_shard`, tensor parallelism), all ranks must construct the object and make every call.

    Args:
        model: a module that has an `MGLU` or a `NaiveMGLU` anywhere inside, or is one.
        mask_logits: parameters of your own modules that are logits, `[n_masks, out_features, in_features]` or
            `[out_features, in_features]` with `M = logits > 0`, or a stack of logits of the first shape along
            dimension 0; see `parameter_groups`.

    Raises:
        TypeError: `model` is not an `nn.Module`, or `mask_logits` is not as in `parameter_groups`.
        ValueError: the model has no masks, a name in `mask_logits` fits no parameter, or a selected parameter has
            another rank.
    """

    def __init__(self, model: nn.Module, *, mask_logits: Selection = ()) -> None:
        check_model(model)
        self._layers = _layers(model, mask_logits)
        if not self._layers:
            raise ValueError(
                f"model: {type(model).__name__} has no MGLU or NaiveMGLU; name the mask logits of your own modules, "
                'for example mask_logits=["*.logits"]'
            )
        self._before = {layer: read().packed_masks for layer, read in self._layers.items()}

    @torch.no_grad()
    def update(self) -> dict[str, float]:
        """Return the numbers of every layer, and remember its masks for the next call."""
        found: dict[str, Tensor] = {}
        for layer, read in self._layers.items():
            packed_masks, in_features, nan = read()
            prefix = f"{layer}/" if layer else ""
            found[f"{prefix}gate_ratio"] = gate_ratio(packed_masks, in_features)
            found[f"{prefix}flips"] = flip_ratio(self._before[layer], packed_masks, in_features)
            if (n_masks := n_masks_of(packed_masks)) > 1:
                pairs = mask_agreement(packed_masks, in_features)
                found[f"{prefix}agreement"] = (pairs.sum() - n_masks) / (n_masks * (n_masks - 1))
            found[f"{prefix}nan"] = nan
            self._before[layer] = packed_masks
        # All kernels have been launched by now. Only `tolist` waits for their results.
        return {
            f"{key}/{i}" if value.dim() else key: number
            for key, value in found.items()
            for i, number in enumerate(value.reshape(-1).tolist())
        }


class _Masks(NamedTuple):
    """The current masks of a layer."""

    packed_masks: Tensor
    in_features: int
    nan: Tensor  # the fraction of the layer's logits that are NaN, a scalar


def _layers(model: nn.Module, mask_logits: Selection) -> dict[str, Callable[[], _Masks]]:
    """Map the name of each layer to a function that reads its masks."""
    layers: dict[str, Callable[[], _Masks]] = {}
    for name, module in model.named_modules():
        if isinstance(module, MaskedLinear):
            layers[without_wrappers(name)] = partial(_masks_of_module, module)
    known = logits_of_modules(model)
    for name, owner in selected(model, mask_logits).items():
        logits = getattr(owner, name.rpartition(".")[2])
        if logits in known:
            continue
        if logits.dim() not in (2, 3, 4):
            raise ValueError(
                f"mask_logits: {name} has shape {list(logits.shape)}, must be [n_masks, out_features, in_features], "
                "[out_features, in_features] or [num_experts, n_masks, out_features, in_features]"
            )
        layers[name] = partial(_masks_of_logits, owner, name.rpartition(".")[2])
    return layers


def _masks_of_module(module: MaskedLinear) -> _Masks:
    if module.packed_masks is None:
        return _masks_of_logits(module, "mask_logits")
    packed_masks = _as_one(whole(module.packed_masks).clone())
    return _Masks(packed_masks, module.in_features, packed_masks.new_zeros((), dtype=torch.float32))


def _masks_of_logits(owner: nn.Module, name: str) -> _Masks:
    logits = value_now(owner, name).detach()
    packed_masks = packed_logits(logits.unsqueeze(0) if logits.dim() == 2 else logits)
    return _Masks(_as_one(whole(packed_masks)), logits.shape[-1], whole(logits.isnan().sum()).float() / logits.numel())


def _as_one(packed_masks: Tensor) -> Tensor:
    """Join the masks of all experts along their rows, as if they were one layer."""
    return packed_masks.flatten(0, -3)
