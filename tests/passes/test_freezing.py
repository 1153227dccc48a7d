"""Masks at inference through Inductor: packed at each call, or once where freezing makes them constants."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch._inductor.config as inductor_config
from budgets import relative_error
from compiled_models import SAME, layer, run
from torch import Tensor, nn

import mglu_ops

pytestmark = [pytest.mark.usefixtures("unchanged_inductor"), pytest.mark.long]


def test_checkpoint_and_freezing_with_inductor() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = layer()

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.mlp, x, use_reentrant=False)

    model, x = Checkpointed(), torch.randn(3, 16)
    with mglu_ops.fusion(strict=True) as report:
        result = torch.compile(model)(x)
    assert relative_error(result, model(x)) <= SAME
    assert [site.module_path for site in report.fused] == ["mlp"]
    result.sum().backward()


def test_freezing_with_inductor(recwarn: pytest.WarningsRecorder) -> None:
    """Layers are fused; torch 2.11 removes the examples from the graph on a CPU, and then a warning says so."""
    with mglu_ops.fusion() as report, inductor_config.patch({"freezing": True}):
        run(layer().eval())
    if torch.__version__ < "2.12":
        assert any("without the examples" in str(warning.message) for warning in recwarn)
    else:
        assert [site.operator for site in report.fused] == ["forward"]


LIVE: dict[str, tuple[str, dict[str, Any]]] = {
    "default": ("default", {}),
    "reduce-overhead": ("reduce-overhead", {}),
    "max-autotune": ("max-autotune", {}),
    "cpp_wrapper": ("default", {"cpp_wrapper": True}),
}


FROZEN: dict[str, tuple[str, dict[str, Any]]] = {
    name: (mode, {**settings, "freezing": True}) for name, (mode, settings) in LIVE.items()
}


@pytest.mark.parametrize("name", LIVE)
def test_a_mask_changed_in_place_takes_effect_at_the_next_call(name: str) -> None:
    """This includes a change through `.data`, which no version counter records."""
    mode, settings = LIVE[name]
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
@pytest.mark.parametrize("name", FROZEN)
def test_freezing_packs_the_masks_once(name: str) -> None:
    """Freezing makes the parameters constants: nothing is packed at a call, and a later change has no effect."""
    mode, settings = FROZEN[name]
    model, x = layer().eval(), torch.randn(3, 16)
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
def test_real_masks_are_proved_by_their_values_where_freezing_fixes_them(dtype: torch.dtype) -> None:
    class Fixed(nn.Module):
        def __init__(self, values: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(12, 16))
            self.register_buffer("mask", torch.randint(0, values, (12, 16)).to(dtype))

        def forward(self, x: Tensor) -> Tensor:
            gate, value = self.weight * self.mask, self.weight * (1 - self.mask)
            return torch.nn.functional.silu(x @ gate.T) * (x @ value.T)

    x = torch.randn(3, 16)
    for values, frozen in ((2, True), (2, False), (4, True)):
        torch._dynamo.reset()
        model = Fixed(values).eval()
        with mglu_ops.fusion() as report, inductor_config.patch(freezing=frozen), torch.no_grad():
            assert relative_error(torch.compile(model)(x), model(x)) <= SAME
        is_proved = values == 2 and frozen
        assert [site.packed for site in report.fused] == ["when compiled"] * is_proved
        assert len(report.missed) == 1 - is_proved
