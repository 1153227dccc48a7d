"""Exported programs are fused with their masks packed, and packages of them do what the model does."""

from __future__ import annotations

import copy
import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from library_fixtures import inputs, model
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

import mglu_ops
from compile_passes.exported import fuse_exported, layers_of
from compile_passes.fusion import FusionError
from compile_passes.report import FusionReport
from mglu_ops.nn import MGLU, NaiveMGLU
from mglu_ops.packaging.package import read_info

pytest_plugins = ["library_fixtures"]


def export(module: nn.Module, *example: Tensor, grad: bool = False) -> ExportedProgram:
    with torch.set_grad_enabled(grad):
        return torch.export.export(module, example, dynamic_shapes=tuple({0: Dim.AUTO} for _ in example))


def operators(program: ExportedProgram) -> list[str]:
    return [str(node.target) for node in program.graph.nodes if str(node.target).startswith("mglu")]


def saved_and_loaded(program: ExportedProgram) -> ExportedProgram:
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    return torch.export.load(file)


# --- Fusing exported programs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
@pytest.mark.parametrize("cls", [NaiveMGLU, MGLU])
@pytest.mark.parametrize("learnable", [True, False], ids=["learned", "fixed"])
def test_masks_are_packed_and_logits_gone(cls: type, learnable: bool, grad: bool) -> None:
    torch.manual_seed(0)
    layer = cls(45, 24, n_masks=3, learnable_masks=learnable)
    module = nn.Sequential(nn.Linear(20, 45), layer)
    program = export(module, torch.randn(5, 20), grad=grad)
    before = str(program.graph), set(program.state_dict)
    fused = fuse_exported(program, strict=True)
    assert (str(program.graph), set(program.state_dict)) == before, "the given program changed"
    assert operators(fused) == ["mglu.forward.default"]
    assert set(fused.state_dict) == {"0.weight", "0.bias", "1.weight", "1.packed_masks"}
    packed = layer.packed_masks if layer.packed_masks is not None else torch.ops.mglu.pack_masks(layer.mask_logits > 0)
    assert torch.equal(fused.state_dict["1.packed_masks"], packed)
    again = saved_and_loaded(fused)
    for tokens in (2, 5, 64):
        x = torch.randn(tokens, 20)
        expected = module(x)
        for result in (fused, again, fused.run_decompositions()):
            torch.testing.assert_close(result.module()(x), expected)


def test_routed_layer() -> None:
    torch.manual_seed(0)
    module = NaiveMGLU(20, 8, n_masks=4, top_k=2)
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    x = torch.randn(9, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


class Masked(nn.Module):
    """A layer whose mask is what `mask` makes of a stored tensor."""

    def __init__(self, stored: Tensor, mask: Callable[[Tensor], Tensor], *, parameter: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(stored.shape[-2:]))
        if parameter:
            self.stored: Tensor = nn.Parameter(stored)
        else:
            self.register_buffer("stored", stored)
        self.mask = mask

    def forward(self, x: Tensor) -> Tensor:
        m = self.mask(self.stored)
        return F.silu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * (1 - m))


BINARY = {
    "buffer": Masked((torch.randn(6, 20) > 0).float(), lambda stored: stored),
    "parameter": Masked((torch.randn(6, 20) > 0).float(), lambda stored: stored, parameter=True),
    "computed": Masked(torch.randn(6, 20), lambda stored: torch.round(torch.sigmoid(stored))),
    "integers": Masked(torch.randint(0, 2, (6, 20)), lambda stored: stored.float()),
    "all ones": Masked(torch.ones(6, 20), lambda stored: stored),
}


@pytest.mark.parametrize("kind", BINARY)
def test_real_masks_are_proved_by_their_values(kind: str) -> None:
    module = BINARY[kind]
    report = FusionReport()
    fused = fuse_exported(export(module, torch.randn(5, 20)), report=report, strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    assert [(site.route, site.packed) for site in report.fused] == [("forward", "when exported")]
    x = torch.randn(9, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


def test_a_weight_of_zeros_is_no_mask() -> None:
    module = BINARY["computed"]
    try:
        weight = module.weight.data.clone()
        module.weight.data.zero_()
        assert operators(fuse_exported(export(module, torch.randn(5, 20)), strict=True)) == ["mglu.forward.default"]
    finally:
        module.weight.data.copy_(weight)


def test_masks_of_other_values_are_left_as_they_are() -> None:
    stored = (torch.randn(6, 20) > 0).float()
    stored[3, 7] = 0.5
    module = Masked(stored, lambda stored: stored)
    program, report = export(module, torch.randn(5, 20)), FusionReport()
    fused = fuse_exported(program, report=report)
    assert operators(fused) == []
    assert [bool(site.reason) for site in report.missed] == [True]
    x = torch.randn(9, 20)
    assert torch.equal(fused.module()(x), program.module()(x))
    with pytest.raises(FusionError, match="nothing proves"):
        fuse_exported(program, strict=True)
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        fuse_exported(program, assume_binary=True)


def test_strict_wants_a_layer() -> None:
    with pytest.raises(FusionError, match="no MGLU layer"):
        fuse_exported(export(nn.Linear(4, 4), torch.randn(3, 4)), strict=True)


class Counting(nn.Module):
    """Its logits change at each call."""

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


# --- Programs that write to their own tensors -----------------------------------------------------------------------

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
    """A layer one of whose two masks is the other one at each call.

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
    """Three calls of the fused program give what three calls of the module give, which are not all the same."""
    results = agreeing_results(copy.deepcopy(module), program, *example)
    assert any(not torch.allclose(result, results[0]) for result in results), "nothing was written"


def agreeing_results(module: nn.Module, program: ExportedProgram, *example: Tensor) -> list[Tensor]:
    """What three calls of a module give, which the fused program gives as well."""
    run = fuse_exported(copy.deepcopy(program)).module()
    results = []
    for _ in range(3):
        results.append(module(*example))
        torch.testing.assert_close(run(*example), results[-1], rtol=1e-4, atol=1e-4)
    return results


@pytest.mark.parametrize("when", ["before", "between", "after"])
@pytest.mark.parametrize("kind", WRITES)
def test_a_mask_that_the_model_writes_to_is_no_constant(kind: str, when: str) -> None:
    module, x = Writing(WRITES[kind], when), torch.randn(5, 20)
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    if when == "between" and kind != "no_grad":  # torch cannot save a body without results
        assert_agrees_at_each_call(module, saved_and_loaded(program), x)
    if when == "after":
        functional = program.run_decompositions({})
        # Not with the model: of a write to an alias that no schema declares ("dropout") torch makes another program.
        agreeing_results(copy.deepcopy(functional).module(), functional, x)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32])
@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_a_mask_of_any_dtype_that_is_written_to_is_no_constant(dtype: torch.dtype, grad: bool) -> None:
    module, x = Writing(WRITES["select"], "before", dtype), torch.randn(5, 20)
    assert_agrees_at_each_call(module, export(copy.deepcopy(module), x, grad=grad), x)


class TwoNames(nn.Module):
    """A mask with a second name, a buffer that shares its memory, through which it is written to."""

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
    """Parameters that the model writes to: its logits change sign, or its weight is halved, at each call."""

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
def test_parameters_that_the_model_writes_to_are_no_constants(name: str) -> None:
    module, x = Annealed(name), torch.randn(5, 20)
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    fused = fuse_exported(program)
    assert operators(fused)[-1] == "mglu.forward.default"
    assert ("packed_masks" in fused.state_dict) == (name == "weight")
    assert "fused_weight" not in fused.state_dict or name == "logits"


class Statistics(nn.Module):
    """Masks where a feature's running mean is positive: a batch norm in training changes it, and no schema says so."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("mean", torch.randn(120))
        self.register_buffer("variance", torch.ones(120))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mask = self.mean.view(6, 20) > 0
        result = F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask)
        return result.sum() + F.batch_norm(y, self.mean, self.variance, training=True, momentum=0.9).sum()


def test_running_statistics_are_no_constants() -> None:
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
    """Its mask is made by an operator that does something else at each call, as only its author knows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 20))
        self.register_buffer("mask", torch.rand(6, 20) > 0.5)

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.ops.mglu_tests.count(self.mask)
        return F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask)


def test_operators_of_others_are_called_each_time() -> None:
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
    """Masks that are drawn anew at each call from probabilities that are constant."""

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


def test_a_long_chain_of_constants_is_evaluated() -> None:
    """Longer than Python's stack is deep."""

    def mask(stored: Tensor) -> Tensor:
        for _ in range(1200):
            stored = stored + 1
        return stored > 1200

    module, x = Masked(torch.randn(6, 20), lambda stored: mask(stored).float()), torch.randn(5, 20)
    fused = fuse_exported(export(module, x), strict=True)
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    torch.testing.assert_close(fused.module()(x), module(x))


class LowRank(nn.Module):
    """Its logits are a product of two matrices, whose signs a product in bfloat16 would change."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(60, 200))
        self.a, self.b = nn.Parameter(torch.randn(60, 64)), nn.Parameter(torch.randn(64, 200))

    def forward(self, x: Tensor) -> Tensor:
        mask = self.a @ self.b > 0
        return F.silu(F.linear(x, self.weight * mask)) * F.linear(x, self.weight * ~mask)


def test_autocast_around_the_pass_does_not_change_constants() -> None:
    module, x = LowRank(), torch.randn(5, 200)
    program = export(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        fused = fuse_exported(program, strict=True)
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    torch.testing.assert_close(fused.module()(x), module(x), rtol=1e-4, atol=1e-3)


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
    """One layer, with writes through views in some of five places: around, and between the steps of the layer.

    `writes`: the place, the tensor, and the view of it whose values are negated, each. `copied`: the mask is cloned.
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


@settings(max_examples=40)
@given(module=writing_models(), grad=st.booleans(), loaded=st.booleans())
def test_any_writes_are_seen_at_each_call(module: WritingModel, grad: bool, loaded: bool) -> None:
    x = torch.randn(3, 8)
    grad = grad and not loaded  # torch cannot save a body of `no_grad` without results
    program = export(copy.deepcopy(module), x, grad=grad)
    program = saved_and_loaded(program) if loaded else program
    eager, run = copy.deepcopy(module), fuse_exported(program).module()
    for _ in range(3):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(run(x), eager(x), rtol=1e-4, atol=1e-4)


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = NaiveMGLU(12, 12, n_masks=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x))


def test_shared_masks_are_packed_once() -> None:
    module = Shared()
    fused = fuse_exported(export(module, torch.randn(5, 12)), strict=True)
    assert len(layers_of(fused.graph)) == 2
    assert [name for name in fused.state_dict if "packed" in name] == ["layer.packed_masks"]
    x = torch.randn(3, 12)
    torch.testing.assert_close(fused.module()(x), module(x))


class Inference(nn.Module):
    """It turns gradients off by itself, which an export with grad mode on records."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = NaiveMGLU(12, 12, n_masks=2)
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.layer(x) + x
        return self.head(y)


def test_layers_under_no_grad_are_found() -> None:
    module = Inference()
    program = export(module, torch.randn(5, 12), grad=True)
    assert "wrap_with_set_grad_enabled" in str(program.graph)
    fused = fuse_exported(program, strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert "layer.packed_masks" in fused.state_dict
    x = torch.randn(3, 12)
    torch.testing.assert_close(saved_and_loaded(fused).module()(x), module(x))


class Transposed(nn.Module):
    """The weight as `[in_features, out_features]`; `tied`: read by something else too."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(20, 6))
        self.mask_logits = nn.Parameter(torch.randn(20, 6))
        self.tied = tied

    def forward(self, x: Tensor) -> Tensor:
        m = (self.mask_logits > 0).to(x.dtype)
        y = F.silu(x @ (self.weight * m)) * (x @ (self.weight * (1 - m)))
        return y @ self.weight.t() if self.tied else y


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_stored_once(tied: bool) -> None:
    module = Transposed(tied)
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert set(fused.state_dict) == {"packed_masks", "weight" if tied else "fused_weight"}
    x = torch.randn(3, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


# --- Packages -------------------------------------------------------------------------------------------------------

CHECKS = pytest.mark.slow


@CHECKS
@pytest.mark.parametrize("package", ["operator", "composite"])
def test_package_does_what_the_model_does(packages: Path, package: str) -> None:
    loaded, layers = mglu_ops.load(packages / f"{package}.pt2"), model()
    for tokens in (1, 2, 7, 64):
        torch.testing.assert_close(loaded(inputs(tokens)), layers(inputs(tokens)).detach())


@CHECKS
@pytest.mark.parametrize("backend", ["cpu", "composite"])
def test_a_package_sees_what_its_model_writes(tmp_path: Path, backend: str) -> None:
    module, x = Writing(WRITES["select"], "after"), torch.randn(5, 20)
    mglu_ops.export(copy.deepcopy(module), (x,), tmp_path / "model.pt2", backend=backend)
    loaded = mglu_ops.load(tmp_path / "model.pt2")
    results = [module(x).detach() for _ in range(3)]
    for result in results:
        torch.testing.assert_close(loaded(x), result, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(results[0], results[1])


@CHECKS
def test_package_holds_packed_masks_and_no_logits(packages: Path) -> None:
    path = packages / "operator.pt2"
    loaded = mglu_ops.load(path)
    names = loaded._runner.get_constant_fqns()
    assert {"0.packed_masks", "2.packed_masks", "0.weight"} <= set(names)
    assert not any("logits" in name for name in names)
    layers = model()
    logits = sum(layer.mask_logits.numel() * 4 for layer in (layers[0], layers[2]))
    with zipfile.ZipFile(path) as archive:
        (code,) = [archive.read(name) for name in archive.namelist() if name.endswith(".so")]
    bits = layers[0].mask_logits > 0
    packed = torch.ops.mglu.pack_masks(bits).numpy().tobytes()
    assert packed in code
    assert layers[0].weight.detach().numpy().tobytes() in code
    assert layers[0].mask_logits.detach().numpy().tobytes() not in code
    assert len(packed) * 32 == layers[0].mask_logits.numel() * 4
    assert logits > 0


@CHECKS
def test_description(packages: Path) -> None:
    info = read_info(packages / "operator.pt2")
    assert (info.torch, info.device, info.backend, info.calls) == (torch.__version__, "cpu", "cpu", "operator")
    assert [(layer.n_masks, layer.out_features, layer.in_features) for layer in info.layers] == [
        (4, 96, 64),
        (2, 40, 64),
    ]
    assert [layer.route_dtype for layer in info.layers] == [None, "float32"]
    (tensor,) = info.inputs
    assert tensor.dtype == "float32"
    (low, high), features = tensor.shape
    assert low <= 1
    assert high is None
    assert features == 64
    assert read_info(packages / "shim.pt2").calls == "shim"
    assert read_info(packages / "composite.pt2").calls == "nothing"


@CHECKS
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda x: (x.double(),), "got float64"),
        (lambda x: (x[:, :63],), "float32 \\[3, 63\\]"),
        (lambda x: (x[0],), "float32 \\[64\\]"),
        (lambda x: (x, x), "got 2 tensors, must be 1"),
        (lambda x: (x.to("meta"),), "on meta, must be .* on cpu"),
    ],
)
def test_wrong_inputs_are_refused(packages: Path, wrong: Callable[[Tensor], tuple[Tensor, ...]], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        mglu_ops.load(packages / "operator.pt2")(*wrong(inputs(3)))


@CHECKS
def test_two_packages_share_their_weights(tmp_path: Path) -> None:
    """The second is of a program that was exported with grad mode on, and takes three sizes that vary."""
    layers = model()
    file = tmp_path / "weights.pt"
    mglu_ops.export(layers, (inputs(3),), tmp_path / "one.pt2", dynamic_tokens=False, weights=file)
    program = torch.export.export(layers, (torch.randn(2, 3, 64),), dynamic_shapes=({0: Dim.AUTO, 1: Dim.AUTO},))
    info = mglu_ops.export(program, (), tmp_path / "two.pt2", weights=file)
    assert not info.embeds_weights
    weights = mglu_ops.load_weights(file)
    assert set(weights) == {
        "0.weight",
        "0.packed_masks",
        "1.weight",
        "1.bias",
        "2.weight",
        "2.packed_masks",
        "2.router.weight",
    }
    one, two = (mglu_ops.load(tmp_path / name, weights=weights) for name in ("one.pt2", "two.pt2"))
    x, y = inputs(3), torch.randn(4, 5, 64)
    torch.testing.assert_close(one(x), layers(x).detach())
    torch.testing.assert_close(two(y), layers(y).detach())
    with torch.no_grad():
        for tensor in (weights["2.weight"], layers[2].weight):
            tensor.mul_(-3)
    torch.testing.assert_close(one(x), layers(x).detach(), msg="the first has a copy of its own")
    torch.testing.assert_close(two(y), layers(y).detach(), msg="the second has a copy of its own")
    with pytest.raises(mglu_ops.packaging.package.PackageError, match=r"lack 0\.packed_masks"):
        mglu_ops.load(tmp_path / "one.pt2", weights={k: v for k, v in weights.items() if k != "0.packed_masks"})
    with pytest.raises(mglu_ops.packaging.package.PackageError, match="pass weights"):
        mglu_ops.load(tmp_path / "one.pt2")
    with pytest.raises(ValueError, match=r"holds another 2\.weight"):
        mglu_ops.export(layers, (inputs(3),), tmp_path / "three.pt2", weights=file)
    with pytest.raises(ValueError, match=r"must be input: float32 \[3, 64\]"):
        one(inputs(4))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": F.silu}, "model: got function"),
        ({"path": "model.zip"}, "must end in .pt2"),
        ({"path": "no/such/folder/model.pt2"}, "is not a folder"),
        ({"backend": "tpu"}, "backend: got 'tpu'"),
        ({"backend": "triton"}, "is for GPUs"),
        ({"backend": "cuda"}, "the model is on cpu"),
        ({"backend": "composite", "shim": True}, "no operator to call"),
        ({"multi_arch": True}, "on GPUs of compute capability 8"),
        ({"model": nn.Linear(64, 3)}, "no MGLU layer"),
    ],
)
def test_bad_arguments(tmp_path: Path, options: dict[str, object], words: str) -> None:
    arguments = {"model": model(), "example_inputs": (inputs(3),), "path": "model.pt2", **options}
    arguments["path"] = tmp_path / str(arguments["path"])
    with pytest.raises(ValueError, match=words):
        mglu_ops.export(**arguments)
    assert not list(tmp_path.iterdir())


def test_sizes_that_cannot_vary_are_said(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = MGLU(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) + torch.ones(3, 8)

    with pytest.raises(ValueError, match="fixes every size"):
        mglu_ops.export(Fixed(), (torch.randn(3, 8),), tmp_path / "model.pt2")


def test_a_program_of_one_token_is_refused(tmp_path: Path) -> None:
    """For torch would take it, and compile what is right for one token alone."""
    import torch.fx.experimental._config as symbolic

    with torch.no_grad(), symbolic.patch(backed_size_oblivious=True):
        program = torch.export.export(MGLU(8, 8), (torch.randn(1, 8),), dynamic_shapes=({0: Dim.DYNAMIC},))
    with pytest.raises(ValueError, match="example of size 1"):
        mglu_ops.export(program, (), tmp_path / "model.pt2")


class Weighted(nn.Module):
    """Terms with numbers, learned scalars or a bias around them, so that the rewrite adds operations of its own."""

    def __init__(self, total: Callable[[list[Tensor], Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight, self.logits = nn.Parameter(torch.randn(6, 20)), nn.Parameter(torch.randn(3, 6, 20))
        self.a, self.b = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(6))
        self.total = total

    def forward(self, x: Tensor) -> Tensor:
        masks = (self.logits > 0).to(x.dtype)
        terms = [F.silu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * (1 - m)) for m in masks]
        return self.total(terms, self.a, self.b)


TOTALS: dict[str, Callable[[list[Tensor], Tensor, Tensor], Tensor]] = {
    "mean": lambda terms, a, b: torch.stack(terms).mean(0),
    "numbers": lambda terms, a, b: 0.3 * terms[0] + 0.7 * terms[1] - terms[2],
    "scalars": lambda terms, a, b: sum(a[i] * term for i, term in enumerate(terms)),
    "bias first": lambda terms, a, b: b + terms[0] + terms[1] + terms[2],
}


@pytest.mark.parametrize("total", TOTALS)
def test_what_the_rewrite_adds_is_exported(total: str) -> None:
    """The verifier of an exported program takes ATen operators alone, and so does saving."""
    module = Weighted(TOTALS[total])
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert operators(fused).count("mglu.forward.default") == 1
    x = torch.randn(3, 20)
    torch.testing.assert_close(saved_and_loaded(fused).module()(x), module(x))
