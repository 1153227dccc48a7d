"""`Trainer`: the groups of its optimizer, compilation, gradient checkpointing, and resuming from a checkpoint."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments

import mglu_ops.transformers as mt
from mglu_ops.transformers import load_balancing_loss
from tests.support.hf_models import BY_NAME, MIXTURES, TOKENS, VOCABULARY, mglus, tiny


def examples(number: int = 8) -> list[dict[str, Tensor]]:
    tokens = torch.randint(1, VOCABULARY, (number, 12), generator=torch.Generator().manual_seed(1))
    return [{"input_ids": row, "labels": row} for row in tokens]


def trainer(model: Any, folder: Path, trainer_class: type[Any] = mt.MGLUTrainer, **options: Any) -> Any:
    own = {key: options.pop(key) for key in ("mask_lr",) if key in options}
    settings: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "max_steps": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "adam_epsilon": 1e-3,  # if this is tiny, Adam takes a full step even for a gradient that is rounding noise
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 0,
        **options,
    }
    arguments = TrainingArguments(output_dir=str(folder), **settings)
    return trainer_class(model=model, args=arguments, train_dataset=examples(), **own)


def group_of(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Any]:
    (group,) = [g for g in optimizer.param_groups if any(p is parameter for p in g["params"])]
    return group


@pytest.mark.parametrize(("weight_init", "mask_lr"), [("paper", 0.01), ("leveled", 0.003)])
def test_logits_are_not_decayed_and_have_a_rate_of_their_own(weight_init: str, mask_lr: float, tmp_path: Path) -> None:
    """The learning rate of logits depends on how the weights were initialized, also if the model was loaded."""
    tiny(weight_init=weight_init).save_pretrained(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    optimizer = trainer(model, tmp_path).create_optimizer()
    assert isinstance(optimizer, torch.optim.AdamW)
    layer = model.model.layers[0]
    assert group_of(optimizer, layer.mlp.mglu.mask_logits).items() >= {"weight_decay": 0.0, "lr": mask_lr}.items()
    assert group_of(optimizer, layer.mlp.mglu.weight).items() >= {"weight_decay": 0.1, "lr": 0.01}.items()
    assert group_of(optimizer, layer.input_layernorm.weight).items() >= {"weight_decay": 0.0, "lr": 0.01}.items()
    assert sum(len(group["params"]) for group in optimizer.param_groups) == len(list(model.parameters()))


def test_a_mixture_has_the_groups_of_a_layer(tmp_path: Path) -> None:
    model = tiny("mixtral", mask_top_k=1)
    optimizer = trainer(model, tmp_path).create_optimizer()
    mlp = model.model.layers[0].mlp
    assert group_of(optimizer, mlp.experts.mglu.mask_logits)["name"] == "mask_logits"
    experts = mlp.experts
    for weight in (experts.mglu.weight, experts.mglu.router.weight, experts.down_proj.weight, mlp.gate.weight):
        assert group_of(optimizer, weight)["weight_decay"] == 0.1


def test_the_trainer_of_transformers_decays_logits(tmp_path: Path) -> None:
    """The mixin is needed because `Trainer` alone decays logits. If this test fails, the mixin may be unnecessary."""
    model = tiny()
    optimizer = trainer(model, tmp_path, Trainer).create_optimizer()
    assert group_of(optimizer, mglus(model)[0].mask_logits)["weight_decay"] == 0.1


def test_arguments_of_the_optimizer_are_kept(tmp_path: Path) -> None:
    class Own(mt.MGLUTrainerMixin, Trainer):
        pass

    model = tiny()
    options = {"mask_lr": 3e-4, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "optim": "adamw_torch"}
    optimizer = trainer(model, tmp_path, Own, **options).create_optimizer()
    group = group_of(optimizer, mglus(model)[0].mask_logits)
    assert (group["lr"], group["betas"], group["eps"]) == (3e-4, (0.9, 0.95), 1e-6)


@pytest.mark.parametrize("per_group", [False, True])
def test_a_scheduler_that_overwrites_the_rate_of_masks_gives_one_warning(per_group: bool, tmp_path: Path) -> None:
    made = trainer(tiny(weight_init="leveled"), tmp_path)
    optimizer = made.create_optimizer()
    rates: Any = [group["lr"] for group in optimizer.param_groups] if per_group else 0.01
    made.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=rates, total_steps=2)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made.train()
    found = [str(one.message) for one in caught if "learning rates" in str(one.message)]
    assert len(found) == (0 if per_group else 1)
    assert all(one.startswith("MGLUTrainer: optimizer: got the learning rates weights ") for one in found)


def test_an_optimizer_without_groups_is_refused(tmp_path: Path) -> None:
    class OwnParameters(mt.MGLUTrainer):
        @staticmethod
        def get_optimizer_cls_and_kwargs(args: Any, model: Any = None) -> tuple[type[Any], dict[str, Any]]:
            return torch.optim.SGD, {"params": list(model.parameters()), "lr": 0.1}

    with pytest.raises(ValueError, match=r"optim: got .*, must be an optimizer that takes parameter groups"):
        trainer(tiny(), tmp_path, OwnParameters).create_optimizer()


def trained(folder: Path, model_options: dict[str, Any] | None = None, **options: Any) -> Any:
    model = tiny(**(model_options or {}))
    result = trainer(model, folder, **options).train()
    assert torch.tensor(result.training_loss).isfinite()
    return model


def assert_close(result: Any, expected: Any) -> None:
    for (name, ours), theirs in zip(result.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


ROUTED = {"n_masks": 4, "mask_top_k": 2, "router_aux_loss_coef": 0.1}
MIXTURE = {"name": "qwen3_moe", "n_masks": 4, "mask_top_k": 2, "output_router_logits": True}


@pytest.mark.parametrize("model_options", [{}, ROUTED, MIXTURE], ids=["plain", "routed", "mixture"])
def test_gradient_checkpointing_trains_the_same_model(model_options: dict[str, Any], tmp_path: Path) -> None:
    expected = trained(tmp_path / "a", model_options)
    start = tiny(**model_options)
    assert not torch.equal(mglus(expected)[0].mask_logits, mglus(start)[0].mask_logits)
    model = trained(tmp_path / "b", model_options, gradient_checkpointing=True)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)
    assert_close(model, expected)


@pytest.mark.long  # test_hf_models.py compiles a model in the quick tests
@pytest.mark.parametrize(
    ("model_options", "backend"),
    [(ROUTED, "aot_eager"), ({"name": "mixtral"}, "aot_eager"), ({}, "inductor")],
    ids=["routed", "mixture", "inductor"],
)
def test_a_compiled_model_trains_the_same_model(model_options: dict[str, Any], backend: str, tmp_path: Path) -> None:
    torch._dynamo.reset()
    one = {**model_options, "num_hidden_layers": 1}
    expected = trained(tmp_path / "a", one)
    assert_close(trained(tmp_path / "b", one, torch_compile=True, torch_compile_backend=backend), expected)
    torch._dynamo.reset()


@pytest.mark.parametrize("form", ["autocast", "bfloat16"])
def test_masks_learn_in_16_bits(form: str, tmp_path: Path) -> None:
    model = tiny(**ROUTED)
    if form == "bfloat16":
        model.save_pretrained(tmp_path / "model")
        model = type(model).from_pretrained(tmp_path / "model", dtype=torch.bfloat16)
    before = [mglu.mask_logits.clone() for mglu in mglus(model)]
    options = {"bf16": form == "autocast", "gradient_accumulation_steps": 2, "logging_steps": 1}
    running = trainer(model, tmp_path / "run", **options)
    running.train()
    first, last = (entry["loss"] for entry in running.state.log_history[:2])
    assert last < first
    assert first == pytest.approx(math.log(VOCABULARY) + 0.1 * 2, abs=0.1), "a balanced router adds top_k"
    for mglu, logits in zip(mglus(model), before, strict=True):
        assert mglu.mask_logits.dtype == torch.float32
        assert not torch.equal(mglu.mask_logits, logits)


def test_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2}
    expected = trained(tmp_path / "a", **options)
    model = tiny()
    again = trainer(model, tmp_path / "b", **options)
    again.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert again.state.global_step == 4
    assert again.optimizer.param_groups[-1]["name"] == "mask_logits"
    checkpoint = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "checkpoint-4")
    for ours, theirs, saved in zip(*(each.parameters() for each in (model, expected, checkpoint)), strict=True):
        assert torch.equal(ours, theirs)
        assert torch.equal(saved, theirs)


def balance_by_hand(router_logits: tuple[Tensor, ...], n_masks: int, top_k: int, counted: Tensor) -> float:
    losses = []
    for logits in router_logits:
        kept = logits[counted]
        f = torch.zeros(n_masks)
        for row in kept:
            for index in sorted(range(n_masks), key=lambda i: -row[i].item())[:top_k]:
                f[index] += 1 / len(kept)
        losses.append(n_masks * (f * kept.softmax(-1).mean(0)).sum().item())
    return sum(losses) / len(losses)


def test_the_balance_is_computed_for_each_layer() -> None:
    torch.manual_seed(0)
    logits = tuple(torch.randn(2, 5, 4, requires_grad=True) for _ in range(3))
    padding = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    everything = torch.ones(2, 5, dtype=torch.bool)
    expected = balance_by_hand(logits, 4, 2, everything)
    assert load_balancing_loss(logits, 4, 2).item() == pytest.approx(expected, rel=1e-5)
    expected = balance_by_hand(logits, 4, 2, padding.bool())
    assert load_balancing_loss(logits, 4, 2, padding).item() == pytest.approx(expected, rel=1e-5)
    # Each layer keeps only one of its two masks, so each layer is out of balance, but on average over the two layers,
    # both masks are used alike.
    one, other = torch.tensor([9.0, -9.0]).expand(2, 5, 2), torch.tensor([-9.0, 9.0]).expand(2, 5, 2)
    with torch.no_grad():
        assert load_balancing_loss((one, other), 2, 1).item() == pytest.approx(2, rel=1e-3)


@pytest.mark.parametrize("name", [name for name in BY_NAME if name not in MIXTURES])
def test_the_balance_is_added_in_training(name: str) -> None:
    model = tiny(name, **ROUTED).train()
    plain = tiny(name, **{**ROUTED, "router_aux_loss_coef": 0.0}).train()
    output = model(TOKENS, labels=TOKENS)
    assert len(output.router_logits) == 2
    language = plain(TOKENS, labels=TOKENS).loss
    torch.testing.assert_close(output.loss, language + 0.1 * output.aux_loss)
    torch.testing.assert_close(output.logits, plain(TOKENS).logits)
    output.aux_loss.backward()
    assert all(mglu.router.weight.grad.abs().sum() > 0 for mglu in mglus(model))
    torch.testing.assert_close(model.eval()(TOKENS, labels=TOKENS).loss, language)
    assert model.train()(TOKENS).loss is None
    first, *_ = model(TOKENS, labels=TOKENS, return_dict=False)
    torch.testing.assert_close(first, output.loss)


def test_accumulated_batches_count_by_their_tokens() -> None:
    model = tiny(**ROUTED).train()
    once, half = model(TOKENS, labels=TOKENS), model(TOKENS, labels=TOKENS, num_items_in_batch=2 * 2 * 8)
    torch.testing.assert_close(half.loss, once.loss / 2)


def test_reentrant_checkpoints_are_refused_with_a_balance(tmp_path: Path) -> None:
    options = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(RuntimeError, match="the logits of the routers have no gradient"):
        trained(tmp_path, ROUTED, **options)


def test_experts_are_balanced_as_in_transformers() -> None:
    """`router_aux_loss_coef` of a mixture is for the routers of experts, not for routers of masks."""
    model = tiny(**MIXTURE, router_aux_loss_coef=0.5).train()
    output = model(TOKENS, labels=TOKENS)
    assert [logits.shape for logits in output.router_logits] == [(TOKENS.numel(), 4)] * 2
    language = model(TOKENS, labels=TOKENS, output_router_logits=False).loss
    torch.testing.assert_close(output.loss, language + 0.5 * output.aux_loss)
    output.aux_loss.backward()
    assert all(layer.mlp.gate.weight.grad.abs().sum() > 0 for layer in model.model.layers)


@pytest.mark.parametrize("form", ["label smoothing", "own loss"])
def test_a_loss_without_the_balance_is_refused(form: str, tmp_path: Path) -> None:
    def make(**model_options: Any) -> Any:
        smoothing = 0.1 if form == "label smoothing" else 0.0
        arguments = TrainingArguments(output_dir=str(tmp_path), label_smoothing_factor=smoothing, report_to=[])
        own_loss = None if smoothing else (lambda outputs, labels, num_items_in_batch: outputs.logits.sum())
        return mt.MGLUTrainer(model=tiny(**model_options), args=arguments, compute_loss_func=own_loss)

    make(), make(**{**ROUTED, "router_aux_loss_coef": 0.0}), make(**{**MIXTURE, "output_router_logits": False})
    with pytest.raises(ValueError, match=r"router_aux_loss_coef: got 0\.1 with label_smoothing_factor or compute_loss"):
        make(**ROUTED)
    with pytest.raises(ValueError, match=r"router_aux_loss_coef: got 0\.001 with label_smoothing_factor or compute_"):
        make(**MIXTURE)
