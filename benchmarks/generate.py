"""Times `generate` of Hugging Face's own Llama with SwiGLU, and with MGLU in every form.

python -m benchmarks.generate --out DIR [--resume]

The model is `LlamaForCausalLM` of a Llama's shape with random weights in bfloat16. On a GPU, `generate` with a static
cache compiles its step and captures it into CUDA graphs. The naive MGLU is a module as a user writes it, without this
package. Nothing else in the model differs.

Every form has its own process: with several models of one class in a process, Dynamo takes longer to find the compiled
code of a call. All processes compile at once. Then they take turns, one call at a time. `--resume` works as in
benchmarks/train.py.
"""

from __future__ import annotations

import multiprocessing
import os
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ProcessPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mglu_ops
from benchmarks.records import Row, measure, parser_of
from benchmarks.timing import relative_error, wall_microseconds
from mglu_ops.nn import MGLU

CASE = "generate"
PROMPT, NEW_TOKENS = 16, 256
ROUNDS = 7
COMPILE_THREADS = 2
"""Number of Inductor's threads in each process. All processes compile at once."""
PROTOCOL = (
    f"generate with a static cache, a prompt of {PROMPT} random tokens, greedy, {NEW_TOKENS} new tokens; wall-clock "
    f"time of the call by its new tokens, median of {ROUNDS} calls after two more, us a token of each sequence; a "
    "process for each form, in turns whose order changes; pdl: triton.enable_pdl of Inductor set by hand; error: of "
    "the logits after the prompt, of packed against naive masks"
)
MAX_DISTANCE = 0.1
"""Allowed relative distance between the logits with packed and with naive masks. The two differ because both round to
bfloat16 in every layer. Wrong masks give a distance of about 1."""
LLAMA = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
MODELS = {
    "Llama-3.2 1B": {**LLAMA, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16},
    "Llama-3.1 8B": {**LLAMA, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
}
"""Name of a model -> its sizes, as in `LlamaConfig`."""


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
    """An equal feed-forward layer with an `MGLU`, for `freeze(replace=...)`."""
    return nn.Sequential(MGLU.from_parameters(module.weight, module.logits), module.down_proj)


class Form(NamedTuple):
    """A form of the model: with packed masks or not, the fusion pass or not, Inductor's `triton.enable_pdl` or not."""

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
    """A key of MODELS, the number of sequences, and the numbers of masks, which are measured together."""

    name: str
    batch: int
    masks: tuple[int, ...]

    @property
    def variants(self) -> list[tuple[Form, int]]:
        """All forms with their numbers of masks, 0 for SwiGLU."""
        return [(form, 0) for form in SWIGLU] + [(form, n_masks) for n_masks in self.masks for form in MGLUS]

    def is_in(self, rows: Sequence[Row]) -> bool:
        shape = MODELS[self.name]["intermediate_size"], MODELS[self.name]["hidden_size"]
        return (shape, self.batch) in {(row.shape, row.tokens) for row in rows}


PROBLEMS = [*(Problem("Llama-3.2 1B", batch, (1, 4)) for batch in (1, 8, 32)), Problem("Llama-3.1 8B", 1, (1,))]


def model_of(config: Any, n_masks: int, form: Form, device: str) -> Any:
    """A model with random weights in bfloat16. With `n_masks` 0 it has SwiGLU."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model = model.eval().requires_grad_(False)
        if n_masks:
            for layer in model.model.layers:
                mlp = PlainMGLU(config.hidden_size, config.intermediate_size, n_masks)
                layer.mlp = mlp.to(torch.bfloat16).requires_grad_(False)
                if form.packed:  # freeze layer by layer, so that mask logits of only one layer take memory
                    mglu_ops.freeze(layer, replace={PlainMGLU: packed})
    return model


@contextmanager
def settings(form: Form) -> Iterator[None]:
    """Compile with the settings of a form. With `fused`, a naive layer that is not fused raises an error."""
    pdl = {"triton.enable_pdl": True} if form.pdl else {}
    fusion = mglu_ops.fusion(strict=not form.packed) if form.fused else nullcontext()
    with torch._inductor.config.patch(pdl), fusion:
        yield


def generation(model: Any, tokens: Tensor, new_tokens: int) -> Callable[[], Tensor]:
    """A function that calls `generate`, waits for the tokens of all sequences, and returns them on the CPU."""
    options = {"max_new_tokens": new_tokens, "min_new_tokens": new_tokens, "do_sample": False, "pad_token_id": 0}
    mask = torch.ones_like(tokens)
    return lambda: model.generate(tokens, attention_mask=mask, cache_implementation="static", **options).cpu()


_served: Callable[[], Tensor]
"""The `generation` of this process's model."""


def serve(
    sizes: dict[str, Any], form: Form, n_masks: int, batch: int, device: str, new_tokens: int
) -> npt.NDArray[np.float32]:
    """Build this process's model, call it twice, and return the logits `[batch, vocabulary]` after the prompt."""
    global _served
    from transformers import LlamaConfig

    config = LlamaConfig(**sizes)
    model = model_of(config, n_masks, form, device)
    tokens = torch.randint(1, config.vocab_size, (batch, PROMPT), generator=torch.Generator().manual_seed(1)).to(device)
    _served = generation(model, tokens, new_tokens)
    with torch.no_grad(), settings(form):
        logits: npt.NDArray[np.float32] = model(tokens).logits[:, -1].float().numpy(force=True)
        for _ in range(2):
            _served()
    return logits


@torch.no_grad()
def time_served() -> float:
    """The time of one call of this process's model in microseconds."""
    return wall_microseconds(_served)


def process() -> Executor:
    """An executor with a new process that runs one task after the other."""
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(COMPILE_THREADS))
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))


def bench(
    problem: Problem,
    sizes: dict[str, Any] | None = None,
    device: str = "cuda",
    rounds: int = ROUNDS,
    new_tokens: int = NEW_TOKENS,
) -> list[Row]:
    """Time `rounds` calls of each form, and return a row for each form.

    `sizes` are the model's sizes as in `LlamaConfig`, by default `MODELS[problem.name]`. On a CPU, nothing is compiled,
    so a run there only shows that everything works.
    """
    sizes = sizes or MODELS[problem.name]
    times: dict[tuple[Form, int], list[float]] = {variant: [] for variant in problem.variants}
    with ExitStack() as stack:
        processes = {variant: stack.enter_context(process()) for variant in times}
        started = {
            variant: one.submit(serve, sizes, *variant, problem.batch, device, new_tokens)
            for variant, one in processes.items()
        }
        logits = {variant: torch.from_numpy(one.result()) for variant, one in started.items()}
        turns = list(processes.items())
        for _ in range(rounds):
            random.shuffle(turns)
            for variant, one in turns:
                times[variant].append(one.submit(time_served).result() / new_tokens)
    rows, shape = [], (sizes["intermediate_size"], sizes["hidden_size"])
    for (form, n_masks), form_times in times.items():
        exact = logits[MGLUS[0], n_masks].double() if form.packed else None
        error = float("nan") if exact is None else relative_error(logits[form, n_masks], exact)
        size, extra = (problem.batch, shape, n_masks), {"new_tokens": new_tokens}
        rows.append(Row.of_times(CASE, form.name, *size, form_times, error=error, budget=MAX_DISTANCE, extra={**extra}))
    return rows


if __name__ == "__main__":
    options = parser_of(__doc__, resume=True).parse_args()
    measure(PROBLEMS, bench, options.out, "generate", PROTOCOL, options.resume)
