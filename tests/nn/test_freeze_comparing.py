"""`freeze(model, replace=...)` compares each module with its replacement, and replaces either all or none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mglu_ops.nn import MGLU, freeze

D, H = 12, 21


class Sigmoid(nn.Module):
    """A user's own MGLU layer with masks `sigmoid(logits) > 0.5`. Rounding makes bits of small positive logits 0."""

    def __init__(self, activation: Callable[[Tensor], Tensor] = F.silu, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.activation = activation
        self.weight = nn.Parameter(torch.randn(D, H, dtype=dtype) / 4)
        self.logits = nn.Parameter(torch.randn(2, D, H, dtype=dtype))

    def masks(self) -> Tensor:
        return self.logits.sigmoid() > 0.5

    def forward(self, x: Tensor) -> Tensor:
        terms = [self.activation(x @ (m * self.weight).T) * (x @ (~m * self.weight).T) for m in self.masks()]
        return torch.stack(terms).sum(0)


def from_logits(module: Sigmoid) -> MGLU:
    return MGLU.from_parameters(module.weight, module.logits)


def from_bits(module: Sigmoid) -> MGLU:
    return MGLU.from_parameters(module.weight, module.masks())


@pytest.mark.filterwarnings("error")
def test_masks_that_differ_in_one_bit_are_found_and_nothing_is_replaced() -> None:
    model = nn.Sequential(Sigmoid(), nn.Linear(D, H), Sigmoid())
    with torch.no_grad():
        model[2].logits[1, 3, 5] = 1e-9
    assert model[2].logits[1, 3, 5] > 0
    assert not model[2].masks()[1, 3, 5]
    parts = list(model)
    message = "the function for Sigmoid returned a module that computes something"
    with pytest.raises(ValueError, match=message) as caught:
        freeze(model, replace={Sigmoid: from_logits})
    words = str(caught.value)
    assert "from_parameters takes logits for masks `logits > 0`, and bool masks for others" in words
    assert float(words.split("differ by up to ")[1].split()[0]) > 1e-3
    assert list(model) == parts
    x = torch.randn(3, H)
    before = model(x)
    freeze(model, replace={Sigmoid: from_bits})
    torch.testing.assert_close(model(x), before)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [F.silu, F.relu, torch.sigmoid])
def test_another_activation_is_found_in_every_dtype(dtype: torch.dtype, activation: Callable[[Tensor], Tensor]) -> None:
    model = nn.Sequential(Sigmoid(activation, dtype))
    name = activation.__name__
    # In bfloat16, silu, relu and gelu may differ by no more than rounding errors.
    wrong = "tanh" if dtype is torch.bfloat16 else "gelu"
    with pytest.raises(ValueError, match="check that it passes the module's activation"):
        freeze(model, replace={Sigmoid: lambda m: MGLU.from_parameters(m.weight, m.masks(), activation=wrong)})
    freeze(model, replace={Sigmoid: lambda m: MGLU.from_parameters(m.weight, m.masks(), activation=name)})
    assert type(model[0]) is MGLU


def test_another_shape_of_the_result_is_found() -> None:
    with pytest.raises(ValueError, match=r"result has shape \[2, 4, 11\], must be that of Sigmoid, \[2, 4, 12\]"):
        freeze(Sigmoid(), replace={Sigmoid: lambda m: MGLU.from_parameters(m.weight[1:], m.masks()[:, 1:])})


class Tokens(Sigmoid):
    """A layer that takes only x `[tokens, h]`."""

    def forward(self, x: Tensor) -> Tensor:
        tokens, _ = x.shape
        return super().forward(x).view(tokens, D)


class Dropped(Sigmoid):
    """A layer whose dropout may be in training mode while the layer itself is in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropout(super().forward(x))


@pytest.mark.parametrize("cls", [Tokens, Dropped])
def test_modules_of_other_ranks_and_modes_are_compared(cls: type[Sigmoid]) -> None:
    def wrong(module: Any) -> MGLU:
        return MGLU.from_parameters(module.weight, ~module.masks())

    model = nn.Sequential(cls()).train()
    if cls is Dropped:
        model[0].dropout.eval()
        modes = [module.training for module in model.modules()]
    with pytest.raises(ValueError, match="computes something else"):
        freeze(model, replace={cls: wrong})
    if cls is Dropped:
        assert [module.training for module in model.modules()] == modes
        model[0].dropout.train()  # random zeros must not count as a difference
    state = torch.get_rng_state()
    freeze(model, replace={cls: from_bits})
    assert torch.equal(torch.get_rng_state(), state)
    assert model[0].training


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", ["equal", "from 0.01 to 100"])
def test_rounding_is_accepted_whatever_the_size_of_a_feature(dtype: torch.dtype, sizes: str) -> None:
    """A feature may be much smaller than others: its row of W may be small, or relu may be 0 for nearly all tokens."""
    module = Sigmoid(F.relu, dtype)
    torch.manual_seed(0)
    module.weight = nn.Parameter(torch.randn(2048, 1024, dtype=dtype))
    if sizes != "equal":
        with torch.no_grad():
            module.weight.mul_(torch.logspace(-2, 2, 2048)[:, None])
    module.logits = nn.Parameter(torch.randn(1, 2048, 1024, dtype=dtype))
    freeze(module, replace={Sigmoid: lambda m: MGLU.from_parameters(m.weight, m.masks(), activation="relu")})


def test_equal_infinities_and_nan_are_accepted() -> None:
    model = nn.Sequential(Sigmoid())
    with torch.no_grad():
        model[0].weight[0], model[0].weight[1] = torch.nan, 1e30
    freeze(model, replace={Sigmoid: from_bits})


class TwoInputs(Sigmoid):
    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return scale * super().forward(x)


class InTuple(Sigmoid):
    def forward(self, x: Tensor) -> Any:
        return (super().forward(x),)


@pytest.mark.parametrize(
    ("cls", "function", "reason"),
    [
        (TwoInputs, from_bits, r"TypeError: .*scale"),
        (InTuple, from_bits, "TypeError: the result is a tuple, not a tensor"),
        (Sigmoid, lambda module: nn.Linear(H, D), "it has no MGLU in it, whose in_features is the size of x"),
    ],
)
def test_modules_that_cannot_be_compared_cause_a_warning(cls: type[Sigmoid], function: Any, reason: str) -> None:
    model = nn.Sequential(cls())
    words = rf"results of {cls.__name__} and of .* were not compared \({reason}"
    with pytest.warns(UserWarning, match=words) as caught:
        freeze(model, replace={cls: function})
    assert [warning.filename for warning in caught] == [__file__]
    assert type(model[0]) is not cls


def test_modules_that_accelerate_offloads_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(Sigmoid(), nn.Linear(D, H))
    accelerate.cpu_offload(model)
    assert model[0].logits.is_meta
    with pytest.raises(ValueError, match="model: 0 is offloaded by accelerate"):
        freeze(model, replace={Sigmoid: from_bits})
    assert type(model[0]) is Sigmoid


@pytest.mark.filterwarnings("error")
def test_modules_on_meta_are_replaced_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Sigmoid())
    freeze(model, replace={Sigmoid: from_logits})
    assert model[0].packed_masks.is_meta
