"""The timing of the GPU benchmarks, on a fake GPU that only has a clock, and the results of the measured variants."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import decode, timing, vllm_kernels
from benchmarks.ceiling import GEMM
from benchmarks.layers import Layers, masks_of
from benchmarks.timing import Captured, Timing, Variant, time_graphs, under_load


class Clock:
    """The clock of both the GPU and the host. Only the fake graphs and calls below advance it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        event = SimpleNamespace(at=0.0)
        event.record = lambda: setattr(event, "at", self.seconds)
        event.elapsed_time = lambda end: (end.at - event.at) * 1000
        return event


class Graph:
    """A graph whose replay takes a fixed time."""

    def __init__(self, clock: Clock, seconds: float, effect: Callable[[], object] = lambda: None) -> None:
        self.clock, self.seconds, self.effect = clock, seconds, effect
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1
        self.clock.seconds += self.seconds
        self.effect()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock.seconds))
    return clock


def timers(clock: Clock, *seconds: float, layers: int = 4) -> list[Captured]:
    nothing = Variant("nothing", lambda _: None, layers)
    return [Captured(nothing, Graph(clock, one), [None] * layers) for one in seconds]  # type: ignore[arg-type]


def test_times_are_microseconds_per_layer(clock: Clock) -> None:
    fast, slow = timers(clock, 0.001, 0.003)
    time_graphs([fast, slow], rounds=12)
    assert fast.times == pytest.approx([250.0] * 12)
    assert slow.times == pytest.approx([750.0] * 12)


def test_long_rounds_are_fewer_but_not_too_few(clock: Clock) -> None:
    (long,) = timers(clock, 10.0)
    time_graphs([long], rounds=25)
    assert len(long.times) == timing.MIN_ROUNDS
    (settled,) = timers(clock, 10.0)
    time_graphs([settled], rounds=25, settle_seconds=20.0)
    assert len(settled.times) == timing.MIN_SETTLED_ROUNDS


def test_graphs_are_replayed_until_clocks_settle_and_timed_for_as_long(clock: Clock) -> None:
    (timer,) = timers(clock, 0.001)
    time_graphs([timer], rounds=1, settle_seconds=0.05)
    assert timer.warmup_replays == timer.timed_replays == 50
    before = 2 * (1 + 2)  # replays in the two short rounds that estimate how long a replay takes
    rounds = 1 + len(timer.times)
    assert timer.graph.replays == before + rounds * 100  # type: ignore[attr-defined]


class Calls:
    """Functions that each take some seconds on a clock, and the order in which they were called."""

    def __init__(self, clock: Clock, **seconds: float) -> None:
        self.clock, self.order = clock, ""
        self.calls = {name: partial(self.call, name, one) for name, one in seconds.items()}

    def call(self, name: str, seconds: float) -> None:
        self.order += name
        self.clock.seconds += seconds


def test_calls_take_turns_under_their_own_load(clock: Clock) -> None:
    calls = Calls(clock, a=0.01, b=0.1)
    times = under_load(calls.calls, timing.gpu_microseconds, rounds=6, seconds=0.015)
    assert times == {"a": pytest.approx([10_000.0] * 6), "b": pytest.approx([100_000.0] * 6)}
    turns = {"a": "aa" + "aa", "b": "b" + "b"}  # calls before the clock starts, and as many timed calls
    before = "aaa" + "bbb"  # calls that estimate how many calls a turn takes
    assert calls.order.startswith(before)
    rounds = calls.order.removeprefix(before).replace(turns["a"], "A").replace(turns["b"], "B")
    assert len(rounds) == 12
    assert {rounds[i : i + 2] for i in range(0, 12, 2)} == {"AB", "BA"}


def test_long_rounds_under_load_are_fewer_but_not_too_few(clock: Clock) -> None:
    calls = Calls(clock, a=1.0)
    for rounds, most in ((25, timing.MIN_SETTLED_ROUNDS + 1), (3, 3)):
        (times,) = under_load(calls.calls, timing.gpu_microseconds, rounds).values()
        assert len(times) == most


@pytest.mark.parametrize(("factor", "is_right"), [(1.0, True), (1.5, False), (float("nan"), False)])
def test_a_variant_whose_replay_writes_a_wrong_result_has_no_time(clock: Clock, factor: float, is_right: bool) -> None:
    outputs: list[Tensor | None] = [torch.ones(8), torch.ones(8)]

    def rewrite() -> None:
        for output in outputs:
            assert output is not None
            output.fill_(factor)

    variant = Variant("some", lambda i: outputs[i], 2, lambda i: torch.ones(8, dtype=torch.float64))
    captured = Captured(variant, Graph(clock, 0.001, rewrite), outputs)  # type: ignore[arg-type]
    captured.check(torch.float32)
    time_graphs([captured], rounds=9)
    assert (captured.timing().microseconds == pytest.approx(500.0)) == is_right


def test_a_variant_that_writes_nothing_is_wrong(clock: Clock) -> None:
    """The outputs are right before the replay. The check must notice that the replay did not write them."""
    outputs: list[Tensor | None] = [torch.ones(8)]
    variant = Variant("some", lambda i: outputs[i], 1, lambda i: torch.ones(8, dtype=torch.float64))
    captured = Captured(variant, Graph(clock, 0.001), outputs)  # type: ignore[arg-type]
    captured.check(torch.float32)
    assert captured.error == float("inf")


class CpuLayers:
    """Small layers on a CPU, with the attributes of `Layers` that `benchmarks.decode` uses."""

    def __init__(self, tokens: int, n_masks: int) -> None:
        torch.manual_seed(0)
        self.n_masks, self.count = n_masks, 4
        self.x = torch.randn(tokens, 16)
        self.weights = [torch.randn(8, 16) for _ in range(self.count)]
        self.packed = [torch.randint(0, 256, (8, 2, n_masks), dtype=torch.uint8) for _ in range(self.count)]

    def oracle(self, i: int) -> Tensor:
        x, weight = self.x.double(), self.weights[i].double()
        masks = [masks_of(self.packed[i], m) for m in range(self.n_masks)]
        return torch.stack([F.silu(x @ (weight * m).T) * (x @ (weight * ~m).T) for m in masks]).sum(0)

    def swiglu_oracle(self, i: int) -> Tensor:
        gate, up = (self.weights[2 * i + j].double() for j in (0, 1))
        return F.silu(self.x.double() @ gate.T) * (self.x.double() @ up.T)


def test_baselines_compute_their_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    layers: Any = CpuLayers(tokens=3, n_masks=2)
    variants = [*decode.naive_variants(layers, tuned=True), *decode.swiglu_variants(layers, tuned=True)]
    for variant in variants:
        assert variant.oracle is not None
        for i in range(variant.layers):
            output = variant.run(i)
            assert output is not None
            torch.testing.assert_close(output.double(), variant.oracle(i), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("tokens", [1, 16, 128])
def test_rows_of_a_layer(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Layers on a CPU, and times from a table. Of few tokens the GEMM is measured alone; of one it is not."""
    times = {"read ceiling": 8.0, "mglu": 10.0, "naive": 40.0, "SwiGLU": 20.0, GEMM: 4096.0}
    together: list[tuple[list[str], float]] = []

    def measure(variants: list[Variant], dtype: torch.dtype, rounds: int, settle: float = 0.0) -> dict[Variant, Timing]:
        together.append(([one.name for one in variants], settle))
        return {one: Timing(times[next(name for name in times if one.name.startswith(name))], 0.5) for one in variants}

    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(decode, "measure", measure)
    monkeypatch.setattr(decode, "reader", lambda weights, masks: lambda i: None)
    monkeypatch.setattr(decode, "gemm", lambda weights: Variant(GEMM, lambda i: weights[i], 2))
    monkeypatch.setattr(decode, "Layers", partial(Layers, device="cpu", count=4))
    monkeypatch.setattr(vllm_kernels, "why_missing", lambda: "vLLM is not installed")
    (problem,) = decode.Sweep((tokens,), (1,), baselines=decode.BASELINES, shapes={(64, 32): "decode"}).problems()
    rows = {row.variant: row for row in decode.bench(problem, rounds=7)}
    assert rows.pop("SwiGLU vLLM").extra == {"left_out": "vLLM is not installed"}
    first, *others = together
    assert [name for name in rows if name not in (GEMM, "floor")] == [name for name in first[0] if name != GEMM]
    assert (GEMM in first[0], bool(first[1]), others) == (
        tokens == 128,
        tokens == 128,
        [([GEMM], 0.0)] * (tokens == 16),
    )
    assert {(row.case, row.tokens, row.shape, row.n_masks, row.dtype) for row in rows.values()} == {
        ("decode", tokens, (64, 32), 1, "bfloat16")
    }
    assert rows["mglu cpu"].extra == {"chosen": True}
    assert rows["mglu composite"].fraction_of_ceiling == 0.8
    assert rows["floor"].microseconds == (128.0 if tokens == 128 else 16.0 if tokens == 16 else 8.0)
    assert list(rows)[-1] == "floor"
    assert (GEMM in rows) == (tokens > 1)
