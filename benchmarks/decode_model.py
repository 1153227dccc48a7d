"""Times a decoding step (one token per sequence) of whole models of Llama's shapes, with SwiGLU and with SwiMGLU.

The models have random weights in bfloat16 and a static cache, and decode greedily. torch.compile compiles three parts:
the start (the embedding), one block for all blocks, and the head. A whole step is one CUDA graph, which passes its
tokens to the next step. The logits are compared with float64 for the same tokens: their error may be at most
`ERROR_OVER_EAGER` times the error of the model in eager mode.

In fp8, all linear layers except the head have weights with a scale per row. MGLU uses `mglu_ops.quantize`.
All other layers, and SwiGLU, run in the fastest way that plain torch has (`Fp8Linear`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product

import torch
from torch import Tensor, nn
from torch._inductor.utils import fresh_cache

import mglu_ops
from benchmarks.baselines import gated, row_scaled, row_scaled_swiglu, scaled_mm
from benchmarks.ceiling import reader
from benchmarks.decoder import Decoder, Projection, Sizes, creating
from benchmarks.records import Result, Row
from benchmarks.timing import ROUNDS, Captured, Variant, capture, relative_error, time_graphs
from mglu_ops.formats import FORMATS
from mglu_ops.nn import GLU, MGLU

MODELS = {
    "Llama-3.2 1B": Sizes(),
    "Llama-3.1 8B": Sizes(layers=32, hidden=4096, intermediate=14336),
}
OPTIONS = {"coordinate_descent_tuning": True, "triton.enable_pdl": True}
"""Options of torch.compile that make the models faster, with SwiGLU and with SwiMGLU."""
PROTOCOL = (
    "a token of each sequence, greedy, static cache; the step compiled (coordinate descent, programmatic dependent "
    "launch; a row a compilation) "
    "and captured into a CUDA graph, variants interleaved, median over rounds of two steps, us a step; "
    "the ceiling reads as many bytes as the weights and masks have"
)
CHECKED_TOKENS = 8
ERROR_OVER_EAGER = 1.5
"""Allowed error of a compiled model, relative to the eager model's error."""


@dataclass(frozen=True)
class Problem:
    """The sizes of a model, the number of sequences, and the numbers of masks to measure; 0 stands for SwiGLU.

    Each model is compiled `compilations` times with an empty cache, because coordinate descent finds different kernels
    each time. The fastest compilation counts.
    """

    sizes: Sizes
    batch: int = 1
    fp8: bool = False
    compilations: int = 1
    masks: tuple[int, ...] = (0, 1, 4, 8)

    def is_in(self, rows: Sequence[Row]) -> bool:
        shape = self.sizes.intermediate, self.sizes.hidden
        return (shape, self.batch) in {(row.shape, row.tokens) for row in rows}


SMALL = Problem(Sizes(layers=2, vocabulary=1024), masks=(0, 1))
"""A small problem for a quick check."""
PROBLEMS = [
    Problem(sizes, batch, compilations=3 if (sizes, batch) == (Sizes(), 1) else 1)
    for sizes, batch in product(MODELS.values(), (1, 8, 32))
]
PROBLEMS_IN_FP8 = [Problem(sizes, batch, fp8=True) for sizes, batch in product(MODELS.values(), (1, 8))]


class Fp8Linear(nn.Module):
    """A linear layer without bias whose weight is in fp8 with one scale per row.

    It runs in the fastest way that plain torch has for inference. One token is multiplied by the decoded weight, and
    torch.compile fuses the decoding. Several tokens are rounded to fp8, unless they are in float64.
    """

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        stored, scale = FORMATS["fp8_row"].quantize(weight.detach())
        assert scale is not None
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        multiply = row_scaled if x.shape[0] == 1 or x.dtype is torch.float64 else scaled_mm
        return multiply(x, self.weight, self.scale)


class Fp8GLU(nn.Module):
    """SwiGLU with both weights in one `Fp8Linear`. For one token it makes two products, because this is faster."""

    def __init__(self, glu: GLU) -> None:
        super().__init__()
        assert glu.gate_proj is not None
        self.both = Fp8Linear(torch.cat((glu.gate_proj.weight, glu.up_proj.weight)))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 1:
            return gated(self.both(x))
        (gate, up), (gate_scale, up_scale) = self.both.weight.chunk(2), self.both.scale.chunk(2)
        return row_scaled_swiglu(x, gate, gate_scale, up, up_scale)


def store_in_fp8(model: nn.Module) -> None:
    """Replace all linear layers and `GLU`s in a module by `Fp8Linear` and `Fp8GLU`."""
    for name, child in model.named_children():
        if isinstance(child, GLU):
            setattr(model, name, Fp8GLU(child))
        elif isinstance(child, nn.Linear):
            setattr(model, name, Fp8Linear(child.weight))
        else:
            store_in_fp8(child)


def build(sizes: Sizes, n_masks: int, device: str, dtype: torch.dtype, batch: int = 1, *, fp8: bool = False) -> Decoder:
    """Build a model for inference with random weights and packed random masks. With `n_masks` 0 it has SwiGLU."""
    projection: Projection = partial(MGLU, n_masks=n_masks, learnable_masks=False) if n_masks else GLU
    with creating(device, dtype):
        model = Decoder(sizes, projection, batch)
    if fp8:
        if n_masks:
            mglu_ops.quantize(model, "fp8_row")
        store_in_fp8(model.blocks)
    return model.eval().requires_grad_(False)


@dataclass
class Decoding:
    """A model with the inputs of its next step: `token` `[batch]` and `position` `[1]`."""

    model: Decoder
    token: Tensor
    position: Tensor

    @classmethod
    def start(cls, model: Decoder) -> Decoding:
        token = torch.zeros(model.batch, dtype=torch.long, device=model.head.weight.device)
        decoding = cls(model, token, token[:1].clone())
        decoding.restart()
        return decoding

    def step(self) -> Tensor:
        return self.model(self.token, self.position)

    def restart(self) -> None:
        """Start all sequences again, each with a different token."""
        vocabulary = self.model.head.weight.shape[0]
        self.token.copy_(torch.arange(len(self.token), device=self.token.device) % vocabulary)
        self.position.zero_()

    def errors(self, step: Callable[[], Tensor]) -> tuple[float, float]:
        """Relative errors of the logits against float64: for `step`, which decodes a token, and for the eager model."""
        self.restart()
        given, logits = [], []
        for _ in range(CHECKED_TOKENS):
            given.append(self.token.clone())
            logits.append(step().clone())
        self.restart()
        eager = copy.deepcopy(self.model)  # a copy is not compiled
        eager_logits, exact = logits_of(eager, given), logits_of(in_float64(eager), given)
        return relative_error(torch.cat(logits), exact), relative_error(eager_logits, exact)


def logits_of(model: Decoder, tokens: Sequence[Tensor]) -> Tensor:
    """The logits `[len(tokens) * batch, vocabulary]` of all steps, from the tokens `[batch]` of each step."""
    positions = torch.arange(len(tokens), device=tokens[0].device)
    return torch.cat([model(token.clone(), positions[i : i + 1].clone()) for i, token in enumerate(tokens)])


def in_float64(model: Decoder) -> Decoder:
    """Let a model decode in float64. To save memory, a block's parameters are in float64 only while it runs.

    fp8 weights and their scales are not converted.
    """

    def convert(block: nn.Module, dtype: torch.dtype) -> None:
        for parameter in block.parameters():
            if parameter.dtype in (before, torch.float64):
                parameter.data = parameter.data.to(dtype)

    before = model.head.weight.dtype
    model.start.double()
    model.head.double()
    for block in model.blocks:
        for name, cache in block.named_buffers():
            if cache.is_floating_point():
                block.get_submodule(name.rpartition(".")[0]).register_buffer(name.rpartition(".")[2], cache.double())
        block.register_forward_pre_hook(lambda block, _: convert(block, torch.float64))
        block.register_forward_hook(lambda block, *_: convert(block, before))
    return model


def sharing(model: Decoder) -> Decoder:
    """An uncompiled copy of a model that shares its tensors."""
    return copy.deepcopy(model, {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())})


def capture_step(decoding: Decoding, name: str) -> Captured:
    """Compile a step, capture it as a CUDA graph, and measure its error."""
    decoding.model.compile_parts(lambda part: part.compile(fullgraph=True, dynamic=False, options=OPTIONS))
    captured = capture(Variant(name, lambda _: decoding.step(), 1))

    def replay() -> Tensor:
        captured.graph.replay()
        (logits,) = captured.outputs
        assert logits is not None
        return logits

    captured.error, eager = decoding.errors(replay)
    captured.budget = ERROR_OVER_EAGER * eager
    return captured


def bench(problem: Problem, rounds: int = ROUNDS) -> list[Row]:
    """Time every compilation of each model, and each model's read ceiling, in turn. Return a row for each."""
    sizes, batch = problem.sizes, problem.batch
    models = {n: build(sizes, n, "cuda", torch.bfloat16, batch, fp8=problem.fp8) for n in problem.masks}
    weight_bytes = {n_masks: model.weight_bytes() for n_masks, model in models.items()}
    decodings: dict[int, list[Captured]] = {n_masks: [] for n_masks in models}
    with torch.no_grad():
        memory = torch.empty(max(weight_bytes.values()), dtype=torch.uint8, device="cuda")
        readers = {n_masks: reader([memory[:count]], [memory[:0]]) for n_masks, count in weight_bytes.items()}
        readings = {n_masks: capture(Variant("read ceiling", read, 1)) for n_masks, read in readers.items()}
        for _ in range(problem.compilations):
            with fresh_cache():
                for n_masks, model in models.items():
                    torch._dynamo.reset()
                    decoding = Decoding.start(sharing(model))
                    decodings[n_masks].append(capture_step(decoding, "SwiMGLU" if n_masks else "SwiGLU"))
        time_graphs([*readings.values(), *(step for steps in decodings.values() for step in steps)], rounds)
    rows = []
    for n_masks, steps in decodings.items():
        reading = readings[n_masks]
        for i, one in enumerate((reading, *steps)):
            time, spread, error = one.timing()
            fraction = reading.timing().microseconds / time
            extra: dict[str, object] = {"weight_mb": round(weight_bytes[n_masks] / 1e6, 1)}
            if one is not reading:
                extra |= {"error_budget": float(f"{one.budget:.3g}"), "compilation": i}
            size = batch, sizes.intermediate, sizes.hidden, n_masks, "bfloat16"
            rows.append(Row("decode model", one.variant.name, *size, time, spread, fraction, error, extra))
    return rows


IN_BFLOAT16 = Result("decode_model", PROBLEMS, [SMALL], bench, PROTOCOL)
IN_FP8 = Result("decode_model_fp8", PROBLEMS_IN_FP8, [replace(SMALL, fp8=True)], bench, PROTOCOL)
