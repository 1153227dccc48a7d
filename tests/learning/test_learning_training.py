"""Training in the experiments about learning: every layer learns, and a stopped run resumes exactly."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.learning import masks, schedule, train, training
from benchmarks.learning.mixture import BALANCE, Mixture
from benchmarks.learning.recipe import Recipe
from benchmarks.records import read_table
from mglu_ops.nn import MGLU
from tests.support.families import quick_only_for, sample
from tests.support.learning import VOCABULARY, rows_of, tiny_run

pytest_plugins = ["tests.support.learning"]
pytestmark = pytest.mark.usefixtures("tiny")


def test_the_learning_rate_rises_and_falls():
    rates = [schedule.rate(step, 1000, 0.1) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[99] == 1
    assert rates[549] == pytest.approx(0.55, abs=0.01)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a > b for a, b in pairwise(rates[100:]))
    assert schedule.rate(999, 1000, 0) == pytest.approx(0, abs=1e-5)


def test_a_long_curve_has_a_point_every_thousand_steps():
    assert len(schedule.points(3662)) == schedule.EVALUATIONS
    assert schedule.points(3) == [1, 2, 3]
    points = schedule.points(20_345)
    assert points[-1] == 20_345
    assert max(after - before for before, after in pairwise([0, *points])) <= 1000


def test_every_window_is_read_once_in_an_epoch():
    tokens = torch.arange(1000, dtype=torch.int32).to(torch.uint16)
    windows = schedule.Windows(tokens, "cpu")
    seen = torch.cat([windows.batch(step) for step in range(windows.steps_of_epoch)])
    assert seen.shape == (60, 17)  # 62 windows of 16 tokens are 15 steps of 4 sequences
    assert len(torch.unique(seen, dim=0)) == 60
    assert torch.equal(seen - seen[:, :1], torch.arange(17).expand(60, 17))
    assert not torch.equal(windows.batch(windows.steps_of_epoch), windows.batch(0))
    assert torch.equal(windows.batch(0), schedule.Windows(tokens, "cpu").batch(0))
    with pytest.raises(ValueError, match="tokens: got 60, must be more than 64"):
        schedule.Windows(tokens[:60], "cpu")


DENSE_LAYERS = [
    {"layer": "lu"},
    {"layer": "glu"},
    {"layer": "glu_shared"},
    {"layer": "mglu", "n_masks": 2, "mask_lr": 0.1},
    {"layer": "mglu", "n_masks": 3, "top_k": 2, "scaled_sum": True},
    {"layer": "mglu", "n_masks": 2, "learned": False},
    {"layer": "mglu", "n_masks": 2, "straight_through": "tanh"},
    {"layer": "mglu", "n_masks": 2, "continuous": 0.5},
    {"layer": "mglu", "n_masks": 2, "flips": 0.2},
    {"layer": "no_gate_mask", "n_masks": 1},
    {"layer": "no_value_mask", "n_masks": 1},
]
MIXTURES = [
    {"layer": "lu", "experts": 4, "active": 2},
    {"layer": "glu", "experts": 4, "active": 2},
    {"layer": "mglu", "n_masks": 2, "experts": 4, "active": 2},
    {"layer": "mglu", "n_masks": 3, "experts": 4, "active": 3, "learned": False},
]


@pytest.mark.parametrize(
    "options",
    quick_only_for([DENSE_LAYERS[1], DENSE_LAYERS[3], DENSE_LAYERS[4], MIXTURES[2]], DENSE_LAYERS + MIXTURES),
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_every_layer_learns_and_writes_its_curve(options, text, tmp_path):
    one = tiny_run(text, 20, **options)
    assert train.run(one, text, tmp_path, "cpu", compiled=False)
    facts, rows = read_table(tmp_path / f"{one.name}.csv")
    assert [int(row["step"]) for row in rows] == [5, 10, 15, 20]
    assert all(float(row["worst"]) >= float(row["train"]) for row in rows)
    assert float(facts["tflop"]) == round(one.flops_of_token * 20 * 64 / 1e12)
    losses = [float(row["held_out"]) for row in rows]
    assert losses[-1] < losses[0] < math.log(VOCABULARY)
    assert facts["recipe.layer"] == options["layer"]
    assert facts["corpus.digest"] == text.sizes.digest
    assert int(facts["weights"]) > 0
    if one.has_masks:
        assert 0.3 < float(rows[-1]["gate_ratio"]) < 0.7
        assert (float(rows[-1]["flipped"]) > 0) == one.learned
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.parametrize("layer", ["lu", "glu", "mglu"])
def test_a_mixture_is_a_loop_over_experts_with_a_loss_that_balances_them(layer):
    masked = {"n_masks": 2} if layer == "mglu" else {}
    mixture = Mixture(5, 2, 16, 24, layer, "silu", **masked)
    x = torch.randn(3, 4, 16, requires_grad=True)
    grad = torch.randn(3, 4, 16)
    given = [x, *mixture.parameters()]
    result = mixture(x)
    found = torch.autograd.grad(result, given, grad)

    probabilities = F.softmax(mixture.router(x), -1)
    weights, ids = probabilities.topk(2)
    weights = weights / weights.sum(-1, keepdim=True)
    expected = torch.zeros_like(x)
    for e in range(5):
        gate, *up = (one[e] for name, one in mixture.projection.named_parameters() if name.endswith("weight"))
        if layer == "mglu":
            masks = mixture.projection.mask_logits[e]
            hard = ((masks > 0).float() - masks).detach() + masks  # straight through
            y = sum(F.silu(F.linear(x, gate * mask)) * F.linear(x, gate * (1 - mask)) for mask in hard)
        else:
            y = F.silu(F.linear(x, gate)) * (F.linear(x, up[0]) if up else 1)
        share = (weights * (ids == e)).sum(-1, keepdim=True)
        expected = expected + share * F.linear(y, mixture.down.weight[e])
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-5)
    load = torch.stack([(ids == e).float().mean() for e in range(5)])
    balance = 5 * (load * probabilities.mean((0, 1))).sum()
    total = (expected * grad).sum() + BALANCE * balance
    for one, other in zip(found, torch.autograd.grad(total, given), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"continuous": 0.5}, {"layer": "no_gate_mask"}, MIXTURES[2]], ids=str)
def test_a_compiled_run_follows_the_eager_one(options, text, tmp_path):
    one = tiny_run(text, 40, **{"n_masks": 2, **options})
    for compiled in (False, True):
        assert train.run(one, text, tmp_path / str(compiled), "cpu", compiled=compiled)
    for first, second in zip(rows_of(tmp_path / "False", one), rows_of(tmp_path / "True", one), strict=True):
        assert float(first["held_out"]) == pytest.approx(float(second["held_out"]), rel=0.02)


@pytest.mark.parametrize("options", sample([{}, {"average": 0.2}, {"continuous": 0.5}, {"flips": 0.2}], 4), ids=str)
def test_a_run_that_was_stopped_goes_on_bit_for_bit(options, text, tmp_path):
    one = tiny_run(text, 20, n_masks=2, mask_stop=0.7, **options)
    assert train.run(one, text, tmp_path / "whole", "cpu", compiled=False)
    stops = 0
    while not train.run(one, text, tmp_path / "parts", "cpu", limit=0, compiled=False):
        stops += 1
        assert (tmp_path / "parts" / f"{one.name}.pt").is_file()
    assert stops == 3
    assert rows_of(tmp_path / "whole", one) == rows_of(tmp_path / "parts", one)


def test_held_out_text_is_read_with_the_average_of_the_parameters(text):
    """Over half of 6 steps: the mean of the parameters after the first 3 steps, then a third of each step."""
    run = training.Training(tiny_run(text, 6, n_masks=2, average=0.5), text, "cpu", compiled=False)
    run.warm_up()
    after = []
    for _ in range(6):
        run.step()
        after.append([one.detach().clone() for one in run.model.parameters()])
    averages = [torch.stack(of[:3]).mean(0) for of in zip(*after, strict=True)]
    for of in after[3:]:
        averages = [average + (one - average) / 3 for average, one in zip(averages, of, strict=True)]
    found = run.point(0.0, 0.0)["held_out"]
    assert all(torch.equal(one, last) for one, last in zip(run.model.parameters(), after[-1], strict=True))
    last = run.losses()["held_out"]
    with torch.no_grad():
        for parameter, average in zip(run.model.parameters(), averages, strict=True):
            torch.testing.assert_close(run.averages.pop(0), average)
            parameter.copy_(average)
    assert found == pytest.approx(run.losses()["held_out"], rel=1e-5)
    assert found != pytest.approx(last, rel=1e-5)


def test_a_checkpoint_of_another_recipe_is_refused(text, tmp_path):
    one = tiny_run(text, 8)
    run = training.Training(one, text, "cpu", compiled=False)
    run.save(tmp_path / "checkpoint.pt")
    other = training.Training(replace(one, lr=1e-4), text, "cpu", compiled=False)
    with pytest.raises(ValueError, match="the checkpoint is of another recipe"):
        other.restore(tmp_path / "checkpoint.pt")


def assert_distilled(run: training.Training) -> None:
    """Check that the loss is the cross entropy against the teacher's probabilities. The teacher must not change."""
    batch = run.windows.batch(0)
    before = [parameter.clone() for parameter in run.teacher.parameters()]
    with torch.no_grad():
        wanted, own = (model.logits(batch[:, :-1]).log_softmax(-1) for model in (run.teacher, run.model))
        torch.testing.assert_close(run.loss(batch), -(wanted.exp() * own).sum(-1).mean())
        own = own.gather(-1, batch[:, 1:, None])
        torch.testing.assert_close(run.model(batch), -own.mean())
    run.step()
    assert all(map(torch.equal, before, run.teacher.parameters()))


@pytest.mark.parametrize(
    "options",
    [
        {"n_masks": 3, "distilled": True},
        pytest.param({"n_masks": 1}, marks=pytest.mark.long),
        pytest.param({"n_masks": 2, "top_k": 1, "scaled_sum": True}, marks=pytest.mark.long),
    ],
)
def test_a_converted_model_starts_from_its_teacher(options, text, tmp_path):
    teacher = tiny_run(text, 40, layer="glu")
    one = tiny_run(text, 12, start="magnitude", skip=teacher.megabytes, **options)
    assert one.teacher == replace(teacher, lr=Recipe.lr)
    assert not train.run(one, text, tmp_path, "cpu", limit=0, compiled=False)  # not even the teacher is trained yet
    while not train.run(one, text, tmp_path, "cpu", limit=0, compiled=False):
        pass
    assert {path.name for path in tmp_path.iterdir() if path.suffix != ".lock"} == {
        f"{one.name}.csv",
        f"{one.teacher.name}.csv",
        f"{one.teacher.name}.weights",
    }
    run = training.Training(one, text, "cpu", False, torch.load(tmp_path / f"{one.teacher.name}.weights"))
    projection = training.masked_layers(run.model)[0]
    state = torch.load(tmp_path / f"{one.teacher.name}.weights")
    gate, up = (state[f"blocks.0.projection.{name}_proj.weight"] for name in ("gate", "up"))
    mask = projection.mask_logits[0] > 0
    assert torch.equal(mask, gate.abs() >= up.abs())
    assert torch.equal(projection.weight, torch.where(mask, gate, up))
    share = 1 if one.top_k else one.n_masks
    assert torch.equal(run.model.blocks[0].down.weight * share, state["blocks.0.down.weight"] / share * share)
    assert torch.equal(run.model.embedding.weight, state["embedding.weight"])
    first = run.windows.batch(run.skipped)
    assert run.skipped == schedule.steps_of(one.skip, text) > 0
    assert not torch.equal(first, run.windows.batch(0))
    if one.distilled:
        assert one.flops_of_token > replace(one, distilled=False).flops_of_token
        assert_distilled(run)
    with pytest.raises(ValueError, match="teacher: got None, must be the state of glu"):
        training.Training(one, text, "cpu", compiled=False)


@pytest.mark.parametrize("flips", [0, 1.0])
def test_masks_stop_where_the_recipe_says(flips, text):
    one = tiny_run(text, 10, n_masks=2, mask_stop=0.5, flips=flips)
    run = training.Training(one, text, "cpu", compiled=False)
    for _ in range(5):
        run.step()
    logits = [layer.mask_logits.detach().clone() for layer in training.masked_layers(run.model)]
    weight = run.model.blocks[0].projection.weight.detach().clone()
    run.step()
    assert all(map(torch.equal, logits, (layer.mask_logits for layer in training.masked_layers(run.model))))
    assert not torch.equal(weight, run.model.blocks[0].projection.weight)


@pytest.mark.parametrize("n_masks", [1, 3])
def test_a_continuous_mask_is_a_clamped_line_until_it_is_hard(n_masks):
    layer = masks.ContinuousMGLU(24, 40, n_masks=n_masks, activation="relu").double()
    with torch.no_grad():
        layer.mask_logits *= 3  # some masks must be clamped to 0 or 1
    layer.set_tau(0.04)
    x, grad = torch.randn(7, 24, dtype=torch.float64), torch.randn(7, 40, dtype=torch.float64)
    given = [layer.weight, layer.mask_logits]
    continuous = (layer.mask_logits / layer.tau + 0.5).clamp(0, 1)
    assert 0.1 < float(((continuous > 0) & (continuous < 1)).double().mean()) < 0.9
    expected = sum(
        F.relu(F.linear(x, layer.weight * m)) * F.linear(x, layer.weight * (1 - m)) for m in continuous.unbind()
    )
    grad_weight, grad_logits = torch.autograd.grad(expected, given, grad)
    found = layer(x)
    torch.testing.assert_close(found, expected)
    expected_grads = [grad_weight, grad_logits * layer.tau]
    for one, other in zip(torch.autograd.grad(found, given, grad), expected_grads, strict=True):
        torch.testing.assert_close(one, other)
    layer.set_tau(0)
    hard = MGLU.from_parameters(layer.weight, layer.mask_logits, activation="relu")
    assert torch.equal(layer(x), hard(x))


def test_masks_are_hard_after_the_steps_in_which_they_are_continuous(text):
    run = training.Training(tiny_run(text, 10, n_masks=2, continuous=0.5), text, "cpu", compiled=False)
    run.warm_up()
    taus = []
    for _ in range(run.steps):
        run.step()
        (layer, *_) = training.masked_layers(run.model)
        taus.append(float(layer.tau))
        assert layer.is_continuous == (taus[-1] > 0)
    assert taus == pytest.approx([0.05, 0.04, 0.03, 0.02, 0.01, 0, 0, 0, 0, 0])


def test_accumulators_flip_a_share_of_the_bits_if_gradients_are_noise():
    accumulators = torch.empty(200, 300)
    masks.start_accumulators(accumulators, 0.3)
    assert float((accumulators > 0).float().mean()) == pytest.approx(0.3, abs=0.01)
    flips = []
    for step in range(200):
        before = accumulators > 0
        scale = 10.0 ** (step % 5)  # the threshold follows the size of the gradients
        masks.step_accumulators(accumulators, scale * torch.randn(200, 300), 1e-3)
        assert float(accumulators.abs().max()) <= 1
        flips.append(float((before != (accumulators > 0)).float().mean()))
    # An accumulator flips when it has crossed 0, by about half a step of 0.03. So it walks further than 1, and about a
    # tenth fewer bits flip.
    for part in (flips[:100], flips[100:]):
        assert sum(part) / 100 == pytest.approx(1e-3, rel=0.2)


def test_an_accumulator_flips_when_its_gradients_have_reached_the_threshold():
    accumulators = torch.tensor([1.0, -1.0, 1.0, -1.0])
    grad = torch.tensor([1.0, 1.0, -1.0, -1.0])  # positive gradients push bits to 0, negative ones to 1
    found = []
    for _ in range(9):
        masks.step_accumulators(accumulators, 7 * grad, 0.0625)  # steps of a quarter
        found.append(accumulators.tolist())
    assert [one[0] for one in found] == [0.75, 0.5, 0.25, -1, -1, -1, -1, -1, -1]
    assert [one[3] for one in found] == [-0.75, -0.5, -0.25, 1, 1, 1, 1, 1, 1]
    assert all(one[1:3] == [-1, 1] for one in found)


def test_accumulators_are_all_that_the_optimiser_knows_of_a_mask(text):
    run = training.Training(tiny_run(text, 8, n_masks=2, flips=0.5), text, "cpu", compiled=False)
    before = [layer.mask_logits.detach().clone() for layer in training.masked_layers(run.model)]
    for _ in range(8):
        run.step()
    state = run.optimizers[0].state_dict()["state"]
    weights = sum(one.numel() for name, one in run.model.named_parameters() if "mask_logits" not in name)
    assert sum(one["exp_avg"].numel() for one in state.values()) == weights
    for first, layer in zip(before, training.masked_layers(run.model), strict=True):
        assert layer.mask_logits.grad is None
        assert not torch.equal(first > 0, layer.mask_logits > 0)


@pytest.mark.parametrize("logits", sorted(set(masks.LOGIT_BYTES) - {"adamw_8bit"}))
def test_each_optimizer_of_logits_keeps_its_bytes_and_learns_masks(logits, text):
    recipe = tiny_run(text, 8, n_masks=2, logits=logits)
    run = training.Training(recipe, text, "cpu", compiled=False)
    layers = training.masked_layers(run.model)
    before = [layer.mask_logits.detach().clone() for layer in layers]
    losses = [run.step() for _ in range(8)]
    held = 0
    for layer, first in zip(layers, before, strict=True):
        own = [one.state[layer.mask_logits] for one in run.optimizers if layer.mask_logits in one.state]
        assert len(own) == 1, "one optimizer steps the logits"
        held += layer.mask_logits.nbytes
        held += sum(one.nbytes for one in own[0].values() if isinstance(one, torch.Tensor) and one.numel() > 1)
        assert not torch.equal(first > 0, layer.mask_logits > 0)
    # Adafactor's rows and columns are a large share of layers this small.
    rows_and_columns = [4 * (1 / one.shape[-1] + 1 / one.shape[-2]) * (logits == "adafactor") for one in before]
    bytes_of_each = [masks.LOGIT_BYTES[logits] + more for more in rows_and_columns]
    assert held == pytest.approx(sum(one.numel() * own for one, own in zip(before, bytes_of_each, strict=True)))
    assert all(loss.isfinite() for loss in losses)


def test_held_out_loss_is_in_nats_a_byte_of_the_text(text):
    """The oracle adds up each token's loss, window by window, and divides by the bytes that the tokens stand for."""
    run = training.Training(tiny_run(text, 4), text, "cpu", compiled=False)
    windows = (len(text.held_out) - 1) // 16
    windows -= windows % 4
    nats = 0.0
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for i in range(windows):
            tokens = text.held_out[16 * i : 16 * i + 17].long()
            x = run.model.embedding(tokens[None, :-1])
            for block in run.model.blocks:
                x = block(x, (run.model.cosine[:16], run.model.sine[:16]))
            logits = (run.model.loss.norm(x) @ run.model.embedding.weight.t()).double().log_softmax(-1)[0]
            nats -= float(sum(logits[j, tokens[j + 1]] for j in range(16)))
    predicted = text.held_out[1 : 16 * windows + 1].tolist()
    assert run.losses()["held_out"] == pytest.approx(
        nats / sum(map(text.token_bytes.tolist().__getitem__, predicted)), rel=1e-3
    )
    assert windows * 16 > 0.9 * len(text.held_out)
    assert int(text.token_bytes[text.held_out.long()].sum()) == text.sizes.held_out_bytes


def test_each_kind_of_text_has_its_own_held_out_loss(text, tmp_path):
    first = {"held_out_tokens": 16 * 4 * 3, "held_out_bytes": 0}
    rest = {"held_out_tokens": text.sizes.held_out_tokens - 16 * 4 * 3, "held_out_bytes": 0}
    several = replace(text, sizes=replace(text.sizes, parts={"a": first, "b": rest}))
    run = training.Training(tiny_run(text, 4), several, "cpu", compiled=False)
    found = run.losses()
    for kind, tokens in (("a", text.held_out[:192]), ("b", text.held_out[192:])):
        alone = training.Training(
            tiny_run(text, 4),
            replace(text, held_out=tokens, sizes=replace(text.sizes, held_out_tokens=len(tokens))),
            "cpu",
            compiled=False,
        )
        assert alone.losses() == {"held_out": found[f"held_out_{kind}"]}
    assert min(found.values()) < found["held_out"] < max(found.values())
    assert train.run(run.recipe, several, tmp_path, "cpu", compiled=False)
    facts, rows = read_table(tmp_path / f"{run.recipe.name}.csv")
    assert json.loads(facts["corpus.parts"]) == several.sizes.parts
    assert all({"held_out", "held_out_a", "held_out_b"} <= row.keys() for row in rows)


def test_flips_are_counted_for_one_step(text):
    run = training.Training(tiny_run(text, 8, n_masks=2), text, "cpu", compiled=False)
    before: list[torch.Tensor] = []
    step = run.step

    def watched() -> torch.Tensor:
        before[:] = [layer.mask_logits.detach() > 0 for layer in training.masked_layers(run.model)]
        return step()

    run.step = watched
    run.advance(8)
    after = [layer.mask_logits > 0 for layer in training.masked_layers(run.model)]
    flips = [float((a != b).float().mean()) for a, b in zip(before, after, strict=True)]
    assert run.progress.rows[-1]["flips"] == pytest.approx(sum(flips) / 2, rel=1e-4)
    assert sum(flips) > 0
    ratios = [float(mask.float().mean()) for mask in after]
    assert json.loads(run.progress.rows[-1]["gate_ratios"]) == pytest.approx(ratios, rel=1e-4)
    agreement = [float((mask[0] == mask[1]).float().mean()) for mask in after]
    assert run.progress.rows[-1]["agreement"] == pytest.approx(sum(agreement) / 2, rel=1e-4)


@pytest.mark.parametrize("options", DENSE_LAYERS, ids=lambda options: "-".join(map(str, options.values())))
def test_operations_are_those_that_torch_counts(options, text):
    run = training.Training(tiny_run(text, 4, **options), text, "cpu", compiled=False)
    with FlopCounterMode(display=False) as counter:
        run.step()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    sizes = run.recipe.sizes
    expected = (
        run.recipe.flops_of_token - 6 * sizes.layers * sizes.context * sizes.hidden
    ) * run.windows.tokens_of_step
    assert counted == pytest.approx(expected, rel=0.02)  # the formula leaves out the router


@pytest.mark.long
def test_runs_with_the_same_graphs_are_compiled_once(text):
    torch._dynamo.reset()
    graphs = []
    for one in (Recipe(n_masks=2), Recipe(n_masks=2, mask_lr=0.1, seed=1), Recipe("glu"), Recipe(n_masks=2, lr=1e-4)):
        run = training.Training(replace(one, megabytes=0.01), text, "cpu", compiled=True)
        run.warm_up()
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        model = weakref.ref(run.model)
        del run
        gc.collect()
        assert model() is None, "graphs that are kept do not keep the model"
    assert graphs[0] == graphs[1] < graphs[2] == graphs[3]


def test_warming_up_leaves_no_trace(text):
    one = tiny_run(text, 6, n_masks=2)
    fresh, warm = (training.Training(one, text, "cpu", compiled=False) for _ in range(2))
    warm.warm_up()
    for _ in range(3):
        assert torch.equal(fresh.step(), warm.step())
