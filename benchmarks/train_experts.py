"""Times a training step of experts in every form: forward and backward passes with straight-through masks.

python -m benchmarks.train_experts --out DIR [--models Mixtral-8x7B] [--loads balanced] [--n-masks 1 4] [--resume]

Rows are sorted by expert. Without options, all problems are measured. `--resume` measures only problems that
`DIR/train_experts.csv` lacks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from operator import add
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import relative_error
from benchmarks.records import Row, measure, parser_of
from benchmarks.timing import LOAD_SECONDS, SETTLED_ROUNDS, clock_of, release, under_load
from benchmarks.train_layers import (
    NAIVE,
    OPERATOR,
    SWIGLU,
    TRICK,
    Layer,
    Results,
    Step,
    compiled,
    prepared,
    rows_of,
)

TOKENS = 8192
MASKS = (1, 4)
LOADS = ("balanced", "zipf")
CHECKED_ROWS = 256
"""Maximum number of rows that are compared with float64, in the first and in the last expert that has rows."""
PROTOCOL = (
    "calls between two events, variants in turns whose order changes; a turn repeats its call for 60 ms and is then "
    "timed for 60 ms or one call; median over 5 to 9 rounds, us per forward and backward; gradients dropped before "
    "each step; peak_mb: the most memory over x, parameters and grad_output, in MB; errors: against float64, over "
    f"{CHECKED_ROWS} rows each of two experts in the timed call (the upstream gradient of the others is 0)"
)


class Model(NamedTuple):
    """The sizes of a mixture of experts."""

    experts: int
    out_features: int
    in_features: int
    top_k: int


MODELS = {
    "Qwen3-30B-A3B": Model(128, 768, 2048, 8),
    "Mixtral-8x7B": Model(8, 14336, 4096, 2),
    "gpt-oss": Model(32, 2880, 2880, 4),
}


@dataclass(frozen=True)
class Problem:
    """A model's experts, their loads, and a number of tokens, each with `top_k` rows.

    With `balanced` loads, all experts have the same probability. With `zipf`, probabilities are in proportion to 1,
    1/2, 1/3 and so on.
    """

    model: str
    loads: str
    n_masks: int
    tokens: int = TOKENS

    @property
    def case(self) -> str:
        return f"{self.model}, {self.loads}"

    def is_in(self, rows: Sequence[Row]) -> bool:
        return (self.case, self.n_masks, self.tokens) in {(row.case, row.n_masks, row.tokens) for row in rows}


def problems(
    models: Sequence[str] = tuple(MODELS), loads: Sequence[str] = LOADS, masks: Sequence[int] = MASKS
) -> list[Problem]:
    """All combinations of models, distributions of loads and numbers of masks."""
    return [Problem(*one) for one in product(models, loads, masks)]


class NaiveExperts(nn.Module):
    """Experts of MGLU in plain torch: two grouped products for each mask.

    Attributes:
        weight: `[experts, out_features, in_features]`.
        mask_logits: `[experts, n_masks, out_features, in_features]`.
        offs: int32 `[experts]`, the end of each expert's rows.
    """

    def __init__(self, weight: nn.Parameter, mask_logits: nn.Parameter, offs: Tensor) -> None:
        super().__init__()
        self.weight, self.mask_logits, self.offs = weight, mask_logits, offs

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.grouped_mm(x, weight.transpose(1, 2), offs=self.offs)

    def masks(self) -> list[Tensor]:
        """All masks: 0 or 1 in the forward pass. In the backward pass, their gradient goes to the logits unchanged."""
        logits = self.mask_logits.unbind(1)
        return [((soft > 0).to(soft.dtype) - soft).detach() + soft for soft in logits]

    def forward(self, x: Tensor) -> Tensor:
        pairs = ((self.product(x, self.weight * m), self.product(x, self.weight * (1 - m))) for m in self.masks())
        return reduce(add, (F.silu(gate) * value for gate, value in pairs))


class ExpertsByComplement(NaiveExperts):
    """Experts with n_masks + 1 products: `value = x W^T - gate`, where all masks share the product x W^T."""

    def forward(self, x: Tensor) -> Tensor:
        total = self.product(x, self.weight)
        gates = (self.product(x, self.weight * m) for m in self.masks())
        return reduce(add, (F.silu(gate) * (total - gate) for gate in gates))


class SwigluExperts(nn.Module):
    """Experts of SwiGLU with one weight `[experts, 2 out_features, in_features]`."""

    def __init__(self, naive: NaiveExperts) -> None:
        super().__init__()
        self.weight, self.offs = nn.Parameter(torch.cat([naive.weight.detach()] * 2, 1)), naive.offs

    def forward(self, x: Tensor) -> Tensor:
        gate, value = F.grouped_mm(x, self.weight.transpose(1, 2), offs=self.offs).chunk(2, -1)
        return F.silu(gate) * value


class Training:
    """Input, parameters and upstream gradient of experts with straight-through masks.

    Attributes:
        naive: the naive layer, which owns the parameters.
        x: leaf `[tokens * top_k, in_features]` with rows sorted by expert.
        grad_output: upstream gradient `[tokens * top_k, out_features]`.
    """

    def __init__(self, problem: Problem, device: str) -> None:
        model, dtype = MODELS[problem.model], torch.bfloat16
        rows, ranks = problem.tokens * model.top_k, torch.arange(1, model.experts + 1, device=device)
        weights = 1 / ranks if problem.loads == "zipf" else torch.ones_like(ranks, dtype=torch.float32)
        chosen = torch.multinomial(weights, rows, replacement=True)
        offs = torch.bincount(chosen, minlength=model.experts).cumsum(0).int()
        experts, d, h, _ = model
        weight, mask_logits, self.x, self.grad_output = (
            torch.randn(shape, device=device, dtype=dtype)
            for shape in ((experts, d, h), (experts, problem.n_masks, d, h), (rows, h), (rows, d))
        )
        self.x.requires_grad_()
        self.naive = NaiveExperts(nn.Parameter(weight.div_(h**0.5)), nn.Parameter(mask_logits), offs)

    def results(self, layer: Layer, grad_output: Tensor) -> Results:
        y = layer(self.x)
        leaves = self.x, self.naive.weight, self.naive.mask_logits
        return Results(y.detach(), *torch.autograd.grad(y, leaves, grad_output))


def operator(naive: NaiveExperts) -> Layer:
    """The fused operator with the parameters of a naive layer."""
    return lambda x: torch.ops.mglu.grouped_forward_ste(x, naive.weight, naive.mask_logits, naive.offs)[0]


def steps(training: Training) -> dict[str, Step]:
    """The step of each variant, by name. All steps share parameters. Compiled variants compile at their first call."""
    naive = training.naive
    trick = ExpertsByComplement(naive.weight, naive.mask_logits, naive.offs)
    layers: dict[str, Layer] = {NAIVE: compiled(naive), TRICK: compiled(trick), OPERATOR: operator(naive)}
    found = {name: Step(training, layer, naive.parameters()) for name, layer in layers.items()}
    if naive.mask_logits.shape[1] == 1:  # SwiGLU has no masks, so it is measured only once for all numbers of masks
        swiglu = SwigluExperts(naive)
        found[SWIGLU] = Step(training, compiled(swiglu), swiglu.parameters())
    return found


class Oracle:
    """The results and gradients of the experts in float64, for some rows of two experts.

    The upstream gradient of all other rows is 0, so the gradients of all other rows and experts must be 0.

    Attributes:
        grad_output: upstream gradient `[rows, out_features]`.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        offs = training.naive.offs.tolist()
        starts = dict(enumerate([0, *offs[:-1]]))
        used = [expert for expert, start in starts.items() if offs[expert] > start]
        self.checked = {
            expert: slice(starts[expert], min(starts[expert] + CHECKED_ROWS, offs[expert]))
            for expert in {used[0], used[-1]}
        }
        self.grad_output = torch.zeros_like(training.grad_output)
        for rows in self.checked.values():
            self.grad_output[rows] = training.grad_output[rows]

    def errors(self, results: Results) -> dict[str, float]:
        """The relative errors of the result and of each gradient. Each is the largest error of the checked experts."""
        worst = dict.fromkeys(Results._fields, 0.0)
        for expert, rows in self.checked.items():
            found = results.y[rows], results.grad_x[rows], results.grad_weight[expert], results.grad_logits[expert]
            for name, ours, exact in zip(worst, found, self._exact(expert, rows), strict=True):
                worst[name] = max(worst[name], relative_error(ours, exact))
        for name in ("grad_weight", "grad_logits"):
            others = (g for expert, g in enumerate(getattr(results, name)) if expert not in self.checked)
            if any(bool(gradient.count_nonzero()) for gradient in others):
                worst[name] = float("inf")
        return worst

    def _exact(self, expert: int, rows: slice) -> Results:
        naive, training = self.training.naive, self.training
        x, weight = (t.detach().double().requires_grad_() for t in (training.x[rows], naive.weight[expert]))
        masks = (naive.mask_logits[expert].detach() > 0).double().requires_grad_()
        y = reduce(add, (F.silu(F.linear(x, weight * m)) * F.linear(x, weight * (1 - m)) for m in masks))
        return Results(y.detach(), *torch.autograd.grad(y, (x, weight, masks), training.grad_output[rows].double()))


def bench(
    problem: Problem, device: str = "cuda", rounds: int = SETTLED_ROUNDS, load: float = LOAD_SECONDS
) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return a row for each variant."""
    release(device)
    torch._dynamo.reset()
    training, model = Training(problem, device), MODELS[problem.model]
    ready, columns = prepared(steps(training), Oracle(training), device)
    release(device)
    times = under_load(ready, clock_of(device), rounds, load)
    size = problem.tokens, (model.out_features, model.in_features), problem.n_masks
    model_columns = {"experts": model.experts, "top_k": model.top_k}
    return rows_of(problem.case, size, times, {name: extra | model_columns for name, extra in columns.items()})


def run(
    problems: Sequence[Problem],
    out: Path,
    device: str = "cuda",
    rounds: int = SETTLED_ROUNDS,
    load: float = LOAD_SECONDS,
    resume: bool = False,
) -> list[Row]:
    """Measure problems, and write `train_experts.csv` into a folder."""
    torch.manual_seed(0)
    return measure(problems, lambda one: bench(one, device, rounds, load), out, "train_experts", PROTOCOL, resume)


def main() -> None:
    parser = parser_of(__doc__, resume=True)
    parser.add_argument("--models", nargs="+", default=tuple(MODELS), choices=MODELS)
    parser.add_argument("--loads", nargs="+", default=LOADS, choices=LOADS)
    parser.add_argument("--n-masks", type=int, nargs="+", default=MASKS)
    arguments = parser.parse_args()
    run(problems(arguments.models, arguments.loads, arguments.n_masks), arguments.out, resume=arguments.resume)


if __name__ == "__main__":
    main()
