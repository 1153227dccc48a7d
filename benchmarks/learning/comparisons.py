"""What is asked about our recipe: pairs of layers whose training runs are compared, grouped by question.

Layers are trained with our recipe (`experiments.BEST`) unless their names say otherwise. "Mask rate" is the learning
rate of mask logits, divided by the weights'. "Scaled SwiGLU" is `experiments.LARGER`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain

from benchmarks.learning.experiments import (
    AGAIN,
    BEST,
    EQUAL_TIME,
    FROZEN,
    LARGER,
    OTHERWISE,
    PAPER,
    SAME_WEIGHTS,
    SLOW,
    SWIGLU,
    best_with,
    gained,
    level,
    leveled,
    leveled_glu,
    leveled_lu,
    same_fp8_load,
    same_load,
    same_training,
)
from benchmarks.learning.recipe import Recipe


@dataclass(frozen=True)
class Comparison:
    """Two layers that are compared: their names in a table, their recipes, and the models, keys of `recipe.SIZES`."""

    layer: str
    recipe: Recipe
    other: str
    other_recipe: Recipe
    sizes: tuple[str, ...] = (Recipe.size,)

    def at(self, size: str) -> tuple[Recipe, Recipe]:
        """Both recipes in a model of another size."""
        return replace(self.recipe, size=size), replace(self.other_recipe, size=size)


ALL_SIZES = ("10M", "25M", "90M")
SCALED = "scaled SwiGLU"
NAMES = {n_masks: "1 mask" if n_masks == 1 else f"{n_masks} masks" for n_masks in BEST}
PAPERS = {n_masks: replace(PAPER, n_masks=n_masks) for n_masks in BEST}
GATES = {"relu": "ReLU", "gelu": "GELU", "silu": "SiLU"}
FIXED = "random masks, not learned"
_TOP_1, _TOP_2, _TOP_4, _NO_GATE_MASK, _NO_VALUE_MASK, _NO_MASKS = AGAIN


def _sizes(n_masks: int) -> tuple[str, ...]:
    """The models in which a number of masks was trained."""
    return ALL_SIZES if n_masks in (1, 4, 8) else (Recipe.size,)


def _with(gate: str, n_masks: int) -> str:
    """The name of a number of masks with a gate."""
    return f"{NAMES[n_masks]} with {GATES[gate]}"


COMPARISONS = {
    "How many masks": [Comparison(NAMES[n], BEST[n], NAMES[1], BEST[1], _sizes(n)) for n in (2, 4, 8, 16)],
    "Against SwiGLU of equal width": [
        *(Comparison(NAMES[n], BEST[n], "SwiGLU", SWIGLU, _sizes(n)) for n in BEST),
        *(Comparison(NAMES[n], BEST[n], SCALED, LARGER, ALL_SIZES) for n in (1, 4)),
        Comparison(NAMES[8], BEST[8], SCALED, LARGER),
        Comparison(SCALED, LARGER, "SwiGLU", SWIGLU, ALL_SIZES),
    ],
    "Against SwiGLU of another width": [
        *(
            Comparison(NAMES[n], BEST[n], f"{name} with as many {what}", replace(recipe, width=width))
            for name, recipe, what, widths in (
                ("SwiGLU", SWIGLU, "weights", {1: SAME_WEIGHTS, 4: SAME_WEIGHTS}),
                ("SwiGLU", SWIGLU, "bytes", {1: same_load(1), 4: same_load(4)}),
                (SCALED, LARGER, "bytes", {1: same_load(1), 4: same_load(4)}),
                ("SwiGLU", SWIGLU, "training operations", {4: same_training(4)}),
            )
            for n, width in widths.items()
        ),
    ],
    "Our recipe against the paper's": [
        Comparison(NAMES[n], BEST[n], f"{NAMES[n]}, the paper's recipe", PAPERS[n], _sizes(n)) for n in BEST
    ],
    "The parts of the recipe": [
        *(
            Comparison(
                f"{NAMES[n]}, the paper's weights, mask rate 0.3",
                replace(SLOW, n_masks=n),
                f"{NAMES[n]}, the paper's recipe",
                PAPERS[n],
            )
            for n in (1, 8)
        ),
        Comparison(NAMES[1], BEST[1], f"{NAMES[1]}, leveled weights, mask rate 1", gained(PAPER, 1)),
        *(Comparison(NAMES[n], BEST[n], "a constant factor of the sum", leveled(SLOW, n)) for n in (1, 2, 8, 16)),
        Comparison(
            NAMES[8], BEST[8], "a factor of the initial down projection", replace(SLOW, n_masks=8, down_gain=level(8))
        ),
        Comparison(
            f"{NAMES[1]}, leveled weights, mask rate 1",
            gained(PAPER, 1),
            "a factor of the initial down projection, mask rate 1",
            replace(PAPER, n_masks=1, down_gain=level(1)),
        ),
    ],
    "Learned masks, routes and ablations": [
        *(Comparison(NAMES[n], BEST[n], FIXED, replace(gained(PAPER, n), learned=False)) for n in (1, 8)),
        *(
            Comparison(NAMES[4], BEST[4], f"Top-{k} of 4 masks", top)
            for k, top in {1: _TOP_1, 2: _TOP_2, 4: _TOP_4}.items()
        ),
        Comparison(NAMES[1], BEST[1], "no mask on the gate", _NO_GATE_MASK),
        Comparison(NAMES[1], BEST[1], "no mask on the value", _NO_VALUE_MASK),
        Comparison(NAMES[1], BEST[1], "no masks, one shared matrix", _NO_MASKS),
    ],
    "Masks that are not learned, by gate": [
        Comparison(_with(one.activation, one.n_masks), replace(one, learned=True), FIXED, one, sizes)
        for one in FROZEN
        for sizes in [("25M", "90M") if one.activation == "relu" else ("25M",)]
    ],
    "Other ways to learn masks": [
        Comparison(
            f"{_with(one.activation, one.n_masks)}, {'continuous at first' if one.continuous else 'a budget of flips'}",
            one,
            "our recipe",
            best_with(one.activation, one.n_masks),
        )
        for one in OTHERWISE
    ],
    "As many training operations": [
        Comparison(f"{_with('relu', 4)}, half as wide", best_with("relu", 4, 0.5), "SwiGLU", SWIGLU),
        *(
            Comparison(_with("relu", 4), best_with("relu", 4), name, wide)
            for name, wide in (
                ("ReLU squared, 3 times as wide", leveled_lu("relu_squared", 3.0)),
                ("leveled ReGLU, twice as wide", leveled_glu("relu", 2.0)),
                ("leveled SwiGLU, twice as wide", leveled_glu("silu", 2.0)),
            )
        ),
    ],
    "As much time a training step": [
        *(
            Comparison(f"{_with('relu', one.n_masks)}, {one.width:g} times as wide", one, name, other)
            for one in EQUAL_TIME[1:3]
            for name, other in (
                ("SwiGLU", SWIGLU),
                ("leveled SwiGLU", leveled_glu("silu")),
                (f"ReLU squared, {EQUAL_TIME[0].width:.3g} times as wide", EQUAL_TIME[0]),
            )
        ),
        *(
            Comparison(_with("relu", 4), best_with("relu", 4), f"{name}, {other.width:.3g} times as wide", other)
            for name, other in zip(("ReLU squared", "leveled SwiGLU", _with("relu", 1)), EQUAL_TIME[3:], strict=True)
        ),
    ],
    "As many bytes, if weights have 8 bits": [
        *(
            Comparison(_with(gate, n), best_with(gate, n), name, narrow)
            for n in (1, 4)
            for gate in GATES
            for name, narrow in (
                ("ReLU squared", leveled_lu("relu_squared", round(1.5 * same_fp8_load(n), 4))),
                ("leveled ReGLU", leveled_glu("relu", round(same_fp8_load(n), 4))),
                ("leveled SwiGLU", leveled_glu("silu", round(same_fp8_load(n), 4))),
            )
        ),
        *(
            Comparison(f"{_with('relu', n)}, {width:.3g} times as wide", best_with("relu", n, width), name, glu)
            for n in (1, 4)
            for width in [round(1 / same_fp8_load(n), 4)]
            for name, glu in (("leveled ReGLU", leveled_glu("relu")), ("leveled SwiGLU", leveled_glu("silu")))
        ),
    ],
}
"""Question to comparisons: the tables of findings."""


_GELU, _RELU = (_with(gate, 1) for gate in ("gelu", "relu"))
CHOICES = {
    "bytes a token": [
        Comparison(_GELU, best_with("gelu", 1), "ReLU squared", leveled_lu("relu_squared", 1.5 * same_load(1))),
        Comparison(_GELU, best_with("gelu", 1), SCALED, replace(LARGER, width=same_load(1))),
        Comparison(_RELU, best_with("relu", 1), "leveled ReGLU", leveled_glu("relu", same_load(1))),
    ],
    "bytes a token, weights of 8 bits": [
        Comparison(_GELU, best_with("gelu", 1), name, layer)
        for name, layer in (
            ("ReLU squared", leveled_lu("relu_squared", round(1.5 * same_fp8_load(1), 4))),
            ("leveled SwiGLU", leveled_glu("silu", round(same_fp8_load(1), 4))),
        )
    ],
    "the width": [
        Comparison(_GELU, best_with("gelu", 1), "ReLU squared", leveled_lu("relu_squared"), ALL_SIZES),
        Comparison(_GELU, best_with("gelu", 1), "SwiGLU", SWIGLU, ALL_SIZES),
        Comparison(_GELU, best_with("gelu", 1), "leveled GeGLU", leveled_glu("gelu"), ("25M", "90M")),
        Comparison(_with("gelu", 4), best_with("gelu", 4), _GELU, best_with("gelu", 1), ALL_SIZES),
        Comparison(_with("relu", 4), best_with("relu", 4), _RELU, best_with("relu", 1), ALL_SIZES),
    ],
    "training operations": [
        Comparison(_GELU, best_with("gelu", 1), "ReLU squared", leveled_lu("relu_squared", 1.5), ALL_SIZES),
        Comparison(_with("relu", 4), best_with("relu", 4, 0.5), "SwiGLU", SWIGLU),
        Comparison(_with("relu", 4), best_with("relu", 4), "ReLU squared", leveled_lu("relu_squared", 3.0)),
    ],
    "training time": [
        Comparison(_RELU, EQUAL_TIME[1], "ReLU squared", EQUAL_TIME[0]),
        Comparison(_RELU, EQUAL_TIME[1], "leveled SwiGLU", leveled_glu("silu")),
        Comparison(_with("relu", 4), EQUAL_TIME[2], "leveled SwiGLU", leveled_glu("silu")),
    ],
}
"""What two layers have alike to comparisons, for those who choose a layer. All widths follow from what is alike."""

LATER = ("Other ways to learn masks", "As much time a training step")
"""Questions that were asked after the noise had been estimated. Their layers do not enter it, since texts quote it."""


def recipes() -> Iterator[Recipe]:
    """The recipes of the comparisons whose seeds give the noise."""
    for one in chain.from_iterable(asked for question, asked in COMPARISONS.items() if question not in LATER):
        yield from chain.from_iterable(map(one.at, one.sizes))
