"""Runs the experiments about learning with MGLU, one after the other, until they are done or the time is over.

python -m benchmarks.learning.experiments --corpus DIR --out DIR [--only layers recipe] [--seconds 540] [--list]

Every finished run is one CSV file in --out, until `benchmarks.learning.gather` adds it to the tables of its corpus. A
run is skipped if its file is in --out, or if it is in a table of --done, so the same command continues after an
interruption. A result of another text in --out is an error. Several processes with the same --out share the work,
on one GPU or on several.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

from benchmarks.learning.corpus import BYTES, Corpus, load
from benchmarks.learning.gather import RESULTS, done
from benchmarks.learning.masks import LOGIT_BYTES
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.schedule import CONTEXT, SEQUENCES, steps_of
from benchmarks.learning.train import run
from benchmarks.records import read_table
from mglu_ops.nn.leveling import glu_level_gain, level_gain, lu_level_gain

SEEDS = (0, 1, 2)
SWIGLU = Recipe("glu")
PAPER = Recipe("mglu")
"""SwiMGLU with four masks, trained as in the paper: mask logits have the learning rate of the weights."""
ROOT = replace(PAPER, scaled_sum=True, scale=2.0)
"""SwiMGLU whose sum over masks is multiplied by `2 / sqrt(n_masks)`. If the terms were independent, the sum would start
as large as the product in SwiGLU. But all terms share W, so this is true for one mask only (see `level`)."""
LEAST_SECONDS = 30.0
"""The least time left, in seconds, to start a run: about the time to compile it and to reach its first checkpoint."""


def masks(recipe: Recipe, numbers: Iterable[int]) -> list[Recipe]:
    """A recipe with each number of masks."""
    return [replace(recipe, n_masks=number) for number in numbers]


def seeds(recipes: Iterable[Recipe], numbers: Iterable[int] = SEEDS) -> list[Recipe]:
    """Every recipe with every seed; all recipes with the first seed come first."""
    recipes = list(recipes)
    return [replace(recipe, seed=seed) for seed in numbers for recipe in recipes]


def level(n_masks: int) -> float:
    """The factor with which a sum over `n_masks` random masks starts as large as over four (see `level_gain`)."""
    return round(level_gain(n_masks) ** 2, 4)


def leveled(recipe: Recipe, n_masks: int) -> Recipe:
    """A recipe with another number of masks, and a constant factor with which its sum starts as large as with four."""
    return replace(recipe, n_masks=n_masks, scale=level(n_masks))


def gained(recipe: Recipe, n_masks: int) -> Recipe:
    """Like `leveled`, but with scaled initial weights instead of a factor: `leveled` weights of `mglu_ops.nn.MGLU`."""
    return replace(recipe, n_masks=n_masks, weight_gain=round(math.sqrt(level(n_masks)), 4))


SLOW = replace(PAPER, mask_lr=0.3)
"""SwiMGLU with four masks, whose logits have 0.3 times the learning rate of the weights."""
BEST = {n_masks: gained(SLOW, n_masks) for n_masks in (1, 2, 4, 8, 16)}
"""Number of masks -> our recipe: `leveled` weights, and the default learning rate of `parameter_groups` for masks."""
LARGER = replace(SWIGLU, scale=round(level(1) / 2, 4))
"""SwiGLU whose product is multiplied by 1.58, so that it starts about as large as the sum of four masks."""
SIZED = (SWIGLU, *masks(PAPER, (1, 4)), BEST[1], BEST[4], LARGER)
"""The recipes that are trained at the sizes 10M, 25M and 90M."""
SIZED_EIGHT = (replace(PAPER, n_masks=8), BEST[8])
"""The recipes with eight masks at these three sizes. They take the longest, so the 90M models have only two seeds."""
AGAIN = (
    *(replace(SLOW, top_k=k, weight_gain=round(level_gain(4, top_k=k), 4)) for k in (1, 2, 4)),
    *(
        Recipe(layer, n_masks=1, mask_lr=SLOW.mask_lr, weight_gain=BEST[2].weight_gain)
        for layer in ("no_gate_mask", "no_value_mask")
    ),
    Recipe("glu_shared", weight_gain=round((20 / 16) ** 0.25, 4)),
)
"""Routes (`top_k`) and ablations with our recipe, with gains that let every result start as large as the sum of four
masks. The result of a mask on only the gate or only the value starts as large as the sum of two masks. Without masks,
the result has 8 times the variance of the result of one mask."""


SAME_WEIGHTS = round(2 / 3, 4)
"""The width at which SwiGLU's feed-forward layer, with three matrices, has as many weights as SwiMGLU's, with two."""


def same_load(n_masks: int) -> float:
    """The width at which SwiGLU's feed-forward layer reads as many bytes as SwiMGLU's: `(32 + n_masks) / 48`."""
    return (2 * 16 + n_masks) / (3 * 16)


def same_training(n_masks: int) -> float:
    """The width at which SwiGLU's layer, with 3 products, trains with the FLOPs of SwiMGLU's, with `n_masks + 2`."""
    return (n_masks + 2) / 3


def same_fp8_load(n_masks: int) -> float:
    """Like `same_load`, but with weights of 8 bits and masks of 1 bit: `(16 + n_masks) / 24`."""
    return (2 * 8 + n_masks) / (3 * 8)


def best_with(activation: str, n_masks: int, width: float = 1.0) -> Recipe:
    """Our recipe with another gate, and the factor of leveled weights for that gate."""
    gain = round(level_gain(n_masks, activation), 4)
    return replace(SLOW, n_masks=n_masks, activation=activation, weight_gain=gain, width=width)


def leveled_glu(activation: str, width: float = 1.0) -> Recipe:
    """GLU with leveled weights: its product starts as large as the sum of four masks with the same gate."""
    return Recipe("glu", activation=activation, width=width, weight_gain=round(glu_level_gain(activation), 4))


def leveled_lu(activation: str, width: float = 1.0) -> Recipe:
    """One matrix and no mask, with leveled weights as in `leveled_glu`."""
    return Recipe("lu", activation=activation, width=width, weight_gain=round(lu_level_gain(activation), 4))


RELU_SQUARED = (leveled_lu("relu_squared"), leveled_lu("relu_squared", 1.5))
"""The cheapest rivals of masks: one matrix and the down projection. The second is 1.5 times as wide and reads as many
bytes as SwiGLU, which has three matrices."""
RELU_GATES = (*RELU_SQUARED, *(best_with(gate, n_masks) for gate in ("relu", "relu_squared") for n_masks in (1, 4)))
GELU_GATES = tuple(best_with("gelu", n_masks) for n_masks in (1, 4))
OTHER_GATES = (
    # GLU of equal width.
    *(leveled_glu(activation) for activation in ("relu", "relu_squared", "gelu", "silu")),
    # Equal bytes per token: LU and GLU that read as many bytes as SwiMGLU with 1 or 4 masks, and masks that read as
    # many bytes as SwiGLU.
    *(leveled_lu("relu_squared", 1.5 * same_load(n_masks)) for n_masks in (1, 4)),
    *(leveled_glu(gate, same_load(n_masks)) for gate in ("relu", "relu_squared") for n_masks in (1, 4)),
    *(best_with(gate, n, round(1 / same_load(n), 4)) for gate in ("relu", "relu_squared") for n in (1, 4)),
    # LU with other activations.
    *(leveled_lu(activation) for activation in ("relu", "gelu", "silu")),
)
EQUAL_TRAINING = (
    # As many FLOPs as SwiGLU. Layers with 1 mask, and ReLU squared of 1.5 times the width, have as many already.
    *(best_with(gate, 4, 0.5) for gate in ("relu", "relu_squared")),
    # As many FLOPs as 4 masks.
    leveled_lu("relu_squared", 3.0),
    *(leveled_glu(gate, 2.0) for gate in ("relu", "silu")),
)
EQUAL_FP8_BYTES = (
    *(leveled_lu("relu_squared", round(1.5 * same_fp8_load(n_masks), 4)) for n_masks in (1, 4)),
    *(leveled_glu(gate, round(same_fp8_load(n_masks), 4)) for gate in ("relu", "silu") for n_masks in (1, 4)),
    *(best_with("relu", n_masks, round(1 / same_fp8_load(n_masks), 4)) for n_masks in (1, 4)),
)
EQUAL_TIME = (
    # As fast as SwiGLU: 11.9 ms a step.
    leveled_lu("relu_squared", 1.5625),
    *(best_with("relu", n_masks, width) for n_masks, width in ((1, 0.875), (4, 0.375))),
    # As fast as four masks: 18.7 ms a step.
    leveled_lu("relu_squared", 4.0625),
    leveled_glu("silu", 2.625),
    best_with("relu", 1, 2.375),
)
"""Layers that train as fast as SwiGLU or as four masks in the 25M model. Their widths follow from the times of other
widths in `learning_cost.csv`.

A step of SwiGLU takes 8.0 ms, which all layers in this model have in common, plus 4.1 ms per unit of width. With masks,
the time is assumed to grow linearly from 8.0 ms at a width of 0 to the measured time at a width of 1. ReLU squared is
assumed to cost as much as GELU, and to grow by two thirds of SwiGLU's slope, since it has 2 matrices instead of 3.
Widths are multiples of 1/16, so that the kernels have whole tiles. Measured afterwards, the first three layers differ
from SwiGLU by at most 2%, and the others take 2 to 3% longer than four masks."""
TEXT = {
    size: tuple(
        replace(one, size=size, megabytes=megabytes)
        for one in (leveled_glu("silu"), RELU_SQUARED[1], best_with("relu", 1), best_with("relu", 4))
    )
    for size, megabytes in {"25M": 60.0, "90M": 90.0, "300M": 120.0}.items()
}
"""Size of a model -> layers of equal width, except ReLU squared, which is 1.5 times as wide and reads as many bytes as
SwiGLU. Larger models read more text."""
MIXTURE = tuple(
    replace(one, experts=8, active=2)
    for one in (
        # Equal width.
        SWIGLU,
        RELU_SQUARED[0],
        BEST[1],
        BEST[4],
        # Wider or narrower experts, which together have as many bytes as the experts of SwiGLU.
        RELU_SQUARED[1],
        *(replace(BEST[n_masks], width=round(1 / same_load(n_masks), 4)) for n_masks in (1, 4)),
    )
)
"""Mixtures of 8 experts, 2 of them per token. Together the 2 experts are as wide as the layer of the dense model."""
FROZEN = tuple(replace(best_with(gate, n), learned=False) for gate in ("relu", "silu") for n in (1, 4))
"""Random masks that are not learned."""
OTHERWISE = tuple(
    one
    for gate in ("relu", "silu")
    for best in (best_with(gate, 1), best_with(gate, 4))
    for one in (replace(best, continuous=0.5), replace(best, flips=0.2, mask_lr=1.0))
)
"""Masks that learn in other ways: continuous in the first half of the steps, or with a budget of flips. For
comparison: with our recipe, about 15% of the bits at the end differ from those at the start."""
TEXT_MASKS = (*OTHERWISE[:4], best_with("silu", 1), best_with("silu", 4))
"""Layers that only the 25M model trains on three kinds of text: ReLU masks that learn in other ways, and SiLU masks."""
PAIRED_SEEDS = (0, 1, 2, 3, 4)
MANY_SEEDS = range(14)
"""Enough for means of paired differences whose standard deviation is at most 0.001 nats a byte."""
PRUNED = replace(leveled_glu("silu"), structure="2:4", decay=2e-4)
"""SwiGLU in which gate and up matrix are learned with structure 2:4, with the decay of the paper on SR-STE."""
STRUCTURE = tuple(
    replace(one, vocabulary=BYTES, paired=True)
    for one in (
        SWIGLU,
        BEST[1],
        replace(BEST[1], structure="2:4"),
        PRUNED,
        replace(BEST[1], structure="2:4", centered=True),
        RELU_SQUARED[0],
        leveled_glu("silu"),
        *(replace(PRUNED, decay=decay) for decay in (2e-3, 2e-5)),
        *(replace(one, last_rate=0.0) for one in (SWIGLU, BEST[1])),
    )
)
"""Layers of equal width, to find out whether 2:4 masks are worth their loss. On sparse tensor cores, layers with 2:4
masks or matrices take as much arithmetic as ReLU squared: one dense product and the down projection."""
AVERAGED = tuple(replace(one, average=0.05) for one in STRUCTURE[:7])
"""Like STRUCTURE, with the loss of averaged parameters. Read with a corpus of 60 MB, so that runs read the same text in
another order. The loss was meant to differ less between seeds, but does not."""


TEXT_OF_TEACHER = SWIGLU.megabytes
MOST_WIDTH = 1.4375
"""The largest multiple of 1/16 at which a layer with one mask reads fewer bytes than SwiGLU: 33 * 1.4375 < 48 bits."""


def converted(percent: float = 10.0, size: str = "25M", start: str = "joint", **options: Any) -> Recipe:
    """A trained SwiGLU model that is converted, and trained on more text: a percentage of what its teacher has read.

    With `start="teacher"`, the SwiGLU model itself is trained on.
    """
    one = Recipe("glu") if start == "teacher" else replace(SLOW, n_masks=1)
    shared: dict[str, Any] = {"vocabulary": BYTES, "paired": True, "skip": TEXT_OF_TEACHER, "lr": 3e-4}
    megabytes = round(percent / 100 * TEXT_OF_TEACHER, 4)
    return replace(one, size=size, start=start, megabytes=megabytes, **(shared | options))


DISTILLED: dict[str, Any] = {"distilled": True, "text_share": 0.5}
"""Training on the text and on the teacher's predictions. In a model of 1M weights, the mix was better than either."""
ANNEALED = {**DISTILLED, "continuous": 0.5, "mask_lr": 1.0}
"""Like DISTILLED, with masks that are continuous in the first half of the steps."""

MIXED: tuple[tuple[str, dict[str, Any]], ...] = (("teacher", {}), ("joint", DISTILLED), ("joint", {}))
"""Conversions of a mixture of 8 experts."""


def ablations(percent: float, size: str) -> list[Recipe]:
    """SwiGLU trained on; one mask, with each step of the conversion added to those before; SwiGLU trained at once."""
    starts = (converted(percent, size, start) for start in ("teacher", "magnitude", "alternation", "down", "joint"))
    megabytes = round((1 + percent / 100) * TEXT_OF_TEACHER, 4)
    at_once = replace(SWIGLU, size=size, megabytes=megabytes, vocabulary=BYTES, paired=True)
    return [*starts, converted(percent, size, **DISTILLED), converted(percent, size, **ANNEALED), at_once]


def variants(percent: float, size: str) -> list[Recipe]:
    """Wider layers, four masks and 2:4 masks, with all steps of the conversion."""
    options: tuple[dict[str, Any], ...] = (
        *({"width": width} for width in (1.25, MOST_WIDTH, 1.5)),
        {"n_masks": 4},
        {"n_masks": 4, "width": 1.25},
        {"structure": "2:4"},
        {"structure": "2:4", "width": MOST_WIDTH},
        {"structure": "2:4", "n_masks": 4},
    )
    return [converted(percent, size, **DISTILLED, **one) for one in options]


def fractions(size: str) -> list[Recipe]:
    """SwiGLU trained on and its conversions, with less text."""
    return [
        one
        for percent in (1, 3, 0.1)
        for one in (
            *(converted(percent, size, start) for start in ("teacher", "magnitude", "joint")),
            *(converted(percent, size, width=width, **DISTILLED) for width in (1.0, 1.25, MOST_WIDTH)),
            converted(percent, size, n_masks=4, **DISTILLED),
        )
    ]


MEMORY = tuple(
    replace(BEST[n_masks], logits=logits, vocabulary=BYTES, paired=True) for logits in LOGIT_BYTES for n_masks in (1, 4)
)
"""Optimizers of mask logits that keep fewer bytes for a logit than AdamW."""


LONG = tuple(replace(one, size="300M", megabytes=1000.0, paired=True) for one in (BEST[1], SWIGLU))
"""One mask and SwiGLU with more text than in all other runs. With an H200 for itself, a run would take about 20
minutes, at the rate of the runs of `text` with 300M weights."""


EXPERIMENTS: dict[str, list[Recipe]] = {
    # A search for the learning rate of the other experiments.
    "rates": seeds([replace(one, lr=lr) for lr in (1e-3, 3e-4, 3e-3) for one in (SWIGLU, PAPER)], SEEDS[:2]),
    # Every layer at the same width (the paper's Figure 5, Tables 3, 8 and 14).
    "layers": [
        *seeds([SWIGLU, Recipe("lu", activation="gelu"), *masks(PAPER, (1, 2, 4, 8, 16))]),
        *seeds([Recipe("glu_shared"), *(replace(PAPER, activation=one) for one in ("relu", "gelu"))], SEEDS[:2]),
    ],
    # How masks are trained: their rate, freezing, start and gradient, and the scale of the sum.
    "recipe": seeds(
        [
            *masks(PAPER, (1, 4, 8)),
            *(replace(one, mask_lr=ratio) for ratio in (0.1, 0.3, 0.03) for one in masks(PAPER, (1, 4, 8))),
            *(replace(PAPER, mask_lr=0.1, mask_stop=stop) for stop in (0.5, 0.8)),
            *(replace(PAPER, logits_std=std) for std in (0.03, 0.1)),
            replace(PAPER, mask_lr=0.1, logits_std=0.03),
            *(replace(one, mask_lr=0.1, scaled_sum=True) for one in masks(PAPER, (4, 8))),
            *(replace(PAPER, mask_lr=0.1, gate_ratio=ratio) for ratio in (0.25, 0.75)),
            *(replace(PAPER, straight_through=how) for how in ("clipped", "tanh")),
        ],
        SEEDS[:2],
    ),
    # The initial size of the sum over masks depends on n_masks. A factor of the sum, of the initial weights or of the
    # initial down projection corrects it. SwiGLU is trained with factors too.
    "scale": seeds(
        [
            *masks(ROOT, (1, 2, 8, 16)),
            replace(ROOT, n_masks=8, mask_lr=0.3),
            *(leveled(PAPER, n_masks) for n_masks in (1, 2)),
            *(leveled(SLOW, n_masks) for n_masks in (1, 2, 8, 16)),
            gained(PAPER, 1),
            replace(PAPER, n_masks=1, down_gain=level(1)),
            replace(SLOW, n_masks=8, down_gain=level(8)),
            *(replace(SWIGLU, scale=scale) for scale in (0.5, 2.0)),
            LARGER,
        ],
        SEEDS[:2],
    ),
    # Our recipe with three seeds, and with masks that are not learned.
    "best": [
        *seeds([SWIGLU, LARGER, *BEST.values()]),
        *seeds((replace(gained(PAPER, n_masks), learned=False) for n_masks in (1, 8)), SEEDS[:2]),
    ],
    # SwiGLU with as many weights, bytes or training operations as SwiMGLU.
    "budgets": seeds(
        [
            SWIGLU,
            *masks(PAPER, (1, 4)),
            *(BEST[n_masks] for n_masks in (1, 4)),
            replace(SWIGLU, width=SAME_WEIGHTS),
            *(replace(SWIGLU, width=same_load(n_masks)) for n_masks in (1, 4)),
            replace(SWIGLU, width=same_training(4)),
            *(replace(LARGER, width=same_load(n_masks)) for n_masks in (1, 4)),
        ]
    ),
    # Masks that are not learned, routes, ablations, and higher learning rates.
    "variants": [
        SWIGLU,
        *masks(PAPER, (1, 2, 4)),
        *seeds(
            [
                *(replace(one, learned=False) for one in masks(PAPER, (1, 2, 4))),
                *(replace(PAPER, top_k=k) for k in (1, 2, 4)),
                *(Recipe(layer, n_masks=1) for layer in ("no_gate_mask", "no_value_mask")),
                Recipe("glu_shared"),
            ],
            SEEDS[:2],
        ),
        *seeds((replace(one, lr=lr) for lr in (6e-3, 1e-2) for one in (SWIGLU, PAPER)), SEEDS[:2]),
    ],
    # A trained SwiGLU model is converted to SwiMGLU and trained on a tenth more text, with the text or with the SwiGLU
    # model's predictions as the target. `magnitude` derives the masks from |gate| > |value|; the other ways draw masks
    # at random. The converted model is compared with a SwiGLU model that has read all of the text.
    "converted": seeds(
        [
            SWIGLU,
            replace(SWIGLU, megabytes=1.1 * SWIGLU.megabytes),
            *(
                replace(
                    one,
                    start=start,
                    distilled=distilled,
                    skip=SWIGLU.megabytes,
                    megabytes=0.1 * SWIGLU.megabytes,
                    lr=3e-4,
                )
                for distilled in (False, True)
                for start in ("magnitude", "average", "up")
                for one in masks(PAPER, (1, 4))
            ),
            *(
                replace(one, start="magnitude", skip=SWIGLU.megabytes, megabytes=0.1 * SWIGLU.megabytes, lr=lr)
                for lr in (3e-4, 1e-3)
                for one in masks(SLOW, (1, 4))
            ),
        ],
        SEEDS[:2],
    ),
    # SwiGLU and SwiMGLU at three sizes.
    "sizes": [
        *seeds([replace(one, size=size) for size in ("25M", "90M") for one in SIZED]),
        # The smallest models differ more between seeds, but are cheap, so they have eight seeds.
        *seeds([replace(one, size="10M") for one in SIZED], range(8)),
        *seeds([replace(one, size=size) for size in ("10M", "25M") for one in SIZED_EIGHT]),
        *seeds([replace(one, size="90M") for one in SIZED_EIGHT], SEEDS[:2]),
    ],
    # The paper's claims about routes and ablations, with our recipe.
    "again": seeds(AGAIN, SEEDS[:2]),
    # Are masks better than ReLU squared without masks, and which gate is best with masks?
    "gates": [
        *seeds([SWIGLU, LARGER, BEST[1], BEST[4]]),
        *seeds([*RELU_GATES, *GELU_GATES]),
        *seeds(replace(one, weight_gain=1.0) for one in RELU_SQUARED),  # with the weights of `nn.Linear`
        *seeds(replace(one, size="10M") for one in (*RELU_GATES, *GELU_GATES)),
        *seeds(replace(one, size="90M") for one in RELU_GATES),
        *seeds(OTHER_GATES),
        *seeds(replace(one, size="90M") for one in GELU_GATES),
        *seeds(replace(leveled_glu(activation), size="90M") for activation in ("relu", "gelu")),
    ],
    # Equal training FLOPs, equal bytes with weights of 8 bits, and whether learning the masks is worth its cost.
    "equal": [
        *seeds(EQUAL_TRAINING),
        *seeds(FROZEN),
        *seeds(replace(one, size="90M") for one in FROZEN[:2]),
        *seeds(EQUAL_FP8_BYTES),
    ],
    # Equal training time.
    "time": [
        *seeds([SWIGLU, leveled_glu("silu"), RELU_SQUARED[0], RELU_SQUARED[1], *EQUAL_TIME[:3]]),
        *seeds([best_with("relu", 4), *EQUAL_TIME[3:]]),
    ],
    # Other ways to learn masks, compared with our recipe and with masks that are not learned.
    "masks": [
        *seeds([one for frozen in FROZEN for one in (replace(frozen, learned=True), frozen)]),
        *seeds(OTHERWISE, SEEDS[:2]),
    ],
    # Mixtures of 8 experts, 2 of them active, at equal width and at equal bytes of experts.
    "mixture": seeds(MIXTURE),
    # Larger models and three kinds of text.
    "text": seeds([*TEXT["25M"], *TEXT_MASKS, *TEXT["90M"], *TEXT["300M"]]),
    # The loss of 2:4 masks. The first runs show the noise between paired seeds.
    "structure": [
        *seeds([*STRUCTURE[:2], *STRUCTURE[9:]], SEEDS),
        *seeds(STRUCTURE[:7], PAIRED_SEEDS),
        *seeds(STRUCTURE[7:9], PAIRED_SEEDS[:2]),
        *seeds((replace(one, size="90M") for one in STRUCTURE[:4]), SEEDS),
        *seeds((replace(one, size="90M") for one in STRUCTURE[:6]), PAIRED_SEEDS),
        *seeds((replace(one, size="300M") for one in (*STRUCTURE[:4], STRUCTURE[5])), SEEDS),
        *seeds(STRUCTURE[:4], MANY_SEEDS),
    ],
    # The same with averaged parameters, on the corpus `pinned_whole`.
    "averaged": [
        *seeds(AVERAGED[:3], PAIRED_SEEDS),
        *seeds(AVERAGED[3:], PAIRED_SEEDS),
        *seeds((replace(one, size="90M") for one in AVERAGED[:4]), PAIRED_SEEDS),
    ],
    # A trained SwiGLU model is converted layer by layer: what does each step of the fit gain, with how much text?
    # The most informative runs come first.
    "conversion": [
        *seeds(ablations(10, "25M")),
        *seeds(converted(start=start, experts=8, active=2, **options) for start, options in MIXED),
        *seeds(
            one for lr in (6e-4, 1e-3) for one in (converted(start="teacher", lr=lr), converted(lr=lr, **DISTILLED))
        ),
        *(
            one
            for size in ("25M", "90M")
            for recipes in (ablations(10, size), variants(10, size), fractions(size))
            for one in seeds(recipes)
        ),
    ],
    # The memory of masks in training, and the loss that saving it costs.
    "memory": seeds(MEMORY),
    # A long run, on the corpus `long`.
    "long": seeds(LONG, SEEDS[:1]),
}
"""Name of an experiment -> its runs. A run in several experiments on the same text is trained once."""
USUAL = [name for name in EXPERIMENTS if name not in ("text", "structure", "averaged", "conversion", "memory", "long")]
"""The experiments that read the corpus `python`. `text` reads `texts`, `averaged` reads `pinned_whole`, `long` reads
`long`, and the other three read `pinned`."""


def chosen(names: Iterable[str]) -> list[Recipe]:
    """The runs of some experiments, in order and without duplicates."""
    return list(dict.fromkeys(chain.from_iterable(EXPERIMENTS[name] for name in names)))


def scaled(recipe: Recipe, factor: float) -> Recipe:
    """A recipe with its amounts of text multiplied by a factor."""
    return replace(recipe, megabytes=round(factor * recipe.megabytes, 6), skip=round(factor * recipe.skip, 6))


def is_done(recipe: Recipe, folder: Path, digest: str) -> bool:
    """True if a folder has the result of a finished run of the recipe.

    Raises:
        ValueError: the run read another text than the corpus with this digest.
    """
    path = folder / f"{recipe.name}.csv"
    if not path.is_file():
        return False
    found = read_table(path)[0]["corpus.digest"]
    if found != digest:
        raise ValueError(f"{path}: the result is of the text {found}, not {digest}; choose another folder")
    return True


def print_plan(recipes: Iterable[Recipe], corpus: Corpus) -> None:
    """Print the tokens that each run reads and its arithmetic operations, and their sums."""
    total = [0.0, 0.0]
    for recipe in recipes:
        tokens = max(1, steps_of(recipe.megabytes, corpus)) * SEQUENCES * CONTEXT
        of = tokens / 1e6, recipe.flops_of_token * tokens / 1e15
        total = [a + b for a, b in zip(total, of, strict=True)]
        print("{:8.1f} M tokens {:8.2f} PFLOP".format(*of), recipe.name)
    print("{:8.1f} M tokens {:8.2f} PFLOP".format(*total), "all")


def main() -> None:
    begin = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--corpus", type=Path, required=True, help="a folder that corpus.py prepared")
    parser.add_argument("--out", type=Path, required=True, help="a folder for checkpoints and finished runs")
    parser.add_argument(
        "--done",
        type=Path,
        nargs="*",
        default=[RESULTS],
        help=f"tables of runs that are not repeated, or folders of such tables (default: {RESULTS})",
    )
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=USUAL, metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", help="train every run with these seeds instead of its own")
    parser.add_argument("--scale", type=float, default=1.0, help="multiply the text of every run (default: 1)")
    parser.add_argument("--seconds", type=float, default=math.inf, help="stop after about this time")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="print the runs that are left, their tokens and FLOPs")
    options = parser.parse_args()
    recipes, corpus = chosen(options.only), load(options.corpus)
    if options.seeds is not None:
        recipes = list(dict.fromkeys(seeds(recipes, options.seeds)))
    recipes = [scaled(recipe, options.scale) for recipe in recipes]
    digest = corpus.sizes.digest
    earlier = done(options.done, digest)
    left = [one for one in recipes if one.name not in earlier and not is_done(one, options.out, digest)]
    if options.list:
        print_plan(left, corpus)
        return
    for i, recipe in enumerate(left):
        if is_done(recipe, options.out, digest):  # another process has trained it meanwhile
            continue
        rest = options.seconds - (time.perf_counter() - begin)
        print(f"{recipe.name}: {i + 1} of {len(left)}", flush=True)
        try:
            if rest < LEAST_SECONDS or not run(recipe, corpus, options.out, options.device, rest):
                print(f"the time is over; {len(left) - i} runs are left")
                return
        except TimeoutError:
            print(f"{recipe.name}: another process trains it", flush=True)


if __name__ == "__main__":
    main()
