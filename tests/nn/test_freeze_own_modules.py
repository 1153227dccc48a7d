"""`freeze(model, replace=...)` and `MGLU.from_parameters` for a user's own modules, and the warning about them."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from mglu_ops.nn import GLU, MGLU, NaiveMGLU, SwiMGLU, freeze
from tests.support.budgets import assert_matches

D, H = 12, 21
X = torch.randn(3, H)


class Gate(nn.Module):
    """A user's own MGLU layer, which holds its parameters itself."""

    def __init__(self, n_masks: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(D, H) / 4)
        self.logits = nn.Parameter(torch.randn(n_masks, D, H))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.zeros(())
        for m in (self.logits > 0).to(x):
            y = y + F.gelu(F.linear(x, self.weight * m)) * F.linear(x, self.weight * (1 - m))
        return y


class LinearGate(nn.Module):
    """A user's own MGLU layer, whose weight is in an `nn.Linear`."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(H, D, bias=False)
        self.scores = nn.Parameter(torch.randn(1, D, H))

    def forward(self, x: Tensor) -> Tensor:
        m = (self.scores[0] > 0).to(x)
        return F.gelu(F.linear(x, self.proj.weight * m)) * F.linear(x, self.proj.weight * (1 - m))


def mglu_of(module: Gate) -> MGLU:
    return MGLU.from_parameters(module.weight, module.logits, activation="gelu")


def quiet_freeze(model: nn.Module, **options) -> nn.Module:
    """Freeze a model, and raise an error for any warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return freeze(model, **options)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = Gate()
        self.again = self.first
        self.blocks = nn.ModuleList([nn.Sequential(Gate(3), nn.Linear(D, H)), Gate()])
        self.blocks[1].weight = self.first.weight
        self.blocks[1].logits = self.first.logits
        self.ours = SwiMGLU(H, D, n_masks=2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) + self.ours(x)
        return self.first(x) + 2 * self.again(x) + 3 * self.blocks[1](x)


def test_own_modules_are_replaced_and_stay_shared_and_tied() -> None:
    model, x = Model().eval(), torch.randn(5, H)
    before, weight, logits = model(x), model.first.weight, model.first.logits.detach().clone()
    assert quiet_freeze(model, replace={Gate: mglu_of}) is model
    assert not any(isinstance(module, Gate) for module in model.modules())
    assert type(model.first) is MGLU
    assert model.again is model.first
    assert model.blocks[1] is not model.first
    assert model.first.weight is weight
    assert model.blocks[1].weight is weight
    assert model.blocks[1].packed_masks is model.first.packed_masks
    assert torch.equal(torch.ops.mglu.unpack_masks(model.first.packed_masks, H), logits > 0)
    assert not any("logits" in key for key in model.state_dict())
    assert not model.first.training
    assert_matches(model(x), before)


def test_a_root_of_the_class_and_a_parametrized_module_are_replaced() -> None:
    gate = Gate().eval()
    frozen = quiet_freeze(gate, replace={Gate: mglu_of})
    assert type(frozen) is MGLU
    assert frozen.weight is gate.weight
    assert not frozen.training
    assert_matches(frozen(X), gate(X))
    parametrize.register_parametrization(gate, "weight", nn.Tanh())
    assert_matches(quiet_freeze(nn.Sequential(gate), replace={Gate: mglu_of})(X), gate(X))


def test_a_function_may_return_any_module() -> None:
    model = nn.Sequential(Gate())
    freeze(model, replace={Gate: lambda module: nn.Sequential(mglu_of(module), nn.Identity())})
    assert model[0][0].packed_masks is not None


def test_replacing_inside_a_compiled_model_recompiles() -> None:
    model, x = nn.Sequential(nn.Linear(H, H), Gate()), torch.randn(3, H)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    before = compiled(x)
    assert quiet_freeze(compiled, replace={Gate: mglu_of}) is compiled
    assert_matches(compiled(x), before)
    model[1].packed_masks.zero_()
    assert torch.equal(compiled(x), torch.zeros(3, D))


def test_modules_that_accelerate_offloads_are_refused() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = nn.Sequential(Gate(), nn.Linear(D, H))
    accelerate.cpu_offload(model)
    assert model[0].logits.is_meta
    with pytest.raises(ValueError, match="model: 0 is offloaded by accelerate"):
        freeze(model, replace={Gate: mglu_of})
    assert type(model[0]) is Gate


def test_modules_on_meta_are_replaced_without_values() -> None:
    with torch.device("meta"):
        model = nn.Sequential(Gate())
    quiet_freeze(model, replace={Gate: mglu_of})
    assert model[0].packed_masks.is_meta


def test_an_error_replaces_none() -> None:
    model = nn.Sequential(Gate(), Gate(17))
    parts = list(model)
    with pytest.raises(ValueError, match="n_masks: got 17"):
        freeze(model, replace={Gate: mglu_of})
    assert list(model) == parts


def test_the_root_of_a_compiled_model_is_not_replaced() -> None:
    compiled = torch.compile(Gate(), backend="eager")
    with pytest.raises(ValueError, match="replace: Gate is compiled already; call freeze first"):
        freeze(compiled, replace={Gate: mglu_of})


WRONG_REPLACE = {
    "list": ([Gate], TypeError, "replace: got list, must be a dict from classes of modules to functions"),
    "instance": ({Gate(): mglu_of}, TypeError, "replace: got the key Gate.*, must be a subclass of torch.nn.Module"),
    "no module": ({int: mglu_of}, TypeError, "replace: got the key <class 'int'>, must be a subclass"),
    "value": ({Gate: 1}, TypeError, "replace: got 1 for Gate, must be a function of the module"),
    "result": ({Gate: lambda module: None}, TypeError, "replace: the function for Gate returned NoneType, must return"),
    "absent": ({nn.Bilinear: mglu_of}, ValueError, "replace: got Bilinear, but no module of the model is of this cl"),
}


@pytest.mark.parametrize("name", WRONG_REPLACE)
def test_a_wrong_replacement_is_refused(name: str) -> None:
    replace, error, message = WRONG_REPLACE[name]
    with pytest.raises(error, match=message):
        freeze(nn.Sequential(Gate()), replace=replace)


def test_modules_that_look_like_mglu_are_named_with_what_to_do() -> None:
    model = nn.Sequential(*(Gate() for _ in range(5)), LinearGate(), MGLU(D, D))
    keys, x = set(model.state_dict()), torch.randn(2, H)
    before = model[0](x)
    with pytest.warns(UserWarning, match="look like MGLU layers") as caught:
        assert freeze(model) is model
    (warning,) = caught
    assert warning.filename == __file__
    assert "were left as they are: 0, 1, 2 and 3 more, of class Gate, LinearGate;" in str(warning.message)
    assert "freeze(model, replace={Gate: lambda module: mglu_ops.nn.MGLU.from_parameters(" in str(warning.message)
    assert set(model.state_dict()) - keys == {"6.packed_masks"}
    assert torch.equal(model[0](x), before)
    with pytest.warns(UserWarning, match="were left as they are: 5, of class LinearGate;"):
        freeze(model, replace={Gate: mglu_of})
    with pytest.warns(UserWarning, match="were left as they are: the model, of class Gate;"):
        freeze(Gate(16))  # as many masks as a layer may have
    replace = {LinearGate: lambda module: MGLU.from_parameters(module.proj.weight, module.scores, activation="gelu")}
    want = model[5](x)
    assert_matches(quiet_freeze(model, replace=replace)[5](x), want)


def holding(**shapes: tuple[int, ...]) -> nn.Module:
    """A module with float32 parameters of these shapes."""
    module = nn.Module()
    for name, shape in shapes.items():
        module.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return module


def counts() -> nn.Module:
    """A module with a weight, and integers that have the shape of logits."""
    module = holding(weight=(D, H))
    module.counts = nn.Parameter(torch.ones(2, D, H, dtype=torch.int64), requires_grad=False)
    return module


OTHERS: dict[str, Callable[[], nn.Module]] = {
    "experts": lambda: holding(gate_up_proj=(4, 2 * D, H), down_proj=(4, H, D), router=(4, H)),
    "gate and up": lambda: holding(gate=(D, H), up=(D, H)),
    "more heads than a layer has masks": lambda: holding(weight=(D, H), heads=(17, D, H)),
    "four dimensions": lambda: holding(weight=(2, D, H), grid=(4, 2, D, H)),
    "counts": counts,
    "attention": lambda: nn.MultiheadAttention(H, 3),
    "transformer": lambda: nn.TransformerEncoderLayer(H, 3),
    "ours": lambda: nn.Sequential(SwiMGLU(H, D), NaiveMGLU(H, D, top_k=1), GLU(H, D)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_modules_cause_no_warning(name: str) -> None:
    quiet_freeze(nn.ModuleList([OTHERS[name](), MGLU(H, D)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_from_parameters_makes_the_layer_with_these_parameters(dtype: torch.dtype) -> None:
    source = MGLU(H, D, n_masks=3, activation="relu", top_k=2, dtype=dtype)
    layer = MGLU.from_parameters(
        source.weight, source.mask_logits, activation="relu", router=source.router, top_k=2, save_activations=False
    )
    assert layer.weight is source.weight
    assert layer.mask_logits is source.mask_logits
    assert layer.router is source.router
    assert layer.extra_repr() == source.extra_repr().replace("save_activations=True", "save_activations=False")
    x = torch.randn(4, H, dtype=dtype)
    assert torch.equal(layer(x), source(x))
    assert torch.equal(freeze(layer)(x), source(x))


def test_from_parameters_packs_bool_masks_and_takes_one_mask() -> None:
    weight, masks, x = torch.randn(D, H), torch.rand(D, H) > 0.5, torch.randn(4, H)
    fixed = MGLU.from_parameters(weight, masks)
    assert not fixed.learnable_masks
    assert not fixed.weight.requires_grad
    assert fixed.weight.data_ptr() == weight.data_ptr()
    learned = MGLU.from_parameters(weight, masks.float() - 0.5)
    assert learned.n_masks == fixed.n_masks == 1
    assert_matches(fixed(x), F.silu(x @ (weight * masks).T) * (x @ (weight * ~masks).T))
    assert torch.equal(learned(x), fixed(x))


ROUTER, W, M = nn.Linear(H, 2), torch.ones(D, H), torch.ones(2, D, H)
WRONG_PARAMETERS = {
    "weight": ({"weight": W[0]}, ValueError, r"weight: got shape \[21\], must be \[out_features"),
    "list": ({"weight": [[1.0]]}, TypeError, "weight: got list, must be a tensor"),
    "bool weight": ({"weight": W.bool()}, TypeError, "weight: got dtype torch.bool"),
    "integers": ({"masks": M.int()}, TypeError, "masks: got dtype torch.int32, must be one"),
    "shape": ({"masks": M.mT}, ValueError, r"masks: got shape \[2, 21, 12\], must be \[n_masks, 12"),
    "rank": ({"masks": M[0, :, 0]}, ValueError, r"masks: got shape \[12\], must be \[n_masks, out_features"),
    "count": ({"masks": torch.ones(17, D, H)}, ValueError, "n_masks: got 17, must be an int from 1 to 16"),
    "device": ({"masks": M.to("meta")}, ValueError, "masks: got device meta"),
    "top_k": ({"top_k": 1}, ValueError, "router: got None with top_k=1, must both"),
    "router": ({"router": ROUTER}, ValueError, "router: got Linear.* with top_k=None"),
    "size of the router": (
        {"masks": torch.ones(3, D, H), "router": ROUTER, "top_k": 1},
        ValueError,
        r"router: got Linear\(in_features=21, out_features=2.*, must be nn\.Linear\(21, 3\)",
    ),
    "no router": ({"router": ROUTER.weight, "top_k": 1}, TypeError, "router: got Parameter, must be an nn.Linear"),
    "activation": ({"activation": "swish"}, ValueError, "activation: got 'swish'"),
}


@pytest.mark.parametrize("name", WRONG_PARAMETERS)
def test_wrong_parameters_are_refused(name: str) -> None:
    wrong, error, message = WRONG_PARAMETERS[name]
    options = {"weight": W, "masks": M} | wrong
    with pytest.raises(error, match=message):
        MGLU.from_parameters(options.pop("weight"), options.pop("masks"), **options)
