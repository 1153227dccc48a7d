"""Random programs that are correct MGLU layers, as source with one tensor operation per statement.

`draw(seed)` makes a program from the parts in `right_program_parts`. From seed `EXPERTS` on, programs have experts.
`perturbations` changes these programs.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.programs.source_programs import NAMES, SourceProgram, assigned, reads

INPUTS: dict[str, tuple[str, ...]] = {
    "x": (),
    "cloned x": ("x = x0.clone()",),
    "tanh": ("x = torch.tanh(x0)",),
    "norm": ("norms = x0.norm(dim=-1, keepdim=True)", "x = x0 / norms"),
    "layer_norm": ("x = F.layer_norm(x0, (8,))",),
}

WEIGHTS: dict[str, tuple[str, ...]] = {
    "W": (),
    "cloned W": ("W = W0.clone()",),
    "transposed": ("Vt = V.t()", "W = Vt * 2"),
    "scaled": ("norms_of_W = W0.norm(dim=0)", "W = W0 / norms_of_W"),
    "product": ("W = W0 @ K",),
    "decoded": ("Wq = Q.to(x.dtype)", "s = S[:, None]", "W = Wq * s"),
    "unpacked": (
        "low = B & 15",
        "high = B >> 4",
        "pairs = torch.stack((low, high), -1)",
        "both = pairs.flatten(1)",
        "Wb = both.to(x.dtype)",
        "Wq = Wb - 8",
        "s = G.expand(8, 8)",
        "W = Wq * s",
    ),
}


@dataclass(frozen=True)
class Spelling:
    """The statements that make mask `m{i}` from the program's argument, and the statements for its complement."""

    given: str
    """The program's argument: `logits`, `bool`, `float` or `bytes` (8 masks in the bits of a uint8 tensor)."""
    lines: tuple[str, ...]
    complements: tuple[str, ...]


_BOOL = ("n{i} = ~m{i}", "n{i} = torch.logical_not(m{i})", "n{i} = m{i} == 0", "n{i} = m{i} ^ True")
_REAL = ("n{i} = 1 - m{i}", "n{i} = 1.0 - m{i}", "n{i} = torch.rsub(m{i}, 1)")
_INTEGER = ("n{i} = 1 - m{i}", "n{i} = m{i} ^ 1", "n{i} = m{i} == 0")


def _straight_through(*lines: str) -> Spelling:
    return Spelling("logits", lines, _REAL)


SPELLINGS: dict[str, Spelling] = {
    "bool": Spelling("bool", (), _BOOL),
    ">": Spelling("logits", ("m{i} = {l} > 0",), (*_BOOL, "n{i} = {l} <= 0")),
    ">=": Spelling("logits", ("m{i} = {l} >= 0.25",), (*_BOOL, "n{i} = {l} < 0.25")),
    "<": Spelling("logits", ("m{i} = {l} < 0",), (*_BOOL, "n{i} = {l} >= 0")),
    "<=": Spelling("logits", ("m{i} = {l} <= -0.5",), (*_BOOL, "n{i} = {l} > -0.5")),
    "float": Spelling("float", (), _REAL),
    "bytes": Spelling("bytes", ("p{i} = P >> {i}", "m{i} = p{i} & 1"), _INTEGER),
    "rounded": Spelling("logits", ("p{i} = torch.sigmoid({l})", "m{i} = torch.round(p{i})"), _REAL),
    "(hard - soft).detach() + soft": _straight_through(
        "c{i} = {l} > 0", "h{i} = c{i}.to({l}.dtype)", "s{i} = h{i} - {l}", "t{i} = s{i}.detach()", "m{i} = t{i} + {l}"
    ),
    "hard + soft - soft.detach()": _straight_through(
        "c{i} = {l} > 0", "h{i} = c{i}.to({l}.dtype)", "s{i} = h{i} + {l}", "t{i} = {l}.detach()", "m{i} = s{i} - t{i}"
    ),
    "round(sigmoid)": _straight_through(
        "p{i} = torch.sigmoid({l})",
        "h{i} = torch.round(p{i})",
        "s{i} = h{i} - p{i}",
        "t{i} = s{i}.detach()",
        "m{i} = t{i} + p{i}",
    ),
    "no_grad": _straight_through(
        "with torch.no_grad(): c{i} = {l} > 0",
        "with torch.no_grad(): h{i} = c{i}.to({l}.dtype)",
        "s{i} = h{i} + {l}",
        "t{i} = {l}.detach()",
        "m{i} = s{i} - t{i}",
    ),
    "difference under no_grad": _straight_through(
        "c{i} = {l} > 0",
        "h{i} = c{i}.to({l}.dtype)",
        "with torch.no_grad(): s{i} = h{i} - {l}",
        "m{i} = s{i} + {l}",
    ),
    ".data": _straight_through(
        "d{i} = {l}.data", "c{i} = d{i} > 0", "h{i} = c{i}.to(d{i}.dtype)", "s{i} = h{i} + {l}", "m{i} = s{i} - d{i}"
    ),
    "autograd.Function": _straight_through("m{i} = Sign.apply({l})"),
}

# `{a}` is the masked weight and `{m}` the mask or its complement.
PRODUCTS: dict[str, tuple[str, ...]] = {
    "W * m": ("{a} = W * {m}",),
    "m * W": ("{a} = {m} * W",),
    "torch.mul": ("{a} = torch.mul(W, {m})",),
    "clone().mul_": ("{a} = W.clone()", "{a}.mul_({m})"),
}
BOOL_PRODUCTS = PRODUCTS | {
    "where": ("{a} = torch.where({m}, W, 0)",),
    "W * m.double()": ("{a}d = {m}.double()", "{a} = W * {a}d"),
}

PROJECTIONS: dict[str, tuple[str, ...]] = {
    "linear": ("{g} = F.linear(x, {a})",),
    "x @ W.t()": ("{a}t = {a}.t()", "{g} = x @ {a}t"),
    "einsum": ("{g} = torch.einsum('bh,dh->bd', x, {a})",),
    "matmul": ("{a}t = {a}.mT", "{g} = torch.matmul(x, {a}t)"),
    "addmm": ("{a}t = {a}.t()", "{g}0 = x.new_zeros(8)", "{g} = torch.addmm({g}0, x, {a}t)"),
}

# Projections for experts, whose x, weight and masks have one more dimension.
PROJECTIONS_OF_EXPERTS: dict[str, tuple[str, ...]] = {
    "bmm": ("{a}t = {a}.mT", "{g} = torch.bmm(x, {a}t)"),
    "matmul": ("{a}t = {a}.transpose(-2, -1)", "{g} = x @ {a}t"),
    "einsum": ("{g} = torch.einsum('eth,edh->etd', x, {a})",),
}

# Gate and value from one product with both masked weights.
JOINTS: dict[str, tuple[str, ...]] = {
    "cat": ("j{i} = torch.cat([a{i}, b{i}])", "k{i} = F.linear(x, j{i})", "g{i}, v{i} = k{i}.chunk(2, -1)"),
    "stack": ("j{i} = torch.stack([a{i}, b{i}])", "k{i} = torch.einsum('bh,kdh->kbd', x, j{i})", "g{i}, v{i} = k{i}"),
    "unflatten": (
        "j{i} = torch.cat([a{i}, b{i}])",
        "k{i} = F.linear(x, j{i})",
        "o{i} = k{i}.unflatten(-1, (2, 8))",
        "g{i}, v{i} = o{i}.unbind(-2)",
    ),
}

ACTIVATIONS: dict[str, tuple[str, ...]] = {
    "silu": ("z{i} = F.silu(g{i})",),
    "gelu": ("z{i} = F.gelu(g{i})",),
    "gelu_tanh": ("z{i} = F.gelu(g{i}, approximate='tanh')",),
    "relu": ("z{i} = F.relu(g{i})",),
    "sigmoid": ("z{i} = torch.sigmoid(g{i})",),
    "tanh": ("z{i} = torch.tanh(g{i})",),
    "g * sigmoid(g)": ("e{i} = torch.sigmoid(g{i})", "z{i} = g{i} * e{i}"),
    "g / (1 + exp(-g))": ("e{i} = torch.exp(-g{i})", "f{i} = 1 + e{i}", "z{i} = g{i} / f{i}"),
}

# Statements before all terms, after term i, and after all terms. `{terms}` stands for all terms.
SUMS: dict[str, tuple[tuple[str, ...], str, tuple[str, ...]]] = {
    "y = y + term": (("y = torch.zeros(8, dtype=x.dtype)",), "y = y + y{i}", ()),
    "y += term": (("y = torch.zeros(x.shape[0], 8, dtype=x.dtype)",), "y += y{i}", ()),
    "stack().sum(0)": ((), "", ("Y = torch.stack([{terms}])", "y = Y.sum(0)")),
    "stack().mean(0)": ((), "", ("Y = torch.stack([{terms}])", "y = Y.mean(0)")),
    "a number": (("y = 0",), "y = y + 0.5 * y{i}", ()),
    "mask weights": (("R = torch.sigmoid(x)", "y = 0"), "y = y + R[:, {i} : {i} + 1] * y{i}", ()),
    "learned scalars": (("y = 0",), "y = y + V[0, {i}] * y{i}", ()),
    "residual": (("y = x * 1",), "y = y + y{i}", ()),
    "residual +=": (("y = x.clone()",), "y += y{i}", ()),
}

TAILS: dict[str, tuple[str, ...]] = {
    "nothing": (),
    "tanh": ("y = torch.tanh(y)",),
    "residual": ("y = y + x",),
    "tied weight": ("y = F.linear(y, W)",),
}


SIZE = 8
"""The number of input features, of output features and of experts. Equal sizes do not reveal a transpose."""

EXPERTS = 1_000_000
"""The first seed of programs with experts."""


@dataclass(frozen=True)
class Program(SourceProgram):
    given: str
    """The kind of argument that masks are made from (`Spelling.given`)."""
    n_masks: int
    tokens: int
    trained: tuple[str, ...] = ()
    no_grad: bool = False
    shared: str = ""
    """The name of an argument, or "". The program's argument `shared` is a detached view of the named argument."""
    extra: tuple[str, ...] = ()
    """The variables that the program returns besides `y`."""
    compiled_autograd: bool = False
    """True if Dynamo records hooks as it does for compiled autograd."""

    @property
    def assume_binary(self) -> bool:
        return self.given == "float"

    @property
    def arguments(self) -> list[str]:
        """The names that are read before any statement assigns them."""
        known, found = set(NAMES), dict[str, None]()
        for statement in self.statements:
            found |= dict.fromkeys(name for name in reads(statement) if name not in known and _ARGUMENT.fullmatch(name))
            known |= set(assigned(statement))
        return [*found, *(["shared"] if self.shared else [])]

    @property
    def returned(self) -> tuple[str, ...]:
        return ("y", *self.extra)

    def inputs(self) -> dict[str, Tensor]:
        named = {name: self._input(name) for name in self.arguments if name != "shared"}
        for name in set(self.trained) & named.keys():
            named[name].requires_grad_()
        if self.shared:
            named["shared"] = named[self.shared].detach()[1:4]
        return named

    def _input(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)))
        stack = (self.n_masks, SIZE, SIZE) if name in "LM" else (SIZE, SIZE)
        shape = (self.tokens, SIZE) if name in ("x", "x0") else stack
        if self.seed >= EXPERTS and name != "V":
            shape = (SIZE, *shape)
        if name == "P":
            return torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
        if name == "Q":
            return torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        if name == "S":
            return torch.rand(SIZE, generator=generator) / 100
        if name == "B":
            return torch.randint(0, 256, (SIZE, SIZE // 2), generator=generator, dtype=torch.uint8)
        if name == "G":
            return torch.rand(SIZE, 1, generator=generator).bfloat16()
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if name[0] in "Mm":
            return values > 0 if self.given == "bool" else (values > 0).double()
        return values

    def surroundings(self) -> AbstractContextManager[Any]:
        return torch.set_grad_enabled(not self.no_grad)

    def configuration(self) -> AbstractContextManager[Any]:
        return torch._dynamo.config.patch(compiled_autograd=self.compiled_autograd)

    def scopes(self) -> Iterator[dict[str, Tensor]]:
        """The tensors in scope before each statement and before the return."""
        torch.manual_seed(self.seed)
        space: dict[str, Any] = {**NAMES, **self.inputs()}
        with self.surroundings():
            for statement in (*self.statements, "pass"):
                yield {name: value for name, value in space.items() if isinstance(value, Tensor)}
                exec(statement, space)


_ARGUMENT = re.compile(r"x0?|W0?|V|K|Q|S|B|G|L|M|P|l\d|m\d")


# --- Drawing ---------------------------------------------------------------------------------------------------------


def draw(seed: int) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    has_experts = seed >= EXPERTS
    spelling = SPELLINGS[dice.choice(list(SPELLINGS))]
    n_masks = dice.choice([1, 1, 2, 3])
    masks_before, mask_stage = _masks(dice, spelling, n_masks, "[:, {i}]" if has_experts else "[{i}]")
    layer_before, stages = _layer(dice, spelling, has_experts)
    # A write to a sum splits the program into several layers, which must not share the product with the whole weight.
    sums = [name for name in SUMS if not (layer_before and "+=" in name)]
    weights, tails = list(WEIGHTS), list(TAILS)
    if has_experts:  # skip the parts that need two-dimensional x and weights
        sums.remove("mask weights")
        sums = [name for name in sums if name != "y += term"]
        weights, tails = ["W", "cloned W", "product"], [name for name in TAILS if name != "tied weight"]
    before, after_term, after = SUMS[dice.choice(sums)]
    stages = [mask_stage, *stages, (after_term,) if after_term else ()]
    order = [(i, stage) for i in range(n_masks) for stage in stages]
    if dice.random() < 0.4:
        order = [(i, stage) for stage in stages for i in range(n_masks)]
    terms = ", ".join(f"y{i}" for i in range(n_masks))
    program = Program(
        seed,
        statements=(
            *INPUTS[dice.choice(list(INPUTS))],
            *WEIGHTS[dice.choice(weights)],
            *masks_before,
            *layer_before,
            *before,
            *(line.format(i=i, l=f"l{i}") for i, stage in order for line in stage),
            *(line.format(terms=terms) for line in after),
            *TAILS[dice.choice(tails)],
        ),
        given=spelling.given,
        n_masks=n_masks,
        tokens=dice.choice([5, SIZE]),
    )
    return replace(
        program,
        trained=_trained(dice, program),
        no_grad=dice.random() < 0.2,
        shared=dice.choice(program.arguments) if dice.random() < 0.2 else "",
    )


def _trained(dice: random.Random, program: Program) -> tuple[str, ...]:
    """The arguments that require a gradient: some arguments, plus all or none of the logits.

    Quantized weights and scales require no gradient, because the pass refuses trained ones.
    """
    masks = [name for name in program.arguments if name[0] in "LMPlm"]
    others = [name for name in program.arguments if name not in masks and name not in "QSBG"]
    trained = dice.choice([[], others, [name for name in others if dice.random() < 0.5]])
    if program.given == "logits" and dice.random() < 0.6:
        return (*trained, *masks)
    return tuple(trained)


def _masks(
    dice: random.Random, spelling: Spelling, n_masks: int, index: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The statements before all masks, and the statements for mask i. Masks are separate arguments or one stack."""
    if spelling.given == "bytes":
        return (), spelling.lines
    one, stack = ("l", "L") if spelling.given == "logits" else ("m", "M")
    how = dice.choice(["separate", "slices", "unbind", "made as a stack"])
    if how == "slices" or (how == "made as a stack" and not _is_straight_through(spelling)):
        return (), (f"{one}{{i}} = {stack}{index}", *spelling.lines)
    if how == "unbind":
        targets = ", ".join(f"{one}{i}" for i in range(n_masks)) + "," * (n_masks == 1)
        return (f"{targets} = {stack}.unbind({index.count(':')})",), spelling.lines
    if how == "made as a stack":
        return tuple(line.format(i="", l="L") for line in spelling.lines), (f"m{{i}} = m{index}",)
    return (), spelling.lines


def _is_straight_through(spelling: Spelling) -> bool:
    """True if complements read only the mask, and not its logits. Masks can then be made as one stack."""
    return bool(spelling.lines) and not any("{l}" in line for line in spelling.complements)


def _layer(dice: random.Random, spelling: Spelling, has_experts: bool) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The statements before all masks, and the stages for mask i, such as complement, gate, value, activation, term."""
    complement = dice.choice(spelling.complements)
    products = BOOL_PRODUCTS if "~" in spelling.complements[0] else PRODUCTS
    product = products[dice.choice(list(products))]
    projections = PROJECTIONS_OF_EXPERTS if has_experts else PROJECTIONS
    projection = projections[dice.choice(list(projections))]
    activation = ACTIVATIONS[dice.choice(list(ACTIVATIONS))]
    term = dice.choice(["y{i} = z{i} * v{i}", "y{i} = v{i} * z{i}"])
    value = dice.choice(["masked", "masked", "joined", "difference of weights", "difference of products"])
    if has_experts and value == "joined":
        value = "masked"
    named = {"i": "{i}", "l": "{l}"}
    gate = [line.format(a="a{i}", m="m{i}", g="g{i}", **named) for line in (*product, *projection)]
    if value == "difference of products":
        rest = "torch.bmm(x, W.mT)" if has_experts else "F.linear(x, W)"
        return (f"rest = {rest}",), [tuple(gate), ("v{i} = rest - g{i}",), activation, (term,)]
    if value == "joined":
        masked = [line.format(a=a, m=m, **named) for a, m in (("a{i}", "m{i}"), ("b{i}", "n{i}")) for line in product]
        return (), [(complement,), (*masked, *JOINTS[dice.choice(list(JOINTS))]), activation, (term,)]
    other = [line.format(a="b{i}", m="n{i}", g="v{i}", **named) for line in (*product, *projection)]
    if value == "difference of weights":
        other = ["b{i} = W - a{i}", *(line.format(a="b{i}", g="v{i}", **named) for line in projection)]
        return (), [tuple(gate), tuple(other), activation, (term,)]
    return (), [(complement,), tuple(gate), tuple(other), activation, (term,)]
