"""Gate ratios, agreement and flips of packed masks, compared with unpacked masks, and a model's `MaskStatistics`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from mglu_ops import masks as packed_format
from mglu_ops.masks import count_ones
from mglu_ops.nn import (
    MGLU,
    MaskStatistics,
    NaiveMGLU,
    SwiMGLU,
    flip_ratio,
    freeze,
    gate_ratio,
    mask_agreement,
    parameter_groups,
)

pack = torch.ops.mglu.pack_masks


def random_masks(n_masks: int, d: int, h: int, seed: int = 0, density: float = 0.5) -> Tensor:
    return torch.rand(n_masks, d, h, generator=torch.Generator().manual_seed(seed)) < density


@given(
    n_masks=st.integers(1, 16),
    d=st.integers(1, 9),
    h=st.integers(1, 40),
    density=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
    is_contiguous=st.booleans(),
)
def test_ratios_equal_those_from_unpacked_masks(n_masks, d, h, density, is_contiguous):
    masks, before = (random_masks(n_masks, d, h, seed, density) for seed in (0, 1))
    packed, packed_before = pack(masks), pack(before)
    if not is_contiguous:
        packed = packed.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert torch.equal(count_ones(packed), masks.sum((1, 2)))
    found = gate_ratio(packed, h), mask_agreement(packed, h), flip_ratio(packed_before, packed, h)
    assert {value.dtype for value in found} == {torch.float32}
    equal = masks.unsqueeze(0) == masks.unsqueeze(1)
    expected = [masks.double().mean((1, 2)), equal.double().mean((2, 3)), (masks != before).double().mean((1, 2))]
    for value, exact in zip(found, expected, strict=True):
        assert value.shape == exact.shape
        torch.testing.assert_close(value.double(), exact, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64])
def test_ratios_are_float32_for_any_default_dtype_of_torch(default: torch.dtype) -> None:
    layer = MGLU(37, 24, n_masks=5)
    packed, before = pack(random_masks(5, 24, 37)), pack(random_masks(5, 24, 37, 1))

    def every() -> tuple[dict[str, float], tuple[Tensor, ...]]:
        ratios = gate_ratio(packed, 37), mask_agreement(packed, 37), flip_ratio(before, packed, 37)
        return MaskStatistics(layer).update(), ratios

    (numbers, ratios), default_before = every(), torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        found, found_ratios = every()
    finally:
        torch.set_default_dtype(default_before)
    assert found == numbers
    assert all(torch.equal(a, b) for a, b in zip(found_ratios, ratios, strict=True))
    assert {one.dtype for one in found_ratios} == {torch.float32}


def test_every_byte_is_counted() -> None:
    every = torch.arange(256, dtype=torch.uint8)
    for index in range(256):
        assert count_ones(every[index].view(1, 1, 1)).item() == index.bit_count()
    assert count_ones(every.view(16, 16, 1)).tolist() == [1024]


def test_masks_may_be_larger_than_what_is_counted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    masks = random_masks(3, 50, 40)
    for most in (1, 31, 15 * 7, 10**6):
        monkeypatch.setitem(packed_format._COUNTED_AT_ONCE, "cpu", most)
        assert torch.equal(count_ones(pack(masks)), masks.sum((1, 2)))


def test_ratios_can_be_traced_and_change_nothing() -> None:
    packed, before = pack(random_masks(3, 8, 20)), pack(random_masks(3, 8, 20, seed=1))
    copies = packed.clone(), before.clone()

    def every(packed: Tensor, before: Tensor) -> tuple[Tensor, ...]:
        return gate_ratio(packed, 20), mask_agreement(packed, 20), flip_ratio(before, packed, 20)

    traced = torch.compile(every, backend="aot_eager", fullgraph=True)(packed, before)
    assert all(torch.equal(a, b) for a, b in zip(traced, every(packed, before), strict=True))
    assert torch.equal(packed, copies[0])
    assert torch.equal(before, copies[1])
    with torch.device("meta"):
        assert mask_agreement(torch.empty(8, 3, 5, dtype=torch.uint8), 20).shape == (5, 5)


def test_wrong_masks_are_named() -> None:
    packed = pack(random_masks(2, 4, 20))
    for function in (gate_ratio, mask_agreement):
        with pytest.raises(ValueError, match=r"packed_masks: got shape \[4, 3, 2\], must be .* in_features=8"):
            function(packed, 8)
        with pytest.raises(TypeError, match=r"packed_masks: got dtype torch\.bool"):
            function(packed.bool(), 20)
    with pytest.raises(ValueError, match=r"before: got shape \[4, 3, 1\], must be that of packed_masks, \[4, 3, 2\]"):
        flip_ratio(packed[..., :1], packed, 20)
    with pytest.raises(TypeError, match=r"before: got dtype torch\.float32, must be torch\.uint8"):
        flip_ratio(packed.float(), packed, 20)


class Own(nn.Module):
    """A user's own naive layer, with two-dimensional logits of one mask."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.logits = nn.Parameter(torch.randn(8, 16))


def expected(logits: Tensor, before: Tensor, prefix: str) -> dict[str, float]:
    masks, old = logits > 0, before > 0
    found = {f"{prefix}gate_ratio/{i}": mask.double().mean().item() for i, mask in enumerate(masks)}
    found |= {f"{prefix}flips/{i}": flips.double().mean().item() for i, flips in enumerate(masks != old)}
    found |= {f"{prefix}nan": logits.isnan().double().mean().item()}
    n = len(masks)
    pairs = [(masks[i] == masks[j]).double().mean().item() for i in range(n) for j in range(i)]
    return found | ({f"{prefix}agreement": sum(pairs) / len(pairs)} if pairs else {})


def assert_close(found: dict[str, float], want: dict[str, float]) -> None:
    assert {type(value) for value in found.values()} == {float}
    assert found == pytest.approx(want, rel=1e-6, abs=1e-7)


@pytest.mark.parametrize("kind", [MGLU, NaiveMGLU])
@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_of_a_model_while_it_trains(kind: type[nn.Module], compiled: bool) -> None:
    layers = [kind(13, 13, n_masks=3, top_k=2), kind(13, 21)]
    model: Any = nn.Sequential(layers[0], nn.Sequential(nn.ReLU(), layers[1]))
    if compiled:
        model[1] = torch.compile(model[1], backend="aot_eager")
    model = torch.compile(model, backend="aot_eager") if compiled else model
    statistics = MaskStatistics(model)
    optimizer = torch.optim.AdamW(parameter_groups(model, lr=0.05, weight_decay=0.1))
    before = [layer.mask_logits.detach().clone() for layer in layers]
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(30, 13)).square().sum().backward()
        optimizer.step()
        now = [layer.mask_logits.detach().clone() for layer in layers]
        want = expected(now[0], before[0], "0/") | expected(now[1], before[1], "1.1/")
        found = statistics.update()
        assert_close(found, want)
        assert min(found["0/flips/0"], found["1.1/flips/0"]) > 0
        assert "1.1/agreement" not in found
        before = now
    again = statistics.update()
    assert list(again) == list(found)
    assert_close(again, {key: 0.0 if "/flips/" in key else value for key, value in found.items()})


def test_selected_logits_of_own_modules_are_counted_and_ours_only_once() -> None:
    model = nn.ModuleDict({"own": torch.compile(Own()), "block": SwiMGLU(16, 24, n_masks=2)})
    statistics = MaskStatistics(model, mask_logits=lambda name, parameter: "logits" in name)
    before = model["own"].logits.detach().clone()
    with torch.no_grad():
        model["own"].logits[:3].neg_()
    found = statistics.update()
    own = {key: value for key, value in found.items() if key.startswith("own")}
    assert_close(own, expected(model["own"].logits[None], before[None], "own.logits/"))
    assert {key.split("/")[0] for key in found} == {"own.logits", "block.mglu"}


def test_fixed_and_frozen_masks_are_counted() -> None:
    model = nn.Sequential(MGLU(16, 8, n_masks=2, learnable_masks=False), NaiveMGLU(8, 8))
    statistics = MaskStatistics(model)
    first = statistics.update()
    freeze(model)
    assert statistics.update() == first
    assert {value for key, value in first.items() if "flips" in key} == {0.0}
    with torch.no_grad():
        model[0].packed_masks.bitwise_xor_(255)
    assert statistics.update()["0/flips/1"] == 1.0


@pytest.mark.parametrize("kind", [MGLU, NaiveMGLU])
def test_nan_logits_are_counted(kind: type[nn.Module]) -> None:
    """If only logits become NaN, the results of an `MGLU` stay finite. The statistics show the NaN."""
    layer = kind(16, 8, n_masks=2)
    layer.weight.requires_grad_(False)
    statistics, optimizer = MaskStatistics(layer), torch.optim.SGD([layer.mask_logits], lr=1.0)
    assert statistics.update()["nan"] == 0
    with torch.no_grad():
        layer.mask_logits[0, 2, 3] = torch.nan
    found = statistics.update()
    assert found["nan"] == 1 / 256
    assert found["gate_ratio/0"] <= 127 / 128
    x = torch.randn(3, 16)
    assert layer(x).isfinite().all() == (kind is MGLU)
    x[0, 0] = torch.nan
    layer(x).sum().backward()
    optimizer.step()
    assert statistics.update()["nan"] > 1 / 256


class Negated(nn.Module):
    def forward(self, tensor: Tensor) -> Tensor:
        return -tensor


def test_pruned_and_parametrized_logits_of_own_modules_count_by_their_value_now() -> None:
    """`prune` updates the attribute only in a forward pass. The parameter holds the logits before pruning."""
    model = nn.ModuleDict({"ours": MGLU(8, 8), "own": Own(), "negated": Own()})
    prune.random_unstructured(model["ours"], "mask_logits", 0.5)
    prune.random_unstructured(model["own"], "logits", 0.5)
    parametrize.register_parametrization(model["negated"], "logits", Negated())
    names = ["own.logits_orig", "negated.parametrizations.logits.original"]
    statistics = MaskStatistics(model, mask_logits=names)
    with torch.no_grad():
        for name in ("ours.mask_logits_orig", *names):
            model.get_parameter(name).neg_()
    found = statistics.update()
    assert not any(masks.requires_grad for masks in statistics._before.values())
    for layer, parameter, mask in (
        ("ours", model["ours"].mask_logits_orig, model["ours"].mask_logits_mask),
        ("own.logits_orig", model["own"].logits_orig, model["own"].logits_mask),
        (names[1], model["negated"].parametrizations.logits.original, -1),
    ):
        assert found[f"{layer}/gate_ratio/0"] == pytest.approx((parameter * mask > 0).float().mean().item())


@pytest.mark.parametrize(
    ("model", "options", "error", "message"),
    [
        (None, {}, TypeError, "model: got NoneType, must be a torch.nn.Module"),
        (nn.Linear(2, 2), {}, ValueError, "model: Linear has no MGLU or NaiveMGLU; name the mask logits"),
        (Own(), {}, ValueError, "model: Own has no MGLU"),
        (Own(), {"mask_logits": ["mask"]}, ValueError, "no parameter has the name 'mask'"),
        (nn.Linear(2, 2), {"mask_logits": ["bias"]}, ValueError, r"mask_logits: bias has shape \[2\], must be"),
    ],
)
def test_bad_arguments_are_named(model: Any, options: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        MaskStatistics(model, **options)
