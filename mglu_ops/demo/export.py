"""Exporting the frozen model as an AOTInductor package, and loading it back."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.export import Dim

from ..accuracy import ERROR_BUDGET, relative_error
from ..packaging.cpp_runtime import has_own_libstdcxx
from .errors import require
from .settings import Settings
from .text import Corpus
from .train import Forward

LOAD = "import sys, torch, mglu_ops; torch._inductor.aoti_load_package(sys.argv[1])"


def export(model: nn.Module, settings: Settings, folder: str) -> Forward:
    """Export `model` for any batch and any number of tokens up to the context into `folder`, and load the package.

    Raises:
        Disagreement: the package holds a copy of libstdc++, or does not load in a fresh process.
    """
    sizes = settings.sizes
    example = torch.zeros(2, sizes.context, dtype=torch.int64, device=settings.device)
    dynamic = {"tokens": {0: Dim("batch", min=1, max=1024), 1: Dim("tokens", min=1, max=sizes.context)}}
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # raised by the way that torch saves a package
        program = torch.export.export(model, (example,), dynamic_shapes=dynamic)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(folder) / "model.pt2"))
    require(
        not has_own_libstdcxx(Path(path)),
        "the C++ compiler links libstdc++ statically, and Python cannot load such a package; set CXX to another one",
    )
    _load_elsewhere(path)
    return torch._inductor.aoti_load_package(path)


def _load_elsewhere(path: str) -> None:
    """Load the package in another process first, so that a crash of the loader is an error here."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", LOAD, path]
    child = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    last = child.stderr.strip().splitlines()[-1:] or ["no message"]
    why = f"signal {-child.returncode}" if child.returncode < 0 else last[0]
    require(child.returncode == 0, f"the exported package does not load in a fresh process: {why}")


def package_folder() -> tempfile.TemporaryDirectory[str]:
    """A temporary folder for the package; files that the loader still holds open do not prevent its removal."""
    return tempfile.TemporaryDirectory(prefix="mglu-demo-", ignore_cleanup_errors=True)


@torch.no_grad()
def check_package(package: Forward, model: nn.Module, corpus: Corpus, settings: Settings) -> float:
    """Return the largest relative error of the package's logits against the model's, over several shapes.

    Raises:
        Disagreement: it is above the budget.
    """
    sizes, largest = settings.sizes, 0.0
    for batch, tokens in ((1, 1), (1, sizes.context), (2, sizes.context // 2 + 1), (3, sizes.context)):
        inputs = corpus.held_out.repeat(1 + batch * tokens // len(corpus.held_out))[: batch * tokens]
        inputs = inputs.view(batch, tokens).to(settings.device)
        error = relative_error(package(inputs), model(inputs))
        budget = ERROR_BUDGET[settings.dtype]
        require(
            error <= budget,
            f"the exported package differs from the frozen model by {error:.2e} for {batch} x {tokens} tokens; "
            f"the budget is {budget:.0e}",
        )
        largest = max(largest, error)
    return largest
