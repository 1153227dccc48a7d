"""Parameter groups of an optimizer: mask logits without weight decay and with a learning rate of their own."""

from __future__ import annotations

import math
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from .mask_logits import Selection, logits_of_modules, parameters_with_owners, selected

MASK_LR_RATIO = 0.3
"""The default learning rate of mask logits, as a fraction of that of the weights."""

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
    | `weights` | all others | `lr` | `weight_decay` |
    | `no_decay` | of fewer than two dimensions, of torch's norm modules, or with `bias` in their own name | `lr` | 0 |
    | `mask_logits` | the logits of masks | `mask_lr` | 0 |

    A mask is `M = logits > 0`, so only the sign of a logit counts. Weight decay moves every logit towards 0, where the
    next small gradient flips its bit; that is noise and no regularisation. The learning rate decides how often bits
    flip: Adam moves a logit by about its learning rate at each step, however small the gradient is, and logits start
    within about 0.01 of 0. With the rate of the weights, say 1e-3, ten steps flip a typical bit. The default of 0.3
    times that rate is part of the recipe that learned best in our training runs (benchmarks/learning); runs with 0.1
    and 0.03 times the rate differed from it by less than the noise. One mask with the initial weights of the paper
    learned better at the paper's rate, which is that of the weights: `mask_lr=lr`.

    The logits of `MGLU` and `NaiveMGLU`, and of their subclasses, are recognised by the class of the module. Those of
    your own modules are not, whatever they are called: name them in `mask_logits`. A parameter that several modules
    share is in one group, which is that of logits if any of its uses is, and otherwise `no_decay` if any of its uses
    is. Parameters with `requires_grad=False` are left out, and so is a group without parameters. The order of groups
    and parameters is always the same.

    The groups serve every optimizer of torch, also with `fused=True`, and models in `torch.compile`,
    `DistributedDataParallel` and `fully_shard` (call it after `fully_shard`, as an optimizer requires).

    In pure bfloat16 training, keep the logits in float32, which `MGLU` accepts:
    `layer.mask_logits.data = layer.mask_logits.data.float()`. A bfloat16 number does not change if less than 1/512 of
    it is added, so that at `mask_lr=3e-5` a logit above 0.015 does not move any more. Autocast needs no such care.

    Args:
        model: any module.
        lr: learning rate of weights, norms and biases, at least 0.
        weight_decay: weight decay of the weights, at least 0.
        mask_lr: learning rate of mask logits, at least 0; None for `0.3 * lr`.
        mask_logits: more parameters that are mask logits: a list of names as in `model.named_parameters()`, in which
            `*` stands for anything, for example `["*.logits"]`, or a function `(name, parameter) -> bool`. Names have
            no `_orig_mod`, which `torch.compile` inserts.

    Returns:
        One dict for each group with `params`, `lr`, `weight_decay` and `name`, which is one of the table. Pass the list
        to the optimizer, and find a group by its name in `optimizer.param_groups`.

    Raises:
        TypeError: `model` is not an `nn.Module`, a number is not a number, or `mask_logits` is not as above.
        ValueError: a number is negative or not finite, a name in `mask_logits` fits no parameter, a parameter has no
            shape yet (lazy modules), a module is a `FullyShardedDataParallel` (which flattens parameters, so that
            norms and weights look alike), or there is no parameter to train.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, must be a torch.nn.Module")
    if any(type(module).__name__ == "FullyShardedDataParallel" for module in model.modules()):
        raise ValueError(
            "model: FullyShardedDataParallel flattens parameters, so that norms and weights look alike; "
            "use torch.distributed.fsdp.fully_shard"
        )
    _check_number("lr", lr)
    _check_number("weight_decay", weight_decay)
    if mask_lr is not None:
        _check_number("mask_lr", mask_lr)
    logits, names = logits_of_modules(model), selected(model, mask_logits)
    found: dict[nn.Parameter, str] = {}
    for name, owner, parameter in parameters_with_owners(model):
        if parameter.requires_grad:
            if is_lazy(parameter):
                raise ValueError(f"model: {name} has no shape yet; call the model once before making parameter groups")
            is_logits = parameter in logits or name in names
            kind = "mask_logits" if is_logits else _kind(name, owner, parameter)
            found[parameter] = max(found.get(parameter, kind), kind, key=_RANK.index)
    if not found:
        raise ValueError(f"model: {type(model).__name__} has no parameter with requires_grad=True")
    rates = {"weights": lr, "no_decay": lr, "mask_logits": MASK_LR_RATIO * lr if mask_lr is None else mask_lr}
    groups = [
        {
            "name": kind,
            "params": [parameter for parameter, of in found.items() if of == kind],
            "lr": rates[kind],
            "weight_decay": weight_decay if kind == "weights" else 0.0,
        }
        for kind in _RANK
    ]
    return [group for group in groups if group["params"]]


_RANK = ("weights", "no_decay", "mask_logits")
"""The groups in their order. A parameter that is used in several ways gets the last of its kinds."""


def _kind(name: str, owner: nn.Module, parameter: nn.Parameter) -> str:
    own_name = name.rpartition(".")[2]
    is_spared = parameter.dim() < 2 or "bias" in own_name or isinstance(owner, _NORMS)
    return "no_decay" if is_spared else "weights"


def _check_number(name: str, value: object) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}, must be a number")
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}: got {value!r}, must be finite and at least 0")
