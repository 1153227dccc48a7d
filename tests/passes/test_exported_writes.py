"""Exported programs that write to their own tensors: a tensor that the program changes is not a constant."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.export import ExportedProgram

from compile_passes.exported import fuse_exported
from tests.support.families import family
from tests.support.layers import examples
from tests.support.programs.compiled import Masked, OfSource, export, operators, parameter, saved_and_loaded


def test_masks_that_change_are_packed_at_each_call() -> None:
    source = "l.neg_(); torch.ops.mglu.forward_ste(x, w, l)[0]"
    module, x = OfSource(source, w=parameter(6, 20), l=torch.randn(2, 6, 20)), torch.randn(5, 20)
    fused = fuse_exported(export(module, x))
    assert operators(fused) == ["mglu.pack_logits.default", "mglu.forward.default"]
    run = fused.module()
    first, second = run(x), run(x)
    assert not torch.allclose(first, second)
    torch.testing.assert_close(run(x), first)


# --- Writes to parameters and buffers ---------------------------------------------------------------------------------


def flipped(tensor: Tensor) -> Tensor:
    return ~tensor if tensor.dtype is torch.bool else 1 - tensor


def flip(tensor: Tensor) -> None:
    tensor.copy_(flipped(tensor))


torch.library.define("mglu_tests::flip_", "(Tensor(a!) mask) -> ()")
torch.library.impl("mglu_tests::flip_", "CompositeExplicitAutograd", flip)

# Expressions of a tensor t. Some are a view or a copy, depending on the strides of t; schemas do not tell which.
VIEWS = (
    "{t}",
    "{t}[0]",
    "{t}[..., 1:7:2]",
    "{t}.view(-1)[3:]",
    "{t}.reshape(-1)[3:]",
    "{t}.mT",
    "{t}.detach()[:1]",
    "{t}.chunk(2, -1)[1]",
    "{t}.unbind(0)[0]",
    "{t}.diagonal(0, -2, -1)",
    "{t}.contiguous()",
    "{t}.to({t}.dtype)",
    "dropout({t}, 0.5, training=False)",
    "{t}.type_as({t})",
    "torch.broadcast_tensors({t}, {t}[0])[0]",
)
TO_A_COPY = "flip({t}.clone())"
WRITES = (
    TO_A_COPY,
    *(f"flip({view})" for view in VIEWS),
    "{t}[0] = flipped({t}[0])",
    "{t}[torch.tensor([0])] = flipped({t}[:1])",
    "(torch.logical_not if {t}.dtype is torch.bool else torch.neg)({t}[0], out={t}[0])",
    "torch.ops.mglu_tests.flip_({t}[0])",
    "{t}.copy_(flipped(torch.cond({t}.sum() >= 0, lambda m: m.clone(), lambda m: m.clone(), ({t},))))",
)
MASKS = (
    "masks[0]",
    "second",
    "masks[0].float()",
    "logits > 0",
    "masks.detach().view(2, 6, 8)[0]",
    "logits.t().contiguous().t() > 0",
    "(masks[1] != 0) & (logits.detach() > 0)",
)
BEFORE, BETWEEN, AFTER = 0, 2, 4


def writing_model(mask: str, *writes: tuple[int, str, str], copied: bool = False, no_grad: bool = True) -> OfSource:
    """A layer with writes at some of five positions: before, after and between its steps.

    `writes` has the position, the tensor and one of `WRITES` for each write. If `copied`, the mask is cloned.
    """
    torch.manual_seed(0)
    masks = torch.rand(2, 6, 8) > 0.5
    tensors = {"weight": parameter(6, 8), "logits": parameter(6, 8), "masks": masks}
    if "second" in (mask, *(name for _, name, _ in writes)):
        tensors["second"] = masks[1]  # only if used, because torch cannot decompose writes to shared buffers
    steps = [f"m = ({mask}){'.clone()' if copied else ''}", "g = linear(x, weight * m)"]
    steps += ["v = linear(x, weight * flipped(m))", "y = silu(g) * v", "y"]
    for place, name, write in sorted(writes, reverse=True):
        steps.insert(place, "with torch.no_grad(): " * no_grad + write.format(t=name))
    return OfSource("; ".join(steps), {"flip": flip, "flipped": flipped}, **tensors)


def assert_agrees_at_each_call(module: nn.Module, program: ExportedProgram, *example: Tensor) -> None:
    """Compare three calls of the fused program with three calls of the module."""
    module, run = copy.deepcopy(module), fuse_exported(copy.deepcopy(program)).module()
    for _ in range(3):
        torch.testing.assert_close(run(*example), module(*example), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("kind", "place"), family(WRITES, [AFTER, BEFORE, BETWEEN], one_in=8))
def test_a_mask_that_the_model_writes_to_is_not_folded(kind: str, place: int) -> None:
    module, x = writing_model("masks[0]", (place, "masks", kind), no_grad=False), torch.randn(5, 8)
    before = module.masks.clone()
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    if place == BETWEEN:
        assert_agrees_at_each_call(module, saved_and_loaded(program), x)
    if place == AFTER:
        functional = program.run_decompositions({})
        # Compare with the functional program, because decomposing changes the effect of a write to an alias that no
        # schema declares ("dropout").
        assert_agrees_at_each_call(copy.deepcopy(functional).module(), functional, x)
    module(x)
    assert torch.equal(module.masks[0], before[0]) == (kind == TO_A_COPY)


@st.composite
def writing_models(draw: st.DrawFn) -> OfSource:
    names = st.sampled_from(["masks", "second", "logits", "weight"])
    writes = st.tuples(st.integers(BEFORE, AFTER), names, st.sampled_from(WRITES))
    mask = draw(st.sampled_from(MASKS))
    return writing_model(mask, *draw(st.lists(writes, min_size=1, max_size=3)), copied=draw(st.booleans()))


@pytest.mark.long
@examples(40)
@given(module=writing_models(), grad=st.booleans(), loaded=st.booleans())
def test_random_writes_are_seen_at_each_call(module: OfSource, grad: bool, loaded: bool) -> None:
    x = torch.randn(3, 8)
    grad = grad and not loaded  # torch cannot save a body of `no_grad` that has no results
    program = export(copy.deepcopy(module), x, grad=grad)
    with torch.set_grad_enabled(grad):
        assert_agrees_at_each_call(module, saved_and_loaded(program) if loaded else program, x)


@pytest.mark.parametrize("name", ["weight", "logits"])
def test_parameters_that_the_model_writes_to_are_not_folded(name: str) -> None:
    source = "m = (logits > 0).float(); y = term(x @ (weight * m), x @ (weight * (1 - m))); "
    source += f"with torch.no_grad(): {name}.view(-1)[:60].mul_(-0.5); y"
    module, x = OfSource(source, weight=parameter(20, 6), logits=parameter(20, 6)), torch.randn(5, 20)
    program = export(copy.deepcopy(module), x, grad=True)
    assert_agrees_at_each_call(module, program, x)
    fused = fuse_exported(program)
    assert operators(fused)[-1] == "mglu.forward.default"
    assert ("packed_masks" in fused.state_dict) == (name == "weight")
    assert "fused_weight" not in fused.state_dict or name == "logits"


# --- Operators with side effects --------------------------------------------------------------------------------------


def test_running_statistics_are_not_folded() -> None:
    """The mask is the sign of a running mean, which a batch norm in training changes. No schema declares this write."""
    source = "x, y = x[:, :20], x[:, 20:]; m = mean.view(6, 20) > 0; z = gated(x, w, m, ~m); "
    source += "z.sum() + F.batch_norm(y, mean, variance, training=True, momentum=0.9).sum()"
    module, x = (
        OfSource(source, w=parameter(6, 20), mean=torch.randn(120), variance=torch.ones(120)),
        torch.randn(5, 140),
    )
    assert_agrees_at_each_call(module, export(copy.deepcopy(module), x), x)


torch.library.define("mglu_tests::count", "(Tensor mask) -> Tensor")
_COUNTS = [0]


@torch.library.impl("mglu_tests::count", "CompositeExplicitAutograd")
def _count(mask: Tensor) -> Tensor:
    """Return a different value at each call, which the schema does not declare."""
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
