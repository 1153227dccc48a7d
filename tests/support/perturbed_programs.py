"""Right MGLU programs with one perturbation, their enumeration, and what must hold for each.

The seed of a program decides the right program, and its index the perturbation and the place. `program(seed, index)`
makes it, `indices(seed)` lists all indices of a seed, and `sample(number)` draws a seed and an index.

What must hold: if eager runs the program, and Dynamo's graph without the pass gives what eager gives, then the graph
that the pass has changed does as well. This includes all results, the gradients of all trained inputs (gradients that
eager lacks must be missing, because an optimizer decays a weight whose gradient is 0), the values of all inputs
afterwards, and the state of the random numbers. A graph in which nothing is fused must not be changed.
"""

from __future__ import annotations

import copy
import functools
import random
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from budgets import BUDGET, relative_error
from graphs import Capture
from perturbations import PERTURBATIONS, Perturbation, Place, Scopes, perturbed, places
from right_programs import Program, draw
from torch import Tensor
from torch.fx import GraphModule

import mglu_ops

SAME = 10 * BUDGET[torch.float64]
NARROW = {r"bfloat16": torch.bfloat16, r"\bfloat16|half\(": torch.float16, r"float32|\.float\(": torch.float32}
"""How a program spells a cast to a dtype, beginning with the least precise.

A straight-through sum or a gradient in this dtype is rounded, which the operator's exact mask is not.
"""
NOISE = 1e-11
"""A tensor whose absolute values add up to less holds only rounding errors, of a difference of equal numbers."""

SAMPLES_PER_SEED = 20
FAMILIES = {
    "writes": 4,
    "views": 4,
    "pairs": 4,
    "metadata": 1,
    "hooks": 1,
    "hooks under compiled autograd": 1,
    "draws": 2,
    "dtypes": 1,
    "gradients": 2,
    "users": 2,
}
"""How often each family of perturbations is drawn, relative to the others."""


# --- Enumeration -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def right_program(seed: int) -> tuple[Program, Scopes]:
    """The right program of a seed, and the tensors in scope at each of its positions."""
    program = draw(seed)
    return program, list(program.scopes())


def perturbation(index: int) -> Perturbation:
    """The perturbation of an index; an index is a number in `PERTURBATIONS` plus a multiple of their count."""
    return PERTURBATIONS[index % len(PERTURBATIONS)]


def place(seed: int, index: int) -> Place:
    """The place that the index selects for its perturbation in the program of a seed.

    Raises:
        IndexError: the program has fewer such places.
    """
    return _places(seed, index % len(PERTURBATIONS))[index // len(PERTURBATIONS)]


@functools.lru_cache(maxsize=2)
def _places(seed: int, number: int) -> list[Place]:
    """The places of a perturbation, known by its number, in the right program of a seed."""
    return places(PERTURBATIONS[number], *right_program(seed))


def program(seed: int, index: int) -> Program:
    """The perturbed program of a seed and an index."""
    return perturbed(perturbation(index), right_program(seed)[0], place(seed, index))


def indices(seed: int) -> Iterator[int]:
    """The indices of all perturbed programs of a seed."""
    for number in range(len(PERTURBATIONS)):
        yield from (number + len(PERTURBATIONS) * k for k in range(len(_places(seed, number))))


def sample(number: int) -> tuple[int, int]:
    """The seed and index of a random program, drawn by a number; neighbouring numbers share one right program."""
    seed, dice = number // SAMPLES_PER_SEED, random.Random(number)
    while True:
        family = dice.choices(list(FAMILIES), list(FAMILIES.values()))[0]
        chosen = dice.choice([k for k, change in enumerate(PERTURBATIONS) if change.family == family])
        if count := len(_places(seed, chosen)):
            return seed, chosen + len(PERTURBATIONS) * dice.randrange(count)


# --- Judging ---------------------------------------------------------------------------------------------------------


def through_the_pass(program: Program) -> str:
    """Compare the graphs with and without the pass, run without Inductor, with eager.

    Returns:
        `fused`, `refused` with a reason, `silent` (neither), or `skipped: ` and why nothing can be compared.

    Raises:
        AssertionError: something does not hold.
    """
    try:
        wanted = outcomes(program, program.function())
    except Exception:
        return "skipped: eager raises an error"
    if not all(map(_is_finite, wanted.values())):
        return "skipped: not finite"
    backend = Both(assume_binary=program.assume_binary)
    with torch._dynamo.config.patch(compiled_autograd=program.compiled_autograd):
        compiled = backend.compile(program.function())
        found = _attempt(program, compiled)
        assert backend.error is None, f"the pass raises {backend.error!r}"
        if backend.plain is None:
            return "skipped: Dynamo raises an error"
        if not backend.report.fused:
            assert list(map(str, backend.after)) == list(map(str, backend.before)), "refused, but the graph changed"
            return "refused" if backend.report.missed else "silent"
        backend.runs_plain = True
        plain = _attempt(program, compiled)
    return _verdict(program, found, plain, wanted)


def through_inductor(program: Program) -> str:
    """Compare a program compiled by Inductor with fusion with eager; if they differ, also compile it without fusion.

    Returns and raises what `through_the_pass` does.
    """
    wanted = outcomes(program, program.function())

    def compiled() -> Any:
        torch._dynamo.reset()
        with (
            torch._dynamo.config.patch(compiled_autograd=program.compiled_autograd),
            torch._inductor.config.patch(fallback_random=True, fx_graph_cache=False),
        ):
            return _attempt(program, torch.compile(program.function(), fullgraph=True))

    with mglu_ops.fusion(assume_binary=program.assume_binary) as report:
        found = compiled()
    if not report.fused:
        return "refused" if report.missed else "silent"
    if not isinstance(found, Exception) and difference(found, wanted, _tolerance(program)) is None:
        return "fused"
    return _verdict(program, found, compiled(), wanted)


def _attempt(program: Program, function: Callable[..., Any]) -> dict[str, Any] | Exception:
    try:
        return outcomes(program, function)
    except TimeoutError:
        raise
    except Exception as error:
        return error


def _verdict(
    program: Program, found: dict[str, Any] | Exception, plain: dict[str, Any] | Exception, wanted: dict[str, Any]
) -> str:
    """The verdict on a program in which a layer is fused."""
    if isinstance(plain, Exception):
        return "skipped: raises an error when compiled without fusion"
    tolerance = _tolerance(program)
    if difference(plain, wanted, tolerance) is not None:
        return "skipped: differs when compiled without fusion"
    if program.assume_binary and isinstance(found, ValueError) and "must be binary" in str(found):
        return "refused"
    assert not isinstance(found, Exception), f"raises {type(found).__name__}: {found}"
    text = difference(found, wanted, tolerance)
    assert text is None, text
    return "fused"


class Both(Capture):
    """A `Capture` that also keeps the original graph, and runs either."""

    plain: GraphModule | None = None
    runs_plain = False
    error: Exception | None = None
    """What the pass raised or warned of; Dynamo wraps errors of a backend in its own."""

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        self.plain = plain = copy.deepcopy(gm)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", module="compile_passes")
                super().__call__(gm, example_inputs)
        except Exception as error:
            self.error = error
            raise
        return lambda *inputs: (plain if self.runs_plain else gm).forward(*inputs)


def outcomes(program: Program, function: Callable[..., Any]) -> dict[str, Any]:
    """All that a call of a program gives: results, gradients, the inputs afterwards, and the state of random numbers.

    These are gradients of a weighted sum of all results, in which each element has a weight of its own.
    """
    torch.manual_seed(program.seed)
    inputs = program.inputs()
    with program.surroundings():
        results = function(**inputs)
    found: dict[str, Any] = {f"result {i}": y.detach().clone() for i, y in enumerate(results)}
    found |= {f"result {i} requires a gradient": y.requires_grad for i, y in enumerate(results)}
    found |= {f"{name} afterwards": t.detach().clone() for name, t in inputs.items()}
    found["state of random numbers"] = torch.get_rng_state()
    leaves = {name: t for name, t in inputs.items() if t.requires_grad and t.is_leaf}
    found |= {f"gradient of {name}": None for name in leaves}
    recorded = [y for y in results if y.requires_grad]
    if leaves and recorded:
        weights = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape) for y in recorded]
        grads = torch.autograd.grad(recorded, list(leaves.values()), weights, allow_unused=True)
        found |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def _tolerance(program: Program) -> float:
    """The largest relative error that is rounding, in the least precise dtype that a program casts to."""
    source = str(program)
    return next((BUDGET[dtype] for spelling, dtype in NARROW.items() if re.search(spelling, source)), SAME)


def difference(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = SAME) -> str | None:
    """What the first difference of two `outcomes` is, or None; `tolerance` is for the relative errors of tensors."""
    if found.keys() != wanted.keys():
        return f"has {sorted(found.keys() ^ wanted.keys())} on one side only"
    for name, value in wanted.items():
        if (text := _difference(found[name], value, tolerance)) is not None:
            return f"{name}: {text}"
    return None


def _difference(a: Any, b: Any, tolerance: float) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if a is b else f"{_words(a)}, must be {_words(b)}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)}, must be {b.dtype} {tuple(b.shape)}"
    if not b.is_floating_point():
        return None if torch.equal(a, b) else "other values"
    if b.abs().sum() < NOISE and a.abs().sum() < NOISE:
        return None
    error = relative_error(a, b)
    return None if error <= max(tolerance, BUDGET[b.dtype]) else f"relative error {error:.3g}"


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor" if value.any() else "a tensor of zeros"
    return str(value)


def _is_finite(value: Any) -> bool:
    return not isinstance(value, Tensor) or bool(value.isfinite().all())
