"""Converts gated linear units, such as SwiGLU, to MGLU layers that are a start for training."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ..activations import ACTIVATIONS
from ..checks import FLOATING
from .arguments import check_masks
from .feed_forward import MGLUFeedForward
from .masked_linear import LOGITS_STD
from .mglu import MGLU

ModelT = TypeVar("ModelT", bound=nn.Module)

WEIGHTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "magnitude": lambda gate, up: torch.where(gate.abs() >= up.abs(), gate, up),
    "average": lambda gate, up: (gate + up) / 2,
    "gate": lambda gate, up: gate,
    "up": lambda gate, up: up,
}
"""Maps each `init` to the function that makes one matrix from the gate matrix and the up matrix."""

PROJECTIONS = (
    ("gate_proj", "up_proj", "down_proj"),
    ("w1", "w3", "w2"),
    ("gate", "up", "down"),
    ("gate_up_proj", "down_proj"),
)
"""Usual names of the gate, up and down projections in a feed-forward layer.

The first name in a row of two names is the joined gate and up projection.
"""


class GatedUnit(NamedTuple):
    """The three matrices of a layer that computes `down(act(gate(x)) * up(x))`, and the name of `act`.

    `gate` and `up` are `[intermediate, hidden]`, and `down` is `[hidden, intermediate]`. For experts, all three begin
    with one more dimension, of size num_experts.
    """

    gate: Tensor
    up: Tensor
    down: Tensor
    activation: str


@torch.no_grad()
def from_swiglu(
    model: nn.Module,
    n_masks: int,
    *,
    init: str = "magnitude",
    top_k: int | None = None,
    projections: Sequence[str] | None = None,
) -> Any:
    """Copy a model, with an `MGLUFeedForward` in place of each feed-forward layer that is a gated linear unit.

    **The copy is a start for training, not an equivalent model**: one matrix and masks cannot hold what two matrices
    hold, so the copy predicts badly at first. `convert` fits the copy to real inputs, which is a better start. Train
    either copy on text and on the predictions of `model`. `model` is not changed and shares no tensor with the copy.

    A module is taken for a gated linear unit if its children have the names in `projections`. It is then called once,
    with known values in place of its children's results. This call shows which activation the module has, and whether
    it computes `down(act(gate(x)) * up(x))`.

    Each layer's gate and up matrices, `W_g` and `W_u`, become one weight W:

    | `init` | W | initial masks |
    |---|---|---|
    | `magnitude` | elementwise, `W_g` or `W_u`, whichever has the larger magnitude | 1 where W is `W_g` |
    | `average` | `(W_g + W_u) / 2` | random |
    | `gate` | `W_g` | random |
    | `up` | `W_u` | random |

    With one mask, `magnitude` is the choice of W and M with the least `|W_g - M * W|^2 + |W_u - (1 - M) * W|^2`.
    Further masks differ from the first where the two magnitudes are close, because equal masks would stay equal in
    training. The result of MGLU is a sum over the masks; without a router, the down projection is therefore divided by
    `n_masks`. Masks are learned, and their logits are in float32 even if the weights have 16 bits. Layers that share
    their three matrices become one layer in several places.

    Args:
        model: a module on one device: a model, a part of one, or a feed-forward layer alone.
        n_masks: number of masks, 1 to 16.
        init: how the weight is made, as in the table.
        top_k: number of masks that a token keeps, as in `MGLU`; None for no router. A router starts at random.
        projections: the names of the gate, up and down projections in a feed-forward layer, or of the joined gate and
            up projection and of the down projection; None for any row of `PROJECTIONS`.

    Returns:
        The copy, or the new layer if `model` is itself a feed-forward layer. To load a saved `state_dict` of the copy,
        convert a model of the same sizes in the same way, and load it into the result.

    Raises:
        TypeError: `model` is not a module; a projection is not a plain `nn.Linear`, but has an adapter or quantized
            weights, for example; a projection or its layer has a forward hook; or a layer with projections of these
            names computes something else, for example with another activation, a limit, a factor, dropout or a norm.
        ValueError: there is no layer to convert; a projection has a bias; the model is compiled, on several devices or
            on meta; or another argument is out of range.
    """
    check_masks(n_masks, True, top_k)
    check_init(init)
    check_model(model)
    units = gated_units(model, projections)
    check_found(model, units, projections)
    return replaced(model, feed_forwards_of(units, n_masks, init, top_k))


def check_init(init: object) -> None:
    if init not in WEIGHTS:
        raise ValueError(f"init: got {init!r}, must be one of {', '.join(WEIGHTS)}")


def check_model(model: object) -> None:
    """Check that a model can be copied: it is a module on one device, with data, and not compiled."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: got {type(model).__name__}, must be a torch.nn.Module")
    if any(name.split(".")[-1] == "_orig_mod" for name, _ in model.named_modules()):
        raise ValueError("model: got a compiled module, must not be compiled; call torch.compile on the result")
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if len(devices) != 1 or torch.device("meta") in devices:
        names = ", ".join(sorted(map(str, devices))) or "no device"
        raise ValueError(f"model: got parameters on {names}, must be on one device, and not on meta")


def check_found(model: nn.Module, found: object, projections: Sequence[str] | None) -> None:
    if not found:
        names = PROJECTIONS if projections is None else (projections,)
        raise ValueError(
            f"model: got {type(model).__name__}, must have a module with linear layers named "
            f"{' or '.join(', '.join(row) for row in names)}; projections takes the names that your modules have"
        )


def replaced(model: ModelT, layers: Mapping[nn.Module, nn.Module]) -> ModelT:
    """Copy a model, and replace each key of `layers` by its value. The tensors of the values are not copied."""
    for old, new in layers.items():
        new.train(old.training)
    return copy.deepcopy(model, {id(old): new for old, new in layers.items()})


def gated_units(model: nn.Module, projections: Sequence[str] | None = None) -> dict[nn.Module, GatedUnit]:
    """Find the feed-forward layers of a model; `from_swiglu` describes the argument and the errors."""
    if projections is not None and (
        not isinstance(projections, (list, tuple))
        or len(projections) not in (2, 3)
        or not all(isinstance(name, str) for name in projections)
    ):
        raise ValueError(f"projections: got {projections!r}, must be None or a list of two or three names, each a str")
    found = {}
    for path, module in model.named_modules():
        for names in PROJECTIONS if projections is None else (projections,):
            if all(isinstance(module._modules.get(name), nn.Module) for name in names):
                found[module] = _unit(module, names, f"model: {path}" if path else "model")
                break
    return found


def _unit(module: nn.Module, names: Sequence[str], where: str) -> GatedUnit:
    """Return the matrices and the activation of a feed-forward layer. Error messages call the layer `where`."""
    linears = {name: _linear(module._modules[name], f"{where}.{name}") for name in names}
    _check_hooks(module, where)
    *joined, down = (linear.weight for linear in linears.values())
    gate, up = joined if len(joined) == 2 else joined[0].chunk(2)
    if not gate.shape == up.shape == down.mT.shape:
        shapes = ", ".join(f"{name} {[*linear.weight.shape]}" for name, linear in linears.items())
        raise ValueError(
            f"{where}: got {shapes}, must be [intermediate, hidden], and [hidden, intermediate] for the last"
        )
    activation, is_up_first = _activation(module, linears, where)
    if is_up_first:
        gate, up = up, gate
    return GatedUnit(gate, up, down, activation)


def _linear(module: Any, where: str) -> nn.Linear:
    weight = getattr(module, "weight", None)
    if type(module) is not nn.Linear or type(weight) is not nn.Parameter or weight.dtype not in FLOATING:
        kind = "" if weight is None else f" with a weight of {type(weight).__name__} in {weight.dtype}"
        raise TypeError(
            f"{where}: got {type(module).__name__}{kind}, must be a torch.nn.Linear with a dense weight in a floating "
            "dtype; merge adapters and undo quantization before"
        )
    if module.bias is not None:
        raise ValueError(f"{where}: got a bias, must have none; an MGLU layer has no bias")
    _check_hooks(module, where)
    return module


def _check_hooks(module: nn.Module, where: str) -> None:
    if module._forward_pre_hooks or module._forward_hooks or "forward" in vars(module):
        raise TypeError(
            f"{where}: got {type(module).__name__} with a forward hook or a forward of its own, must have none; remove "
            "it before, since the new layer would not run it"
        )


class _StandIn(nn.Module):
    """Returns a given tensor in place of a projection, and keeps the x with which it was called."""

    def __init__(self, linear: nn.Linear, result: Tensor) -> None:
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, None
        self.weight = result.new_zeros(()).expand(linear.weight.shape)  # some layers read the weight's dtype
        self.result = result
        self.x: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        return self.result


def _activation(module: nn.Module, linears: dict[str, nn.Linear], where: str) -> tuple[str, bool]:
    """Return a layer's activation, and True if a single matrix holds gate and up, with the rows of up first.

    Raises:
        TypeError: the layer does not compute `down(act(gate(x)) * up(x))`.
    """
    *names, down_name = linears
    down = linears[down_name]
    gate, up = known_values(down.in_features, down.weight.device)
    size = 1, gate.shape[1], down.out_features
    x = torch.linspace(-1, 1, math.prod(size), dtype=gate.dtype, device=gate.device).view(size)
    results = (gate, up, x) if len(linears) == 3 else (torch.cat((gate, up), -1), x)
    stand_ins = {name: _StandIn(linear, y) for (name, linear), y in zip(linears.items(), results, strict=True)}
    others = {name: child for name, child in module._modules.items() if name not in linears}
    inside = "".join(f", {name} {child}" for name, child in others.items())
    gate_name, up_name = names if len(names) == 2 else ("gate", "up")
    computed = f"{down_name}(act({gate_name}) * {up_name})"
    try:
        trial = copy.deepcopy(module, {id(linear): stand_ins[name] for name, linear in linears.items()})
        trial.train()  # in training mode, dropout changes the result, so a layer with dropout is refused
        result = trial.forward(x)
    except Exception as error:
        raise TypeError(
            f"{where}: got {type(module).__name__}{inside}, must take x alone and compute {computed}, but raised "
            f"{type(error).__name__}: {error}"
        ) from error
    *inputs, hidden = (stand_in.x for stand_in in stand_ins.values())
    if all(isinstance(one, Tensor) and torch.equal(one, x) for one in (*inputs, result)):
        if (name := activation_between(gate, up, hidden)) is not None:
            return name, False
        if len(linears) == 2 and (name := activation_between(up, gate, hidden)) is not None:
            return name, True
    raise TypeError(
        f"{where}: got {type(module).__name__}{inside}, must compute {computed} with act one of "
        f"{', '.join(ACTIVATIONS)}, without a limit, a factor, dropout, a norm or another order of rows"
    )


def known_values(features: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Values of gate and up, float64 `[1, tokens, features]`, for which any two activations give different results.

    Their magnitude exceeds the usual limits of layers that clamp gate or up.
    """
    tokens = -(-512 // features)
    gate = torch.linspace(-10, 10, tokens * features, dtype=torch.float64, device=device).sinh()  # at most 11013
    return gate.view(1, tokens, features), gate.roll(gate.numel() // 3).view(1, tokens, features)


def activation_between(gate: Tensor, up: Tensor, hidden: object) -> str | None:
    """The activation for which `hidden` is `act(gate) * up`, up to rounding in float32; None if there is none."""
    if not isinstance(hidden, Tensor) or hidden.shape != gate.shape:
        return None
    for name, activation in ACTIVATIONS.items():
        error = (hidden - activation.forward(gate) * up).abs()
        if (error <= 1e-5 * (1 + activation.forward(gate).abs()) * up.abs() + 1e-9).all():
            return name
    return None


def feed_forwards_of(
    units: Mapping[nn.Module, GatedUnit], n_masks: int, init: str, top_k: int | None
) -> dict[nn.Module, nn.Module]:
    """Make the layers that `from_swiglu` puts in place of gated linear units: one for all with the same matrices."""
    made, layers = dict[object, nn.Module](), dict[nn.Module, nn.Module]()
    for module, unit in units.items():
        key = (*(matrix.data_ptr() for matrix in unit[:3]), unit.activation)
        if key not in made:
            made[key] = _feed_forward_of(unit, n_masks, init, top_k)
        layers[module] = made[key]
    return layers


def _feed_forward_of(unit: GatedUnit, n_masks: int, init: str, top_k: int | None) -> MGLUFeedForward:
    intermediate, hidden = unit.gate.shape
    options: dict[str, Any] = {"n_masks": n_masks, "activation": unit.activation, "top_k": top_k}
    layer = MGLUFeedForward(hidden, intermediate, device="meta", dtype=unit.gate.dtype, **options)
    start(layer.mglu, unit, init)
    layer.down_proj.weight = nn.Parameter(down_of(unit, layer.mglu))
    return layer


def start(layer: MGLU, unit: GatedUnit, init: str) -> None:
    """Make the weight, masks and router of an MGLU layer, or of MGLU experts, that were built on the meta device."""
    assert layer.mask_logits is not None
    # Logits have at least 32 bits: training steps are too small to change 16-bit logits, and tiny logits would become 0
    # in float16.
    kind: dict[str, Any] = {"device": unit.gate.device, "dtype": torch.promote_types(unit.gate.dtype, torch.float32)}
    layer.mask_logits = nn.Parameter(torch.empty(layer.mask_logits.shape, **kind).normal_(std=LOGITS_STD))
    if layer.router is not None:
        kind["dtype"] = unit.gate.dtype
        layer.router = nn.Linear(layer.in_features, layer.n_masks, bias=False, **kind)
    take_over_glu(layer, unit.gate, unit.up, init)


def down_of(unit: GatedUnit, layer: MGLU) -> Tensor:
    """The down projection's weight. Without a router it is divided by n_masks, because MGLU is a sum over its masks."""
    return unit.down.detach().clone() if layer.top_k is not None else unit.down.detach() / layer.n_masks


@torch.no_grad()
def take_over_glu(layer: MGLU, gate: Tensor, up: Tensor, init: str) -> None:
    """Make the weight of a layer from the matrices of a gated linear unit. The layer's masks must be learnable.

    `from_swiglu` says what each `init` does. Only `magnitude` changes the masks. The layer's result is a sum over its
    masks, so without a router the caller must divide the down projection by the number of masks.

    Args:
        layer: the layer, or the experts, whose weight is replaced.
        gate: `[out_features, in_features]`, W_g; with num_experts in front for experts.
        up: W_u, of the same shape.
        init: a key of WEIGHTS.
    """
    assert layer.mask_logits is not None
    layer.weight = nn.Parameter(WEIGHTS[init](gate, up).clone())
    if init == "magnitude":
        # The logits of the first mask become |W_g| - |W_u|, scaled to the size of initial logits. For each further
        # mask, this is added to its initial logits, which are noise of the same size.
        difference = gate.float().abs() - up.float().abs()
        size = difference.square().mean((-2, -1), keepdim=True).sqrt()
        scaled = difference * (LOGITS_STD / size.clamp(min=1e-30))
        masks = layer.mask_logits.movedim(-3, 0)
        masks[1:] += scaled
        # If both magnitudes are equal, give the weight to the gate, as `WEIGHTS` does.
        masks[0] = torch.where(difference >= 0, scaled.clamp(min=1e-6), scaled)
