"""Times a training step of whole language models with SwiGLU, with naive SwiMGLU and with fused SwiMGLU.

A step is forward, backward and AdamW (fused) on random tokens. As in the paper, SwiMGLU replaces SwiGLU and nothing
else changes, so all models have the same widths. With one mask, SwiMGLU has as many parameters as SwiGLU, if
its mask logits count. Blocks and loss are compiled.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from benchmarks.decoder import Projection, Sizes, creating
from benchmarks.language_model import LanguageModel, count, share_tensors
from benchmarks.records import Result, Row
from benchmarks.timing import LOAD_SECONDS, SETTLED_ROUNDS, allocated, clock_of, peak, release, under_load
from mglu_ops.nn import GLU, MGLU, NaiveMGLU

Precision = Literal["autocast", "bfloat16"]
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
"""`autocast`: float32 parameters under bfloat16 autocast. `bfloat16`: parameters in bfloat16."""
LENGTH = 2048
PROTOCOL = (
    "forward, backward and AdamW(fused=True); blocks and loss compiled; random tokens, sequences of 2048; between two "
    "events, variants in turns whose order changes, each after at least one step and 60 ms of load; median over 5 to 9 "
    "rounds, us a step; peak_mb: parameters, gradients, state of the optimiser and activations, in MB; error of fused: "
    "the distance of all gradients to the naive model's, before the first step"
)
MAX_DISTANCE = 0.1
"""Allowed distance between the gradients of the fused and the naive model, relative to the norm of the naive model's
gradients. Both models round to bfloat16 in every layer. Wrong masks or gradients give a distance of about 1."""
LEARNING_RATE = 1e-5


class Model(NamedTuple):
    """A model to train: its sizes, and the number of sequences per step."""

    sizes: Sizes
    batch: int


MODELS = {
    "Llama-3.2 1B": Model(Sizes(context=LENGTH), batch=4),
    "350M": Model(Sizes(24, 1024, 2816, 16, 16, vocabulary=32000, context=LENGTH, rope_base=10_000.0), batch=8),
}


@dataclass(frozen=True)
class Problem:
    """A model, its name and precision, and the number of SwiMGLU's masks."""

    name: str
    model: Model
    precision: Precision
    n_masks: int

    @property
    def case(self) -> str:
        return f"{self.name}, {self.precision}"

    def is_in(self, rows: Sequence[Row]) -> bool:
        return (self.case, self.n_masks) in {(row.case, row.n_masks) for row in rows}


SMALL = Problem("350M", Model(replace(MODELS["350M"].sizes, layers=2, context=128), batch=1), "autocast", 1)
"""A small problem for a quick check."""
PROBLEMS = [
    Problem(name, model, precision, n_masks)
    for (name, model), precision, n_masks in product(MODELS.items(), PRECISIONS, (1, 2, 4))
]


class Training:
    """A compiled model and its optimizer, with the tokens `[batch, length + 1]` of every step.

    With `autocast`, the forward pass runs under bfloat16 autocast.
    """

    def __init__(self, model: LanguageModel, optimizer: torch.optim.Optimizer, tokens: Tensor, autocast: bool) -> None:
        self.model, self.optimizer, self.tokens, self.autocast = model, optimizer, tokens, autocast
        model.compile_parts()

    def backward(self) -> None:
        """Compute the loss and the gradients."""
        with torch.autocast(self.tokens.device.type, torch.bfloat16, enabled=self.autocast):
            loss = self.model(self.tokens)
        loss.backward()

    def step(self) -> None:
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradients(self) -> list[Tensor]:
        """Compute the gradients of all parameters, and remove them from the parameters."""
        self.backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        self.optimizer.zero_grad(set_to_none=True)
        return gradients


def build(sizes: Sizes, projection: Projection, device: str, precision: Precision) -> LanguageModel:
    """Build a model with random parameters, in float32 for autocast and otherwise in bfloat16."""
    with creating(device, torch.bfloat16 if precision == "bfloat16" else torch.float32):
        return LanguageModel(sizes, projection)


def distance(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """The norm of the difference of our gradients to others, relative to the norm of the others."""
    difference, norm = zip(*(((a - b).double().norm(), b.double().norm()) for a, b in pairs), strict=True)
    return float(torch.stack(difference).norm() / torch.stack(norm).norm())


def trainings(problem: Problem, device: str) -> tuple[dict[str, Training], dict[str, dict[str, object]], float]:
    """The models of a problem by name, the extra columns of their rows by name, and the error of the fused model.

    The naive and the fused model share their parameters and the optimizer, to save memory.
    """
    torch._dynamo.reset()
    (sizes, batch), n_masks = problem.model, problem.n_masks
    tokens = torch.randint(0, sizes.vocabulary, (batch, sizes.context + 1), device=device)
    found: dict[str, Training] = {}
    columns: dict[str, dict[str, object]] = {}

    def training(model: LanguageModel, optimizer: torch.optim.Optimizer) -> Training:
        return Training(model, optimizer, tokens, problem.precision == "autocast")

    def optimizer(of: LanguageModel) -> torch.optim.Optimizer:
        return torch.optim.AdamW(of.parameters(), lr=LEARNING_RATE, fused=True)

    def add(name: str, training: Training, held: float) -> None:
        """Run the first steps of a model. `held` is the memory of other models in MB."""
        for _ in range(2):
            training.step()
        found[name] = training
        columns[name] = {
            "peak_mb": round(peak(training.step, device) - held, 1),
            "parameters_m": round(count(training.model) / 1e6, 1),
            "sequences": batch,
        }

    held = allocated(device)
    swiglu = build(sizes, GLU, device, problem.precision)
    add("SwiGLU", training(swiglu, optimizer(swiglu)), held)

    held = allocated(device)
    naive = build(sizes, partial(NaiveMGLU, n_masks=n_masks), device, problem.precision)
    fused = build(sizes, partial(MGLU, n_masks=n_masks), "meta", problem.precision)
    share_tensors(naive, fused)
    shared = optimizer(naive)
    pair = {"naive": training(naive, shared), "fused": training(fused, shared)}
    error = distance(zip(pair["fused"].gradients(), pair["naive"].gradients(), strict=True))
    release()
    for name, one in pair.items():
        add(name, one, held)
    return found, columns, float(f"{error:.3g}")


def bench(
    problem: Problem, device: str = "cuda", rounds: int = SETTLED_ROUNDS, load: float = LOAD_SECONDS
) -> list[Row]:
    """Measure one problem, and return a row for each model. `bench` in benchmarks/train.py describes the arguments."""
    found, columns, distance = trainings(problem, device)
    release()
    times = under_load({name: training.step for name, training in found.items()}, clock_of(device), rounds, load)
    sizes, batch = problem.model
    size = batch * sizes.context, (sizes.intermediate, sizes.hidden), problem.n_masks
    errors = {"fused": distance}
    return [
        Row.of_times(
            *(problem.case, name, *size, times[name]),
            error=errors.get(name, float("nan")),
            budget=MAX_DISTANCE,
            extra=extra,
        )
        for name, extra in columns.items()
    ]


RESULT = Result("train_model", PROBLEMS, [SMALL], bench, PROTOCOL)
