"""Parameter groups for an optimizer, in which mask logits have their own learning rate and no weight decay."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from .. import notices
from .arguments import check_model
from .mask_logits import Selection, logits_of_modules, parameters_with_owners, selected

LEVELED_MASK_LR = 0.3
"""The masks' default learning rate in layers with `weight_init="leveled"`, as a multiple of the weights' rate."""

LR_RATIO = "lr_ratio"
"""The key of a group's initial learning rate divided by the weights' rate."""

_NORMS = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    mask_lr: float | None = None,
    mask_logits: Selection = (),
) -> list[dict[str, Any]]:
    """Divide the parameters of a model into groups for an optimizer.

    | group | parameters | `lr` | `weight_decay` |
    |---|---|---|---|
    | `weights` | all other parameters | `lr` | `weight_decay` |
    | `no_decay` | parameters with fewer than two dimensions, in torch's norm modules, or named `*bias*` | `lr` | 0 |
    | `mask_logits` | mask logits | `mask_lr`; by default `lr`, and `0.3 * lr` in leveled layers | 0 |

    README.md beside this file gives the reasons ('The optimizer'), and says what pure bfloat16 training needs. If some
    layers have `weight_init="paper"` and others `"leveled"`, there are two groups named `mask_logits`, and a warning.

    The logits of `MGLU`, `NaiveMGLU` and their subclasses are found by the class of the module. Name the logits of your
    own modules in `mask_logits`; otherwise they are among the weights, whose decay pulls them to 0. Named logits train
    at the paper's rate, unless their module has the attribute `weight_init = "leveled"`. A parameter that several
    modules share is in one group: in `mask_logits` if it holds logits in any of the modules, else in `no_decay` if any
    of its uses belongs to `no_decay`. Parameters with `requires_grad=False` are skipped, and empty groups are omitted.
    The order of groups and parameters is deterministic.

    The groups work with every optimizer of torch, also with `fused=True`, and with models in `torch.compile`,
    `DistributedDataParallel` and `fully_shard`. Call this function after `fully_shard`, as an optimizer requires.

    Args:
        model: any module.
        lr: learning rate of weights, norms and biases, at least 0.
        weight_decay: weight decay of the weights, at least 0.
        mask_lr: learning rate of all mask logits, at least 0; None for the default in the table.
        mask_logits: more parameters that are mask logits: a list of names as in `model.named_parameters()`, in which
            `*` matches anything, for example `["*.logits"]`, or a function `(name, parameter) -> bool`. Omit the
            `_orig_mod` that `torch.compile` inserts into names.

    Returns:
        One dict for each group with `params`, `lr`, `weight_decay` and `name`, as in the table, and with `lr_ratio`,
        its rate divided by `lr`, for `check_mask_lr`. Pass the list to the optimizer, and find groups by their name in
        `optimizer.param_groups`.

    Raises:
        TypeError: `model` is not an `nn.Module`, a rate or the decay is not a number, or `mask_logits` has another
        type.
        ValueError: a rate or the decay is negative or not finite, a name in `mask_logits` matches no parameter, a
            parameter has no shape yet (lazy modules), a module is a `FullyShardedDataParallel` (which flattens
            parameters, so that norms and weights look alike), or no parameter requires a gradient.
    """
    check_model(model)
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model: FullyShardedDataParallel flattens parameters, so that norms and weights look alike; "
            "use torch.distributed.fsdp.fully_shard"
        )
    _check_number("lr", lr)
    _check_number("weight_decay", weight_decay)
    if mask_lr is not None:
        _check_number("mask_lr", mask_lr)
    mask_rates = _mask_rates(model, mask_logits, lr, mask_lr)
    found: dict[nn.Parameter, tuple[int, float]] = {}
    for name, owner, parameter in parameters_with_owners(model):
        if parameter.requires_grad:
            if is_lazy(parameter):
                raise ValueError(f"model: {name} has no shape yet; call the model once before making parameter groups")
            kind = "mask_logits" if parameter in mask_rates else _kind(name, owner, parameter)
            group = _RANK.index(kind), mask_rates.get(parameter, lr)
            found[parameter] = max(found.get(parameter, group), group)
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no parameter with requires_grad=True")
    groups = [
        {
            "name": _RANK[rank],
            "params": [parameter for parameter, of in found.items() if of == (rank, rate)],
            "lr": rate,
            "weight_decay": weight_decay if _RANK[rank] == "weights" else 0.0,
            LR_RATIO: rate / lr if lr else math.nan,
        }
        for rank, rate in sorted(set(found.values()))
    ]
    _warn_of_mixture(groups)
    return groups


def check_mask_lr(optimizer: Any) -> None:
    """Check that a scheduler has not overwritten the masks' learning rate. Call this after creating the scheduler.

        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-3, total_steps=1000)
        check_mask_lr(optimizer)  # an error, unless parameter_groups gave all groups one rate

    Schedulers that multiply rates keep the ratio that `parameter_groups` has set. `OneCycleLR` and `CyclicLR` set one
    rate for all groups, unless they get a list with one rate for each group. Groups from elsewhere than
    `parameter_groups` are not checked, nor are optimizers without weights or norms.

    Args:
        optimizer: an optimizer, or a wrapper of one that has `param_groups`.

    Raises:
        TypeError: it has no `param_groups`.
        ValueError: a group of mask logits has a learning rate whose ratio to the weights' rate differs from
            `parameter_groups`' by more than a thousandth.
    """
    groups = getattr(optimizer, "param_groups", None)
    if groups is None:
        raise TypeError(f"optimizer: got {type(optimizer).__name__}, must be an optimizer with param_groups")
    rates = [float(group["lr"]) for group in groups if group.get("name") in ("weights", "no_decay")]
    for group in groups if rates else ():
        wanted = group.get(LR_RATIO, math.nan) * rates[0]
        if group.get("name") == "mask_logits" and abs(float(group["lr"]) - wanted) > 1e-3 * wanted:
            listed = ", ".join(f"{group.get('name')} {float(group['lr']):g}" for group in groups)
            raise ValueError(
                f"optimizer: got the learning rates {listed}, must be {wanted:g} for mask_logits, "
                f"{group[LR_RATIO]:g} times the weights': a scheduler has overwritten it; give OneCycleLR and "
                "CyclicLR lists with one rate for each group, such as max_lr=[group['lr'] for group in "
                "optimizer.param_groups]"
            )


def _mask_rates(model: nn.Module, selection: Selection, lr: float, mask_lr: float | None) -> dict[nn.Parameter, float]:
    """Map each of a model's mask logits to its learning rate."""
    named = {
        owner.get_parameter(name.rpartition(".")[2]): getattr(owner, "weight_init", None)
        for name, owner in selected(model, selection).items()
    }
    inits = named | {parameter: layer.weight_init for parameter, layer in logits_of_modules(model).items()}
    if mask_lr is not None:
        return dict.fromkeys(inits, mask_lr)
    return {parameter: LEVELED_MASK_LR * lr if init == "leveled" else lr for parameter, init in inits.items()}


def _warn_of_mixture(groups: list[dict[str, Any]]) -> None:
    rates = [f"{group['lr']:g}" for group in groups if group["name"] == "mask_logits"]
    if len(rates) > 1:
        notices.warn(
            f"parameter_groups: the masks of some layers get the learning rate {rates[0]} and those of others "
            f"{rates[1]}, because the layers differ in weight_init; give all of them one weight_init, or one rate with "
            "mask_lr",
            stacklevel=3,  # parameter_groups' caller
        )


_RANK = ("weights", "no_decay", "mask_logits")
"""The groups in their order. If the uses of a shared parameter belong to several groups, the last of them gets it."""


def _kind(name: str, owner: nn.Module, parameter: nn.Parameter) -> str:
    own_name = name.rpartition(".")[2]
    is_spared = parameter.dim() < 2 or "bias" in own_name or isinstance(owner, _NORMS)
    return "no_decay" if is_spared else "weights"


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, must be a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: got {value!r}, must be finite and at least 0")
