"""Measures the time of a training step of each layer on a GPU: the sum of the times of its kernels.

python -m benchmarks.learning.cost --out DIR [--only time masks] [--resume]

The wall-clock time of a run says little about its layer: several runs may share a GPU, and with models this small a GPU
may wait for Python. So this command sums the times of the kernels of a step, without the gaps between them, and must
have the GPU to itself. The text is random, since kernels take the same time for any text.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.learning.corpus import Corpus, Sizes
from benchmarks.learning.experiments import EXPERIMENTS, USUAL, chosen
from benchmarks.learning.recipe import CONTEXT, SEQUENCES, Recipe
from benchmarks.learning.training import Training, keep_all_graphs
from benchmarks.records import environment, parser_of, read_table, write_table

NAME = "learning_cost"
STEPS = 10
PROTOCOL = (
    f"a step of 16384 random tokens as in the experiments; ms: sum of the times of its kernels, mean of {STEPS} steps "
    "after three more, with nothing else on the GPU"
)


def layer_of(recipe: Recipe) -> Recipe:
    """The recipe with defaults in all fields that do not affect the kernels of a step."""
    rates = "lr", "last_rate", "average", "mask_lr", "mask_stop"
    initial = "logits_std", "gate_ratio", "weight_gain", "down_gain", "start", "seed"
    text = "megabytes", "skip", "distilled", "text_share"
    return replace(recipe, **{name: getattr(Recipe, name) for name in (*text, *rates, *initial)})


def random_text(vocabulary: int, steps: int = 2) -> Corpus:
    """A corpus of random tokens, with text for a number of training steps and one held-out batch."""
    counts = [batches * SEQUENCES * CONTEXT + 1 for batches in (steps, 1)]
    train, held_out = (torch.randint(vocabulary, (count,)).to(torch.uint16) for count in counts)
    about = Sizes("random", "random", counts[0], counts[0], 1, counts[1], counts[1], 1, [])
    return Corpus(about, train, held_out, torch.ones(vocabulary, dtype=torch.int64))


@keep_all_graphs  # type: ignore[untyped-decorator]
def cost(recipe: Recipe, device: str = "cuda", compiled: bool = True) -> float:
    """The milliseconds of all kernels in a step of a recipe; 0 on a CPU."""
    training = Training(recipe, random_text(recipe.sizes.vocabulary), device, compiled)
    training.warm_up()
    for _ in range(3):
        training.step()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiled:
        for _ in range(STEPS):
            training.step()
        if device == "cuda":
            torch.cuda.synchronize()
    events = [event for event in profiled.key_averages() if event.device_type == DeviceType.CUDA]
    return sum(event.self_device_time_total / 1000 / STEPS for event in events)


def measure(recipes: Iterable[Recipe], out: Path, resume: bool = False) -> None:
    """Write `learning_cost.csv` into a folder, with one row for all recipes whose steps run the same kernels.

    Args:
        recipes: the recipes.
        out: the folder.
        resume: whether to keep the rows that the folder has, and to measure only the recipes that it lacks.

    Raises:
        ValueError: the rows to keep were measured on another device, with another torch or by another protocol.
    """
    facts, rows = environment(PROTOCOL), list[dict[str, str]]()
    if resume:
        earlier, rows = read_table(out / f"{NAME}.csv")
        for fact in ("device", "torch", "protocol"):
            if earlier[fact] != facts[fact]:
                raise ValueError(f"the result to resume has another {fact}: {earlier[fact]!r}, not {facts[fact]!r}")
        facts["commit"] = ", ".join(dict.fromkeys([*earlier["commit"].split(", "), facts["commit"]]))
    done = {row["name"] for row in rows}
    for recipe in dict.fromkeys(map(layer_of, recipes)):
        if recipe.name in done:
            continue
        rows.append({"name": recipe.name, "ms": str(round(cost(recipe), 4))})
        print(*rows[-1].values(), flush=True)
        write_table(rows, facts, out, NAME)


if __name__ == "__main__":
    parser = parser_of(__doc__, resume=True)
    parser.add_argument("--only", nargs="+", choices=list(EXPERIMENTS), default=USUAL, metavar="NAME")
    options = parser.parse_args()
    measure(chosen(options.only), options.out, options.resume)
