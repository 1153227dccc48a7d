"""Packages take inputs of any memory layout, and refuse inputs that they were not compiled for."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sympy
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._inductor.codegen.cpp_utils import cexpr
from torch.export import Dim
from torch.utils._sympy import solve

import mglu_ops
from mglu_ops.nn import MGLU
from mglu_ops.packaging.describe import _conditions, _describe_inputs, conditions_of_code
from mglu_ops.packaging.export import _symbols_in_integers
from mglu_ops.packaging.inputs import Expression, Sizes, dense_order, dense_strides
from mglu_ops.packaging.package import InputInfo
from mglu_ops.packaging.seal import PackageError
from tests.support.commands import python
from tests.support.packaging import model, once
from tests.support.programs.compiled import saved_and_loaded

pytest_plugins = ["tests.support.packaging"]
export_module = importlib.import_module("mglu_ops.packaging.export")

long = pytest.mark.long


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.layer = nn.Embedding(50, 16), MGLU(16, 24)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layer(self.embedding(tokens))


LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(5, 64),
    "every other row": lambda: torch.randn(10, 64)[::2],
    "transposed": lambda: torch.randn(64, 5).t(),
    "some columns": lambda: torch.randn(5, 70)[:, 3:67],
    "every other column": lambda: torch.randn(5, 128)[:, ::2],
    "expanded": lambda: torch.randn(1, 64).expand(5, 64),
    "one token of each batch": lambda: torch.randn(3, 5, 64)[:, -1],
    "one row": lambda: torch.randn(3, 128)[1:2, ::2],
    "an offset": lambda: torch.randn(5 * 64 + 3)[3:].view(5, 64),
    "negated when read": lambda: torch._neg_view(torch.randn(5, 64)),
    "none": lambda: torch.randn(0, 64),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inputs_of_any_strides_give_the_numbers_of_the_model(packages: Path, layout: str) -> None:
    x = LAYOUTS[layout]()
    torch.testing.assert_close(mglu_ops.load(packages / "operator.pt2")(x), model()(x).detach())


@long
@pytest.mark.parametrize(
    ("module", "example", "others"),
    [
        (Embedded(), torch.randint(50, (2, 8)), (lambda x: x[:, :-1], torch.t, lambda x: x[:, 1:2].expand(2, 4))),
        (model(), torch.randn(64, 6).t(), (torch.Tensor.contiguous, lambda x: x[::2])),
    ],
    ids=["tokens", "example transposed"],
)  # fmt: skip
def test_more_models_take_any_strides(tmp_path, module, example, others):
    mglu_ops.export(module.eval(), (example,), tmp_path / "model.pt2", backend="composite")
    package = mglu_ops.load(tmp_path / "model.pt2")
    for other in (lambda x: x, *others):
        x = other(example)
        torch.testing.assert_close(package(x), module(x).detach(), rtol=1e-4, atol=1e-5)


def test_a_program_for_strides_with_gaps_is_refused(tmp_path: Path) -> None:
    for example in (torch.randn(8, 64)[::2], torch.randn(1, 64).expand(4, 64)):
        program = torch.export.export(model(), (example,))
        with pytest.raises(ValueError, match=r"model: its input input was exported with an example whose strides"):
            mglu_ops.export(program, (), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@given(st.lists(st.integers(0, 4), max_size=4), st.randoms())
def test_the_order_of_a_tensor_gives_its_strides(shape: list[int], random: Any) -> None:
    order = random.sample(range(len(shape)), len(shape))
    tensor = torch.empty([shape[dim] for dim in order]).permute([order.index(dim) for dim in range(len(shape))])
    found = dense_order(tensor.shape, tensor.stride())
    assert found is not None
    strides = dense_strides(shape, found)
    assert all(size < 2 or a == b for size, a, b in zip(shape, strides, tensor.stride(), strict=True)) or 0 in shape


def test_strides_with_gaps_or_overlaps_have_no_order() -> None:
    for tensor in (torch.empty(4, 6)[:, ::2], torch.empty(4, 6)[:, :5], torch.empty(1, 3).expand(2, 3)):
        assert dense_order(tensor.shape, tensor.stride()) is None
    assert dense_order((3, 1, 2), (2, 99, 1)) == [1, 0, 2]


class Several(nn.Module):
    """A model with related sizes: z has as many rows as x and y together.

    `forward` takes an x with any number of rows, but an export keeps only the branch for an even number, which the
    example has. The model also takes constants. In the example, z has gaps in memory.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = MGLU(8, 8)

    def forward(self, x: Tensor, y: Tensor, z: Tensor, scales: dict[str, Tensor], factor: float, none: None) -> Tensor:
        rows = self.layer(torch.cat([x, y]) + z) * factor
        return rows + scales["up"] - scales["down"] if x.shape[0] % 2 == 0 else rows


def several_inputs(x: int = 4, y: int = 3, z: int = 7, factor: Any = 0.5, none: Any = None) -> tuple[Any, ...]:
    up, down = torch.randn(8), torch.randn(8)
    return torch.randn(x, 8), torch.randn(8, y).t(), torch.randn(2 * z, 8)[::2], {"up": up, "down": down}, factor, none


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> mglu_ops.packaging.load.Package:
    def make(folder: Path) -> None:
        mglu_ops.export(Several().eval(), several_inputs(), folder / "model.pt2")

    return mglu_ops.load(once(tmp_path_factory, "several", make) / "model.pt2")


@long
@pytest.mark.parametrize("sizes", [(4, 3, 7), (2, 0, 2), (0, 1, 1), (6, 9, 15)])
def test_sizes_that_fit_are_taken(several: Any, sizes: tuple[int, int, int]) -> None:
    given = several_inputs(*sizes)
    expected = Several()(*given).detach()
    torch.testing.assert_close(several(*given), expected)
    x, y, z, *rest = given
    torch.testing.assert_close(several(x, y.contiguous(), z.contiguous(), *rest), expected)


@long
def test_a_description_tells_the_conditions(several: Any) -> None:
    assert "  only where x.shape[0] % 2 == 0" in str(several.info).splitlines()


@long
def test_the_order_of_keys_does_not_matter(several: Any) -> None:
    x, y, z, scales, *constants = several_inputs()
    backwards = dict(reversed(scales.items()))
    assert list(backwards) != list(scales)
    expected = Several()(x, y, z, scales, *constants).detach()
    torch.testing.assert_close(several(x, y, z, backwards, *constants), expected)


@long
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (several_inputs(4, 3, 8), r"z: got size 8 in dimension 0, must be 7, which is (x.*y|y.*x)\.shape\[0\]"),
        (several_inputs(4, 3, 1), r"z: got size 1 in dimension 0, must be 7"),
        (several_inputs(5, 3, 8), r"x \[5, 8\], .*; the model was compiled for x\.shape\[0\] % 2 == 0 alone"),
        (several_inputs(factor=1), "factor: got 1, must be 0.5, the value that the model was exported with"),
        (several_inputs(factor=torch.ones(2)), r"factor: got a tensor of shape \[2\], must be 0.5"),
        (several_inputs(none=0), "none: got 0, must be None"),
        (several_inputs()[:-1], "inputs: got 5 positional arguments, must be nested like .* expected 6, but got 5"),
        ((*several_inputs()[:3], {"up": torch.randn(8)}, 0.5, None), "must be nested like .* expected 2, but got 1"),
        ((*several_inputs()[:3], {"up": torch.ones(8), "in": torch.ones(8)}, 0.5, None), "missing key.*'down'"),
        ((*several_inputs()[:3], torch.randn(8), 0.5, None), "expected <class 'dict'>"),
        (
            (*several_inputs()[:3], {"up": None, "down": torch.ones(8)}, 0.5, None),
            "scales_up: got None, must be a tens",
        ),
    ],
)
def test_inputs_that_do_not_fit_are_refused(several: Any, wrong: tuple[Any, ...], words: str) -> None:
    with pytest.raises((ValueError, TypeError), match=words):
        several(*wrong)


@long
def test_keywords_are_refused_where_the_example_had_positions(several: Any) -> None:
    with pytest.raises(ValueError, match=r"got 0 positional arguments, x=, must be nested like .*, 6 positional"):
        several(x=torch.ones(4, 8))


def described(module: nn.Module, *example: Any, shapes: Any) -> tuple[list[InputInfo], list[str]]:
    program = torch.export.export(module.eval(), example, dynamic_shapes=shapes)
    found = _describe_inputs(program)
    return found, _conditions(program, found)


class Half(nn.Module):
    """A model that takes x with 2 n rows and y with n rows."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x[::2] + y


def test_derived_sizes_are_described() -> None:
    n = Dim("n", min=2, max=10)
    (x, y), _ = described(Half(), torch.ones(6, 2), torch.ones(3, 2), shapes=({0: 2 * n}, {0: n}))
    low, high, symbol = y.shape[0]
    assert (low, high) == (2, 10)
    assert x.shape[0] == [4, 20, f"2*{symbol}"]
    assert str(replace(y, shape=[[3, 3, symbol], y.shape[0], [0, None, symbol], 2])) == "y: float32 [3, 2..10, 0.., 2]"


def test_a_derived_size_without_its_base_is_solved() -> None:
    (x,), _ = described(nn.Linear(2, 2), torch.ones(7, 2), shapes=({0: 3 * Dim("n") + 1},))
    sizes = Sizes([x], [])
    for rows in range(1, 20):
        if rows % 3 == 1:
            sizes.check({"input": torch.Size((rows, 2))})
            continue
        with pytest.raises(ValueError, match=rf"input: got size {rows} in dimension 0, must be .* for some integer in"):
            sizes.check({"input": torch.Size((rows, 2))})


def test_conditions_survive_saving() -> None:
    rows = {0: Dim.AUTO}
    shapes = (rows, rows, rows, {"up": {}, "down": {}}, None, None)
    x, y, z, *others = several_inputs()
    program = torch.export.export(Several().eval(), (x, y, z.contiguous(), *others), dynamic_shapes=shapes)
    for each in (program, saved_and_loaded(program)):
        conditions = _conditions(each, _describe_inputs(each))
        assert any("% 2 == 0" in condition for condition in conditions), conditions


def test_an_integer_that_varies_is_refused() -> None:
    class Scaled(nn.Module):
        def forward(self, x: Tensor, n: int) -> Tensor:
            return x * n

    with pytest.raises(ValueError, match="model: n is neither a tensor nor a constant"):
        described(Scaled(), torch.ones(4, 2), 3, shapes=({}, Dim.DYNAMIC))


def test_expressions_are_evaluated() -> None:
    values = {"s1": 7, "s2": 3}
    for text in ("s1", "s1 + 2*s2 - 1", "(s1 % 2) != 0 and not s2 > s1", "max(s1, s2) // 2", "-s1 == s2 or 3 >= s2"):
        expression = Expression(text)
        assert expression(values) == eval(text, {}, values)
        assert expression.names <= values.keys()


@pytest.mark.parametrize(
    "text",
    ["", "s1 +", "__import__('os')", "s1.real", "s1[0]", "2 ** s1", "1.5", "'s1'", "max", "max(s1, key=abs)",
     "(lambda: 1)()", "[s1]", "s1 / 2", "x := 3", "print(s1)", "True", "(" * 500, "1 + " * 3000 + "1", "\0"],
)  # fmt: skip
def test_anything_else_of_python_is_refused(text: str) -> None:
    with pytest.raises(PackageError, match="is no expression in sizes"):
        Expression(text)


def entry(name: str, *shape: Any) -> InputInfo:
    return InputInfo(name, "float32", list(shape), list(range(len(shape))), False, None)


def test_a_division_by_a_size_of_zero_fails_its_condition() -> None:
    sizes = Sizes([entry("x", [0, None, "s0"])], ["4 % s0 == 0"])
    sizes.check({"x": torch.Size((2,))})
    with pytest.raises(ValueError, match=r"compiled for 4 % x\.shape\[0\] == 0 alone"):
        sizes.check({"x": torch.Size((0,))})


def test_a_size_that_cannot_be_solved_is_refused() -> None:
    for text in ("s0 // 2", "s0 * s0", "12 // s0", "s0 * 0", "s0 + s1"):
        with pytest.raises(PackageError, match="no size of its inputs tells 's0'"):
            Sizes([entry("x", [0, None, text])], [])
    sizes = Sizes([entry("x", [0, None, "s1"]), entry("y", [0, None, "5*s0 - s1"])], ["s0 < 10"])
    sizes.check({"x": torch.Size((2,)), "y": torch.Size((3,))})
    with pytest.raises(ValueError, match=r"y: got size 4 in dimension 0, must be 3, for some integer in 5\*s0 - x\.sh"):
        sizes.check({"x": torch.Size((2,)), "y": torch.Size((4,))})
    with pytest.raises(ValueError, match="compiled for s0 < 10 alone"):
        sizes.check({"x": torch.Size((2,)), "y": torch.Size((48,))})


class Pooled(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.function(x, y)


@pytest.mark.parametrize(
    ("function", "condition"),
    [
        (lambda x, y: F.scaled_dot_product_attention(x, x, x), "x.shape[1]"),
        (lambda x, y: F.scaled_dot_product_attention(x, torch.cat([y, x], 1), torch.cat([y, x], 1)), "x.shape[1]"),
        (lambda x, y: x[:, -1], "x.shape[1]"),
        (lambda x, y: F.adaptive_avg_pool1d(x.transpose(1, 2), 3), "x.shape[1]"),
        (lambda x, y: x[: x.shape[0] // y.shape[1]], "y.shape[1]"),
    ],
)
def test_sizes_for_which_the_code_would_end_the_process_are_refused(function, condition):
    import torch.fx.experimental._config as symbolic

    shapes = {0: Dim.AUTO, 1: Dim.AUTO}, {0: Dim.AUTO, 1: Dim.AUTO}
    with symbolic.patch(backed_size_oblivious=True):
        program = torch.export.export(
            Pooled(function), (torch.ones(6, 5, 4), torch.ones(6, 3, 4)), dynamic_shapes=shapes
        )
    found = _describe_inputs(program)
    sizes = Sizes(found, conditions_of_code(program.graph, program, found))
    given = {"x": torch.Size((6, 5, 4)), "y": torch.Size((6, 3, 4))}
    sizes.check(given)
    name = condition[0]
    with pytest.raises(ValueError, match=rf"compiled for {re.escape(condition)} >= 1 alone"):
        sizes.check({**given, name: torch.Size((6, 0, 4))})


def test_a_size_of_the_code_that_cannot_be_checked_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor wraps the error in an error of its own, which `export` must unwrap."""

    def refuse(graph: object, program: object, inputs: object) -> list[str]:
        raise PackageError("model: it is right for s77 // 2.5 >= 1 alone")

    monkeypatch.setattr(export_module, "conditions_of_code", refuse)
    with pytest.raises(ValueError, match=r"^model: it is right for s77 // 2.5 >= 1 alone$"):
        mglu_ops.export(MGLU(8, 8).eval(), (torch.ones(3, 8),), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())


@long
def test_attention_that_inductor_makes_of_products_is_refused_without_tokens(tmp_path: Path) -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.layer = nn.MultiheadAttention(16, 2, batch_first=True), MGLU(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.attention(x, x, x)[0])

    module, x = Attention().eval(), torch.randn(3, 5, 16)
    info = mglu_ops.export(module, (x,), tmp_path / "model.pt2")
    package = mglu_ops.load(tmp_path / "model.pt2")
    torch.testing.assert_close(package(x[:2]), module(x[:2]).detach())
    assert package.info.conditions == info.conditions
    with pytest.raises(ValueError, match=r"compiled for x\.shape\[1\] >= 1 alone"):
        package(x[:, :0])


def test_symbols_are_computed_in_integers() -> None:
    """Floating point would be wrong: 1 / 49 * (13 * 49) is less than 13."""
    rows, b, start = sympy.symbols("rows b start", integer=True)
    before = solve.try_solve
    with _symbols_in_integers():
        for size in (49 * b, 49 * b + 3, start * b):
            (_, solution) = solve.try_solve(sympy.Eq(size, rows), b)
            for value in range(1, 200):
                given = {rows: size.subs({b: value, start: 98}), start: 98}
                assert solution.subs(given) == value
            assert "1.0" not in cexpr(solution)
    assert solve.try_solve is before


@long
def test_rows_that_are_a_multiple_of_49_are_all_computed(tmp_path: Path) -> None:
    class Patches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MGLU(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.view(x.shape[0] // 49, 49, 8)).sum(1)

    module, shapes = Patches().eval(), ({0: 49 * Dim("b", max=64)},)
    mglu_ops.export(module, (torch.randn(4 * 49, 8),), tmp_path / "model.pt2", dynamic_shapes=shapes)
    package = mglu_ops.load(tmp_path / "model.pt2")
    for b in (2, 13):
        x = torch.randn(b * 49, 8)
        torch.testing.assert_close(package(x), module(x).detach(), rtol=1e-4, atol=1e-4)


def test_equal_sizes_name_both_inputs() -> None:
    sizes = Sizes([entry("x", [0, None, "s0"]), entry("bias", 5, [0, None, "s0"])], [])
    with pytest.raises(ValueError, match=r"bias: got size 5 in dimension 1, must be 7, which is x\.shape\[0\]"):
        sizes.check({"x": torch.Size((7,)), "bias": torch.Size((5, 5))})


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = MGLU(8, 8)

    def forward(self, x: Tensor, state: Tensor) -> Tensor:
        state.view(-1, 2, 4)[:, 0].add_(x[:, :4])
        return self.layer(state)


def test_inputs_that_a_model_writes_are_described() -> None:
    program = torch.export.export(Counting().eval(), (torch.ones(4, 8), torch.zeros(4, 8)))
    for each in (program, saved_and_loaded(program), program.run_decompositions({})):
        assert [(entry.name, entry.is_written) for entry in _describe_inputs(each)] == [("x", False), ("state", True)]


@long
def test_what_a_model_writes_to_an_input_arrives_there(tmp_path: Path) -> None:
    mglu_ops.export(Counting().eval(), (torch.randn(4, 8), torch.zeros(4, 8)), tmp_path / "model.pt2")
    package, x = mglu_ops.load(tmp_path / "model.pt2"), torch.randn(3, 8)
    for state in (torch.zeros(3, 8), torch.zeros(8, 3).t(), torch.zeros(6, 8)[::2]):
        for calls in (1, 2):
            result = package(x, state)
            torch.testing.assert_close(state, calls * F.pad(x[:, :4], (0, 4)))
            torch.testing.assert_close(result, Counting().layer(state).detach())


FOUR_THREADS = """
import sys, threading, torch, mglu_ops
package, x = mglu_ops.load(sys.argv[1]), torch.randn(64, 64)
try: package(x[:, :5])
except ValueError: pass
expected = package(x)
wrong = []
def call():
    for _ in range(20):
        if not torch.equal(package(x), expected): wrong.append(1)
threads = [threading.Thread(target=call, daemon=True) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join(60)
print("hangs" if any(thread.is_alive() for thread in threads) else "wrong" if wrong else "fine", flush=True)
"""


@long
def test_threads_may_share_a_package(packages: Path) -> None:
    """Without a lock, a thread would wait for torch's only model instance while holding the GIL, which is a deadlock.

    The lock must also be released if a call fails.
    """
    assert python("-c", FOUR_THREADS, packages / "operator.pt2", timeout=120) == "fine\n"


CHECKED = """
import sys, torch, mglu_ops
runner = mglu_ops.load(sys.argv[1])._runner
for shape in ((4, 4), (1, 1), (1, 5), (0, 3)):
    assert runner(torch.zeros(shape, dtype=torch.int64)).shape == (*shape, 24)
for wrong in (torch.zeros(4, 4), torch.zeros(4, dtype=torch.int64)):
    try: runner(wrong)
    except RuntimeError: print("refused")
"""


@long
def test_the_checks_of_torch_take_one_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`AOTI_RUNTIME_CHECK_INPUTS=1` enables torch's checks of inputs, which C++ programs rely on."""
    mglu_ops.export(Embedded().eval(), (torch.randint(50, (2, 8)),), tmp_path / "model.pt2")
    monkeypatch.setenv("AOTI_RUNTIME_CHECK_INPUTS", "1")
    assert python("-c", CHECKED, tmp_path / "model.pt2").split() == ["refused"] * 2
