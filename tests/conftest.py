"""Settings of all tests: Hypothesis profiles, one thread, poisoned memory, the `gpu` marker, and counts of skips."""

from __future__ import annotations

import gc
import logging
import os
from collections import Counter
from collections.abc import Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # for poisoned memory, which needs deterministic cuBLAS
# An export spends most of its time compiling the C++ code around the kernels. In tests, that code need not be fast.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")
# Without this, Inductor starts a pool of processes that import torch, while pytest already keeps the cores busy.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import pytest
import torch
from hypothesis import HealthCheck, settings

# Without this, pytest does not show the values of an assertion that fails in a helper.
pytest.register_assert_rewrite("tests.support")

# The profile `ci` runs the same examples every time. `quick` (for `make test`) runs fewer of them, and `explore`
# (with HYPOTHESIS_PROFILE=explore) searches for new ones. A test that needs more or fewer examples uses
# `layers.examples`.
_CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40, suppress_health_check=_CHECKS)
settings.register_profile("quick", settings.get_profile("ci"), max_examples=10)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)
# pytest adds handlers to loggers that do not propagate. Torch would then format every graph as text for this logger.
logging.getLogger("torch.__trace").propagate = True
gc.disable()  # until all tests are collected, because the collector would trace millions of objects again and again


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked or torch.cuda.is_available():
        return
    if os.environ.get("MGLU_REQUIRE_GPU") == "1":
        raise pytest.UsageError(
            f"MGLU_REQUIRE_GPU=1, and {len(marked)} tests need a CUDA GPU, but torch {torch.__version__} sees none"
        )
    for item in marked:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU, and torch sees none"))


def pytest_runtest_setup(item: pytest.Item) -> None:
    alone = item.get_closest_marker("alone")
    gibibytes = 0 if alone is None else alone.kwargs.get("gibibytes", 0)
    if gibibytes and torch.cuda.mem_get_info()[0] < gibibytes * 2**30:
        pytest.skip(f"needs {gibibytes} GiB of device memory")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print how many tests were skipped for each reason, and the markers that deselected tests."""
    reasons = Counter(_skip_reason(report) for report in terminalreporter.stats.get("skipped", []))
    if reasons:
        terminalreporter.section("skipped tests")
        for reason, count in reasons.most_common():
            terminalreporter.write_line(f"{count:5} {reason}")
    if config.option.markexpr:
        terminalreporter.write_line(f"Only tests with -m '{config.option.markexpr}' were run.")


def _skip_reason(report: pytest.TestReport | pytest.CollectReport) -> str:
    """The reason for a skip. A report holds it as (path, line, "Skipped: reason")."""
    text = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    return text.removeprefix("Skipped: ")


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """Fill results of `torch.empty` with NaN or the largest integer, to expose elements that no kernel writes."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@pytest.fixture(autouse=True)
def _released_device_memory() -> Iterator[None]:
    """Free the GPU's cached memory after each test, because other processes run tests on the GPU too."""
    yield
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def pytest_collection_finish() -> None:
    """Exempt all present objects from garbage collection: those of imports and of collected tests live to the end."""
    gc.freeze()
    gc.enable()
