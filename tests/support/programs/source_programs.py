"""Runs and judges programs that are Python source with one statement per line, so that people can read and run them.

`right_programs`, `blocks` and `ordinary` draw such programs.
"""

from __future__ import annotations

import copy
import linecache
import math
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._autograd import CreationMeta, _get_creation_meta
from torch._dynamo.backends.debugging import aot_eager
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from tests.support.budgets import BUDGET, relative_error
from tests.support.programs.graphs import Capture
from tests.support.programs.spellings import Sign


class Damped(torch.autograd.Function):
    """A copy with a tenth of the right gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 0.1


class Rounded(torch.autograd.Function):
    """A straight-through mask that is 0 and 1 up to rounding errors."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return (logits > 0).to(logits.dtype) + logits - logits

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class RoundedToHalf(Rounded):
    """A straight-through mask that is 0 and 1 up to rounding errors of float16."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return ((logits > 0).half() + logits.half() - logits.half()).to(logits.dtype)


class Narrow(Rounded):
    """A straight-through mask in bfloat16."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor) -> Tensor:
        return (logits > 0).bfloat16()


NAMES: dict[str, Any] = {
    "torch": torch,
    "F": F,
    "math": math,
    "checkpoint": checkpoint,
    **{function.__name__: function for function in (Sign, Damped, Rounded, RoundedToHalf, Narrow)},
}
"""The names that the source of a program may use besides its arguments."""


SAME = 10 * BUDGET[torch.float64]


@dataclass(frozen=True)
class SourceProgram:
    """The source of a function of tensors, and the settings to compile and call it. Subclasses define the inputs."""

    seed: int
    statements: tuple[str, ...]

    assume_binary = False
    dynamic = False
    traces = False
    """True if AOTAutograd traces a graph with a fused layer before the graph runs."""
    rounding = SAME
    """Relative errors up to this value count as rounding, unless the program casts to a narrower dtype."""

    @property
    def arguments(self) -> list[str]:
        raise NotImplementedError

    @property
    def returned(self) -> tuple[str, ...]:
        raise NotImplementedError

    def inputs(self) -> dict[str, Any]:
        """New tensors with the same values at each call, because a program may write to its inputs."""
        raise NotImplementedError

    def exact(self) -> SourceProgram | None:
        """The program with its inputs cast to float64, or None if it computes in float64 already."""
        return None

    def surroundings(self) -> AbstractContextManager[Any]:
        """The context in which the program runs."""
        return nullcontext()

    def configuration(self) -> AbstractContextManager[Any]:
        """Dynamo's settings while the program is compiled and run."""
        return nullcontext()

    @property
    def source(self) -> str:
        lines = [*self.statements, f"return ({', '.join(self.returned)},)"]
        return f"def program({', '.join(self.arguments)}):\n" + "".join(f"    {line}\n" for line in lines)

    def function(self) -> Callable[..., Any]:
        """The function. Its source is registered with `linecache`, so that tracing records its lines."""
        file = f"<program {self.seed}>"
        linecache.cache[file] = (len(self.source), None, self.source.splitlines(keepends=True), file)
        space = dict(NAMES)
        exec(compile(self.source, file, "exec"), space)
        return space["program"]

    def __str__(self) -> str:
        options = {k: v for k, v in vars(self).items() if k not in ("seed", "statements") and v}
        return f"# seed {self.seed}, {', '.join(f'{k}={v}' for k, v in options.items())}\n{self.source}"


_STATEMENT = re.compile(r"(with [^:]*: )?((?:\w+, )*\w+,? = )?(.*)")
_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")


def sides(statement: str) -> tuple[str, str]:
    """A statement in two parts: the targets of an assignment with its `=`, which may be missing, and the rest."""
    block, targets, rest = _STATEMENT.fullmatch(statement).groups("")
    return block + targets, rest


def assigned(statement: str) -> list[str]:
    """The variables that a statement assigns. Writes in place do not count."""
    return _NAME.findall(_STATEMENT.fullmatch(statement).group(2) or "")


def reads(statement: str) -> list[str]:
    """The names that a statement reads or writes in place."""
    return _NAME.findall(sides(statement)[1])


# --- Running ---------------------------------------------------------------------------------------------------------


class Both(Capture):
    """A `Capture` that also keeps the original graph, and can run either graph.

    With `traces`, AOTAutograd traces a graph before it runs.
    """

    traces = False
    plain: GraphModule | None = None
    runs_plain = False
    error: BaseException | None = None
    """The error or warning of the pass, or AOTAutograd's error on the fused graph, before Dynamo wraps it."""

    def __call__(self, gm: GraphModule, example_inputs: Any) -> Callable[..., Any]:
        plain = copy.deepcopy(gm)
        with self._errors_kept(), warnings.catch_warnings():
            warnings.simplefilter("error")
            self.run_pass(gm, example_inputs)
        run_plain, run_fused = plain.forward, gm.forward
        if self.traces and self.report.fused:
            with _modes_restored():
                run_plain = aot_eager(plain, example_inputs)
            with self._errors_kept(), _modes_restored():
                run_fused = aot_eager(gm, example_inputs)
        self.plain = plain

        def run(*inputs: Any) -> Any:
            with _modes_restored():
                return (run_plain if self.runs_plain else run_fused)(*inputs)

        return run

    @contextmanager
    def _errors_kept(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.error = error
            raise

    def run_pass(self, gm: GraphModule, example_inputs: Any) -> None:
        """Run the pass on a graph. An error in this call is a failure of the pass."""
        super().__call__(gm, example_inputs)


@contextmanager
def _modes_restored() -> Iterator[None]:
    """Restore torch's modes if a graph raises an error between entering and leaving one."""
    enabled, dtype, nesting = torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), _autocast_nesting()
    keys = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    grad = torch.set_grad_enabled(torch.is_grad_enabled())
    with torch.inference_mode(torch.is_inference_mode_enabled()), grad, torch._C._ForceDispatchKeyGuard(*keys):
        try:
            yield
        except Exception as error:
            traceback.clear_frames(error.__traceback__)  # frames hold mode guards, which act when they are freed
            torch.set_autocast_enabled("cpu", enabled)
            torch.set_autocast_dtype("cpu", dtype)
            while _autocast_nesting() > nesting:
                torch.autocast_decrement_nesting()
            torch.clear_autocast_cache()
            raise


def _autocast_nesting() -> int:
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()


def outcomes(program: SourceProgram, function: Callable[..., Any]) -> dict[str, Any]:
    """Everything observable about a call: results, gradients, inputs afterwards, and the random number generator.

    For results and inputs this includes values, layout, and shared memory. The loss is a weighted sum of all results
    with a different weight for each element.
    """
    torch.manual_seed(program.seed)
    inputs = program.inputs()
    with program.surroundings():
        results = function(**inputs)
    tensors = {f"result {i}": y for i, y in enumerate(results)}
    tensors |= {f"{name} afterwards": t for name, t in inputs.items() if isinstance(t, Tensor)}
    found: dict[str, Any] = {name: t.detach().clone() for name, t in tensors.items()}
    found |= {f"{name}, {what}": value for name in tensors for what, value in _layout(name, tensors)}
    found["state of random numbers"] = torch.get_rng_state()
    leaves = {name: t for name, t in inputs.items() if isinstance(t, Tensor) and t.requires_grad and t.is_leaf}
    found |= {f"gradient of {name}": None for name in leaves}
    recorded = [y for y in results if y.requires_grad]
    if leaves and recorded:
        weights = [torch.linspace(-1, 2, y.numel(), dtype=y.dtype).view(y.shape) for y in recorded]
        grads = torch.autograd.grad(recorded, list(leaves.values()), weights, allow_unused=True)
        found |= {f"gradient of {name}": grad for name, grad in zip(leaves, grads, strict=True)}
    return found


def _layout(name: str, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Any]]:
    """What a user can observe of a tensor besides its values, including the tensors that share its memory."""
    tensor = tensors[name]
    yield "requires a gradient", tensor.requires_grad
    yield "is a leaf", tensor.is_leaf
    yield "is an inference tensor", tensor.is_inference()
    is_recorded_view = tensor.requires_grad and tensor._is_view()
    yield "refuses writes", is_recorded_view and _get_creation_meta(tensor) != CreationMeta.DEFAULT
    yield "strides", tuple(n for size, n in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    yield "offset", tensor.storage_offset()
    others = {other: t for other, t in tensors.items() if t is not tensor}
    yield "is also", tuple(other for other in tensors if other not in others and other != name)
    yield "shares memory with", tuple(other for other, t in others.items() if torch._C._is_alias_of(tensor, t))


def attempt(program: SourceProgram, function: Callable[..., Any]) -> dict[str, Any] | Exception:
    """The outcomes of a call, or its error."""
    try:
        return outcomes(program, function)
    except TimeoutError:
        raise
    except Exception as error:
        return error


# --- Judging ---------------------------------------------------------------------------------------------------------


def through_the_pass(program: SourceProgram) -> str:
    """The verdict on a program (`judged`).

    The program is skipped if eager raises an error, or if a tensor has no finite element.
    """
    try:
        wanted = outcomes(program, program.function())
    except Exception:
        return "skipped: eager raises an error"
    tensors = [value for value in wanted.values() if isinstance(value, Tensor) and value.numel()]
    if not all(bool(value.isfinite().any()) for value in tensors):
        return "skipped: not finite"
    backend = Both(assume_binary=program.assume_binary)
    backend.traces = program.traces
    return judged(program, wanted, backend)


NARROW = {r"bfloat16|Narrow": torch.bfloat16, r"\bfloat16|half\(": torch.float16, r"float32|\.float\(": torch.float32}
"""Patterns of source that cast to a narrow dtype, the least precise first.

The program rounds straight-through sums and gradients in this dtype. The operator's masks are exact.
"""
FACTOR = 3
"""A fused layer's error may be this many times eager's error if both round to a narrow dtype."""
NOISE = 1e-11
"""A tensor whose absolute values add up to less than this holds rounding errors of a difference of equal numbers."""


def judged(program: SourceProgram, wanted: Mapping[str, Any], backend: Both) -> str:
    """Run a program's graph with and without the pass, but without Inductor, and compare the outcomes with eager's.

    Returns:
        `fused`, `refused` (with a reason in the report), `silent` (neither), or `skipped: ` and a reason.

    Raises:
        AssertionError: the outcomes differ, or the pass raises an error or changes a graph without fusing a layer.
    """
    with program.configuration():
        compiled = backend.compile(program.function(), dynamic=program.dynamic or None)
        found = attempt(program, compiled)
        if backend.error is not None:
            raise AssertionError(f"the pass raises {backend.error!r}") from backend.error
        if backend.plain is None:
            return "skipped: Dynamo raises an error"
        backend.runs_plain = True
        plain = attempt(program, compiled)
    if backend.report.fused:
        return verdict(program, found, plain, wanted)
    assert list(map(str, backend.after)) == list(map(str, backend.before)), "refused, but the graph changed"
    if not isinstance(found, Exception) and not isinstance(plain, Exception):
        text = difference(found, plain, None)
        assert text is None, f"refused, but {text}"
    return "refused" if backend.report.missed else "silent"


def verdict(
    program: SourceProgram,
    found: dict[str, Any] | Exception,
    plain: dict[str, Any] | Exception,
    wanted: Mapping[str, Any],
) -> str:
    """The verdict on a program in which a layer is fused."""
    if isinstance(plain, Exception):
        return "skipped: raises an error when compiled without fusion"
    if difference(plain, wanted, tolerance(program)) is not None:
        return "skipped: differs when compiled without fusion"
    if program.assume_binary and isinstance(found, ValueError) and "must be binary" in str(found):
        return "refused"
    assert not isinstance(found, Exception), f"raises {type(found).__name__}: {found}"
    text = difference(found, wanted, tolerance(program))
    if text is not None and (exact := program.exact()) is not None:  # eager may have errors of the same size
        outcome = attempt(exact, exact.function())
        if not isinstance(outcome, Exception):
            text = difference(found, wanted, tolerance(program), outcome)
    assert text is None, text
    return "fused"


def tolerance(program: SourceProgram) -> float:
    """The largest relative error that counts as rounding, for the least precise dtype that a program casts to."""
    source = str(program)
    narrow = next((BUDGET[dtype] for spelling, dtype in NARROW.items() if re.search(spelling, source)), 0.0)
    return max(narrow, program.rounding)


def difference(
    found: Mapping[str, Any],
    wanted: Mapping[str, Any],
    tolerance: float | None = SAME,
    exact: Mapping[str, Any] | None = None,
) -> str | None:
    """The first difference of two `outcomes`, or None.

    Args:
        found: the outcomes to check.
        wanted: the outcomes of eager.
        tolerance: the largest relative error where `wanted` is finite. With None, tensors must have the same bits.
        exact: outcomes in float64. With them, errors up to `FACTOR` times the error of `wanted` are allowed too.
    """
    if found.keys() != wanted.keys():
        return f"has {sorted(found.keys() ^ wanted.keys())} on one side only"
    for name, value in wanted.items():
        allowed = tolerance
        if tolerance is not None and exact is not None and isinstance(exact.get(name), Tensor):
            allowed = max(tolerance, FACTOR * _error(value, exact[name]))
        if (text := _difference(found[name], value, allowed)) is not None:
            return f"{name}: {text}"
    return None


def _difference(a: Any, b: Any, tolerance: float | None) -> str | None:
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return None if a == b else f"{_words(a)}, must be {_words(b)}"
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {tuple(a.shape)}, must be {b.dtype} {tuple(b.shape)}"
    if bool(((a == b) | (a.isnan() & b.isnan())).all()):
        return None
    if tolerance is None or not (b.is_floating_point() or b.is_complex()):
        return "other values"
    if not a[b.isfinite()].isfinite().all():
        return "not finite, must be finite"
    error = _error(a, b)
    return None if error <= max(tolerance, BUDGET.get(b.dtype, 0.0)) else f"relative error {error:.3g}"


def _error(a: Tensor, b: Tensor) -> float:
    """The relative error of `a` in the elements where both are finite, or 0 for integers."""
    if not (a.is_floating_point() or a.is_complex()) or a.shape != b.shape:
        return 0.0
    a, b = (torch.view_as_real(t.resolve_conj()) if t.is_complex() else t for t in (a, b))
    is_finite = a.isfinite() & b.isfinite()
    a, b = a[is_finite], b[is_finite]
    return 0.0 if b.abs().sum() < NOISE and a.abs().sum() < NOISE else relative_error(a, b)


def _words(value: Any) -> str:
    if isinstance(value, Tensor):
        return "a tensor" if value.any() else "a tensor of zeros"
    return str(value)
