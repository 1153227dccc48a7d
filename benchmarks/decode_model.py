"""Decoding with a whole model: tokens a second of Llama-3.2 1B's shape with SwiGLU and with SwiMGLU.

Random weights in bfloat16, a static cache, one sequence, greedy. torch.compile compiles a block, what comes before the
blocks, and what comes after; a whole step is one CUDA graph, and feeds its token to the next. What it decodes must be
as near to the same model in float64, fed the same tokens, as the model in eager bfloat16 is.
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
from benchmarks.harness import ROUNDS, Captured, Row, Variant, capture, relative_error, replay_in_turn
from mglu_ops.nn import SwiMGLU

COMPILATIONS = 3
"""Of each model, which share nothing: coordinate descent finds other kernels each time."""
PROTOCOL = (
    f"one sequence, greedy, static cache; the step compiled (coordinate descent; a row for each of {COMPILATIONS} "
    "compilations) and captured into a CUDA graph, variants interleaved, median over rounds of two tokens, us a token; "
    "the ceiling reads as many bytes as the weights and masks have"
)
MASKS = (0, 1, 4, 8)
"""Numbers of masks; 0 is SwiGLU."""
CHECKED_TOKENS = 8
ERROR_OVER_EAGER = 1.5
"""How many times the error of the eager model a compiled one may have."""


def build(sizes: Sizes, n_masks: int, device: str, dtype: torch.dtype) -> Decoder:
    """A model for inference with random weights; `n_masks` of 0 is SwiGLU, else the masks are random and packed."""
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
    """A model at a place in a sequence: `token` and `position`, `[1]` each, are those of its next step."""

    model: Decoder
    token: Tensor
    position: Tensor

    @classmethod
    def of(cls, model: Decoder) -> Decoding:
        zero = torch.zeros(1, dtype=torch.long, device=model.head.weight.device)
        return cls(model, zero, zero.clone())

    def step(self) -> Tensor:
        return self.model(self.token, self.position)

    def restart(self) -> None:
        self.token.zero_()
        self.position.zero_()

    def errors(self, step: Callable[[], Tensor]) -> tuple[float, float]:
        """The error against float64 of the logits of `step`, which decodes a token, and that of the eager model's."""
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
    places = torch.arange(len(tokens), device=tokens[0].device)
    return torch.cat([model(token.clone(), places[i : i + 1].clone()) for i, token in enumerate(tokens)])


def capture_step(decoding: Decoding, name: str) -> Captured:
    """The compiled step as a graph, checked."""
    # Coordinate descent decodes faster than what torch.compile does unasked, with either layer.
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
    """Reading as many bytes as a token takes."""
    everything = torch.empty(model.weight_bytes(), dtype=torch.uint8, device="cuda")
    return capture(Variant("read ceiling", reader([everything], [everything[:0]]), 1))


def bench(
    sizes: Sizes, masks: Sequence[int] = MASKS, rounds: int = ROUNDS, compilations: int = COMPILATIONS
) -> list[Row]:
    """Rows of the model with each feed-forward layer, one a compilation, and of its read ceiling: all timed in turn."""
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
                    steps.append(capture_step(Decoding.of(model), f"{layer(n_masks)} {n_masks}"))
        replay_in_turn([*readings.values(), *(step for steps in decodings.values() for step in steps)], rounds)
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
