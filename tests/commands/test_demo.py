"""The demo through its command line: its results, its errors, and that it fails if something disagrees."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import mglu_ops

pytest.importorskip("tqdm", reason="the demo shows its progress with tqdm")

SMALL = [
    *("--device", "cpu", "--layers", "1", "--width", "32", "--context", "32", "--batch", "8", "--n-masks", "2"),
    *("--layer", "128x64"),
]
COLUMNS = {"naive", "naive compiled", "fused", "SwiGLU"}


def start(program: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    """Run `python PROGRAM demo OPTIONS` with one thread, because tests that run beside it would stall several."""
    root = Path(__file__).parents[2]
    path = os.pathsep.join(filter(None, [str(root), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *program, "demo", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)


def demo(*options: str) -> subprocess.CompletedProcess[str]:
    return start(["-m", "mglu_ops"], *options)


def broken(patch: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run the demo after `patch`, Python code that breaks something."""
    program = f"import sys, mglu_ops\nfrom mglu_ops.__main__ import main\n{patch}\nsys.exit(main())"
    return start(["-c", program], *options)


@pytest.fixture(scope="module")
def small_text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("demo") / "small.txt"
    path.write_bytes(b"".join(b"%d times %d is %d. \xff\n" % (i, j, i * j) for i in range(40) for j in range(9)))
    return path


@pytest.fixture(scope="module")
def finished(small_text: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, dict[str, Any]]:
    """Run the demo once with a small model; return its output and its results."""
    path = tmp_path_factory.mktemp("demo") / "results.json"
    done = demo(*SMALL, "--steps", "60", "--text", str(small_text), "--json", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout, json.loads(path.read_text())


@pytest.mark.long
def test_every_layer_is_fused_and_agrees(finished: tuple[str, dict[str, Any]]) -> None:
    _, results = finished
    assert results["sites"] == {"layers": 1, "fused": 1, "missed": 0}
    for when in ("before training", "after training"):
        found = results["agreement"][when]
        assert 0 <= found["output"] < 1e-5
        assert 0 <= found["gradient"] < 1e-5
        assert 0 < found["naive_output"] < 1e-5
    assert 0 <= results["agreement"]["frozen"] < 1e-5
    assert 0 <= results["agreement"]["exported"] < 1e-5


@pytest.mark.long
def test_both_models_learn_and_freezing_keeps_the_perplexity(finished: tuple[str, dict[str, Any]]) -> None:
    _, results = finished
    found = results["perplexity"]
    assert set(found) == {"naive", "fused", "SwiGLU", "unigram"}
    assert 1 < found["naive"] < found["unigram"] < 256
    assert 1 < found["SwiGLU"] < found["unigram"]
    assert found["fused"] == pytest.approx(found["naive"], rel=1e-5)


@pytest.mark.long
def test_bytes_are_counted_by_the_packed_format(finished: tuple[str, dict[str, Any]]) -> None:
    _, results = finished
    weights = 32 * 128
    assert results["bytes"]["naive"] == {"weights": 4 * weights, "masks": 4 * 2 * weights}
    assert results["bytes"]["fused"] == {"weights": 4 * weights, "masks": 2 * weights // 8}
    assert results["bytes"]["SwiGLU"] == {"weights": 2 * 4 * weights, "masks": 0}


@pytest.mark.long
def test_times_are_measured_for_every_variant_and_printed(finished: tuple[str, dict[str, Any]]) -> None:
    output, results = finished
    times = results["milliseconds"]
    assert set(times["step"]) == set(times["token"]) == COLUMNS
    assert all(value > 0 for value in (*times["step"].values(), *times["token"].values(), times["token_exported"]))
    header = next(line for line in output.splitlines() if "naive compiled" in line)
    assert all(column in header for column in COLUMNS)
    assert f"{times['step']['fused']:.1f}" in next(line for line in output.splitlines() if "training step " in line)
    assert "Everything agrees." in output
    assert results["generated"].startswith("The syntax for ")


@pytest.mark.long
def test_a_layer_of_real_size_is_timed_last(finished: tuple[str, dict[str, Any]]) -> None:
    output, results = finished
    found = results["real_size"]
    assert (found["layer"], found["dtype"], found["backend"]) == ([128, 64], "float32", "cpu")
    assert set(found["milliseconds"]) == {"1", "4"}
    for times in found["milliseconds"].values():
        assert set(times) == {"naive compiled", "fused", "SwiGLU"}
        assert all(value > 0 for value in times.values())
    last = output[output.index("One layer of 128 x 64, one token, float32") :]
    row = next(line for line in last.splitlines() if line.startswith("ms per layer, 4 masks"))
    times = found["milliseconds"]["4"]
    assert row.split()[-2:] == [f"{times[name] / times['fused']:.2f}x" for name in ("naive compiled", "SwiGLU")]


def real_size_of(*options: str) -> dict[str, Any] | str:
    """The results of the last stage alone, or why it was skipped."""
    import argparse

    from mglu_ops.demo import command, real_size
    from mglu_ops.demo.settings import choose

    parser = argparse.ArgumentParser()
    command.add_parser(parser.add_subparsers())
    return real_size.time_layer(choose(parser.parse_args(["demo", *SMALL, *options])))


def test_without_memory_the_layer_of_real_size_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    from mglu_ops.demo import real_size

    monkeypatch.setattr(real_size, "_bytes_available", lambda device: 1 << 30)
    found = real_size_of("--layer", "1048576x1048576")
    assert isinstance(found, str)
    assert re.fullmatch(r"it needs \d+\.\d GiB of memory, and 1\.0 GiB are free", found)


def test_without_kernels_the_layer_of_real_size_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = SimpleNamespace(backend="composite", reason="there is no C++ compiler")
    monkeypatch.setattr(mglu_ops, "explain_dispatch", lambda *_: choice)
    assert real_size_of() == "no kernel of this package can run it here (there is no C++ compiler)"


WRONG_KERNEL = """
from mglu_ops import dispatch
right = dispatch.forward_train
def wrong(*arguments):
    result, *saved = right(*arguments)
    return (result * 1.001, *saved)
dispatch.forward_train = wrong
"""

WRONG_GRADIENT = """
from mglu_ops import dispatch
right = dispatch.backward
def wrong(*arguments):
    x, weight, logits, route = right(*arguments)
    return x, weight, logits * 1.001, route
dispatch.backward = wrong
"""

NO_FUSION = """
import compile_passes.fusion
compile_passes.fusion.FusionPass.__call__ = lambda self, graph: None
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("patch", "words"),
    [
        (WRONG_KERNEL, "before training, fused outputs differ from naive"),
        (WRONG_GRADIENT, "before training, fused gradients (worst: blocks.0.feed_forward.gated.mask_logits) differ"),
        (NO_FUSION, "the pass fused 0 layers of 1"),
    ],
    ids=["outputs", "gradients", "sites"],
)
def test_a_disagreement_fails_loudly(patch: str, words: str, small_text: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    done = broken(patch, *SMALL, "--text", str(small_text), "--json", str(results))
    assert done.returncode == 1, done.stdout + done.stderr
    assert f"FAILED: {words}" in done.stderr
    assert "Everything agrees" not in done.stdout
    assert not results.exists()


@pytest.mark.long
def test_a_package_that_does_not_load_fails_the_demo(tmp_path: Path) -> None:
    from mglu_ops.demo import export
    from mglu_ops.demo.errors import Disagreement

    broken = tmp_path / "model.pt2"
    broken.write_bytes(b"no archive")
    with pytest.raises(Disagreement, match=r"does not load in a fresh process: .*Error"):
        export._load_elsewhere(str(broken))


def test_the_table_shows_ratios_and_failures() -> None:
    from mglu_ops.demo.table import Row, render

    rows = [
        Row("ms", {"naive": 3.0, "fused": 2.0, "SwiGLU": 1.0}, "{:.1f}", ratio=True),
        Row("error", {"fused": "FAILED"}, "{:.1e}"),
    ]
    lines = render(rows).splitlines()
    assert lines[2].split() == ["ms", "3.0", "2.0", "1.0", "1.50x", "0.50x"]
    assert lines[3].split() == ["error", "FAILED"]


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("naive", 26.0, "perplexity of naive is 26.000, not below 25.000"),
        ("SwiGLU", float("nan"), "perplexity of SwiGLU is nan, not below"),
        ("fused", float("inf"), "perplexity of fused is inf, not below"),
        ("fused", 8.1, "freezing changed the perplexity"),
    ],
)
def test_a_model_that_does_not_learn_fails(name: str, value: float, words: str) -> None:
    from mglu_ops.demo.errors import Disagreement
    from mglu_ops.demo.run import check_perplexity

    learned = {"naive": 8.0, "fused": 8.0, "SwiGLU": 8.2, "unigram": 25.0}
    check_perplexity(learned, 1e-5)
    with pytest.raises(Disagreement, match=words):
        check_perplexity({**learned, name: value}, 1e-5)


def rejected(*options: str) -> tuple[int, str]:
    """Run the demo in this process, with options that it rejects before it starts; return exit code and error."""
    import contextlib
    import io

    from mglu_ops.__main__ import main

    error = io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(["demo", *options])
        except SystemExit as exit_:
            code = int(exit_.code or 0)
    return code, error.getvalue()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--n-masks", "17"], "--n-masks: got 17, must be 1 to 16"),
        (["--n-masks", "0"], "got 0, must be at least 1"),
        (["--steps", "-3"], "got -3, must be at least 1"),
        (["--steps", "many"], "got 'many', must be a whole number"),
        (["--width", "33"], "--width: got 33, must be a multiple of 32"),
        (["--device", "abacus"], "--device: got 'abacus'"),
        (["--device", "meta"], "--device: got 'meta'"),
        (["--device", "cuda:99"], "--device: got 'cuda:99'"),
        (
            ["--json", "/no/such/folder/results.json"],
            "--json: /no/such/folder/results.json cannot be written: No such file",
        ),
        (["--text", "/no/such/file"], "--text: cannot read /no/such/file: No such file or directory"),
        (["--layer", "8192"], "got '8192', must be OUTxIN, for example 14336x4096"),
        (["--layer", "0x8"], "got '0x8', must be OUTxIN"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_a_wrong_option_is_named(options: list[str], words: str) -> None:
    code, error = rejected(*options)
    assert code == 2
    assert words in error


def test_a_text_that_is_too_short_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"")
    assert rejected("--device", "cpu", "--text", str(path))[0] == 2
    assert "is empty" in rejected("--device", "cpu", "--text", str(path))[1]
    path.write_bytes(b"short")
    assert "has 5 bytes; at least" in rejected("--device", "cpu", "--text", str(path))[1]


def test_without_tqdm_the_demo_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm", None)
    for name in ("train", "run"):  # which another test may have imported with tqdm
        monkeypatch.delitem(sys.modules, f"mglu_ops.demo.{name}", raising=False)
    code, error = rejected("--device", "cpu")
    assert code == 2
    assert "needs the package tqdm, which is not installed: pip install tqdm" in error


def test_training_and_held_out_parts_cover_the_text_once(tmp_path: Path) -> None:
    from mglu_ops.demo.text import load

    path = tmp_path / "text"
    content = bytes(range(256)) * 8
    path.write_bytes(content)
    corpus = load(path, context=16)
    assert bytes([*corpus.train.tolist(), *corpus.held_out.tolist()]) == content
    assert len(corpus.held_out) == len(content) // 10
    windows = [(x, y) for x, y in corpus.held_out_batches(batch=3, context=16)]
    predicted = [byte for _, targets in windows for byte in targets.flatten().tolist()]
    assert predicted == corpus.held_out[1 : 1 + len(predicted)].tolist()
    assert len(predicted) == (len(corpus.held_out) - 1) // 16 * 16
    first = list(corpus.train_batches(2, 16, 3, seed=5))
    again = list(corpus.train_batches(2, 16, 3, seed=5))
    assert all((a[0] == b[0]).all() for a, b in zip(first, again, strict=True))
    assert all((inputs[:, 1:] == targets[:, :-1]).all() for inputs, targets in first)


def test_unigram_perplexity_of_two_equal_bytes(tmp_path: Path) -> None:
    from mglu_ops.demo.text import load

    path = tmp_path / "text"
    path.write_bytes(b"ab" * 100_000)
    assert load(path, context=16).unigram_perplexity() == pytest.approx(2, rel=2e-3)


def test_any_bytes_can_be_printed() -> None:
    from mglu_ops.demo.text import printable

    assert printable(b"a\xff\x00\x1b[0m\nb") == "a\\xff\\x00\\x1b[0m\nb"


def test_the_timer_interleaves_variants_and_drops_the_first_round() -> None:
    import torch

    from mglu_ops.timer import milliseconds

    order: list[str] = []
    variants = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    times = milliseconds(variants, torch.device("cpu"), rounds=2, calls=2)
    assert order == ["a", "a", "b", "b"] * 3
    assert set(times) == {"a", "b"}


def test_an_error_over_the_budget_or_nan_is_a_disagreement() -> None:
    import torch

    from mglu_ops.demo.agreement import Agreement, check
    from mglu_ops.demo.errors import Disagreement

    good = Agreement(1e-7, 1e-6, "w", 1e-7, 1e-7, 1e-6, 1e-6)
    check(good, torch.float32, "now")
    for name, value in (
        ("output", 1e-3),
        ("gradient", 1e-3),
        ("output", float("nan")),
        ("fused_output", 2e-7),
        ("fused_gradient", 2e-6),
    ):
        with pytest.raises(Disagreement, match=r"now, .*fused"):
            check(Agreement(**{**good.__dict__, name: value}), torch.float32, "now")
