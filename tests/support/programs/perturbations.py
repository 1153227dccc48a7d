"""Right MGLU programs with one perturbation, their enumeration, and what must hold for each program.

A seed selects the right program, and an index the perturbation and its place. `program(seed, index)` makes the
perturbed program, `indices(seed)` lists all indices of a seed, and `sample(number)` draws a seed and an index.

If eager runs the program, and Dynamo's graph without the pass gives the same outcome, then the graph after the pass
must give this outcome too. The outcome includes:

- all results and all inputs afterwards: values, strides, and which of them share memory,
- the gradients of all trained inputs; a gradient that eager lacks must be missing, because an optimizer decays a weight
  whose gradient is 0,
- the state of the random number generator.

A graph in which nothing is fused must not be changed.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from tests.support.programs.right_programs import Program, draw
from tests.support.programs.source_programs import assigned, reads, sides
from tests.support.programs.source_programs import through_the_pass as through_the_pass

Fits = Callable[[Tensor], bool]


def is_real(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() > 0


def is_matrix(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.dim() == 2


def is_square(tensor: Tensor) -> bool:
    return is_matrix(tensor) and tensor.shape[0] == tensor.shape[1]


def is_bool(tensor: Tensor) -> bool:
    return tensor.dtype is torch.bool and tensor.dim() > 0


def is_integer(tensor: Tensor) -> bool:
    return not tensor.is_floating_point() and not is_bool(tensor) and tensor.dim() > 0


def is_array(tensor: Tensor) -> bool:
    return tensor.dim() > 0


def is_recorded(tensor: Tensor) -> bool:
    """True if a hook can be registered. The hook is called only if a result depends on the tensor."""
    return tensor.requires_grad


# --- Writes in place -------------------------------------------------------------------------------------------------

WRITES: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{v}.copy_({v}.flip(0))",
        "{v}.zero_()",
        "{v}.data.fill_(1)",
        "{v}[0] = {v}[1]",
        "torch._foreach_zero_([{v}])",
    ),
    is_real: (
        "{v}.mul_(1.5)",
        "{v} *= 2",
        "{v}[{v} > 0] = 0.5",
        "torch.add({v}, 1, out={v})",
        "{v}.data.mul_(2)",
        "{v}.detach().neg_()",
        "with torch.no_grad(): {v}.div_({v}.norm() + 1)",
        "torch.ops.aten.mul_.Tensor({v}, torch.full_like({v}, 2))",
        "F.silu({v}, inplace=True)",
        "F.relu_({v})",
        "F.dropout({v}, 0.5, training=False).mul_(2)",
        "F.dropout({v}, 0.5, True, True)",
        "{v}.uniform_()",
        "torch.nn.init.constant_({v}, 0.5)",
    ),
    is_matrix: (
        "{v}[:, 2:] += 1",
        "F.batch_norm({v}.detach().cumsum(0), {v}.detach()[0], {v}.detach()[1], training=True)",
        "F.embedding(torch.arange(3), {v}.detach(), max_norm=0.1)",
    ),
    is_square: ("{v}.add_({v}.t())",),
    is_bool: (
        "{v}.logical_not_()",
        "{v} ^= True",
        "{v}.data.logical_not_()",
        "torch.logical_not({v}, out={v})",
    ),
    is_integer: ("{v}.bitwise_xor_(1)", "{v} >>= 1", "{v}.data.mul_(3)"),
}

# Changes of a tensor's shape, history or storage in place.
METADATA: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{v}.t_()",
        "{v}.transpose_(0, -1)",
        "{v}.unsqueeze_(0)",
        "{v}.set_({v}.flip(0))",
        "{v}.data = {v}.flip(0)",
    ),
    is_real: ("{v}.detach_()", "{v}.requires_grad_(False)", "{v}.requires_grad_()"),
}

VIEWS: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{v}.view(-1)",
        "{v}.reshape(-1)",
        "{v}.contiguous()",
        "{v}[0]",
        "{v}[...]",
        "{v}.narrow(0, 1, 2)",
        "{v}.chunk(2)[0]",
        "{v}.unbind(0)[1]",
        "{v}.detach()",
        "{v}.data",
        "{v}.as_strided((4,), (1,))",
        "{v}.to({v}.dtype)",
        "{v}.expand_as({v})",
        "{v}.view_as({v})",
        "torch.positive({v})",
        "torch.broadcast_tensors({v}, {v})[0]",
        "torch.nn.Identity()({v})",
    ),
    is_real: (
        "F.dropout({v}, 0.5, training=False)",
        "{v}.double()",
        "{v}.real",
        "{v}.view(torch.int64)",
        "torch.nn.Flatten(0)({v})",
    ),
    is_matrix: ("{v}.t()", "{v}.mT", "{v}.permute(1, 0)", "{v}.diagonal()", "{v}.unfold(0, 2, 2)", "{v}.detach().t()"),
}

WRITES_TO_VIEWS: dict[Fits, tuple[str, ...]] = {
    is_array: ("{u}.zero_()", "{u}[0] = 1", "with torch.no_grad(): {u}.copy_({u}.flip(0))"),
    is_real: ("{u}.mul_(2)", "{u}.neg_()"),
}

# --- Changes of a value ----------------------------------------------------------------------------------------------

# Expressions that replace all later uses of a variable, or one use.
DRAWS: dict[Fits, tuple[str, ...]] = {
    is_real: (
        "{v} + 0 * torch.rand_like({v})",
        "F.dropout({v}, 0.5)",
        "F.rrelu({v}, training=True)",
        "{v} * torch.bernoulli(torch.full_like({v}, 0.5))",
        "{v} * torch._standard_gamma({v}.detach().abs() + 1)",
        "{v} + torch.normal(0.0, {v}.detach().abs())",
        "{v}[torch.randperm({v}.shape[0])]",
        "{v} * torch.ones_like({v}).bernoulli_(0.5)",
    ),
    is_bool: (
        "{v} & (torch.rand({v}.shape) > 0.5)",
        "torch.bernoulli({v} * 0.5).bool()",
        "torch.empty_like({v}).bernoulli_(0.5)",
    ),
}

DTYPES: dict[Fits, tuple[str, ...]] = {
    is_real: (
        "{v}.to(torch.bfloat16).to({v}.dtype)",
        "{v}.float()",
        "{v}.bfloat16()",
        "{v}.long().to({v}.dtype)",
        "{v}.to(torch.complex128).real",
    ),
    is_bool: ("{v}.float()", "{v}.double()", "{v}.to(torch.uint8)", "{v}.int().bool()", "{v}.byte() * 255"),
    is_integer: ("{v}.double()", "{v}.bool()", "{v}.to(torch.int8)", "{v}.float().byte()"),
}

GRADIENTS: dict[Fits, tuple[str, ...]] = {
    is_real: (
        "{v}.detach()",
        "{v}.data",
        "{v}.detach() + {v} - {v}.detach()",
        "2 * {v} - {v}.detach()",
        "torch.where({v} > 0, {v}, {v}.detach())",
        "Damped.apply({v})",
        "torch.tensor(0.0) * {v}.sum() + {v}.detach()",
    ),
}

HOOKS = (
    "{v}.register_hook(lambda grad: grad * 0.1)",
    "{v}.register_hook(lambda grad: grad.clamp(-0.1, 0.1))",
    "{v}.register_hook(lambda grad: torch.zeros_like(grad))",
    "{v}.register_hook(lambda grad: grad * {v}.detach().sum())",
)

USERS: dict[Fits, tuple[str, ...]] = {
    is_array: (
        "{u} = {v}",
        "{u} = {v}.sum()",
        "{u} = {v}.detach()",
        "{u} = torch.zeros({v}.shape[0])",
    ),
    is_real: (
        "{u} = ({v} * torch.sigmoid({v})).mean()",
        "{u} = {v}.norm().detach()",
        "{u} = {v} + torch.rand(1)",
    ),
    is_bool: ("{u} = ~{v}", "{u} = {v}.double().mean()"),
}

# --- Pairs -----------------------------------------------------------------------------------------------------------

# Pairs of expressions that look equal. The first replaces earlier uses of a variable, and the second replaces later
# uses, for example the uses in the gate and in the value. Pairs in `EQUAL` are equal, and most other pairs are not.
EQUAL = (
    ("torch.tanh({v})", "torch.tanh({v})"),
    ("{v} * 2", "{v} * 2"),
    ("{v}.mul(2)", "torch.mul({v}, 2)"),
    ("torch.add({v}, 2)", "torch.add({v}, 1, alpha=2)"),
    ("{v} * 1", "{v} * True"),
    ("{v} ** 2", "{v} ** 2.0"),
)

PAIRS: dict[Fits, tuple[tuple[str, str], ...]] = {
    is_real: (
        *EQUAL,
        ("{v}", "{v}.detach()"),
        ("{v} * 1", "{v}.detach() * 1"),
        ("F.dropout({v}, 0.5)", "F.dropout({v}, 0.5)"),
        ("{v} * torch.bernoulli(torch.full_like({v}, 0.5))", "{v} * torch.bernoulli(torch.full_like({v}, 0.5))"),
        ("torch.add({v}, 1, alpha=2)", "torch.sub({v}, 1, alpha=2)"),
        ("torch.add({v}, {v}, alpha=2)", "torch.add({v}, {v}, alpha=3)"),
        ("{v} - 2", "2 - {v}"),
        ("torch.div({v}, 2)", "torch.div({v}, 2, rounding_mode='floor')"),
        ("torch.pow({v}, 2)", "torch.pow(2, {v})"),
        ("torch.copysign({v}, 0.0)", "torch.copysign({v}, -0.0)"),
        ("{v} * ~torch.tensor(1)", "{v} * ~torch.tensor(True)"),
        ("{v} * torch.full((1,), 3)", "{v} * torch.full((1,), 3, dtype=torch.bool)"),
        ("{v} + torch.full((1,), 1).bitwise_not()", "{v} + torch.full((1,), True).bitwise_not()"),
        ("{v}.clamp(min=0)", "{v}.clamp(max=0)"),
        ("{v}.clamp(-0.5, 0.5)", "{v}.clamp(-0.5)"),
        ("torch.where({v} > 0, {v}, -{v})", "torch.where({v} > 0, -{v}, {v})"),
        ("torch.where({v} > 0, {v}, -{v})", "(-{v}).where({v} > 0, {v})"),
        ("{v}.round()", "{v}.round(decimals=1)"),
        ("F.gelu({v})", "F.gelu({v}, approximate='tanh')"),
        ("torch.roll({v}, 1)", "torch.roll({v}, 2)"),
        ("{v}.softmax(0)", "{v}.softmax(-1)"),
        ("{v}.cummax(0)[0]", "{v}.cummax(0)[1].double()"),
        ("{v} + {v}.mean()", "{v} + {v}.median()"),
        ("F.layer_norm({v}, (8,))", "F.layer_norm({v}, (8,), eps=0.1)"),
        ("{v}.float().double()", "{v}.bfloat16().double()"),
        ("torch.stack([{v}, -{v}])[0]", "torch.stack([{v}, -{v}])[1]"),
        ("{v}.gather(0, {v}.argsort(0))", "{v}.gather(0, {v}.argsort(0, descending=True))"),
        ("Damped.apply({v})", "Damped.apply({v})"),
        ("Damped.apply({v})", "{v}.clone()"),
    ),
    is_matrix: (
        ("torch.roll({v}, 1, 0)", "torch.roll({v}, 1, 1)"),
        ("{v}.tril()", "{v}.tril(1)"),
        ("{v}.chunk(4)[1]", "{v}.tensor_split(4)[1]"),
        ("{v}.chunk(4)[2]", "{v}.split(2)[1]"),
        ("{v}[[1, 0, 2]]", "{v}[[0, 1, 2]]"),
        ("torch.cat([{v}[1:], {v}[:1]])", "torch.cat([{v}[:-1], {v}[-1:]])"),
        ("F.pad({v}[:, 1:], (1, 0))", "F.pad({v}[:, 1:], (1, 0), value=1.0)"),
        ("torch.einsum('ij->ij', {v})", "torch.einsum('ij,ij->ij', {v}, {v})"),
    ),
    is_square: (
        ("{v}.transpose(0, 1)", "{v}.transpose(0, 0)"),
        ("torch.einsum('ij->ji', {v})", "torch.einsum('ij->ij', {v})"),
        ("{v} + {v}.sum(0)", "{v} + {v}.sum(1)"),
    ),
    is_bool: (
        ("{v}", "{v}.clone()"),
        ("~{v}", "torch.logical_not({v})"),
        ("{v} & {v}.flip(0)", "{v} | {v}.flip(0)"),
        ("torch.where({v}, {v}.flip(0), {v}.roll(1))", "{v}.where({v}.flip(0), {v}.roll(1))"),
        ("{v}.mT", "{v}"),
        ("torch.eq({v}, True)", "torch.ne({v}, True)"),
        ("{v} ^ (torch.rand(8) > 0.5)", "{v} ^ (torch.rand(8) > 0.5)"),
    ),
    is_integer: (("{v} >> 1", "{v} >> 2"), ("{v} // 2", "{v} % 2"), ("{v} + 1", "{v} - 1"), ("{v}.mT", "{v}")),
}


NEW, OTHER = "new", "other"
"""Names of the variables that perturbations assign."""


@dataclass(frozen=True)
class Perturbation:
    """A change of a program: a text for a variable at a position, and perhaps a second text at a later position."""

    family: str
    how: str
    """How the texts change the program: `insert`, `later`, `return`, `reassign`, `use` or `pair` (see `perturbed`)."""
    text: str
    fits: Fits
    """True for tensors that can be perturbed in this way."""
    second: str = ""
    """The statement at the later position (`later`), or the expression that later uses read (`pair`)."""

    def __str__(self) -> str:
        texts = f"{self.text} | {self.second}" if self.second else self.text
        return f"{self.family}, {self.how}: {texts}"


class Place(NamedTuple):
    """A variable, and one or two positions."""

    variable: str
    position: int
    later: int


Scopes = Sequence[dict[str, Tensor]]
"""The tensors in scope at each position of a program."""


def places(perturbation: Perturbation, program: Program, scopes: Scopes) -> list[Place]:
    """All places of a program where a perturbation fits."""
    length = len(program.statements)
    found = []
    for position, scope in enumerate(scopes):
        for variable in (name for name, tensor in scope.items() if perturbation.fits(tensor)):
            if perturbation.how == "later":
                found += [Place(variable, position, later) for later in range(position, length + 1)]
            elif perturbation.how == "pair":
                found += [Place(variable, position, later) for later in _later_uses(program, variable, position)]
            elif perturbation.how != "use" or (position < length and variable in reads(program.statements[position])):
                found.append(Place(variable, position, position))
    return found


def _later_uses(program: Program, variable: str, position: int) -> Iterator[int]:
    """The positions of later statements that read the same value of the variable as the statement at `position`."""
    if position == len(program.statements) or variable not in reads(program.statements[position]):
        return
    for later in range(position + 1, len(program.statements)):
        if variable in assigned(program.statements[later - 1]):
            return
        if variable in reads(program.statements[later]):
            yield later


def perturbed(perturbation: Perturbation, program: Program, place: Place) -> Program:
    """The program with a perturbation at a place.

    - `insert`: the statement is inserted.
    - `later`: two statements are inserted, each at its position.
    - `return`: the statement is inserted, and the program also returns the variable that it assigns.
    - `reassign`: the expression is assigned to the variable, for all later statements.
    - `use`: the statement at the position reads the expression instead of the variable.
    - `pair`: uses from the first position on read one expression, and uses from the later position on read the other.
    """
    variable, position, later = place
    text, second = (line.format(v=variable, u=NEW) for line in (perturbation.text, perturbation.second))
    lines = list(program.statements)
    if perturbation.how == "use":
        lines[position] = _renamed(lines[position], variable, NEW)
        lines.insert(position, f"{NEW} = {text}")
    elif perturbation.how == "pair":
        for number in range(position, _end_of_value(program, variable, position)):
            lines[number] = _renamed(lines[number], variable, NEW if number < later else OTHER)
        lines.insert(later, f"{OTHER} = {second}")
        lines.insert(position, f"{NEW} = {text}")
    else:
        if perturbation.how == "later":
            lines.insert(later, second)
        lines.insert(position, f"{variable} = {text}" if perturbation.how == "reassign" else text)
    return replace(
        program,
        statements=tuple(lines),
        extra=(*program.extra, NEW) if perturbation.how == "return" else program.extra,
        compiled_autograd=perturbation.family == "hooks under compiled autograd",
    )


def _renamed(statement: str, old: str, new: str) -> str:
    """The statement with another name for a variable that it reads."""
    left, right = sides(statement)
    return left + re.sub(rf"(?<![\w.]){old}\b", new, right)


def _end_of_value(program: Program, variable: str, position: int) -> int:
    """The position after the next statement that assigns the variable."""
    for number in range(position, len(program.statements)):
        if variable in assigned(program.statements[number]):
            return number + 1
    return len(program.statements)


# --- All perturbations -----------------------------------------------------------------------------------------------


def _of(family: str, how: str, table: dict[Fits, tuple[str, ...]]) -> list[Perturbation]:
    return [Perturbation(family, how, text, fits) for fits, texts in table.items() for text in texts]


def _writes_to_views() -> Iterator[Perturbation]:
    writes = [(fits, write) for fits, texts in WRITES_TO_VIEWS.items() for write in texts]
    for view in _of("views", "later", VIEWS):
        for fits, write in writes:
            both = view.fits if fits is is_array else lambda t, a=view.fits, b=fits: a(t) and b(t)
            yield replace(view, text=f"{{u}} = {view.text}", fits=both, second=write)


PERTURBATIONS: tuple[Perturbation, ...] = (
    *_of("writes", "insert", WRITES),
    *_of("metadata", "insert", METADATA),
    *_writes_to_views(),
    *_of("hooks", "insert", {is_recorded: HOOKS}),
    *_of("hooks under compiled autograd", "insert", {is_recorded: HOOKS}),
    *_of("draws", "reassign", DRAWS),
    *_of("draws", "use", DRAWS),
    *_of("dtypes", "reassign", DTYPES),
    *_of("dtypes", "use", DTYPES),
    *_of("gradients", "reassign", GRADIENTS),
    *_of("gradients", "use", GRADIENTS),
    *_of("users", "return", USERS),
    *(Perturbation("pairs", "pair", a, fits, b) for fits, pairs in PAIRS.items() for a, b in pairs),
)


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
"""The relative frequency of each family of perturbations."""


# --- Enumeration -----------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=2)
def right_program(seed: int) -> tuple[Program, Scopes]:
    """The right program of a seed, and the tensors in scope at each of its positions."""
    program = draw(seed)
    return program, list(program.scopes())


def perturbation(index: int) -> Perturbation:
    """The perturbation of an index, which is a position in `PERTURBATIONS` plus a multiple of their number."""
    return PERTURBATIONS[index % len(PERTURBATIONS)]


def place(seed: int, index: int) -> Place:
    """The place that the index selects for its perturbation in the program of a seed.

    Raises:
        IndexError: the program has fewer such places.
    """
    return _places(seed, index % len(PERTURBATIONS))[index // len(PERTURBATIONS)]


@functools.lru_cache(maxsize=2)
def _places(seed: int, number: int) -> list[Place]:
    """All places of `PERTURBATIONS[number]` in the right program of a seed."""
    return places(PERTURBATIONS[number], *right_program(seed))


def program(seed: int, index: int) -> Program:
    """The perturbed program of a seed and an index."""
    return perturbed(perturbation(index), right_program(seed)[0], place(seed, index))


def indices(seed: int) -> Iterator[int]:
    """The indices of all perturbed programs of a seed."""
    for number in range(len(PERTURBATIONS)):
        yield from (number + len(PERTURBATIONS) * k for k in range(len(_places(seed, number))))


def sample(number: int) -> tuple[int, int]:
    """The seed and index of a random program. Neighbouring numbers share one right program."""
    seed, dice = number // SAMPLES_PER_SEED, random.Random(number)
    while True:
        family = dice.choices(list(FAMILIES), list(FAMILIES.values()))[0]
        chosen = dice.choice([k for k, change in enumerate(PERTURBATIONS) if change.family == family])
        if count := len(_places(seed, chosen)):
            return seed, chosen + len(PERTURBATIONS) * dice.randrange(count)
