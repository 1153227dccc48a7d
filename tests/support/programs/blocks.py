"""Random blocks as source: one or two layers, with regions, views, writes, casts and other users around them.

`block_program(seed)` makes a block from the parts in `block_parts`. `Block.parts` has the names of its parts, so that
outcomes can be counted by part.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.programs.block_parts import CHECKPOINT, DTYPES, REGIONS, SURROUNDINGS, TABLES, Lines
from tests.support.programs.right_programs import Spelling
from tests.support.programs.source_programs import NAMES, SourceProgram, assigned, attempt, reads

SIZE = 8
"""The number of features and the number of experts. All sizes are equal, so that shapes do not reveal a transpose."""
ATTEMPTS = 12
"""At most this many blocks are drawn for a seed. The first one that eager torch runs is taken."""
ROUNDING = {r"bfloat16|Narrow": 0.1, r"float16|half\(": 2e-2, r"float32|\.float\(|int64": 1e-3, r"": 1e-10}
"""Allowed relative error of results and gradients, by a pattern in the source: the first pattern that matches counts.

Wrong layers have far larger errors.
"""


@dataclass(frozen=True)
class Block(SourceProgram):
    dtype: torch.dtype = torch.float64
    returned: tuple[str, ...] = ("y",)
    parts: tuple[str, ...] = ()
    trained: tuple[str, ...] = ()
    surrounding: tuple[str, ...] = ()
    """The contexts in which the block is compiled and called, as source."""
    magnitude: float = 1.0
    tokens: int = 5
    has_experts: bool = False
    has_real_masks: bool = False
    is_exact: bool = False
    """True if inputs in `dtype` are cast to float64."""

    @property
    def assume_binary(self) -> bool:
        return self.has_real_masks

    @property
    def traces(self) -> bool:
        return re.search(r"inference_mode|checkpoint", str(self)) is not None

    @property
    def rounding(self) -> float:
        source = str(replace(self, parts=()))
        return next(error for name, error in ROUNDING.items() if re.search(name, source))

    @property
    def arguments(self) -> list[str]:
        """The names that are read before any statement assigns them."""
        known, found = set(NAMES), dict[str, None]()
        for line in map(str.strip, (*self.statements, *self.returned)):
            found |= dict.fromkeys(name for name in reads(line) if name not in known and _ARGUMENT.fullmatch(name))
            known |= set(assigned(line))
        return list(found)

    def inputs(self) -> dict[str, Tensor]:
        named = {name: self._input(name) for name in self.arguments}
        if self.is_exact:
            named = {name: t.double() if t.is_floating_point() else t for name, t in named.items()}
        for name in self.trained:
            named[name].requires_grad_()
        return named

    def _input(self, name: str) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed * 1000 + sum(map(ord, name)))
        shape = _SHAPES.get(name[0], (SIZE, SIZE))
        if name[0] in "xX":
            shape = (*shape, self.tokens, SIZE)
        if name in ("x1", "W1"):
            shape = (*shape[:-1], 2 * SIZE)
        if name[0] in "LM":
            shape = (3, *shape)
        if self.has_experts and name[0] not in "brVo":
            shape = (SIZE, *shape)
        if name[0] in _INTEGERS:
            low, high, dtype = _INTEGERS[name[0]]
            return torch.randint(low, high, shape, generator=generator, dtype=dtype)
        if name == "offs":
            return torch.arange(1, SIZE + 1, dtype=torch.int32) * self.tokens
        values = torch.randn(*shape, generator=generator, dtype=torch.float64)
        if name[0] in "mM":
            return (values > 0).to(self.dtype) if self.has_real_masks else values > 0
        if name[0] in "lLr":
            return values.to(self.dtype if self.dtype.is_floating_point else torch.float32)
        if not (self.dtype.is_floating_point or self.dtype.is_complex):
            return (values * 3).to(self.dtype)
        values = values * (self.magnitude if name[0] in "xX" else 1)
        return torch.complex(values, values.flip(-1)).to(self.dtype) if self.dtype.is_complex else values.to(self.dtype)

    def exact(self) -> Block | None:
        return None if self.dtype in (torch.float64, torch.complex128) else replace(self, is_exact=True)

    def surroundings(self) -> AbstractContextManager[Any]:
        stack = ExitStack()
        for source in self.surrounding:
            stack.enter_context(eval(source))
        return stack

    def configuration(self) -> AbstractContextManager[Any]:
        return torch._dynamo.config.patch(trace_autograd_ops="autograd.grad" in self.source)


_ARGUMENT = re.compile(r"x[012]?|X|W[012]?|V|K|b|r|offs|L|M|P|J|U|l\d|m\d")
_SHAPES = {"X": (2,), "x": (), "b": (SIZE,), "r": (SIZE,)}
_INTEGERS = {
    "P": (0, 256, torch.uint8),
    "U": (0, 2, torch.uint8),
    "J": (-(2**63), 2**63 - 1, torch.int64),
}


# --- Drawing ---------------------------------------------------------------------------------------------------------


def block_program(seed: int) -> Block:
    """The block of a seed."""
    dice = random.Random(seed)
    dtype = dice.choices(list(DTYPES), list(DTYPES.values()))[0]
    has_experts = dice.random() < 0.2
    for number in range(ATTEMPTS):
        block = _Draw(random.Random(f"{seed}, {number}"), has_experts).block(seed, dtype)
        if not isinstance(attempt(block, block.function()), Exception):
            break
    return block


class _Draw:
    """Draws the parts of one block, one after the other."""

    def __init__(self, dice: random.Random, has_experts: bool) -> None:
        self.dice = dice
        self.has_experts = has_experts
        self.parts: dict[str, None] = {}

    def pick(self, title: str, usual: float = 0.0) -> Any:
        """A part of a table: the first one with probability `usual`, otherwise a random one."""
        names = list(TABLES[title])
        name = names[0] if self.chance(usual) else self.dice.choice(names)
        self.parts[f"{title}: {name}"] = None
        return TABLES[title][name]

    def chance(self, probability: float) -> bool:
        return self.dice.random() < probability

    def block(self, seed: int, dtype: str) -> Block:
        surrounding = self.pick("surrounding", 0.65)
        spelling = self.spelling()
        lines, regions, returned = self.layers(spelling)
        for _ in range(self.dice.choice([0, 1, 1, 2])):
            tail, result = self.tail(f"w{len(returned)}")
            lines += tail
            returned += result
        for start, stop in reversed(regions):
            if self.chance(0.45):
                records = surrounding == SURROUNDINGS["no_grad"] and self.chance(0.5)
                opening = REGIONS["enable_grad"] if records else self.pick("region")
                start, stop = self.extent(start, stop)
                read_later = {name for line in lines[stop:] for name in reads(line)} | set(returned)
                lines[start:stop] = _in_region(opening, lines[start:stop], read_later, f"body{start}")
        block = Block(
            seed,
            statements=tuple(lines),
            dtype=getattr(torch, dtype),
            returned=tuple(returned),
            surrounding=surrounding,
            magnitude=self.pick("magnitude", 0.6),
            tokens=self.dice.choice([1, 5, SIZE]),
            has_experts=self.has_experts,
            has_real_masks=spelling.given == "float",
        )
        while self.chance(0.2):
            block = self.with_write(block)
        block = replace(block, trained=self.trained(block))
        kind = "experts" if self.has_experts else "dense"
        return replace(block, parts=(f"layer: {kind}", f"dtype: {dtype}", *self.parts))

    def layers(self, spelling: Spelling) -> tuple[list[str], list[tuple[int, int]], list[str]]:
        """The lines of all layers, the range of lines of each layer, and the names of the results."""
        n_masks = self.dice.choice([1, 1, 2, 3])
        inputs = [*self.pick("input", 0.5), *self.pick("weight", 0.6)]
        lines = [*inputs, *self.layer(range(n_masks), spelling)]
        regions, returned = [(len(inputs), len(lines))], ["y"]
        kind = self.pick("second layer", 0.6)
        if kind != "none":
            second = self.second_layer(kind, spelling, n_masks)
            regions.append((len(lines), len(lines) + len(second)))
            lines += second
            if kind == "both":
                returned.append("u")
            else:
                lines.append("y = u" if kind == "chain" else "y = y + u")
        return lines, regions, returned

    def spelling(self) -> Spelling:
        return self.pick("tricky mask" if self.chance(0.25) else "mask")

    def layer(self, masks: range, spelling: Spelling) -> list[str]:
        """The lines of a layer that computes y from x and W."""
        if not self.has_experts and self.chance(0.07):
            return list(self.pick("stacked layer"))
        is_loop = self.has_experts and self.chance(0.3)
        is_batch = self.has_experts and not is_loop
        product = self.pick("product", 0.65)
        projection = self.pick("projection of experts", 0.4) if is_batch else self.pick("projection", 0.65)
        mask = (*spelling.lines, *self.dice.choice(spelling.complements).split("; "))
        value = _expanded(self.pick("value", 0.65), product, projection)
        term = [*self.pick("activation", 0.5), *self.pick("term", 0.5)]
        before, each, after = self.pick("sum of a loop over experts") if is_loop else self.pick("sum", 0.3)
        stages = [mask, value, (*term, *each)]
        if is_loop:
            before = (*(line.format(i=masks[0], l=f"l{masks[0]}") for line in mask), *before)
            stages = [(*_EXPERT, *map(_of_expert, (*value, *term, *each)))]
        order = [(i, stage) for i in masks for stage in stages]
        if self.chance(0.4):
            order = [(i, stage) for stage in stages for i in masks]
        names = {"first": masks[0], "terms": ", ".join(f"y{i}" for i in masks)}
        lines = [
            *before,
            *(line.format(i=i, k=i - masks[0], l=f"l{i}", **names) for i, stage in order for line in stage),
            *(line.format(**names) for line in after),
        ]
        while self.chance(0.1):
            lines = self.touched(lines)
        return lines

    def second_layer(self, kind: str, spelling: Spelling, n_masks: int) -> list[str]:
        """The lines of a layer that computes u from y or another input, and may share x, weight or masks."""
        spelling = spelling if self.chance(0.5) else self.spelling()
        lines = self.layer(range(n_masks, 2 * n_masks), spelling)
        names = {"y": "u", "Y": "U", "R": "R2", "Rt": "Rt2", "s": "s2", "p": "p2", "xt": "xt2", "xr": "xr2"}
        names["x"] = "y" if kind.startswith("chain") else self.pick("second x")
        names["W"] = self.pick("second weight")
        if self.pick("second mask"):
            names |= {f"{name}{n_masks + i}": f"{name}{i}" for i in range(n_masks) for name in "lm"}
        return [_renamed(line, names) for line in lines]

    def touched(self, lines: list[str]) -> list[str]:
        """The lines with a variable replaced by an expression of it (`TOUCHES`), right after it is assigned."""
        position = self.dice.randrange(len(lines))
        variables = assigned(lines[position])
        if not variables:
            return lines
        variable = self.dice.choice(variables)
        text = self.pick("touch").format(v=variable)
        return [*lines[: position + 1], f"{variable} = {text}", *lines[position + 1 :]]

    def tail(self, new: str) -> tuple[list[str], list[str]]:
        """Lines after the layers, and the names of results besides y."""
        kind = self.dice.choices(["any", "view", "write"], [4, 4, 2])[0]
        if kind == "any":
            lines, result = self.pick("tail")
            return [_renamed(line, {"w": new}) for line in lines], [new] if result else []
        if kind == "write":
            return [self.write(self.dice.choice(["W", "W", "x", "y", "m0", "l0"]))], []
        source = self.dice.choice(["y", "y", "y", "x"])
        view, write = self.pick("view").format(v=source), self.pick("write to a view", 0.2).format(u=new)
        return [f"{new} = {view}", *([write] if write else [])], [new]

    def extent(self, start: int, stop: int) -> tuple[int, int]:
        """A range of lines: the whole layer or a part of it."""
        middle = (start + stop) // 2
        some, other = sorted(self.dice.sample(range(start, stop + 1), 2))
        extents = {"whole": (start, stop), "beginning": (start, middle), "end": (middle, stop)}
        return extents.get(self.pick("extent", 0.5), (some, other))

    def write(self, name: str) -> str:
        """A write to a variable."""
        return self.pick("write" if name[0] in "xXWyVKlLbr" else "write to a mask").format(v=name)

    def with_write(self, block: Block) -> Block:
        """The block with a write to an input, a weight or a result, at any position."""
        write = self.write(self.dice.choice([*block.arguments, "W", "y"]))
        lines = block.statements
        position = self.dice.randint(1, len(lines))
        following = lines[position] if position < len(lines) else ""
        indent = following[: len(following) - len(following.lstrip())]
        return replace(block, statements=(*lines[:position], indent + write, *lines[position:]))

    def trained(self, block: Block) -> tuple[str, ...]:
        """The inputs that require a gradient."""
        names = [name for name, t in block.inputs().items() if t.is_floating_point() or t.is_complex()]
        if "autograd.grad" in block.source:
            return tuple(names)
        kind = self.pick("trained")
        return tuple(name for name in names if self.chance(kind))


def _expanded(form: Lines, product: Lines, projection: Lines) -> list[str]:
    """The lines of a part of `VALUES`, with its products and projections expanded."""
    lines: list[str] = []
    for line in form:
        macro, *names = line.split(" ")
        if macro in ("product", "project"):
            a, b = (name if name == "W" else f"{name}{{i}}" for name in names)
            calls = product if macro == "product" else projection
            lines += [call.format(a=a, m=b, g=b, i="{i}", l="{l}") for call in calls]
        else:
            lines.append(line)
    return lines


_EXPERT = ("xe{i} = x[{k}]", "We{i} = W[{k}]", "me{i} = m{first}[{k}]", "ne{i} = n{first}[{k}]")


def _of_expert(line: str) -> str:
    """A line of a layer for one expert of a loop."""
    return _renamed(line.replace("m{i}", "me{i}").replace("n{i}", "ne{i}"), {"x": "xe{i}", "W": "We{i}"})


def _renamed(line: str, names: Mapping[str, str]) -> str:
    """The line with other names for variables."""
    return re.sub(r"(?<![\w.'])[A-Za-z]\w*(?!')", lambda found: names.get(found[0], found[0]), line)


def _in_region(opening: Lines, lines: list[str], read_later: set[str], name: str) -> list[str]:
    """The lines enclosed by a part of `REGIONS`. If they go through `checkpoint`, their function is called `name`."""
    for line in reversed(opening):
        is_body = line == CHECKPOINT
        lines = _checkpointed(lines, read_later, name) if is_body else [line, *_indented(lines)]
    return lines


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]


def _checkpointed(lines: Sequence[str], read_later: set[str], name: str) -> list[str]:
    """The lines as a function that `checkpoint` calls. Its arguments are x and variables that the lines reassign."""
    made = dict.fromkeys(variable for line in lines for variable in assigned(line))
    known: set[str] = set()
    arguments: dict[str, None] = {"x": None}
    for line in lines:
        arguments |= dict.fromkeys(variable for variable in reads(line) if variable in made and variable not in known)
        known |= set(assigned(line))
    results = ", ".join(variable for variable in made if variable in read_later) or "x"
    given = ", ".join(arguments)
    return [
        f"def {name}({given}):",
        *_indented(lines),
        f"    return {results}",
        f"{results} = checkpoint({name}, {given}, use_reentrant=False)",
    ]
