"""The benchmark of experts without a GPU: its layers, SwiGLU's forms, the rows and their tables."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import baselines, decode, pages, vllm_kernels
from benchmarks.baselines import TILES, expert_swiglu_variants, tiles_for
from benchmarks.layers import ROUTINGS, ExpertLayers, Model, masks_of, route
from benchmarks.records import Row, read, write
from benchmarks.timing import Timing, Variant
from mglu_ops.backends import triton as triton_backend
from tests.support import commands
from tests.support.commands import row

MODEL = Model(experts=6, out_features=40, in_features=48, top_k=3)
NAN = float("nan")


def small(tokens: int, **options: Any) -> ExpertLayers:
    torch.manual_seed(tokens)
    options = {"masks": (1, 2), "dtype": torch.float32, "count": 2, **options}
    return ExpertLayers(MODEL, tokens, device="cpu", **options)


@pytest.mark.parametrize("routing", ROUTINGS)
def test_routings_choose_different_experts_for_a_token(routing: str) -> None:
    torch.manual_seed(0)
    ids = route(Model(32, 8, 8, 4), 4096, routing, "cpu")
    assert ids.shape == (4096, 4)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    loads = ids.flatten().bincount(minlength=32)
    assert (loads.max() / loads.float().mean() > 4) == (routing == "skewed")
    assert loads.min() > 0


def test_layers_are_as_many_as_make_the_experts_in_use_cold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.layers.COLD_BYTES", 30_000)
    layers = ExpertLayers(MODEL, 1, weight_format="fp8_row", masks=(1,), device="cpu")
    assert layers.used == [MODEL.top_k] * layers.count
    bytes_in_use = MODEL.top_k * MODEL.out_features * MODEL.in_features
    assert (layers.count - 1) * bytes_in_use < 30_000 <= layers.count * bytes_in_use


def test_results_in_float64_are_the_formulas() -> None:
    """The oracle computes the formulas for one token and expert at a time, with unpacked masks."""
    layers, i = small(5, whole=True), 1
    for n_masks in (0, 2):
        down, expected = layers.down[i], torch.zeros(5, MODEL.in_features, dtype=torch.float64)
        for token in range(5):
            x = layers.x[token].double()
            for k, expert in enumerate(layers.ids[i][token].tolist()):
                gate, up = layers.both[i][expert].double().chunk(2)
                y = F.silu(gate @ x) * (up @ x)
                if n_masks:
                    masks = [masks_of(layers.packed[n_masks][i][expert], m).double() for m in range(n_masks)]
                    y = sum((F.silu((gate * m) @ x) * ((gate * (1 - m)) @ x) for m in masks), torch.zeros(()))
                torch.testing.assert_close(layers.first_half(i, n_masks)[token * MODEL.top_k + k], y)
                expected[token] += layers.expert_weights[i][token, k].double() * (down[expert].double() @ y)
        torch.testing.assert_close(layers.oracle(i, n_masks), expected)


def scaled_grouped_mm(x: Tensor, weight: Tensor, x_scale: Tensor, scale: Tensor, offs: Tensor, **_: object) -> Tensor:
    """A replacement of `torch._scaled_grouped_mm` that runs on a CPU."""
    groups = zip(offs.diff(prepend=offs.new_zeros(1)).tolist(), weight, scale, strict=True)
    weights = [(one.float() * rows).expand(count, -1, -1) for count, one, rows in groups]
    return ((x.float() * x_scale[:, None])[:, None] @ torch.cat(weights))[:, 0]


@pytest.mark.parametrize("tokens", [1, 5, 23])
@pytest.mark.parametrize("weight_format", ["dense", "fp8_row", "int4_group"])
def test_operators_and_forms_of_swiglu_compute_their_layers(monkeypatch: Any, weight_format: str, tokens: int) -> None:
    """Checks our operators and SwiGLU in torch; `test_triton_kernels_compute_their_layers` checks SwiGLU in Triton."""
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", scaled_grouped_mm)
    baselines._compiled.cache_clear()
    for whole in (False, True):
        layers = small(tokens, weight_format=weight_format, whole=whole)
        found = [one for one in expert_swiglu_variants(layers) if "Triton" not in one.name]
        assert len(found) == (0 if weight_format == "int4_group" else 1 + (tokens <= 8))
        ours = [one for n_masks in (1, 2) for one in decode.our_expert_variants(layers, n_masks)]
        names = ["mglu", "mglu, x in fp8"] if weight_format == "fp8_row" else ["mglu"]
        assert [one.name for one in ours] == 2 * names
        check([*found, *ours])
    baselines._compiled.cache_clear()


def check(variants: list[Variant]) -> None:
    for variant in variants:
        assert variant.oracle is not None
        output = variant.run(1)
        assert output is not None
        torch.testing.assert_close(output.double(), variant.oracle(1), rtol=1e-5, atol=1e-5)


@pytest.mark.long
@pytest.mark.skipif(not triton_backend.is_installed(), reason="triton is not installed")
def test_triton_kernels_compute_their_layers() -> None:
    """Runs in a new process, because Triton decides when kernels are imported whether it interprets them."""
    commands.python("-c", "import test_bench_experts; test_bench_experts.check_triton()", TRITON_INTERPRET="1")


def check_triton() -> None:
    narrow, deep = TILES[0]._replace(depth=16), TILES[-1]._replace(pairs=32, columns=16)
    for tokens, tile, routing in ((1, narrow, "balanced"), (5, deep, "balanced"), (23, narrow, "skewed")):
        baselines.tiles_for = lambda pairs: [tile]  # type: ignore[assignment]  # noqa: B023
        stored = {"weight_format": "fp8_row"}
        for options in ({}, {"whole": True}, stored, {"whole": True, **stored}):
            found = expert_swiglu_variants(small(tokens, routing=routing, **options))
            (variant,) = (one for one in found if "Triton" in one.name)
            check([variant])


def test_tiles_are_near_the_pairs_of_an_expert() -> None:
    assert {tile.pairs for tile in tiles_for(1.0)} == {16}
    assert {tile.pairs for tile in tiles_for(20.5)} == {16, 32, 64}
    assert {tile.pairs for tile in tiles_for(500.0)} == {128}


@pytest.fixture
def small_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the benchmark build layers on a CPU, and take times from a table instead of measuring variants."""
    times = {"read ceiling": 8.0, "mglu": 10.0, "SwiGLU bmm": 30.0, "SwiGLU grouped_mm": 20.0, "SwiGLU Triton": 25.0}

    def measure(variants: list[Variant], dtype: torch.dtype, rounds: int, settle: float) -> dict[Variant, Timing]:
        assert (dtype, rounds) == (torch.bfloat16, 7)
        found = {}
        for position, one in enumerate(variants):
            (time,) = (time for name, time in times.items() if one.name.startswith(name))
            found[one] = Timing(time + 0.01 * position, 0.5, 0.002)
        return found

    def layers(model: Model, *options: Any) -> ExpertLayers:
        return ExpertLayers(MODEL, *options, device="cpu", count=2)

    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "ExpertLayers", layers)
    monkeypatch.setattr(decode, "reader", lambda weights, masks: lambda i: None)
    monkeypatch.setattr(decode, "launches", lambda variant: len(variant.name))
    monkeypatch.setattr(decode, "runs", lambda variant: "128" not in variant.name)
    monkeypatch.setattr(vllm_kernels, "why_missing", lambda: "vLLM is not installed")


@pytest.mark.usefixtures("small_problems")
def test_rows_of_a_problem(tmp_path: Path) -> None:
    sweep = replace(decode.SWEEPS["experts_layer"], tokens=(8,), routings=("balanced",), shapes={MODEL: "small"})
    found = sweep.result("experts_layer", rounds=7).run(tmp_path)
    by_name = {(one.variant, one.n_masks): one for one in found}
    kinds = [(name.partition(",")[0], n_masks) for name, n_masks in by_name]
    ours = [("read ceiling", 1), ("mglu", 1), ("read ceiling", 4), ("mglu", 4)]
    assert kinds[:7] == [*ours, ("SwiGLU bmm", 0), ("SwiGLU grouped_mm", 0), ("SwiGLU Triton", 0)]
    assert all(one.extra == {"left_out": "refused"} for one in found[7:-1])
    assert (found[-1].variant, found[-1].extra) == ("SwiGLU vLLM", {"left_out": "vLLM is not installed"})
    assert {one.case for one in found} == {"small, balanced"}
    mglu = by_name["mglu", 4]
    assert mglu.fraction_of_ceiling == pytest.approx(8.02 / 10.03)
    assert mglu.extra == {"experts_in_use": 6.0, "launches": len("mglu")}
    assert not any(one.is_wrong for one in found)
    again = sweep.result("experts_layer", rounds=7).run(tmp_path, resume=True)
    assert len(again) == len(found) == len(read(tmp_path, "experts_layer"))


def test_of_tiles_the_fastest_and_the_wrong_ones_stay() -> None:
    times = {"SwiGLU Triton, a": 3.0, "SwiGLU Triton, b": NAN, "SwiGLU Triton, c": 2.0, "SwiGLU bmm": 9.0}
    variants = [Variant(name, lambda i: None, 1) for name in times]
    kept = decode.fastest_tile(variants, {one: Timing(times[one.name], 0.1) for one in variants})
    assert [one.name for one in kept] == ["SwiGLU Triton, b", "SwiGLU Triton, c", "SwiGLU bmm"]


def test_tables_show_the_fastest_form_and_losses(tmp_path: Path) -> None:
    pytest.importorskip("pandas", reason="the tables need pandas")

    def rows_of(tokens: int, **extra: object) -> list[Row]:
        ours = {"experts_in_use": 7.6, **extra}
        case = {"tokens": tokens, "case": "Qwen3-30B-A3B, skewed"}
        return [
            row("mglu", 10.0, 1, fraction_of_ceiling=0.8, extra=ours, **case),
            row("mglu", 20.0, 4, fraction_of_ceiling=0.5, extra=ours, **case),
            row("mglu, x in fp8", 12.0, 4, fraction_of_ceiling=1.0, extra=ours, **case),
            row("SwiGLU bmm, coordinate descent", 15.0, 0, fraction_of_ceiling=NAN, extra=extra, **case),
            row("SwiGLU vLLM fused_experts", 16.0, 0, fraction_of_ceiling=NAN, extra=extra, **case),
            row("SwiGLU refused", NAN, 0, fraction_of_ceiling=NAN, extra={"left_out": "refused"}, **case),
        ]

    def lines(name: str, rows: list[Row]) -> list[str]:
        write(rows, tmp_path, name, "by the clock")
        return pages.TABLES[name](tmp_path).splitlines()[2:]

    times = "10.0, 1.25x, 1.50x | 20.0, 2.00x, **0.75x, slower** | 12.0, 1.00x, 1.25x"
    assert lines("experts", [*rows_of(1), *rows_of(8)]) == [
        "| tokens, Qwen3-30B-A3B, skewed | experts in use | fastest SwiGLU | n_m = 1 | n_m = 4 | n_m = 4, x in fp8 |",
        "| --- | --- | --- | --- | --- | --- |",
        *(f"| {tokens} | 8 | bmm: 15.0 | {times} |" for tokens in (1, 8)),
    ]
    (line,) = lines("experts_layer", rows_of(1, launches=2))[2:]
    assert "15.0, 2 launches | 10.0, 2 launches, 1.25x, 1.50x |" in line
