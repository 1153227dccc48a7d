"""The experiments about learning: the text, the recipes, exact resumption, and that every run trains."""

from __future__ import annotations

import gc
import gzip
import json
import math
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.decoder import Sizes
from benchmarks.learning import claims, corpus, experiments, recipe, schedule, tables, train, training
from benchmarks.learning.recipe import Recipe
from benchmarks.records import read_table, write_table
from benchmarks.tables import MissingResultError
from mglu_ops.nn import MGLU, NaiveMGLU

VOCABULARY = 300
TINY = Sizes(layers=2, hidden=16, intermediate=32, heads=2, kv_heads=2, vocabulary=VOCABULARY, context=16)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Text of 40 packages, with files that repeat others, and files that are no text."""
    root = tmp_path_factory.mktemp("text")
    random = np.random.default_rng(0)
    words = ["".join(random.choice(list("abcdefgh"), 5)) for _ in range(50)]
    for package in range(40):
        (root / f"package{package}").mkdir()
        for i in range(3):
            lines = [" ".join(random.choice(words, 6)) for _ in range(20)]
            (root / f"package{package}" / f"file{i}.txt").write_text("\n".join(lines))
    original = (root / "package0" / "file0.txt").read_text()
    for package in range(40):
        (root / f"package{package}" / "copy.txt").write_text(original.replace("\n", "\n\n"))
        (root / f"package{package}" / "almost.txt").write_text(original + f"\nand a line of package {package}")
    (root / "package0" / "bytes").write_bytes(bytes(range(256)))
    (root / "package0" / "short").write_text("short")
    return root


@pytest.fixture(scope="module")
def text(folder, tmp_path_factory) -> corpus.Corpus:
    return corpus.prepare(tmp_path_factory.mktemp("corpus"), text=folder, vocabulary=VOCABULARY)


@pytest.fixture
def tiny(monkeypatch) -> Iterator[None]:
    monkeypatch.setitem(recipe.SIZES, "25M", TINY)
    monkeypatch.setattr(schedule, "SEQUENCES", 4)
    monkeypatch.setattr(schedule, "CONTEXT", 16)
    monkeypatch.setattr(schedule, "EVALUATIONS", 4)
    yield
    torch._dynamo.reset()


# --- Text -----------------------------------------------------------------------------------------------------------


def test_documents_are_text_without_duplicates(folder):
    documents = corpus.read(corpus.files([folder], corpus.ANY_SUFFIX))
    assert len(documents) == 3 * 40 + 40  # of the copies, which differ in white space, one original is left
    assert len({document.digest for document in documents}) == len(documents)
    assert all(document.text.isprintable() or "\n" in document.text for document in documents)


def test_packages_are_held_out_as_a_whole_and_unseen(folder):
    documents = corpus.read(corpus.files([folder], corpus.ANY_SUFFIX))
    train_text, held_out = corpus.divide(documents)
    assert not {document.package for document in train_text} & {document.package for document in held_out}
    size = sum(document.size for document in held_out)
    assert 0 < size < 0.2 * sum(document.size for document in train_text)
    lines = {line for document in train_text for line in document.text.splitlines()}
    for document in held_out:
        own = document.text.splitlines()
        assert sum(line in lines for line in own) <= 0.5 * len(own)


def test_a_folder_inside_another_is_searched_once(tmp_path):
    inner = tmp_path / "site-packages"
    (inner / "one").mkdir(parents=True)
    (inner / "one" / "a.py").touch()
    (tmp_path / "b.py").touch()
    found = list(corpus.files([tmp_path, inner], (".py",)))
    assert found == [("b", tmp_path / "b.py"), ("one", inner / "one" / "a.py")]


def test_tokens_stand_for_the_text(folder, tmp_path):
    from tokenizers import Tokenizer

    found = corpus.prepare(tmp_path / "made", text=folder, vocabulary=VOCABULARY)
    tokenizer = Tokenizer.from_file(str(tmp_path / "made" / "tokenizer.json"))
    documents = corpus.read(corpus.files([folder], corpus.ANY_SUFFIX))
    expected = {document.text for document in corpus.divide(documents)[0]}
    end = tokenizer.token_to_id(corpus.END)
    ends = (found.train == end).nonzero().flatten().tolist()
    texts = [
        tokenizer.decode(found.train[start:stop].tolist())
        for start, stop in zip([0, *(i + 1 for i in ends[:-1])], ends, strict=True)
    ]
    assert set(texts) == expected
    assert int(found.token_bytes[found.train.long()].sum()) == found.sizes.train_bytes
    assert corpus.prepare(tmp_path / "made", text=tmp_path / "gone").sizes == found.sizes  # it is not made again


def test_the_training_text_may_be_limited(folder, tmp_path):
    whole, part = (
        corpus.prepare(tmp_path / str(m), text=folder, vocabulary=VOCABULARY, megabytes=m) for m in (1, 0.03)
    )
    assert part.sizes.train_bytes <= 30_000 < whole.sizes.train_bytes
    assert part.sizes.train_bytes > 25_000
    assert part.sizes.held_out_bytes > 0
    assert part.sizes.digest != whole.sizes.digest
    again = corpus.prepare(tmp_path / "again", text=folder, vocabulary=VOCABULARY, megabytes=1)
    assert again.sizes == whole.sizes
    assert torch.equal(again.train, whole.train)


def test_english_text_has_manual_pages_and_the_topics_of_python(tmp_path, monkeypatch):
    (tmp_path / "man1").mkdir()
    (tmp_path / "de" / "man1").mkdir(parents=True)
    for path in ("man1/one.1.gz", "man1/two.1.gz", "de/man1/one.1.gz"):
        (tmp_path / path).write_bytes(gzip.compress(path.encode() * 20))
    (tmp_path / "lib" / "pydoc_data").mkdir(parents=True)
    (tmp_path / "lib" / "pydoc_data" / "topics.py").touch()
    (tmp_path / "lib" / "pydoc_data" / "module.py").touch()
    monkeypatch.setattr(corpus, "MANUAL", tmp_path)
    assert tmp_path / "man1" not in corpus.roots()
    assert {tmp_path / "man1", *corpus.roots()} == set(corpus.roots("english"))
    found = dict(corpus.files([tmp_path / "man1", tmp_path / "lib"], corpus.SUFFIXES["english"]))
    assert found.keys() == {"one.1.gz", "two.1.gz", "pydoc_data"}  # each page is a package
    assert found["pydoc_data"].name == "topics.py"
    documents = corpus.read((name, found[name]) for name in ("one.1.gz", "two.1.gz"))
    assert {document.text for document in documents} == {"man1/one.1.gz" * 20, "man1/two.1.gz" * 20}


def test_too_little_text_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("a line of text that is long enough to count\n" * 3)
    with pytest.raises(ValueError, match="text: 1 documents are too few to hold some out"):
        corpus.prepare(tmp_path / "out", text=tmp_path)


# --- Recipes --------------------------------------------------------------------------------------------------------


def test_names_of_runs_are_unique_and_survive_a_file_system():
    runs = experiments.chosen(experiments.EXPERIMENTS)
    names = [one.name for one in runs]
    assert len(set(names)) == len(names) > 50
    assert all(len(name) < 120 and "/" not in name for name in names)
    assert Recipe("mglu", n_masks=2, seed=1).name == "mglu-2_seed=1"


@pytest.mark.parametrize(
    "wrong",
    [
        {"layer": "swish"},
        {"size": "1B"},
        {"straight_through": "no"},
        {"start": "half"},
        {"distilled": True},
        {"start": "gate", "layer": "lu"},
    ],
)
def test_a_wrong_recipe_is_named(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Recipe(**wrong)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("ratio", [0.2, 0.5, 0.8])
def test_the_initial_gate_ratio(ratio):
    model = Recipe(gate_ratio=ratio).model()
    for layer in training.masked_layers(model):
        assert abs(float((layer.mask_logits > 0).float().mean()) - ratio) < 0.03


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("how", ["clipped", "tanh"])
def test_straight_through_gradients_fade_and_masks_stay(how):
    torch.manual_seed(0)
    plain, shaped = Recipe(logits_std=0.1), Recipe(logits_std=0.1, straight_through=how, slope=0.05)
    layers = [next(iter(training.masked_layers(one.model()))) for one in (plain, shaped)]
    assert torch.equal(layers[0].mask_logits > 0, layers[1].mask_logits > 0)
    x = torch.randn(5, 16)
    for layer in layers:
        layer(x).sum().backward()
    logits, grad = layers[0].mask_logits.detach(), layers[0].mask_logits.grad
    factor = (logits.abs() <= 0.05).float() if how == "clipped" else 1 - torch.tanh(logits / 0.05) ** 2
    torch.testing.assert_close(layers[1].parametrizations.mask_logits.original.grad, grad * factor)


@pytest.mark.usefixtures("tiny")
def test_the_sum_over_masks_may_be_scaled():
    x = torch.randn(3, 16)
    plain, scaled = (Recipe(n_masks=4, scaled_sum=one).model().blocks[0].projection for one in (False, True))
    torch.testing.assert_close(scaled(x), plain(x) / 2)


def test_widths_of_equal_budgets():
    """Bytes of three matrices of SwiGLU against two and the masks; products of a training step against n_masks + 2."""
    for n_masks in (1, 4, 16):
        assert 3 * 16 * experiments.same_load(n_masks) == pytest.approx(2 * 16 + n_masks)
        assert 3 * experiments.same_training(n_masks) == pytest.approx(n_masks + 2)


# --- Training -------------------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_and_falls():
    rates = [schedule.rate(step, 1000) for step in range(1000)]
    assert rates[0] == pytest.approx(0.01)
    assert max(rates) == rates[99] == 1
    assert rates[549] == pytest.approx(0.55, abs=0.01)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
    assert all(a > b for a, b in pairwise(rates[100:]))


@pytest.mark.usefixtures("tiny")
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


def tiny_run(text: corpus.Corpus, steps: int, **options: object) -> Recipe:
    """A recipe of about so many steps."""
    share = text.sizes.train_tokens / text.sizes.train_bytes
    return Recipe(**{"lr": 1e-2, "megabytes": steps * 4 * 16 / share / 1e6, **options})


ALL_LAYERS = [
    {"layer": "lu"},
    {"layer": "glu"},
    {"layer": "glu_shared"},
    {"layer": "mglu", "n_masks": 2, "mask_lr": 0.1},
    {"layer": "mglu", "n_masks": 3, "top_k": 2, "scaled_sum": True},
    {"layer": "mglu", "n_masks": 2, "learned": False},
    {"layer": "mglu", "n_masks": 2, "straight_through": "tanh"},
    {"layer": "mglu", "n_masks": 2, "fused": False},
    {"layer": "no_gate_mask", "n_masks": 1},
    {"layer": "no_value_mask", "n_masks": 1},
]


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("options", ALL_LAYERS, ids=lambda options: "-".join(map(str, options.values())))
def test_every_layer_learns_and_writes_its_curve(options, text, tmp_path):
    one = tiny_run(text, 40, **options)
    assert train.run(one, text, tmp_path, "cpu", compiled=False)
    facts, rows = read_table(tmp_path / f"{one.name}.csv")
    assert [int(row["step"]) for row in rows] == [10, 20, 30, 40]
    assert all(float(row["worst"]) >= float(row["train"]) for row in rows)
    assert float(facts["tflop"]) == round(one.flops_of_token * 40 * 64 / 1e12)
    losses = [float(row["held_out"]) for row in rows]
    assert losses[-1] < losses[0] < math.log(VOCABULARY)
    assert facts["recipe.layer"] == options["layer"]
    assert facts["corpus.digest"] == text.sizes.digest
    assert int(facts["weights"]) > 0
    if one.has_masks:
        assert 0.3 < float(rows[-1]["gate_ratio"]) < 0.7
        assert (float(rows[-1]["flipped"]) > 0) == one.learned
    assert not list(tmp_path.glob("*.pt"))


@pytest.mark.long
@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("layer", ["mglu", "no_gate_mask"])
def test_a_compiled_run_follows_the_eager_one(layer, text, tmp_path):
    one = tiny_run(text, 40, layer=layer, n_masks=2)
    for compiled in (False, True):
        assert train.run(one, text, tmp_path / str(compiled), "cpu", compiled=compiled)
    eager, compiled_rows = (read_table(tmp_path / str(name) / f"{one.name}.csv")[1] for name in (False, True))
    for first, second in zip(eager, compiled_rows, strict=True):
        assert float(first["held_out"]) == pytest.approx(float(second["held_out"]), rel=0.02)


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("layer", ["mglu", "glu"])
def test_a_run_that_was_stopped_goes_on_bit_for_bit(layer, text, tmp_path):
    one = tiny_run(text, 20, layer=layer, n_masks=2, mask_stop=0.7)
    assert train.run(one, text, tmp_path / "whole", "cpu", compiled=False)
    stops = 0
    while not train.run(one, text, tmp_path / "parts", "cpu", limit=0, compiled=False):
        stops += 1
        assert (tmp_path / "parts" / f"{one.name}.pt").is_file()
    assert stops == 3
    whole, parts = (read_table(tmp_path / name / f"{one.name}.csv")[1] for name in ("whole", "parts"))
    for first, second in zip(whole, parts, strict=True):
        assert {**first, "seconds": ""} == {**second, "seconds": ""}


@pytest.mark.usefixtures("tiny")
def test_a_checkpoint_of_another_recipe_is_refused(text, tmp_path):
    one = tiny_run(text, 8)
    run = training.Training(one, text, "cpu", compiled=False)
    run.save(tmp_path / "checkpoint.pt")
    other = training.Training(replace(one, lr=1e-4), text, "cpu", compiled=False)
    with pytest.raises(ValueError, match="the checkpoint is of another recipe"):
        other.restore(tmp_path / "checkpoint.pt")


def assert_distilled(run: training.Training) -> None:
    """The loss is the cross entropy of the teacher's probabilities, and the teacher does not learn."""
    batch = run.windows.batch(0)
    before = [parameter.clone() for parameter in run.teacher.parameters()]
    with torch.no_grad():
        wanted, own = (model.logits(batch[:, :-1]).log_softmax(-1) for model in (run.teacher, run.model))
        torch.testing.assert_close(run.loss(batch), -(wanted.exp() * own).sum(-1).mean())
        own = own.gather(-1, batch[:, 1:, None])
        torch.testing.assert_close(run.model(batch), -own.mean())
    run.step()
    assert all(map(torch.equal, before, run.teacher.parameters()))


@pytest.mark.usefixtures("tiny")
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
    assert not train.run(one, text, tmp_path, "cpu", limit=0, compiled=False)  # the teacher takes longer
    while not train.run(one, text, tmp_path, "cpu", limit=0, compiled=False):
        pass
    assert {path.name for path in tmp_path.iterdir()} == {
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


@pytest.mark.usefixtures("tiny")
def test_masks_stop_where_the_recipe_says(text):
    run = training.Training(tiny_run(text, 10, n_masks=2, mask_stop=0.5), text, "cpu", compiled=False)
    for _ in range(5):
        run.step()
    logits = [layer.mask_logits.detach().clone() for layer in training.masked_layers(run.model)]
    weight = run.model.blocks[0].projection.weight.detach().clone()
    run.step()
    assert all(map(torch.equal, logits, (layer.mask_logits for layer in training.masked_layers(run.model))))
    assert not torch.equal(weight, run.model.blocks[0].projection.weight)


@pytest.mark.usefixtures("tiny")
def test_held_out_loss_is_in_nats_a_byte_of_the_text(text):
    """Each token's probability, one window at a time, over the bytes that the tokenizer's pieces stand for."""
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
    assert run.held_out() == pytest.approx(nats / sum(map(text.token_bytes.tolist().__getitem__, predicted)), rel=1e-3)
    assert windows * 16 > 0.9 * len(text.held_out)
    assert int(text.token_bytes[text.held_out.long()].sum()) == text.sizes.held_out_bytes


@pytest.mark.usefixtures("tiny")
def test_flips_are_those_of_one_step(text):
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


@pytest.mark.usefixtures("tiny")
@pytest.mark.parametrize("options", ALL_LAYERS, ids=lambda options: "-".join(map(str, options.values())))
def test_operations_are_those_that_torch_counts(options, text):
    run = training.Training(tiny_run(text, 4, **options), text, "cpu", compiled=False)
    with FlopCounterMode(display=False) as counter:
        run.step()
    counted = sum(n for op, n in counter.get_flop_counts()["Global"].items() if "attention" not in str(op))
    sizes = run.recipe.sizes
    expected = (
        run.recipe.flops_of_token - 6 * sizes.layers * sizes.context * sizes.hidden
    ) * run.windows.tokens_of_step
    assert counted == pytest.approx(expected, rel=0.02)  # the router is left out


@pytest.mark.usefixtures("tiny")
def test_a_run_stops_before_a_point_that_would_be_too_late(text, tmp_path, monkeypatch):
    one, now = tiny_run(text, 20, layer="glu"), [0.0]
    monkeypatch.setattr(train.time, "perf_counter", lambda: now[0])
    advance = training.Training.advance

    def slow(run: training.Training, last: int) -> None:
        advance(run, last)
        now[0] += 10

    monkeypatch.setattr(training.Training, "advance", slow)
    assert not train.run(one, text, tmp_path, "cpu", limit=25, compiled=False)
    assert now[0] == 20
    assert train.run(one, text, tmp_path, "cpu", limit=25, compiled=False)


@pytest.mark.usefixtures("tiny")
def test_a_long_run_leaves_checkpoints_in_case_that_it_is_killed(text, tmp_path, monkeypatch):
    one = tiny_run(text, 20, n_masks=2)
    assert train.run(one, text, tmp_path / "whole", "cpu", compiled=False)
    monkeypatch.setattr(train, "SAVE_SECONDS", 0.0)
    advance = training.Training.advance

    def killed(run: training.Training, last: int) -> None:
        if last == 15 and run.progress.step == 10:
            raise KeyboardInterrupt
        advance(run, last)

    monkeypatch.setattr(training.Training, "advance", killed)
    with pytest.raises(KeyboardInterrupt):
        train.run(one, text, tmp_path / "parts", "cpu", compiled=False)
    monkeypatch.setattr(training.Training, "advance", advance)
    assert torch.load(tmp_path / "parts" / f"{one.name}.pt")["progress"]["step"] == 10
    assert train.run(one, text, tmp_path / "parts", "cpu", compiled=False)
    whole, parts = (read_table(tmp_path / name / f"{one.name}.csv")[1] for name in ("whole", "parts"))
    assert [{**row, "seconds": ""} for row in whole] == [{**row, "seconds": ""} for row in parts]


def test_a_result_that_is_killed_in_the_middle_is_not_there(tmp_path):
    class Fatal:
        def __str__(self) -> str:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_table([{"a": 1}, {"a": Fatal()}], {}, tmp_path, "result")
    assert not (tmp_path / "result.csv").exists()


KILLED = """
import sys
from pathlib import Path
from benchmarks.decoder import Sizes
from benchmarks.learning import corpus, experiments, recipe, schedule
recipe.SIZES["25M"] = Sizes(layers=2, hidden=16, intermediate=32, heads=2, kv_heads=2, vocabulary=300, context=16)
schedule.SEQUENCES, schedule.CONTEXT, schedule.EVALUATIONS = 4, 16, 10
from benchmarks.learning import train
train.SAVE_SECONDS = 0.0
run = experiments.run
experiments.run = lambda one, text, out, device, rest: run(one, text, out, device, rest, False)
experiments.EXPERIMENTS["layers"] = [recipe.Recipe(layer, 2, megabytes=0.03) for layer in ("mglu", "glu")]
experiments.main()
"""


@pytest.mark.long
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_experiments_that_are_killed_go_on_bit_for_bit(how, folder, tmp_path):
    corpus.prepare(tmp_path / "corpus", text=folder, vocabulary=VOCABULARY)
    common = [sys.executable, "-c", KILLED, "--corpus", str(tmp_path / "corpus"), "--only", "layers", "--device", "cpu"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}

    def start(out: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([*common, "--out", str(out), "--done"], env=environment)

    assert start(tmp_path / "whole").wait() == 0
    kills = 0
    for seconds in (0.0, 0.4, 1.1, 0.7):  # after the first checkpoint of a run that is not done
        process = start(tmp_path / "parts")
        while process.poll() is None and not list((tmp_path / "parts").glob("*.pt")):
            time.sleep(0.05)
        time.sleep(seconds)
        if process.poll() is None:
            process.send_signal(how)
            kills += process.wait() == -how
    assert kills > 0
    assert start(tmp_path / "parts").wait() == 0
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert sorted(path.name for path in (tmp_path / "parts").iterdir() if path.suffix != ".tmp") == names
    for name in names:
        if name.endswith(".csv"):
            whole, parts = (read_table(tmp_path / part / name)[1] for part in ("whole", "parts"))
            assert [{**row, "seconds": ""} for row in whole] == [{**row, "seconds": ""} for row in parts]


@pytest.mark.long
@pytest.mark.usefixtures("tiny")
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


@pytest.mark.usefixtures("tiny")
def test_warming_up_leaves_no_trace(text):
    one = tiny_run(text, 6, n_masks=2)
    fresh, warm = (training.Training(one, text, "cpu", compiled=False) for _ in range(2))
    warm.warm_up()
    for _ in range(3):
        assert torch.equal(fresh.step(), warm.step())


@pytest.mark.usefixtures("tiny")
def test_experiments_go_on_where_they_stopped(text, folder, tmp_path, monkeypatch, capsys):
    prepared = tmp_path / "corpus"
    corpus.prepare(prepared, text=folder, vocabulary=VOCABULARY)
    monkeypatch.setitem(experiments.EXPERIMENTS, "layers", [tiny_run(text, 4, n_masks=n) for n in (1, 2)])
    trained: list[str] = []

    def run(one: Recipe, *_: object) -> bool:
        trained.append(one.name)
        write_table([{"step": 1}], {"corpus.digest": text.sizes.digest}, tmp_path / "out", one.name)
        return True

    monkeypatch.setattr(experiments, "run", run)
    common = ["experiments", "--only", "layers", "--out", str(tmp_path / "out"), "--corpus", str(prepared)]
    for seconds in ("29", "100", "100"):  # a run is not begun if there is no time for its first checkpoint
        monkeypatch.setattr("sys.argv", [*common, "--seconds", seconds])
        experiments.main()
    assert len(trained) == 2
    assert "the time is over; 2 runs are left" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", [*common, "--seeds", "0", "1", "--list"])
    experiments.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3  # the runs of the other seed, and their sum
    assert all("seed=1" in line for line in lines[:2])
    assert float(lines[2].split()[0]) == pytest.approx(sum(float(line.split()[0]) for line in lines[:2]), abs=0.1)
    monkeypatch.setattr("sys.argv", [*common, "--scale", "0.5"])
    experiments.main()
    assert len(trained) == 4
    assert all("megabytes=" in name for name in trained[2:])
    path = tmp_path / "out" / f"{trained[0]}.csv"
    path.write_text(path.read_text().replace(text.sizes.digest, "another"))
    monkeypatch.setattr("sys.argv", common)
    with pytest.raises(ValueError, match="the result is of the text another, not"):
        experiments.main()


def test_a_scaled_conversion_has_a_teacher_that_is_scaled_too():
    (one, *_) = [recipe for recipe in experiments.EXPERIMENTS["converted"] if recipe.start is not None]
    half = experiments.scaled(one, 0.5)
    assert half.teacher == replace(one.teacher, megabytes=one.teacher.megabytes / 2)
    assert half.megabytes == one.megabytes / 2


def test_layers_with_masks_are_found():
    assert [type(layer) for layer in training.masked_layers(torch.nn.Sequential(MGLU(8, 8), NaiveMGLU(8, 8)))] == [
        MGLU,
        NaiveMGLU,
    ]


# --- Tables ---------------------------------------------------------------------------------------------------------


def finished(folder: Path, one: Recipe, loss: float, **last: object) -> None:
    """Write a result as a run does, without training."""
    facts = {f"recipe.{key}": str(value) for key, value in asdict(one).items()}
    facts |= {"commit": "0123456789", "device": "a GPU", "torch": "2.13", "weights": "20000000", "mask_bits": "8000000"}
    facts |= {"seconds": "61.4", "peak_mb": "1234.5", "corpus.kind": "python", "corpus.digest": "abcd"}
    facts |= {"corpus.held_out_bytes": "5200000", "corpus.held_out_tokens": "1300000", "tflop": "6004"}
    last = {"gate_ratios": "[0.5, 0.52]", "agreement": 0.5} | last
    write_table(
        [{"step": 10, "megabytes": one.megabytes, "held_out": loss, **last}], facts, folder / "learning", one.name
    )


def test_recipes_survive_their_file(tmp_path):
    for one in experiments.chosen(experiments.EXPERIMENTS):
        finished(tmp_path, one, 0.75, gate_ratio=0.5, flipped=0.1)
    assert {run.recipe for run in tables.runs(tmp_path)} == set(experiments.chosen(experiments.EXPERIMENTS))
    older = {f"recipe.{key}": str(value) for key, value in asdict(Recipe("glu")).items() if key != "distilled"}
    assert tables.recipe_of(older) == Recipe("glu")
    for name in tables.TABLES:
        assert "Not run" not in tables.TABLES[name](tmp_path)


def test_a_table_compares_with_swiglu_of_the_same_seeds(tmp_path):
    with pytest.raises(MissingResultError, match=r"benchmarks\.learning\.experiments"):
        tables.experiment(tmp_path, "layers")
    masks = {"gate_ratio": 0.512, "flipped": 0.071}
    for seed, (swiglu, mglu) in enumerate([(0.7290, 0.7367), (0.7300, 0.7357)]):
        finished(tmp_path, Recipe("glu", seed=seed), swiglu)
        finished(tmp_path, Recipe("mglu", n_masks=4, seed=seed), mglu, **masks)
    finished(tmp_path, Recipe("glu", lr=3e-3), 0.5)  # another learning rate
    lines = tables.experiment(tmp_path, "layers").splitlines()
    assert lines[0] == "a GPU, torch 2.13, commits 0123456; text `python` abcd, 5.2 MB held out."
    assert lines[4] == "| SwiGLU | 20.0 M | 41.0 | 0.7295 (0.0010) |  | 2 |  |  | 6.0 | 61 s | 1.2 GB |"
    assert lines[5] == (
        "| SwiMGLU, n_m = 4 | 20.0 M | 41.0 | 0.7362 (0.0010) | +0.0067 (0.0020) | 2 | 0.512 | 7.1% "
        "| 6.0 | 61 s | 1.2 GB |"
    )
    assert lines[-1].startswith("Not run: GELU; SwiMGLU, n_m = 1;")
    assert "| SwiMGLU, n_m = 4 | 0.500 | 0.520 | 0.500 |" in tables.masks(tmp_path)
    finished(tmp_path, Recipe("glu", width=0.75), 0.7390)  # a SwiGLU of another width is compared, too
    assert "| SwiGLU, 0.75 times as wide | 20.0 M | 41.0 | 0.7390 | +0.0100 | 1 |" in tables.experiment(
        tmp_path, "budgets"
    )
    finished(tmp_path, Recipe("lu", activation="gelu"), 0.75)
    path = tmp_path / "learning" / f"{Recipe('lu', activation='gelu').name}.csv"
    path.write_text(path.read_text().replace("abcd", "efgh"))
    with pytest.raises(ValueError, match="the results are of several texts: abcd, efgh"):
        tables.runs(tmp_path)


def test_plots_show_the_curves_and_the_gate_ratios(tmp_path):
    pytest.importorskip("matplotlib", reason="the plots need matplotlib")
    from benchmarks.learning import plots

    finished(tmp_path, Recipe("glu"), 0.73)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.74)
    finished(tmp_path, Recipe("mglu", n_masks=4, seed=1), 0.76)
    found = tables.runs(tmp_path)
    lines = {line.get_label(): line.get_xydata().tolist() for line in plots.curves(found).axes[0].get_lines()}
    assert lines == {"SwiGLU": [[120, 0.73]], "SwiMGLU, n_m = 4": [[120, 0.74]]}
    (ratios, *_) = plots.gate_ratios(found).axes[0].get_lines()
    assert (ratios.get_label(), ratios.get_xydata().tolist()) == ("SwiMGLU, n_m = 4", [[1, 0.5], [2, 0.52]])
    paths = plots.draw(tmp_path, tmp_path / "out")
    assert [path.name for path in paths] == ["learning_curves.svg", "learning_gate_ratios.svg"]
    assert all("SwiMGLU, n_m = 4" in path.read_text() for path in paths)


def claim(text: str) -> claims.Claim:
    (found,) = [one for one in claims.CLAIMS if one.text == text]
    return found


def test_claims_are_those_of_recipes_that_are_run():
    every = set(experiments.chosen(experiments.EXPERIMENTS))
    assert all({one.better, one.worse} <= every for one in claims.CLAIMS)
    assert claim("SwiGLU is better than GELU").published == pytest.approx(0.0849, abs=1e-4)
    assert claim("four masks are as good as SwiGLU, to 1%").published == pytest.approx(-0.0084, abs=1e-4)


def test_the_page_has_the_claims_until_there_are_results():
    text = (Path(claims.__file__).parent / "README.md").read_text()
    assert claims.table([]) in text
    assert all(f"| `{name}` |" in text for name in experiments.EXPERIMENTS)


def test_verdicts_need_more_than_the_spread_of_seeds(tmp_path):
    """A token is 4 bytes. The seeds of SwiGLU lie 0.001 apart: one seed must differ by 3 times that, several by it."""
    for seed, (swiglu, gelu) in enumerate([(0.730, 0.732), (0.731, 0.733)]):
        finished(tmp_path, Recipe("glu", seed=seed), swiglu)
        finished(tmp_path, Recipe("lu", activation="gelu", seed=seed), gelu)
    finished(tmp_path, Recipe("glu_shared"), 0.7345)
    finished(tmp_path, Recipe("mglu", n_masks=1), 0.7330)
    finished(tmp_path, Recipe("mglu", n_masks=4), 0.7334)
    finished(tmp_path, Recipe("mglu", n_masks=8), 0.7200)
    finished(tmp_path, Recipe("mglu", n_masks=4, top_k=1), float("nan"))
    found = tables.runs(tmp_path)

    def of(text: str) -> tuple[float, int, str]:
        measured = claims.measure(claim(text), found)
        return pytest.approx(measured.advantage), measured.seeds, claims.verdict(claim(text), measured)

    assert of("SwiGLU is better than GELU") == (0.008, 2, "reproduced")
    assert of("SwiGLU with one shared matrix is worse than GELU") == (0.010, 1, "undecided")
    assert of("one mask is better than GELU") == (-0.004, 1, "undecided")
    assert of("one mask is worse than SwiGLU") == (0.012, 1, "undecided")
    assert of("four masks are as good as SwiGLU, to 1%") == (-0.0136, 1, "undecided")
    assert of("eight masks are better than SwiGLU") == (0.040, 1, "reproduced")
    assert of("no masks are worse than one mask") == (0.006, 1, "undecided")
    (line,) = [one for one in claims.claims(tmp_path).splitlines() if one.startswith("| Top-1")]
    assert line.endswith("not reproduced: a run diverged |")
    assert claims.measure(claim("two masks are better than one"), found) is None
    assert claims.table([]).count("| not run |") == len(claims.CLAIMS)


def test_a_converted_model_is_compared_with_swiglu_that_read_as_much():
    one = Recipe("mglu", n_masks=1, start="average", skip=120.0, megabytes=12.0, lr=3e-4)
    assert tables.baseline(one) == Recipe("glu", megabytes=132.0)
