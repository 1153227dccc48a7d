"""Exported programs that write to their own tensors: what a program changes is not taken for a constant."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from exported import Masked, export, operators, saved_and_loaded
from families import family
from hypothesis import given
from hypothesis import strategies as st
from strategies import examples
from torch import Tensor, nn
from torch.export import ExportedProgram

from compile_passes.exported import fuse_exported


class Counting(nn.Module):
    """A layer whose logits change at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("logits", torch.randn(2, 6, 20))

    def forward(self, x: Tensor) -> Tensor:
        self.logits.neg_()
        return torch.ops.mglu.forward_ste(x, self.weight, self.logits)[0]


def test_masks_that_change_are_packed_at_each_call() -> None:
    module, x = Counting(), torch.randn(5, 20)
    fused = fuse_exported(export(module, x))
    assert operators(fused) == ["mglu.pack_masks.default", "mglu.forward.default"]
    run = fused.module()
    first, second = run(x), run(x)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(run(x), first)


# --- Writes to parameters and buffers ---------------------------------------------------------------------------------


def flipped(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype is torch.bool else 1 - tensor


def _flip(tensor: Tensor) -> None:
    tensor.copy_(flipped(tensor))


torch.library.define("mglu_tests::flip_", "(Tensor(a!) mask) -> ()")
torch.library.impl("mglu_tests::flip_", "CompositeExplicitAutograd", _flip)


def _flip_by_setitem(tensor: Tensor) -> None:
    tensor[0] = flipped(tensor[0])


def _flip_by_index(tensor: Tensor) -> None:
    tensor[torch.tensor([0])] = flipped(tensor[:1])


def _flip_by_out(tensor: Tensor) -> None:
    if tensor.dtype is torch.bool:
        torch.logical_not(tensor[0], out=tensor[0])
    else:
        torch.neg(tensor[0], out=tensor[0])


def _flip_in_condition(tensor: Tensor) -> None:
    tensor.copy_(flipped(torch.cond(tensor.sum() >= 0, lambda m: m.clone(), lambda m: m.clone(), (tensor,))))


# Some of these views are no views of every tensor, and no schema tells of which.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda tensor: tensor,
    "select": lambda tensor: tensor[0],
    "slice": lambda tensor: tensor[..., 1:7:2],
    "flat": lambda tensor: tensor.view(-1)[3:],
    "reshape": lambda tensor: tensor.reshape(-1)[3:],
    "transpose": lambda tensor: tensor.mT,
    "detach": lambda tensor: tensor.detach()[:1],
    "chunk": lambda tensor: tensor.chunk(2, -1)[1],
    "unbind": lambda tensor: tensor.unbind(0)[0],
    "copy": lambda tensor: tensor.clone(),
    "diagonal": lambda tensor: tensor.diagonal(0, -2, -1),
    "contiguous": lambda tensor: tensor.contiguous(),
    "to": lambda tensor: tensor.to(tensor.dtype),
    "dropout": lambda tensor: F.dropout(tensor, 0.5, training=False),
    "type_as": lambda tensor: tensor.type_as(tensor),
    "broadcast": lambda tensor: torch.broadcast_tensors(tensor, tensor[0])[0],
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    **{name: lambda tensor, view=view: _flip(view(tensor)) for name, view in VIEWS.items()},
    "setitem": _flip_by_setitem,
    "index_put": _flip_by_index,
    "out": _flip_by_out,
    "custom operator": lambda tensor: torch.ops.mglu_tests.flip_(tensor[0]),
    "cond": _flip_in_condition,
}
MASKS: dict[str, Callable[[WritingModel], Tensor]] = {
    "stored": lambda model: model.masks[0],
    "second name": lambda model: model.second,
    "float": lambda model: model.masks[0].float(),
    "logits": lambda model: model.logits > 0,
    "alias": lambda model: model.masks.detach().view(2, 6, 8)[0],
    "view of logits": lambda model: model.logits.t().contiguous().t() > 0,
    "and": lambda model: (model.masks[1] != 0) & (model.logits.detach() > 0),
}
BEFORE, BETWEEN, AFTER = 0, 2, 4


class WritingModel(nn.Module):
    """A layer with writes at some of five places: before, after and between its steps.

    `writes` holds for each write the place, the tensor, and a key of `WRITES`. If `copied`, the mask is cloned.
    """

    def __init__(
        self,
        mask: str,
        *writes: tuple[int, str, str],
        copied: bool = False,
        no_grad: bool = True,
        dtype: torch.dtype = torch.bool,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.logits = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("masks", (torch.rand(2, 6, 8) > 0.5).to(dtype))
        if "second" in (mask.split()[0], *(name for _, name, _ in writes)):
            self.register_buffer("second", self.masks[1])  # torch decomposes no writes to memory that buffers share
        self.mask, self.writes, self.copied, self.no_grad = mask, writes, copied, no_grad

    def write(self, place: int) -> None:
        for where, name, kind in self.writes:
            if where == place and self.no_grad:
                with torch.no_grad():
                    WRITES[kind](getattr(self, name))
            elif where == place:
                WRITES[kind](getattr(self, name))

    def forward(self, x: Tensor) -> Tensor:
        self.write(BEFORE)
        mask = MASKS[self.mask](self)
        mask = mask.clone() if self.copied else mask
        self.write(1)
        gate = F.linear(x, self.weight * mask)
        self.write(BETWEEN)
        complement = ~mask if mask.dtype is torch.bool else 1 - mask
        value = F.linear(x, self.weight * complement)
        self.write(3)
        y = F.silu(gate) * value
        self.write(AFTER)
        return y

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}, writes={self.writes}, copied={self.copied}"


def assert_agrees_at_each_call(module: nn.Module, program: ExportedProgram, *example: Tensor) -> None:
    """Compare three calls of the fused program with three calls of the module."""
    module, run = copy.deepcopy(module), fuse_exported(copy.deepcopy(program)).module()
    for _ in range(3):
        torch.testing.assert_close(run(*example), module(*example), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "place"), family(WRITES, [AFTER, BEFORE, BETWEEN]))
def test_a_mask_that_the_model_writes_to_is_not_folded(kind: str, place: int) -> None:
    module, x = WritingModel("stored", (place, "masks", kind), no_grad=False), torch.randn(5, 8)
    before = module.masks.clone()
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    if place == BETWEEN:
        assert_agrees_at_each_call(module, saved_and_loaded(program), x)
    if place == AFTER:
        functional = program.run_decompositions({})
        # The comparison is with the functional program, because decomposing changes what a write does to an alias that
        # no schema declares ("dropout").
        assert_agrees_at_each_call(copy.deepcopy(functional).module(), functional, x)
    module(x)
    assert torch.equal(module.masks[0], before[0]) == (kind == "copy")


@pytest.mark.parametrize(
    "module",
    [
        WritingModel("and", (BETWEEN, "second", "whole")),  # two buffers share memory
        WritingModel("and", (AFTER, "second", "whole")),
        WritingModel("stored", (BEFORE, "masks", "select"), no_grad=False, dtype=torch.int64),
        WritingModel("stored", (BEFORE, "masks", "select"), dtype=torch.float32),
    ],
    ids=repr,
)
def test_other_writes_to_masks(module: nn.Module) -> None:
    x = torch.randn(5, 8)
    assert_agrees_at_each_call(module, export(copy.deepcopy(module), x, grad=True), x)
    assert_agrees_at_each_call(module, saved_and_loaded(export(copy.deepcopy(module), x)), x)


@st.composite
def writing_models(draw: st.DrawFn) -> WritingModel:
    names = st.sampled_from(["masks", "second", "logits", "weight"])
    writes = st.tuples(st.integers(BEFORE, AFTER), names, st.sampled_from(list(WRITES)))
    mask = draw(st.sampled_from(list(MASKS)))
    return WritingModel(mask, *draw(st.lists(writes, min_size=1, max_size=3)), copied=draw(st.booleans()))


@pytest.mark.long
@examples(40)
@given(module=writing_models(), grad=st.booleans(), loaded=st.booleans())
def test_random_writes_are_seen_at_each_call(module: WritingModel, grad: bool, loaded: bool) -> None:
    x = torch.randn(3, 8)
    grad = grad and not loaded  # torch cannot save a body of `no_grad` without results
    program = export(copy.deepcopy(module), x, grad=grad)
    with torch.set_grad_enabled(grad):
        assert_agrees_at_each_call(module, saved_and_loaded(program) if loaded else program, x)


class Annealed(nn.Module):
    """A layer that writes to a parameter at each call: it multiplies its logits or its weight by -0.5."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 6))
        self.logits = nn.Parameter(torch.randn(20, 6))
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        mask = (self.logits > 0).float()
        y = F.silu(x @ (self.weight * mask)) * (x @ (self.weight * (1 - mask)))
        with torch.no_grad():
            getattr(self, self.name).view(-1)[:60].mul_(-0.5)
        return y


@pytest.mark.parametrize("name", ["weight", "logits"])
def test_parameters_that_the_model_writes_to_are_not_folded(name: str) -> None:
    module, x = Annealed(name), torch.randn(5, 20)
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    fused = fuse_exported(program)
    assert operators(fused)[-1] == "mglu.forward.default"
    assert ("packed_masks" in fused.state_dict) == (name == "weight")
    assert "fused_weight" not in fused.state_dict or name == "logits"


# --- Operators that do more than return a function of their inputs ----------------------------------------------------


class Statistics(nn.Module):
    """A layer whose mask is the sign of a running mean. A batch norm in training changes it, and no schema says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("mean", torch.randn(120))
        self.register_buffer("variance", torch.ones(120))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.mean.view(6, 20) > 0
        result = F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask)
        return result.sum() + F.batch_norm(y, self.mean, self.variance, training=True, momentum=0.9).sum()


def test_running_statistics_are_not_folded() -> None:
    module, x, y = Statistics(), torch.randn(5, 20), torch.randn(5, 120) * 3
    assert_agrees_at_each_call(module, export(copy.deepcopy(module), x, y), x, y)


torch.library.define("mglu_tests::count", "(Tensor mask) -> Tensor")
_COUNTS = [0]


@torch.library.impl("mglu_tests::count", "CompositeExplicitAutograd")
def _count(mask: Tensor) -> Tensor:
    """Return something else at each call, which the schema does not tell."""
    _COUNTS[0] += 1
    return mask ^ bool(_COUNTS[0] % 2)


torch.library.register_fake("mglu_tests::count", torch.empty_like)


@pytest.mark.parametrize(
    "module",
    [
        Masked(torch.rand(6, 20) > 0.5, torch.ops.mglu_tests.count),
        Masked(torch.full((6, 20), 0.5), lambda stored: torch.bernoulli(stored) > 0.5),
    ],
    ids=["custom operator", "random mask"],
)
def test_masks_that_differ_from_call_to_call_are_made_at_each_call(module: nn.Module) -> None:
    x = torch.randn(5, 20)
    found: list[list[Tensor]] = []
    for run in (module, fuse_exported(export(module, x), strict=True).module()):
        torch.manual_seed(0)
        _COUNTS[0] = 0
        found.append([run(x) for _ in range(3)])
    torch.testing.assert_close(found[1], found[0])
    assert not torch.allclose(found[0][0], found[0][1])
