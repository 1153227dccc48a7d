"""`from_swiglu` for modules of any class: which layers it finds, converts and refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mglu_ops
from mglu_ops.nn import MGLUFeedForward
from mglu_ops.nn.conversion import WEIGHTS, from_swiglu
from tests.support.budgets import assert_matches

H, D = 20, 44
Act = Callable[[Tensor], Tensor]


class FeedForward(nn.Module):
    """A user's own feed-forward layer, with any names and activation."""

    def __init__(self, names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), act: Act = F.silu) -> None:
        super().__init__()
        self.names, self.act = names, act
        for name in names[:2]:
            setattr(self, name, nn.Linear(H, D, bias=False))
        setattr(self, names[2], nn.Linear(D, H, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (getattr(self, name) for name in self.names)
        return down(self.act(gate(x)) * up(x))


class Joined(nn.Module):
    """A feed-forward layer with one projection for gate and up. With `up_first`, the rows of up come first."""

    def __init__(self, up_first: bool = False, act: Act = F.silu) -> None:
        super().__init__()
        self.up_first, self.act = up_first, act
        self.gate_up_proj = nn.Linear(H, 2 * D, bias=False)
        self.down_proj = nn.Linear(D, H, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).chunk(2, dim=-1)
        if self.up_first:
            gate, up = up, gate
        return self.down_proj(self.act(gate) * up)


class Model(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, H)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(H, 7, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


IDS = torch.tensor([[1, 2, 3, 4], [6, 5, 4, 0]])


def matrices(layer: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The gate, up and down matrices of a `FeedForward` or `Joined` layer, in float64."""
    if isinstance(layer, Joined):
        gate, up = layer.gate_up_proj.weight.detach().double().chunk(2)
        return (
            (up, gate, layer.down_proj.weight.double())
            if layer.up_first
            else (gate, up, layer.down_proj.weight.double())
        )
    gate, up, down = (getattr(layer, name).weight.detach().double() for name in layer.names)
    return gate, up, down


def make_disjoint(layer: Any) -> None:
    """Set the smaller one of each gate weight and its up weight to 0, so that one matrix can hold both matrices."""
    with torch.no_grad():
        if isinstance(layer, Joined):
            a, b = layer.gate_up_proj.weight.chunk(2)
        else:
            a, b = (getattr(layer, name).weight for name in layer.names[:2])
        kept = a.abs() >= b.abs()
        a *= kept
        b *= ~kept


LAYERS: dict[str, Callable[[], nn.Module]] = {
    "gate_proj": FeedForward,
    "w1": partial(FeedForward, ("w1", "w3", "w2")),
    "gate": partial(FeedForward, ("gate", "up", "down"), F.gelu),
    "joined": Joined,
    "joined, up first": partial(Joined, True, partial(F.gelu, approximate="tanh")),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_whose_matrices_share_no_element_is_converted_exactly(name: str) -> None:
    """A weight of the result comes from one of the two matrices, and the mask says from which, so nothing is lost."""
    layer = LAYERS[name]().double()
    make_disjoint(layer)
    x = torch.randn(5, H, dtype=torch.float64)
    result = from_swiglu(layer, 1)
    assert isinstance(result, MGLUFeedForward)
    assert_matches(result(x), layer(x))


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("n_masks", [1, 3])
def test_the_result_is_what_the_matrices_and_masks_say(name: str, n_masks: int) -> None:
    layer = LAYERS[name]().double()
    gate, up, down = matrices(layer)
    result = from_swiglu(layer, n_masks)
    larger, weight = gate.abs() >= up.abs(), result.mglu.weight
    masks = result.mglu.mask_logits > 0
    assert torch.equal(masks[0] * weight, gate * larger)
    assert torch.equal(~masks[0] * weight, up * ~larger)
    x = torch.randn(5, H, dtype=torch.float64)
    hidden = sum(layer.act(x @ (mask * weight).T) * (x @ (~mask * weight).T) for mask in masks)
    assert_matches(result(x), hidden @ (down / n_masks).T)


ACTIVATIONS: dict[str, Act] = {
    "silu": lambda x: x / (1 + (-x).exp()),
    "gelu": lambda x: x * (1 + (x / 2**0.5).erf()) / 2,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": lambda x: x.clamp(min=0),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
    "relu_squared": lambda x: x.clamp(min=0) ** 2,
}


@pytest.mark.parametrize("name", ACTIVATIONS)
@pytest.mark.parametrize("in_float", [False, True], ids=["own dtype", "float32"])
def test_the_activation_is_found_by_its_values(name: str, in_float: bool) -> None:
    act = ACTIVATIONS[name]
    layer = FeedForward(act=(lambda x: act(x.float()).to(x.dtype)) if in_float else act)
    assert from_swiglu(layer, 1).mglu.activation == name
    assert from_swiglu(Joined(act=layer.act), 1).mglu.activation == name


@pytest.mark.parametrize("init", WEIGHTS)
def test_a_model_is_copied_with_other_feed_forward_layers(init: str) -> None:
    shared = FeedForward()
    model = Model(shared, nn.Sequential(nn.LayerNorm(H), Joined()), shared).eval()
    model.layers[1][0].weight.requires_grad_(False)
    model.layers[1][1].train()
    before = copy.deepcopy(model.state_dict())
    result = from_swiglu(model, 2, init=init, top_k=1)
    assert type(result) is Model
    assert result.head.weight is result.embedding.weight
    assert result.layers[0] is result.layers[2]
    assert [type(result.layers[0]), type(result.layers[1][1])] == [MGLUFeedForward] * 2
    assert (result.training, result.layers[0].training, result.layers[1][1].mglu.training) == (False, False, True)
    assert [name for name, p in result.named_parameters() if not p.requires_grad] == ["layers.1.0.weight"]
    assert result.layers[0].mglu.router.weight.shape == (2, H)
    assert torch.equal(result.layers[0].down_proj.weight, shared.down_proj.weight)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    own = {tensor.data_ptr() for tensor in model.state_dict().values()}
    assert own.isdisjoint(tensor.data_ptr() for tensor in result.state_dict().values()), "a tensor is shared"


class Counting(FeedForward):
    """Counts its calls in training mode, in a buffer and in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        self.seen.append(x.abs().max().item())
        return super().forward(x)


def test_converting_leaves_buffers_and_attributes_of_the_model_alone() -> None:
    layer = Counting()
    from_swiglu(layer, 1)
    assert layer.calls == 0
    assert layer.seen == []


def test_layers_that_share_their_matrices_become_one_layer() -> None:
    first, second = FeedForward(), FeedForward()
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(second, name).weight = getattr(first, name).weight
    result = from_swiglu(Model(first, second), 1)
    assert result.layers[0].mglu.weight is result.layers[1].mglu.weight
    assert result.layers[0].down_proj.weight is result.layers[1].down_proj.weight


def test_a_converted_model_trains_compiles_freezes_quantizes_and_loads() -> None:
    teacher = Model(FeedForward(), Joined())
    result = from_swiglu(teacher, 2)
    optimizer = torch.optim.AdamW(mglu_ops.nn.parameter_groups(result, lr=1e-2, weight_decay=0.0))
    target, losses = teacher(IDS).detach(), []
    for _ in range(20):
        loss = F.mse_loss(result(IDS), target)
        loss.backward()
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in result.parameters())
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    expected = result(IDS)
    torch.testing.assert_close(torch.compile(result, backend="aot_eager", fullgraph=True)(IDS), expected)

    again = from_swiglu(Model(FeedForward(), Joined()), 2)
    again.load_state_dict(result.state_dict())
    assert torch.equal(again(IDS), expected)
    frozen = mglu_ops.freeze(result)
    assert torch.equal(frozen(IDS), expected)
    mglu_ops.freeze(again).load_state_dict(frozen.state_dict())
    assert torch.equal(again(IDS), expected)
    quantized = mglu_ops.quantize(again, "int8_row")(IDS)
    assert 0 < (quantized - expected).norm() < 0.05 * expected.norm()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_weights_keep_their_dtype_and_logits_are_wide(dtype: torch.dtype) -> None:
    layer = from_swiglu(FeedForward().to(dtype), 2, top_k=2)
    assert layer.mglu.weight.dtype == layer.down_proj.weight.dtype == layer.mglu.router.weight.dtype == dtype
    assert layer.mglu.mask_logits.dtype == torch.promote_types(dtype, torch.float32)


def test_random_masks_come_from_the_seed() -> None:
    layer, logits = FeedForward(), []
    for _ in range(2):
        torch.manual_seed(3)
        logits.append(from_swiglu(layer, 2, init="up").mglu.mask_logits)
    assert torch.equal(*logits)
    assert logits[0].std().item() == pytest.approx(0.01, rel=0.1)


def test_names_can_be_given() -> None:
    names = ("fc_gate", "fc_up", "fc_out")
    model = Model(FeedForward(names), FeedForward())
    with pytest.raises(
        ValueError, match="model: got FeedForward, must have a module with linear layers named gate_proj"
    ):
        from_swiglu(model.layers[0], 1)
    result = from_swiglu(model, 1, projections=names)
    assert [type(layer) for layer in result.layers] == [MGLUFeedForward, FeedForward]


def with_child(name: str, child: Callable[[Any], Any]) -> nn.Module:
    """A model in whose second layer the child `name` is replaced by `child(old)`."""
    layer = FeedForward()
    setattr(layer, name, child(getattr(layer, name)))
    return Model(FeedForward(), layer)


class Changed(FeedForward):
    """A layer that computes something other than SwiGLU. `where` names the change."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.where, self.norm, self.drop = where, nn.LayerNorm(D), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        if self.where == "x":
            x = 2 * x
        gate, up = self.gate_proj(x), self.up_proj(-x if self.where == "x of up" else x)
        if self.where == "gate":
            gate = gate.clamp(max=100.0)
        if self.where == "up":
            up = up.clamp(-7, 7)
        if self.where == "factor":
            up = 1.001 * up
        hidden = F.silu(gate) * up
        if self.where == "norm":
            hidden = self.norm(hidden.float()).to(hidden.dtype)
        if self.where == "dropout":
            hidden = self.drop(hidden)
        if self.where == "functional dropout":
            hidden = F.dropout(hidden, 0.1, self.training)
        if self.where == "two arguments":
            raise RuntimeError("no mask was given")
        y = self.down_proj(hidden)
        return y + x if self.where == "residual" else y


def quantized(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.to(torch.float8_e4m3fn))
    return linear


def adapted(linear: nn.Linear) -> nn.Module:
    return nn.Sequential(linear)


def with_bias(linear: nn.Linear) -> nn.Linear:
    return nn.Linear(linear.in_features, linear.out_features)


def parametrized(linear: nn.Linear) -> nn.Module:
    return parametrize.register_parametrization(linear, "weight", nn.Tanh())


class OwnTensor(Tensor):
    """A subclass of `Tensor`, as torchao and FSDP have."""


def with_subclass(linear: nn.Linear) -> nn.Linear:
    linear.weight = nn.Parameter(linear.weight.detach().as_subclass(OwnTensor))
    return linear


def on_meta(linear: nn.Linear) -> nn.Linear:
    return linear.to("meta")


def with_other_size(linear: nn.Linear) -> nn.Linear:
    return nn.Linear(linear.in_features, linear.out_features + 1, bias=False)


def with_hook(linear: nn.Module) -> nn.Module:
    linear.register_forward_hook(lambda module, args, result: 2 * result)
    return linear


UP = partial(with_child, "up_proj")
COMPUTES = "got Changed, norm LayerNorm.*must compute down_proj.act.gate_proj. . up_proj. with act one of silu, gelu"
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], type[Exception], str]] = {
    "bias": (lambda: UP(with_bias), {}, ValueError, r"^model: layers\.1\.up_proj: got a bias, must have none"),
    "adapter": (lambda: UP(adapted), {}, TypeError, r"^model: layers\.1\.up_proj: got Sequential, must be a torch\.nn"),
    "parametrized": (lambda: UP(parametrized), {}, TypeError, r"layers\.1\.up_proj: got ParametrizedLinear"),
    "float8": (lambda: UP(quantized), {}, TypeError, r"got Linear with a weight of Parameter in torch\.float8_e4m3fn"),
    "subclass": (lambda: UP(with_subclass), {}, TypeError, r"got Linear with a weight of OwnTensor in torch\.float32"),
    "shape": (lambda: UP(with_other_size), {}, ValueError, r"got gate_proj \[44, 20\], up_proj \[45, 20\], down_proj"),
    "hook": (lambda: UP(with_hook), {}, TypeError, r"up_proj: got Linear with a forward hook .*, must have none"),
    "hook of the layer": (
        lambda: with_hook(FeedForward()),
        {},
        TypeError,
        "^model: got FeedForward with a forward hook",
    ),
    "one layer": (lambda: UP(with_bias).layers[1], {}, ValueError, r"^model\.up_proj: got a bias, must have none"),
    "meta": (lambda: UP(on_meta), {}, ValueError, "^model: got parameters on cpu, meta, must be on one device"),
    "nothing": (lambda: Model(nn.Linear(H, H)), {}, ValueError, "^model: got Model, must have a module with linear"),
    "no parameters": (nn.Identity, {}, ValueError, "^model: got parameters on no device"),
    "mglu": (lambda: MGLUFeedForward(H, D), {}, ValueError, "^model: got MGLUFeedForward, must have a module with"),
    "compiled": (lambda: torch.compile(FeedForward()), {}, ValueError, "^model: got a compiled module, must not be"),
    "mish": (lambda: FeedForward(act=F.mish), {}, TypeError, r"^model: got FeedForward, must compute down_proj"),
    "roles exchanged": (
        lambda: FeedForward(("w3", "w1", "w2")),
        {},
        TypeError,
        r"^model: got FeedForward, must compute w2\(act\(w1\) \* w3\) with act one of",
    ),
    "quick gelu": (lambda: FeedForward(act=lambda x: x * (1.702 * x).sigmoid()), {}, TypeError, "must compute"),
    "leaky": (lambda: FeedForward(act=F.leaky_relu), {}, TypeError, "must compute"),
    "interleaved": (lambda: Interleaved(), {}, TypeError, "got Interleaved, must compute .* or another order of rows"),
    **{
        where: (partial(Changed, where), {}, TypeError, COMPUTES)
        for where in ("x", "x of up", "gate", "up", "factor", "norm", "dropout", "functional dropout", "residual")
    },
    "call": (
        lambda: Changed("two arguments"),
        {},
        TypeError,
        r"norm LayerNorm.*must take x alone and compute down_proj.*, but raised RuntimeError: no mask was",
    ),
    "model": (lambda: "llama", {}, TypeError, "^model: got str, must be a torch.nn.Module"),
    "init": (FeedForward, {"init": "best"}, ValueError, "^init: got 'best', must be one of magnitude, average"),
    "n_masks": (FeedForward, {"n_masks": 17}, ValueError, "^n_masks: got 17, must be an int from 1 to 16"),
    "top_k": (FeedForward, {"top_k": 3}, ValueError, "^top_k: got 3, must be None or an int from 1 to n_masks=2"),
    "projections": (FeedForward, {"projections": "up"}, ValueError, "^projections: got 'up', must be None or a list"),
    "one name": (FeedForward, {"projections": ["up"]}, ValueError, r"^projections: got \['up'\], must be None or a"),
    "no name": (FeedForward, {"projections": ["a", "b"]}, ValueError, "linear layers named a, b; projections takes"),
}


class Interleaved(Joined):
    """A feed-forward layer in which rows of gate and up alternate, as in GPT-OSS."""

    def forward(self, x: Tensor) -> Tensor:
        joined = self.gate_up_proj(x)
        return self.down_proj(F.silu(joined[..., ::2]) * joined[..., 1::2])


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_converted_is_refused(case: str) -> None:
    make, options, error, words = REFUSED[case]
    with pytest.raises(error, match=words):
        from_swiglu(make(), **{"n_masks": 2, **options})
