"""Random programs of operators that ordinary models use, without an MGLU layer.

Each line comes from a template (`ordinary_templates`). Results of earlier lines fill the fields of the template. A line
is dropped if eager torch raises an error, so templates need not consider shapes and dtypes.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from ordinary_templates import CONSTANTS, DATA_DEPENDENT_TEMPLATES, TEMPLATES
from source_programs import NAMES, SourceProgram, assigned
from torch import Tensor

MOST_NUMBERS = 4096
"""A program's tensors have at most this many elements."""


@dataclass(frozen=True)
class Program(SourceProgram):
    dtype: torch.dtype = torch.float32
    square: bool = False
    """True if all sizes are equal, so that shapes do not reveal a transpose."""
    empty: bool = False
    """True if there are no tokens."""
    trained: bool = False
    surrounding: str = "nothing"
    """The context in which the program runs: a key of `SURROUNDINGS`."""
    dynamic: bool = False
    data_dependent: bool = False
    assume_binary: bool = False

    @property
    def arguments(self) -> list[str]:
        return list(self.inputs())

    @property
    def returned(self) -> tuple[str, ...]:
        """The variables that no other line reads."""
        definitions = {name: statement for statement in self.statements for name in assigned(statement)}

        def is_read(name: str) -> bool:
            others = [text for other, text in definitions.items() if other != name]
            return any(re.search(rf"\b{name}\b", text) for text in others)

        return tuple(name for name in definitions if not is_read(name)) or tuple(definitions)[-1:]

    def inputs(self) -> dict[str, Any]:
        source = "\n".join(self.statements)
        return {name: value for name, value in self.all_inputs().items() if re.search(rf"\b{name}\b", source)}

    def all_inputs(self) -> dict[str, Any]:
        """The tensors of a small model: tokens, images, weights, masks of every kind, indices, and two numbers."""
        generator = torch.Generator().manual_seed(self.seed)
        tokens, d, h = (4, 4, 4) if self.square else (3, 5, 4)
        tokens = 0 if self.empty else tokens

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).to(self.dtype)

        def integers(high: int, *shape: int) -> Tensor:
            return torch.randint(0, high, shape, generator=generator)

        named = {
            "x": normal(tokens, h),
            "X": normal(2, tokens, h),
            "W": normal(d, h),
            "V": normal(d, h),
            "L": normal(d, h),
            "S": normal(3, d, h),
            "b": normal(d),
            "r": normal(tokens, 1).sigmoid(),
            "m": normal(d, h) > 0,
            "M": normal(3, d, h) > 0,
            "f": integers(2, d, h).to(self.dtype),
            "i": integers(2, d, h),
            "u": integers(200, d, h).to(torch.uint8),
            "image": normal(2, 3, 6, 6),
            "kernel": normal(4, 3, 3, 3),
            "index": integers(3, tokens),
            "z": torch.complex(normal(tokens, h).float(), normal(tokens, h).float()),
            "t": normal(1)[0],
        }
        for name in ("x", "X", "W", "V", "L", "S", "b", "r", "kernel", "z", "t"):
            named[name].requires_grad_(self.trained and random.Random(f"{self.seed}{name}").random() < 0.6)
        return {**named, "scale": 0.375, "count": 2}

    def surroundings(self) -> AbstractContextManager[Any]:
        return SURROUNDINGS[self.surrounding]()

    def configuration(self) -> AbstractContextManager[Any]:
        return torch._dynamo.config.patch(
            capture_dynamic_output_shape_ops=self.data_dependent, capture_scalar_outputs=self.data_dependent
        )


SURROUNDINGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "no_grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


# --- Drawing programs ------------------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    program = Program(
        seed,
        statements=(),
        dtype=dice.choices([torch.float32, torch.float64, torch.bfloat16, torch.float16], [12, 3, 2, 1])[0],
        square=dice.random() < 0.3,
        empty=dice.random() < 0.07,
        trained=dice.random() < 0.6,
        surrounding=dice.choices(list(SURROUNDINGS), [8, 1, 1])[0],
        dynamic=dice.random() < 0.3,
        data_dependent=dice.random() < 0.25,
        assume_binary=dice.random() < 0.3,
    )
    space: dict[str, Any] = {**NAMES, **program.all_inputs()}
    length = dice.randint(3, 12)
    statements: list[str] = []
    for _ in range(10 * length):
        if len(statements) == length:
            break
        statement = _statement(dice, program, space, name=f"v{len(statements)}")
        if statement is not None and _runs(statement, space, program):
            statements.append(statement)
    if not any(map(assigned, statements)):
        statements.append("v0 = x + 1")
    return replace(program, statements=tuple(statements))


def _statement(dice: random.Random, program: Program, space: dict[str, Any], name: str) -> str | None:
    """A line, sometimes in a `with` statement, or None if no tensor fits a field of the template."""
    kinds = [*TEMPLATES, "data-dependent"]
    weights = [weight for weight, _ in TEMPLATES.values()]
    kind = dice.choices(kinds, [*weights, 4 if program.data_dependent else 0])[0]
    template = dice.choice(DATA_DEPENDENT_TEMPLATES if kind == "data-dependent" else TEMPLATES[kind][1])
    try:
        line = template.format_map(_Fields(dice, space, name))
    except LookupError:
        return None
    line = line if kind == "writes" else f"{name} = {line}"
    block = dice.choices(
        ["", "with torch.no_grad():", "with torch.autocast('cpu', dtype=torch.bfloat16):", "with torch.enable_grad():"],
        [30, 2, 1, 0.5],
    )[0]
    return f"{block} {line}".strip()


def _runs(statement: str, space: dict[str, Any], program: Program) -> bool:
    """Run a line in `space`. Returns True if torch raises no error and the results are tensors of a moderate size."""
    names = assigned(statement)
    with program.surroundings():
        try:
            exec(statement, space)
        except Exception:
            return False
    made = [space[name] for name in names]
    if all(isinstance(value, Tensor) and value.numel() <= MOST_NUMBERS and value.dim() <= 6 for value in made):
        return True
    for name in names:
        del space[name]
    return False


class _Fields(dict[str, str]):
    """The fields of one template. Each is filled when it is first read."""

    def __init__(self, dice: random.Random, space: dict[str, Any], name: str) -> None:
        super().__init__(name=name)
        self._dice = dice
        self._tensors = {name: value for name, value in space.items() if isinstance(value, Tensor)}
        self._first: Tensor | None = None

    def __missing__(self, field: str) -> str:
        if field in CONSTANTS:
            return self._dice.choice(CONSTANTS[field])
        if field in ("dim", "order"):
            return self._dimensions(field)
        fits, first = _KINDS[field], self._first
        names = [name for name, tensor in self._tensors.items() if fits(tensor, tensor if first is None else first)]
        if not names:
            raise LookupError(field)
        recent = [name for name in names if re.fullmatch(r"v\d+", name)][-4:]
        name = self._dice.choice(recent if recent and self._dice.random() < 0.6 else names)
        if first is None:
            self._first = self._tensors[name]
            self["same"] = name
        return name

    def _dimensions(self, field: str) -> str:
        count = 2 if self._first is None else self._first.dim()
        if field == "order":
            return ", ".join(str(dim) for dim in self._dice.sample(range(count), count))
        return str(self._dice.randrange(-count, count)) if count else "0"


def _broadcasts(tensor: Tensor, first: Tensor) -> bool:
    pairs = zip(reversed(tensor.shape), reversed(first.shape), strict=False)
    return all(a == b or 1 in (a, b) for a, b in pairs)


# Kind of field -> function of a tensor and the template's first tensor that returns True if the tensor fits.
_KINDS: dict[str, Callable[[Tensor, Tensor], bool]] = {
    "any": lambda t, first: True,
    "real": lambda t, first: t.is_floating_point(),
    "complex": lambda t, first: t.is_complex(),
    "int": lambda t, first: not t.is_floating_point() and not t.is_complex() and t.dtype is not torch.bool,
    "mask": lambda t, first: t.dtype is torch.bool and _broadcasts(t, first),
    "matrix": lambda t, first: t.is_floating_point() and t.dim() == 2,
    "batch": lambda t, first: t.is_floating_point() and t.dim() == 3,
    "image": lambda t, first: t.is_floating_point() and t.dim() == 4,
    "like": _broadcasts,
    "twin": lambda t, first: t.shape == first.shape,
    "weight": lambda t, first: t.is_floating_point() and t.dim() == 2 and t.shape[-1:] == first.shape[-1:],
    "right": lambda t, first: t.is_floating_point() and t.dim() >= 2 and t.shape[-2:-1] == first.shape[-1:],
}
