"""Masks in inference with Inductor are packed at each call, or once if freezing makes them constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config

import mglu_ops
from tests.support.budgets import relative_error
from tests.support.programs.compiled import SAME, OfSource, layer, parameter, run

pytestmark = [pytest.mark.usefixtures("unchanged_inductor"), pytest.mark.long]


@pytest.mark.skipif(torch.__version__ >= "2.12", reason="only torch 2.11 drops the examples on a CPU")
def test_freezing_without_examples_gives_a_warning() -> None:
    with (
        mglu_ops.fusion(),
        inductor_config.patch(freezing=True),
        pytest.warns(UserWarning, match="without the examples"),
    ):
        run(layer().eval())


MODES: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "max-autotune": ("max-autotune", {}),
    "cpp_wrapper": ("default", {"cpp_wrapper": True}),
}


@pytest.mark.parametrize("name", MODES)
def test_a_mask_changed_in_place_takes_effect_at_the_next_call(name: str) -> None:
    """Changes through `.data`, which no version counter records, take effect too."""
    mode, settings = MODES[name]
    model, x = layer().eval(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report, inductor_config.patch(settings), torch.no_grad():
        compiled = torch.compile(model, mode=mode)
        for change in (lambda m: None, lambda m: m.neg_(), lambda m: m.data.copy_(m.data.flip(0).neg())):
            change(model.mask_logits)
            for _ in range(2):
                assert relative_error(compiled(x), model(x)) <= SAME
    assert [(site.operator, site.packed) for site in report.fused] == [("forward", "at each call")]
    assert "mglu_ops.freeze" in str(report)


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops the examples on a CPU; the pass warns")
@pytest.mark.parametrize("name", MODES)
def test_freezing_packs_the_masks_once(name: str) -> None:
    """Freezing makes the parameters constants: no call packs masks, and later changes have no effect."""
    mode, settings = MODES[name]
    model, x = layer().eval(), torch.randn(3, 16)
    settings = {**settings, "freezing": True}
    with mglu_ops.fusion(strict=True) as report, inductor_config.patch(settings), torch.no_grad():
        expected = model(x)
        compiled = torch.compile(model, mode=mode)
        assert relative_error(compiled(x), expected) <= SAME
        model.mask_logits.neg_()
        with torch.profiler.profile() as profile:
            assert relative_error(compiled(x), expected) <= SAME
    assert [(site.operator, site.packed) for site in report.fused] == [("forward", "when compiled")]
    assert "mglu_ops.freeze" not in str(report)
    names = {event.key for event in profile.key_averages()}
    assert "mglu::forward" in names
    assert not {"mglu::pack_masks", "mglu::pack_logits"} & names


def test_freezing_does_nothing_to_a_model_that_trains() -> None:
    model, x = layer(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report, inductor_config.patch(freezing=True):
        compiled = torch.compile(model)
        compiled(x)
        with torch.no_grad():
            model.mask_logits.neg_()
        result, expected = compiled(x), model(x)
        assert relative_error(result, expected) <= SAME
        found, wanted = (torch.autograd.grad(y.sum(), model.mask_logits)[0] for y in (result, expected))
    assert relative_error(found, wanted) <= SAME
    assert [(site.operator, site.packed) for site in report.fused] == [("forward_ste", "at each call")]


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops the examples on a CPU; the pass warns")
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_float_masks_are_proved_by_their_values_where_freezing_fixes_them(dtype: torch.dtype) -> None:
    x = torch.randn(3, 16)
    for values, frozen in ((2, True), (2, False), (4, True)):
        torch._dynamo.reset()
        mask = torch.randint(0, values, (12, 16)).to(dtype)
        model = OfSource("gated(x, w, m)", w=parameter(12, 16), m=mask).eval()
        with mglu_ops.fusion() as report, inductor_config.patch(freezing=frozen), torch.no_grad():
            assert relative_error(torch.compile(model)(x), model(x)) <= SAME
        is_proved = values == 2 and frozen
        assert [site.packed for site in report.fused] == ["when compiled"] * is_proved
        assert len(report.missed) == 1 - is_proved


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 drops the examples on a CPU; the pass warns")
def test_two_bool_buffers_are_a_mask_and_its_complement_where_freezing_fixes_them() -> None:
    x, m = torch.randn(3, 16), torch.rand(12, 16) > 0.5
    source = "F.silu(F.linear(x, w * m)) * F.linear(x, w * other)"
    for other, packed in ((~m, ["when compiled"]), (torch.roll(m, 1, 0), [])):
        torch._dynamo.reset()
        model = OfSource(source, w=parameter(12, 16), m=m, other=other).eval()
        with mglu_ops.fusion() as report, inductor_config.patch(freezing=True), torch.no_grad():
            assert relative_error(torch.compile(model)(x), model(x)) <= SAME
        assert [site.packed for site in report.fused] == packed
