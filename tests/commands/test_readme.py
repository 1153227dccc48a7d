"""Every snippet of the README runs, in order, as a user would type them; its arithmetic is right."""

from __future__ import annotations

import ast
import csv
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Container, Sequence
from pathlib import Path

import pytest

README = (Path(__file__).parents[2] / "README.md").read_text()


def snippets(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def run(command: Sequence[str | Path], folder: Path, path: str) -> str:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": path}
    process = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=600)
    assert process.returncode == 0, process.stderr
    return process.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, as torch.compile does")
def test_snippets_run(tmp_path: Path) -> None:
    """The Python, then the C++ by the commands beside it, which find in the folder what the Python wrote there."""
    code, commands = snippets("python"), snippets("bash")
    (program,) = snippets("cpp")
    assert len(code) >= 3
    assert len(commands) == 2
    (tmp_path / "readme.py").write_text("\n".join(code))
    (tmp_path / "main.cpp").write_text(program)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    printed = run([sys.executable, "readme.py"], tmp_path, path)
    report = re.search(r"^    (0 +naive\.py:.*)$", README, flags=re.MULTILINE)
    assert report
    assert report[1] in printed
    # Users wait for the compiler's optimisations; a test need not.
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\nexec {shutil.which("g++")} "$@" -O0\n')
    compiler.chmod(0o755)
    script = "set -euo pipefail\n" + "\n".join(commands)
    printed = run(["bash", "-c", script], tmp_path, f"{compiler.parent}{os.pathsep}{path}")
    assert printed.splitlines()[-3:] == ["[1, 64]", "[7, 64]", "[64, 64]"]


def measured(n_masks: int) -> dict[str, float]:
    """Microseconds of the variants at 14336 x 4096, from the committed results, and of the fastest of a kind."""
    with (Path(__file__).parents[2] / "benchmarks/results/one_token.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["out_features"] == "14336"]
    times = {row["variant"]: float(row["microseconds"]) for row in rows if int(row["n_masks"]) == n_masks}
    for kind in ("naive compiled", "SwiGLU"):
        of_kind = [time for variant, time in times.items() if variant.startswith(kind)]
        times[f"{kind}, fastest"] = min(of_kind, default=float("nan"))
    return times


def test_measured_times_are_those_of_the_results() -> None:
    variants = {
        "only reading the bytes": "read ceiling",
        "mglu_ops, CUDA backend": "mglu cuda",
        "mglu_ops, Triton backend": "mglu triton",
        "naive, best of torch.compile": "naive compiled, fastest",
        "naive, eager": "naive eager",
    }
    for label, variant in variants.items():
        line = re.search(rf"^\| {re.escape(label)} \|(.*)\|$", README, flags=re.MULTILINE)
        assert line, label
        shown = [float(cell) for cell in line[1].split("|")]
        assert shown == [round(measured(n)[variant], 1) for n in (1, 2, 4, 8, 16)], label
    swiglu = measured(1)["SwiGLU, fastest"]
    assert f"takes {swiglu:.1f}:" in README
    for n_masks, words in ((1, "{}x faster with one mask"), (4, "{}x\nwith 4"), (8, "{}x with 8")):
        assert words.format(f"{swiglu / measured(n_masks)['mglu cuda']:.2f}") in README, n_masks


def test_times_of_what_goes_on_are_those_of_the_results() -> None:
    times = {
        row["n_masks"]: float(row["microseconds"]) for row in results("sustained") if row["variant"] == "mglu cuda"
    }
    shown = [f"{times[n]:.1f}" for n in ("1", "4", "8", "16")]
    words = "slower: {} us with one mask, {} with 4, {} with 8, {} with 16 ([sustained.csv]"
    assert words.format(*shown) in README
    swiglu = min(float(row["microseconds"]) for row in results("sustained") if row["variant"].startswith("SwiGLU"))
    assert f"fastest SwiGLU takes {swiglu:.1f})" in README


def test_training_steps_are_those_of_the_results() -> None:
    with (Path(__file__).parents[2] / "benchmarks/results/train.csv").open() as file:
        rows = {(row["variant"], row["n_masks"]): row for row in csv.DictReader(file) if row["case"] == "training step"}
    for label, variant in (("naive, torch.compile", "naive compiled"), ("fused", "fused")):
        cells = []
        for n_masks in ("1", "4", "8"):
            row = rows[variant, n_masks]
            peak = ast.literal_eval(row["extra"])["peak_mb"]
            cells.append(f"{float(row['microseconds']) / 1000:.2f}, {peak:.0f} MB")
        assert f"| {label} | {' | '.join(cells)} |" in README


def results(name: str) -> list[dict[str, str]]:
    with (Path(__file__).parents[2] / f"benchmarks/results/{name}.csv").open() as file:
        return list(csv.DictReader(file))


def test_times_by_tokens_are_those_of_the_results() -> None:
    rows = [row for row in results("tokens") if row["out_features"] == "14336"]
    times = {(row["variant"], row["n_masks"], row["tokens"]): float(row["microseconds"]) for row in rows}
    header = re.search(r"^\| tokens, 14336 x 4096 \| (.*) \|$", README, flags=re.MULTILINE)
    assert header
    for n_masks in ("1", "4", "8", "16"):
        cells = []
        for tokens in header[1].split(" | "):
            time, floor = (times[name, n_masks, tokens] for name in ("mglu cuda", "floor"))
            cells.append(f"{time:.1f}, {time / floor:.2f}x")
        assert f"| n_m = {n_masks} | {' | '.join(cells)} |" in README


def test_how_far_the_floor_is_is_what_the_results_say() -> None:
    times = {
        (row["out_features"], int(row["n_masks"]), int(row["tokens"]), row["variant"]): float(row["microseconds"])
        for row in results("tokens")
    }
    ratios = {
        (shape, n_masks, tokens): times[shape, n_masks, tokens, "mglu cuda"] / time
        for (shape, n_masks, tokens, name), time in times.items()
        if name == "floor"
    }

    def most(least_tokens: int, most_tokens: int, masks: Container[int] = range(1, 17)) -> float:
        return max(
            ratio
            for (_, n_masks, tokens), ratio in ratios.items()
            if least_tokens <= tokens <= most_tokens and n_masks in masks
        )

    text = " ".join(README.split())
    assert f"at 16 to 512 tokens the Hopper kernel takes up to {most(16, 512):.1f} times as long" in text
    sixteen, fewer = most(1024, 8192, {16}), most(1024, 8192, range(1, 16))
    assert f"from 1024 on 16 masks up to {sixteen:.2f} times, fewer up to {fewer:.2f} (" in text
    assert f"(up to 8 tokens nothing takes more than {most(1, 8):.2f} times)" in text


def test_the_fastest_route_is_ours() -> None:
    routes = {(row["variant"], row["n_masks"], row["tokens"]): float(row["microseconds"]) for row in results("routes")}

    def naive(n_masks: str, tokens: str) -> float:
        return min(time for (name, *of), time in routes.items() if name.startswith("naive") and of == [n_masks, tokens])

    ours = {of: time for (name, *of), time in routes.items() for of in [tuple(of)] if name == "mglu cuda"}
    assert ours
    assert all(time < naive(*of) for of, time in ours.items())
    one, four = ("1", "8192"), ("4", "8192")
    assert f"one mask takes {ours[one]:.0f} us, the best form of the naive layer compiled {naive(*one):.0f};" in README
    assert f"four masks take {ours[four]:.0f}, it {naive(*four):.0f}. " in README
    swiglu = [
        min(time for (name, *of), time in routes.items() if name.startswith("SwiGLU") and of == ["1", tokens]) / time
        for (n_masks, tokens), time in ours.items()
        if n_masks == "1"
    ]
    assert f"to 8192, {min(swiglu):.2f}x to {max(swiglu):.2f}x (" in README
    assert min(swiglu) > 1


def test_decoding_is_as_in_the_tables() -> None:
    tables = (Path(__file__).parents[2] / "benchmarks/results/tables.md").read_text()
    rows = README[README.index("| one NVIDIA H200 | MB of weights |") :].split("\n\n")[0]
    lines = rows.splitlines()
    assert len(lines) == 6
    assert all(line in tables for line in lines)


def test_calls_of_packages_take_what_the_results_say() -> None:
    times = {row["variant"]: float(row["microseconds"]) for row in results("packages")}
    assert f": {times['shim']:.1f} us a layer of 64 x 64 on a CPU instead of {times['proxy executor']:.1f}\n" in README


@pytest.mark.parametrize("name", ["cpu_one_token", "cpu_one_token_xeon"])
def test_times_on_a_cpu_are_those_of_the_results(name: str) -> None:
    times: dict[tuple[str, str], float] = {}
    for row in results(name):
        if row["dtype"] == "bfloat16":
            key = "SwiGLU" if row["variant"].startswith("SwiGLU") else row["variant"], row["n_masks"]
            times[key] = min(times.get(key, float("inf")), float(row["least"]) / 1000)
    labels = {
        "a loop that only reads": "read loop",
        "mglu_ops, CPU backend": "mglu cpu",
        "SwiGLU, fastest in torch": "SwiGLU",
        "naive, compiled": "naive compiled",
    }
    for label, variant in labels.items():
        assert f"| {label} | {' | '.join(f'{times[variant, n]:.2f}' for n in ('1', '2', '4', '8', '16'))} |" in README


def test_gains_on_a_cpu_are_those_of_the_results() -> None:
    times = {
        (row["variant"], row["dtype"], row["n_masks"], row["tokens"]): float(row["least"])
        for row in results("cpu_tokens_xeon")
    }
    gains: dict[str, list[float]] = {"float32": [], "bfloat16": []}
    for (variant, *problem), time in times.items():
        if variant == "mglu cpu":
            gains[problem[0]].append(times[("naive compiled", *problem)] / time)
    slowest, *others = sorted(gains["float32"])
    text = " ".join(README.split())
    assert f"it is {min(gains['bfloat16']):.1f} to {max(gains['bfloat16']):.0f} times as fast as the naive" in text
    assert f"{slowest:.1f} times with one mask and 2048 tokens, else {others[0]:.1f} to {others[-1]:.0f} times" in text
    assert times["naive compiled", "float32", "1", "2048"] / times["mglu cpu", "float32", "1", "2048"] == slowest


def test_times_of_masks_at_inference_are_those_of_the_results() -> None:
    rows = {(row["variant"], row["n_masks"]): float(row["microseconds"]) for row in results("masks_at_inference_cuda")}
    for variant in {name for name, _ in rows}:
        cells = " | ".join(f"{rows[variant, n]:.0f}" for n in ("1", "4", "8"))
        assert re.search(rf"^\| {re.escape(variant)} \| .*\| {re.escape(cells)} \|$", README, re.MULTILINE), variant


def test_compile_times_are_those_of_the_results() -> None:
    rows = [row for row in results("compile_time") if row["case"] == "compile 32 layers"]
    seconds = {row["variant"]: float(row["microseconds"]) / 1e6 for row in rows}
    naive, fused = seconds["naive compiled"], seconds["fused"]
    assert f"\n{naive:.1f} s without fusing and {fused:.1f} s with it" in README
    assert f"of which the pass takes {seconds['pass']:.2f} s" in README


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (Path(__file__).parents[2] / "Makefile").read_text()
    targets = re.findall(r"\bmake ([a-z-]+)", README)
    assert {"demo", "test"} <= set(targets)
    for target in targets:
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"the Makefile has no target {target}"


def test_bytes_a_token() -> None:
    """The table of bits and megabytes a token follows from (16 + n_masks) h d bits against 32 h d."""
    rows = re.findall(r"^\| (SwiGLU|SwiMGLU, n_m = (\d+)) \| (\d+) \| ([\d.]+) \| ([\d.]+)x \|$", README, re.MULTILINE)
    assert len(rows) >= 5
    for _, n_masks, bits, megabytes, ratio in rows:
        expected = 16 + int(n_masks) if n_masks else 32
        assert int(bits) == expected
        assert float(megabytes) == pytest.approx(expected / 8 * 14336 * 4096 / 1e6, abs=0.05)
        assert float(ratio) == pytest.approx(32 / expected, abs=0.005)
