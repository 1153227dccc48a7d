"""Settings of every test: hypothesis profiles, one thread, poisoned memory, and what `gpu` means."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic cuBLAS, which the poisoning asks for
# The C++ around a package's kernels need not be fast in a test; most of an export's time is its compilation.
os.environ.setdefault("AOT_INDUCTOR_COMPILE_WRAPPER_OPT_LEVEL", "O0")

import pytest
import torch
from hypothesis import HealthCheck, settings

# `ci` gives the same examples on every run; `explore` looks for new ones (HYPOTHESIS_PROFILE=explore).
_CHECKS = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile("ci", derandomize=True, deadline=None, max_examples=40, suppress_health_check=_CHECKS)
settings.register_profile("explore", deadline=None, max_examples=1000, suppress_health_check=_CHECKS)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

torch.set_num_threads(1)


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


@pytest.fixture(autouse=True)
def _poisoned_memory() -> Iterator[None]:
    """New floating tensors start as NaN and integers as their largest value: an output that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    assert torch.utils.deterministic.fill_uninitialized_memory
    yield
    torch.use_deterministic_algorithms(before[0], warn_only=before[1])
