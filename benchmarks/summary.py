"""Short tables that compare with SwiGLU: those in benchmarks/README.md, and the table of jobs in README.md."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pandas as pd

from benchmarks.frames import duration, fastest, load, many, markdown
from benchmarks.learning.comparisons import Study, deviation_of, difference, losses_of
from benchmarks.learning.experiments import DISTILLED, MIXTURE, TEXT, converted
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import runs
from benchmarks.train import FUSED, NAIVE, OPERATOR

MASKS = (1, 4, 8, 16)
LARGE, SMALL = "14336 x 4096", "8192 x 2048"


def at(layer: str, tokens: int) -> str:
    """The query for the rows of a layer and a number of tokens."""
    return f"layer == '{layer}' and tokens == {tokens}"


def of(case: str, tokens: int | None = None) -> str:
    """The query for the rows of a case, and of a number of tokens if one is given."""
    return f"case == '{case}'" + (f" and tokens == {tokens}" if tokens else "")


_MODEL, _TRAINED = {"ours": "SwiMGLU"}, {"ours": "fused", "naive": "naive"}
_STEP, _MEMORY = {"ours": FUSED}, {"ours": FUSED, "column": "peak_mb"}
WORK: dict[str, list[tuple[str, str, str, dict[str, str]]]] = {
    "summary_tokens": [
        (many(tokens, "token"), "routes", at(SMALL, tokens), {}) for tokens in (1, 8, 32, 64, 256, 1024, 8192)
    ],
    "summary_experts": [
        (f"{model}, {many(tokens, 'token')}", "experts_layer", of(f"{model}, balanced", tokens), {})
        for model in ("Qwen3-30B-A3B", "Mixtral 8x7B", "gpt-oss-20b")
        for tokens in (1, 32, 256, 1024)
    ],
    "summary_models": [
        (f"{name}, {many(sequences, 'sequence')}", result, at(layer, sequences), _MODEL)
        for layer, model in ((SMALL, "1B parameters"), (LARGE, "8B parameters"))
        for result, name in (("decode_model", model), ("decode_model_fp8", f"{model} in fp8"))
        for sequences in (1, 8, 32)
    ],
    "summary_training": [
        *(
            (f"{layer}, 8192 tokens{what}", "train", at(layer, 8192), how)
            for layer, what, how in ((SMALL, "", _STEP), (SMALL, ", peak memory", _MEMORY), (LARGE, "", _STEP))
        ),
        *(
            (f"experts of {model}, 8192 tokens", "train_experts", of(f"{model}, balanced"), {"ours": OPERATOR})
            for model in ("Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss")
        ),
        *(
            (f"whole model, {model}, {dtype}", "train_model", of(f"{model}, {dtype}"), _TRAINED)
            for model in ("Llama-3.2 1B", "350M")
            for dtype in ("autocast", "bfloat16")
        ),
    ],
}
"""Name of a table -> its rows: a label, the name of a result, a query that selects the problem, and further arguments
of `line`. A row is left out if the query finds nothing.
"""


def cell(ours: float, swiglu: float, naive: float, form: Callable[[float], str] = duration) -> str:
    """Our figure, and in brackets SwiGLU's and the naive layer's as multiples of ours. Multiples below 1 are bold."""
    if math.isnan(ours):
        return ""
    ratios = []
    for theirs in (one for one in (swiglu, naive) if not math.isnan(one)):
        ratio = f"{theirs / ours:.{2 if theirs < 10 * ours else 0}f}x"
        ratios.append(ratio if theirs >= ours else f"**{ratio}**")
    return f"{form(ours)} ({', '.join(ratios)})"


def line(
    label: str, rows: pd.DataFrame, ours: str = "mglu", naive: str = NAIVE, column: str = "microseconds"
) -> list[str]:
    """The cells of one problem's row: label, fastest SwiGLU, and our figure for each number of masks.

    `ours` and `naive` are prefixes of variant names. If the dispatch chose one of our variants, only that one counts.
    `column` is "microseconds" or "peak_mb", and is taken from the fastest variants. If a result has no SwiGLU for a
    number of masks, the least SwiGLU of any number counts.
    """
    form = duration if column == "microseconds" else "{:.0f} MB".format
    chosen = rows[rows.chosen] if rows.chosen.any() else rows
    mine, theirs = (fastest(of, name, "n_masks")[column].reindex(MASKS) for of, name in ((chosen, ours), (rows, naive)))
    swiglu = fastest(rows, "SwiGLU", "n_masks")[column]
    beside = swiglu.reindex(MASKS).fillna(swiglu.min())
    range_of_swiglu = " to ".join(dict.fromkeys(map(form, (swiglu.min(), swiglu.max()))))
    return [label, range_of_swiglu, *(cell(*figures, form) for figures in zip(mine, beside, theirs, strict=True))]


def summary(name: str, results: Path) -> str:
    """A table with a row for each entry of `WORK[name]`; ratios are bold where mglu_ops is slower."""
    lines = []
    for work, result, query, how in WORK[name]:
        rows = load(results, result)
        gpu = rows.attrs["device"].split()[1]  # such as H200
        if len(found := rows.query(query)):
            lines.append(line(f"{gpu}: {work}", found, **how))
    head = ("work", "fastest SwiGLU", *(f"n_m = {n_masks}" for n_masks in MASKS))
    columns = [column for column in zip(head, *lines, strict=True) if any(column[1:])]
    return markdown([column[0] for column in columns], zip(*(column[1:] for column in columns), strict=True))


# --- The table of jobs ------------------------------------------------------------------------------------------------

SERVED, FP8 = "model == '{}' and work == '{}'", "variant.str.contains('fp8')"
SMALL, MIXED, LARGE = "Llama-3.1 8B", "Qwen3-30B-A3B", "Mixtral 8x7B"
LAYER = "layer == '8192 x 2048'"


def jobs(results: Path) -> str:
    """The table in README.md of jobs, such as serving: the layer to take, its gain over SwiGLU, and its cost."""

    def gain(name: str, query: str, *tokens: int, ours: str = "mglu", n_masks: int = 1) -> str:
        """The speed-ups of our fastest variant over the fastest SwiGLU as text, one for each number of tokens."""
        rows = load(results, name)
        each = [rows.query(f"{query} and tokens == {number}") for number in tokens]
        return ", ".join(_ratio(problem, ours, n_masks) for problem in each)

    study, texts = Study(results), losses_of(runs(results, "texts"))
    python = {recipe: of / study.unit for recipe, of in study.losses.items()}
    noise = study.deviations[Recipe.size] / study.unit
    pinned = losses_of(runs(results, "pinned"))
    ours, swiglu_on = pinned[converted(**DISTILLED)], pinned[converted(start="teacher")]
    behind, seeds = difference(ours, swiglu_on), many(len(ours), "seed")
    mixture = difference(python[MIXTURE[2]], python[MIXTURE[0]], noise)
    swiglu, _, *masked = TEXT["300M"]
    noise = deviation_of(of for recipe, of in texts.items() if recipe.size == "300M")
    one, four = (difference(texts[recipe], texts[swiglu], noise) for recipe in masked)
    engine = load(results, "serve").attrs
    where = f"{engine['device'].split()[1]}, vLLM {engine['vllm']}"

    def served(model: str, *tokens: int, work: str = "decode", is_fp8: str = f"not {FP8}") -> str:
        return gain("serve", f"{SERVED.format(model, work)} and {is_fp8}", *tokens, ours="SwiMGLU")

    on_cpus = (gain(name, "dtype == 'bfloat16'", 1) for name in ("cpu_one_token", "cpu_one_token_xeon"))
    steps = [gain("train_model", "case == 'Llama-3.2 1B, autocast'", 8192, ours="fused", n_masks=n) for n in (1, 4)]
    prompts = [gain("routes", LAYER, 8192, n_masks=n) for n in (1, 4)]
    mixed, large = (served(model, 1, 32, 256) for model in (MIXED, LARGE))
    prompt, mixed_prompt = (served(model, 8192, work="prompts") for model in (SMALL, MIXED))
    return markdown(
        ("job", "take", "gain over SwiGLU", "cost"),
        [
            [
                "[Serve an 8B model](mglu_ops/vllm/README.md), 1, 8 and 32 sequences",
                "`SwiMGLU`, 1 mask, leveled, bfloat16",
                f"{served(SMALL, 1, 8, 32)} ({where})",
                "quality: no run of this size; as under 'Train'",
            ],
            [
                "the same [in fp8](mglu_ops/weight_formats.md)",
                "then `mglu_ops.quantize(model, 'fp8_row')`",
                f"{served(SMALL, 1, 8, 32, is_fp8=FP8)} over SwiGLU in vLLM's fp8",
                "weights are rounded to 8 bits",
            ],
            [
                "[Serve a mixture of experts](mglu_ops/experts.md), 1, 32 and 256 sequences",
                "`MGLUExpertsFeedForward`, 1 mask, leveled",
                f"{mixed} ({MIXED}); {large} ({LARGE}; {where})",
                f"loss {mixture} (8 experts, 25M active weights)",
            ],
            [
                "[Train](mglu_ops/nn/README.md), such as 300M weights",
                "`ReMGLU`, 1 mask, leveled",
                f"a quarter fewer weights; steps of a 1B model {steps[0]} (H200)",
                f"loss {one} (300M weights); 4 masks {four}, and steps **{steps[1]}**",
            ],
            [
                "[Fine-tune with LoRA](mglu_ops/transformers/README.md#train)",
                'a model trained as MGLU, `target_parameters=["mglu.weight"]`',
                "as when serving, after merging",
                "no dropout in that adapter; masks stay as they are",
            ],
            [
                "[Convert a SwiGLU model](mglu_ops/transformers/README.md#from-a-swiglu-model)",
                "`convert(model, batches)`, then train",
                "as when serving",
                f"loss [{behind}](benchmarks/learning/README.md#conversion) to SwiGLU trained on, a tenth more text "
                f"(25M weights, {seeds})",
            ],
            [
                "[On a CPU](csrc/cpu/README.md), 1 token",
                "`SwiMGLU`, 1 mask, leveled, bfloat16",
                "{} (2 cores, AVX2), {} (16 cores, AVX-512)".format(*on_cpus),
                "a C++ compiler at the first call",
            ],
            [
                "[Prompts and large batches](benchmarks/README.md)",
                "SwiGLU, or 1 mask",
                f"{prompts[0]} (a layer, 8192 tokens, H200); {prompt} (8 prompts of 1024, 8B, vLLM), "
                f"{mixed_prompt} ({MIXED})",
                f"4 masks: **{prompts[1]}**",
            ],
        ],
    )


def _ratio(rows: pd.DataFrame, ours: str, n_masks: int) -> str:
    mine = fastest(rows, ours, "n_masks").microseconds[n_masks]
    swiglu = fastest(rows, "SwiGLU", "n_masks").microseconds
    return f"{swiglu.get(n_masks, swiglu.min()) / mine:.2f}x"


TABLES: dict[str, Callable[[Path], str]] = {
    "jobs": jobs,
    **{name: partial(summary, name) for name in WORK},
}
"""Name of a table -> the function that makes it from a folder of results."""
