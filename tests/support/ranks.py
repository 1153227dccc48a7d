"""Runs a check in new processes that form a process group."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

RANKS = 2
SECONDS = 120

GPU_BACKENDS = [
    pytest.param(
        "nccl",
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < RANKS or not dist.is_nccl_available(), reason="needs two CUDA GPUs and NCCL"
        ),
    ),
    "gloo",
]
"""Backends for ranks with tensors on GPUs: NCCL needs a GPU for each rank; with gloo, the ranks share one."""


def run_on_ranks(
    check: Callable[..., None], folder: Path, *args: Any, backend: str = "gloo", ranks: int = RANKS
) -> None:
    """Call `check(rank, *args)`, a module-level function, in `ranks` processes; fail if it raises in any of them.

    The processes form a group through a file in `folder`. With `nccl`, each rank has the GPU of its number; with
    `gloo`, "cuda" is the first GPU on every rank.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["mglu_ops.nn"])  # imported once, and not in each process
    results = context.Queue()
    store = str(folder / "store")
    workers = [
        context.Process(target=_run_rank, args=(rank, ranks, store, backend, check, args, results), daemon=True)
        for rank in range(ranks)
    ]
    for worker in workers:
        worker.start()
    try:
        reports = dict(results.get(timeout=SECONDS) for _ in workers)
    except Empty:
        pytest.fail(f"a rank gave no result in {SECONDS} s")
    finally:
        for worker in workers:
            worker.join(10)
            if worker.is_alive():
                worker.kill()
    failures = [f"rank {rank}:\n{report}" for rank, report in sorted(reports.items()) if report]
    assert not failures, "\n".join(failures)


def _run_rank(
    rank: int, ranks: int, store: str, backend: str, check: Callable[..., None], args: tuple[Any, ...], results: Any
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    device = torch.device("cuda", rank) if backend == "nccl" else None
    if device is not None:
        torch.cuda.set_device(device)
    try:
        dist.init_process_group(
            backend,
            init_method=f"file://{store}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=60),
            device_id=device,
        )
        check(rank, *args)
        results.put((rank, ""))
        dist.destroy_process_group()
    except BaseException:
        results.put((rank, traceback.format_exc()))
        raise
