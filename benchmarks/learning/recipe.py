"""A recipe: everything that a training run depends on, from the feed-forward layer to the optimiser."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from benchmarks.decoder import Block, Projection, Sizes
from benchmarks.language_model import LanguageModel
from benchmarks.learning.masks import LOGIT_BYTES, ContinuousMGLU, start_accumulators
from benchmarks.learning.mixture import Mixture
from benchmarks.learning.structure import PrunedGLU, StructuredMGLU
from mglu_ops.nn import GLU, LU, MGLU, NaiveMGLU
from mglu_ops.nn.conversion import WEIGHTS, take_over_glu
from mglu_ops.nn.fitting import STEPS

Layer = Literal["lu", "glu", "glu_shared", "mglu", "no_gate_mask", "no_value_mask"]
LAYERS: tuple[Layer, ...] = get_args(Layer)
"""Kinds of the first half of a feed-forward layer. With `silu`, `glu` is SwiGLU and `mglu` is SwiMGLU."""
EXPERT_LAYERS = ("lu", "glu", "mglu")
"""The kinds of layer that the experts of a mixture may have."""
StraightThrough = Literal["identity", "clipped", "tanh"]
Structure = Literal["free", "2:4"]
SLOPE = 0.05
"""The width, in logits, of the straight-through gradients `clipped` and `tanh`."""

CONTEXT = 512
SEQUENCES = 32
"""Sequences per step. A step reads `SEQUENCES * CONTEXT` tokens."""


def _sizes(layers: int, hidden: int, heads: int) -> Sizes:
    return Sizes(layers, hidden, 4 * hidden, heads, heads, vocabulary=8192, context=CONTEXT, rope_base=10_000.0)


SIZES = {"10M": _sizes(6, 256, 4), "25M": _sizes(10, 384, 6), "90M": _sizes(12, 640, 10), "300M": _sizes(18, 1024, 16)}
"""Name of a model -> its sizes. The name is about the number of weights that the model has with SwiGLU."""


@dataclass(frozen=True)
class Recipe:
    """A training run. Two runs with the same recipe, corpus and device give the same result.

    Attributes:
        layer: the feed-forward layer, one of LAYERS.
        n_masks: the number of masks, in layers that have masks.
        activation: the argument of `mglu_ops.nn.MGLU`.
        top_k: the number of masks that the router keeps for a token; None for all masks and no router.
        learned: whether the masks are learned; if not, they are random and fixed.
        size: the model, a key of SIZES.
        width: the intermediate size as a multiple of the model's own.
        experts: the number of experts; 1 for a layer that is not a mixture.
        active: the number of experts of a token. The intermediate size is divided among them.
        megabytes: training text, in 10^6 bytes. Text that is read twice counts twice.
        lr: the largest learning rate of the weights.
        last_rate: the learning rates at the end, as a fraction of the largest.
        average: the fraction of the steps over which parameters are averaged exponentially: the weight of a step falls
            by the factor e in this many steps. Held-out text is read with the average. 0 for the last parameters.
        mask_lr: the learning rate of mask logits, as a fraction of `lr`.
        mask_stop: the fraction of the steps after which the masks are frozen.
        logits_std: the standard deviation of the initial logits.
        gate_ratio: the fraction of ones in the initial masks.
        straight_through: how gradients pass the threshold: `identity` (the paper's), `clipped` (no gradient where a
            logit is further than `SLOPE` from 0) or `tanh` (times the derivative of `SLOPE * tanh(logit / SLOPE)`).
        continuous: the fraction of the steps in which masks are continuous in the forward pass too
            (`masks.ContinuousMGLU`), with a width that falls linearly to 0. In later steps they are hard. Each point of
            the learning curve is evaluated with the masks of its step. 0 for hard masks in all steps.
        flips: how often a mask bit would flip in a run if gradients were independent. Above 0, masks are learned by
            accumulators (`masks.step_accumulators`) instead of AdamW, and `mask_lr` and `logits_std` have no meaning.
        scaled_sum: whether the sum over masks is divided by `sqrt(n_masks)`.
        scale: a factor of the gated projection's result, before the down projection.
        weight_gain: a factor of the initial weights of the layer.
        down_gain: a factor of the initial weight of the down projection.
        start: how the model is converted from a trained SwiGLU model (`teacher`): a key of
            `mglu_ops.nn.conversion.WEIGHTS`, or the last step of a fit, one of `fitting.STEPS`. `teacher`, for `glu`
            only, goes on with the trained model itself. None for random parameters.
        distilled: whether the model learns the predictions of its teacher instead of the text; needs `start`.
        text_share: the share of the text's cross entropy in the loss of a distilled model, beside the predictions'.
        skip: the text that the run skips first, in 10^6 bytes; with `start`, the teacher has read it.
        structure: `2:4` for masks of `mglu` with two ones among each four columns, or for matrices of `glu` that keep
            two of each four weights (`benchmarks.learning.structure`); `free` for neither.
        centered: whether the mean over each four columns is subtracted from the gradient of logits with structure 2:4.
        decay: the decay of SR-STE (`structure.PrunedGLU`), for matrices of `glu` with structure 2:4.
        logits: how mask logits are optimized, a key of `masks.LOGIT_BYTES`.
        vocabulary: the number of different tokens; None for the model's own.
        paired: whether layers are compared seed by seed. The order of the text then depends on the seed too. Layers
            with the same seed start with the same parameters where their shapes agree, up to gains.
        seed: the seed of the initial parameters. Unless `paired`, the text and its order do not depend on it.
    """

    layer: Layer = "mglu"
    n_masks: int = 4
    activation: str = "silu"
    top_k: int | None = None
    learned: bool = True
    size: str = "25M"
    width: float = 1.0
    experts: int = 1
    active: int = 1
    megabytes: float = 60.0
    lr: float = 1e-3
    last_rate: float = 0.1
    average: float = 0.0
    mask_lr: float = 1.0
    mask_stop: float = 1.0
    logits_std: float = 0.01
    gate_ratio: float = 0.5
    straight_through: StraightThrough = "identity"
    continuous: float = 0.0
    flips: float = 0.0
    scaled_sum: bool = False
    scale: float = 1.0
    weight_gain: float = 1.0
    down_gain: float = 1.0
    start: str | None = None
    distilled: bool = False
    text_share: float = 0.0
    skip: float = 0.0
    structure: Structure = "free"
    centered: bool = False
    decay: float = 0.0
    logits: str = "adamw"
    vocabulary: int | None = None
    paired: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        allowed = {
            "layer": LAYERS,
            "size": SIZES,
            "straight_through": get_args(StraightThrough),
            "structure": get_args(Structure),
            "logits": LOGIT_BYTES,
        }
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise ValueError(f"{name}: got {getattr(self, name)!r}, must be one of {', '.join(values)}")
        starts = {"mglu": (*WEIGHTS, *STEPS), "glu": ("teacher",)}
        is_routed_fit = self.is_fitted and self.top_k is not None
        if self.start is not None and (self.start not in starts.get(self.layer, ()) or is_routed_fit):
            raise ValueError(
                f"start: got {self.start!r} for {self.layer}, must be teacher for glu or one of "
                f"{', '.join(starts['mglu'])} for mglu, and one of {', '.join(WEIGHTS)} with top_k"
            )
        if not 1 <= self.active <= self.experts:
            raise ValueError(f"active: got {self.active}, must be from 1 to experts, {self.experts}")
        may_start = self.start is None or (self.start in ("teacher", STEPS[-1]) and self.width == 1)
        if self.is_mixture and (self.layer not in EXPERT_LAYERS or not may_start or self.down_gain != 1):
            raise ValueError(
                f"experts: got {self.experts} for {self.layer}, must be 1 for layers other than "
                f"{', '.join(EXPERT_LAYERS)}, with a down_gain, and for conversions except {STEPS[-1]} of width 1"
            )
        for name in ("continuous", "flips"):
            value = getattr(self, name)
            if not 0 <= value <= 1:
                raise ValueError(f"{name}: got {value}, must be from 0 to 1")
            is_soft_fit = name == "continuous" and self.is_fitted and not self.is_mixture
            if value and not (self.may_learn_otherwise or is_soft_fit):
                raise ValueError(
                    f"{name}: got {value} for {self.layer}, must be 0 unless the masks of mglu are learned with the "
                    "identity gradient and without top_k, experts and a start; after a fit, continuous may be more"
                )
        if self.continuous and self.flips:
            raise ValueError(f"flips: got {self.flips} for masks that are continuous, must be 0")
        if self.distilled and self.start is None:
            raise ValueError("distilled: got True without a start, whose teacher makes the predictions")
        if not 0 <= self.text_share <= 1 or (self.text_share and not self.distilled):
            raise ValueError(f"text_share: got {self.text_share}, must be from 0 to 1, and 0 unless distilled")
        if self.logits != "adamw" and not (self.has_masks and self.learned and not self.flips):
            raise ValueError(f"logits: got {self.logits!r} for {self.layer}, must be 'adamw' unless logits are learned")
        if not 0 <= self.average <= 1 or (self.average and self.logits == "bfloat16"):
            raise ValueError(f"average: got {self.average}, must be from 0 to 1, and 0 for logits in bfloat16")
        self._check_structure()

    def _check_structure(self) -> None:
        is_masked = (self.may_learn_otherwise or self.is_fitted) and not self.continuous and not self.flips
        if self.structure == "2:4" and (self.is_mixture or (not is_masked and self.layer != "glu")):
            raise ValueError(
                f"structure: got 2:4 for {self.layer}, must be free unless the masks of mglu are learned with our "
                "recipe's gradient and optimiser, from random parameters or from a fit, or for glu, without experts"
            )
        for name, layer in (("centered", "mglu"), ("decay", "glu")):
            if getattr(self, name) and (self.layer, self.structure) != (layer, "2:4"):
                raise ValueError(f"{name}: got {getattr(self, name)}, must be 0 unless {layer} has structure 2:4")

    @property
    def has_masks(self) -> bool:
        return self.layer in ("mglu", "no_gate_mask", "no_value_mask")

    @property
    def may_learn_otherwise(self) -> bool:
        """True if the fields `continuous`, `flips` and structure 2:4 are allowed for `mglu`."""
        plain = self.straight_through == "identity" and self.top_k is None and self.start is None
        return self.layer == "mglu" and self.learned and plain and not self.is_mixture

    @property
    def is_mixture(self) -> bool:
        return self.experts > 1

    @property
    def is_fitted(self) -> bool:
        return self.start in STEPS

    @property
    def teacher(self) -> Recipe:
        """The recipe of the SwiGLU model that `start` converts. Its width is 1."""
        one = Recipe("glu", size=self.size, megabytes=self.skip, seed=self.seed)
        one = replace(one, experts=self.experts, active=self.active)
        return replace(one, vocabulary=self.vocabulary, paired=self.paired)

    @property
    def fit(self) -> Recipe:
        """The recipe with defaults for all fields on which a fit does not depend: the training after it."""
        rates = "lr", "last_rate", "mask_lr", "mask_stop"
        other = "average", "continuous", "distilled", "text_share", "logits"
        return replace(self, **{name: getattr(Recipe, name) for name in (*rates, *other)})

    @property
    def changes(self) -> dict[str, Any]:
        """The fields that differ from the default recipe of the same layer, number of masks and seed."""
        default = Recipe(self.layer, self.n_masks, seed=self.seed)
        return {name: value for name, value in asdict(self).items() if value != getattr(default, name)}

    @property
    def name(self) -> str:
        """The name of the run: its layer, every field that differs from the default, and its seed."""
        layer = f"{self.layer}-{self.n_masks}" if self.has_masks else self.layer
        parts = [layer, *(f"{name}={value}" for name, value in self.changes.items()), f"seed={self.seed}"]
        return "_".join(parts).replace(":", "-")  # because some file systems allow no colon

    @property
    def sizes(self) -> Sizes:
        """The sizes of the model, with the intermediate size of one expert."""
        sizes = SIZES[self.size]
        intermediate = round(sizes.intermediate * self.width / self.active / 8) * 8
        return replace(sizes, intermediate=intermediate, vocabulary=self.vocabulary or sizes.vocabulary)

    @property
    def flops_of_token(self) -> float:
        """Arithmetic operations of training on one token: a forward pass, and a backward pass with twice as many.

        A matrix product takes 2 operations for each element of its matrix. MGLU takes `n_masks + 1` products; layers
        without a fused operator take two products for each mask. The half of attention that is masked out does not
        count. In distillation, the teacher's forward pass is added.
        """
        sizes, masks = self.sizes, self.n_masks
        matrices = {"lu": 1, "glu": 2, "glu_shared": 1, "mglu": masks + 1}.get(self.layer, 2 * masks)
        width = sizes.heads * sizes.head_width
        block = sizes.hidden * 2 * (width + sizes.kv_heads * sizes.head_width)
        block += (matrices + 1) * sizes.hidden * sizes.intermediate * self.active + sizes.context * width
        teacher = self.teacher.flops_of_token / 3 if self.distilled else 0
        return 6 * (sizes.layers * block + sizes.vocabulary * sizes.hidden) + teacher

    @torch.no_grad()
    def model(self) -> LanguageModel:
        """Build the model with its initial parameters, in float32 on the current default device."""
        torch.manual_seed(self.seed)
        projection = self._projection()
        model = LanguageModel(self.sizes, drawn_apart(projection) if self.paired else projection)
        for module in model.modules():
            if isinstance(module, (MGLU, NaiveMGLU)) and module.mask_logits is not None:
                self._start_logits(module, module.mask_logits)
        for block in model.blocks:
            assert isinstance(block, Block)
            if self.is_mixture:
                block.down = nn.Identity()  # type: ignore[assignment] # the experts have their own down projections
            else:
                block.down.weight.mul_(self.down_gain)
        for weight in projection_weights(model):
            weight.mul_(self.weight_gain)
        return model

    def _projection(self) -> Projection:
        masked: dict[str, Any] = {
            "n_masks": self.n_masks,
            "activation": self.activation,
            "top_k": self.top_k,
            "learnable_masks": self.learned,
        }
        makers: dict[Layer, Callable[..., nn.Module]] = {
            "lu": partial(LU, activation=self.activation),
            "glu": partial(GLU, activation=self.activation),
            "glu_shared": partial(GLU, activation=self.activation, shared=True),
            "mglu": partial(ContinuousMGLU if self.continuous else MGLU, **masked),
            "no_gate_mask": partial(NaiveMGLU, mask_gate=False, **masked),
            "no_value_mask": partial(NaiveMGLU, mask_value=False, **masked),
        }
        make = makers[self.layer]
        if self.structure == "2:4":
            pruned = partial(PrunedGLU, decay=self.decay, activation=self.activation)
            make = partial(StructuredMGLU, centered=self.centered, **masked) if self.has_masks else pruned
        if self.is_mixture:
            only_masked = {name: value for name, value in masked.items() if name != "activation" and self.has_masks}
            options = {"layer": self.layer, "activation": self.activation, **only_masked}
            make = partial(Mixture, self.experts, self.active, **options)
        factor = self.scale * (self.n_masks**-0.5 if self.scaled_sum and self.has_masks else 1.0)
        return make if factor == 1 else lambda hidden, intermediate: Scaled(make(hidden, intermediate), factor)

    def _start_logits(self, module: nn.Module, logits: Tensor) -> None:
        if self.flips:
            start_accumulators(logits, self.gate_ratio)
            return
        mean = self.logits_std * math.sqrt(2) * torch.erfinv(torch.tensor(2 * self.gate_ratio - 1)).item()
        nn.init.normal_(logits, mean, self.logits_std)
        if self.straight_through != "identity":
            squashed = Squashed(self.straight_through)
            parametrize.register_parametrization(module, "mask_logits", squashed, unsafe=True)


def drawn_apart(make: Projection) -> Projection:
    """Give each projection a random generator of its own, so that later random numbers do not depend on its kind."""

    def projection(hidden: int, intermediate: int) -> nn.Module:
        seed = int(torch.randint(2**62, (), device="cpu"))
        with torch.random.fork_rng(range(torch.cuda.device_count())):
            torch.manual_seed(seed)
            return make(hidden, intermediate)

    return projection


KINDS: dict[str, type] = {
    one.name: {"top_k": int, "start": str, "vocabulary": int}.get(one.name, type(one.default)) for one in fields(Recipe)
}
"""Name of a field of a recipe -> the type of its values other than None."""


def projection_weights(model: LanguageModel) -> list[nn.Parameter]:
    """The weights of the first halves of all feed-forward layers, without routers and down projections."""
    return [
        parameter
        for block in model.blocks
        if isinstance(block, Block)
        for name, parameter in block.projection.named_parameters()
        if name.endswith("weight") and "router" not in name and "down" not in name
    ]


@torch.no_grad()
def take_over(model: LanguageModel, teacher: Mapping[str, Tensor], init: str) -> None:
    """Set the MGLU model `model` to a conversion of a trained SwiGLU model, whose state dict is `teacher`.

    `init` is a key of `mglu_ops.nn.conversion.WEIGHTS`.
    """
    kept = {name: value for name, value in teacher.items() if ".projection." not in name}
    missing, unexpected = model.load_state_dict(kept, strict=False)
    assert not unexpected, unexpected
    assert all(".projection." in name for name in missing), missing
    for i, block in enumerate(model.blocks):
        assert isinstance(block, Block)
        layer = next(module for module in block.projection.modules() if isinstance(module, MGLU))
        gate, up = (teacher[f"blocks.{i}.projection.{name}_proj.weight"] for name in ("gate", "up"))
        take_over_glu(layer, gate, up, init)
        if layer.top_k is None:
            block.down.weight /= layer.n_masks


class Scaled(nn.Module):
    """A projection whose result is multiplied by a number."""

    def __init__(self, projection: nn.Module, factor: float) -> None:
        super().__init__()
        self.projection, self.factor = projection, factor

    def forward(self, x: Tensor) -> Tensor:
        return self.projection(x) * self.factor


class Squashed(nn.Module):
    """Maps logits to `[-SLOPE, SLOPE]` and keeps signs. Logits far from 0 get a small gradient, or none if clipped."""

    def __init__(self, how: StraightThrough) -> None:
        super().__init__()
        self.how = how

    def forward(self, logits: Tensor) -> Tensor:
        return logits.clamp(-SLOPE, SLOPE) if self.how == "clipped" else torch.tanh(logits / SLOPE) * SLOPE
