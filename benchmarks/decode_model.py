"""Decodes with a whole model of Llama-3.2 1B's shape, with SwiGLU and with SwiMGLU: time per token.

The model has random weights in bfloat16 and a static cache, and decodes one sequence greedily. torch.compile compiles
the start, one block and the head; a whole step is one CUDA graph, which passes its token to the next step. The logits
are compared with those of the same model in float64 on the same tokens: their error may be at most
`ERROR_OVER_EAGER` times the error of the eager model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import mglu_ops
from benchmarks.ceiling import reader
from benchmarks.decoder import Decoder, Sizes, swiglu
from benchmarks.harness import Captured, Variant, capture, relative_error
from benchmarks.records import Row
from benchmarks.timing import ROUNDS, time_graphs
from mglu_ops.nn import SwiMGLU

COMPILATIONS = 3
"""Compilations of each model, with an empty cache each, since coordinate descent finds other kernels each time."""
PROTOCOL = (
    f"one sequence, greedy, static cache; the step compiled (coordinate descent; a row for each of {COMPILATIONS} "
    "compilations) and captured into a CUDA graph, variants interleaved, median over rounds of two tokens, us a token; "
    "the ceiling reads as many bytes as the weights and masks have"
)
MASKS = (0, 1, 4, 8)
"""Numbers of masks; 0 is SwiGLU."""
CHECKED_TOKENS = 8
ERROR_OVER_EAGER = 1.5
"""Largest error of a compiled model relative to the error of the eager model."""


def build(sizes: Sizes, n_masks: int, device: str, dtype: torch.dtype) -> Decoder:
    """Build a model for inference with random weights and packed random masks; `n_masks` 0 is SwiGLU."""
    feed_forward: Callable[[int, int], nn.Module] = partial(SwiMGLU, n_masks=n_masks) if n_masks else swiglu
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            model = Decoder(sizes, feed_forward)
    finally:
        torch.set_default_dtype(before)
    return mglu_ops.freeze(model).eval().requires_grad_(False)


@dataclass
class Decoding:
    """A model and the `token` and `position` (`[1]` each) of its next step."""

    model: Decoder
    token: Tensor
    position: Tensor

    @classmethod
    def start(cls, model: Decoder) -> Decoding:
        zero = torch.zeros(1, dtype=torch.long, device=model.head.weight.device)
        return cls(model, zero, zero.clone())

    def step(self) -> Tensor:
        return self.model(self.token, self.position)

    def restart(self) -> None:
        self.token.zero_()
        self.position.zero_()

    def errors(self, step: Callable[[], Tensor]) -> tuple[float, float]:
        """Errors against float64: of the logits of `step`, which decodes a token, and of the eager model's logits."""
        self.restart()
        given, logits = [], []
        for _ in range(CHECKED_TOKENS):
            given.append(self.token.clone())
            logits.append(step().clone())
        self.restart()
        eager = copy.deepcopy(self.model)  # a copy is not compiled
        eager_logits, exact = logits_of(eager, given), logits_of(eager.double(), given)
        return relative_error(torch.cat(logits), exact), relative_error(eager_logits, exact)


def logits_of(model: Decoder, tokens: Sequence[Tensor]) -> Tensor:
    """The logits `[tokens, vocabulary]` after each token of a sequence."""
    positions = torch.arange(len(tokens), device=tokens[0].device)
    return torch.cat([model(token.clone(), positions[i : i + 1].clone()) for i, token in enumerate(tokens)])


def capture_step(decoding: Decoding, name: str) -> Captured:
    """Compile a step, capture it as a graph and check it."""
    # With either layer, coordinate descent decodes faster than the default of torch.compile.
    options = {"coordinate_descent_tuning": True}
    decoding.model.compile_parts(lambda part: part.compile(fullgraph=True, dynamic=False, options=options))
    captured = capture(Variant(name, lambda _: decoding.step(), 1))

    def replay() -> Tensor:
        captured.graph.replay()
        (logits,) = captured.outputs
        assert logits is not None
        return logits

    captured.error, eager = decoding.errors(replay)
    captured.budget = ERROR_OVER_EAGER * eager
    return captured


def capture_ceiling(model: Decoder) -> Captured:
    """Capture a kernel that reads as many bytes as a token needs."""
    everything = torch.empty(model.weight_bytes(), dtype=torch.uint8, device="cuda")
    return capture(Variant("read ceiling", reader([everything], [everything[:0]]), 1))


def bench(
    sizes: Sizes, masks: Sequence[int] = MASKS, rounds: int = ROUNDS, compilations: int = COMPILATIONS
) -> list[Row]:
    """A row per model and compilation, and one per read ceiling; all of them are timed in turn."""
    weight_bytes: dict[int, int] = {}
    readings: dict[int, Captured] = {}
    decodings: dict[int, list[Captured]] = {n_masks: [] for n_masks in masks}
    with torch.no_grad():
        for _ in range(compilations):
            with fresh_cache():
                for n_masks, steps in decodings.items():
                    torch._dynamo.reset()
                    model = build(sizes, n_masks, "cuda", torch.bfloat16)
                    if n_masks not in readings:
                        weight_bytes[n_masks] = model.weight_bytes()
                        readings[n_masks] = capture_ceiling(model)
                    steps.append(capture_step(Decoding.start(model), f"{layer(n_masks)} {n_masks}"))
        time_graphs([*readings.values(), *(step for steps in decodings.values() for step in steps)], rounds)
    rows = []
    for n_masks, steps in decodings.items():
        reading = readings[n_masks]
        for one in (reading, *steps):
            time, spread, error = one.timing()
            fraction = reading.timing().microseconds / time
            extra: dict[str, object] = {"weight_mb": round(weight_bytes[n_masks] / 1e6, 1)}
            name = "read ceiling"
            if one is not reading:
                name = layer(n_masks)
                extra["error_budget"] = float(f"{one.budget:.3g}")
            shape = sizes.intermediate, sizes.hidden
            rows.append(Row("decode model", name, 1, *shape, n_masks, "bfloat16", time, spread, fraction, error, extra))
    return rows


def layer(n_masks: int) -> str:
    return "SwiMGLU" if n_masks else "SwiGLU"
