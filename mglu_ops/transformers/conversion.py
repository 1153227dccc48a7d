"""`from_swiglu` and `convert` make an MGLU model from a SwiGLU model, as a start for training."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel

from .. import notices
from ..activations import ACTIVATIONS
from ..checks import FLOATING
from ..nn import conversion
from ..nn.conversion import GatedUnit
from ..nn.fitted_conversion import Conversion, FitOptions, fitted
from .architectures import ARCHITECTURES, Architecture
from .configuration import MGLUBalanceConfigMixin, check_feed_forward, check_mask_keys
from .feed_forward import MGLUMoeExperts

if TYPE_CHECKING:
    from typing_extensions import Unpack

_EXPERTS = {"has_gate": True, "has_bias": False, "is_transposed": False, "is_concatenated": True}
"""Attributes by which experts of Transformers describe `gate_up_proj` and `down_proj`, with the required values."""

_SETTINGS = ("training", "gradient_checkpointing", "_gradient_checkpointing_func")
"""Attributes of modules that a model of another class takes over."""


@torch.no_grad()
def from_swiglu(
    model: nn.Module,
    n_masks: int,
    *,
    init: str = "magnitude",
    mask_top_k: int | None = None,
    router_aux_loss_coef: float = 0.0,
    projections: Sequence[str] | None = None,
) -> Any:
    """Make an MGLU model from a model of Transformers, or any other module, with gated feed-forward layers.

    **The result is a start for training, not an equivalent model.** `model` is not changed, and shares no tensor with
    the result. `convert` also fits the layers to real inputs, which is a better start, and
    `examples/convert_swiglu.py` trains its result.

    `mglu_ops.nn.conversion.from_swiglu`, which this function extends, says how weights and masks are made from the gate
    and up matrices, and which feed-forward layers it takes. The experts of a mixture, which Transformers keeps in
    stacked matrices, are converted in the same way. Everything else is copied, with its settings: embeddings (tied ones
    stay tied), attention, norms, routers of experts, the generation configuration, device, dtype, training modes and
    gradient checkpointing.

    - If this package has an MGLU class for the class of `model`, the result is of that class. Its `save_pretrained` and
      `from_pretrained` know the masks.
    - Otherwise, the result has the class of `model`, with other modules in it. It trains, freezes, quantizes and
      generates, but `from_pretrained` of that class draws new SwiGLU layers in place of the saved MGLU layers. To load
      a saved result, convert a model of the same configuration in the same way, and load the saved `state_dict` into
      it.

    Args:
        model: a model or a part of one, on one device.
        n_masks: number of masks, 1 to 16.
        init: how the weight is made: `magnitude`, `average`, `gate` or `up`.
        mask_top_k: number of masks that a token keeps; None for no router. A router starts at random.
        router_aux_loss_coef: factor of the load-balancing loss of routers of masks; 0 unless the result has an MGLU
            class without experts.
        projections: the names of the gate, up and down projections in a feed-forward layer, or of the joined gate and
            up projection and of the down projection; None to look for usual names.

    Returns:
        The MGLU model.

    Raises:
        TypeError: a feed-forward layer computes something else than a gated linear unit of plain linear layers; the
            model has adapters; or this package has an MGLU class for the model, but a layer is not as Transformers
            makes it.
        ValueError: there is no layer to convert; a layer has biases; the model is compiled, on several devices or has
            no data; or another argument is out of range.
    """
    if getattr(model, "peft_config", None):
        raise TypeError(f"model: got {type(model).__name__} with adapters of PEFT, must have none; merge them before")
    conversion.check_init(init)
    check_mask_keys(n_masks, mask_top_k, router_aux_loss_coef)
    architecture = next((row for row in ARCHITECTURES if type(model) in row.swiglu), None)
    if router_aux_loss_coef and (architecture is None or not issubclass(architecture.config, MGLUBalanceConfigMixin)):
        raise ValueError(
            f"router_aux_loss_coef: got {router_aux_loss_coef} for a {type(model).__name__}, must be 0: only an MGLU "
            "class without experts adds this loss"
        )
    conversion.check_model(model)
    if architecture is not None:
        check_feed_forward(model.config)
    units = conversion.gated_units(model, projections)
    layers = conversion.feed_forwards_of(units, n_masks, init, mask_top_k)
    layers |= {module: _experts_of(unit, n_masks, init, mask_top_k) for module, unit in _experts(model)}
    conversion.check_found(model, layers, projections)
    result: Any = conversion.replaced(model, layers)
    if architecture is not None:
        keys = {"n_masks": n_masks, "mask_top_k": mask_top_k, "router_aux_loss_coef": router_aux_loss_coef}
        return _in_own_class(result, architecture, keys)
    if isinstance(model, PreTrainedModel):
        result._weight_conversions = []  # otherwise, save_pretrained would give experts the tensor names of SwiGLU
        notices.warn(
            f"from_swiglu: mglu_ops.transformers has no MGLU class for {type(model).__name__}, whose from_pretrained "
            "would draw new layers; to load the result later, convert a model again, and use load_state_dict",
            stacklevel=3,  # from_swiglu's caller; the decorator adds a frame
        )
    return result


@torch.inference_mode(False)  # as in `mglu_ops.nn.convert`
def convert(
    model: nn.Module,
    batches: Sequence[Any],
    n_masks: int = 1,
    *,
    projections: Sequence[str] | None = None,
    **options: Unpack[FitOptions],
) -> Conversion:
    """Make an MGLU model from a model of Transformers, with layers fitted to its results on real inputs.

    `mglu_ops.nn.convert` describes the fit, its arguments and its result; `from_swiglu` describes the class of the
    model in the result. The experts of a layer are fitted one after the other, each on the tokens that choose it. The
    errors of such a layer are the means over its experts.

    Raises:
        TypeError, ValueError: as in `from_swiglu` and `mglu_ops.nn.convert`.
    """
    student = from_swiglu(model, n_masks, projections=projections)
    units = conversion.gated_units(model, projections) | dict(_experts(model))
    return fitted(model, student, units, batches, **options)


def _experts(model: nn.Module) -> Iterator[tuple[nn.Module, GatedUnit]]:
    """Yield each module of a model that holds the experts of Transformers, with the matrices of its experts.

    Raises:
        TypeError: an expert does not compute a gated linear unit of one gate matrix and one up matrix.
    """
    for name, module in model.named_modules():
        experts: Any = module
        if not {"gate_up_proj", "down_proj"} <= module._parameters.keys() or experts.gate_up_proj.dim() != 3:
            continue
        where = f"model: {name}: got {type(module).__name__}"
        for flag, expected in _EXPERTS.items():
            if (value := getattr(module, flag, None)) is not expected:
                raise TypeError(f"{where} with {flag}={value}, must be {expected}")
        weights = {experts.gate_up_proj, experts.down_proj}
        if any(type(weight) is not nn.Parameter or weight.dtype not in FLOATING for weight in weights):
            raise TypeError(f"{where}, must have dense weights in a floating dtype; undo quantization before")
        gate, up = conversion.known_values(experts.down_proj.shape[-1], experts.down_proj.device)
        hidden = experts._apply_gate(torch.cat((gate, up), -1))
        if (activation := conversion.activation_between(gate, up, hidden)) is None:
            raise TypeError(
                f"{where}, must compute act(gate) * up with act one of {', '.join(ACTIVATIONS)}, without a limit or a "
                "factor"
            )
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        yield module, GatedUnit(gate, up, experts.down_proj, activation)


def _experts_of(unit: GatedUnit, n_masks: int, init: str, top_k: int | None) -> MGLUMoeExperts:
    experts, intermediate, hidden = unit.gate.shape
    options: dict[str, Any] = {"n_masks": n_masks, "activation": unit.activation, "top_k": top_k}
    layer = MGLUMoeExperts(experts, hidden, intermediate, device="meta", dtype=unit.gate.dtype, **options)
    conversion.start(layer.mglu, unit, init)
    layer.down_proj.weight = nn.Parameter(conversion.down_of(unit, layer.mglu))
    return layer


def _in_own_class(converted: Any, architecture: Architecture, keys: dict[str, Any]) -> Any:
    """Make a model of the architecture's MGLU class from the tensors and settings of a converted copy."""
    source = converted.config
    left_out = ("model_type", "architectures", "transformers_version")
    kept = {key: value for key, value in source.to_dict().items() if key not in left_out}
    if not issubclass(architecture.config, MGLUBalanceConfigMixin):
        del keys["router_aux_loss_coef"]  # in a mixture this key is for the routers of experts, and is in `kept`
    factory = AutoModelForCausalLM if type(converted) is architecture.swiglu[1] else AutoModel
    with torch.device("meta"):
        result = factory.from_config(
            architecture.config(**{**kept, **keys}),
            dtype=converted.dtype,
            attn_implementation=source._attn_implementation,
        )
    missing, unexpected = result.load_state_dict(converted.state_dict(), strict=False, assign=True)
    if missing or unexpected:
        raise TypeError(
            f"model: got a {type(converted).__name__} whose layers are not those of Transformers' class, must be "
            f"unchanged: it would lack {', '.join(missing[:3])}, and have {', '.join(unexpected[:3])} in addition"
        )
    for name, buffer in converted.named_buffers():  # buffers that are not in the state_dict are still on meta
        owner, _, leaf = name.rpartition(".")
        setattr(result.get_submodule(owner), leaf, buffer)
    result.tie_weights()
    for name, parameter in result.named_parameters():
        parameter.requires_grad_(converted.get_parameter(name).requires_grad)
    if converted.is_gradient_checkpointing:
        result.gradient_checkpointing_enable()  # also makes the embeddings' results require gradients
    for name, module in result.named_modules():
        settings = vars(converted.get_submodule(name))
        vars(module).update({key: settings[key] for key in _SETTINGS if key in settings})
    if converted.can_generate():
        result.generation_config = copy.deepcopy(converted.generation_config)
    return result
