"""The benchmarks, as far as a CPU goes: what they count, write, transcribe and draw, and the model that decodes."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from torch import Tensor

from benchmarks import baselines, decode, decode_model, paper, rows, suites, tables
from benchmarks.ceiling import GEMM_TOKENS, floor
from benchmarks.decoder import Decoder, Sizes
from benchmarks.harness import Row, environment, read, read_environment, relative_error, write
from mglu_ops import bench
from mglu_ops.__main__ import main
from mglu_ops.tuning.replay import BYTES_OF_LAYERS, layers_for

NAN = float("nan")


def row(variant: str, microseconds: float, n_masks: int = 1, tokens: int = 1, **changes: Any) -> Row:
    fields: dict[str, Any] = {
        "case": "decode",
        "out_features": 8192,
        "in_features": 2048,
        "dtype": "bfloat16",
        "spread": 0.5,
        "fraction_of_ceiling": 0.5,
        "error": 1e-3,
    }
    return Row(variant=variant, microseconds=microseconds, n_masks=n_masks, tokens=tokens, **{**fields, **changes})


# --- What is counted, and what is written ---------------------------------------------------------------------------


def test_floor_is_the_larger_of_reading_and_arithmetic() -> None:
    product = 400.0  # microseconds of one product of 8192 tokens
    assert floor(10.0, product, tokens=GEMM_TOKENS, n_masks=4) == 5 * product
    assert floor(10.0, product, tokens=64, n_masks=4) == 5 * product / 128
    assert floor(10.0, product, tokens=16, n_masks=1) == 10.0
    assert floor(10.0, None, tokens=1, n_masks=16) == 10.0


def test_layers_are_more_than_a_gigabyte() -> None:
    for size in (1_000_000, 33_554_432, 470_000_000):
        assert layers_for(size) * size >= BYTES_OF_LAYERS > (layers_for(size) - 1) * size
    assert layers_for(10**10) == 2


def test_error_of_what_is_not_a_number_is_infinite() -> None:
    expected = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert relative_error(torch.tensor([3.0, 4.5]), expected) == pytest.approx(0.1)
    assert relative_error(torch.tensor([3.0, NAN]), expected) == math.inf
    assert relative_error(None, expected) == math.inf


def test_tables_are_read_as_they_were_written(tmp_path: Path) -> None:
    written = [
        row("mglu cuda", 10.25, extra={"chosen": True}),
        row("naive, of a name with a comma", NAN, error=math.inf),
        row("read ceiling", 9.5, error=NAN, fraction_of_ceiling=1.0),
    ]
    write(written, tmp_path, "some", "by the clock")
    found = read(tmp_path, "some")
    assert [repr(one) for one in found] == [repr(one) for one in written]  # NaN is not equal to itself
    assert [one.is_wrong for one in found] == [False, True, False]
    assert "WRONG" in str(found[1])
    assert "chosen True" in str(found[0])
    assert read(tmp_path, "another") == []

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    document = json.loads((tmp_path / "some.json").read_text(), parse_constant=refuse)
    assert document["rows"][1]["microseconds"] is None
    assert read_environment(tmp_path, "some")["protocol"] == "by the clock"
    assert {"commit", "device", "torch", "triton", "cuda", "python"} < set(document["environment"])


def test_commit_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGLU_COMMIT", "abc")
    assert environment()["commit"] == "abc"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool])
def test_naive_layer_with_either_kind_of_masks(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight, masks = torch.randn(3, 16), torch.randn(8, 16), torch.rand(2, 8, 16) > 0.5
    expected = sum(F.silu(x @ (weight * m).T) * (x @ (weight * ~m).T) for m in masks)
    torch.testing.assert_close(baselines.naive(x, weight, masks.to(dtype)), expected)


def test_stacked_swiglu_is_swiglu() -> None:
    x, gate, up = torch.randn(3, 16), torch.randn(8, 16), torch.randn(8, 16)
    stacked = baselines.swiglu_stacked(x, torch.cat((gate, up)))
    torch.testing.assert_close(stacked, baselines.swiglu(x, gate, up))


# --- Suites and the command -----------------------------------------------------------------------------------------


def test_sweep_measures_each_problem_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    calls: list[tuple[Any, ...]] = []

    def measured(d: int, h: int, n_masks: int, tokens: int, *rest: Any, tuned: bool, case: str) -> list[Row]:
        calls.append((d, h, n_masks, tokens, rest[1], tuned, case))
        return [row("mglu cuda", 1.0, n_masks, tokens, out_features=d, in_features=h, case=case)]

    monkeypatch.setattr(decode, "bench", measured)
    sweep = decode.Sweep((1, 2), (1, 4), baselines=("naive", "swiglu"), shapes={(64, 32): "a", (32, 16): "b"})
    found = decode.run(sweep, tmp_path, "some")
    assert calls[:4] == [
        (64, 32, 1, 1, ["naive", "swiglu"], True, "a"),
        (64, 32, 4, 1, ["naive"], True, "a"),  # SwiGLU has no masks
        (64, 32, 1, 2, ["naive", "swiglu"], False, "a"),
        (64, 32, 4, 2, ["naive"], False, "a"),
    ]
    assert len(calls) == len(found) == len(read(tmp_path, "some")) == 8
    assert sweep.quick() == replace(sweep, tokens=(1,), masks=(1,), shapes={(32, 16): "b"})


def test_suites_cover_the_tables() -> None:
    drawn_from = {name for name, _ in tables.SECTIONS.values()}
    assert drawn_from <= set(suites.SUITES)
    assert suites.SWEEPS["routes"][1].tokens == tuple(2**i for i in range(14))
    assert suites.SWEEPS["one_token"][1].masks == (1, 2, 4, 8, 16)
    assert set(suites.SWEEPS["one_token"][1].shapes) == {(8192, 2048), (14336, 4096)}
    by_shape = suites.models_by_shape()
    assert by_shape[14336, 4096] == "Llama-3.1 8B, Mistral 7B"
    assert sum(len(names.split(", ")) for names in by_shape.values()) == len(suites.MODELS)
    assert all(h % 8 == 0 for _, h in by_shape)


def error_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["bench", *arguments]) == 2
    return capsys.readouterr().err


def test_command_names_its_suites(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(suites.SUITES)


def test_command_says_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "no suite is named latency; there are one_token, " in error_of(capsys, "latency")
    assert "models needs a CUDA GPU, and torch" in error_of(capsys, "tables", "models")
    assert "`bench tables plots` works anywhere" in error_of(capsys)
    assert f"{tmp_path}: no results are here to draw from" in error_of(capsys, "tables", "--out", str(tmp_path))
    monkeypatch.setattr(suites.importlib.util, "find_spec", lambda name: None)
    assert 'plots needs matplotlib: pip install "mglu-ops[dev]"' in error_of(capsys, "plots")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert 'one_token needs cuda-core: pip install "mglu-ops[cuda]"' in error_of(capsys, "one_token")
    monkeypatch.setattr(bench, "ROOT", tmp_path)
    assert "they are in the repository and not in the wheel" in error_of(capsys)


def test_all_that_can_run_runs_where_matplotlib_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def suite(name: str, needs: Any) -> suites.Suite:
        def run(out: Path, quick: bool) -> Sequence[Row]:
            ran.append(f"{name} {quick}")
            return [row("mglu cuda", NAN)]

        return suites.Suite(name, run, needs)

    monkeypatch.setattr(suites, "SUITES", {"measure": suite("measure", None), "draw": suite("draw", "matplotlib")})
    monkeypatch.setattr(suites.importlib.util, "find_spec", lambda name: None)
    assert main(["bench", "--quick", "--out", str(tmp_path)]) == 1  # a row is wrong
    assert ran == ["measure True"]
    printed = capsys.readouterr().out
    assert "draw is left out: it needs matplotlib" in printed
    assert "WRONG: 8192x2048" in printed


def test_make_runs_the_suites() -> None:
    makefile = (Path(__file__).parent.parent / "Makefile").read_text()
    assert "$(PYTHON) -m mglu_ops bench" in makefile.split("\ngpu-bench:")[1].split("\n\n")[0]


# --- Tables ---------------------------------------------------------------------------------------------------------

MGLU_RATIOS = {
    "RTX 5090": "3.54 1.39 6.47 2.55 12.51 4.48 19.66 6.25 2.82 2.45 5.13 4.35 9.63 7.86 18.04 11.14",
    "H100": "3.28 2.03 5.41 3.26 9.62 5.08 16.38 6.11 3.73 3.27 6.64 5.71 12.12 8.37 21.68 8.23",
}
"""The columns Torch/CUDA and Torch/Triton as the paper prints them, row by row."""
GLU_RATIOS = {
    "RTX 5090": "1.51 1.46 1.41 1.15 1.31 1.31 1.29 1.24",
    "H100": "1.23 1.19 1.13 1.00 1.16 1.14 1.09 1.00",
}
"""The column GLU/CUDA."""


@pytest.mark.parametrize("gpu", list(paper.GPUS))
def test_the_papers_times_give_the_papers_ratios(gpu: str) -> None:
    of_mglu, of_glu = paper.GPUS[gpu]
    problems = [(shape, n_masks) for shape in ((8192, 2048), (14336, 4096)) for n_masks in (1, 2, 4, 8)]
    assert list(of_mglu) == list(of_glu) == problems
    ratios = [ratio for line in of_mglu.values() for ratio in (line.torch / line.cuda, line.torch / line.triton)]
    assert ratios == pytest.approx([float(printed) for printed in MGLU_RATIOS[gpu].split()], abs=0.0151)
    ratios = [line.glu / line.cuda for line in of_glu.values()]
    assert ratios == pytest.approx([float(printed) for printed in GLU_RATIOS[gpu].split()], abs=0.0051)
    assert [line.cuda for line in of_mglu.values()] == [line.cuda for line in of_glu.values()]


def test_paper_table_has_our_gpu_beside_the_papers() -> None:
    measured = [
        row("SwiGLU eager", 25.0),
        *(
            row(variant, time, n_masks)
            for n_masks in (1, 16)
            for variant, time in (("mglu cuda", 10.0), ("mglu triton", 12.5), ("naive eager", 90.0))
        ),
    ]
    assert tables.paper_lines(measured, (8192, 2048), "Some GPU") == [
        ["1", "H100, paper", "39.5", "63.9", "129.6", "3.28x", "2.03x", "48.5", "1.23x"],
        ["1", "RTX 5090, paper", "20.2", "51.6", "71.5", "3.54x", "1.39x", "30.6", "1.51x"],
        ["1", "**Some GPU**", "10.0", "12.5", "90.0", "9.00x", "7.20x", "25.0", "2.50x"],
        ["16", "**Some GPU**", "10.0", "12.5", "90.0", "9.00x", "7.20x", "25.0", "2.50x"],
    ]


def test_routes_show_where_we_lose() -> None:
    problem = [
        row("floor", 80.0),
        row("mglu cuda", 100.0, extra={"chosen": True}),
        row("mglu composite", 300.0),
        row("naive eager", 250.0),
        row("naive compiled", NAN),
    ]
    swiglu = row("SwiGLU compiled", 150.0)
    won = tables.route_line(problem, swiglu)
    assert won == ["1", "80.0", "100.0 (cuda)", "1.25x", "naive eager", "250.0", "2.50x", "150.0", "1.50x"]
    lost = tables.route_line([*problem, row("naive compiled, bool masks", 90.0)], swiglu)
    assert lost[4:7] == ["naive compiled, bool masks", "90.0", "**0.90x, slower**"]
    shown = tables.routes([*problem, swiglu], "Some GPU")
    assert f"| {' | '.join(won)} |" in shown
    assert "8192 x 2048, n_m = 1, us on one Some GPU" in shown


def test_tables_of_models() -> None:
    measured = [
        row("SwiGLU eager", 25.0, case="A 1B, B 1B"),
        row("SwiGLU compiled", 20.0),
        row("mglu cuda", 10.0, extra={"chosen": True}),
        row("mglu cuda", 12.5, n_masks=4, extra={"chosen": True}),
    ]
    assert tables.models(measured, "GPU").splitlines()[2:] == [
        "| A 1B, B 1B | 8192 x 2048 | 20.0 | 10.0, 2.00x | 12.5, 1.60x |"
    ]
    decoded = [
        row("SwiGLU", 1000.0, n_masks=0, extra={"weight_mb": 2471.6}),
        row("SwiMGLU", 800.0, n_masks=4, extra={"weight_mb": 2000.0}),
    ]
    assert tables.decode_model(decoded, "GPU").splitlines()[2:] == [
        "| SwiGLU | 2471.6 | 1.000 | 1000 | 1.00x | 0.50 |",
        "| SwiMGLU, n_m = 4 | 2000.0 | 0.800 | 1250 | 1.25x | 0.50 |",
    ]


def test_committed_tables_are_drawn_from_the_committed_results(tmp_path: Path) -> None:
    for path in suites.RESULTS.glob("*.[cj]s*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    drawn = tables.write_tables(tmp_path).read_text()
    assert drawn == (suites.RESULTS / tables.FILE).read_text(), "python -m mglu_ops bench tables draws them anew"


# --- The model ------------------------------------------------------------------------------------------------------

SIZES = Sizes(layers=2, hidden=64, intermediate=96, heads=4, kv_heads=2, vocabulary=50, context=16)


def rope(heads: Tensor, base: float) -> Tensor:
    """Rotary positions by complex numbers: `[tokens, heads, width]`, feature j paired with j + width / 2."""
    count, _, width = heads.shape
    angles = torch.arange(count)[:, None] * base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    pairs = torch.complex(*heads.double().chunk(2, dim=-1)) * torch.polar(torch.ones_like(angles), angles)[:, None]
    return torch.cat((pairs.real, pairs.imag), dim=-1)


def reference_logits(model: Decoder, sizes: Sizes, tokens: Tensor) -> Tensor:
    """The whole sequence at once, without a cache, in float64."""
    x = model.start.embedding(tokens).double()
    block: Any
    for block in model.blocks:
        attention = block.attention
        heads = attention.inputs.double()(block.attention_norm.double()(x)).view(len(tokens), -1, sizes.head_width)
        query, key, value = heads.split([sizes.heads, sizes.kv_heads, sizes.kv_heads], dim=1)
        group = sizes.heads // sizes.kv_heads
        query, key = rope(query, sizes.rope_base), rope(key, sizes.rope_base).repeat_interleave(group, dim=1)
        scores = torch.einsum("qhw,khw->hqk", query, key) / sizes.head_width**0.5
        causal = torch.ones(len(tokens), len(tokens)).tril().bool()
        weights = scores.masked_fill(~causal, -math.inf).softmax(-1)
        mixed = torch.einsum("hqk,khw->qhw", weights, value.repeat_interleave(group, dim=1))
        x = x + attention.output.double()(mixed.flatten(1))
        x = x + block.feed_forward.double()(block.feed_forward_norm.double()(x))
    return model.head.norm.double()(x) @ model.head.weight.double().T


@pytest.mark.parametrize("n_masks", [0, 2])
@torch.no_grad()
def test_decoding_is_attention_over_the_whole_sequence(n_masks: int) -> None:
    torch.manual_seed(0)
    model = decode_model.build(SIZES, n_masks, "cpu", torch.float32)
    decoding = decode_model.Decoding.of(model)
    tokens, logits = [], []
    for _ in range(6):
        tokens.append(decoding.token.clone())
        logits.append(decoding.step())
        assert torch.equal(decoding.token, logits[-1].argmax(dim=-1))
    assert int(decoding.position) == 6
    assert torch.equal(decode_model.logits_of(model, tokens), torch.cat(logits))
    expected = reference_logits(model, SIZES, torch.cat(tokens))
    assert relative_error(torch.cat(logits), expected) < 1e-5


@torch.no_grad()
def test_errors_of_a_step_are_against_float64() -> None:
    torch.manual_seed(0)
    decoding = decode_model.Decoding.of(decode_model.build(SIZES, 1, "cpu", torch.bfloat16))
    error, eager = decoding.errors(decoding.step)
    assert error == eager  # the step is the eager model here
    assert 1e-4 < error < 3e-2
    assert int(decoding.position) == int(decoding.token) == 0
    assert decoding.errors(lambda: decoding.step() * 1.5)[0] == pytest.approx(0.5, abs=0.05)


@pytest.mark.slow
@torch.no_grad()
def test_the_blocks_compile_once() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    decoding = decode_model.Decoding.of(decode_model.build(replace(SIZES, layers=3), 2, "cpu", torch.float32))
    counter = torch._dynamo.testing.CompileCounter()
    decoding.model.compile_parts(lambda part: part.compile(backend=counter, fullgraph=True, dynamic=False))
    error, eager = decoding.errors(decoding.step)
    assert counter.frame_count == 3  # start, block, head
    assert error == eager < 1e-5


def test_bytes_of_weights_count_each_matrix_once() -> None:
    for n_masks in (0, 1, 4):
        model = decode_model.build(SIZES, n_masks, "cpu", torch.bfloat16)
        h, d = SIZES.hidden, SIZES.intermediate
        attention = h * (SIZES.heads + 2 * SIZES.kv_heads) * SIZES.head_width + h * h
        projections = 2 * d * h if n_masks else 3 * d * h
        numbers = SIZES.layers * (attention + projections + 2 * h) + h + SIZES.vocabulary * h
        assert model.weight_bytes() == 2 * numbers + SIZES.layers * n_masks * d * h // 8


# --- Pictures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def plots() -> Any:
    pytest.importorskip("matplotlib", reason="the pictures need matplotlib")
    from benchmarks import plots

    return plots


def committed(name: str) -> list[dict[str, str]]:
    with (suites.RESULTS / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def least(lines: list[dict[str, str]], prefix: str, **fields: object) -> float:
    """The least time of the variants that begin with `prefix`, straight from a CSV."""
    wanted = {name: str(value) for name, value in fields.items()}
    return min(
        float(line["microseconds"])
        for line in lines
        if line["variant"].startswith(prefix) and wanted.items() <= line.items() and line["microseconds"] != "nan"
    )


def drawn(axes: Any) -> dict[str, list[tuple[float, float]]]:
    """The labelled lines of a panel."""
    return {
        line.get_label(): list(zip(map(float, line.get_xdata()), map(float, line.get_ydata()), strict=True))
        for line in axes.get_lines()
        if not line.get_label().startswith("_")
    }


def panels(plots: Any, name: str) -> list[tuple[dict[str, int], dict[str, list[tuple[float, float]]]]]:
    """The shape and the lines of each panel of a picture of the committed results."""
    table, picture = plots.PLOTS[name]
    found = read(suites.RESULTS, table)
    shapes = [{"out_features": d, "in_features": h} for d, h in rows.shapes(found)]
    return [(shape, drawn(axes)) for shape, axes in zip(shapes, picture(found).axes, strict=False)]


def test_latency_is_that_of_the_results(plots: Any) -> None:
    lines = committed("one_token")
    for shape, found in panels(plots, "latency_by_masks"):
        assert {"only reading the bytes", "CUDA backend", "naive, eager", "SwiGLU, fastest"} <= set(found)
        for label, variant in tables.ONE_TOKEN.items():
            for n_masks, time in found.get(label, []):
                assert time == least(lines, variant, n_masks=int(n_masks), **shape), (label, n_masks)
        assert {time for _, time in found["SwiGLU, fastest"]} == {least(lines, "SwiGLU", **shape)}
        assert [n_masks for n_masks, _ in found["CUDA backend"]] == [1, 2, 4, 8, 16]


def test_fractions_are_those_of_the_results(plots: Any) -> None:
    lines = committed("one_token")
    _, picture = plots.PLOTS["fraction_of_ceiling"]
    found = drawn(*picture(read(suites.RESULTS, "one_token")).axes)
    assert found
    for label, points in found.items():
        backend, shape = label.split(", ")
        d, h = shape.split(" x ")
        for n_masks, fraction in points:
            problem = {"n_masks": int(n_masks), "out_features": d, "in_features": h}
            ours = least(lines, f"mglu {backend.lower()}", **problem)
            assert fraction == pytest.approx(least(lines, "read ceiling", **problem) / ours, rel=1e-5)


def test_speedup_is_that_of_the_results(plots: Any) -> None:
    lines = committed("routes")
    for shape, found in panels(plots, "speedup_over_swiglu"):
        for label, points in found.items():
            n_masks = int(label.removeprefix("n_m = "))
            for count, speedup in points:
                swiglu = least(lines, "SwiGLU", tokens=int(count), **shape)
                chosen = [line for line in lines if "'chosen': True" in line["extra"]]
                ours = least(chosen, "mglu", n_masks=n_masks, tokens=int(count), **shape)
                assert speedup == pytest.approx(swiglu / ours)


def test_roofline_is_that_of_the_results(plots: Any) -> None:
    lines = committed("tokens")
    for shape, found in panels(plots, "roofline"):
        d, h = shape.values()
        for n_masks in (1, 4, 8, 16):
            points = dict(found[f"n_m = {n_masks}"])
            counts = [line for line in lines if line["variant"] == "mglu cuda" and line["n_masks"] == str(n_masks)]
            assert len(points) == len({line["tokens"] for line in counts})
            for intensity, rate in points.items():
                tokens = round(intensity * (2 + n_masks / 8) / 2 / (n_masks + 1))
                seconds = least(lines, "mglu cuda", n_masks=n_masks, tokens=tokens, **shape) * 1e-6
                flops = (n_masks + 1) * 2 * tokens * d * h
                assert rate == pytest.approx(flops / seconds / 1e12)
                assert intensity == pytest.approx(flops / (d * h * (2 + n_masks / 8)))
                assert rate <= 1.02 * intensity * found["read ceiling"][0][1] / found["read ceiling"][0][0]


def test_roofs_and_speedup_of_a_small_table(plots: Any) -> None:
    chosen = {"chosen": True}
    table = [
        *(row("read ceiling", 10.0, n_masks=4, tokens=tokens) for tokens in (1, 1024)),
        row("mglu cuda", 12.5, n_masks=4, extra=chosen),
        row("mglu cuda", 320.0, n_masks=4, tokens=1024, extra=chosen),
        row("SwiGLU eager", 25.0, n_masks=4),
        row("SwiGLU compiled", 20.0, n_masks=4),
        row("SwiGLU compiled", 160.0, n_masks=4, tokens=1024),
        row("library GEMM", 400.0, n_masks=4, tokens=1024, extra={"of_tokens": 8192, "tflops": 700.0}),
    ]
    speedup = drawn(plots.speedup_over_swiglu(table).axes[0])
    assert speedup == {"n_m = 4": [(1, 1.6), (1024, 0.5)]}
    roofs = drawn(plots.roofline(table).axes[0])
    bandwidth = 8192 * 2048 * 2.5 / 10e-6 / 1e12  # TB/s
    (low, ridge), (same, high) = roofs["read ceiling"], roofs["library GEMM"]
    assert low == pytest.approx((4, 4 * bandwidth))
    assert ridge == same == pytest.approx((700 / bandwidth, 700))
    assert high == pytest.approx((4 * 1024, 700))


def test_pictures_are_the_same_every_time_and_say_what_they_are_drawn_from(plots: Any, tmp_path: Path) -> None:
    first, second = (plots.draw(suites.RESULTS, tmp_path / name) for name in ("first", "second"))
    assert [path.stem for path in first] == list(plots.PLOTS)
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
        assert len(one.read_bytes()) < 100_000
        table, _ = plots.PLOTS[one.stem]
        assert plots.source(suites.RESULTS, table) in one.read_text()
        committed_picture = (suites.RESULTS / one.name).read_text()
        assert plots.source(suites.RESULTS, table) in committed_picture, "bench plots draws it anew"


def test_pictures_need_results(plots: Any, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no results are here"):
        plots.draw(tmp_path, tmp_path)


def test_every_number_of_masks_has_a_style(plots: Any) -> None:
    assert set(plots.BY_MASKS) == {1, 2, 4, 8, 16}
    assert len({style.marker for style in plots.BY_MASKS.values()}) == 5
