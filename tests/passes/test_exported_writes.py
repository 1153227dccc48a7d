"""Exported programs that write to their own tensors: what a program changes is not taken for a constant."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from exported import export, operators, saved_and_loaded
from families import family
from hypothesis import given, settings
from hypothesis import strategies as st
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


torch.library.define("mglu_tests::flip_", "(Tensor(a!) mask) -> ()")


@torch.library.impl("mglu_tests::flip_", "CompositeExplicitAutograd")
def _flip_(mask: Tensor) -> None:
    mask.copy_(1 - mask.int())


def _flip_first(masks: Tensor) -> None:
    masks[0].copy_(1 - masks[0].int())


def _flip_in_body(module: Writing) -> None:
    with torch.no_grad():
        _flip_first(module.masks)


def _flip_by_setitem(module: Writing) -> None:
    module.masks[0] = 1 - module.masks[0].int()


def _flip_by_index(module: Writing) -> None:
    module.masks[torch.tensor([0])] = (1 - module.masks[:1].int()).to(module.masks.dtype)


def _flip_by_out(module: Writing) -> None:
    torch.logical_not(module.masks[0], out=module.masks[0])


def _flip_in_condition(module: Writing) -> None:
    first = torch.cond(module.masks.sum() >= 0, lambda m: m.clone(), lambda m: m.clone(), (module.masks,))
    module.masks.copy_(torch.cat([~first[:1], first[1:]]))


WRITES: dict[str, Callable[[Writing], object]] = {
    "select": lambda module: _flip_first(module.masks),
    "view": lambda module: module.masks.view(2, -1)[0].copy_(1 - module.masks.view(2, -1)[0].int()),
    "reshape": lambda module: _flip_first(module.masks.reshape(2, -1)),
    "detach": lambda module: _flip_first(module.masks.detach()),
    "transpose": lambda module: _flip_first(module.masks.mT),
    "chunk": lambda module: _flip_first(module.masks.chunk(2)[0]),
    "split": lambda module: _flip_first(torch.split(module.masks, 1)[0]),
    "unbind": lambda module: _flip_first(module.masks.unbind(0)[0][None]),
    "contiguous": lambda module: _flip_first(module.masks.contiguous()),
    "to": lambda module: _flip_first(module.masks.to(module.masks.dtype)),
    "dropout": lambda module: _flip_first(F.dropout(module.masks, 0.5, training=False)),
    "einsum": lambda module: _flip_first(torch.einsum("imn->inm", module.masks.view(torch.uint8))),
    "type_as": lambda module: _flip_first(module.masks.type_as(module.masks)),
    "broadcast": lambda module: _flip_first(torch.broadcast_tensors(module.masks, module.masks[0])[0]),
    "logical_not_": lambda module: module.masks[0].logical_not_(),
    "setitem": _flip_by_setitem,
    "index_put": _flip_by_index,
    "out": _flip_by_out,
    "custom operator": lambda module: torch.ops.mglu_tests.flip_(module.masks[0]),
    "no_grad": _flip_in_body,
    "cond": _flip_in_condition,
}


class Writing(nn.Module):
    """A layer with two masks, of which the first is negated at each call.

    `when`: the write comes "before" or "after" the layer, or "between" its two products.
    """

    def __init__(self, write: Callable[[Writing], object], when: str, dtype: torch.dtype = torch.bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("masks", torch.randint(0, 2, (2, 6, 20)).to(dtype))
        self.write, self.when = write, when

    def forward(self, x: Tensor) -> Tensor:
        if self.when == "before":
            self.write(self)
        result = x.new_zeros(())
        for i in range(2):
            m = self.masks[i]
            gate = F.silu(F.linear(x, self.weight * m))
            if i == 0 and self.when == "between":
                self.write(self)
            result = result + gate * F.linear(x, self.weight * (1 - m.int()))
        if self.when == "after":
            self.write(self)
        return result


def assert_agrees_at_each_call(module: nn.Module, program: ExportedProgram, *example: Tensor) -> None:
    """Compare three calls of the fused program with three calls of the module, whose results must not all be equal."""
    results = agreeing_results(copy.deepcopy(module), program, *example)
    assert any(not torch.allclose(result, results[0]) for result in results), "nothing was written"


def agreeing_results(module: nn.Module, program: ExportedProgram, *example: Tensor) -> list[Tensor]:
    """Compare three calls of the fused program with three calls of the module, and return the results."""
    run = fuse_exported(copy.deepcopy(program)).module()
    results = []
    for _ in range(3):
        results.append(module(*example))
        torch.testing.assert_close(run(*example), results[-1], rtol=1e-4, atol=1e-4)
    return results


@pytest.mark.parametrize(("kind", "when"), family(WRITES, ["before", "between", "after"]))
def test_a_mask_that_the_model_writes_to_is_not_folded(kind: str, when: str) -> None:
    module, x = Writing(WRITES[kind], when), torch.randn(5, 20)
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    if when == "between" and kind != "no_grad":  # torch cannot save a body without results
        assert_agrees_at_each_call(module, saved_and_loaded(program), x)
    if when == "after":
        functional = program.run_decompositions({})
        # The comparison is with the functional program, because decomposing changes what a write does to an alias that
        # no schema declares ("dropout").
        agreeing_results(copy.deepcopy(functional).module(), functional, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_mask_of_any_dtype_that_is_written_to_is_not_folded(dtype: torch.dtype, grad: bool) -> None:
    module, x = Writing(WRITES["select"], "before", dtype), torch.randn(5, 20)
    assert_agrees_at_each_call(module, export(copy.deepcopy(module), x, grad=grad), x)


class TwoNames(nn.Module):
    """A layer that writes to its mask through a second buffer, which shares its memory."""

    def __init__(self, when: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("masks", torch.rand(2, 6, 20) > 0.5)
        self.register_buffer("second", self.masks[1])
        self.when = when

    def forward(self, x: Tensor) -> Tensor:
        mask = self.masks[1]
        gate = F.linear(x, self.weight * mask)
        if self.when == "between":
            self.second.logical_not_()
        y = F.silu(gate) * F.linear(x, self.weight * ~mask)
        if self.when == "after":
            self.second.logical_not_()
        return y


@pytest.mark.parametrize("when", ["between", "after"])
def test_buffers_that_share_memory_are_written_to_together(when: str) -> None:
    module, x = TwoNames(when), torch.randn(5, 20)
    program = export(copy.deepcopy(module), x)
    assert_agrees_at_each_call(module, program, x)
    assert_agrees_at_each_call(module, saved_and_loaded(program), x)


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
    _COUNTS[0] += 1
    return mask ^ bool(_COUNTS[0] % 2)


torch.library.register_fake("mglu_tests::count", torch.empty_like)


class Counted(nn.Module):
    """A layer whose mask comes from an operator that returns something else at each call; its schema does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("mask", torch.rand(6, 20) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ops.mglu_tests.count(self.mask)
        return F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask)


def test_custom_operators_run_at_each_call() -> None:
    module, x = Counted(), torch.randn(5, 20)
    fused = fuse_exported(export(module, x), strict=True)
    run = fused.module()
    _COUNTS[0] = 0
    wanted = [module(x) for _ in range(3)]
    _COUNTS[0] = 0
    for result in wanted:
        torch.testing.assert_close(run(x), result)
    assert not torch.allclose(wanted[0], wanted[1])


class Noisy(nn.Module):
    """A layer whose mask is drawn at each call, from constant probabilities."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("probabilities", torch.full((6, 20), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.bernoulli(self.probabilities) > 0.5
        return F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask)


def test_random_masks_are_drawn_at_each_call() -> None:
    module, x = Noisy(), torch.randn(5, 20)
    run = fuse_exported(export(module, x), strict=True).module()
    torch.manual_seed(0)
    wanted = [module(x) for _ in range(3)]
    torch.manual_seed(0)
    for result in wanted:
        torch.testing.assert_close(run(x), result)


@st.composite
def writing_models(draw: st.DrawFn) -> WritingModel:
    names = st.sampled_from(["masks", "second", "logits", "weight"])
    writes = st.tuples(st.integers(0, 4), names, st.sampled_from(list(VIEWS)))
    return WritingModel(
        mask=draw(st.sampled_from(list(MASKS))),
        copied=draw(st.booleans()),
        writes=tuple(draw(st.lists(writes, min_size=1, max_size=3))),
        seed=draw(st.integers(0, 2**16)),
    )


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "whole": lambda tensor: tensor,
    "select": lambda tensor: tensor[0],
    "slice": lambda tensor: tensor[..., 1:7:2],
    "flat": lambda tensor: tensor.view(-1)[3:],
    "transpose": lambda tensor: tensor.mT,
    "detach": lambda tensor: tensor.detach()[-1:],
    "chunk": lambda tensor: tensor.chunk(2, -1)[1],
    "unbind": lambda tensor: tensor.unbind(0)[0],
    "copy": lambda tensor: tensor.clone(),
    "diagonal": lambda tensor: tensor.diagonal(0, -2, -1),
}

MASKS: dict[str, Callable[[WritingModel], Tensor]] = {
    "bool": lambda model: model.masks[0],
    "second name": lambda model: model.second,
    "float": lambda model: model.masks[0].float(),
    "logits": lambda model: model.logits > 0,
    "alias": lambda model: model.masks.detach().view(2, 6, 8)[0],
    "view of logits": lambda model: model.logits.t().contiguous().t() > 0,
    "and": lambda model: model.masks[1] & (model.logits.detach() > 0),
}


class WritingModel(nn.Module):
    """A layer with writes through views at some of five places: before, after and between its steps.

    `writes` holds for each write the place, the tensor, and the view whose values are negated. If `copied`, the mask is
    cloned.
    """

    def __init__(self, mask: str, copied: bool, writes: tuple[tuple[int, str, str], ...], seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(6, 8))
        self.logits = nn.Parameter(torch.randn(6, 8))
        self.register_buffer("masks", torch.rand(2, 6, 8) > 0.5)
        self.register_buffer("second", self.masks[1])
        self.mask, self.copied, self.writes = mask, copied, writes

    def write(self, place: int) -> None:
        for where, name, view in self.writes:
            if where == place:
                with torch.no_grad():
                    part = VIEWS[view](getattr(self, name))
                    part.copy_(~part if part.dtype is torch.bool else -part)

    def forward(self, x: Tensor) -> Tensor:
        self.write(0)
        mask = MASKS[self.mask](self)
        mask = mask.clone() if self.copied else mask
        self.write(1)
        gate = F.linear(x, self.weight * mask)
        self.write(2)
        complement = ~mask if mask.dtype is torch.bool else 1 - mask
        value = F.linear(x, self.weight * complement)
        self.write(3)
        y = F.silu(gate) * value
        self.write(4)
        return y

    def extra_repr(self) -> str:
        return f"mask={self.mask!r}, copied={self.copied}, writes={self.writes}"


@pytest.mark.long
@settings(max_examples=40)
@given(module=writing_models(), grad=st.booleans(), loaded=st.booleans())
def test_random_writes_are_seen_at_each_call(module: WritingModel, grad: bool, loaded: bool) -> None:
    x = torch.randn(3, 8)
    grad = grad and not loaded  # torch cannot save a body of `no_grad` without results
    program = export(copy.deepcopy(module), x, grad=grad)
    program = saved_and_loaded(program) if loaded else program
    eager, run = copy.deepcopy(module), fuse_exported(program).module()
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(run(x), eager(x), rtol=1e-4, atol=1e-4)
