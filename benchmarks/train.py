"""Times a training step of a layer, or of experts, in every form: forward and backward, with straight-through masks.

python -m benchmarks.train --out DIR [--shapes 8192x2048] [--tokens 2048 8192] [--n-masks 1 4] [--resume]

This command takes any layers; `python -m mglu_ops bench train train_experts` measures all problems. `--resume` measures
only problems that `DIR/train.csv` lacks. Rows of experts are sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks import layers
from benchmarks.baselines import ComplementTrick, ExpertsByComplement, NaiveExperts, SwigluExperts
from benchmarks.layers import Model
from benchmarks.records import Result, Row, measure, parser_of
from benchmarks.timing import (
    LOAD_SECONDS,
    SETTLED_ROUNDS,
    allocated,
    clock_of,
    first_call,
    peak,
    relative_error,
    release,
    under_load,
)
from compile_passes.backend import mglu
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.nn import GLU, MGLU, NaiveMGLU
from mglu_ops.tuning.command import shape as shape_of

CASE = "training step"
"""Value of the column `case` in all rows of layers without experts."""
NAIVE = "naive compiled"
TRICK = "complement trick compiled"
FUSED = "fused"
OPERATOR = "operator, eager"
MODULE = "mglu_ops.nn.MGLU, eager"
RECOMPUTING = "mglu_ops.nn.MGLU, save_activations=False"
SWIGLU = "SwiGLU compiled"
GEMMS = "three stacked GEMMs"

SHAPES = ((8192, 2048), (14336, 4096))
TOKENS = (2048, 8192, 32768)
MASKS = (1, 2, 4, 8, 16)
MODELS = dict(zip(("Qwen3-30B-A3B", "Mixtral-8x7B", "gpt-oss"), layers.MODELS.values(), strict=True))
CHECKED_TOKENS = 512
"""The results of this number of rows of x are compared with float64."""
CHECKED_ROWS = 256
"""Maximum number of rows that are compared with float64, in the first and in the last expert that has rows."""
METHOD = (
    "calls between two events, variants in turns whose order changes; a turn repeats its call for 60 ms and is then "
    "timed for 60 ms or one call; median over 5 to 9 rounds, us per forward and backward; gradients dropped before "
    "each step; peak_mb: the most memory over x, parameters and grad_output, in MB; errors: against float64, over "
)
PROTOCOL = f"{METHOD}{CHECKED_TOKENS} tokens of the timed call (the upstream gradient of the others is 0)"
EXPERTS_PROTOCOL = (
    f"{METHOD}{CHECKED_ROWS} rows each of two experts in the timed call (the upstream gradient of the others is 0)"
)


@dataclass(frozen=True)
class Problem:
    """A layer and a number of tokens.

    Attributes:
        shape: `(out_features, in_features)` of the layer, or of each expert.
        tokens: number of tokens. Each has a row of x or, with experts, `top_k` rows.
        n_masks: number of masks.
        case: the problem's name in the rows.
        routing: "balanced" if all experts have the same probability, or "zipf" for probabilities in proportion to 1,
            1/2, 1/3 and so on; None for a layer without experts.
        model: the sizes of the experts; None without `routing`.
    """

    shape: tuple[int, int]
    tokens: int
    n_masks: int
    case: str = CASE
    routing: str | None = None
    model: Model | None = None

    def is_in(self, rows: Sequence[Row]) -> bool:
        problem = self.case, self.shape, self.tokens, self.n_masks
        return problem in {(row.case, row.shape, row.tokens, row.n_masks) for row in rows}


PROBLEMS = [Problem(*one) for one in product(SHAPES, TOKENS, MASKS)]
PROBLEMS_OF_EXPERTS = [
    Problem(model[1:3], 8192, n_masks, f"{name}, {routing}", routing, model)
    for (name, model), routing, n_masks in product(MODELS.items(), ("balanced", "zipf"), (1, 4))
]


# --- Layers and their steps -------------------------------------------------------------------------------------------

Layer = Callable[[Tensor], Tensor]


class Results(NamedTuple):
    """The result of a layer and the gradients of x, weight and mask_logits."""

    y: Tensor
    grad_x: Tensor
    grad_weight: Tensor
    grad_logits: Tensor


class Training:
    """Input, parameters and upstream gradient of a layer, or of experts, with straight-through masks.

    Attributes:
        naive: the naive layer, which owns the parameters weight and mask_logits.
        x: leaf `[rows, in_features]`; rows are sorted by expert.
        grad_output: upstream gradient `[rows, out_features]`.
    """

    naive: NaiveMGLU | NaiveExperts

    def __init__(self, problem: Problem, device: str) -> None:
        (d, h), rows, n_masks = problem.shape, problem.tokens, problem.n_masks
        random = partial(torch.randn, device=device, dtype=torch.bfloat16)
        if problem.model is None:
            self.naive = NaiveMGLU(h, d, n_masks=n_masks, device=device, dtype=torch.bfloat16)
        else:
            experts, rows = problem.model.experts, rows * problem.model.top_k
            ranks = torch.arange(1, experts + 1, device=device)
            loads = 1 / ranks if problem.routing == "zipf" else torch.ones_like(ranks, dtype=torch.float32)
            chosen = torch.multinomial(loads, rows, replacement=True)
            offs = torch.bincount(chosen, minlength=experts).cumsum(0).int()
            weight, mask_logits = random(experts, d, h).div_(h**0.5), random(experts, n_masks, d, h)
            self.naive = NaiveExperts(nn.Parameter(weight), nn.Parameter(mask_logits), offs)
        self.x = random(rows, h, requires_grad=True)
        self.grad_output = random(rows, d)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs whose gradients are computed: x, weight and mask_logits."""
        assert self.naive.mask_logits is not None
        return self.x, self.naive.weight, self.naive.mask_logits

    def results(self, layer: Layer, grad_output: Tensor) -> Results:
        y = layer(self.x)
        return Results(y.detach(), *torch.autograd.grad(y, self.leaves(), grad_output))


class Step:
    """Forward and backward passes of a layer. As in a training loop, earlier gradients are dropped first."""

    def __init__(self, training: Training, layer: Layer, parameters: Iterable[Tensor]) -> None:
        self.layer, self.x, self.grad_output = layer, training.x, training.grad_output
        self.leaves = (self.x, *parameters)

    def drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> None:
        self.drop_gradients()
        self.layer(self.x).backward(self.grad_output)


def steps(training: Training) -> dict[str, Step]:
    """The step of each variant, by name. Compiled variants compile at their first call.

    All variants share parameters, except SwiGLU, which has no masks and is measured beside one mask only.
    """
    naive = training.naive
    forms = expert_layers(naive) if isinstance(naive, NaiveExperts) else dense_layers(naive)
    found = {name: Step(training, layer, naive.parameters()) for name, layer in forms.items()}
    if naive.n_masks == 1:
        swiglu = swiglu_of(naive)
        found[SWIGLU] = Step(training, compiled(swiglu), swiglu.parameters())
    return found


def dense_layers(naive: NaiveMGLU) -> dict[str, Layer]:
    """All forms of a layer with the parameters of the naive one, by name."""

    def form(kind: Callable[..., Any], **arguments: Any) -> Any:
        layer = kind(naive.in_features, naive.out_features, n_masks=naive.n_masks, device="meta", **arguments)
        layer.weight, layer.mask_logits = naive.weight, naive.mask_logits
        return layer

    return {
        NAIVE: compiled(naive),
        TRICK: compiled(form(ComplementTrick)),
        FUSED: compiled(form(NaiveMGLU), backend=mglu, options={"strict": True}),
        OPERATOR: operator(naive),
        MODULE: form(MGLU),
        RECOMPUTING: form(MGLU, save_activations=False),
    }


def expert_layers(naive: NaiveExperts) -> dict[str, Layer]:
    """All forms of the experts with the parameters of the naive ones, by name."""
    trick = ExpertsByComplement(naive.weight, naive.mask_logits, naive.offs)
    return {NAIVE: compiled(naive), TRICK: compiled(trick), OPERATOR: operator(naive)}


def compiled(layer: nn.Module, **options: Any) -> Layer:
    return torch.compile(layer, fullgraph=True, dynamic=False, **options)


def operator(naive: NaiveMGLU | NaiveExperts) -> Layer:
    """The fused operator with the parameters of a naive layer."""
    if isinstance(naive, NaiveExperts):
        return lambda x: torch.ops.mglu.grouped_forward_ste(x, naive.weight, naive.mask_logits, naive.offs)[0]
    return lambda x: torch.ops.mglu.forward_ste(x, naive.weight, naive.mask_logits, naive.activation)[0]


def swiglu_of(naive: NaiveMGLU | NaiveExperts) -> nn.Module:
    """SwiGLU of the shape of a naive layer, with parameters of its own."""
    if isinstance(naive, NaiveExperts):
        return SwigluExperts(naive)
    return GLU(naive.in_features, naive.out_features, device=naive.weight.device, dtype=naive.weight.dtype)


def gemms_step(training: Training) -> Callable[[], None]:
    """Only the three GEMMs that no step of a layer can avoid, with stacked weights `[(n_masks + 1) d, h]`.

    The gradient of the n_masks + 1 projections has the size of the projections, which take its place here.
    """
    x = training.x.detach()
    n_masks, d, h = training.naive.n_masks, *training.naive.weight.shape
    stacked = torch.randn((n_masks + 1) * d, h, device=x.device, dtype=x.dtype) / h**0.5

    def step() -> None:
        projections = torch.mm(x, stacked.t())
        torch.mm(projections, stacked)
        torch.mm(projections.t(), x)

    return step


# --- Results and gradients in float64 ---------------------------------------------------------------------------------


class Oracle:
    """The results and gradients in float64 for some rows: random rows of a layer, or the first rows of two experts.

    The upstream gradient of all other rows is 0. Their gradients, and those of all other experts, must then be 0, and
    gradients of parameters are sums over the checked rows only. In this way, the timed call itself is checked at low
    cost.

    Attributes:
        grad_output: upstream gradient `[rows, out_features]`.
        checked: expert -> the rows to check. A layer without experts is expert 0.
        others: bool `[rows]`, the rows that are not checked.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        rows, device = training.x.shape[0], training.x.device
        if isinstance(training.naive, NaiveExperts):
            self.checked = rows_of_two_experts(training.naive.offs)
        else:
            self.checked = {0: torch.randperm(rows, device=device)[:CHECKED_TOKENS]}
        self.others = torch.ones(rows, dtype=torch.bool, device=device)
        for checked in self.checked.values():
            self.others[checked] = False
        self.grad_output = training.grad_output.masked_fill(self.others[:, None], 0)
        x, weight, mask_logits = (leaf.detach() for leaf in training.leaves())
        weight, mask_logits = (by_expert(one, training) for one in (weight, mask_logits))
        self.exact = {
            expert: exact_results(x[checked], weight[expert], mask_logits[expert], self.grad_output[checked])
            for expert, checked in self.checked.items()
        }

    def errors(self, results: Results) -> dict[str, float]:
        """The relative errors of the result and of each gradient. Each is the largest error of the checked experts."""
        worst = dict.fromkeys(Results._fields, 0.0)
        weights, logits = (by_expert(one, self.training) for one in (results.grad_weight, results.grad_logits))
        for expert, rows in self.checked.items():
            found = results.y[rows], results.grad_x[rows], weights[expert], logits[expert]
            for name, ours, exact in zip(worst, found, self.exact[expert], strict=True):
                worst[name] = max(worst[name], relative_error(ours, exact))
        if bool(results.grad_x[self.others].count_nonzero()):
            worst["grad_x"] = float("inf")
        for name, gradients in (("grad_weight", weights), ("grad_logits", logits)):
            others = (one for expert, one in enumerate(gradients) if expert not in self.checked)
            if any(bool(gradient.count_nonzero()) for gradient in others):
                worst[name] = float("inf")
        return worst


def rows_of_two_experts(offs: Tensor) -> dict[int, Tensor]:
    """The first rows, at most `CHECKED_ROWS`, of the first and of the last expert that has rows."""
    ends = offs.tolist()
    starts = [0, *ends[:-1]]
    used = [expert for expert, end in enumerate(ends) if end > starts[expert]]
    return {
        expert: torch.arange(starts[expert], min(starts[expert] + CHECKED_ROWS, ends[expert]), device=offs.device)
        for expert in (used[0], used[-1])
    }


def by_expert(parameter: Tensor, training: Training) -> Tensor:
    """The parameter, or its gradient, with experts as its first dimension: one expert for a layer without any."""
    return parameter if isinstance(training.naive, NaiveExperts) else parameter[None]


def exact_results(x: Tensor, weight: Tensor, mask_logits: Tensor, grad: Tensor) -> Results:
    """The results of one layer or expert in float64, computed mask by mask to save memory."""
    x, weight = (leaf.double().requires_grad_() for leaf in (x, weight))
    grad, grad_logits = grad.double(), torch.zeros_like(mask_logits, dtype=torch.float64)
    exact = Results(torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight), grad_logits)
    for i, logits in enumerate(mask_logits):
        mask = (logits > 0).double().requires_grad_()
        y = F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask))
        terms = y.detach(), *torch.autograd.grad(y, (x, weight, mask), grad)
        for total, term in zip((*exact[:3], exact.grad_logits[i]), terms, strict=True):
            total.add_(term)
    return exact


# --- Measuring all variants -------------------------------------------------------------------------------------------

Columns = dict[str, dict[str, object]]
"""Name of a variant -> its extra columns."""


def checked(step: Step, oracle: Oracle) -> dict[str, object]:
    """The errors of a variant, and `bits_repeat`: True if two steps with the full upstream gradient give equal bits."""
    training = oracle.training
    errors = oracle.errors(training.results(step.layer, oracle.grad_output))
    twice = [training.results(step.layer, training.grad_output) for _ in range(2)]
    repeat = all(torch.equal(*pair) for pair in zip(*twice, strict=True))
    return {"errors": {name: float(f"{error:.3g}") for name, error in errors.items()}, "bits_repeat": repeat}


def prepared(steps: Mapping[str, Step], oracle: Oracle, device: str) -> tuple[dict[str, Callable[[], None]], Columns]:
    """The steps of variants that fit into memory, and the extra columns of all variants, by name."""
    columns: Columns = {}
    ready: dict[str, Callable[[], None]] = {}
    for name, step in steps.items():
        try:
            first_call(name, step)
            step.drop_gradients()
            before = allocated(device)  # inputs, parameters and upstream gradient
            columns[name] = {"peak_mb": round(peak(step, device) - before, 1)}
            step.drop_gradients()
            if name != SWIGLU:
                columns[name] |= checked(step, oracle)
            ready[name] = step
        except torch.OutOfMemoryError:
            columns[name] = {"left_out": "out of memory"}
        step.drop_gradients()
        release()
    return ready, columns


def bench(
    problem: Problem, device: str = "cuda", rounds: int = SETTLED_ROUNDS, load: float = LOAD_SECONDS
) -> list[Row]:
    """Measure one problem in at most `rounds` rounds, and return a row for each variant.

    On a CPU, memory is not measured. `load` is the argument `seconds` of `timing.under_load`.
    """
    torch._dynamo.reset()
    training, model = Training(problem, device), problem.model
    ready, columns = prepared(steps(training), Oracle(training), device)
    if model is None:
        ready[GEMMS], columns[GEMMS] = gemms_step(training), {}
        first_call(GEMMS, ready[GEMMS])
    else:
        columns = {name: {**extra, "experts": model.experts, "top_k": model.top_k} for name, extra in columns.items()}
    release()
    times = under_load(ready, clock_of(device), rounds, load)
    rows = []
    for name, extra in columns.items():
        errors = extra.get("errors")
        error = max(errors.values()) if isinstance(errors, dict) else float("nan")
        line = problem.case, name, problem.tokens, problem.shape, problem.n_masks, times.get(name, [])
        rows.append(Row.of_times(*line, error=error, budget=ERROR_BUDGET[torch.bfloat16], extra=extra))
    return rows


LAYERS = Result("train", PROBLEMS, [Problem(SHAPES[0], 64, n_masks=1)], bench, PROTOCOL)
EXPERTS = Result(
    "train_experts",
    PROBLEMS_OF_EXPERTS,
    [replace(PROBLEMS_OF_EXPERTS[-1], tokens=64, n_masks=1)],
    bench,
    EXPERTS_PROTOCOL,
)


def main() -> None:
    parser = parser_of(__doc__, resume=True)
    parser.add_argument("--shapes", type=shape_of, nargs="+", default=SHAPES, metavar="DxH")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--n-masks", type=int, nargs="+", default=MASKS)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    options = parser.parse_args()
    chosen = [Problem(*one) for one in product(options.shapes, options.tokens, options.n_masks)]
    measure(chosen, partial(bench, device=options.device), options.out, "train", PROTOCOL, options.resume)


if __name__ == "__main__":
    main()
