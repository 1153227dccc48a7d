"""The table in README.md of jobs, such as serving: the layer to take, its gain over SwiGLU, and its cost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pandas as pd

from benchmarks.frames import fastest, load, markdown
from benchmarks.learning.comparisons import Study, deviation_of, difference, losses_of
from benchmarks.learning.experiments import MIXTURE, SLOW, SWIGLU, TEXT
from benchmarks.learning.recipe import Recipe
from benchmarks.learning.tables import runs

MODEL, LAYER, MIXED = "layer == '14336 x 4096'", "layer == '8192 x 2048'", "case == 'Qwen3-30B-A3B, balanced'"


def jobs(results: Path) -> str:
    """The table, with a row for each job."""

    def gain(name: str, query: str, *tokens: int, ours: str = "mglu", n_masks: int = 1) -> str:
        """The speed-ups of our fastest variant over the fastest SwiGLU as text, one for each number of tokens."""
        rows = load(results, name)
        each = [rows.query(f"{query} and tokens == {number}") for number in tokens]
        return ", ".join(_ratio(problem, ours, n_masks) for problem in each)

    study, texts = Study(results), losses_of(runs(results, "texts"))
    python = {recipe: of / study.unit for recipe, of in study.losses.items()}
    noise = study.deviations[Recipe.size] / study.unit
    converted = replace(SLOW, n_masks=1, start="magnitude", skip=60.0, megabytes=6.0, lr=3e-4)
    behind = difference(python[converted], python[replace(SWIGLU, megabytes=66.0)], noise)
    mixture = difference(python[MIXTURE[2]], python[MIXTURE[0]], noise)
    swiglu, _, *masked = TEXT["300M"]
    noise = deviation_of(of for recipe, of in texts.items() if recipe.size == "300M")
    one, four = (difference(texts[recipe], texts[swiglu], noise) for recipe in masked)
    served = {
        name: (gain(name, MODEL, *tokens, ours="SwiMGLU"), load(results, name).attrs["device"].split()[1])
        for name, tokens in (("decode_model", (1, 8, 32)), ("decode_model_fp8", (1, 8)))
    }
    on_cpus = (gain(name, "dtype == 'bfloat16'", 1) for name in ("cpu_one_token", "cpu_one_token_xeon"))
    steps = [gain("train_model", "case == 'Llama-3.2 1B, autocast'", 8192, ours="fused", n_masks=n) for n in (1, 4)]
    prompts = [gain("routes", LAYER, 8192, n_masks=n) for n in (1, 4)]
    experts = gain("experts_layer", MIXED, 1, 32, 256)
    return markdown(
        ("job", "take", "gain over SwiGLU", "cost"),
        [
            [
                "[Serve an 8B model](mglu_ops/vllm/README.md), 1, 8 and 32 sequences",
                "`SwiMGLU`, 1 mask, leveled, bfloat16",
                "{} ({}, a decoding loop)".format(*served["decode_model"]),
                "quality: no run of this size; as under 'Train'",
            ],
            [
                "the same [in fp8](mglu_ops/weight_formats.md), 1 and 8",
                "then `mglu_ops.quantize(model, 'fp8_row')`",
                "{} over SwiGLU in fp8 ({})".format(*served["decode_model_fp8"]),
                "weights are rounded to 8 bits",
            ],
            [
                "[Serve a mixture of experts](mglu_ops/experts.md), 1, 32 and 256 tokens",
                "`MGLUExpertsFeedForward`, 1 mask, leveled",
                f"{experts} (experts of Qwen3-30B-A3B, H100)",
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
                "`from_swiglu(model, n_masks=1)`, then train",
                "as when serving",
                f"loss {behind} after a tenth more text (25M weights)",
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
                f"{prompts[0]} (a layer, 8192 tokens, H200)",
                f"4 masks: **{prompts[1]}**",
            ],
        ],
    )


def _ratio(rows: pd.DataFrame, ours: str, n_masks: int) -> str:
    mine = fastest(rows, ours, "n_masks").microseconds[n_masks]
    swiglu = fastest(rows, "SwiGLU", "n_masks").microseconds
    return f"{swiglu.get(n_masks, swiglu.min()) / mine:.2f}x"
