"""`freeze`, which replaces learned masks by packed bits for inference."""

from __future__ import annotations

import sys
from collections.abc import Collection
from typing import TypeVar, overload

from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize, prune

from .. import notices
from ..masks import MAX_MASKS
from .arguments import check_model
from .experts import MGLUExperts, NaiveMGLUExperts
from .mask_logits import without_wrappers
from .masked_linear import LOGITS, MaskedLinear, packed_logits
from .mglu import MGLU
from .naive import NaiveMGLU
from .replacing import Replacements, replace_modules

ModelT = TypeVar("ModelT", bound=nn.Module)


@overload
def freeze(model: ModelT) -> ModelT: ...


@overload
def freeze(model: nn.Module, *, replace: Replacements) -> nn.Module: ...


def freeze(model: nn.Module, *, replace: Replacements | None = None) -> nn.Module:
    """Turn the learned masks of every `MGLU` and `NaiveMGLU` in `model` into packed bits, in place.

    The buffer `packed_masks` (`M = logits > 0`) replaces `mask_logits`, which becomes None, and every `NaiveMGLU`
    becomes an `MGLU`. `MGLUExperts` and `NaiveMGLUExperts` change in the same way. On the CPU, the results of an `MGLU`
    stay the same bit for bit. The results of a former `NaiveMGLU` change by rounding, because it now runs the fused
    operator. A model without such modules is returned with a warning.

    Modules are changed in place. Each keeps its identity, its place in the model, its hooks, training flag and router,
    its `weight` Parameter (tied weights stay tied) and the parametrizations of the weight. Therefore `freeze` also
    works on modules inside `torch.compile`, which recompiles at the next call. Parametrizations and pruning of
    `mask_logits` are evaluated and removed. Modules that share one `mask_logits` share the packed masks. A model that
    is frozen already is returned unchanged.

    An instance of a subclass gets packed masks but keeps its class, because a subclass may do more than its base class.
    A subclass of `NaiveMGLU` therefore still runs the naive loop, and a warning says so. A `NaiveMGLU` with biases, or
    without masks on gates or values, keeps running the naive loop without a warning, since no fused operator computes
    it.

    Your own modules must be replaced, because only you know what they compute:

        mglu_ops.freeze(model, replace={
            MyGate: lambda module: mglu_ops.nn.MGLU.from_parameters(module.weight, module.logits, activation="gelu")
        })

    The function gets each instance of `MyGate` and returns its replacement, whose masks are then packed. A module in
    several places is replaced by one module, and parameters that the function passes on stay tied. Hooks of the
    replaced module are lost. `freeze` does not check that a replacement computes the same as its module: compare the
    results of the model before and after. Masks that are not `logits > 0` must be passed as bool masks. An example is
    `sigmoid(logits) > 0.5`, which is False for tiny positive logits, because their sigmoid rounds to 0.5.

    A warning names modules that still look like MGLU layers of other classes: they hold a parameter `[n, d, h]` with n
    from 1 to 16, and they or an `nn.Linear` in them hold a parameter `[d, h]`. They are left as they are.

    On tensor-parallel modules (`mglu_ops.parallel.ColwiseMGLU`) each rank packs its own rows, so all ranks must call
    `freeze`.

    An optimizer created before `freeze` still holds the logits, which are no longer used. `freeze` cannot detect this:
    create a new optimizer if training continues.

    Args:
        model: any module; the root may itself be an `MGLU`, a `NaiveMGLU` or a `torch.compile`d module.
        replace: maps each class to a function that takes an instance and returns its replacement, usually an `MGLU`
            made by `MGLU.from_parameters`. Subclasses of a class are not replaced.

    Returns:
        `model`, the same object; or its replacement, if its own class is in `replace`.

    Raises:
        TypeError: `model` is not an `nn.Module`, `replace` is not such a mapping, or a function did not return a
            module.
        ValueError: the logits are sharded by `fully_shard`, offloaded by accelerate or have an adapter of PEFT;
            the model has no module of a class in `replace`; or the module to replace is the root of a compiled model.
    """
    check_model(model)
    changed = {
        module
        for module in model.modules()
        if type(module) in (replace or ()) or (isinstance(module, MaskedLinear) and module.learnable_masks)
    }
    refuse_managed(model, changed, "logits", "freeze")
    refuse_adapters(model, changed, LOGITS, "freeze")
    if replace is not None:
        model = replace_modules(model, replace)
    packed: dict[Tensor, Tensor] = {}
    for name, module in list(model.named_modules()):
        if isinstance(module, MaskedLinear):
            _pack_masks(module, packed)
        if isinstance(module, NaiveMGLU):
            _become_fused(module, name)
    if others := _modules_like_mglu(model):
        _warn_of_others(others)
    elif replace is None and not any(isinstance(module, MaskedLinear) for module in model.modules()):
        notices.warn(
            f"freeze: {type(model).__name__} has no MGLU or NaiveMGLU, so no masks were packed; name modules of your "
            "own in freeze(model, replace={...})",
            stacklevel=2,
        )
    return model


def _modules_like_mglu(model: nn.Module) -> dict[str, str]:
    """Map the names of modules that look like MGLU layers of other packages to the names of their classes."""
    return {
        without_wrappers(name) or "the model": type(module).__name__
        for name, module in model.named_modules()
        if not isinstance(module, MaskedLinear) and _looks_like_mglu(module)
    }


def _looks_like_mglu(module: nn.Module) -> bool:
    own = [parameter for parameter in module.parameters(recurse=False) if not is_lazy(parameter)]
    linears = [child.weight for child in module.children() if isinstance(child, nn.Linear)]
    shapes = {weight.shape for weight in (*own, *linears) if not is_lazy(weight)}
    logits = [one for one in own if one.dim() == 3 and 1 <= len(one) <= MAX_MASKS and one.is_floating_point()]
    return any(one.shape[1:] in shapes for one in logits)


def _warn_of_others(found: dict[str, str]) -> None:
    names, classes = list(found), list(dict.fromkeys(found.values()))
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    notices.warn(
        "freeze: modules that look like MGLU layers, with parameters [d, h] and [n, d, h], but are not of mglu_ops, "
        f"were left as they are: {', '.join(names[:3])}{more}, of class {', '.join(classes)}; to pack the masks of "
        f"such a layer, replace it, for example by freeze(model, replace={{{classes[0]}: lambda module: "
        "mglu_ops.nn.MGLU.from_parameters(module.weight, module.logits)})",
        stacklevel=3,  # freeze's caller
    )


def refuse_managed(model: nn.Module, changed: Collection[nn.Module], what: str, function: str) -> None:
    """Raise an error if FSDP or accelerate manages the parameters of modules in `changed`.

    FSDP would put a removed parameter back at each call. If accelerate offloads parameters, the module holds empty
    tensors except during its forward. Messages call the parameters `what`, and name the `function` that was called.
    """
    fsdp = sys.modules.get("torch.distributed.fsdp")
    managers = () if fsdp is None else (fsdp.FSDPModule, fsdp.FullyShardedDataParallel)
    sharded = {inner for module in model.modules() if isinstance(module, managers) for inner in module.modules()}
    may_be_offloaded = any(hasattr(module, "_hf_hook") for module in model.modules())
    for name, module in model.named_modules():
        if module not in changed:
            continue
        if module in sharded:
            raise ValueError(
                f"model: {name or 'it'} is sharded by FSDP, which cannot give up its {what}; call {function} before "
                "fully_shard, or load the state dict of this model, which "
                "torch.distributed.checkpoint.state_dict.get_model_state_dict returns, into a model without FSDP, "
                f"and {function} that one"
            )
        if may_be_offloaded and any(parameter.is_meta for parameter in module.parameters()):
            raise ValueError(
                f"model: {name or 'it'} is offloaded by accelerate, so that the model does not hold its {what}; load "
                f"it without a device_map that offloads, call {function}, save it, and load the saved model"
            )


def refuse_adapters(model: nn.Module, changed: Collection[nn.Module], parameter: str, function: str) -> None:
    """Raise an error if an adapter of PEFT adds to a parameter of modules in `changed`, which it could not do later."""
    wrapper = getattr(sys.modules.get("peft.tuners.lora.layer"), "ParamWrapper", ())
    for name, module in model.named_modules():
        if isinstance(module, wrapper) and module.parameter_name == parameter and module.get_base_layer() in changed:
            raise ValueError(
                f"model: {name or 'it'} is an adapter of PEFT for {parameter}, must be merged first; call "
                f"merge_and_unload() and then {function}"
            )


def _pack_masks(module: MaskedLinear, packed: dict[Tensor, Tensor]) -> None:
    if not module.learnable_masks:
        return
    if parametrize.is_parametrized(module, LOGITS):
        # remove_parametrizations deletes a property of the module's class. Deep copies of the module have the same
        # class, so give the module a class of its own first.
        _parametrized_class(module, type(module).__bases__)
        parametrize.remove_parametrizations(module, LOGITS, leave_parametrized=True)
    if f"{LOGITS}_orig" in module._parameters:
        prune.remove(module, LOGITS)
    logits = module.mask_logits
    assert logits is not None
    if logits not in packed:
        packed[logits] = packed_logits(logits)
    module.mask_logits = None
    module.packed_masks = packed[logits]


_FUSED: dict[type[nn.Module], type[MGLU]] = {NaiveMGLU: MGLU, NaiveMGLUExperts: MGLUExperts}


def _become_fused(module: NaiveMGLU, name: str) -> None:
    """Change the class of a `NaiveMGLU` to `MGLU`, unless it is a variant that `MGLU` does not compute."""
    cls, own = type(module), parametrize.type_before_parametrizations(module)
    if not module.is_mglu:
        return
    if cls in _FUSED:
        module.__class__ = _FUSED[cls]  # type: ignore[assignment]
    elif own in _FUSED:
        _parametrized_class(module, (_FUSED[own],))
    else:
        notices.warn(
            f"freeze: {name or 'the model'} is a {cls.__qualname__}, a subclass of NaiveMGLU: its masks are packed, "
            "but it still runs the naive loop of its class; derive the class from mglu_ops.nn.MGLU to fuse it",
            stacklevel=3,  # freeze's caller
        )


def _parametrized_class(module: nn.Module, bases: tuple[type, ...]) -> None:
    """Replace the class that torch made for a module's parametrizations by a copy with other base classes."""
    own = ("__dict__", "__weakref__")
    namespace = {key: value for key, value in vars(type(module)).items() if key not in own}
    module.__class__ = type(f"Parametrized{bases[0].__name__}", bases, namespace)
