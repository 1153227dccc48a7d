"""A layer to train, all its variants on the same parameters, and the errors of their results and gradients.

`prepared` and `rows_of` also serve the experts of train_experts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.baselines import ComplementTrick
from benchmarks.harness import relative_error
from benchmarks.records import Row
from benchmarks.timing import allocated, first_call, peak, release
from compile_passes.backend import mglu
from mglu_ops.accuracy import ERROR_BUDGET
from mglu_ops.nn import GLU, MGLU, NaiveMGLU

Layer = Callable[[Tensor], Tensor]

CASE = "training step"
"""Value of the column `case` in all rows."""
NAIVE = "naive compiled"
TRICK = "complement trick compiled"
FUSED = "fused"
OPERATOR = "operator, eager"
MODULE = "mglu_ops.nn.MGLU, eager"
RECOMPUTING = "mglu_ops.nn.MGLU, save_activations=False"
SWIGLU = "SwiGLU compiled"
GEMMS = "three stacked GEMMs"
CHECKED_TOKENS = 512
"""The results of this number of rows of x are compared with float64."""


class Results(NamedTuple):
    """The result of a layer and the gradients of x, weight and mask_logits."""

    y: Tensor
    grad_x: Tensor
    grad_weight: Tensor
    grad_logits: Tensor


class Training:
    """Input, parameters and upstream gradient of one layer with straight-through masks.

    Attributes:
        naive: the naive layer, which owns weight `[out_features, in_features]` and mask_logits.
        x: leaf `[tokens, in_features]`.
        grad_output: upstream gradient `[tokens, out_features]`.
    """

    def __init__(self, shape: tuple[int, int], tokens: int, n_masks: int, device: str) -> None:
        d, h = shape
        dtype = torch.bfloat16
        self.naive = NaiveMGLU(h, d, n_masks=n_masks, device=device, dtype=dtype)
        self.x = torch.randn(tokens, h, device=device, dtype=dtype, requires_grad=True)
        self.grad_output = torch.randn(tokens, d, device=device, dtype=dtype)

    def leaves(self) -> tuple[Tensor, Tensor, Tensor]:
        """The inputs whose gradients are computed: x, weight and mask_logits."""
        assert self.naive.mask_logits is not None
        return self.x, self.naive.weight, self.naive.mask_logits

    def results(self, layer: Layer, grad_output: Tensor) -> Results:
        y = layer(self.x)
        return Results(y.detach(), *torch.autograd.grad(y, self.leaves(), grad_output))


class Inputs(Protocol):
    """The inputs of a training step: the leaf x, and the gradient of the result."""

    x: Tensor
    grad_output: Tensor


class Step:
    """Forward and backward passes of a layer. As in a training loop, earlier gradients are dropped first."""

    def __init__(self, training: Inputs, layer: Layer, parameters: Iterable[Tensor]) -> None:
        self.layer, self.x, self.grad_output = layer, training.x, training.grad_output
        self.leaves = (self.x, *parameters)

    def drop_gradients(self) -> None:
        for leaf in self.leaves:
            leaf.grad = None

    def __call__(self) -> None:
        self.drop_gradients()
        self.layer(self.x).backward(self.grad_output)


def steps(training: Training) -> dict[str, Step]:
    """The step of each variant, by name. All steps share parameters. Compiled variants compile at their first call."""
    naive = training.naive

    def form(kind: Callable[..., Any], **arguments: Any) -> Any:
        layer = kind(naive.in_features, naive.out_features, n_masks=naive.n_masks, device="meta", **arguments)
        layer.weight, layer.mask_logits = naive.weight, naive.mask_logits
        return layer

    def operator(x: Tensor) -> Tensor:
        return torch.ops.mglu.forward_ste(x, naive.weight, naive.mask_logits, naive.activation)[0]

    layers: dict[str, Layer] = {
        NAIVE: compiled(naive),
        TRICK: compiled(form(ComplementTrick)),
        FUSED: compiled(form(NaiveMGLU), backend=mglu, options={"strict": True}),
        OPERATOR: operator,
        MODULE: form(MGLU),
        RECOMPUTING: form(MGLU, save_activations=False),
    }
    return {name: Step(training, layer, naive.parameters()) for name, layer in layers.items()}


def compiled(layer: nn.Module, **options: Any) -> Layer:
    return torch.compile(layer, fullgraph=True, dynamic=False, **options)


def swiglu_step(training: Training) -> Step:
    """A step of a compiled SwiGLU projection with the same shape, x and upstream gradient."""
    d, h = training.naive.weight.shape
    glu = GLU(h, d, device=training.x.device, dtype=training.x.dtype)
    return Step(training, compiled(glu), glu.parameters())


def gemms_step(training: Training) -> Callable[[], None]:
    """Only the three GEMMs that no step can avoid, with stacked weights `[(n_masks + 1) d, h]`.

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


class Oracle:
    """The results and gradients of a layer for some tokens, in float64.

    The upstream gradient of all other tokens is 0. Their gradients must then be 0, and gradients of parameters are sums
    over the checked tokens only. In this way, the timed call itself is checked at low cost.

    Attributes:
        grad_output: upstream gradient `[tokens, out_features]`.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        count = training.x.shape[0]
        self.checked = torch.randperm(count, device=training.x.device)[:CHECKED_TOKENS]
        self.others = torch.ones(count, dtype=torch.bool, device=training.x.device).index_fill_(0, self.checked, False)
        self.grad_output = training.grad_output.masked_fill(self.others[:, None], 0)
        self.exact = self._exact()

    def _exact(self) -> Results:
        """The exact results, computed mask by mask to save memory."""
        x, weight, mask_logits = (leaf.detach() for leaf in self.training.leaves())
        x, weight = (leaf.double().requires_grad_() for leaf in (x[self.checked], weight))
        grad = self.grad_output[self.checked].double()
        grad_logits = torch.zeros_like(mask_logits, dtype=torch.float64)
        exact = Results(torch.zeros_like(grad), torch.zeros_like(x), torch.zeros_like(weight), grad_logits)
        for i, logits in enumerate(mask_logits):
            mask = (logits > 0).double().requires_grad_()
            y = F.silu(F.linear(x, weight * mask)) * F.linear(x, weight * (1 - mask))
            terms = y.detach(), *torch.autograd.grad(y, (x, weight, mask), grad)
            for total, term in zip((*exact[:3], exact.grad_logits[i]), terms, strict=True):
                total.add_(term)
        return exact

    def errors(self, results: Results) -> dict[str, float]:
        """The relative error of the result and of each gradient."""
        checked_results = results._replace(y=results.y[self.checked], grad_x=results.grad_x[self.checked])
        errors = {
            name: relative_error(ours, exact)
            for name, ours, exact in zip(Results._fields, checked_results, self.exact, strict=True)
        }
        if bool(results.grad_x[self.others].count_nonzero()):
            errors["grad_x"] = float("inf")
        return errors


# --- Measuring all variants ------------------------------------------------------------------------------------------


class Exact(Protocol):
    """The interface of `Oracle`, in this file and in train_experts.py."""

    training: Any
    grad_output: Tensor

    def errors(self, results: Results) -> dict[str, float]: ...


Columns = dict[str, dict[str, object]]
"""Name of a variant -> its extra columns."""


def checked(step: Step, oracle: Exact) -> dict[str, object]:
    """The errors of a variant, and `bits_repeat`: True if two steps with the full upstream gradient give equal bits."""
    training = oracle.training
    errors = oracle.errors(training.results(step.layer, oracle.grad_output))
    twice = [training.results(step.layer, training.grad_output) for _ in range(2)]
    repeat = all(torch.equal(*pair) for pair in zip(*twice, strict=True))
    return {"errors": {name: float(f"{error:.3g}") for name, error in errors.items()}, "bits_repeat": repeat}


def prepared(steps: Mapping[str, Step], oracle: Exact, device: str) -> tuple[dict[str, Callable[[], None]], Columns]:
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
        release(device)
    return ready, columns


def rows_of(
    case: str, size: tuple[int, tuple[int, int], int], times: Mapping[str, Sequence[float]], columns: Columns
) -> list[Row]:
    """A row for each variant. `size` is `(tokens, (out_features, in_features), n_masks)`."""
    rows = []
    for name, extra in columns.items():
        errors = extra.get("errors")
        error = max(errors.values()) if isinstance(errors, dict) else float("nan")
        budget = ERROR_BUDGET[torch.bfloat16]
        rows.append(Row.of_times(case, name, *size, times.get(name, []), error=error, budget=budget, extra=extra))
    return rows
