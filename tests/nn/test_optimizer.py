"""`parameter_groups`: the group of each parameter, what optimizers do with the groups, and errors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from mglu_ops.nn import GLU, MGLU, MaskStatistics, NaiveMGLU, SwiMGLU, check_mask_lr, freeze, parameter_groups

MASKED = [MGLU, NaiveMGLU]


class Own(nn.Module):
    """A user's own naive layer, with a two-dimensional norm and a two-dimensional bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 16))
        self.logits = nn.Parameter(torch.randn(2, 8, 16))
        self.position_bias = nn.Parameter(torch.randn(8, 8))
        self.norm = nn.LayerNorm((4, 8))


class Model(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module] = MGLU) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.norm = nn.RMSNorm(16)
        self.gated = kind(16, 24, n_masks=2, top_k=1)
        self.down = nn.Linear(24, 16)
        self.own = Own()
        self.head = nn.Linear(16, 32, bias=False)
        self.head.weight = self.embedding.weight


def groups_of(model: nn.Module, **options: Any) -> dict[str, set[str]]:
    """The names of the parameters in each group."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, **options)
    assert sum(len(group["params"]) for group in groups) == len({p for group in groups for p in group["params"]})
    return {group["name"]: {names[parameter] for parameter in group["params"]} for group in groups}


SPARED = {"norm.weight", "down.bias", "own.position_bias", "own.norm.weight", "own.norm.bias"}
WEIGHTS = {"embedding.weight", "gated.weight", "gated.router.weight", "down.weight", "own.weight"}


@pytest.mark.parametrize("kind", MASKED)
def test_logits_of_modules_norms_and_biases_have_groups_of_their_own(kind: type[nn.Module]) -> None:
    model = Model(kind)
    found = groups_of(model)
    assert found == {"weights": WEIGHTS | {"own.logits"}, "no_decay": SPARED, "mask_logits": {"gated.mask_logits"}}
    assert list(found) == ["weights", "no_decay", "mask_logits"]
    assert set().union(*found.values()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize(
    "selection",
    [
        ["own.logits"],
        ["*.logits"],
        ("own.log*", "own.logits"),
        lambda name, parameter: name == "own.logits",
        lambda name, parameter: parameter.dim() == 3,
    ],
)
@pytest.mark.parametrize("compiled", [False, True])
def test_logits_of_other_modules_are_selected(selection: Any, compiled: bool) -> None:
    model = Model()
    if compiled:
        model.own = torch.compile(model.own)
        assert "own._orig_mod.logits" in dict(model.named_parameters())
    chosen = {name.replace("_orig_mod.", "") for name in groups_of(model, mask_logits=selection)["mask_logits"]}
    assert chosen == {"gated.mask_logits", "own.logits"}


@pytest.mark.parametrize(("weight_init", "mask_lr"), [("paper", 2e-3), ("leveled", 6e-4)])
@pytest.mark.parametrize("kind", MASKED)
def test_rates_and_decays(kind: type[nn.Module], weight_init: str, mask_lr: float) -> None:
    """The default learning rate of masks depends on how the weights were initialized."""

    def settings(**options: float) -> list[tuple[str, float, float]]:
        model = Model(partial(kind, weight_init=weight_init))
        groups = parameter_groups(model, lr=2e-3, weight_decay=0.1, **options)
        assert all(set(group) == {"name", "params", "lr", "weight_decay", "lr_ratio"} for group in groups)
        return [(group["name"], group["lr"], group["weight_decay"]) for group in groups]

    spared = [("weights", 2e-3, 0.1), ("no_decay", 2e-3, 0.0)]
    assert settings() == [*spared, ("mask_logits", pytest.approx(mask_lr, rel=1e-12), 0.0)]
    assert settings(mask_lr=5e-3) == [*spared, ("mask_logits", 5e-3, 0.0)]
    assert settings(mask_lr=0) == [*spared, ("mask_logits", 0, 0.0)]


def test_layers_of_both_kinds_get_their_own_rates_and_a_warning() -> None:
    model = nn.Sequential(MGLU(8, 8, weight_init="leveled"), MGLU(8, 8), MGLU(8, 8, weight_init="leveled"))
    words = "the masks of some layers get the learning rate 0.0003 and those of others 0.001, because the layers differ"
    with pytest.warns(UserWarning, match=words) as caught:
        groups = parameter_groups(model, lr=1e-3, weight_decay=0.1)
    assert [warning.filename for warning in caught] == [__file__]
    leveled, paper = groups[1:]
    assert [group["name"] for group in groups] == ["weights", "mask_logits", "mask_logits"]
    assert [id(p) for p in leveled["params"]] == [id(model[0].mask_logits), id(model[2].mask_logits)]
    assert [id(p) for p in paper["params"]] == [id(model[1].mask_logits)]
    assert (leveled["lr"], paper["lr"]) == (pytest.approx(3e-4), 1e-3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(parameter_groups(model, lr=1e-3, weight_decay=0.1, mask_lr=1e-4)) == 2
        model[1].requires_grad_(False)
        assert len(parameter_groups(model, lr=1e-3, weight_decay=0.1)) == 2


def test_selected_logits_have_the_rate_that_their_module_says() -> None:
    model = nn.ModuleList([Own(), Own()])
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, mask_logits=["*.logits"])
    assert groups[-1]["lr"] == 1e-3
    for own in model:
        own.weight_init = "leveled"
    groups = parameter_groups(model, lr=1e-3, weight_decay=0.1, mask_logits=["*.logits"])
    assert groups[-1]["lr"] == pytest.approx(3e-4)


WRAPPED: dict[str, Callable[[Model], nn.Module]] = {
    "compiled": torch.compile,
    "data parallel": lambda model: nn.DataParallel(torch.compile(model)),
    "root": lambda model: nn.ModuleList([model]),
}


@pytest.mark.parametrize("wrap", WRAPPED)
def test_wrapped_models(wrap: str) -> None:
    model = Model()
    want = [group["params"] for group in parameter_groups(model, lr=1.0, weight_decay=1.0)]
    got = [group["params"] for group in parameter_groups(WRAPPED[wrap](model), lr=1.0, weight_decay=1.0)]
    assert [[id(p) for p in group] for group in got] == [[id(p) for p in group] for group in want]


def test_a_layer_may_be_the_model_itself() -> None:
    assert groups_of(MGLU(8, 8)) == {"weights": {"weight"}, "mask_logits": {"mask_logits"}}
    assert groups_of(torch.compile(NaiveMGLU(8, 8)))["mask_logits"] == {"_orig_mod.mask_logits"}
    assert groups_of(type("Scaled", (MGLU,), {})(8, 8))["mask_logits"] == {"mask_logits"}
    assert groups_of(nn.Linear(4, 4)) == {"weights": {"weight"}, "no_decay": {"bias"}}


def test_frozen_parameters_and_empty_groups_are_omitted() -> None:
    model = Model()
    model.embedding.weight.requires_grad_(False)
    model.gated.mask_logits.requires_grad_(False)
    assert groups_of(model) == {"weights": (WEIGHTS - {"embedding.weight"}) | {"own.logits"}, "no_decay": SPARED}
    assert groups_of(freeze(SwiMGLU(8, 8))) == {"weights": {"mglu.weight", "down_proj.weight"}}
    assert groups_of(MGLU(8, 8, learnable_masks=False)) == {"weights": {"weight"}}
    assert groups_of(GLU(8, 8)) == {"weights": {"gate_proj.weight", "up_proj.weight"}}


def test_a_shared_parameter_is_in_one_group_whichever_name_comes_first() -> None:
    for order in (("plain", "masked"), ("masked", "plain")):
        parts = {"plain": Own(), "masked": MGLU(16, 8, n_masks=2)}
        parts["plain"].logits = parts["masked"].mask_logits
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # no warning, because the logits are known
            found = groups_of(nn.ModuleDict({name: parts[name] for name in order}))
        assert len(found["mask_logits"]) == 1
        assert len(found["weights"]) == 2
    second, first = nn.Linear(4, 4), nn.LayerNorm((4, 4), bias=False)
    second.weight = first.weight
    for modules in ([first, second], [second, first]):
        assert len(groups_of(nn.ModuleList(modules))["no_decay"]) == 2
    layer = MGLU(8, 8)
    assert groups_of(nn.ModuleList([layer, layer]))["mask_logits"] == {"0.mask_logits"}
    own = Own()
    twice = nn.ModuleDict({"a": own, "b": own})
    assert groups_of(twice, mask_logits=["b.logits"])["mask_logits"] == {"a.logits"}


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tensor: Tensor) -> Tensor:
        return 2 * self.scale * tensor


def test_parametrized_logits_are_recognised() -> None:
    layer = MGLU(8, 8)
    parametrize.register_parametrization(layer, "mask_logits", Doubled())
    parametrize.register_parametrization(layer, "weight", Doubled())
    found = groups_of(layer)
    logits = "parametrizations.mask_logits"
    assert found["mask_logits"] == {f"{logits}.original", f"{logits}.0.scale"}
    assert found["weights"] == {"parametrizations.weight.original"}


def prune_half(module: nn.Module, name: str) -> None:
    prune.custom_from_mask(module, name, torch.arange(getattr(module, name).numel()).view_as(getattr(module, name)) % 2)


@pytest.mark.parametrize("kind", MASKED)
def test_pruned_logits_are_recognised(kind: type[nn.Module]) -> None:
    layer = kind(8, 8)
    prune_half(layer, "mask_logits")
    prune_half(layer, "weight")
    assert groups_of(layer) == {"weights": {"weight_orig"}, "mask_logits": {"mask_logits_orig"}}


@pytest.mark.parametrize("compiled", [False, True])
def test_adamw_decays_neither_logits_nor_norms_and_moves_logits_by_their_rate(compiled: bool) -> None:
    model: Any = nn.Sequential(nn.LayerNorm(16), SwiMGLU(16, 24, n_masks=2, weight_init="leveled"))
    forward = torch.compile(model, backend="aot_eager") if compiled else model
    optimizer = torch.optim.AdamW(parameter_groups(forward, lr=1e-3, weight_decay=0.5))
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    forward(torch.randn(4, 16)).square().sum().backward()
    for parameter in model.parameters():
        parameter.grad.zero_()
    optimizer.step()
    for name, parameter in model.named_parameters():
        decayed = name.endswith((".mglu.weight", "down_proj.weight"))
        torch.testing.assert_close(parameter.detach(), before[name] * (1 - 5e-4) if decayed else before[name])
    optimizer = torch.optim.AdamW(parameter_groups(forward, lr=1e-3, weight_decay=0.0))
    for parameter in model.parameters():
        parameter.grad.fill_(0.5)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer.step()
    for name, parameter in model.named_parameters():
        step = 3e-4 if name.endswith("mask_logits") else 1e-3
        moved = before[name] - parameter.detach()
        torch.testing.assert_close(moved, torch.full_like(moved, step), rtol=1e-3, atol=0)


class FullyShardedDataParallel(nn.Sequential):
    """A class with the name of FSDP1's wrapper, which flattens parameters."""


BAD = [
    ({"model": [1]}, TypeError, "model: got list, must be a torch.nn.Module"),
    ({"model": nn.ReLU()}, ValueError, "model: ReLU has no parameter with requires_grad=True"),
    ({"model": nn.Linear(2, 2).requires_grad_(False)}, ValueError, "model: Linear has no parameter"),
    ({"model": nn.Sequential(nn.LazyLinear(3))}, ValueError, r"model: 0\.weight has no shape yet; call the model once"),
    ({"model": nn.Sequential(FullyShardedDataParallel(nn.Linear(2, 2)))}, ValueError, "use .*fully_shard"),
    ({"lr": -1e-3}, ValueError, r"lr: got -0\.001, must be finite and at least 0"),
    ({"lr": float("nan")}, ValueError, "lr: got nan"),
    ({"lr": "1e-3"}, TypeError, "lr: got '1e-3', must be a number"),
    ({"lr": torch.tensor(1e-3)}, TypeError, "lr: got tensor"),
    ({"weight_decay": -0.1}, ValueError, r"weight_decay: got -0\.1"),
    ({"weight_decay": True}, TypeError, "weight_decay: got True"),
    ({"mask_lr": -1}, ValueError, "mask_lr: got -1"),
    ({"mask_logits": "own.logits"}, TypeError, "mask_logits: got 'own.logits', must be a list of names"),
    ({"mask_logits": 3}, TypeError, "mask_logits: got 3"),
    ({"mask_logits": [3]}, TypeError, r"mask_logits: got 3 in the list, must be a str"),
    ({"mask_logits": ["own.logit"]}, ValueError, "no parameter has the name 'own.logit'; the model has .*own.logits"),
    ({"mask_logits": ["*.logits", "x"]}, ValueError, "no parameter has the name 'x'"),
]


@pytest.mark.parametrize(("wrong", "error", "message"), BAD, ids=[f"{i}-{min(w)}" for i, (w, _, _) in enumerate(BAD)])
def test_bad_arguments_are_named(wrong: dict[str, Any], error: type[Exception], message: str) -> None:
    options = {"model": Model(), "lr": 1e-3, "weight_decay": 0.1} | wrong
    with pytest.raises(error, match=message):
        parameter_groups(options.pop("model"), **options)


# --- Schedulers and other optimizers ----------------------------------------------------------------------------------


def leveled() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(SwiMGLU(16, 24, n_masks=2, weight_init="leveled"), nn.LayerNorm(16), nn.Linear(16, 4))


SCHEDULERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], bool]] = {
    "none": (lambda _: None, True),
    "one cycle": (lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-3, total_steps=9), False),
    "one cycle of each": (
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, [group["lr"] for group in o.param_groups], total_steps=9),
        True,
    ),
    "cyclic": (lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-4, 1e-3, cycle_momentum=False), False),
    "cosine": (lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9), True),
    "from 0": (lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: step / 9), True),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_scheduler_that_overwrites_the_rate_of_masks_is_found(name: str) -> None:
    make, is_kept = SCHEDULERS[name]
    optimizer = torch.optim.AdamW(parameter_groups(leveled(), lr=1e-3, weight_decay=0.1))
    make(optimizer)
    if is_kept:
        check_mask_lr(optimizer)
        return
    words = r"optimizer: got the learning rates weights .*, mask_logits .*, must be .*, 0\.3 times the weights'"
    with pytest.raises(ValueError, match=words):
        check_mask_lr(optimizer)


def test_other_groups_are_not_checked() -> None:
    check_mask_lr(torch.optim.AdamW(leveled().parameters()))
    check_mask_lr(torch.optim.AdamW(parameter_groups(leveled(), lr=0.0, mask_lr=1e-3, weight_decay=0.0)))
    masks = [one for one in parameter_groups(leveled(), lr=1e-3, weight_decay=0.0) if one["name"] == "mask_logits"]
    check_mask_lr(torch.optim.SGD(masks, lr=1.0))
    with pytest.raises(TypeError, match="optimizer: got list, must be an optimizer with param_groups"):
        check_mask_lr(masks)


def _muon(groups: list[dict[str, Any]]) -> list[torch.optim.Optimizer]:
    """Muon for weights, and AdamW for all other parameters."""
    weights = [one for one in groups if one["name"] == "weights"]
    return [torch.optim.Muon(weights), torch.optim.AdamW([one for one in groups if one["name"] != "weights"])]


@pytest.mark.parametrize(
    ("make", "lr", "mask_lr"),
    [
        (lambda groups: [torch.optim.AdamW(groups)], 1e-2, None),
        (_muon, 1e-2, 3e-3),
        (lambda groups: [torch.optim.Adafactor(groups)], 1e-2, None),
        (lambda groups: [torch.optim.Adafactor(groups)], 1e-1, 0.5),
    ],
    ids=["AdamW", "Muon", "Adafactor", "Adafactor at its own rate"],
)
def test_masks_learn_with_other_optimizers(make: Callable[..., Any], lr: float, mask_lr: float | None) -> None:
    model, x = leveled(), torch.randn(64, 16)
    target, statistics = torch.randn(64, 16) @ model[2].weight.detach().T, MaskStatistics(model)
    optimizers = make(parameter_groups(model, lr=lr, weight_decay=0.0, mask_lr=mask_lr))
    statistics.update()
    losses = []
    for _ in range(30):
        loss = nn.functional.mse_loss(model(x), target)
        losses.append(loss.item())
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
            check_mask_lr(optimizer)
    flips = [value for key, value in statistics.update().items() if "flips" in key]
    assert losses[-1] < losses[0]
    assert min(flips) > 0
