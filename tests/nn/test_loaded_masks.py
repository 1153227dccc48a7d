"""Packed masks are checked however they are loaded: in `load_state_dict`, or otherwise at their first use."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import mglu_ops
from mglu_ops.nn import MGLU, NaiveMGLU, SwiMGLU, check_masks, freeze, packed_buffers

each_kind = pytest.mark.parametrize("kind", [MGLU, NaiveMGLU])
X = torch.randn(4, 21)
PADDING = r"padding bits past in_features=21 are set"

# Name -> a change that makes packed masks [10, 3, 3] for 21 columns invalid, and the error.
WRONG: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "padding": (lambda p: p | 0x80, PADDING),
    "int8": (lambda p: p.view(torch.int8), r"got dtype torch\.int8, must be torch\.uint8"),
    "n_masks": (lambda p: p[..., :2], r"got n_masks=2 \(shape \[10, 3, 2\]\), must be 3"),
    "more masks": (lambda p: p[..., [0, 1, 2, 0]], r"got n_masks=4 \(shape \[10, 3, 4\]\), must be 3"),
    "in_features": (lambda p: p[:, :2], r"got shape \[10, 2, 3\], must be .* \[10, 3, n_masks\] for in_features=21"),
    "order": (lambda p: p.permute(2, 0, 1), r"got shape \[3, 10, 3\], must be"),
    "rank": (lambda p: p[0, 0], r"got shape \[3\], must be"),
}


def layer(kind: type[nn.Module] = MGLU, in_features: int = 21) -> nn.Module:
    return kind(in_features, 10, n_masks=3, learnable_masks=False)


def by_attribute(module: nn.Module, packed: Tensor) -> nn.Module:
    """Assign packed masks as Transformers does."""
    module.packed_masks = packed
    return module


def by_buffers(module: nn.Module, packed: Tensor) -> nn.Module:
    """Assign packed masks as accelerate does."""
    module._buffers["packed_masks"] = packed
    return module


def by_pickle(module: nn.Module, packed: Tensor) -> nn.Module:
    file = io.BytesIO()
    torch.save(by_attribute(module, packed), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def by_deepcopy(module: nn.Module, packed: Tensor) -> nn.Module:
    module(X)  # this checks the old masks, which must not count as a check of the copy's masks
    return copy.deepcopy(by_attribute(module, packed))


def by_moving(module: nn.Module, packed: Tensor) -> nn.Module:
    return by_attribute(module, packed).to(torch.float64).float()


LOADERS = [by_attribute, by_buffers, by_pickle, by_deepcopy, by_moving]


@pytest.mark.parametrize("load", LOADERS)
@each_kind
@pytest.mark.parametrize("name", WRONG)
def test_wrong_masks_are_refused_at_first_use(name: str, kind: type[nn.Module], load: Callable[..., nn.Module]) -> None:
    corrupt, words = WRONG[name]
    module = layer(kind)
    module = load(module, corrupt(module.packed_masks.clone()))
    for _ in range(2):
        with pytest.raises((TypeError, ValueError), match=rf"^packed_masks: {words}"):
            module(X)
    with pytest.raises((TypeError, ValueError), match=rf"^model: layers\.0\.packed_masks: {words}"):
        check_masks(nn.ModuleDict({"layers": nn.ModuleList([module])}))
    with pytest.raises((TypeError, ValueError), match=rf"^model: packed_masks: {words}"):
        check_masks(module)


@each_kind
@pytest.mark.parametrize("options", [{}, {"assign": True}, {"strict": False}], ids=str)
@pytest.mark.parametrize("name", [*WRONG, "no tensor"])
def test_wrong_masks_in_a_state_dict_are_refused(name: str, options: dict[str, bool], kind: type[nn.Module]) -> None:
    corrupt, words = WRONG.get(name, (Tensor.tolist, r"got list, must be a torch\.uint8 tensor"))
    model = nn.ModuleDict({"block": layer(kind)})
    before = model["block"].packed_masks.clone()
    state = {**model.state_dict(), "block.packed_masks": corrupt(before.clone())}
    with pytest.raises(RuntimeError, match=rf"block\.packed_masks: {words}") as raised:
        model.load_state_dict(state, **options)
    assert str(raised.value).count("packed_masks:") == 1
    assert "Missing" not in str(raised.value)
    assert "size mismatch" not in str(raised.value)
    assert torch.equal(model["block"].packed_masks, before), "the refused masks were loaded"
    assert model["block"].packed_masks.dtype is torch.uint8


@pytest.mark.parametrize("load", LOADERS)
@each_kind
def test_right_masks_are_used(kind: type[nn.Module], load: Callable[..., nn.Module]) -> None:
    source, target = layer(kind), layer(kind)
    target.load_state_dict({**target.state_dict(), "weight": source.weight})
    target = load(target, source.packed_masks.clone())
    assert torch.equal(target(X), source(X))
    check_masks(target)


@each_kind
def test_a_rank_may_hold_a_part_of_the_rows(kind: type[nn.Module]) -> None:
    whole, part = layer(kind), layer(kind)
    part.weight, part.packed_masks = nn.Parameter(whole.weight[2:7].detach()), whole.packed_masks[2:7]
    torch.testing.assert_close(part(X), whole(X)[:, 2:7])


def test_masks_that_are_written_before_the_first_use_are_checked() -> None:
    module = layer()
    module.packed_masks.fill_(255)
    with pytest.raises(ValueError, match=PADDING):
        module(X)


def test_checks_of_another_number_of_columns_do_not_count() -> None:
    wide, narrow = layer(in_features=24), layer()
    wide.packed_masks.fill_(255)
    wide(torch.randn(4, 24))
    narrow.packed_masks = wide.packed_masks
    with pytest.raises(ValueError, match=PADDING):
        narrow(X)


@each_kind
def test_values_are_read_once(kind: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    module, reads = layer(kind), []
    monkeypatch.setattr("mglu_ops.nn.masked_linear.check_padding", lambda packed, *_: reads.append(id(packed)) or None)
    for _ in range(3):
        module(X)
    assert len(reads) == 1
    module.packed_masks = module.packed_masks.clone()
    module(X)
    module(X)
    assert len(reads) == 2


def test_no_tensor_is_kept_alive() -> None:
    gc.collect()
    before = len(packed_buffers._checked)
    module = layer()
    module(X)
    assert len(packed_buffers._checked) == before + 1
    del module
    gc.collect()
    assert len(packed_buffers._checked) == before


@each_kind
def test_compiled_modules_are_one_graph_and_check_shapes(kind: type[nn.Module]) -> None:
    module = layer(kind)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), module(X))
    module.packed_masks = module.packed_masks[..., :2]
    with pytest.raises(Exception, match=r"packed_masks: got shape \[10, 3, 2\], must have n_masks=3 as its last size"):
        compiled(X)


def test_fake_tensors_transforms_and_modes_read_no_values() -> None:
    with FakeTensorMode():
        module = layer()
        assert module(torch.randn(4, 21)).shape == (4, 10)
    module = layer()
    batch = torch.stack([module.packed_masks, torch.zeros_like(module.packed_masks)])
    found = torch.vmap(lambda p: torch.func.functional_call(module, {"packed_masks": p}, (X,)))(batch)
    torch.testing.assert_close(found[0], module(X))
    with FlopCounterMode(display=False) as counter:
        layer()(X)
    assert counter.get_total_flops() > 0
    program = torch.export.export(layer(), (X,), strict=False)
    assert program.module()(X).shape == (4, 10)
    layer().to("meta")(X.to("meta"))


def test_a_model_without_fixed_masks_passes() -> None:
    check_masks(nn.Linear(3, 3))
    check_masks(SwiMGLU(8, 8))
    check_masks(freeze(SwiMGLU(8, 12, n_masks=2)))
    check_masks(layer().to("meta"))
    with pytest.raises(TypeError, match=r"model: got str, must be a torch\.nn\.Module"):
        check_masks("model")


class Holder(nn.Module):
    """A user's module that calls the operator with its own buffer."""

    def __init__(self, packed: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(10, 21))
        self.register_buffer("bits", packed)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mglu.forward(x, self.weight, self.bits)


@pytest.mark.parametrize("kind", ["module", "holder"])
def test_wrong_masks_are_not_exported(kind: str, tmp_path: Path) -> None:
    wrong = layer().packed_masks | 0x80
    model = nn.Sequential(by_attribute(layer(), wrong) if kind == "module" else Holder(wrong))
    name = r"0\.packed_masks" if kind == "module" else r"0\.bits"
    with pytest.raises(ValueError, match=rf"^model: {name}: {PADDING}"):
        mglu_ops.export(model, (X,), tmp_path / "model.pt2")
    assert not list(tmp_path.iterdir())
