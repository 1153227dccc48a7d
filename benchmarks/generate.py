"""Tokens a second of `generate` with Hugging Face's own Llama, as its users have it: SwiGLU, and MGLU in every form.

python -m benchmarks.generate --out DIR [--masks 1 4] [--batches 1 8 32] [--seconds 560]

The model is `LlamaForCausalLM` of Llama-3.2 1B's shape with random weights in bfloat16. `generate` with a static cache
compiles its step on a GPU by itself and captures it into CUDA graphs. The naive MGLU is a module as a user writes it,
without this package. Nothing else of the model differs. `--seconds`, `--done` and `--only-compile` are as in
benchmarks/train.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mglu_ops
from benchmarks import parts
from benchmarks.harness import relative_error
from benchmarks.memory import release
from benchmarks.records import Row, read
from benchmarks.timing import summarise, wall_microseconds
from mglu_ops.nn import MGLU

CASE = "generate"
PROMPT, NEW_TOKENS = 16, 256
BATCHES = (1, 8, 32)
MASKS = (1, 4)
ROUNDS = 5
PROTOCOL = (
    f"generate with a static cache, a prompt of {PROMPT} random tokens, greedy, {NEW_TOKENS} new tokens; wall-clock "
    f"time of the call by its new tokens, median of {ROUNDS} calls after two more, us a token of each sequence; every "
    "form compiled anew, one after the other; pdl: triton.enable_pdl of Inductor set by hand; error: of the prompt's "
    "logits, of packed against naive masks"
)
MAX_DISTANCE = 0.1
"""Largest distance between the logits with packed and with naive masks. Both round to bfloat16 in every layer; a wrong
mask gives a distance of about 1."""
LLAMA = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}


class PlainMGLU(nn.Module):
    """A SwiMGLU feed-forward layer as a user writes it, with straight-through masks."""

    def __init__(self, hidden: int, intermediate: int, n_masks: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(intermediate, hidden) / hidden**0.5)
        self.logits = nn.Parameter(0.01 * torch.randn(n_masks, intermediate, hidden))
        self.down_proj = nn.Linear(intermediate, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Any = 0
        for logits in self.logits:
            mask = (logits > 0).to(x.dtype)
            y = y + F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * (1 - mask))
        return self.down_proj(y)


def packed(module: PlainMGLU) -> nn.Module:
    """The same feed-forward layer with an `MGLU`, for `freeze(replace=...)`."""
    return nn.Sequential(MGLU.from_parameters(module.weight, module.logits), module.down_proj)


class Form(NamedTuple):
    """A form of the model: whether its masks are packed, the fusion pass is on, and a setting of Inductor made by hand.

    With the fusion pass, decoding has dependent launch by itself.
    """

    name: str
    packed: bool = False
    fused: bool = False
    pdl: bool = False


SWIGLU = (Form("SwiGLU"), Form("SwiGLU, pdl", pdl=True))
MGLUS = (
    Form("naive"),
    Form("naive, enable_fusion()", fused=True),
    Form("freeze(replace=...)", packed=True),
    Form("freeze(replace=...), enable_fusion()", packed=True, fused=True),
)


@dataclass(frozen=True)
class Problem:
    """A number of sequences, and one of masks."""

    batch: int
    n_masks: int

    def __str__(self) -> str:
        return f"{self.batch} sequences, n_m = {self.n_masks}"

    def seconds(self) -> float:
        """An estimate of the time to measure the problem, with its compilations; `parts.Schedule` corrects it."""
        return 40.0 * (len(SWIGLU) + len(MGLUS))


def model_of(config: Any, n_masks: int, form: Form, device: str) -> Any:
    """A model with random weights in bfloat16; `n_masks` 0 is SwiGLU."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
        model = model.to(torch.bfloat16).eval().requires_grad_(False)
        if n_masks:
            for layer in model.model.layers:
                mlp = PlainMGLU(config.hidden_size, config.intermediate_size, n_masks)
                layer.mlp = mlp.to(torch.bfloat16).requires_grad_(False)
    return mglu_ops.freeze(model, replace={PlainMGLU: packed}) if form.packed else model


@contextmanager
def settings(form: Form) -> Iterator[None]:
    """Compile in a block as a form says: a naive layer that is not fused is an error."""
    pdl = {"triton.enable_pdl": True} if form.pdl else {}
    fusion = mglu_ops.fusion(strict=not form.packed) if form.fused else nullcontext()
    with torch._inductor.config.patch(pdl), fusion:
        yield


def generation(model: Any, tokens: Tensor, new_tokens: int) -> Callable[[], Tensor]:
    """A call of `generate` that returns the tokens of all sequences, on the CPU, when they are there."""
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    return lambda: model.generate(tokens, attention_mask=mask, cache_implementation="static", **options).cpu()


def bench(
    problem: Problem,
    sizes: dict[str, Any] = LLAMA,
    device: str = "cuda",
    rounds: int = ROUNDS,
    new_tokens: int = NEW_TOKENS,
) -> list[Row]:
    """Measure a problem, and return a row for each form.

    Args:
        problem: the problem. SwiGLU is measured with one mask only, since it has none.
        sizes: of the model, as in `LlamaConfig`.
        device: "cuda", or "cpu" to see that everything works; there, nothing is compiled.
        rounds: number of timed calls.
        new_tokens: of each call.
    """
    from transformers import LlamaConfig

    config = LlamaConfig(**sizes)
    tokens = torch.randint(1, config.vocab_size, (problem.batch, PROMPT), device=device)
    rows, naive = [], None
    for form in [*(SWIGLU if problem.n_masks == min(MASKS) else ()), *MGLUS]:
        n_masks = 0 if form in SWIGLU else problem.n_masks
        release(device)
        torch._dynamo.reset()
        model = model_of(config, n_masks, form, device)
        call = generation(model, tokens, new_tokens)
        logits = model(tokens).logits
        naive = logits if n_masks and naive is None else naive
        error = relative_error(logits, naive.double()) if form.packed and naive is not None else float("nan")
        with torch.no_grad(), settings(form):
            for _ in range(2):
                call()
            times = [wall_microseconds(call) / new_tokens for _ in range(rounds)]
        median, spread = summarise(times)
        rows.append(
            Row(
                case=CASE,
                variant=form.name,
                tokens=problem.batch,
                out_features=config.intermediate_size,
                in_features=config.hidden_size,
                n_masks=n_masks,
                dtype="bfloat16",
                microseconds=float("nan") if error > MAX_DISTANCE else median,
                spread=spread,
                fraction_of_ceiling=float("nan"),
                error=error,
                extra={"new_tokens": new_tokens},
            )
        )
    return rows


def run(problems: Sequence[Problem], out: Path, limit: float | None = None) -> list[Row]:
    """Measure problems into `generate.csv` of a folder; `limit` is in seconds."""
    return parts.measure(problems, bench, out, "generate", PROTOCOL, limit)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    parser.add_argument("--masks", type=int, nargs="+", default=MASKS)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    parts.add_arguments(parser)
    options = parser.parse_args()
    done = {(row.tokens, row.n_masks) for folder in options.done for row in read(folder, "generate")}
    chosen = [Problem(batch, n_masks) for batch in options.batches for n_masks in options.masks]
    chosen = [one for one in chosen if (one.batch, one.n_masks) not in done]
    if options.only_compile:
        for problem in chosen:
            bench(problem, rounds=1)
    else:
        run(chosen, options.out, options.seconds)


if __name__ == "__main__":
    main()
