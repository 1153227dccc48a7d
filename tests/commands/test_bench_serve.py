"""benchmarks/serve.py and engine.py without vLLM: the order of starts, what a result keeps, and its table."""

from __future__ import annotations

import io
import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import engine, frames, pages, serve, suites
from benchmarks.engine import Spec, fill, profiled
from benchmarks.records import Row, read
from benchmarks.serve import MODELS, VARIANTS, EngineError, Model, Session, Start, merged, write_config
from mglu_ops.formats import get_format

SMALL = ["--models", "llama-1b", "--variants", "swiglu", "mglu-1", "mglu-1-fp8", "--sequences", "1", "8"]


class FakeEngine:
    """An engine that answers at once. `failing` names the variants whose engine does not start."""

    log: list[str]
    failing: tuple[str, ...] = ()

    def __init__(self, spec: Spec, folder: Path, cache: Path) -> None:
        self.spec, config = spec, json.loads((Path(spec.folder) / "config.json").read_text())
        self.masks = config.get("n_masks", 0)
        self.name = f"{self.masks}{'-fp8' * (spec.engine['quantization'] == 'fp8')}"
        self.is_started = False
        self.log.append(f"start {self.name}")

    def ask(self) -> None:
        self.log.append(f"measure {self.name}")

    def answer(self, seconds: float) -> dict[str, Any]:
        if self.name in self.failing:
            raise EngineError("the engine ended with 1")
        if not self.is_started:
            self.is_started = True
            return {"start": [5e6], "ones": 0.5}
        if self.spec.profile:
            return {"profile": [{"part": "MGLU", "kernel": "mglu_x", "launches": 1.0, "microseconds": 2.0}]}
        times = [100.0 - self.masks] * self.spec.rounds
        return dict.fromkeys((*(f"decode {n}" for n in self.spec.sequences), "prompts", "mixed"), times)

    def notes(self) -> list[str]:
        return ["Graph capturing finished in 3 secs"]

    def finish(self) -> None:
        self.log.append(f"finish {self.name}")

    def close(self) -> None:
        self.log.append(f"end {self.name}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    monkeypatch.setattr(FakeEngine, "log", found, raising=False)
    monkeypatch.setattr(serve, "Engine", FakeEngine)
    monkeypatch.setattr(
        serve, "write_config", lambda model, variant, folder: write_json(folder, {"n_masks": variant.n_masks})
    )
    return found


def write_json(folder: Path, config: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def session(tmp_path: Path, *more: str) -> Session:
    return Session(serve.parse([*SMALL, "--out", str(tmp_path), "--cache", str(tmp_path / "cache"), *more]))


def test_each_engine_starts_and_measures_before_the_next_one_and_starts_are_interleaved(log, tmp_path):
    rows = session(tmp_path, "--starts", "2").measure()
    assert log[:8] == [f"{word} {name}" for name in "01" for word in ("start", "measure", "finish", "end")]
    assert sorted(log[12::4]) == ["start 0", "start 1", "start 1-fp8"]
    assert len(log) == 24
    decode = [row for row in rows if row.extra["work"] == "decode" and row.variant == "SwiMGLU"]
    assert [(row.case, row.tokens, row.n_masks, row.microseconds) for row in decode] == [
        ("Llama-3.2 1B, decode", 1, 1, 99.0),
        ("Llama-3.2 1B, decode", 8, 1, 99.0),
    ]
    assert decode[0].extra["times"] == [[99.0] * 3] * 2
    assert {row.extra["work"] for row in rows} == {"start", "start_cached", "decode", "prompts", "mixed"}
    assert [repr(row) for row in rows] == [repr(row) for row in read(tmp_path, "serve")]


def test_engines_at_once_take_turns_and_have_no_time_of_their_start(log, tmp_path):
    rows = session(tmp_path, "--starts", "1", "--at-once", "2").measure()
    begun = ["start 0", "start 1", "measure 0", "measure 1", "finish 0", "finish 1", "end 1", "end 0"]
    assert log[:8] == begun
    assert log[8:] == ["start 1-fp8", "measure 1-fp8", "finish 1-fp8", "end 1-fp8"]
    assert [row.variant for row in rows if row.extra["work"] == "start"] == ["SwiMGLU, fp8"]


def test_a_command_resumes_where_another_stopped(log, tmp_path, monkeypatch):
    monkeypatch.setattr(FakeEngine, "failing", ("1",))
    first = session(tmp_path, "--starts", "1")
    first.measure()
    assert first.failed == 1
    monkeypatch.setattr(FakeEngine, "failing", ())
    log.clear()
    rows = session(tmp_path, "--starts", "2", "--resume").measure()
    assert log[:4] == ["start 1", "measure 1", "finish 1", "end 1"]
    assert len(log) == 16
    assert all(len(serve.times_of(row)) == 2 for row in rows if row.extra["work"] == "mixed")
    log.clear()
    assert repr(session(tmp_path, "--starts", "2", "--resume").measure()) == repr(rows)
    assert not log


def test_no_group_begins_that_would_end_too_late(log, tmp_path, monkeypatch, capsys):
    clock = iter(range(0, 10_000, 50))
    monkeypatch.setattr(serve.time, "monotonic", lambda: next(clock))
    session(tmp_path, "--starts", "1", "--seconds", "400").measure()
    assert log == ["start 0", "measure 0", "finish 0", "end 0"]
    assert "left out: Llama-3.2 1B, SwiMGLU, n_m=1, start 1" in capsys.readouterr().out


def test_a_profile_is_a_table_of_kernels(log, tmp_path):
    lines = session(tmp_path, "--profile", "--starts", "1").profile()
    assert [(line["variant"], line["kernel"]) for line in lines] == [
        ("SwiGLU", "mglu_x"),
        ("SwiMGLU", "mglu_x"),
        ("SwiMGLU, fp8", "mglu_x"),
    ]
    assert (tmp_path / "serve_profile.csv").read_text().count("mglu_x") == 3


def test_a_start_adds_its_times_to_the_median() -> None:
    start = Start(MODELS["mixtral"], VARIANTS["swiglu"])
    rows = merged([], start, {"decode 8": [1.0, 9.0], "prompts": [5.0]})
    rows = merged(rows, start, {"decode 8": [2.0, 3.0]})
    assert [(row.case, row.tokens, row.microseconds) for row in rows] == [
        ("Mixtral 8x7B, decode", 8, 2.5),
        ("Mixtral 8x7B, prompts", 8192, 5.0),
    ]
    assert rows[0].shape == (14336, 4096)
    assert not start.is_in(rows, [8])
    assert start.is_in(merged(rows, start, {"mixed": [7.0]}), [8])


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_configuration_is_one_that_vllm_and_transformers_read(model: str, variant: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write_config(MODELS[model], VARIANTS[variant], tmp_path)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert config.num_hidden_layers == (MODELS[model].layers or config.num_hidden_layers)
    assert config.hidden_size == MODELS[model].shape[1]
    assert getattr(config, "n_masks", 0) == VARIANTS[variant].n_masks
    assert config.architectures == [("MGLU" if VARIANTS[variant].n_masks else "") + MODELS[model].architecture]
    if VARIANTS[variant].weight_format != "dense":
        from mglu_ops.transformers.quantization import stored_weights

        assert stored_weights(config).formats_of("model.layers.0.mlp.mglu") == (
            "fp8_row",
            VARIANTS[variant].activation_format,
        )
        assert hasattr(config, "quantization_config") == (VARIANTS[variant].quantization is None)


# --- In the process of an engine --------------------------------------------------------------------------------------


class FakeLLM:
    """vLLM's `LLM`, which generates as many tokens as each request asks for."""

    def __init__(self, folder: str, **options: Any) -> None:
        self.options, self.calls, self.llm_engine = options, [], SimpleNamespace(step=lambda: [])

    def apply_model(self, function: Any) -> list[Any]:
        return [function(nn.Module())]

    def generate(self, prompts: list[Any], sampling: list[Any], use_tqdm: bool) -> list[Any]:
        self.calls.append((len(prompts), [one.max_tokens for one in sampling]))
        for _ in range(max(one.max_tokens for one in sampling)):
            self.llm_engine.step()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(range(one.max_tokens)))]) for one in sampling]


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("vllm")
    module.LLM, module.SamplingParams = FakeLLM, lambda **options: SimpleNamespace(**options)
    monkeypatch.setitem(sys.modules, "vllm", module)


@pytest.mark.usefixtures("vllm")
def test_a_process_answers_each_line_of_its_input(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = Spec(str(tmp_path), {"dtype": "bfloat16"}, [1, 8], 2, str(tmp_path / "answers"))
    spec.save(tmp_path / "spec")
    monkeypatch.setattr(sys, "argv", ["engine", str(tmp_path / "spec")])
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n\n"))
    engine.main()
    started, *measured = map(json.loads, (tmp_path / "answers").read_text().splitlines())
    assert set(started) == {"start", "ones"}
    assert [set(one) for one in measured] == [{"decode 1", "decode 8", "prompts", "mixed"}] * 2
    assert {name: len(times) for name, times in measured[0].items()} == {
        "decode 1": 2,
        "decode 8": 2,
        "prompts": 6,
        "mixed": 2,
    }


@pytest.mark.usefixtures("vllm")
def test_the_time_of_a_step_leaves_out_prompts_and_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    llm, clock, quarter = FakeLLM(""), SimpleNamespace(now=0.0), engine.NEW_TOKENS // 4
    warm_up, prompts, end = [1.0] * 4, [9.0] * quarter, [0.5] * quarter
    steps = iter([*warm_up, *prompts, *[3.0] * (quarter + 2), *[70.0] * (quarter - 2), *end])

    def step() -> None:
        clock.now += next(steps)

    llm.llm_engine.step = step
    monkeypatch.setattr(engine.time, "perf_counter", lambda: clock.now)
    assert engine.time_decoding(llm, 2, 1) == [3e6]
    assert llm.calls == [(2, [n] * 2) for n in (4, engine.NEW_TOKENS)]
    assert llm.llm_engine.step is step


@pytest.mark.usefixtures("vllm")
def test_only_one_token_is_an_error() -> None:
    llm: Any = FakeLLM("")
    llm.generate = lambda prompts, sampling, use_tqdm: [
        SimpleNamespace(outputs=[SimpleNamespace(token_ids=[0] * one.max_tokens)]) for one in sampling
    ]
    with pytest.raises(ValueError, match=r"got only the token \{0\}, as from logits that are NaN"):
        engine.time_decoding(llm, 2, 1)


def layer(weight_format: str, *leading: int) -> nn.Module:
    """A module with the attributes of the plugin's layers, as vLLM leaves them with dummy weights."""
    chosen, module = get_format(weight_format), nn.Module()
    module.in_features, module.weight_format = 64, weight_format
    module.packed_masks = nn.Parameter(torch.zeros(*leading, 32, 8, 2, dtype=torch.uint8), requires_grad=False)
    dtype = chosen.dtype or torch.bfloat16
    module.weight = nn.Parameter(torch.zeros(*leading, 32, 64 // chosen.packed, dtype=dtype), requires_grad=False)
    module.weight_scale = None
    if chosen.scale_dtype is not None:
        scale = torch.full((*leading, *chosen.scale_shape(32, 64)), -1e-3, dtype=chosen.scale_dtype)
        module.weight_scale = nn.Parameter(scale, requires_grad=False)
    return module


@pytest.mark.parametrize("weight_format", ["dense", "fp8_row", "int4_group"])
@pytest.mark.parametrize("leading", [(), (3,)])
def test_dummy_weights_become_random_masks_and_usual_weights(weight_format: str, leading: tuple[int, ...]) -> None:
    module, norm = layer(weight_format, *leading), nn.LayerNorm(8)
    nn.init.constant_(norm.weight, 1e-3)
    assert 0.4 < fill(nn.ModuleDict({"mglu": module, "input_layernorm": norm})) < 0.6
    assert len(module.packed_masks.unique()) > 200
    assert torch.equal(norm.weight, torch.ones(8))
    if weight_format != "dense":
        chosen = get_format(weight_format)
        one, scale = (t[-1] if leading else t for t in (module.weight, module.weight_scale))
        weight = chosen.dequantize(one, scale, torch.float32)
        assert 0.9e-3 < weight.abs().max() < 1.1e-3
        assert len(weight.unique()) > 15


def event(name: str, start: float, microseconds: float, category: str = "kernel") -> dict[str, Any]:
    return {"name": name, "ts": start, "dur": microseconds, "cat": category}


def test_a_trace_is_summed_up_by_kernel_and_what_is_left_of_a_step() -> None:
    events = [
        *(event(f"execute_context_0(0)_generation_1({n})", n, 1.0, "user_annotation") for n in range(2)),
        event("execute_context_1(16)_generation_0(0)", 0, 1.0, "user_annotation"),
        event("execute_context_0(0)_generation_0(0)", 0, 1.0, "user_annotation"),
        event("execute_context_0(0)_generation_1(1)", 0, 1.0, "gpu_user_annotation"),
        event("nvjet_sm90_hsh_64x8", 100.0, 10.0),
        event("mglu_decode_mma", 108.0, 6.0),  # overlaps the one before
        event("nvjet_sm90_hsh_64x8", 120.0, 10.0),
        event("Memcpy DtoD", 130.0, 2.0, "gpu_memcpy"),
        event("a call on the host", 0.0, 500.0, "cpu_op"),
    ]
    assert [tuple(line.values()) for line in profiled(events, 20.0)] == [
        ("gaps", "", 0.0, 20.0 - 13.0),
        ("products", "nvjet_sm90_hsh_64x8", 1.0, 10.0),
        ("MGLU", "mglu_decode_mma", 0.5, 3.0),
        ("copies", "Memcpy DtoD", 0.5, 1.0),
    ]
    with pytest.raises(ValueError, match="got 0 steps"):
        profiled(events[2:], 20.0)


STUB = """
import time
from types import SimpleNamespace
import torch

def SamplingParams(**options):
    return SimpleNamespace(**options)

class LLM:
    def __init__(self, folder, hangs):
        time.sleep(1000 * hangs)
        self.llm_engine = SimpleNamespace(step=lambda: [])

    def apply_model(self, function):
        return [function(torch.nn.Module())]

    def generate(self, prompts, sampling, use_tqdm):
        for _ in range(max(one.max_tokens for one in sampling)):
            self.llm_engine.step()
        return [SimpleNamespace(outputs=[SimpleNamespace(token_ids=range(one.max_tokens))]) for one in sampling]
"""


@pytest.mark.parametrize("hangs", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_process_answers_or_is_ended(hangs: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The real process, with a module in place of vLLM."""
    (tmp_path / "vllm.py").write_text(STUB)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), *sys.path]))
    monkeypatch.setattr(serve, "GRACE", 0.2 if hangs else 60.0)
    spec = Spec("", {"hangs": hangs}, [2], 1, str(tmp_path / "answers"))
    started = serve.Engine(spec, tmp_path, tmp_path / "cache")
    try:
        if hangs:
            with pytest.raises(EngineError, match="gave no answer in 0 s"):
                started.answer(0.1)
        else:
            assert set(started.answer(120)) == {"start", "ones"}
            for _ in range(2):
                started.ask()
                assert set(started.answer(120)) == {"decode 2", "prompts", "mixed"}
    finally:
        started.close()
    assert started.process.returncode == (-9 if hangs else 0)


@pytest.mark.long
def test_an_engine_that_ends_is_reported_with_its_log(tmp_path: Path) -> None:
    """The real process, which cannot start: there is no vLLM here, or no model in the folder."""
    spec = Spec(str(tmp_path / "none"), {}, [1], 1, str(tmp_path / "answers"))
    started = serve.Engine(spec, tmp_path, tmp_path / "cache")
    try:
        with pytest.raises(EngineError, match=r"the engine ended with 1\n(.|\n)*Error"):
            started.answer(120)
        started.ask()
    finally:
        started.close()


# --- Suite and table --------------------------------------------------------------------------------------------------


def test_the_suite_needs_vllm_and_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert suites.SUITES["serve"].on_gpu
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(suites, "version", lambda name: "not installed" if name == "vllm" else "1")
    with pytest.raises(suites.SuiteError, match="serve needs vllm: pip install vllm"):
        suites.select(["serve"])
    assert "serve" not in suites.select([])
    assert "serve is left out: it needs vllm" in capsys.readouterr().out


def test_the_table_of_a_profile_has_the_step_that_the_layers_let_expect(tmp_path: Path) -> None:
    lines = [
        {"model": "tiny", "variant": variant, "n_masks": n_masks, "sequences": 8, "part": part, "microseconds": time}
        for variant, n_masks, parts in (
            ("SwiGLU", 0, {"gaps": 5.0, "products": 100.0, "attention": 20.0}),
            ("SwiMGLU", 1, {"gaps": 9.0, "MGLU": 30.0, "products": 40.0, "attention": 21.0}),
        )
        for part, time in parts.items()
    ]
    serve.write_table(lines, serve.environment("by the profiler"), tmp_path, "serve_profile")
    _, _, *table = pages.TABLES["serve_profile"](tmp_path).splitlines()
    assert table == [
        "| tiny, 8 sequences | SwiGLU | SwiMGLU, n_m = 1 |",
        "| --- | --- | --- |",
        "| gaps | 5 | 9 |",
        "| products | 100 | 40 |",
        "| attention | 20 | 21 |",
        "| MGLU | 0 | 30 |",
        "| **a step** | 125 | 100 |",
        "| expected step | 125 | 95 |",
    ]


def test_the_table_compares_with_swiglu_in_the_same_precision(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"serve\.csv: no such result"):
        pages.TABLES["serve"](tmp_path)
    model, rows = (
        Model("tiny", "llama", "Llama", {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}),
        [],
    )
    for name, decode, prompts in (
        ("swiglu", 4000.0, 20e3),
        ("mglu-1", 2000.0, 25e3),
        ("swiglu-fp8", 3000.0, 15e3),
        ("mglu-1-fp8_row", 2500.0, 15e3),
    ):
        answer = {"start": [50e6], "decode 1": [decode], "decode 8": [2 * decode], "prompts": [prompts]}
        rows = merged(rows, Start(model, VARIANTS[name]), answer)
    serve.write(rows, tmp_path, "serve", "by the clock")
    _, title, *lines = pages.TABLES["serve"](tmp_path).splitlines()
    assert lines == [
        "| tiny | SwiGLU | SwiMGLU, n_m = 1 | SwiGLU, fp8 | SwiMGLU, fp8_row, n_m = 1 |",
        "| --- | --- | --- | --- | --- |",
        "| first start, s | 50 | 50 | 50 | 50 |",
        "| 1 sequence, tokens a second | 250 | 500, 2.00x | 333 | 400, 1.20x |",
        "| 8 sequences, tokens a second | 1000 | 2000, 2.00x | 1333 | 1600, 1.20x |",
        "| 8 prompts of 1024, ms | 20.0 | 25.0, **0.80x, slower** | 15.0 | 15.0, 1.00x |",
    ]
    assert frames.load(tmp_path, "serve").work.tolist()[0] == "start"
    assert isinstance(rows[0], Row)
    assert not title


def test_the_table_marks_ratios_that_are_smaller_than_the_spread_of_their_times(tmp_path: Path) -> None:
    times = {"swiglu": [1000.0, 1010.0, 1020.0], "mglu-1": [990.0, 1000.0, 1010.0], "mglu-4": [900.0, 905.0, 910.0]}
    rows: list[Row] = []
    for name, ours in times.items():
        rows = merged(rows, Start(MODELS["llama-8b"], VARIANTS[name]), {"decode 1": ours})
    serve.write(rows, tmp_path, "serve", "by the clock")
    assert "| 990 | 1000, 1.01x ± 0.03 | 1105, 1.12x |" in pages.TABLES["serve"](tmp_path)
