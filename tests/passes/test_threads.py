"""Fusion in several threads, in asyncio tasks and in forked processes."""

from __future__ import annotations

import asyncio
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounter
from torch._inductor.compile_fx import compile_fx
from torch.fx import Graph

import mglu_ops
from compile_passes.fusion import FusionError, FusionPass
from compile_passes.report import FusionReport
from mglu_ops.nn import NaiveMGLU
from tests.support.budgets import relative_error
from tests.support.programs.compiled import SAME, Recorder, interpreted, layer, real_mask, run, trace

pytestmark = pytest.mark.usefixtures("unchanged_inductor")

THREADS = 4


def in_threads(work: Callable[[int], Any], count: int = THREADS) -> None:
    """Call `work(0)`, `work(1)`, ... in threads, and raise the first error."""
    with ThreadPoolExecutor(count) as pool:
        list(pool.map(work, range(count)))


def in_a_thread(work: Callable[[], Any]) -> None:
    in_threads(lambda _: work(), count=1)


def in_main(work: Callable[[], Any]) -> None:
    work()


def with_masks(n_masks: int) -> NaiveMGLU:
    return NaiveMGLU(16, 12, n_masks=n_masks)


def masks_of(report: FusionReport) -> list[int]:
    return sorted(site.n_masks for site in report.fused)


# --- enable_fusion and disable_fusion --------------------------------------------------------------------------------


@pytest.mark.parametrize("enable_in_thread", [False, True])
def test_enabled_fusion_holds_in_every_thread(enable_in_thread: bool) -> None:
    """Fusion and its options also hold in threads other than the one that enables fusion."""
    of_options, of_compilation = (in_a_thread, in_main) if enable_in_thread else (in_main, in_a_thread)
    of_options(lambda: mglu_ops.enable_fusion(strict=True))
    of_compilation(lambda: trace(layer()))
    with pytest.raises(Exception, match=r"FusionError: strict fusion: .*proves to be binary"):
        of_compilation(lambda: trace(real_mask()))
    report = mglu_ops.fusion_report()
    assert [len(report.fused), len(report.missed), report.graphs] == [1, 1, 2]
    of_options(mglu_ops.disable_fusion)
    of_compilation(lambda: trace(layer()))
    assert report.graphs == 2


def test_the_pass_of_another_library_in_one_thread() -> None:
    """The fusion pass also runs in a thread that gives Inductor another pass.

    Before torch 2.13, such a setting of Inductor applies to the whole process.
    """
    theirs = Recorder()
    report = mglu_ops.enable_fusion(strict=True)

    def work() -> None:
        with torch._inductor.config.patch({"pre_grad_custom_pass": theirs}):
            trace(layer())

    in_a_thread(work)
    trace(layer())
    assert (len(theirs.seen), len(report.fused)) == (1, 2)


@pytest.mark.long
def test_enabling_and_disabling_at_once() -> None:
    """Threads enable and disable fusion in any order. No order breaks a compilation, and the last call holds."""

    def work(i: int) -> None:
        for _ in range(10):
            mglu_ops.enable_fusion(strict=bool(i % 2))
            trace(layer())
            mglu_ops.disable_fusion()

    in_threads(work, count=3)
    before = mglu_ops.fusion_report().graphs
    trace(layer())
    assert mglu_ops.fusion_report().graphs == before
    mglu_ops.enable_fusion()
    trace(layer())
    assert mglu_ops.fusion_report().graphs == before + 1


@pytest.mark.long
def test_enabling_while_other_threads_run_compiled_code() -> None:
    """`enable_fusion` makes the other threads compile their code again.

    `torch._dynamo.reset` would crash the process after a few seconds.
    """
    model, x = layer(), torch.randn(3, 16)
    compiled = torch.compile(model, backend="eager")
    expected, running = model(x), [True, True]

    def work(i: int) -> None:
        if i == 2:
            while any(running):
                mglu_ops.disable_fusion()
                mglu_ops.enable_fusion()
            return
        try:
            for _ in range(40):
                assert relative_error(compiled(x), expected) <= SAME
        finally:
            running[i] = False

    in_threads(work, count=3)


def test_enabling_again_keeps_compiled_code() -> None:
    """A call with unchanged options keeps compiled code, so each worker may call `enable_fusion` before it starts."""
    compiled, x = torch.compile(layer(), backend=(counter := CompileCounter())), torch.randn(3, 16)
    for strict, count in ((False, 1), (False, 1), (True, 2), (True, 2)):
        in_a_thread(lambda strict=strict: mglu_ops.enable_fusion(strict=strict))
        compiled(x)
        assert counter.frame_count == count


def test_enabling_restarts_the_count_of_compilations() -> None:
    """Dynamo compiles a function at most eight times. Compilations whose code was dropped do not count."""
    limit = torch._dynamo.config.recompile_limit
    compiled = torch.compile(lambda x, n: x.sin() + n, backend=(counter := CompileCounter()), dynamic=False)
    for n in range(limit + 2):
        compiled(torch.ones(3), n)
    assert counter.frame_count == limit
    for n in range(1, limit + 2):
        mglu_ops.enable_fusion(strict=bool(n % 2))
        compiled(torch.ones(3), n)
        assert counter.frame_count == limit + n


# --- Compilations at once --------------------------------------------------------------------------------------------


@pytest.mark.long
def test_compilations_by_inductor_in_many_threads() -> None:
    """Each thread compiles with Inductor, and runs training and inference."""
    report = mglu_ops.enable_fusion(strict=True)

    def work(i: int) -> None:
        model, x = with_masks(i + 1), torch.randn(3, 16)
        result, expected = torch.compile(model)(x), model(x)
        assert relative_error(result, expected) <= SAME
        for p in model.parameters():
            got, wanted = (torch.autograd.grad(y.sum(), p, retain_graph=True)[0] for y in (result, expected))
            assert relative_error(got, wanted) <= SAME
        run(model)

    in_threads(work, count=3)
    assert masks_of(report) == [1, 1, 2, 2, 3, 3]


def test_blocks_of_threads_have_reports_and_options_of_their_own() -> None:
    """The blocks of all threads are open at once. Before torch 2.13, these threads share Inductor's settings.

    Inductor is called without Dynamo, which would compile in one thread at a time.
    """
    graphs: list[tuple[torch.fx.GraphModule, list[Tensor]]] = []

    def capture(gm: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append((gm, inputs))
        return gm.forward

    for i in range(THREADS):
        for model in (with_masks(i + 1), real_mask()):
            torch._dynamo.reset()
            torch.compile(model, backend=capture)(torch.randn(3, 16))
    ready, reports = threading.Barrier(THREADS), [FusionReport() for _ in range(THREADS)]

    def work(i: int) -> None:
        with torch.no_grad(), mglu_ops.fusion(assume_binary=i % 2 == 0) as reports[i]:
            ready.wait()
            for graph in graphs[2 * i : 2 * i + 2]:
                compile_fx(*graph, inner_compile=interpreted)
            ready.wait()

    mglu_ops.enable_fusion()
    in_threads(work)
    for i, report in enumerate(reports):
        assert (report.graphs, len(report.missed)) == (2, i % 2)
        assert masks_of(report) == ([1, i + 1] if i % 2 == 0 else [i + 1])
    assert mglu_ops.fusion_report().graphs == 0


def test_one_pass_in_many_threads() -> None:
    """Many threads run one pass, and each layer is reported once."""
    graphs: list[Graph] = []

    def capture(gm: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(gm.graph)
        return gm.forward

    for _ in range(THREADS):
        torch._dynamo.reset()
        torch.compile(layer(), backend=capture)(torch.randn(3, 16))
    report = FusionReport()
    fusion_pass = FusionPass(report)
    in_threads(lambda i: fusion_pass(graphs[i]))
    assert (len(report.fused), report.graphs) == (THREADS, THREADS)


# --- Blocks ----------------------------------------------------------------------------------------------------------


def test_a_block_does_not_hold_in_another_thread_and_says_so() -> None:
    def compile_in_a_block() -> None:
        with mglu_ops.fusion():
            trace(layer())
            in_a_thread(lambda: trace(layer()))

    with pytest.warns(UserWarning, match="1 graph compiled in the block, and 1 graph without fusion in other threads"):
        compile_in_a_block()
    message = r"0 graphs compiled in the block, and 1 graph without fusion in other threads.*enable_fusion\(\)"
    with pytest.raises(FusionError, match=message), mglu_ops.fusion(strict=True):
        in_a_thread(lambda: trace(layer()))


def test_enabled_fusion_holds_in_threads_beside_a_block() -> None:
    whole = mglu_ops.enable_fusion()
    with warnings.catch_warnings(), mglu_ops.fusion() as block:
        warnings.simplefilter("error")
        in_a_thread(lambda: trace(with_masks(3)))
        trace(with_masks(2))
    assert (masks_of(whole), masks_of(block)) == ([3], [2])


def test_blocks_of_asyncio_tasks_do_not_mix() -> None:
    """Two tasks run in one thread. The block of a task also holds in a worker thread that the task starts."""

    async def task(n_masks: int) -> FusionReport:
        with mglu_ops.fusion(strict=True) as report:
            await asyncio.sleep(0)
            trace(with_masks(n_masks))
            await asyncio.to_thread(trace, with_masks(n_masks + 2))
        return report

    async def tasks() -> list[FusionReport]:
        return await asyncio.gather(task(1), task(2))

    assert [masks_of(report) for report in asyncio.run(tasks())] == [[1, 3], [2, 4]]


# --- Other processes -------------------------------------------------------------------------------------------------


def test_a_forked_process_inherits_the_options() -> None:
    mglu_ops.enable_fusion(strict=True)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            try:
                torch.set_num_threads(1)
                trace(layer())
                os._exit(0 if len(mglu_ops.fusion_report().fused) == 1 else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0

    fork()
    in_a_thread(fork)
