"""Exported programs are fused with packed masks, and compute what the model computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from compile_passes.exported import fuse_exported, layers_of
from compile_passes.fusion import FusionError
from compile_passes.report import FusionReport
from mglu_ops.nn import MGLU, NaiveMGLU
from tests.support.programs.compiled import Masked, OfSource, export, operators, parameter, saved_and_loaded


@pytest.mark.parametrize(
    ("cls", "learnable", "grad"),
    [(NaiveMGLU, True, True), (NaiveMGLU, False, False), (MGLU, True, False), (MGLU, False, True)],
)
def test_masks_are_packed_and_logits_removed(cls: type, learnable: bool, grad: bool) -> None:
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
    found = [program.module() for program in (fused, saved_and_loaded(fused), fused.run_decompositions())]
    for tokens in (2, 5, 64):
        x = torch.randn(tokens, 20)
        for run in found:
            torch.testing.assert_close(run(x), module(x))


BINARY = {
    "buffer": Masked((torch.randn(6, 20) > 0).float(), lambda stored: stored),
    "parameter": Masked((torch.randn(6, 20) > 0).float(), lambda stored: stored, parameter=True),
    "computed": Masked(torch.randn(6, 20), lambda stored: torch.round(torch.sigmoid(stored))),
    "integers": Masked(torch.randint(0, 2, (6, 20)), lambda stored: stored.float()),
    "all ones": Masked(torch.ones(6, 20), lambda stored: stored),
}


@pytest.mark.parametrize("kind", BINARY)
def test_constant_masks_are_fused_if_their_values_are_binary(kind: str) -> None:
    module = BINARY[kind]
    report = FusionReport()
    fused = fuse_exported(export(module, torch.randn(5, 20)), report=report, strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    assert [(site.operator, site.packed) for site in report.fused] == [("forward", "when exported")]
    x = torch.randn(9, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


@pytest.mark.parametrize("is_complement", [True, False])
def test_two_bool_buffers_are_a_mask_and_its_complement_if_their_values_are(is_complement: bool) -> None:
    m = torch.rand(6, 20) > 0.5
    other = ~m if is_complement else torch.roll(m, 1, 0)
    module = OfSource("F.silu(F.linear(x, w * m)) * F.linear(x, w * other)", w=parameter(6, 20), m=m, other=other)
    report = FusionReport()
    fused = fuse_exported(export(module, torch.randn(5, 20)), report=report)
    assert [site.packed for site in report.fused] == ["when exported"] * is_complement
    assert len(report.missed) == 1 - is_complement
    x = torch.randn(9, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


def test_a_weight_of_zeros_is_not_taken_for_a_mask() -> None:
    module = BINARY["computed"]
    try:
        weight = module.weight.data.clone()
        module.weight.data.zero_()
        assert operators(fuse_exported(export(module, torch.randn(5, 20)), strict=True)) == ["mglu.forward.default"]
    finally:
        module.weight.data.copy_(weight)


def test_masks_with_other_values_are_not_fused() -> None:
    stored = (torch.randn(6, 20) > 0).float()
    stored[3, 7] = 0.5
    module = Masked(stored, lambda stored: stored)
    program, report = export(module, torch.randn(5, 20)), FusionReport()
    fused = fuse_exported(program, report=report)
    assert operators(fused) == []
    assert [bool(site.reason) for site in report.missed] == [True]
    x = torch.randn(9, 20)
    assert torch.equal(fused.module()(x), program.module()(x))
    with pytest.raises(FusionError, match=r"nothing proves to be binary \(it holds 0.5\); .* by a comparison$"):
        fuse_exported(program, strict=True)
    with pytest.raises(ValueError, match="neither 0 nor 1"):
        fuse_exported(program, assume_binary=True)


def test_strict_refuses_a_model_without_a_layer() -> None:
    with pytest.raises(FusionError, match="no MGLU layer"):
        fuse_exported(export(nn.Linear(4, 4), torch.randn(3, 4)), strict=True)


@pytest.mark.long
def test_a_long_chain_of_constants_is_evaluated() -> None:
    """The chain is longer than Python's recursion limit."""

    def mask(stored: Tensor) -> Tensor:
        for _ in range(1200):
            stored = stored + 1
        return stored > 1200

    module, x = Masked(torch.randn(6, 20), lambda stored: mask(stored).float()), torch.randn(5, 20)
    fused = fuse_exported(export(module, x), strict=True)
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    torch.testing.assert_close(fused.module()(x), module(x))


def test_autocast_around_the_pass_does_not_change_constants() -> None:
    """The logits are a product of two matrices. In bfloat16 some logits would have another sign."""
    module, x = Masked(torch.randn(64, 64), lambda stored: stored @ stored > 0), torch.randn(5, 64)
    program = export(module, x)
    with torch.autocast("cpu", torch.bfloat16):
        fused = fuse_exported(program, strict=True)
    assert set(fused.state_dict) == {"weight", "packed_masks"}
    torch.testing.assert_close(fused.module()(x), module(x), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("around", [False, True])
def test_layers_in_a_block_of_autocast(around: bool) -> None:
    source = "with torch.autocast('cpu', torch.bfloat16): y = gated(x, w, (l > 0).float()) + gated(x, w, ste(o)); y + 1"
    module = OfSource(source, w=parameter(6, 20), l=parameter(6, 20), o=parameter(6, 20))
    program, x = export(module, torch.randn(5, 20)), torch.randn(7, 20)
    with torch.autocast("cpu", torch.float16, enabled=around):
        fused = fuse_exported(program, strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert set(fused.state_dict) == {"packed_masks", "fused_weight"}
    for run in (fused.module(), saved_and_loaded(fused).module()):
        assert run(x).dtype is torch.bfloat16
        torch.testing.assert_close(run(x), module(x), rtol=0.05, atol=0.05)


class InAutocast(nn.Sequential):
    """Layers that run in a block of autocast."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(x)


@pytest.mark.parametrize("cls", [MGLU, NaiveMGLU])
def test_modules_in_a_block_of_autocast(cls: type) -> None:
    module, x = InAutocast(cls(20, 24, n_masks=2), nn.Linear(24, 20)), torch.randn(7, 20)
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert operators(fused) == ["mglu.forward.default"]
    assert "packed_masks" in fused.state_dict, "bodies do not record which module makes a node"
    assert "0.mask_logits" not in fused.state_dict
    torch.testing.assert_close(fused.module()(x), module(x), rtol=0.05, atol=0.05)


def test_a_block_of_autocast_without_a_layer_is_kept() -> None:
    module = OfSource(
        "with torch.autocast('cpu', torch.bfloat16): y = linear(x, v); gated(x, w, l > 0, l <= 0) + y.float()",
        **{name: parameter(6, 20) for name in "vwl"},
    )
    program = export(module, torch.randn(5, 20))
    assert "wrap_with_autocast" in str(fuse_exported(program, strict=True).graph)


def test_layers_in_bodies_are_reported() -> None:
    """The body of `cond` stays as it is, but the report names its layer."""
    source = "torch.cond(x.sum() > 0, lambda x: gated(x, w, l > 0, l <= 0), lambda x: linear(x, w), (x,))"
    module, x, report = OfSource(source, w=parameter(6, 20), l=parameter(6, 20)), torch.randn(5, 20), FusionReport()
    program = export(module, x)
    fused = fuse_exported(program, report=report)
    torch.testing.assert_close(fused.module()(x), module(x))
    (missed,) = report.missed
    assert "in the body of `cond`" in str(missed.reason)
    with pytest.raises(FusionError, match="in the body of `cond`"):
        fuse_exported(program, strict=True)


def test_shared_masks_are_packed_once() -> None:
    layer = NaiveMGLU(12, 12, n_masks=2)
    module = nn.Sequential(layer, layer)
    fused = fuse_exported(export(module, torch.randn(5, 12)), strict=True)
    assert len(layers_of(fused.graph)) == 2
    assert [name for name in fused.state_dict if "packed" in name] == ["0.packed_masks"]
    x = torch.randn(3, 12)
    torch.testing.assert_close(fused.module()(x), module(x))


@pytest.mark.parametrize("tied", [False, True])
def test_a_weight_is_stored_once(tied: bool) -> None:
    """The weight is `[in_features, out_features]`. A tied model also uses it in a second product."""
    source = "m = (l > 0).to(x.dtype); y = term(x @ (weight * m), x @ (weight * (1 - m))); "
    module = OfSource(source + ("y @ weight.t()" if tied else "y"), weight=parameter(20, 6), l=parameter(20, 6))
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert set(fused.state_dict) == {"packed_masks", "weight" if tied else "fused_weight"}
    x = torch.randn(3, 20)
    torch.testing.assert_close(fused.module()(x), module(x))


@pytest.mark.parametrize(
    "total",
    [
        "stack(terms).mean(0)",
        "0.3 * terms[0] + 0.7 * terms[1] - terms[2]",
        "sum(a[i] * term for i, term in enumerate(terms))",
        "b + terms[0] + terms[1] + terms[2]",
    ],
)
def test_operations_that_the_rewrite_adds_can_be_saved(total: str) -> None:
    """The verifier of exported programs and `torch.export.save` accept only ATen operators."""
    source = f"terms = [gated(x, w, m) for m in (l > 0).to(x.dtype)]; {total}"
    module = OfSource(source, w=parameter(6, 20), l=parameter(3, 6, 20), a=parameter(3), b=parameter(6))
    fused = fuse_exported(export(module, torch.randn(5, 20)), strict=True)
    assert operators(fused).count("mglu.forward.default") == 1
    x = torch.randn(3, 20)
    torch.testing.assert_close(saved_and_loaded(fused).module()(x), module(x))
